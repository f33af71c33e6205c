"""Rows of counts of what is alive at a place: the fullest of them is what walking the place's list finds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from plait.core.step.memory.activations import Activations
from plait.core.step.memory.live import (
    BACKWARD,
    FORWARD,
    HELD,
    HELD_LAYER,
    KEPT,
    KEPT_LAYER,
    PLAIN_BACKWARD,
    PLAIN_FORWARD,
    PLAIN_HELD_LAYER,
    PLAIN_KEPT_LAYER,
    SPLIT,
    STREAM,
    TYPES,
    WEIGHT,
    WIDTH,
    Layers,
    Pipe,
    enough,
    fullest_places,
    moments,
    num_stages,
    stages_of,
)
from plait.core.step.memory.pipeline_memory import PlaceWalk
from plait.core.step.schedule import with_transfers
from plait.core.step.schedules import Shape, generate

NAMES = ("gpipe", "1f1b", "eager-1f1b", "slack-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


def sizes(chance: random.Random) -> np.ndarray:
    """Bytes of each column, a peak larger than what lasts."""
    found = np.array([chance.randrange(1, 50) for _ in range(WIDTH)])
    for peak in (FORWARD, BACKWARD, WEIGHT, PLAIN_FORWARD, PLAIN_BACKWARD):
        found[peak : peak + len(TYPES)] += 100
    return found


def of_stage(size: np.ndarray, kind: int, again: int, plain: int, *, split: bool) -> Activations:
    """A stage with so many layers that are recomputed and that are not. Its backward goes through those that
    are not first; where it is split, what a layer keeps becomes what it holds."""
    kept, held = again * size[KEPT_LAYER], again * size[HELD_LAYER]
    plain_kept, plain_held = plain * size[PLAIN_KEPT_LAYER], plain * size[PLAIN_HELD_LAYER]
    forward = size[(PLAIN_FORWARD if plain else FORWARD) + kind]
    corners = list[Any]()
    if plain:
        corners.append(size[PLAIN_BACKWARD + kind] + kept + plain_kept)
    if again or not plain:
        left = plain_held if split else 0
        corners += [size[BACKWARD + kind] + kept + left, *([size[BACKWARD + kind] + held + left] if split else [])]
        if not plain:
            corners.append(size[BACKWARD + kind] + kept)
    elif split:
        corners.append(size[PLAIN_BACKWARD + kind] + plain_kept)
    return Activations(
        int(size[KEPT + kind] + kept + plain_kept), int(forward + kept + plain_kept), int(max(corners)),
        int(size[HELD + kind] + held + plain_held), int(size[WEIGHT + kind] + held + plain_held),
    )  # fmt: skip


def walked(name: str, pp: int, virtual: int, count: int, place: int, size: np.ndarray, layers: Layers) -> int:
    """The most of a whole step, by its list."""
    slack = (2,) * (pp - 1) if name == "slack-1f1b" else ()
    chunks = num_stages(name, pp, virtual) // pp
    schedule = with_transfers(generate(name, Shape(ranks=pp, micro_batches=count, chunks=chunks, slack=slack)))
    stages, last = stages_of(name, pp, virtual, place), pp * chunks - 1
    assert sorted(schedule.stages_of(place)) == list(stages)
    ends = {(True, True): "whole", (True, False): "embeds", (False, True): "heads", (False, False): "middle"}
    each = {
        stage: of_stage(size, TYPES.index(ends[stage == 0, stage == last]), *layers[at], split=name in SPLIT)
        for at, stage in enumerate(stages)
    }
    tiles = dict.fromkeys(schedule.edges, int(size[STREAM]))
    return PlaceWalk(schedule, each, tiles).run(schedule.ranks[place]).bytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", ["again", "mixed", "plain"])
def test_the_fullest_row_is_what_a_walk_finds(name: str, pp: int, kinds: str) -> None:
    chance = random.Random(f"{name} {pp} {kinds}")
    virtual = 2 if name in ("interleaved", "zb-v") else 1
    if pp == 1 and name != "1f1b":
        return  # a pipeline of one place has no other
    for count in (1, pp, 3 * pp):
        for place in range(pp):
            stages = len(stages_of(name, pp, virtual, place))
            layers: Layers = tuple(
                (chance.randrange(1, 4) * (kinds != "plain"), chance.randrange(1, 4) * (kinds != "again"))
                for _ in range(stages)
            )
            (rows,) = moments([(Pipe(name, pp, virtual, count, place), layers)])
            for _ in range(3):
                size = sizes(chance)
                most = walked(name, pp, virtual, count, place, size, layers)
                # A receive that another overtakes is posted with it, which a place alone does not know.
                overtaken = size[STREAM] if name == "zb-v" and count > 2 else 0
                assert most - overtaken <= (rows @ size).max() <= most


@pytest.mark.parametrize("name", NAMES)
def test_more_micro_batches_than_enough_change_nothing(name: str) -> None:
    """But for GPipe, where all are kept, and for an interleaved schedule whose last round is not whole."""
    chance, pp, virtual = random.Random(name), 3, 2 if name in ("interleaved", "zb-v") else 1
    layers: Layers = ((1, 0),) * virtual
    for many in (40, 42):
        least = enough(name, pp, many)
        for place in range(pp):
            few, all_ = moments([(Pipe(name, pp, virtual, count, place), layers) for count in (least, many)])
            for _ in range(5):
                size = sizes(chance)
                assert (few @ size).max() == (all_ @ size).max()


@pytest.mark.parametrize(
    ("name", "pp", "count", "told"),
    [
        ("1f1b", 4, 100, 16), ("1f1b", 4, 16, 16), ("1f1b", 4, 15, 15), ("zb-v", 4, 100, 16), ("zb-v", 4, 15, 15),
        ("zb-v", 8, 100, 32), ("zb-h2", 8, 100, 24), ("gpipe", 4, 100, 100), ("interleaved", 4, 100, 12),
        ("interleaved", 4, 8, 8), ("interleaved", 4, 101, 101),
    ],
)  # fmt: skip
def test_how_many_are_enough(name: str, pp: int, count: int, told: int) -> None:
    assert enough(name, pp, count) == told


def test_stages_of_a_place() -> None:
    assert [num_stages(name, 4, 3) for name in NAMES] == [4, 4, 4, 4, 12, 4, 4, 8]
    assert stages_of("interleaved", 4, 3, 1) == (1, 5, 9)
    assert stages_of("zb-v", 4, 2, 1) == (1, 6)
    assert stages_of("1f1b", 4, 3, 1) == (1,)


@pytest.mark.parametrize(
    ("name", "pp", "told"),
    [("1f1b", 1, (0,)), ("1f1b", 2, (0, 1)), ("1f1b", 5, (0, 1, 4)), ("zb-h1", 5, (0, 1, 3, 4)), ("zb-v", 2, (0, 1)),
     ("zb-h2", 1, (0,)), ("interleaved", 5, (0, 1, 4)), ("zb-v", 5, (0, 1, 3, 4))],
)  # fmt: skip
def test_places_that_can_be_the_fullest(name: str, pp: int, told: tuple[int, ...]) -> None:
    assert fullest_places(name, pp) == told


def test_rows_that_others_exceed_are_left_out() -> None:
    (rows,) = moments([(Pipe("1f1b", 4, 1, 12, 1), ((2, 0),))])
    for at, one in enumerate(rows):
        assert not any((other >= one).all() for number, other in enumerate(rows) if number != at)
    again = moments([(Pipe("1f1b", 4, 1, 12, 1), ((2, 0),)), (Pipe("1f1b", 4, 1, 12, 1), ((3, 0),))])
    assert np.array_equal(again[0], rows) and not np.array_equal(again[1], rows)

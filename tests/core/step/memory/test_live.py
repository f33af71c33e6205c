"""Rows of counts of what is alive at a pp rank: the fullest of them is what walking the pp rank's list
finds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from plait.core.step.columns.points import schedule_properties, stages_of
from plait.core.step.memory.activations import Activations
from plait.core.step.memory.pipeline_memory import TYPES, WIDTH, Layers, Pipe, PipelineMemoryTrace, SizeRow, moments
from plait.core.step.schedule import with_transfers
from plait.core.step.schedules import GENERATORS, generate, planned_shape


def sizes(chance: random.Random) -> np.ndarray:
    """Bytes of each column, a peak larger than what lasts."""
    found = np.array([chance.randrange(1, 50) for _ in range(WIDTH)])
    row = SizeRow.of(found)
    for peak in (row.forward, row.backward, row.weight, row.plain_forward, row.plain_backward):
        peak += 100
    return found


def of_stage(size: np.ndarray, kind: int, again: int, plain: int, *, split: bool) -> Activations:
    """A stage with so many layers that are recomputed and that are not. Its backward goes through
    those that are not first; where it is split, what a layer keeps becomes what it holds."""
    row = SizeRow.of(size)
    kept, held = again * row.kept_layer[0], again * row.held_layer[0]
    plain_kept, plain_held = plain * row.plain_kept_layer[0], plain * row.plain_held_layer[0]
    forward = (row.plain_forward if plain else row.forward)[kind]
    backward, plain_backward = row.backward[kind], row.plain_backward[kind]
    corners = list[Any]()
    if plain:
        corners.append(plain_backward + kept + plain_kept)
    if again or not plain:
        left = plain_held if split else 0
        corners += [backward + kept + left, *([backward + held + left] if split else [])]
        if not plain:
            corners.append(backward + kept)
    elif split:
        corners.append(plain_backward + plain_kept)
    return Activations(
        int(row.kept[kind] + kept + plain_kept), int(forward + kept + plain_kept), int(max(corners)),
        int(row.held[kind] + held + plain_held), int(row.weight[kind] + held + plain_held),
    )  # fmt: skip


def walked(name: str, pp: int, virtual: int, count: int, pp_rank: int, size: np.ndarray, layers: Layers) -> int:
    """The most of a whole step, by its list."""
    schedule = with_transfers(generate(name, planned_shape(name, pp, count, virtual)))
    stages, last = stages_of(name, pp, virtual, pp_rank), schedule.num_stages - 1
    assert sorted(schedule.stages_of(pp_rank)) == list(stages)
    ends = {(True, True): "whole", (True, False): "embeds", (False, True): "heads", (False, False): "middle"}
    each = {
        stage: of_stage(
            size, TYPES.index(ends[stage == 0, stage == last]), *layers[at], split=schedule_properties(name).splits
        )
        for at, stage in enumerate(stages)
    }
    tiles = dict.fromkeys(schedule.edges, int(SizeRow.of(size).stream[0]))
    return PipelineMemoryTrace(schedule, each, tiles).run(schedule.ranks[pp_rank]).bytes


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", ["again", "mixed", "plain"])
def test_the_fullest_row_is_what_a_walk_finds(name: str, pp: int, kinds: str) -> None:
    chance = random.Random(f"{name} {pp} {kinds}")
    virtual = planned_shape(name, pp, 1, 2).chunks
    if pp == 1 and name != "1f1b":
        return  # a pipeline of one pp rank has no other
    for count in (1, pp, 3 * pp):
        for pp_rank in range(pp):
            stages = len(stages_of(name, pp, virtual, pp_rank))
            layers: Layers = tuple(
                (chance.randrange(1, 4) * (kinds != "plain"), chance.randrange(1, 4) * (kinds != "again"))
                for _ in range(stages)
            )
            (rows,) = moments([(Pipe(name, pp, virtual, count, pp_rank), layers)])
            for _ in range(3):
                size = sizes(chance)
                most = walked(name, pp, virtual, count, pp_rank, size, layers)
                # A receive that another overtakes is posted with it, which a pp rank alone does not know.
                overtaken = SizeRow.of(size).stream[0] if name == "zb-v" and count > 2 else 0
                assert most - overtaken <= (rows @ size).max() <= most


@pytest.mark.parametrize("name", GENERATORS)
def test_more_micro_batches_than_enough_change_nothing(name: str) -> None:
    """But for GPipe, where all are kept, and for an interleaved schedule whose last round is not
    whole."""
    chance, pp, virtual = random.Random(name), 3, planned_shape(name, 3, 1, 2).chunks
    layers: Layers = ((1, 0),) * virtual
    for many in (40, 42):
        least = schedule_properties(name).enough(pp, many)
        for pp_rank in range(pp):
            few, all_ = moments([(Pipe(name, pp, virtual, count, pp_rank), layers) for count in (least, many)])
            for _ in range(5):
                size = sizes(chance)
                assert (few @ size).max() == (all_ @ size).max()


def test_rows_that_others_exceed_are_left_out() -> None:
    (rows,) = moments([(Pipe("1f1b", 4, 1, 12, 1), ((2, 0),))])
    for at, one in enumerate(rows):
        assert not any((other >= one).all() for number, other in enumerate(rows) if number != at)
    again = moments([(Pipe("1f1b", 4, 1, 12, 1), ((2, 0),)), (Pipe("1f1b", 4, 1, 12, 1), ((3, 0),))])
    assert np.array_equal(again[0], rows) and not np.array_equal(again[1], rows)

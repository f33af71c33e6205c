"""Which groups are measured, of which sizes, and when a curve ends; by a clock that the test
sets."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.core.cluster.profile import Group
from plait.train.comm.wire import NullWire
from plait.train.profile import collectives as module
from plait.train.profile.collectives import (
    ALWAYS,
    GROWTH,
    LARGEST,
    SMALLEST,
    EqualGroups,
    layouts,
    measure_collectives,
    operation,
    transfer,
)
from plait.train.tune.timing import FEWEST, MedianSeconds
from tests.dist.equality import DEVICE


@pytest.mark.parametrize(
    ("world", "per_node", "pod", "found"),
    [
        (1, 1, 0, []),
        (2, 2, 0, [(2, 1)]),
        (2, 1, 0, [(2, 1)]),
        (4, 4, 0, [(2, 1), (4, 1)]),
        (8, 4, 0, [(2, 1), (4, 1), (2, 4), (8, 1)]),
        (6, 2, 0, [(2, 1), (3, 2), (6, 1)]),
        (6, 4, 0, [(2, 1), (6, 1)]),  # fours do not cover six
        (16, 1, 0, [(2, 1), (4, 1), (16, 1)]),
        (12, 3, 0, [(3, 1), (2, 3), (4, 3), (12, 1)]),
        (8, 2, 2, [(2, 1), (2, 2), (4, 1), (2, 4), (8, 1)]),
        (16, 4, 1, [(2, 1), (4, 1), (2, 4), (4, 4), (16, 1)]),
    ],
)
def test_pairs_fours_and_all_inside_and_across(
    world: int, per_node: int, pod: int, found: list[tuple[int, int]]
) -> None:
    every = layouts(world, per_node, pod)
    shapes = [(len(one.groups[0]), one.groups[0][1] - one.groups[0][0]) for one in every]
    assert shapes == found
    for one in every:
        assert sorted(rank for group in one.groups for rank in group) == list(range(world))
        assert one.group == Group.of(one.groups[0], per_node, nodes_per_minipod=pod, at_once=len(one.groups))


@pytest.mark.parametrize(("nbytes", "size", "whole"), [(100, 4, 128), (4096, 4, 4096), (4, 2, 16), (1, 1, 4)])
def test_every_rank_has_as_much_of_a_collective(nbytes: int, size: int, whole: int) -> None:
    """A part of the whole for each, of which each gets as many again; four bytes a number."""
    given = dict[str, Any]()

    class Wired(NullWire):
        def start(self, kind: Any, result: torch.Tensor, source: torch.Tensor) -> Any:
            given[kind] = (result.nbytes, source.nbytes, result is source)
            return super().start("all_reduce", result, source)

    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        one = operation(kind, Wired(size), nbytes, torch.float32, DEVICE)
        assert one.bytes == whole and one.start is not None
        one.run()
        one.start().wait()
    part = whole // size
    assert given == {
        "all_reduce": (whole, whole, True), "all_gather": (whole, part, False),
        "reduce_scatter": (part, whole, False), "all_to_all": (part, part, False),
    }  # fmt: skip


def test_sends_and_broadcasts_go_from_the_first_of_each_group_in_pieces() -> None:
    groups, size = ((0, 1), (2, 3)), 3 * module.CHUNK + 1
    plan = transfer("send", groups, size, 4, 2)
    assert plan.source.ranks == (0, 2) and plan.destination.ranks == (1, 3)
    assert [(step.way, step.chunks) for step in plan.steps] == [("send_recv", 4)] * 2
    assert plan.hosts == (0, 0, 1, 1) and plan.shape == (2, size)
    wide = transfer("broadcast", ((0, 1, 2, 3),), module.BROADCAST_CHUNK, 4, 4)
    assert wide.destination.ranks == (1, 2, 3)
    assert [(step.way, step.chunks) for step in wide.steps] == [("broadcast", 1)]


class Lines:
    """Of one layout of pairs and one of fours; what is asked is noted."""

    device = DEVICE

    def __init__(self) -> None:
        self.layouts = [
            EqualGroups(((0, 1), (2, 3)), Group.of((0, 1), 4, at_once=2)),
            EqualGroups(((0, 1, 2, 3),), Group.of((0, 1, 2, 3), 4)),
        ]
        self.asked = list[tuple[str, int, int]]()

    def operation(self, kind: str, at: int, size: int, dtype: torch.dtype) -> Any:
        self.asked.append((kind, at, size))
        return SimpleNamespace(bytes=size + 1, run=lambda: None)


class Counting:
    """A clock. left: of which nothing goes; takes: seconds of a byte."""

    def __init__(self, left: float, takes: float) -> None:
        self.seconds, self.takes, self.budgets = left, takes, list[float]()
        self.lines: Any = None

    def left(self) -> float:
        return self.seconds

    def sample(self, run: Any, budget: float, *, together: bool) -> MedianSeconds:
        assert together
        self.budgets.append(budget)
        return MedianSeconds(self.takes * self.lines.asked[-1][2], 0.25)


def curves_of(left: float, takes: float, kinds: Any = ("all_reduce", "send")) -> tuple[Any, Lines, Counting, list[str]]:
    lines, clock, said = Lines(), Counting(left, takes), list[str]()
    clock.lines = lines
    found = measure_collectives(lines, clock, torch.float32, said.append, kinds=kinds)  # type: ignore[arg-type]
    return found, lines, clock, said


def test_sizes_grow_and_sends_are_of_pairs() -> None:
    found, lines, clock, said = curves_of(1e9, 1e-9)
    assert [(one.kind, one.group.ranks) for one in found] == [("all_reduce", 2), ("send", 2), ("all_reduce", 4)]
    sizes = [point.bytes - 1 for point in found[0].points]
    assert sizes[0] == SMALLEST and sizes[-1] == LARGEST["gloo"]
    assert all(later == GROWTH * earlier for earlier, later in pairwise(sizes))
    assert found[0].points[0].spread == 0.25 and found[0].points[0].seconds == pytest.approx(SMALLEST * 1e-9)
    assert said[0] == f"all_reduce of {SMALLEST >> 10} KiB, {found[0].group}"
    assert clock.budgets[0] == pytest.approx(2e9 / (3 * len(sizes)))
    assert clock.budgets[-1] == pytest.approx(2e9 / 3)
    assert len(lines.asked) == 3 * len(sizes)


def test_without_time_every_curve_has_its_first_sizes() -> None:
    found, *_ = curves_of(0.0, 1.0)
    assert [len(one.points) for one in found] == [ALWAYS] * 3


@pytest.mark.parametrize(
    ("kinds", "share", "more", "points"),
    [
        (("all_reduce",), 0.4, 0.99, [4, 4]),  # twice its part: of ten that are waiting each has a fifth
        (("all_reduce",), 0.4, 1.01, [3, 4]),
        (("all_reduce", "all_gather"), 0.25, 0.99, [4, 4, 4, 5]),  # or a quarter of all that is left
        (("all_reduce", "all_gather"), 0.25, 1.01, [3, 4, 4, 4]),
    ],
)
def test_a_curve_ends_where_its_next_size_would_take_too_long(
    kinds: Any, share: float, more: float, points: list[int]
) -> None:
    """The fewest samples, and one before; what one curve leaves is the others'."""
    assert ALWAYS == 3 and LARGEST["gloo"] == SMALLEST * GROWTH**7
    takes = more * share * 1000.0 / (FEWEST + 1) / (SMALLEST * GROWTH**ALWAYS)
    found, *_ = curves_of(1000.0, takes, kinds=kinds)
    assert [len(one.points) for one in found] == points

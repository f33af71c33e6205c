"""What files of nccl-tests have in common: groups of ranks, samples, rows that contradict themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import Group
from plait.plan import nccl_runs
from plait.plan.nccl_runs import Runs, contradicts, group_of, points_of, positive

EIGHT = Group(ranks=8, per_node=8, nodes=1)


def runs() -> Runs:
    return Runs("all.log", PassedOver())


def ranks(*hosts: str) -> dict[int, str]:
    return dict(enumerate(hosts))


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({0: ranks("a", "a")}, (Group(ranks=2, per_node=2, nodes=1), 2)),
        ({0: ranks("a", "a", "b", "b")}, (Group(ranks=4, per_node=2, nodes=2), 2)),
        ({0: ranks("a", "b"), 1: ranks("a", "b")}, (Group(ranks=2, per_node=1, nodes=2, stride=2, at_once=2), 2)),
        ({0: ranks("a", "a"), 1: ranks("a", "a")}, (Group(ranks=2, per_node=2, nodes=1, at_once=2), 4)),
        ({0: ranks("a", "a", "b")}, (Group(ranks=3, per_node=2, nodes=2), 2)),
        ({0: {1: "b", 0: "a", 2: "b", 3: "a"}}, (Group(ranks=4, per_node=2, nodes=2), 2)),
    ],
)
def test_a_group_is_what_its_ranks_say(named: dict[int, dict[int, str]], told: tuple[Group, int]) -> None:
    assert group_of(named, runs(), "line 3") == told


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({}, "line 3: 0 ranks are named above this table"),
        ({0: {0: "a"}}, "line 3: 1 ranks are named"),
        ({0: {0: "a", 2: "a"}}, "line 3: of 3 ranks above this table rank 1 is missing"),
        ({0: {1: "a", 2: "a"}}, "of 3 ranks above this table rank 0 is missing"),
    ],
)
def test_ranks_that_are_missing_are_named(named: dict[int, dict[int, str]], says: str) -> None:
    with pytest.raises(JobError, match=says):
        group_of(named, runs(), "line 3")


@pytest.mark.parametrize(
    ("size", "seconds", "bandwidth", "told"),
    [
        (10**9, 1.0, 1.0, False), (10**9, 1.0, 0.26, False), (10**9, 1.0, 0.24, True), (10**9, 1.0, 3.9, False),
        (10**9, 1.0, 4.1, True), (8, 1e-5, 0.0, False), (8, 1e-5, 0.01, False), (10**9, 1.0, -1.0, False),
        (10**9, 1.0, math.inf, False), (10**9, 1.0, math.nan, False), (10**9, 1.0, "N/A", False),
        (10**9, 1.0, None, False), (10**9, 1.0, 10**400, False), (10**9, 1.0, "5.0", True),
        (1, 1.0, 0.009, False), (1, 1.0, 0.011, True),
    ],
)  # fmt: skip
def test_a_bandwidth_that_is_not_its_rows(size: int, seconds: float, bandwidth: Any, told: bool) -> None:
    assert contradicts(size, seconds, bandwidth) is told
    one = runs()
    assert one.contradict(size, seconds, bandwidth, "line 7") is told
    assert bool(one.over.lines()) is told


def test_points_are_medians_by_size() -> None:
    found = points_of({4096: [3.0, 1.0, 2.0], 8: [5.0]})
    assert [(one.bytes, one.seconds) for one in found] == [(8, 5.0), (4096, 2.0)]


def test_samples_of_an_all_to_all_are_one_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_runs, "MOST_ROWS", 3)
    one = runs()
    one.add("alltoall", (EIGHT, 8), 100, 1.0)
    one.add("all_reduce", (EIGHT, 8), 100, 2.0)
    one.add("all_reduce", (EIGHT, 4), 100, 3.0)
    assert one.samples == {
        ("alltoall", EIGHT, 8): {800: [1.0]}, ("all_reduce", EIGHT, 8): {100: [2.0]},
        ("all_reduce", EIGHT, 4): {100: [3.0]},
    }  # fmt: skip
    with pytest.raises(JobError, match="has more than 3 rows"):
        one.add("all_reduce", (EIGHT, 8), 100, 1.0)


def test_the_profile_is_of_the_largest_job() -> None:
    one, pair = runs(), Group(ranks=2, per_node=1, nodes=2, at_once=8)
    one.add("all_reduce", (EIGHT, 8), 100, 2.0)
    one.add("sendrecv", (pair, 4), 100, 1.0)
    found = one.profile("2026-01-01", "nccl-tests")
    assert (found.machine.ranks, found.machine.ranks_per_node, found.machine.device) == (16, 8, "")
    assert [(curve.kind, curve.group, curve.source) for curve in found.collectives] == [
        ("all_reduce", EIGHT, "nccl-tests, all.log"), ("send", pair, "nccl-tests, all.log"),
    ]  # fmt: skip
    one.device = "X1"
    assert one.profile("2026-01-01", "nccl-tests").machine.device == "X1"


def test_a_file_of_nothing_says_what_it_passed_over() -> None:
    one = runs()
    with pytest.raises(JobError, match=r"has no table of rccl-tests that can be used\."):
        one.profile("2026-01-01", "rccl-tests")
    assert one.passes_over("hypercube", 8, "line 2")
    assert one.passes_over("all_reduce", 0, "line 3")
    assert not one.passes_over("all_reduce", 8, "line 4")
    with pytest.raises(JobError, match=r"that can be used: .*hypercube_perf.*0 bytes"):
        one.profile("2026-01-01", "rccl-tests")
    with pytest.raises(JobError, match="nothing says which collective this is"):
        one.passes_over("", 8, "line 5")


@pytest.mark.parametrize("told", [1, 0.5, 1e300])
def test_numbers_above_nothing(told: Any) -> None:
    assert positive(told, "f", "k") == told


@pytest.mark.parametrize("told", [0, -1, True, "1", None, math.nan, math.inf, 10**400])
def test_other_numbers_are_refused(told: Any) -> None:
    with pytest.raises(JobError, match="a number above 0"):
        positive(told, "f", "k")

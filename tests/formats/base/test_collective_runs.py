"""What files of nccl-tests have in common: groups of ranks, samples, rows that contradict
themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.profile import Group
from plait.formats.base import collective_runs as nccl_runs
from plait.formats.base.collective_runs import Runs, contradicts, group_of, points_of, positive

EIGHT = Group(ranks=8, per_node=8, nodes=1)


def runs() -> Runs:
    return Runs("all.log", IgnoredInput())


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (["aa"], (Group(ranks=2, per_node=2, nodes=1), 2)),
        (["aabb"], (Group(ranks=4, per_node=2, nodes=2), 2)),
        (["abab"], (Group(ranks=4, per_node=2, nodes=2), 2)),
        (["ab", "ab"], (Group(ranks=2, per_node=1, nodes=2, stride=2, at_once=2), 2)),
        (["aa", "aa"], (Group(ranks=2, per_node=2, nodes=1, at_once=2), 4)),
        (["aab"], (Group(ranks=3, per_node=2, nodes=2), 2)),
        ([], "line 3: 0 ranks are named above this table"),
        (["a"], "line 3: 1 ranks are named"),
        (["a-a"], "line 3: of 3 ranks above this table rank 1 is missing"),
        (["-aa"], "of 3 ranks above this table rank 0 is missing"),
    ],
)
def test_a_group_is_what_its_ranks_say(hosts: list[str], told: tuple[Group, int] | str) -> None:
    """Hosts by rank, those of a group together; a dash is a rank that is missing."""
    one = runs()
    for group, each in enumerate(hosts):
        for rank in reversed(range(len(each))):
            if each[rank] != "-":
                one.rank(group, rank, each[rank], "", "line 1")
    if isinstance(told, str):
        with pytest.raises(JobError, match=told):
            group_of(one, "line 3")
    else:
        assert group_of(one, "line 3") == told


def test_no_more_ranks_than_any_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_runs, "MOST_RANKS", 4)
    one = runs()
    one.rank(0, 0, "a", "", "line 1", 4)
    with pytest.raises(JobError, match="line 2: more than 4 ranks"):
        one.rank(0, 4, "a", "", "line 2")


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


def test_points_are_medians_by_size() -> None:
    found = points_of({4096: [3.0, 1.0, 2.0], 8: [5.0]})
    assert [(one.bytes, one.seconds) for one in found] == [(8, 5.0), (4096, 2.0)]


def test_the_profile_is_of_the_largest_job() -> None:
    one, pair = runs(), Group(ranks=2, per_node=1, nodes=2, at_once=8)
    one.add("alltoall", (EIGHT, 8), 100, 2.0)
    one.add("sendrecv", (pair, 4), 100, 1.0)
    found = one.profile("2026-01-01", "nccl-tests")
    assert (found.machine.ranks, found.machine.ranks_per_node, found.machine.device) == (16, 8, "")
    assert [(curve.kind, curve.group, curve.source) for curve in found.collectives] == [
        ("all_to_all", EIGHT, "nccl-tests, all.log"), ("send", pair, "nccl-tests, all.log"),
    ]  # fmt: skip
    assert found.collectives[0].points[0].bytes == 800  # the size of an all-to-all is one rank's


def test_a_file_of_nothing_says_what_it_passed_over() -> None:
    one = runs()
    with pytest.raises(JobError, match=r"has no table of rccl-tests that can be used\."):
        one.profile("2026-01-01", "rccl-tests")
    assert one.ignores("hypercube", 8, "line 2")
    assert one.ignores("all_reduce", 0, "line 3")
    assert not one.ignores("all_reduce", 8, "line 4")
    with pytest.raises(JobError, match=r"that can be used: .*hypercube_perf.*0 bytes"):
        one.profile("2026-01-01", "rccl-tests")
    with pytest.raises(JobError, match="the collective is unknown"):
        one.ignores("", 8, "line 5")


@pytest.mark.parametrize("told", [1, 0.5, 1e300])
def test_numbers_above_nothing(told: Any) -> None:
    assert positive(told, "f", "k") == told


@pytest.mark.parametrize("told", [0, -1, True, "1", None, math.nan, math.inf, 10**400])
def test_other_numbers_are_refused(told: Any) -> None:
    with pytest.raises(JobError, match="a number above 0"):
        positive(told, "f", "k")

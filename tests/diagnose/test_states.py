"""States of ranks on the grid, and what small files tell."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.parallel.layout import Layout
from plait.core.record.ring import RingGroup
from plait.core.runs.evidence import Call, CallSequence, Evidence, Verdict, WaitLink
from plait.diagnose.measured.recording import grid_of
from plait.diagnose.rank_map import STATES, RankState, edges, rank_states
from plait.diagnose.series import attempts_of, memory_of, series_of
from plait.diagnose.verdicts.hang import localise
from plait.diagnose.verdicts.stragglers import Straggler
from tests.support.recordings.planted import PLANTERS
from tests.support.recordings.standstill import DEADLINE, draw_job

GRID = grid_of(Layout.of(dp=4))


def test_states_of_a_hang() -> None:
    evidence = [
        Evidence(rank=0, thread="waits", state="runs", doing="reduces"),
        Evidence(rank=1, state="stopped", host="b"),
        Evidence(rank=2, state="ended", status=1, error="RuntimeError: <b>no</b>"),
    ]
    verdict = Verdict(
        cause="stopped",
        why="rank 1 is stopped",
        ranks=(1,),
        chain=(WaitLink(ranks=(0,), call="all-reduce 3", on=(1,)),),
    )
    found = rank_states(GRID, hang=(verdict, evidence))
    assert [one.state for one in found] == ["waits", "named", "crashed", "unknown"]
    assert (found[0].waits_for, found[1].host, found[2].error) == ((1,), "b", "RuntimeError: <b>no</b>")
    assert edges(found) == [(0, 1)]
    assert edges(found, most=0) == []


@pytest.mark.parametrize("seed", range(8))
def test_of_planted_faults_the_culprit_stands_out(seed: int) -> None:
    draw = random.Random(seed)
    case = None
    while case is None:
        case = draw.choice(list(PLANTERS.values()))(draw, draw_job(draw))
    verdict = localise(case.evidence, world=case.world, deadline=DEADLINE)
    found = rank_states(grid_of(Layout.of(dp=case.world)), hang=(verdict, case.evidence))
    assert len(found) == case.world
    assert {one.state for one in found} <= set(STATES)
    assert {one.rank for one in found if one.state == "named"} == (set(verdict.ranks) if verdict.certain else set())
    assert all(0 <= a < case.world and 0 <= b < case.world and a != b for a, b in edges(found))


ANY = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)
)
LINES = st.lists(
    st.dictionaries(st.sampled_from(["step", "loss", "seconds", "memory", "started", "ended", "hosts", "number"]), ANY)
)


@settings(max_examples=15)
@given(lines=LINES)
def test_whatever_stands_in_small_files_is_taken_or_left(lines: list[dict[str, Any]]) -> None:
    for one in (*series_of(lines), *memory_of(lines)):
        assert len(one.steps) == len(one.values) > 0
    assert len(attempts_of(lines, live=False)) == len(lines)
    assert all(isinstance(text, str) for row in attempts_of(lines, live=False) for text in row)


def test_ranks_of_a_run_that_is_over_have_ended() -> None:
    grid = grid_of(Layout.of(pp=2, dp=2))
    assert {one.state for one in rank_states(grid)} == {"runs"}
    assert {one.state for one in rank_states(grid, live=False)} == {"ended"}


# ---- one by one ----


def standing(one: Evidence, *, slow: bool = False, verdict: Verdict | None = None, **more: Any) -> RankState:
    lame = Straggler(
        what="slow host", ranks=(1,), hosts=(), since=0, until=9, effect=1.0, seconds=1.0, z=9.0, recurs=1.0,
        computing=0.0, where="",
    )  # fmt: skip
    told = verdict or Verdict(cause="none", why="")
    return rank_states(GRID, hang=(told, [one]), stragglers=[lame] if slow else [], **more)[1]


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"state": "ended", "status": 0}, "ended"), ({"state": "ended", "status": None}, "ended"),
        ({"state": "ended", "status": 0, "error": "x"}, "crashed"), ({"state": "ended", "status": -9}, "crashed"),
        ({"state": "stopped", "thread": "waits"}, "stopped"), ({"state": "runs", "thread": "silent"}, "silent"),
        ({"state": "runs", "thread": "works"}, "works"), ({"state": "runs", "thread": "waits"}, "waits"),
        ({"state": "runs"}, "runs"), ({}, "unknown"), ({"thread": "waits"}, "waits"),
    ],
)  # fmt: skip
def test_the_state_of_a_rank(more: dict[str, Any], state: str) -> None:
    assert standing(Evidence(rank=1, **more)).state == state
    assert standing(Evidence(rank=1, **more), slow=True).state == ("slow" if state in ("runs", "waits") else state)


def test_a_rank_that_is_one_of_several_suspects_is_not_named() -> None:
    sure = Verdict(cause="stopped", why="", ranks=(1,))
    assert (sure.certain, standing(Evidence(rank=1), verdict=sure).state) == (True, "named")
    unsure = Verdict(cause="unknown", why="", ranks=(1,))
    assert (unsure.certain, standing(Evidence(rank=1), verdict=unsure).state) == (False, "unknown")


def test_what_is_told_of_a_rank() -> None:
    group = RingGroup((0, 1), 0, "tp")
    calls = tuple(
        Call(channel=CallSequence(group), sequence=n,
             verb="all_reduce", dtype="", bytes=0, enqueued=1, ended=2 * (n == 1))
        for n in (1, 2, 3)
    )  # fmt: skip
    found = standing(Evidence(rank=1, calls=calls, stack=("a", "b"), thread="waits"), errors={1: "said"})
    assert (found.doing, found.where, found.error, found.host) == ("all-reduce 2 of tp group 0, 1", "b", "said", "")
    assert found.waits_for == (0,)
    named = standing(Evidence(rank=1, doing="saving", error="own", host="h"), errors={1: "said"})
    assert (named.doing, named.where, named.error, named.host, named.waits_for) == ("saving", "", "own", "h", ())
    grid = grid_of(Layout.of(dp=2), ["a", "b"])
    assert [one.host for one in rank_states(grid, hang=(Verdict(cause="none", why=""), []))] == ["a", "b"]
    quiet = rank_states(grid, errors={1: "ValueError"})
    assert [(one.state, one.host, one.error) for one in quiet] == [("runs", "a", ""), ("crashed", "b", "ValueError")]


def test_the_chain_tells_for_whom_ranks_wait_where_calls_do_not() -> None:
    chain = (WaitLink(ranks=(0, 1), call="x", on=(1, 2)), WaitLink(ranks=(1,), call="y", on=(3,)))
    found = rank_states(GRID, hang=(Verdict(cause="unknown", why="", chain=chain), []))
    assert [one.waits_for for one in found] == [(1, 2), (2,), (), ()]


@pytest.mark.parametrize("last", [1, 3])
def test_calls_tell_for_whom_ranks_wait_up_to_the_last_of_the_grid(last: int) -> None:
    call = Call(
        channel=CallSequence(RingGroup((last - 1, last), 0, "tp")), sequence=1, verb="all_reduce", dtype="", bytes=0,
        enqueued=1, ended=0,
    )  # fmt: skip
    for waiting, on in ((last - 1, last), (last, last - 1)):
        evidence = [Evidence(rank=waiting, calls=(call,), thread="waits")]
        found = rank_states(GRID, hang=(Verdict(cause="unknown", why=""), evidence))
        assert edges(found) == [(waiting, on)]


def test_of_many_lines_those_to_whoever_is_waited_for_most() -> None:
    found = [
        RankState(0, "waits", waits_for=(3, 1)),
        RankState(1, "waits", waits_for=(3,)),
        RankState(2, "waits", waits_for=(1, 3)),
    ]
    assert edges(found) == edges(found, 5) == [(0, 3), (0, 1), (1, 3), (2, 1), (2, 3)]
    assert edges(found, 4) == [(0, 3), (1, 3), (2, 3), (0, 1)]
    assert edges(found, 1) == [(0, 3)]

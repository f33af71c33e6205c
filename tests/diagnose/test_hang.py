"""Who is named when a run hangs: planted faults of every kind, also where evidence is missing; nobody where
nothing hangs."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import DataError
from plait.core.evidence import FILE, Call, Channel, Evidence, Verdict, read_hang, write_hang
from plait.core.ring import RingGroup, signature_of
from plait.diagnose.hang import localise
from tests.diagnose.planted import HEALTHY, PLANTERS, Case, draw_case
from tests.diagnose.standstill import DEADLINE

SECOND = 10**9
TIES = ("There is no majority", "Nothing tells which")
"""How a verdict says that it is one of those it names."""


def judged(case: Case) -> str:
    """``exact``, a ``tie`` that holds the culprit and says that it is one, or ``wrong``."""
    verdict = localise(case.evidence, world=case.world, deadline=DEADLINE)
    assert verdict.why.endswith(".")
    if verdict.cause not in case.causes:
        return "wrong"
    if verdict.cause == "none" or set(verdict.ranks) == case.ranks:
        return "exact" if case.hosts <= set(verdict.hosts) else "wrong"
    tie = any(said in verdict.why for said in TIES)
    return "tie" if case.ranks <= set(verdict.ranks) and tie else "wrong"


@pytest.mark.parametrize("kind", PLANTERS)
def test_a_planted_fault_is_found(kind: str) -> None:
    found = [judged(draw_case(kind, seed)) for seed in range(8)]
    assert "wrong" not in found


@pytest.mark.contract
def test_of_two_thousand_faults_98_in_100_are_found() -> None:
    found: Counter[tuple[str, str]] = Counter()
    kinds = [kind for kind in PLANTERS if kind not in HEALTHY]
    for seed in range(2000 // len(kinds)):
        found.update((kind, judged(draw_case(kind, 1000 + seed))) for kind in kinds)
    right = sum(number for (_, how), number in found.items() if how != "wrong")
    assert right >= 0.98 * found.total(), found


@pytest.mark.contract
def test_no_verdict_on_a_thousand_runs_that_are_well_or_slow() -> None:
    assert {judged(draw_case(kind, 1000 + seed)) for kind in HEALTHY for seed in range(500)} == {"exact"}


# ---- what is said ----


def at(group: RingGroup, sequence: int, *, since: float = 20.0, verb: str = "all_reduce", size: int = 4,
       over: bool = False, ends: tuple[int, int] = (-1, -1)) -> Call:  # fmt: skip
    """A call of a rank whose evidence is of second 100."""
    began, signature = int((100 - since) * SECOND), signature_of(verb, "float32", size)
    return Call(channel=Channel(group, *ends), sequence=sequence, verb=verb, dtype="float32", bytes=size,
                signature=signature, enqueued=began, ended=began + 1 if over else 0)  # fmt: skip


def seen(rank: int, *calls: Call, host: int = 0, **more: object) -> Evidence:
    fields = {"state": "runs", "thread": "waits", "at": 100 * SECOND, "host": f"host {host}", **more}
    return Evidence(rank=rank, calls=calls, **fields)  # type: ignore[arg-type]


DP = RingGroup((0, 1, 2, 3), 0, "dp")


@given(
    still=st.floats(0, 100), longest=st.floats(0, 30), first=st.booleans(), computes=st.booleans(),
    thread=st.sampled_from(["works", "silent"]), deadline=st.floats(1, 20), times=st.floats(1, 5),
)  # fmt: skip
def test_a_busy_rank_is_named_once_it_has_been_at_one_thing_for_longer_than_it_may(
    still: float, longest: float, first: bool, computes: bool, thread: str, deadline: float, times: float
) -> None:
    others = [seen(rank, at(DP, 17, since=99)) for rank in range(3)]
    moved = int((100 - still) * SECOND)
    busy = seen(3, at(DP, 16, over=True), thread=thread, moved=moved or 1, longest=longest, first=first,
                computes=computes)  # fmt: skip
    verdict = localise([*others, busy], world=4, deadline=deadline, first=times * deadline)
    limit = max(deadline, 2 * longest, times * deadline if first or computes else 0)
    if abs(still - limit) > 1e-6:
        assert (verdict.cause, verdict.ranks) == (("host code" if still > limit else "none"), (3,))
        assert ("slow, not stuck" in verdict.why) == (still < limit)


def test_a_stopped_rank_and_who_waits_for_it() -> None:
    others = [seen(rank, at(DP, 17)) for rank in range(3)]
    stopped = seen(3, at(DP, 16, over=True), host=1, state="stopped", thread="unknown")
    verdict = localise([*others, stopped], world=4, deadline=10)
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("stopped", (3,), ("host 1",))
    assert verdict.why == (
        "Rank 3 (host 1) is stopped (SIGSTOP, or a debugger); ranks 0-2 wait for it in all-reduce 17 of dp group 0-3."
    )
    [link] = verdict.chain
    assert (link.ranks, link.on) == ((0, 1, 2), (3,))


@pytest.mark.parametrize("still", [0.06, 9.0, 11.0])
def test_a_rank_that_is_stopped_for_a_moment_is_no_hang(still: float) -> None:
    others = [seen(rank, at(DP, 17, since=still)) for rank in range(3)]
    moved = int((100 - still) * SECOND)
    stopped = seen(3, at(DP, 16, over=True), host=1, state="stopped", thread="unknown", moved=moved)
    verdict = localise([*others, stopped], world=4, deadline=10)
    alone = localise([replace(stopped, rank=0)], world=1, deadline=10)
    if still > 10:
        assert (verdict.cause, verdict.ranks) == ("stopped", (3,))
        assert (alone.cause, alone.ranks) == ("stopped", (0,))
    else:
        assert verdict.cause == alone.cause == "none"
        assert verdict.why.endswith("Rank 3 (host 1) is stopped at this moment.")


def test_the_cause_is_found_through_those_that_wait_for_each_other() -> None:
    """4 waits for 2, 2 for 0, and 0 computes for ever."""
    first, second = RingGroup((0, 2), 0, "pp"), RingGroup((2, 4), 0, "dp")
    evidence = [
        seen(0, thread="works", stack=("train.py:10 main", "loop.py:3 spin"), doing="step 7"),
        seen(2, at(first, 3, ends=(0, 2), verb="message")),
        seen(4, at(second, 9)),
        seen(1, thread="works"),
        seen(3, thread="works"),
    ]
    verdict = localise(evidence, world=5, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("host code", (0,))
    assert "loop.py:3 spin" in verdict.why
    assert [(link.ranks, link.on) for link in verdict.chain] == [((4,), (2,)), ((2,), (0,))]


def test_a_tie_is_told_as_one_and_other_replicas_break_it() -> None:
    pairs = [RingGroup(ranks, 0, "tp") for ranks in ((0, 1), (2, 3), (4, 5))]
    calls = {rank: at(pairs[rank // 2], 5) for rank in range(6)} | {1: at(pairs[0], 5, size=8)}
    alone = localise([seen(rank, calls[rank]) for rank in range(2)], world=2, deadline=10)
    assert (alone.cause, alone.differs, alone.ranks) == ("mismatch", "size", (0, 1))
    assert "no majority" in alone.why
    verdict = localise([seen(rank, calls[rank]) for rank in range(6)], world=6, deadline=10)
    assert (verdict.cause, verdict.differs, verdict.ranks) == ("mismatch", "size", (1,))


def test_only_the_first_of_several_mismatches_counts() -> None:
    calls = [[at(DP, s, since=50 - s, size=4 + (rank == s == 3)) for s in range(3, 6)] for rank in range(4)]
    calls[2][1] = replace(calls[2][1], verb="broadcast")
    verdict = localise([seen(rank, *calls[rank]) for rank in range(4)], world=4, deadline=10)
    assert verdict.ranks == (3,)


def test_two_groups_in_opposite_order_are_a_circle() -> None:
    tp, dp = RingGroup((0, 1), 0, "tp"), RingGroup((0, 1), 1, "dp")
    verdict = localise([seen(0, at(tp, 1)), seen(1, at(dp, 4))], world=2, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("deadlock", (0, 1))
    assert "rank 0 waits for rank 1 in all-reduce 1 of tp group 0, 1" in verdict.why
    assert [(link.ranks, link.on) for link in verdict.chain] == [((0,), (1,)), ((1,), (0,))]


def test_who_fails_because_another_was_stopped_is_no_cause() -> None:
    lost = "rank 0 has waited 5 s in vain for another rank: Timed out waiting 5000ms"
    evidence = [
        seen(0, at(DP, 3), state="ended", status=1, error=lost, ended_at=1.0),
        seen(1, at(DP, 2, over=True), state="stopped"),
        *(seen(rank, at(DP, 3)) for rank in (2, 3)),
    ]
    assert localise(evidence, world=4, deadline=10).ranks == (1,)
    assert localise([evidence[0]], world=4, deadline=10).cause == "unknown"  # nobody knows of the others


def test_a_killed_rank_comes_before_those_that_abort_after_it() -> None:
    ended = {0: -6, 2: -9, 3: 1}
    evidence = [
        seen(rank, at(DP, 3), state="ended" if rank in ended else "runs", status=ended.get(rank), ended_at=9.0 - rank)
        for rank in range(4)
    ]
    verdict = localise(evidence, world=4, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("crashed", (2,))
    assert "was killed by SIGKILL" in verdict.why


def test_a_network_that_nobody_can_place_names_nobody() -> None:
    verdict = localise([seen(rank, at(DP, 3), host=rank) for rank in range(4)], world=4, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("unknown", ())
    assert "nobody ends it" in verdict.why


@pytest.mark.parametrize(
    ("broken", "hosts"),
    [
        ({(0, 2), (1, 2), (2, 3)}, ("host 2",)),
        ({(0, 2)}, ("host 0", "host 2")),  # at which end of a path it is broken cannot be told
        ({(1, 2), (0, 2)}, ("host 2",)),
    ],
)
def test_a_cut_is_placed_by_who_reaches_whom(broken: set[tuple[int, int]], hosts: tuple[str, ...]) -> None:
    def missed(rank: int) -> tuple[int, ...]:
        return tuple(sorted({a + b - rank for a, b in broken if rank in (a, b)}))

    evidence = [
        seen(rank, at(DP, 3), host=rank, missed=missed(rank), reached=tuple(set(range(4)) - {rank, *missed(rank)}))
        for rank in range(4)
    ]
    verdict = localise(evidence, world=4, deadline=10)
    assert (verdict.cause, verdict.hosts) == ("cut off", hosts)


def test_a_message_whose_sender_has_just_begun_it_is_no_cut() -> None:
    lane = RingGroup((0, 1), 0, "lane 0-1")
    receives = seen(1, at(lane, 0, since=50, verb="message", ends=(0, 1)), host=1)
    sends = seen(0, at(lane, 0, since=1, verb="message", ends=(0, 1)), thread="works")
    assert localise([sends, receives], world=2, deadline=10).cause == "unknown"
    old = replace(sends, calls=(at(lane, 0, since=50, verb="message", ends=(0, 1)),), thread="waits")
    assert localise([old, receives], world=2, deadline=10).hosts == ("host 0", "host 1")
    reach = replace(old, reached=(1,))
    assert localise([reach, receives], world=2, deadline=10).cause == "unknown"


def test_nobody_is_named_before_the_deadline() -> None:
    evidence = [seen(rank, at(DP, 3, since=5)) for rank in range(3)] + [seen(3, thread="works")]
    assert localise(evidence, world=4, deadline=10).cause == "none"
    assert localise(evidence, world=4, deadline=4).ranks == (3,)


def test_a_queue_that_moves_is_no_hang() -> None:
    """Calls that have waited for long behind others, of which one has just been over."""
    calls = [at(DP, 1, since=0.5, over=True), *(at(DP, s, since=60) for s in range(2, 9))]
    assert localise([seen(rank, *calls) for rank in range(4)], world=4, deadline=10).cause == "none"


# ---- scale and the file ----


def large(tp: int, dp: int, pp: int) -> list[Evidence]:
    """A job whose rank 77 is stopped before its 40th tensor-parallel sum of a step."""
    world, calls = tp * dp * pp, dict[int, tuple[Call, ...]]()
    everybody = RingGroup(tuple(range(world)), 0, "world")
    tps = [RingGroup(tuple(range(first, first + tp)), 0, "tp") for first in range(0, world, tp)]
    dps = {(stage, place): RingGroup(tuple(stage * dp * tp + r * tp + place for r in range(dp)), 0, "dp")
           for stage in range(pp) for place in range(tp)}  # fmt: skip
    for rank in range(world):
        mine = tps[rank // tp]
        behind = rank == 77
        recent = [at(mine, s, since=60 - s / 10, over=True) for s in range(36, 40)]
        group = dps[rank // (dp * tp), rank % tp]
        old = [at(everybody, s, since=90, over=True) for s in range(3)] + [
            at(group, s, since=80, over=True) for s in range(4)
        ]
        waits = () if behind else (at(mine, 40, since=50),) if 77 in mine.ranks else (at(group, 4, since=45),)
        calls[rank] = (*old, *recent, *waits)
    return [
        seen(rank, *calls[rank], host=rank // 8, state="stopped" if rank == 77 else "runs") for rank in range(world)
    ]  # fmt: skip


def test_one_of_12288_ranks_is_found_in_seconds() -> None:
    evidence = large(8, 192, 8)
    start = time.process_time()
    verdict = localise(evidence, world=len(evidence), deadline=10)
    assert time.process_time() - start < 10
    assert (verdict.cause, verdict.ranks) == ("stopped", (77,))
    assert len(verdict.why) < 400


@pytest.mark.parametrize("kind", ["stopped", "cut", "two groups", "op"])
def test_verdict_and_evidence_are_read_as_they_were_written(tmp_path: Path, kind: str) -> None:
    case = draw_case(kind, 3)
    verdict = localise(case.evidence, world=case.world, deadline=DEADLINE)
    write_hang(tmp_path, verdict, case.evidence)
    assert read_hang(tmp_path / FILE) == (verdict, case.evidence)
    assert localise(read_hang(tmp_path / FILE)[1], world=case.world, deadline=DEADLINE) == verdict


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 1}', '{"version": 7}', '{"version": 1, "verdict": 3}']
)
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(DataError, match=r"hang\.json"):
        read_hang(tmp_path / FILE)
    assert Verdict(cause="none", why="").certain is False

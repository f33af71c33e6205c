"""Who is named when a run hangs: planted faults of every kind, also where evidence is missing; nobody where
nothing hangs."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.record.ring import RingGroup, signature_of
from plait.core.runs.evidence import FILE, Call, CallSequence, Evidence, Verdict, read_hang, write_hang
from plait.diagnose.hang import localise
from tests.support.recordings.planted import HEALTHY, PLANTERS, Case, draw_case
from tests.support.recordings.standstill import DEADLINE

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
    return Call(channel=CallSequence(group, *ends), sequence=sequence, verb=verb, dtype="float32", bytes=size,
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


# ---- the end of the rules: what is left ----

LOST = "rank 0 has waited 5 s in vain for another rank"


def test_a_run_that_nobody_waits_in_but_somebody_failed_for_another() -> None:
    failed = seen(0, state="ended", status=1, error=LOST)
    verdict = localise([failed], world=1, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("crashed", (0,))
    assert verdict.why == f"Rank 0 (host 0) ended with status 1. It said: {LOST}"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("", "crashed"), ("ValueError: x", "crashed"), ("Timed out waiting 5000ms", "unknown"),
        ("a TIMEOUT", "unknown"),
        ("Connection closed by peer", "unknown"), ("connection reset", "unknown"), ("Connection refused", "unknown"),
        ("Broken pipe", "unknown"), ("remote process exited", "unknown"), ("connection lost", "crashed"),
    ],
)  # fmt: skip
def test_what_a_rank_says_that_waited_for_another(error: str, cause: str) -> None:
    """Nothing is known of ranks 1 to 3, which it may have waited for."""
    failed = seen(0, at(DP, 3), state="ended", status=1, error=error)
    assert localise([failed], world=4, deadline=10).cause == cause


def test_how_ranks_have_ended() -> None:
    others = [seen(rank, at(DP, 17)) for rank in range(3)]

    def ended(**more: Any) -> Verdict:
        return localise([*others, seen(3, at(DP, 16, over=True), state="ended", **more)], world=4, deadline=10)

    assert "Rank 3 (host 0) has ended; nobody saw how; ranks 0-2 wait" in ended(status=None).why
    assert "has ended in good order, before the others; ranks 0-2 wait" in ended(status=0).why
    assert ended(status=0).cause == ended(status=None).cause == "crashed"
    long = ended(status=1, error="x  y\n" * 200).why
    assert long.endswith(f". It said: {('x y ' * 200).strip()[-300:]}")


def test_of_several_that_failed_the_first_is_named_and_those_of_one_moment_together() -> None:
    def ended(moments: dict[int, float], status: int = 1) -> tuple[int, ...]:
        ranks = [
            seen(rank, at(DP, 3), state="ended", status=status, ended_at=moments[rank]) if rank in moments
            else seen(rank, at(DP, 3)) for rank in range(4)
        ]  # fmt: skip
        return localise(ranks, world=4, deadline=10).ranks

    assert ended({1: 5.0, 2: 4.0}) == (2,)
    assert ended({1: 4.0, 2: 4.0}) == (1, 2)
    assert ended({1: 5.0, 2: 4.0}, -6) == (2,), "who aborts does so for a reason"
    assert ended({1: 5.0, 2: 4.0}, -9) == (1, 2), "who is killed from outside does not"


def test_one_that_is_stopped_beside_one_that_crashed_is_told_too() -> None:
    evidence = [
        seen(0, at(DP, 3), state="ended", status=-9), seen(1, at(DP, 2, over=True), state="stopped"),
        seen(2, at(DP, 3)), seen(3, at(DP, 3)),
    ]  # fmt: skip
    verdict = localise(evidence, world=4, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("crashed", (0,))
    assert [(one.cause, one.ranks) for one in verdict.also] == [("stopped", (1,))]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({3: {"state": "unknown", "thread": "silent"}},
         "Rank 3 (host 0) has not answered though others have: ended, stopped, or kept from running; ranks 0-2 wait "
         "for it in all-reduce 17 of dp group 0-3."),
        ({2: {"state": "unknown", "thread": "silent"}, 3: {"state": "unknown", "thread": "silent"}},
         "Ranks 2, 3 (host 0) have not answered though others have: ended, stopped, or kept from running; ranks 0, 1 "
         "wait for them in all-reduce 17 of dp group 0-3."),
        ({3: {"doing": "saving"}},
         "Rank 3 (host 0) waits for something that no ring records (at saving); ranks 0-2 wait for it in all-reduce "
         "17 of dp group 0-3."),
        ({2: {}, 3: {}},
         "Ranks 2, 3 (host 0) wait for something that no ring records; ranks 0, 1 wait for them in all-reduce 17 of dp "
         "group 0-3."),
        ({3: {"recorded": False}},
         "Rank 3 (host 0) left no evidence (its ring could not be read); ranks 0-2 wait for it in all-reduce 17 of dp "
         "group 0-3."),
        ({2: {"recorded": False}, 3: {"recorded": False}},
         "Ranks 2, 3 (host 0) left no evidence (their rings could not be read); ranks 0, 1 wait for them in "
         "all-reduce 17 of dp group 0-3."),
    ],
)  # fmt: skip
def test_ranks_of_which_too_little_is_known(lost: dict[int, dict[str, Any]], said: str) -> None:
    evidence = [seen(rank, **lost[rank]) if rank in lost else seen(rank, at(DP, 17)) for rank in range(4)]
    verdict = localise(evidence, world=4, deadline=10)
    assert (verdict.cause, verdict.ranks, verdict.why) == ("unknown", tuple(lost), said)


def test_busy_ranks_in_words() -> None:
    def busy(*ranks: int, **more: object) -> Verdict:
        evidence = [seen(rank, **more) if rank in ranks else seen(rank, at(DP, 17)) for rank in range(4)]  # type: ignore[arg-type]
        return localise(evidence, world=4, deadline=10)

    stack = ("a.py:1 a", "b.py:2 b", "c.py:3 c", "d.py:4 d")
    assert busy(3, thread="works", stack=stack, doing="step 7").why == (
        "Rank 3 (host 0) is alive and in code of its own (at step 7); ranks 0-2 wait for it in all-reduce 17 of dp "
        "group 0-3. There: d.py:4 d < c.py:3 c < b.py:2 b."
    )
    assert busy(2, 3, thread="works").why == (
        "Ranks 2, 3 (host 0) are alive and in code of their own; ranks 0, 1 wait for them in all-reduce 17 of dp "
        "group 0-3."
    )
    assert (
        "Rank 3 (host 0) is alive and does not answer: something holds the interpreter's lock"
        in busy(3, thread="silent").why
    )
    assert "Ranks 2, 3 (host 0) are alive and do not answer" in busy(2, 3, thread="silent").why
    assert busy(3, thread="works", patient=True, doing="saving").why == (
        "Rank 3 (host 0) is saving, which may take long; the others wait for that."
    )
    moved = 98 * SECOND
    assert busy(3, thread="works", moved=moved, doing="compiling", first=True).why == (
        "Rank 3 (host 0) is slow, not stuck: it went on to the next thing 2.0 s ago (at compiling, for the first "
        "time); the others wait for that."
    )
    assert busy(2, 3, thread="works", moved=moved).why == (
        "Ranks 2, 3 (host 0) are slow, not stuck: rank 2 went on to the next thing 2.0 s ago; the others wait for that."
    )


def test_of_busy_ranks_those_that_have_been_waited_for_the_longest() -> None:
    """Half as long as the longest counts, less does not."""
    pairs = [RingGroup((rank, rank + 1), 0, f"pair {rank}") for rank in (0, 2, 4)]
    waits = (100.0, 50.0, 49.0)
    evidence = [seen(2 * n, at(group, 3, since=waits[n])) for n, group in enumerate(pairs)]
    evidence += [seen(rank, thread="works") for rank in (1, 3, 5)]
    verdict = localise(evidence, world=6, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("host code", (1, 3))
    assert verdict.why.endswith(
        "; rank 0 waits for them in all-reduce 3 of pair 0 group 0, 1, and 1 more for them or for those."
    )


@pytest.mark.parametrize(("since", "cause"), [(5.0, "unknown"), (4.9, "none")])
def test_a_call_that_all_have_begun_is_stuck_after_half_of_the_deadline(since: float, cause: str) -> None:
    """Another call of theirs has lasted for long, of which one end has moved since."""
    other = RingGroup((0, 1, 2, 3), 1, "tp")
    ranks = [seen(rank, at(DP, 3, since=20 if rank else since)) for rank in range(4)]
    verdict = localise(ranks, world=4, deadline=10)
    assert other.ranks == DP.ranks and verdict.cause == "unknown"
    assert ("nobody ends it" in verdict.why) == (cause == "unknown")
    assert cause == "unknown" or verdict.why == "A rank has waited for 20 s, and nothing says for whom."


def test_a_cut_in_words() -> None:
    reach = {0: (1,), 1: (0,), 2: (), 3: ()}
    evidence = [
        seen(rank, at(DP, 3), host=rank, reached=reach[rank], missed=tuple(set(range(4)) - {rank, *reach[rank]}))
        for rank in range(4)
    ]
    verdict = localise(evidence, world=4, deadline=10)
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("cut off", (2, 3), ("host 2", "host 3"))
    assert verdict.why == (
        "Host 2 and host 3 are cut off: all of ranks 0-3 have begun all-reduce 3 of dp group 0-3, nobody ends it, and "
        "ranks there and elsewhere do not reach each other. 4 ranks wait."
    )
    [link] = verdict.chain
    assert (link.ranks, link.on) == ((0, 1, 2, 3), ())


def test_a_message_between_hosts_of_which_nobody_is_reached() -> None:
    lane = RingGroup((0, 1), 0, "lane")
    ends = [seen(rank, at(lane, 0, verb="message", ends=(0, 1)), host=rank) for rank in range(2)]
    verdict = localise(ends, world=2, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("cut off", (0, 1))
    assert verdict.why == (
        "Both ends of message 0 from rank 0 to rank 1 of lane group 0, 1 have begun it and it does not end: the path "
        "between host 0 and host 1 is suspected."
    )
    together = [replace(one, host="host 0") for one in ends]
    assert localise(together, world=2, deadline=10).cause == "unknown", "within a host there is no path"


# ---- mismatches ----


def odd(**more: object) -> Verdict:
    """Rank 2 of four does another thing."""
    calls = {rank: at(DP, 5) for rank in range(4)}
    calls[2] = replace(at(DP, 5, size=int(more.get("bytes", 4))), **more)  # type: ignore[arg-type, call-overload]
    return localise([seen(rank, call) for rank, call in calls.items()], world=4, deadline=10)


@pytest.mark.parametrize(
    ("more", "differs", "what"),
    [
        ({"verb": "broadcast"}, "op", "a broadcast of float32 4 bytes"),
        ({"verb": "all_gather"}, "op", "an all-gather of float32 4 bytes"),
        ({"dtype": "float64"}, "dtype", "an all-reduce of float64 4 bytes"),
        ({"bytes": 0, "dtype": ""}, "dtype", "an all-reduce"),
        ({"bytes": 8}, "size", "an all-reduce of float32 8 bytes"),
        ({"bytes": 8, "name": "mlp0"}, "size", "an all-reduce of float32 8 bytes (mlp0)"),
    ],
)  # fmt: skip
def test_what_differs_in_words(more: dict[str, object], differs: str, what: str) -> None:
    verdict = odd(**more)
    assert (verdict.cause, verdict.ranks, verdict.differs, verdict.hosts) == ("mismatch", (2,), differs, ("host 0",))
    assert verdict.why == (
        f"Rank 2 (host 0) began {what} as call 5 of dp group 0-3, where ranks 0, 1 and 3 began an all-reduce of "
        f"float32 4 bytes: the {differs} must be the same on all."
    )
    [link] = verdict.chain
    assert (link.ranks, link.on) == ((0, 1, 3), (2,))


@pytest.mark.parametrize("shift", [-1, 1])
def test_who_began_what_the_others_begin_next_or_began_before_took_another_order(shift: int) -> None:
    calls = [[at(DP, 5, verb="all_reduce"), at(DP, 5 + shift, verb="broadcast")] for _ in range(4)]
    calls[2] = [at(DP, 5, verb="broadcast")]
    verdict = localise([seen(rank, *own) for rank, own in enumerate(calls)], world=4, deadline=10)
    assert (verdict.ranks, verdict.differs) == ((2,), "order")
    assert verdict.why.endswith(": it has left out a call, or begun calls in another order.")


def test_who_begins_next_what_the_others_began_took_another_order() -> None:
    calls = [[at(DP, 5)] for _ in range(4)]
    calls[2] = [at(DP, 5, verb="broadcast"), at(DP, 6)]
    verdict = localise([seen(rank, *own) for rank, own in enumerate(calls)], world=4, deadline=10)
    assert (verdict.ranks, verdict.differs) == ((2,), "order")


def test_a_tie_in_words() -> None:
    pair = RingGroup((0, 1), 0, "tp")
    verdict = localise([seen(0, at(pair, 5)), seen(1, at(pair, 5, verb="all_gather"))], world=2, deadline=10)
    assert (verdict.ranks, verdict.differs) == ((0, 1), "op")
    assert verdict.why == (
        "Mismatch of op in call 5 of tp group 0, 1: rank 0 began an all-reduce of float32 4 bytes and rank 1 began an "
        "all-gather of float32 4 bytes. There is no majority: it may be either."
    )
    assert verdict.chain == ()


@pytest.mark.parametrize(
    ("label", "ordinal", "size", "sequence", "broken"),
    [("tp", 0, 2, 5, True), ("dp", 0, 2, 5, False), ("tp", 1, 2, 5, False), ("tp", 0, 3, 5, False),
     ("tp", 0, 2, 6, False), ("", 0, 2, 5, False)],
)  # fmt: skip
def test_only_groups_of_the_same_kind_break_a_tie(
    label: str, ordinal: int, size: int, sequence: int, broken: bool
) -> None:
    pair = RingGroup((0, 1), 0, "tp" if label else "")
    other = RingGroup(tuple(range(2, 2 + size)), ordinal, label)
    evidence = [seen(0, at(pair, 5)), seen(1, at(pair, 5, size=8))]
    evidence += [seen(rank, at(other, sequence)) for rank in other.ranks]
    assert localise(evidence, world=5, deadline=10).ranks == ((1,) if broken else (0, 1))


def test_a_wait_of_the_deadline_is_no_longer_than_it() -> None:
    evidence = [seen(rank, at(DP, 3, since=10)) for rank in range(3)] + [seen(3, thread="works")]
    assert localise(evidence, world=4, deadline=10).cause == "none"
    assert localise(evidence, world=4, deadline=9.99).cause == "host code"


def test_some_that_do_not_answer_and_some_that_work() -> None:
    others = [seen(rank, at(DP, 17)) for rank in range(2)]
    verdict = localise([*others, seen(2, thread="silent"), seen(3, thread="works")], world=4, deadline=10)
    assert verdict.why.startswith("Ranks 2, 3 (host 0) are alive and in code of their own;")


@pytest.mark.parametrize("status", [None, 0, -9])
def test_only_who_failed_by_itself_may_have_failed_for_another(status: int | None) -> None:
    """Whatever it said; the other waits for it."""
    gone = seen(0, at(DP, 2, over=True), state="ended", status=status, error="Timed out")
    verdict = localise([gone, *(seen(rank, at(DP, 3)) for rank in (1, 2, 3))], world=4, deadline=10)
    assert (verdict.cause, verdict.ranks) == ("crashed", (0,))


def test_of_two_mismatches_the_one_that_ranks_came_to_first() -> None:
    """Whatever the numbers of their groups and calls are."""
    tp, dp = RingGroup((0, 1, 2), 0, "tp"), RingGroup((0, 1, 2), 1, "dp")
    late = [at(tp, 1, since=20, size=8 if rank == 1 else 4) for rank in range(3)]
    early = [at(dp, 9, since=40, size=8 if rank == 2 else 4) for rank in range(3)]
    verdict = localise([seen(rank, late[rank], early[rank]) for rank in range(3)], world=3, deadline=10)
    assert verdict.ranks == (2,) and "call 9 of dp group" in verdict.why
    late = [replace(one, enqueued=early[0].enqueued - SECOND) for one in late]
    verdict = localise([seen(rank, late[rank], early[rank]) for rank in range(3)], world=3, deadline=10)
    assert verdict.ranks == (1,) and "call 1 of tp group" in verdict.why


def test_the_call_that_somebody_has_waited_in_the_longest_is_told() -> None:
    one, two = RingGroup((0, 1, 4), 0, "tp"), RingGroup((2, 3, 4), 0, "dp")
    evidence = [
        seen(0, at(one, 3, since=90)), seen(1, at(one, 3, since=20)), seen(2, at(two, 3, since=50)),
        seen(3, at(two, 3, since=50)), seen(4, thread="works"),
    ]  # fmt: skip
    verdict = localise(evidence, world=5, deadline=10)
    assert "; ranks 0, 1 wait for it in all-reduce 3 of tp group" in verdict.why
    assert verdict.why.endswith(", and 2 more for it or for those.")


@pytest.mark.parametrize(("moved", "cause"), [(90 * SECOND, "none"), (90 * SECOND - 1, "host code")])
def test_a_busy_rank_may_be_at_one_thing_for_as_long_as_the_deadline(moved: int, cause: str) -> None:
    others = [seen(rank, at(DP, 17, since=99)) for rank in range(3)]
    busy = seen(3, at(DP, 16, over=True), thread="works", moved=moved)
    assert localise([*others, busy], world=4, deadline=10).cause == cause


def test_a_rank_is_waited_for_as_long_as_the_first_waits() -> None:
    """For rank 2 one has waited for 100 s and another for 20, for rank 4 one for 49: less than half."""
    one, two = RingGroup((0, 1, 2), 0, "tp"), RingGroup((3, 4), 0, "dp")
    evidence = [
        seen(0, at(one, 3, since=100)), seen(1, at(one, 3, since=20)), seen(2, thread="works"),
        seen(3, at(two, 3, since=49)), seen(4, thread="works"),
    ]  # fmt: skip
    assert localise(evidence, world=5, deadline=10).ranks == (2,)

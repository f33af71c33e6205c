"""Ranks of a run that hangs: stopped, ended, busy, or not answering; who is named, and in which
words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.record.ring import RingGroup
from plait.core.runs.evidence import Verdict
from plait.diagnose.verdicts.hang import localise
from tests.support.recordings.evidence import DP, at, seen, verdict_on
from tests.support.recordings.standstill import SECOND

OTHERS = [seen(rank, at(DP, 17, since=99)) for rank in range(3)]


@given(
    still=st.floats(0, 100), longest=st.floats(0, 30), first=st.booleans(), computes=st.booleans(),
    thread=st.sampled_from(["works", "silent"]), deadline=st.floats(1, 20), times=st.floats(1, 5),
)  # fmt: skip
def test_a_busy_rank_is_named_once_it_has_been_at_one_thing_for_longer_than_it_may(
    still: float, longest: float, first: bool, computes: bool, thread: str, deadline: float, times: float
) -> None:
    moved = int((100 - still) * SECOND)
    busy = seen(3, at(DP, 16, over=True), thread=thread, moved=moved or 1, longest=longest, first=first,
                computes=computes)  # fmt: skip
    verdict = localise([*OTHERS, busy], world=4, deadline=deadline, first=times * deadline)
    limit = max(deadline, 2 * longest, times * deadline if first or computes else 0)
    if abs(still - limit) > 1e-6:
        assert (verdict.cause, verdict.ranks) == (("host code" if still > limit else "none"), (3,))
        assert ("slow, not stuck" in verdict.why) == (still < limit)


@pytest.mark.parametrize(("moved", "cause"), [(90 * SECOND, "none"), (90 * SECOND - 1, "host code")])
def test_a_busy_rank_may_be_at_one_thing_for_as_long_as_the_deadline(moved: int, cause: str) -> None:
    busy = seen(3, at(DP, 16, over=True), thread="works", moved=moved)
    assert verdict_on(*OTHERS, busy).cause == cause


@pytest.mark.parametrize(("moved", "cause"), [(1, "stopped"), (95 * SECOND, "unknown")])
def test_a_rank_that_does_not_answer_is_named_where_a_call_of_all_does_not_end(moved: int, cause: str) -> None:
    verdict = verdict_on(*OTHERS, seen(3, at(DP, 17), thread="silent", moved=moved))
    assert verdict.cause == cause
    if cause == "stopped":
        assert verdict.ranks == (3,)
        assert verdict.why == (
            "Rank 3 (host 0) does not answer: stopped, frozen, or kept from running. All have begun all-reduce 17 of "
            "dp group 0-3, and nobody ends it. 3 ranks wait."
        )


def test_a_stopped_rank_is_told_with_what_the_kernel_says() -> None:
    stack = ("its main thread is frozen with its control group (futex)",)
    verdict = verdict_on(*OTHERS, seen(3, at(DP, 17), state="stopped", stack=stack))
    assert "Rank 3 (host 0) is stopped: its main thread is frozen with its control group (futex); ranks 0-2 wait" in \
        verdict.why  # fmt: skip


def test_busy_ranks_in_words() -> None:
    def busy(*ranks: int, **more: object) -> Verdict:
        evidence = [seen(rank, **more) if rank in ranks else seen(rank, at(DP, 17)) for rank in range(4)]  # type: ignore[arg-type]
        return verdict_on(*evidence)

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
    assert busy(3, thread="works", patient=True, doing="saving").why == (
        "Rank 3 (host 0) is saving, which may take long; the others wait for that."
    )
    moved = 98 * SECOND
    assert busy(3, thread="works", moved=moved, doing="compiling", first=True).why == (
        "Rank 3 (host 0) is slow, not stuck: it went on to the next thing 2.0 s ago (at compiling, for the first "
        "time); the others wait for that."
    )


def test_of_busy_ranks_those_that_have_been_waited_for_the_longest() -> None:
    """Half as long as the longest counts, less does not."""
    pairs = [RingGroup((rank, rank + 1), 0, f"pair {rank}") for rank in (0, 2, 4)]
    waits = (100.0, 50.0, 49.0)
    evidence = [seen(2 * n, at(group, 3, since=waits[n])) for n, group in enumerate(pairs)]
    evidence += [seen(rank, thread="works") for rank in (1, 3, 5)]
    verdict = verdict_on(*evidence)
    assert (verdict.cause, verdict.ranks) == ("host code", (1, 3))
    assert verdict.why.endswith(
        "; rank 0 waits for them in all-reduce 3 of pair 0 group 0, 1, and 1 more for them or for those."
    )


def test_some_that_do_not_answer_and_some_that_work() -> None:
    verdict = verdict_on(*OTHERS[:2], seen(2, thread="silent"), seen(3, thread="works"))
    assert verdict.why.startswith("Ranks 2, 3 (host 0) are alive and in code of their own;")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({3: {"state": "unknown", "thread": "silent"}},
         "Rank 3 (host 0) has not answered though others have: ended, stopped, or kept from running; ranks 0-2 wait "
         "for it in all-reduce 17 of dp group 0-3."),
        ({3: {"doing": "saving"}},
         "Rank 3 (host 0) waits for something that no ring records (at saving); ranks 0-2 wait for it in all-reduce "
         "17 of dp group 0-3."),
        ({2: {}, 3: {}},
         "Ranks 2, 3 (host 0) wait for something that no ring records; ranks 0, 1 wait for them in all-reduce 17 of dp "
         "group 0-3."),
        ({3: {"recorded": False}},
         "Rank 3 (host 0) left no evidence (its ring could not be read); ranks 0-2 wait for it in all-reduce 17 of dp "
         "group 0-3."),
    ],
)  # fmt: skip
def test_ranks_of_which_too_little_is_known(lost: dict[int, dict[str, Any]], said: str) -> None:
    evidence = [seen(rank, **lost[rank]) if rank in lost else seen(rank, at(DP, 17)) for rank in range(4)]
    verdict = verdict_on(*evidence)
    assert (verdict.cause, verdict.ranks, verdict.why) == ("unknown", tuple(lost), said)


def test_a_stopped_rank_and_who_waits_for_it() -> None:
    stopped = seen(3, at(DP, 16, over=True), host=1, state="stopped", thread="unknown")
    verdict = verdict_on(*OTHERS, stopped)
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
    verdict = verdict_on(*others, stopped)
    alone = verdict_on(replace(stopped, rank=0))
    if still > 10:
        assert (verdict.cause, verdict.ranks) == ("stopped", (3,))
        assert (alone.cause, alone.ranks) == ("stopped", (0,))
    else:
        assert verdict.cause == alone.cause == "none"
        assert verdict.why.endswith("Rank 3 (host 1) is stopped at this moment.")


def test_one_that_is_stopped_beside_one_that_crashed_is_told_too() -> None:
    evidence = [
        seen(0, at(DP, 3), state="ended", status=-9), seen(1, at(DP, 2, over=True), state="stopped"),
        seen(2, at(DP, 3)), seen(3, at(DP, 3)),
    ]  # fmt: skip
    verdict = verdict_on(*evidence)
    assert (verdict.cause, verdict.ranks) == ("crashed", (0,))
    assert [(one.cause, one.ranks) for one in verdict.also] == [("stopped", (1,))]


def test_who_fails_because_another_was_stopped_is_no_cause() -> None:
    lost = "rank 0 timed out after 5 s (run.timeout) waiting for another rank: Timed out waiting 5000ms"
    evidence = [
        seen(0, at(DP, 3), state="ended", status=1, error=lost, ended_at=1.0),
        seen(1, at(DP, 2, over=True), state="stopped"),
        *(seen(rank, at(DP, 3)) for rank in (2, 3)),
    ]
    assert verdict_on(*evidence).ranks == (1,)
    assert verdict_on(evidence[0], world=4).cause == "unknown"  # nobody knows of the others


def test_a_killed_rank_comes_before_those_that_abort_after_it() -> None:
    ended = {0: -6, 2: -9, 3: 1}
    evidence = [
        seen(rank, at(DP, 3), state="ended" if rank in ended else "runs", status=ended.get(rank), ended_at=9.0 - rank)
        for rank in range(4)
    ]
    verdict = verdict_on(*evidence)
    assert (verdict.cause, verdict.ranks) == ("crashed", (2,))
    assert "was killed by SIGKILL" in verdict.why


LOST = "rank 0 timed out after 5 s (run.timeout) waiting for another rank"


def test_a_run_that_nobody_waits_in_but_somebody_failed_for_another() -> None:
    failed = seen(0, state="ended", status=1, error=LOST)
    verdict = verdict_on(failed)
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
    assert verdict_on(failed, world=4).cause == cause


def test_how_ranks_have_ended() -> None:

    def ended(**more: Any) -> Verdict:
        return verdict_on(*OTHERS, seen(3, at(DP, 16, over=True), state="ended", **more))

    assert "Rank 3 (host 0) has ended; its exit status is unknown; ranks 0-2 wait" in ended(status=None).why
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
        return verdict_on(*ranks).ranks

    assert ended({1: 5.0, 2: 4.0}) == (2,)
    assert ended({1: 4.0, 2: 4.0}) == (1, 2)
    assert ended({1: 5.0, 2: 4.0}, -6) == (2,), "who aborts does so for a reason"
    assert ended({1: 5.0, 2: 4.0}, -9) == (1, 2), "who is killed from outside does not"


@pytest.mark.parametrize("status", [None, 0, -9])
def test_only_who_failed_by_itself_may_have_failed_for_another(status: int | None) -> None:
    """Whatever it said; the other waits for it."""
    gone = seen(0, at(DP, 2, over=True), state="ended", status=status, error="Timed out")
    verdict = verdict_on(gone, *(seen(rank, at(DP, 3)) for rank in (1, 2, 3)))
    assert (verdict.cause, verdict.ranks) == ("crashed", (0,))

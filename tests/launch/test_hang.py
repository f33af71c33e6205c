"""When somebody looks for why a run hangs: by a clock that the test sets, on processes that are
none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.runs.evidence import Evidence, Verdict
from plait.core.runs.rank_reports import RankReport, reports_requested, request_reports, write_report
from plait.launch import hang
from plait.launch import hang as gathering
from plait.launch.hang import HangDetection, LocalRank, RankStatus

TIER = "unit"


NONE, UNKNOWN, CERTAIN = (Verdict(cause=one, why="It.", ranks=(1,)) for one in ("none", "unknown", "host code"))


STACK = 'Current thread 0x7f (most recent call first):\n  File "/a/wait.py", line 3 in spin\n'


class Clock(SimpleNamespace):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hang, "time", made)
    return made


class Look:
    """A suspicion, and how often it came to a verdict."""

    def __init__(self, folder: Path, verdict: Verdict = CERTAIN) -> None:
        self.folder, self.verdict, self.times, self.given = folder, verdict, 0, list[Evidence]()
        self.suspicion = HangDetection(folder, 2, deadline=5.0, localise=self._localise)

    def _localise(self, evidence: Any) -> Verdict:
        self.times, self.given = self.times + 1, list(evidence)
        return self.verdict

    def __call__(self, *, silent: bool = True, seen: Mapping[int, RankStatus] | None = None) -> Verdict | None:
        return self.suspicion.look(lambda: seen if seen is not None else RUN, dict, silent=silent)


RUN = {0: RankStatus(state="runs"), 1: RankStatus(state="runs")}


def answer(folder: Path, rank: int, *, complete: bool = True) -> None:
    write_report(folder, RankReport(rank=rank, token=0, wall=0, thread="waits", complete=complete))


def test_what_an_earlier_start_has_left_is_forgotten(tmp_path: Path) -> None:
    request_reports(tmp_path)
    (tmp_path / "hang.json").write_text("{}")
    Look(tmp_path)
    assert not reports_requested(tmp_path) and not (tmp_path / "hang.json").exists()


def test_nobody_is_asked_before_somebody_suspects_something(tmp_path: Path, clock: Clock) -> None:
    look = Look(tmp_path)
    assert look(silent=False) is None and not reports_requested(tmp_path)
    clock.now += 0.4
    assert look() is None and not reports_requested(tmp_path)  # too soon for another look
    clock.now += 0.1
    assert look() is None and reports_requested(tmp_path) and not look.times


def test_a_rank_that_asks_is_a_suspicion(tmp_path: Path, clock: Clock) -> None:
    look = Look(tmp_path)
    request_reports(tmp_path)
    for rank in range(2):
        answer(tmp_path, rank)
    assert look(silent=False) is CERTAIN


def test_a_question_that_cannot_be_asked_does_not_end_the_looking(tmp_path: Path, clock: Clock) -> None:
    look = Look(tmp_path / "gone")
    assert look() is None
    clock.now += hang.ANSWER_SECONDS
    assert look() is CERTAIN


def test_ranks_have_a_while_to_answer(tmp_path: Path, clock: Clock) -> None:
    look = Look(tmp_path)
    look()
    answer(tmp_path, 0)
    answer(tmp_path, 1, complete=False)
    clock.now += hang.ANSWER_SECONDS - 0.1
    assert look() is None and not look.times
    clock.now += 0.5
    assert look() is CERTAIN and look.times == 1
    assert (tmp_path / "hang.json").exists()


def test_those_that_do_not_run_are_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    look = Look(tmp_path)
    look()
    answer(tmp_path, 0)
    clock.now += 0.5
    assert look() is None
    clock.now += 0.5
    assert look(seen={0: RUN[0], 1: RankStatus(state="stopped")}) is CERTAIN


def test_who_is_not_named_at_once_is_looked_for_again(tmp_path: Path, clock: Clock) -> None:
    look = Look(tmp_path, UNKNOWN)
    look()
    clock.now += hang.ANSWER_SECONDS
    assert look() is None and look.times == 1 and reports_requested(tmp_path)
    clock.now += hang.RETRY_SECONDS - 0.1
    look.verdict = CERTAIN
    assert look() is None and look.times == 1
    clock.now += 0.1
    assert look() is CERTAIN


def test_a_run_that_goes_on_is_suspected_anew(tmp_path: Path, clock: Clock) -> None:
    look = Look(tmp_path, NONE)
    look()
    clock.now += hang.ANSWER_SECONDS
    assert look() is None and not reports_requested(tmp_path) and not (tmp_path / "hang.json").exists()
    clock.now += hang.RETRY_SECONDS
    assert look(silent=False) is None and not reports_requested(tmp_path)
    clock.now += 0.5
    assert look() is None and reports_requested(tmp_path)  # and has its while to answer again
    assert look.times == 1


class Ranks:
    """Processes that are not there. log: grows by ``prints`` once a stack is asked for; seconds: of
    the processor that rank N has taken, one more entry a question; kernel: where each is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.log = dict.fromkeys(range(3), "before\n")
        self.prints, self.kernel = dict[int, str](), dict[int, str]()
        self.seconds: dict[int, list[float]] = {}
        self.asked, self.clock = list[int](), clock
        monkeypatch.setattr(hang, "print_stacks", self._print)
        monkeypatch.setattr(hang, "kernel_state", lambda pid: self.kernel.get(pid, ""))
        self.deaf = set[int]()
        monkeypatch.setattr(hang, "signal_pending", lambda pid: pid in self.deaf)
        monkeypatch.setattr(hang, "main_thread_seconds", lambda pid: self.seconds[pid].pop(0))

    def _print(self, pid: int) -> bool:
        self.asked.append(pid)
        if pid not in self.prints:
            return False
        self.log[pid] += self.prints[pid]
        return True

    def of(self, evidence: list[Evidence]) -> list[Evidence]:
        nearby = {rank: LocalRank(rank, lambda rank=rank: self.log[rank]) for rank in range(3)}
        return HangDetection._stacks(evidence, {}, nearby)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Ranks:
    return Ranks(monkeypatch, clock)


def mute(rank: int, **more: Any) -> Evidence:
    return Evidence(rank=rank, state="runs", thread="silent", **more)


def test_only_those_that_run_here_and_are_silent_are_asked_by_a_signal(ranks: Ranks, clock: Clock) -> None:
    began = clock.now
    given = [
        Evidence(rank=0, state="runs", thread="waits"), Evidence(rank=1, state="stopped", thread="silent"),
        mute(2), mute(3),
    ]  # fmt: skip
    ranks.prints = dict.fromkeys(range(4), STACK)
    ranks.log[2] = 'hread 0x1\n  File "/a/old.py", line 1 in old\n'
    found = ranks.of(given)
    assert ranks.asked == [2]
    assert [one.stack for one in found] == [(), (), ("wait.py:3 spin",), ()]
    assert clock.now - began < 0.1  # and not longer than it takes


def test_a_stack_that_does_not_come_is_waited_for_a_while_and_the_kernel_asked(ranks: Ranks, clock: Clock) -> None:
    began = clock.now
    ranks.prints, ranks.kernel = {0: "", 1: STACK}, {0: "it sleeps", 1: "never asked", 2: "it runs"}
    found = ranks.of([mute(0), mute(1), mute(2)])
    assert [one.stack for one in found] == [("it sleeps",), ("wait.py:3 spin",), ("it runs",)]
    assert hang.STACK_SECONDS <= clock.now - began < hang.STACK_SECONDS + 0.1


def test_one_that_takes_no_signal_is_stopped(ranks: Ranks) -> None:
    ranks.prints, ranks.kernel, ranks.deaf = {0: "", 1: "", 2: STACK}, {0: "it waits", 1: "it sleeps"}, {0, 2}
    found = ranks.of([mute(0), mute(1), mute(2)])
    assert [(one.state, one.stack[-1]) for one in found] == [
        ("stopped", "it waits"), ("runs", "it sleeps"), ("runs", "wait.py:3 spin"),
    ]  # fmt: skip


def test_one_that_computes_is_watched_for_the_whole_while(ranks: Ranks, clock: Clock) -> None:
    """Who takes less than a hundredth of a processor waits, whatever its record says."""
    began = clock.now
    least = gathering.BUSY * hang.STACK_SECONDS
    ranks.prints = dict.fromkeys(range(3), STACK)
    ranks.seconds = {0: [5.0, 5.0 + 2 * least], 1: [5.0, 5.0 + least / 2], 2: []}
    found = ranks.of([mute(0, computes=True), mute(1, computes=True), mute(2)])
    assert [one.computes for one in found] == [True, False, False]
    assert hang.STACK_SECONDS <= clock.now - began < hang.STACK_SECONDS + 0.1


def test_nobody_who_answered_or_is_elsewhere_is_watched(ranks: Ranks) -> None:
    answered = Evidence(rank=0, state="runs", thread="works", computes=True)
    assert ranks.of([answered, mute(7, computes=True)]) == [answered, mute(7, computes=True)]

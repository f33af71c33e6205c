"""The history of a run that launchers write one after the other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest import mock

import pytest

from plait.api.runs import view_run
from plait.core.base.errors import NotFinite, RankFailure, remote_error
from plait.core.runs import history as module
from plait.core.runs.attempts import Attempt, cut_off, read_attempts, write_attempts
from plait.core.runs.evidence import FILE
from plait.core.runs.history import History, newest_checkpoint
from plait.core.runs.progress import Progress


def steps(progress: Progress, first: int, last: int, writing: int = 0) -> None:
    progress.heard(0, first, time.monotonic())
    progress.heard(0, last, time.monotonic(), writing)


def test_a_start_by_another_launcher_goes_on_where_the_one_before_failed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()

    def fails(progress: Progress) -> int:
        steps(progress, 0, 13, writing=10)
        (tmp_path / "logs" / "rank-0.log").write_text("the end")
        (tmp_path / FILE).write_text("{}")
        raise RankFailure("Rank 0 is stopped.", ranks=[0], cause="stopped")

    first = History(tmp_path)
    first.begin_again(1, ("n1",), "abc", again=False)
    with pytest.raises(RankFailure):
        first.attempt(fails, Progress(1))
    assert (tmp_path / FILE).exists()  # as long as nobody starts it again

    said: list[str] = []
    second = History(tmp_path)
    second.begin_again(1, ("n2",), "abc", again=True)
    assert (tmp_path / "logs" / "attempt-1" / "rank-0.log").read_text() == "the end"
    assert (tmp_path / "logs" / "attempt-1" / FILE).exists()
    assert read_attempts(tmp_path)[-1].outcome == "running"
    progress = Progress(1, stepped=lambda one: second.record_restart(one, said.append))

    def ends(progress: Progress) -> int:
        steps(progress, 5, 20)
        return 0

    assert second.attempt(ends, progress) == 0
    before, last = read_attempts(tmp_path)
    assert (before.outcome, before.cause, before.step, before.writing) == ("failed", "stopped", 13, 10)
    assert (last.attempt, last.outcome, last.hosts, last.resumed, last.step) == (2, "finished", ("n2",), 5, 20)
    assert last.wait_seconds is not None
    assert before.ended is not None
    assert 0 <= last.wait_seconds <= last.started - before.ended + 0.001  # rounded to milliseconds
    assert "from step 5, 8 steps are done again (the checkpoint of step 10 was still being written)" in said[0]


def test_of_one_whose_launcher_was_killed_the_last_logged_step_is_known(tmp_path: Path) -> None:
    """Steps since the last checkpoint were done, and are done again; when it failed nobody
    knows."""
    first = History(tmp_path)
    first.begin_again(1, ("n1",), "abc", again=False)
    progress = Progress(1, stepped=lambda one: first.record_restart(one, pytest.fail))
    steps(progress, 0, 1)
    (tmp_path / "checkpoints" / "step-200").mkdir(parents=True)
    lines = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(10, 261, 10))
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 27')
    second, said = History(tmp_path), list[str]()
    second.begin_again(1, ("n2",), "abc", again=True)
    steps(Progress(1, stepped=lambda one: second.record_restart(one, said.append)), 200, 201)
    before, now = read_attempts(tmp_path)
    assert (before.outcome, before.resumed, before.step, before.steps) == ("cut off", 0, 260, 260)
    assert before.detection_seconds is None
    assert now.wait_seconds is not None
    assert "the run goes on from step 200, 60 steps are done again. Time of the failure unknown" in said[0]
    assert "noticed within" not in said[0]


@pytest.mark.parametrize(
    "text", ["", "\n", "nonsense\n", "[" * 100_000 + "\n", '{"step": null}\n', '{"step": 1e999}\n']
)
def test_metrics_that_cannot_be_read_say_nothing_of_an_attempt(tmp_path: Path, text: str) -> None:
    History(tmp_path).begin_again(1, ("n1",), "abc", again=False)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert History(tmp_path).last.step == -1


def test_a_run_that_ended_well_and_goes_on_later_has_not_waited(tmp_path: Path) -> None:
    first = History(tmp_path)
    first.begin_again(1, ("n1",), "abc", again=False)
    first.attempt(lambda progress: 0, Progress(1))
    second = History(tmp_path)
    second.begin_again(1, ("n1",), "abc", again=True)
    assert second.last.wait_seconds is None
    assert not (tmp_path / "logs").exists()


def test_one_that_ended_well_did_all_its_steps_whatever_was_heard_of_them(tmp_path: Path) -> None:
    """A launcher that was stopped meanwhile: of what ranks say only so much is kept for it."""

    def ends(progress: Progress) -> int:
        steps(progress, 5, 10)
        (tmp_path / "checkpoints" / "step-00000060").mkdir(parents=True)
        return 0

    history = History(tmp_path)
    history.begin(1, ("n1",), "abc")
    assert history.attempt(ends, Progress(1)) == 0
    (found,) = read_attempts(tmp_path)
    assert (found.outcome, found.resumed, found.step, found.steps) == ("finished", 5, 60, 55)


def test_the_cause_is_the_name_of_the_error(tmp_path: Path) -> None:
    def fails(progress: Progress) -> int:
        raise remote_error("NotFinite", "step 2: the loss is nan.")

    history = History(tmp_path)
    history.begin(1, ("n1",), "abc")
    with pytest.raises(NotFinite):
        history.attempt(fails, Progress(1))
    assert (read_attempts(tmp_path)[0].cause, read_attempts(tmp_path)[0].why) == (
        "NotFinite",
        "step 2: the loss is nan.",
    )


def test_of_failed_attempts_the_last_three_logs_are_kept(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for number in range(1, 12):
        (logs / "rank-0.log").write_text(str(number))
        (logs / "attempt-x").mkdir(exist_ok=True)  # somebody else's
        history = History(tmp_path)
        history.begin_again(1, ("n1",), "abc", again=False)
        if number > 1:
            assert (logs / f"attempt-{number - 1}" / "rank-0.log").exists()
    assert sorted(path.name for path in logs.iterdir()) == ["attempt-10", "attempt-8", "attempt-9", "attempt-x"]


@pytest.mark.parametrize(
    ("failed", "writing", "resumed", "said"),
    [
        (13, 0, 13, "from step 13. Time"),
        (13, 0, 12, "from step 12, 1 step is done again. Time"),
        (13, 0, 5, "from step 5, 8 steps are done again. Time"),
        (13, 10, 5, "8 steps are done again (the checkpoint of step 10 was still being written). Time"),
        (13, 5, 5, "8 steps are done again. Time"),
        (13, 13, 5, "8 steps are done again. Time"),  # no step came after it
    ],
)
def test_what_is_done_again_is_said(tmp_path: Path, failed: int, writing: int, resumed: int, said: str) -> None:
    write_attempts(
        tmp_path,
        [Attempt(attempt=1, started=1.0, ended=2.0, outcome="failed", resumed=0, step=failed, writing=writing)],
    )
    history, told = History(tmp_path), list[str]()
    history.begin_again(1, ("n1",), "abc", again=True)
    steps(Progress(1, stepped=lambda one: history.record_restart(one, told.append)), resumed, resumed + 1)
    assert said in told[0]


def test_checkpoints_are_counted_by_their_names(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == 0
    for name in ("step-00000005", "step-00000010", "step-11.partial", "step-", "other-00000099", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 10


def test_what_an_attempt_took_until_its_first_step_is_written_down(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.begin(1, ("n1",), "abc")
    progress = Progress(1, stepped=lambda one: history.record_restart(one, pytest.fail))
    progress.heard(0, 4, progress.began + 20.0)
    progress.heard(0, 5, progress.began + 23.5)
    progress.heard(0, 6, progress.began + 24.0, 5)
    (found,) = read_attempts(tmp_path)
    assert (found.restart_seconds, found.first_step_seconds) == (20.0, 3.5)
    assert (found.resumed, found.step, found.steps) == (4, 5, 1)


def test_of_an_attempt_that_never_trained_neither_is_known(tmp_path: Path) -> None:
    def fails(progress: Progress) -> int:
        raise RankFailure("Rank 0 ended.")

    history = History(tmp_path)
    history.begin(1, ("n1",), "abc")
    with pytest.raises(RankFailure):
        history.attempt(fails, Progress(1))
    (found,) = read_attempts(tmp_path)
    assert (found.restart_seconds, found.first_step_seconds, found.resumed) == (None, None, -1)
    assert (found.outcome, found.cause, found.why) == ("failed", "unknown", "Rank 0 ended.")


@pytest.mark.parametrize(("status", "stopping", "outcome"), [
    (143, True, "stopped"), (0, True, "finished"), (3, False, "finished"), (0, False, "finished")
])  # fmt: skip
def test_an_attempt_is_stopped_where_somebody_asked_and_it_was_not_over(
    tmp_path: Path, status: int, stopping: bool, outcome: str
) -> None:
    def ends(progress: Progress) -> int:
        progress.stopping = stopping
        return status

    history = History(tmp_path)
    history.begin(1, ("n1",), "abc")
    assert history.attempt(ends, Progress(1)) == status
    (found,) = read_attempts(tmp_path)
    assert (found.outcome, found.step) == (outcome, -1)


def test_that_an_attempt_was_asked_to_end_is_known_at_once(tmp_path: Path) -> None:
    """A pod is killed at the end of its grace, and the launcher in it tells nothing more."""

    def killed(progress: Progress) -> int:
        steps(progress, 0, 13)
        progress.stop_requested("SIGTERM")
        [now] = read_attempts(tmp_path)
        assert (now.outcome, now.step, now.why) == ("running", 13, "It was asked to end (SIGTERM) after step 13.")
        raise KeyboardInterrupt

    first = History(tmp_path)
    first.begin(1, ("n1",), "abc")
    end = mock.patch.object(first, "_note", wraps=first._note, side_effect=[mock.DEFAULT, None])  # not written: killed
    with end, pytest.raises(KeyboardInterrupt):
        first.attempt(killed, Progress(1))
    view = view_run(tmp_path)
    assert view.state == "lost"
    assert view.why.startswith("It was asked to end (SIGTERM) after step 13. Then its launcher is gone")
    History(tmp_path).begin(1, ("n1",), "abc")
    before, _ = read_attempts(tmp_path)
    assert before.outcome == "cut off"
    assert before.why.startswith("It was asked to end (SIGTERM) after step 13. Its launcher was killed (under torchrun")


@pytest.mark.parametrize("status", [0, 143])
def test_one_that_was_asked_to_end_and_did_has_no_cause(tmp_path: Path, status: int) -> None:
    def ends(progress: Progress) -> int:
        progress.stop_requested("SIGTERM")
        return status

    history = History(tmp_path)
    history.begin(1, ("n1",), "abc")
    assert history.attempt(ends, Progress(1)) == status
    [one] = read_attempts(tmp_path)
    assert (one.outcome, one.why) == ("stopped" if status else "finished", "")


@pytest.mark.parametrize(("again", "told"), [(False, "train.steps was 5 and is 9"), (True, "")])
def test_what_has_changed_is_said_of_a_start_by_somebody(tmp_path: Path, again: bool, told: str) -> None:
    """Not of one that goes on by itself with what it had."""
    History(tmp_path).begin_again(1, ("n1",), "abc", again=False)
    history = History(tmp_path)
    history.begin_again(1, ("n1",), "abd", again=again, changed="train.steps was 5 and is 9")
    assert (history.last.changed, history.last.attempt, history.last.plan) == (told, 2, "abd")


def test_nothing_is_said_of_a_start_that_did_not_wait_for_a_failed_one(tmp_path: Path) -> None:
    write_attempts(tmp_path, [Attempt(attempt=1, started=1.0, ended=2.0, outcome="failed", resumed=0, step=5)])
    history = History(tmp_path)
    history.begin_again(1, ("n1",), "abc", again=False)
    steps(Progress(1, stepped=lambda one: history.record_restart(one, pytest.fail)), 5, 6)
    assert history.last.wait_seconds is None
    assert history.last.step == 6


def test_a_history_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    history = History(tmp_path)
    history.begin(1, ("n1",), "abc")
    monkeypatch.setattr(module, "write_attempts", refuse)
    assert history.attempt(lambda progress: 0, Progress(1)) == 0
    history.begin(1, ("n1",), "abc")
    said = capsys.readouterr().err
    assert said.count("attempts.jsonl cannot be written (Operation not permitted)") == 1
    assert cut_off(read_attempts(tmp_path), step=-1, at=None)[0].why.endswith("or a folder that may not be changed.")

"""How a run got on: runs that go on after a restart, or whose launcher was killed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.parallel.layout import Layout
from plait.core.runs.attempts import Attempt
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.recording import Recording
from plait.diagnose.report import explain
from plait.diagnose.series import attempts_of
from plait.diagnose.verdicts.progress import CheckpointPauses, Goodput, Loss, checkpoints_of, goodput_of, loss_of
from tests.support.recordings.made import Job, recording_of, spans_of, write_run

FAILED = {"attempt": 1, "started": 1000.0, "ended": 1040.0, "outcome": "failed", "resumed": 0, "step": 8, "steps": 8}
GOES_ON = {
    "attempt": 2, "started": 1045.0, "ended": None, "outcome": "running", "resumed": 5, "step": 6, "steps": 1,
    "restart_seconds": 10.0, "first_step_seconds": 1.0,
}  # fmt: skip


def goodput(folder: Path, attempts: list[dict[str, Any]], *, steps: int, copied: bool = False) -> Goodput:
    """Of a run whose steps took 2 seconds each, and whose metrics were last written at second
    1085."""
    run = write_run(folder / "run", Job(dp=2, pp=1, steps=2))
    for name, lines, written in (
        ("metrics.jsonl", [{"step": n + 1, "seconds": 2.0, "loss": 3.0} for n in range(steps)], 1085),
        ("attempts.jsonl", attempts, 1057),
    ):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        if not copied:
            os.utime(run / name, (written, written))
    found = read_run(run)
    report = explain(found.recording, "run", run=found)
    assert report.goodput is not None
    return report.goodput


def test_goodput_in_words(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Job(dp=2, pp=1, steps=2))
    report = explain(read_run(run).recording, "run")
    said = replace(report, goodput=Goodput(30.0, 60.0, 2, 1, 900.0)).text()
    assert (
        "goodput 50%: 0:30 of 1:00 in steps in 2 attempts, 1 step done again; no launcher ran for another 15:00" in said
    )
    assert "nobody" not in replace(report, goodput=Goodput(30.0, 60.0, 1, 0)).text()


def test_a_first_attempt_whose_line_stayed_as_it_began(tmp_path: Path) -> None:
    """Its launcher was killed before it wrote that ranks trained; their metrics tell."""
    began = {
        "attempt": 1,
        "started": 1050.0,
        "ended": None,
        "outcome": "running",
        "resumed": -1,
        "step": -1,
        "steps": 0,
    }
    again = GOES_ON | {"attempt": 2, "started": 1086.0, "resumed": 0, "step": 5, "steps": 5, "ended": 1099.0}
    assert goodput(tmp_path / "a", [began], steps=5) == Goodput(10.0, 35.0, 1, 0)
    assert goodput(tmp_path / "c", [began], steps=5, copied=True) == Goodput(10.0, 10.0, 1, 0)
    assert goodput(tmp_path / "b", [began | {"steps": 5, "ended": 1085.0}, again], steps=5).redone == 5


def test_an_attempt_that_never_trained_says_so(tmp_path: Path) -> None:
    never = Attempt(attempt=1, started=1000.0, ended=1020.0, outcome="failed")
    assert (never.resumed, never.step, never.steps) == (-1, -1, 0)
    trained = asdict(Attempt(attempt=2, started=1020.0, ended=1085.0, outcome="finished", resumed=0, step=5, steps=5))
    assert goodput(tmp_path / "b", [asdict(never), trained], steps=5).redone == 0
    [first, second] = attempts_of([asdict(never), trained], live=False)
    assert (first.step, second.step) == ("never trained", "5")


@pytest.mark.parametrize("length", [0.35, 0.7])
def test_without_attempts_the_lengths_of_steps_count(tmp_path: Path, length: float) -> None:
    """By their numbers: seconds of one step are not those of another."""
    run = write_run(tmp_path / "run", Job(dp=2, pp=1, steps=4))
    lines = [{"step": step + 1, "seconds": length * (step + 1)} for step in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(run)
    goodput = explain(found.recording, "run", run=found).goodput
    assert goodput is not None and goodput.productive == pytest.approx(10 * length)


def test_one_that_has_not_trained_yet_has_done_nothing(tmp_path: Path) -> None:
    starts = GOES_ON | {"resumed": -1, "step": -1, "steps": 0, "restart_seconds": None, "first_step_seconds": None}
    found = goodput(tmp_path, [FAILED, starts], steps=8)
    assert (found.total, found.attempts, found.redone) == (85.0, 2, 0)


# ---- in numbers ----


def test_losses() -> None:
    lines: list[dict[str, Any]] = [
        {"loss": 3, "skipped": 1}, {"loss": 1.0, "eval_loss": 5.0}, {"loss": True}, {"loss": None}, {"eval_loss": 4.0},
        {"loss": 2.0, "skipped": 7}, {"skipped": 2.5},
    ]  # fmt: skip
    assert loss_of(lines) == Loss(3.0, 2.0, 1.0, 4.0, 7)
    assert loss_of(lines[:1]) == Loss(3.0, 3.0, 3.0, None, 1)
    assert loss_of([{"loss": 1.0}]) == Loss(1.0, 1.0, 1.0, None, 0)
    assert loss_of([{"eval_loss": 4.0}]) is None and loss_of([]) is None


@pytest.mark.parametrize(
    ("productive", "total", "share"), [(3.0, 4.0, 0.75), (5.0, 4.0, 1.0), (0.0, 0.0, 1.0), (0.0, 2.0, 0.0)]
)
def test_the_share_of_time_that_counts(productive: float, total: float, share: float) -> None:
    assert Goodput(productive, total, 1, 0).share == share


def attempted(*attempts: dict[str, Any], metrics: int = 0, alive: float | None = None) -> Goodput | None:
    """Of steps of 2 s. Attempts begin at so many seconds."""
    lines = [{"step": n + 1, "seconds": 2.0} for n in range(metrics)]
    return goodput_of(recording_of(spans_of().clear(), Layout.of(dp=1)), attempts, lines, alive)


def test_an_attempt_whose_line_is_whole() -> None:
    whole = {"started": 100.0, "ended": 130.0, "resumed": 0, "step": 9, "steps": 9}
    assert attempted(whole, metrics=9) == Goodput(18.0, 30.0, 1, 0)
    assert attempted(whole, metrics=7) == Goodput(14.0, 30.0, 1, 2)
    assert attempted({"started": "noon"}, whole, metrics=9) == Goodput(18.0, 30.0, 1, 0)
    early = whole | {"ended": 90.0}
    assert attempted(early, metrics=9) == Goodput(18.0, 0.0, 1, 0), "a clock that was put back"


def test_an_attempt_that_goes_on() -> None:
    """It was restarted in 3 s and is at the sixth step; steps after the one it resumed from are its
    own."""
    goes_on = {"started": 100.0, "ended": None, "resumed": 2, "step": 3, "steps": 1, "restart_seconds": 3.0}
    assert attempted(goes_on, metrics=6) == Goodput(12.0, 3.0 + 4 * 2.0, 1, 0)
    assert attempted(goes_on, metrics=6, alive=150.0) == Goodput(12.0, 50.0, 1, 0)
    assert attempted(goes_on, metrics=6, alive=101.0) == Goodput(12.0, 11.0, 1, 0), "metrics tell of more"
    before = {"started": 40.0, "ended": 60.0, "resumed": 0, "step": 4, "steps": 4}
    assert attempted(before, goes_on, metrics=6) == Goodput(12.0, 71.0, 2, 2)
    assert attempted(before, goes_on | {"resumed": True, "steps": 0}, metrics=6) == Goodput(12.0, 63.0, 2, 0)


def test_waits_between_launchers_stand_apart() -> None:
    first = {"started": 0.0, "ended": 10.0, "resumed": 0, "step": 1, "steps": 1}
    second = {"started": 25.0, "ended": 30.0, "resumed": 1, "step": 2, "steps": 1}
    assert attempted(first, second, metrics=2) == Goodput(4.0, 30.0, 2, 0)
    assert attempted(first, second | {"wait_seconds": 15.0}, metrics=2) == Goodput(4.0, 30.0, 2, 0)
    assert attempted(first, second | {"wait_seconds": None}, metrics=2) == Goodput(4.0, 15.0, 2, 0, 15.0)
    overlapping = second | {"started": 5.0, "wait_seconds": None}
    assert attempted(first, overlapping, metrics=2) == Goodput(4.0, 30.0, 2, 0, 0.0)
    third = {"started": 50.0, "ended": 60.0, "resumed": 2, "step": 3, "steps": 1, "wait_seconds": None}
    long = first | {"ended": 40.0}
    assert attempted(long, second, third, metrics=3) == Goodput(6.0, 50.0, 3, 0, 10.0), (
        "the first ended after the second"
    )


def test_without_a_history_a_clock_that_goes_back_is_a_restart() -> None:
    spans = spans_of(
        *({"step": n, "start": at, "end": at + 2.0} for n, at in enumerate([0.0, 3.0, 100.0, 50.0])),
        {"step": 0, "rank": 1, "end": 900.0},
    )
    recording = recording_of(spans, Layout.of(dp=2), seconds={0: 1.5})
    assert goodput_of(recording, [], []) == Goodput(1.5 + 3 * 2.0, 102.0 + 2.0, 2, 0)
    assert goodput_of(recording_of(spans.clear(), Layout.of(dp=2)), [], []) is None


def checkpoints(folder: Path, saved: list[str], recording: Recording) -> CheckpointPauses | None:
    for name in saved:
        (folder / "checkpoints" / name).mkdir(parents=True)
    return checkpoints_of(recording, folder)


def test_what_checkpoints_cost_where_they_were_recorded(tmp_path: Path) -> None:
    """Steps of 4 s; the slower of two ranks counts, and what the end waits for stands apart."""
    times = {1: (0.5, 1.0), 3: (2.0, 1.0), 5: (9.0, 8.0)}
    spans = spans_of(
        *({"step": n, "rank": r, "kind": "compute", "end": 3.0} for n in range(6) for r in range(2)),
        *({"step": n, "rank": r, "kind": "checkpoint", "end": both[r]} for n, both in times.items() for r in range(2)),
    )
    recording = recording_of(spans, Layout.of(dp=2), seconds=dict.fromkeys(range(6), 4.0))
    saved = ["step-00000002", "step-00000004", "step-00000010", "step-x", "other"]
    assert checkpoints(tmp_path, saved, recording) == CheckpointPauses(3, 1.5, 4.0, 1.5 / (1.5 + 4 * 4.0), 9.0)
    (tmp_path / "one").mkdir()
    assert checkpoints(tmp_path / "one", saved[:1], recording) == CheckpointPauses(1, 1.5, None, None, 9.0)
    (tmp_path / "none").mkdir()
    assert checkpoints(tmp_path / "none", [], recording) is None
    quiet = replace(recording, seconds={})
    assert checkpoints_of(quiet, tmp_path) == CheckpointPauses(3, 1.5, 4.0, None, 9.0)


def test_what_checkpoints_cost_by_what_passes_between_steps(tmp_path: Path) -> None:
    """0.1 s without one, and 0.5 s and 0.7 s with one, on the rank that waits longest."""
    begins, at = list[float](), 0.0
    for pause in (0.1, 0.5, 0.1, 0.7, 0.1, 0.0):
        begins.append(at)
        at += 1.0 + pause
    rows = [{"step": n, "rank": r, "start": begin, "end": begin + 1.0 + 0.05 * r * (n != 2)}
            for n, begin in enumerate(begins) for r in range(2)]  # fmt: skip
    recording = recording_of(spans_of(*rows), Layout.of(dp=2), seconds=dict.fromkeys(range(6), 1.0))
    found = checkpoints(tmp_path, ["step-2", "step-4"], recording)
    assert found is not None
    assert (found.count, found.every, found.last) == (2, 2.0, None)
    assert found.seconds == pytest.approx(0.6 - 0.1) and found.share == pytest.approx(0.5 / (0.5 + 2))
    (tmp_path / "all").mkdir()
    whole = checkpoints(tmp_path / "all", [f"step-{n}" for n in range(1, 7)], recording)
    assert whole is not None and whole.seconds is None and whole.share is None, "with nothing to compare"
    (tmp_path / "later").mkdir()
    assert (later := checkpoints(tmp_path / "later", ["step-40"], recording)) and later.seconds is None
    lost = recording_of(spans_of(*(row for row in rows if row["step"] != 2)), Layout.of(dp=2))
    assert (found := checkpoints_of(lost, tmp_path)) and found.seconds == pytest.approx(0.7 - 0.1)


def test_short_steps_that_follow_each_other_are_no_restarts() -> None:
    rows = [{"step": n, "start": 0.4 * n, "end": 0.4 * n + 0.3} for n in range(5)]
    found = goodput_of(recording_of(spans_of(*rows), Layout.of(dp=1)), [], [])
    assert found is not None
    assert tuple(found) == pytest.approx((1.5, 1.9, 1, 0, 0.0))

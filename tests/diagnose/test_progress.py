"""How a run got on: runs that go on after a restart, or whose launcher was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from plait.diagnose.explain import explain
from plait.diagnose.predicted import Row
from plait.diagnose.progress import Goodput
from plait.diagnose.reading import read_run
from tests.diagnose.made import Job, write_run

FAILED = {"attempt": 1, "started": 1000.0, "ended": 1040.0, "outcome": "failed", "resumed": 0, "step": 8, "steps": 8}
GOES_ON = {
    "attempt": 2, "started": 1045.0, "ended": None, "outcome": "running", "resumed": 5, "step": 6, "steps": 1,
    "restart_seconds": 10.0, "first_step_seconds": 1.0,
}  # fmt: skip


def goodput(folder: Path, attempts: list[dict[str, Any]], *, steps: int, copied: bool = False) -> Goodput:
    """Of a run whose steps took 2 seconds each, and whose metrics were last written at second 1085."""
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


def test_a_run_that_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The line of an attempt that runs stays at its first step: metrics tell how far it is."""
    found = goodput(tmp_path, [FAILED, GOES_ON], steps=15)
    assert (found.productive, found.total) == (30.0, 85.0)
    assert (found.attempts, found.redone) == (2, 3)


def test_a_launcher_that_was_killed_in_the_first_attempt(tmp_path: Path) -> None:
    killed = GOES_ON | {"started": 1056.0, "resumed": 0, "step": 1, "restart_seconds": 0.5, "first_step_seconds": 0.5}
    found = goodput(tmp_path, [killed], steps=5)
    assert (found.productive, found.total, found.attempts, found.redone) == (10.0, 29.0, 1, 0)


def test_times_of_a_copys_files_tell_nothing(tmp_path: Path) -> None:
    """But what its steps took does."""
    found = goodput(tmp_path, [FAILED, GOES_ON], steps=15, copied=True)
    assert (found.productive, found.total) == (30.0, 45.0 + 10.0 + 10 * 2.0)


def test_one_that_has_not_trained_yet_has_done_nothing(tmp_path: Path) -> None:
    starts = GOES_ON | {"resumed": -1, "step": -1, "steps": 0, "restart_seconds": None, "first_step_seconds": None}
    found = goodput(tmp_path, [FAILED, starts], steps=8)
    assert (found.total, found.attempts, found.redone) == (85.0, 2, 0)


@pytest.mark.parametrize(("predicted", "ratio"), [(1e-9, None), (0.0, None), (1e-6, 2000.0), (1e-3, 2.0)])
def test_no_ratio_to_next_to_nothing(predicted: float, ratio: float | None) -> None:
    measured = 2e-3
    assert Row("transfer", "pp", "backward", predicted, measured).ratio == (ratio and pytest.approx(ratio))

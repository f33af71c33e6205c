"""A disk that is full costs what could not be written; a run folder that is gone ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import train, write_job

pytestmark = pytest.mark.slow


def test_metrics_that_cannot_be_written_do_not_end_training(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=4)
    run = tmp_path / "runs" / "job"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").symlink_to("/dev/full")
    (run / "summary.json").mkdir()  # cannot be replaced by a file
    (run / "timeline").write_text("in the way")
    done = train(job)
    assert done.stdout.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert "summary.json cannot be written" in done.stdout
    assert "missing: metrics.jsonl of 4 steps" in done.stdout
    assert done.stderr.count("the timeline cannot be written") == 1
    assert "trained 4 steps" in done.stdout
    assert list((run / "checkpoints").glob("step-*4"))

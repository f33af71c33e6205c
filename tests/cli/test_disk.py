"""A disk that is full costs what could not be written; a run folder that is gone ends the run."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.runs import start, train, wait_for_step, write_job

pytestmark = pytest.mark.slow


def test_metrics_that_cannot_be_written_do_not_end_training(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=4)
    run = tmp_path / "runs" / "job"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").symlink_to("/dev/full")
    (run / "summary.json").mkdir()  # cannot be replaced by a file
    (run / "timeline").write_text("in the way")
    done = train(job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert "summary.json cannot be written" in done.stdout
    assert "missing: metrics.jsonl of 4 steps" in done.stdout
    assert done.stderr.count("the timeline cannot be written") == 1
    assert "trained 4 steps" in done.stdout
    assert list((run / "checkpoints").glob("step-*4"))


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_run_folder_that_goes_while_it_runs_ends_the_run(tmp_path: Path, how: str) -> None:
    job = write_job(tmp_path, steps=100000, every=0)
    run = tmp_path / "runs" / "job"
    process = start(job)
    try:
        wait_for_step(process, job, 2)
        if how == "removed":
            run.rename(tmp_path / "doomed")  # at once, so that nothing is written in between
            shutil.rmtree(tmp_path / "doomed")
        else:
            run.rename(tmp_path / "runs" / "elsewhere")
        _, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert f"the run folder {run} was removed or moved" in " ".join(errors.split())
    assert not run.exists(), "nothing is written where the folder was"

"""Commands whose standard streams were closed: what they print is lost, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from plait.core.base.process import command_of
from tests.support.runs import metrics, write_job


def closed(*words: str, how: str) -> subprocess.CompletedProcess[str]:
    """A command with streams closed as a shell does it."""
    argv = ["sh", "-c", f'exec "$@" {how}', "sh", *command_of("plait.cli.main", *words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "status", "how"),
    [
        ("--version", 0, ">&-"),
        ("train --help", 0, ">&- 2>&-"),
        ("schedule 1f1b pp=2 micro_batches=2", 0, "<&- >&- 2>&-"),
        ("lab list --json", 0, "<&-"),
        ("diagnose no-such-run", 2, ">&-"),
        ("export no-such-run --out out", 2, "<&- >&- 2>&-"),
        ("train no-such-job.toml", 2, "<&-"),
    ],
)
def test_a_command_does_what_it_does(words: str, status: int, how: str) -> None:
    done = closed(*words.split(), how=how)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert ("plait: " in done.stderr) == (status == 2 and "2>" not in how)


def test_a_run_trains_and_nothing_lands_in_its_files(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=3)
    done = closed("train", str(job), f"run.folder={tmp_path / 'runs'}", "strategy.tp=1", how="<&- >&- 2>&-")
    assert done.returncode == 0, done.stderr
    assert [one["step"] for one in metrics(job)] == [1, 2, 3]
    run = tmp_path / "runs" / "job"
    assert all(line.startswith("{") for line in (run / "metrics.jsonl").read_text().splitlines())
    assert (run / "lock.json").exists() is False and list((run / "checkpoints").iterdir())

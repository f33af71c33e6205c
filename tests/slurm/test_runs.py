"""``plait runs``, ``stop`` and ``logs`` on runs of a real Slurm that nobody follows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plait.core.runs.attempts import read_attempts
from tests.support.command import plait
from tests.support.lab import wait_until
from tests.support.managed import saved_steps, stopped_after, write_job
from tests.support.slurm import SlurmCluster, ask, environment

pytestmark = pytest.mark.system


def command(cluster: SlurmCluster, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return plait(*words, folder=folder, variables=environment(cluster))


def submit(cluster: SlurmCluster, folder: Path, *options: str) -> str:
    """A run that trains for hours; its job's number."""
    job = write_job(folder, 100_000)
    done = command(cluster, folder, "train", job, *options, "--on", "slurm", "--no-follow")
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    return words[words.index("job") + 1].rstrip(";")


def listed(cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    done = command(cluster, folder, "runs", "--json")
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["runs"]
    return one


def stop_again(cluster: SlurmCluster, folder: Path, state: str) -> None:
    again = command(cluster, folder, "stop", "job")
    assert again.returncode == 0, again.stderr
    assert f"job does not run: it is {state}; nothing was stopped" in again.stdout


def test_a_job_that_runs_is_saved_and_ended(cluster: SlurmCluster, tmp_path: Path) -> None:
    number = submit(cluster, tmp_path)
    wait_until(lambda: saved_steps(tmp_path), "no checkpoint was saved", seconds=90)
    one = listed(cluster, tmp_path)
    assert (one["state"], one["where"], one["slurm"]) == ("running", f"Slurm job {number}", [number])
    done = command(cluster, tmp_path, "stop", "job")
    assert done.returncode == 0 and f"asking Slurm job {number} to save and end" in done.stderr, done.stderr
    last = saved_steps(tmp_path)[-1]
    assert last == stopped_after(tmp_path), "the last checkpoint is the one of the stop"
    assert f"job is stopped after step {last}; the same command goes on from step {last}" in done.stdout
    assert read_attempts(tmp_path / "runs" / "job")[-1].outcome == "stopped"
    told = command(cluster, tmp_path, "logs", "job").stdout
    assert f"[slurm {number}] " in told and "ending all ranks at once" not in told
    wait_until(lambda: not ask(cluster, "squeue", "-h", "-o", "%A").strip(), "the job goes on", seconds=30)
    stop_again(cluster, tmp_path, "stopped")


def test_a_job_that_waits_is_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    number = submit(cluster, tmp_path, 'slurm.options=["--begin=now+1hour"]')
    one = listed(cluster, tmp_path)
    assert (one["state"], one["where"], one["slurm"]) == ("waiting", f"Slurm job {number}", [number])
    done = command(cluster, tmp_path, "stop", "job")
    assert done.returncode == 0 and f"cancelling Slurm job {number}" in done.stderr, done.stderr
    assert not ask(cluster, "squeue", "-h", "-o", "%A").strip()
    stop_again(cluster, tmp_path, "new")


def test_a_job_whose_ranks_hang_is_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    number = submit(cluster, tmp_path)
    wait_until(lambda: saved_steps(tmp_path), "no checkpoint was saved", seconds=90)
    ask(cluster, "scancel", "--signal=STOP", "--full", number)
    done = command(cluster, tmp_path, "stop", "job", "--wait", 2)
    assert done.returncode == 1 and "runs/job --kill ends it at once" in done.stdout, done.stdout + done.stderr
    done = command(cluster, tmp_path, "stop", "job", "--kill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not ask(cluster, "squeue", "-h", "-o", "%A").strip()

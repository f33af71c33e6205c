"""``plait train plan.json``: a plan is obeyed as it stands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.runs import command, curve, train, write_job

pytestmark = pytest.mark.slow


def train_plan(job: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Train by the plan that the run of ``job`` has left."""
    argv = command(job.parent / "runs" / "job" / "plan.json", *settings)
    argv = [word for word in argv if not word.startswith("run.folder=")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def test_a_plan_is_obeyed_as_it_stands(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=5)
    train(job)
    before = (tmp_path / "runs" / "job" / "plan.json").read_bytes()

    again = train_plan(job)
    assert again.returncode == 0, again.stderr
    assert "already trained for 5 steps" in again.stdout
    assert (tmp_path / "runs" / "job" / "plan.json").read_bytes() == before

    anew = train_plan(job, "run.name=anew")
    assert anew.returncode == 0, anew.stderr
    assert curve(job, "anew") == curve(job)

    other = train_plan(job, "train.steps=9")
    assert other.returncode == 2
    assert "'train.steps=9' would change the plan" in " ".join(other.stderr.split())

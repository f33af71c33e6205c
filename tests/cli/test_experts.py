"""A model with experts is planned for, and refused by everything that would run it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from plait.core.base.process import command_of
from tests.support.command import plait, succeed

JOB = """
[model]
family = "llama"
num_layers = 2
hidden = 32
num_heads = 4
ffn_hidden = 64
[model.experts]
count = 4
per_token = 2
[data]
sequence_length = 16
[train]
global_batch_size = 4
[strategy]
dp = 1
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def refused(done: subprocess.CompletedProcess[str]) -> bool:
    text = " ".join(done.stderr.split())
    return done.returncode == 2 and "model.experts: a model with 4 experts" in text and "Traceback" not in text


def test_training_is_refused_before_any_rank_starts(job: Path) -> None:
    for more in ((), ("--dry-run",)):
        assert refused(plait("train", job, *more, folder=job.parent))
    assert not (job.parent / "runs").exists()


def test_a_plan_is_written_and_refused_by_training_and_by_a_rank(job: Path) -> None:
    cluster = ("cluster.preset=h100", "cluster.ranks=1")
    succeed("plan", job, *cluster)
    assert job.with_suffix(".plan.json").is_file()
    assert refused(plait("train", job.with_suffix(".plan.json"), folder=job.parent))
    for option in ("--measure=1", "--show=torchtitan"):
        assert refused(plait("plan", job, *cluster, option))
    job.with_suffix(".plan.json").rename(job.parent / "plan.json")  # as in a run's folder
    argv = command_of("plait.train.worker", str(job.parent))
    assert refused(subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False))

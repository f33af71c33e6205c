"""A model with experts is planned, trained and resumed on other ranks; what cannot be trained yet is
refused by key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
balance_loss = 0.01
[data]
sequence_length = 16
[train]
global_batch_size = 8
micro_batch_size = 2
steps = 4
checkpoint_every = 2
learning_rate = 1e-3
warmup_steps = 0
lr_decay_style = "constant"
precision = "fp64"
[strategy]
dp = 1
slices = { batch = 1 }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def losses(job: Path, name: str) -> list[float]:
    lines = (job.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_run_goes_on_with_experts_on_other_ranks(job: Path) -> None:
    succeed("train", job, "run.name=alone", folder=job.parent)
    shared = ("strategy.dp=2", "strategy.ep=2", "train.steps=2", "run.name=shared", "strategy.shard=zero3")
    succeed("train", job, *shared, folder=job.parent)
    succeed("train", job, "strategy.tp=2", "run.name=shared", folder=job.parent)
    assert losses(job, "shared") == pytest.approx(losses(job, "alone"), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "key", "fix"),
    [
        (["train.optimizer=muon"], "train.optimizer", 'Use "adamw"'),
        (["strategy.cuda_graphs=true"], "strategy.cuda_graphs", "Use false"),
        (["strategy.dp=3", "strategy.ep=3", "train.global_batch_size=6"], "strategy.ep", "divide the 4 experts"),
        (["strategy.tp=2", "strategy.etp=1"], "strategy.etp", "Set strategy.sequence_parallel=true"),
        (["model.experts.groups=3"], "model.experts.groups", "3 groups of 4 experts"),
    ],
)
def test_what_experts_cannot_do_is_refused_by_key(job: Path, settings: list[str], key: str, fix: str) -> None:
    done = plait("train", job, *settings, folder=job.parent)
    text = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert key in text
    assert fix in text
    assert not (job.parent / "runs").exists()

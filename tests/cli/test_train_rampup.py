"""A batch that ramps up: the same losses in every shape of a run, and when it goes on in the
middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import metrics, train, write_job

pytestmark = pytest.mark.slow

SETTINGS = (
    "train.precision=fp64", "train.micro_batch_size=1", "train.global_batch_size=8", "train.lr_decay_steps=9",
    "train.rampup_batch_size={ start = 2, increment = 2, samples = 20 }", "strategy.slices.batch=1", "strategy.tp=1",
    "train.steps=9", "train.eval_every=0",
)  # fmt: skip
SEQUENCES = [2, 2, 2, 2, 4, 4, 6, 8, 8]
SHAPES = {
    "data parallel, sharded": ("strategy.dp=2", "strategy.shard=zero2"),
    "split backwards": ("strategy.pp=2", "strategy.schedule=zb-h1"),
}


def numbers(job: Path) -> list[float]:
    """Loss and norm of every step."""
    return [one[name] for one in metrics(job) for name in ("loss", "norm")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    job = write_job(tmp_path_factory.mktemp("alone"))
    train(job, *SETTINGS)
    return job


def test_steps_have_as_many_tokens_as_the_ramp_says(alone: Path) -> None:
    assert [round(one["seconds"] * one["tokens_per_second"]) for one in metrics(alone)] == [16 * n for n in SEQUENCES]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_same_losses(alone: Path, tmp_path: Path, shape: str) -> None:
    job = write_job(tmp_path)
    train(job, *SETTINGS, *SHAPES[shape])
    assert numbers(job) == pytest.approx(numbers(alone), rel=1e-10, abs=0)


def test_it_goes_on_in_the_middle_in_another_shape(alone: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    done = train(job, *SETTINGS, *SHAPES["data parallel, sharded"], "train.steps=5")
    done = train(job, *SETTINGS, "strategy.pp=2", "strategy.schedule=1f1b")
    assert "resuming after step 5" in done.stdout, done.stderr
    assert numbers(job) == pytest.approx(numbers(alone), rel=1e-10, abs=0)

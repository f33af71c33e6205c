"""What is advised where a job does not fit, what GPUs answer, and numbers in words."""

from __future__ import annotations

import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.errors import InfeasiblePlan
from plait.core.base.text import in_bytes
from plait.core.job.spec import Job
from plait.core.step.memory.estimate import estimate
from plait.plan.make import job_step
from plait.plan.search import fits
from plait.plan.search.fits import AvailableMemory, check_fits, check_size, gpus

SMALL = {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "max_sequence": 128, "vocab": 300}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("parameters", "told"),
    [(3_400_000, "3.4 million"), (10**9, "1 billion"), (2_345 * 10**9, "2345 billion"), (10**15, "1e+15")],
)
def test_parameters_in_words(monkeypatch: pytest.MonkeyPatch, parameters: int, told: str) -> None:
    job = Job.from_dict({"model": SMALL})
    model = SimpleNamespace(num_layers=10_001, num_parameters=parameters, hidden=1, levels=0)
    monkeypatch.setattr(Job, "model_spec", lambda *_: model)
    with pytest.raises(InfeasiblePlan, match=rf"of a model of {told.replace('+', '[+]')} parameters need at least"):
        check_size(job, 300, AvailableMemory(shared=1))


def refused(job: Job, there: AvailableMemory) -> str:
    with pytest.raises(InfeasiblePlan) as caught:
        check_fits(job, estimate(job_step(job, 300), gpu=bool(there.each)), 300, there)
    return str(caught.value)


def test_changes_that_are_absurd_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than a million computations no schedule is written out."""
    job = Job.from_dict({
        "model": SMALL, "data": {"sequence_length": 64}, "strategy": {"pp": 2, "recompute": "selective", "dp": 3},
        "train": {"global_batch_size": 1_800_000, "micro_batch_size": 3},
    })  # fmt: skip
    found = estimate(job_step(job.changed(["train.global_batch_size=18"]), 300))
    most, walked = found.most.memory.total, list[Job]()
    monkeypatch.setattr(fits, "job_step", lambda one, _: walked.append(one))
    monkeypatch.setattr(fits, "estimate", lambda _, **__: found)
    with pytest.raises(InfeasiblePlan) as caught:
        check_fits(job, found, 300, AvailableMemory(each=most - 1, what="each of 8 GPUs"))
    said = str(caught.value)
    assert said.endswith("Use a smaller model, shorter sequences or smaller micro-batches, or many more ranks.")
    assert f"each of 8 GPUs has {in_bytes(most - 1)}. " in said
    assert walked and all(one.num_micro_batches * one.strategy.pp <= fits.MOST_OPS for one in walked)


def test_of_unequal_places_no_degree_is_changed() -> None:
    job = Job.from_dict({
        "model": SMALL, "data": {"sequence_length": 64}, "train": {"global_batch_size": 16, "micro_batch_size": 4},
        "strategy": {"pp": 2, "dp": [4, 2], "tp": [1, 2], "cp": 2, "schedule": "1f1b"},
    })  # fmt: skip
    every = estimate(job_step(job, 300)).bytes
    said = refused(job, AvailableMemory(shared=every - 1))
    assert "would fit with strategy.shard=zero1." in said
    assert f"are available on this machine, where all 16 ranks would need {in_bytes(every)}. " in said
    # On one machine more ranks bring no more memory.
    assert refused(job, AvailableMemory(shared=1)).endswith("smaller micro-batches, or more machines.")


def answering(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
    def run(_command: object, **_: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(shutil, "which", lambda _: "/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("81920\n81559\n", [81920 << 20, 81559 << 20]),
        ("", []),
        ("[N/A]\n", []),
        (OSError(2, "no"), []),
        (subprocess.TimeoutExpired("nvidia-smi", 10), []),
        (subprocess.CalledProcessError(9, "nvidia-smi"), []),
    ],
)
def test_memory_of_gpus_is_what_their_tool_says(
    monkeypatch: pytest.MonkeyPatch, answer: str | Exception, found: list[int]
) -> None:
    answering(monkeypatch, answer)
    assert gpus() == found
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert gpus() == []

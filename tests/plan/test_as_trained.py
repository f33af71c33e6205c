"""Runs as they were trained and published: each fits into its device, and its step is within 12 %.

Llama 3 405B: arXiv 2407.21783, table 4 (degrees, batch, TFLOPs a GPU: 430, 400, 380) and section 3.3.2: a
layer fewer in the first and the last stage, one layer a stage, no recomputation. Seconds are those of the
FLOPs of a step, with and without the hidden half of attention's scores. Nemotron-4 340B: arXiv 2406.11704,
table 2.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Candidate, Planner, step_flops
from tests.plan.test_read_megatron import NEMOTRON, read

H100 = Cluster.preset("h100")
WITHIN = 0.12
LONG = {"dp": 8, "cp": 16, "cp_comm_type": "ring"}


def llama(sequence: int, batch: int, **strategy: Any) -> Planner:
    """As Meta trained it."""
    trained: dict[str, Any] = {
        "tp": 8, "pp": 16, "schedule": "interleaved", "virtual_stages": 8, "shard": "zero1", "overlap": "async",
        "sequence_parallel": True,
    }  # fmt: skip
    values = {
        "model": {"preset": "llama3-405b"},
        "data": {"sequence_length": sequence},
        "train": {"global_batch_size": batch, "micro_batch_size": 1, "precision": "bf16-mixed"},
        "plan": {"framework": "llama3"},
        "strategy": trained | strategy,
    }
    return Planner(Job.from_dict(values), H100, 128256)


def nemotron(replicas: int, batch: int) -> Candidate:
    told = read(NEMOTRON)
    one = told.job([f"cluster.ranks={96 * replicas}", f"train.global_batch_size={batch}"])
    return Planner(one, H100, one.model_spec(1).vocab, told_framework=told.runs).checked().best


@pytest.mark.parametrize(
    ("sequence", "batch", "strategy", "tflops"),
    [(8192, 2048, {"dp": 64}, 430), (8192, 2048, {"dp": 128}, 400), (131072, 128, LONG, 380)],
    ids=["8192-gpus", "16384-gpus", "131072-tokens"],
)
def test_llama_3_405b(sequence: int, batch: int, strategy: dict[str, Any], tflops: int) -> None:
    planner = llama(sequence, batch, **strategy)
    best = planner.checked().best
    assert best.memory.fits
    whole, causal = (
        flops / (tflops * 1e12 * best.job.world_size) for flops in step_flops(planner.model, sequence, batch)
    )
    assert (1 - WITHIN) * causal < best.seconds < (1 + WITHIN) * whole


@pytest.mark.parametrize(("replicas", "batch", "seconds"), [(16, 768, 10.3), (32, 1536, 10.3), (64, 2304, 8.0)])
def test_nemotron_4_340b(replicas: int, batch: int, seconds: float) -> None:
    best = nemotron(replicas, batch)
    assert best.memory.fits and best.seconds == pytest.approx(seconds, rel=WITHIN)


def test_what_meta_s_runtime_does_otherwise_is_what_lets_it_fit() -> None:
    """Inputs of stages that are let go of, and gradients of one stage at a time: 14 GiB of 94."""
    planner = llama(8192, 2048, dp=64)
    theirs = planner.checked().best.most_memory
    megatron = Planner(Job.from_dict(planner.job.to_dict() | {"plan": {"framework": "megatron"}}), H100, 128256)
    others = megatron.predict(megatron.job)
    assert not others.memory.fits and others.most_memory - theirs > 14 << 30

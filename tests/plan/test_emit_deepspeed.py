"""Strategies as configurations of DeepSpeed: everything is said, or named as unsaid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.core.job.spec import Job
from plait.plan.emit import emit
from tests.plan.test_emit import job


@pytest.mark.parametrize(
    ("strategy", "found", "unsaid"),
    [
        ({"dp": 8, "shard": "ddp"}, {"zero_optimization": {"stage": 0, "overlap_comm": True}}, []),
        (
            {"dp": 8, "shard": "zero2", "overlap": "sync"},
            {"zero_optimization": {"stage": 2, "overlap_comm": False}}, [],
        ),
        (
            {"dp": 8, "shard": {"params": 8, "grads": 8, "optim": 8, "secondary": 4}},
            {"zero_optimization": {"stage": 3, "overlap_comm": True, "zero_hpz_partition_size": 4}}, [],
        ),
        (
            {"dp": 8, "shard": {"params": 1, "grads": 1, "optim": 4}},
            {"zero_optimization": {"stage": 1, "overlap_comm": True}}, ["shard.optim = 4"],
        ),
        (
            {"dp": 4, "pp": 2, "schedule": "1f1b", "recompute": "full"},
            {
                "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
                "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
            }, [],
        ),
        (
            {"dp": 8, "recompute": "full"},
            {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}},
            ["recompute = full (the model's code"],
        ),
        ({"dp": 4, "pp": 2, "schedule": "zb-h1"}, {}, ["schedule = zb-h1 (1f1b stands"]),
        (
            {"dp": 4, "pp": 2, "schedule": "1f1b", "shard": {"params": 4, "grads": 4, "optim": 4, "secondary": 2}},
            {"zero_optimization": {"stage": 1, "overlap_comm": True}},
            ["ZeRO-3 within a pipeline (ZeRO-1 stands"],
        ),
        (
            {"dp": 2, "pp": 2, "cp": 2, "cp_comm_type": "ulysses", "schedule": "1f1b"}, {},
            ["cp = 2 within a pipeline, which it refuses"],
        ),
        (
            {"dp": 4, "tp": 2, "sequence_parallel": True},
            {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}},
            ["sequence_parallel (", "overlap.tp = domino"],
        ),
        ({"dp": 4, "cp": 2, "cp_comm_type": "ring"}, {"sequence_parallel_size": 2}, ["cp_comm_type with rings of 2"]),
        ({"dp": 8, "recompute": "selective", "compile": True}, {}, ["recompute = selective", "compile ("]),
    ],
)  # fmt: skip
def test_deepspeed_s_configuration(strategy: dict[str, Any], found: dict[str, Any], unsaid: list[str]) -> None:
    one = job(**strategy)
    told = emit(one, "deepspeed")
    values = json.loads(told.text)
    assert {key: values[key] for key in found} == found
    assert values["train_batch_size"] == 64 and values["train_micro_batch_size_per_gpu"] * values[
        "gradient_accumulation_steps"] * one.degrees[0][0] == 64  # fmt: skip
    assert len(told.unsaid) == len(unsaid) + 1  # the model is always the program's
    for words in unsaid:
        assert any(line.startswith(words) for line in told.unsaid), (words, told.unsaid)


@pytest.mark.parametrize(("stage", "ratio", "unsaid"), [("fsdp", 0.5, 0), ("zero1", None, 1), ("ddp", None, 2)])
def test_deepspeed_s_offload(stage: str, ratio: float | None, unsaid: int) -> None:
    one = Job.from_dict(job(dp=8, shard=stage).to_dict() | {"recipe": {"optimizer_offload_fraction": 0.5}})
    told = emit(one, "deepspeed")
    assert json.loads(told.text)["zero_optimization"]["offload_optimizer"].get("ratio") == ratio
    assert sum("optimizer_offload_fraction" in line for line in told.unsaid) == unsaid

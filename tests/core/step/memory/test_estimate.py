"""Estimates of worlds of any size: from representatives, and yet what counting everything gives."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import TracedBatch, activations
from plait.core.step.memory.estimate import estimate
from plait.core.step.memory.pipeline_memory import stage_activations
from plait.core.step.segments import Phase
from plait.core.step.stages import Stage
from plait.core.step.step import Step
from plait.plan.make import job_step

PRESETS = sorted(path.stem for path in Path("specs/models").glob("*.toml") if "[experts]" not in path.read_text())[::5]
LIMIT = 20.0
"""Seconds; it takes less than one on a machine that does nothing else."""
LLAMA = ModelSpec(
    family="llama", num_layers=64, hidden=64, num_heads=4, num_kv_heads=2, ffn_hidden=160, vocab=96, max_sequence=64
)


def of(preset: str, strategy: dict[str, Any], *, batch: int = 64, micro: int = 1, sequence: int = 1024) -> Step:
    return job_step(
        Job.from_dict(
            {
                "model": {"preset": preset},
                "data": {"sequence_length": sequence},
                "train": {"global_batch_size": batch, "micro_batch_size": micro},
                "strategy": strategy,
            }
        ),
        vocab=257,
    )


@pytest.mark.parametrize("phases", [("step",), ("F", "B"), ("F", "I", "W")])
@pytest.mark.parametrize("changes", [
    {},
    {"overlap": "sync", "sequence_parallel": True},
    {"recompute": "full"},
    {"recompute": "selective", "recompute_layers": 20},
    {"recompute": "full", "recompute_layers": 37},
    {"recompute": "layer", "recompute_layers": 37},
    {"p1": 2},
], ids=str)  # fmt: skip
def test_layers_that_are_not_walked_count_as_if_they_were(changes: dict[str, Any], phases: tuple[Phase, ...]) -> None:
    values: dict[str, Any] = {"tp": 2} | changes
    strategy = Strategy(**values)
    stage = Stage(0, 1, 0, 40) if phases == ("step",) else Stage(1, 3, 1, 40)
    micro = TracedBatch(batch=2, sequence=64, itemsize=4, phases=phases)
    whole = activations(LLAMA, strategy, stage, micro)
    found = stage_activations(LLAMA, strategy, stage, micro)
    assert (found.kept, found.held) == (whole.kept, pytest.approx(whole.held, rel=0.01))
    for moment in ("forward_peak", "backward_peak", "weight_peak"):
        assert getattr(found, moment) == pytest.approx(getattr(whole, moment), rel=0.01), moment


def test_llama_405b_on_16384_ranks() -> None:
    strategy = {"tp": 8, "pp": 16, "dp": 8, "cp": 16, "cp_comm_type": "ring", "shard": "zero1"}
    start = time.process_time()
    found = estimate(of("llama3-405b", strategy, batch=2048, sequence=8192))
    assert time.process_time() - start < LIMIT
    assert found.world_size == 16384
    assert [each.ranks for each in found.places] == [(i * 1024, i * 1024 + 1023) for i in range(16)]
    # One data-parallel replica holds every parameter once, but for key/value heads and norms on all of tp.
    whole = 8 * sum(each.memory.parameters for each in found.places)
    assert whole == pytest.approx(4 * found.parameters, rel=1e-3)
    assert 8 * sum(each.memory.optimizer for each in found.places) == pytest.approx(
        8 * found.parameters / 128, rel=1e-3
    )
    # Earlier stages have more micro-batches alive.
    alive = [each.memory.alive for each in found.places]
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_estimated_at_once(preset: str) -> None:
    values = ModelSpec.preset_values(preset, Path("specs/models"))
    for strategy in (
        {"tp": math.gcd(4, values["num_heads"])},
        {"pp": 5, "dp": 8, "shard": "fsdp", "schedule": "zb-h1"},
    ):
        start = time.process_time()
        found = estimate(of(preset, strategy))
        assert time.process_time() - start < LIMIT
        assert found.most.memory.parameters * found.world_size >= 4 * found.parameters / (8 if "dp" in strategy else 1)


def test_an_estimate_is_plain_json() -> None:
    values = estimate(of("gpt3-125m", {"tp": 2, "pp": 2, "dp": 2, "shard": "fsdp"})).to_dict()
    assert json.loads(json.dumps(values)) == json.loads(json.dumps(values, default=pytest.fail))
    assert set(values["places"][0]) == {
        "index", "ranks", "dp", "cp", "tp", "layers", "share", "memory", "sent",
    }  # fmt: skip
    memory = values["places"][0]["memory"]
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    assert memory["total"] == sum(memory[kind] for kind in kinds)
    assert {"tp", "params", "pp"} <= set(values["places"][0]["sent"])
    assert values["hidden"]["dp"] == "forward and backward"


def test_a_schedule_that_has_its_transfers_keeps_them() -> None:
    step = of("gpt3-125m", {"pp": 3, "schedule": "1f1b"})
    listed = step.schedule_with_transfers
    assert sum(op.sends for ops in listed.ranks for op in ops) == 2 * 2 * step.workload.num_micro_batches
    assert replace(step, schedule=listed).schedule_with_transfers is listed
    assert replace(step, schedule=listed).schedule_with_transfers == listed

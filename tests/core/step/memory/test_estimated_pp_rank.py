"""A pp rank of an estimate: what its memory and its traffic are made of, and what hides
communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from plait.core.model.experts import Experts
from plait.core.step.memory.estimate import Estimate, estimate, hidden_behind
from plait.core.step.step import Step
from plait.core.step.traffic import (
    replicated_numbers,
)
from plait.plan.make import job_step
from plait.plan.search.volumes import pp_rank_volume

GPT = {"family": "gpt", "num_layers": 4, "hidden": 32, "num_heads": 8, "vocab": 48, "max_sequence": 64}
LLAMA = GPT | {"family": "llama", "ffn_hidden": 96, "num_kv_heads": 2}


def step(model: dict[str, Any] | None = None, *, precision: str = "fp32", **strategy: Any) -> Step:
    values = {
        "model": model or GPT, "data": {"sequence_length": 32}, "strategy": strategy,
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "precision": precision},
    }  # fmt: skip
    return job_step(Job.from_dict(values), vocab=48)


PIPED = {"pp": 2, "schedule": "1f1b"}


def test_sums_at_a_steps_end_may_take_more_than_any_activation() -> None:
    """Of an embedding of a million numbers, and of copies of key/value heads side by side."""
    wide = estimate(step(GPT | {"vocab": 30_000}, **PIPED))
    assert wide.places[0].memory.when == "sum of tied embeddings"
    assert (wide.places[0].memory.activations, wide.places[0].memory.alive) == (30_000 * 32 * 4, 0)
    narrow = LLAMA | {"hidden": 512, "num_heads": 4, "num_kv_heads": 1, "head_size": 128, "ffn_hidden": 8}
    one = step(narrow, tp=4)
    one = replace(one, workload=replace(one.workload, sequence=1, micro_batch=1))
    copies = replicated_numbers(one.model, one.strategy, one.stages[0]) * 4
    memory = estimate(one).places[0].memory
    assert (memory.when, memory.activations) == ("sum of tensor-parallel copies", 2 * copies)


def test_the_fullest_pp_rank_and_all_of_them() -> None:
    found = estimate(step(**PIPED, tp=2, dp=2))
    assert found.world_size == 8
    assert found.bytes == sum(4 * each.memory.total for each in found.places)
    assert found.most.memory.total == max(each.memory.total for each in found.places)
    equal = Estimate(1, "1f1b", 1, 1, (found.places[0], replace(found.places[0], index=1)))
    assert equal.most.index == 0
    assert (found.parameters, found.schedule, found.micro_batches, found.virtual_stages) == (
        step().model.num_parameters, "1f1b", 2, 1,
    )  # fmt: skip
    assert estimate(step(pp=2, schedule="zb-v")).virtual_stages == 2


def test_volumes_of_models_with_experts_are_not_counted_here() -> None:
    one = step()
    one = replace(one, model=replace(one.model, experts=Experts(count=4, per_token=1, ffn_hidden=8)))
    with pytest.raises(JobError) as refused:
        pp_rank_volume(one, 0)
    assert refused.value.key == "model.experts"


BOTH = "other slices, weight gradients"
BEFORE = "attention to the block before"
WEIGHTS = "backward: weight gradients"


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({}, {}),
        ({"tp": 2}, {"tp": WEIGHTS, "rows": "nothing"}),
        ({"tp": 2, "slices": {"batch": 2, "columns": 1}}, {"tp": BOTH, "rows": "other slices"}),
        ({"tp": 2, "slices": {"batch": 1, "columns": 2}}, {"tp": WEIGHTS, "rows": "nothing"}),
        ({"tp": 2, "overlap": "async", "slices": {"batch": 2, "columns": 1}},
         {"tp": f"{WEIGHTS} of the sublayer", "rows": "nothing"}),
        ({"tp": 2, "overlap": "async"}, {"tp": f"{WEIGHTS} of the sublayer", "rows": "nothing"}),
        ({"tp": 2, "overlap": "sync"}, {"tp": "nothing", "rows": "nothing"}),
        ({"tp": 2, "overlap": "no-communication"}, {"tp": "left out", "rows": "nothing"}),
        ({"cp": 2}, {"ulysses": BOTH, "dp": "forward and backward"}),
        ({"cp": 2, "overlap": {"tp": "async", "shard": "forward"}}, {"ulysses": "nothing", "dp": "forward"}),
        ({"cp": 2, "cp_comm_type": "ring"}, {"ring": f"{BEFORE}, {BOTH}", "dp": "forward and backward"}),
        ({"cp": 2, "cp_comm_type": "ring", "overlap": "async"}, {"ring": BEFORE, "dp": "forward and backward"}),
        ({"cp": 2, "cp_comm_type": "ring", "overlap": "sync"}, {"ring": "nothing", "dp": "nothing"}),
        ({"cp": 2, "cp_comm_type": "ring", "overlap": "no-communication"},
         {"ring": "left out", "dp": "forward and backward"}),
        ({"cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}},
         {"ulysses": BOTH, "ring": f"{BEFORE}, {BOTH}", "dp": "forward and backward"}),
        ({"dp": 2, "overlap": {"tp": "sync", "shard": "backward"}}, {"dp": "backward"}),
        ({"pp": 2, "schedule": "gpipe"}, {"pp": "the micro-batches after it"}),
        ({"pp": 2, "schedule": "eager-1f1b"}, {"pp": "one forward or backward each way"}),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
         {"pp": "what the schedule leaves between send and use"}),
        ({"pp": 2, "schedule": "1f1b", "dp": [2, 1], "tp": [1, 2]},
         {"tp": WEIGHTS, "rows": "nothing", "dp": "forward and backward", "pp": "nothing in the steady state"}),
    ],
)  # fmt: skip
def test_what_communication_is_hidden_behind(strategy: dict[str, Any], told: dict[str, str]) -> None:
    assert hidden_behind(step(**strategy)) == told

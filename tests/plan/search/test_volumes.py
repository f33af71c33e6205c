"""What ranks of a model with experts send, against a dense model of the same parameters, and by
hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.job.spec import Job
from plait.core.step.memory.states import without_routed_experts
from plait.core.step.step import Step
from plait.plan.make import job_step
from plait.plan.search.volumes import expert_volume, pp_rank_volume

HIDDEN, FFN, LAYERS, SEQUENCE = 64, 96, 4, 32
DENSE: dict[str, Any] = {
    "model": {
        "family": "llama", "num_layers": LAYERS, "hidden": HIDDEN, "num_heads": 4, "ffn_hidden": FFN, "vocab": 256,
        "max_sequence": SEQUENCE,
    },
    "data": {"sequence_length": SEQUENCE},
    "train": {"global_batch_size": 32, "micro_batch_size": 8},
    "strategy": {"dp": 4, "pp": 2},
}  # fmt: skip


def step(experts: dict[str, int] | None = None, *, ffn: int = FFN, **strategy: Any) -> Step:
    model = DENSE["model"] | {"ffn_hidden": ffn} | ({"experts": experts} if experts else {})
    return job_step(Job.from_dict(DENSE | {"model": model, "strategy": DENSE["strategy"] | strategy}), 256)


def test_a_dense_model_is_counted_as_ever() -> None:
    for pp_rank in (0, 1):
        assert expert_volume(step(), pp_rank, 1) == pp_rank_volume(step(), pp_rank)


@pytest.mark.parametrize("shard", ["ddp", "zero2", "fsdp"])
def test_experts_are_an_mlp_as_wide_as_all_with_a_router(shard: str) -> None:
    """Three of them, so that their router is as large as one more number of the MLP's width."""
    dense = pp_rank_volume(step(shard=shard, ffn=3 * FFN + 1), 1)
    one = expert_volume(step({"count": 3, "per_token": 1}, shard=shard), 1, 1)
    assert one.weights == dense.weights
    assert one.dp == dense.dp
    assert (one.pp, one.ep) == (dense.pp, 0)


def test_experts_that_are_shared_out_send_tokens_in_place_of_gradients() -> None:
    many = {"count": 8, "per_token": 2}
    alone, shared = (expert_volume(step(many, shard="ddp"), 1, ep) for ep in (1, 4))
    expert = 3 * HIDDEN * FFN
    own = 8 * expert * LAYERS // 2 * 4  # bytes of all experts of a pp rank
    assert alone.weights - shared.weights == own * 3 // 4
    assert alone.dp - shared.dp == 2 * own * 3 // 4  # an all-reduce over four ranks, and none over one
    rows = 2 * SEQUENCE * 2  # of two sequences of a micro-batch, each token twice
    micro_batches = 32 // 8
    assert shared.ep == 4 * (LAYERS // 2) * micro_batches * rows * HIDDEN * 4 * 3 // 4
    half = expert_volume(step(many, shard="ddp"), 1, 2)
    assert half.ep == shared.ep * 2 / 3 and shared.dp < half.dp < alone.dp


def test_only_layers_with_experts_send_tokens() -> None:
    first = expert_volume(step({"count": 8, "per_token": 2, "first_dense": 2}), 0, 4)
    second = expert_volume(step({"count": 8, "per_token": 2, "first_dense": 2}), 1, 4)
    assert first.ep == 0 < second.ep


ROW = HIDDEN * 4
"""Bytes of a token's row in fp32."""


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ({}, 8 * SEQUENCE * 2),
        ({"cp": 2, "dp": 2, "cp_comm_type": "ring"}, 8 * SEQUENCE // 2 * 2),
        ({"tp": 2, "sequence_parallel": True}, 8 * SEQUENCE // 2 * 2),
        ({"tp": 2}, 8 * SEQUENCE * 2),
        ({"dp": 2}, 8 * SEQUENCE * 2),
    ],
)
def test_rows_on_their_way(strategy: dict[str, Any], rows: int) -> None:
    """There and back, forward and backward, of two layers and the micro-batches of a replica."""
    one = step({"count": 8, "per_token": 2}, **strategy)
    times = 4 * 2 * one.workload.num_micro_batches
    assert expert_volume(one, 0, 4).ep == times * rows * ROW * 3 // 4
    assert expert_volume(one, 0, 1).ep == 0


def test_a_capacity_drops_rows_and_some_layers_are_computed_again() -> None:
    full = {"count": 8, "per_token": 2}
    whole = expert_volume(step(full), 0, 4).ep
    assert expert_volume(step(full | {"capacity": 0.5}), 0, 4).ep == whole / 2  # type: ignore[arg-type]
    for layers, times in ((0, 4), (1, 5), (2, 6), (4, 6)):
        again = step(full, recompute={"kind": "full", "layers": layers})
        assert expert_volume(again, 0, 4).ep == whole * times / 4
    assert expert_volume(step(full, recompute="selective"), 0, 4).ep == whole


def test_near_copies_of_experts_are_of_those_that_have_the_same() -> None:
    """Of eight replicas that share out everything, with copies among four: of two sharers of
    experts, four have the same and copies are of two."""
    shard = {"params": 8, "grads": 8, "optim": 8, "secondary": 4}
    many = {"count": 8, "per_token": 2}
    one = step(many, cp=2, cp_comm_type="ring", shard=shard)
    expert = 8 * 3 * HIDDEN * FFN // 2  # of a layer, on a rank
    dense = pp_rank_volume(replace(one, model=without_routed_experts(one.model)), 0)
    own = expert_volume(one, 0, 2)
    micro_batches = one.workload.num_micro_batches
    gathered = expert * 4 * 3 // 4 + expert * 4 // 2  # forward among four, backward among two
    reduced = expert * 4 * 3 // 4
    assert own.dp - dense.dp == 2 * micro_batches * (gathered + reduced)
    assert own.weights - dense.weights == 2 * expert * 4
    none = expert_volume(one, 0, 4)  # copies of one rank are none
    each = 8 * 3 * HIDDEN * FFN // 4
    assert none.dp - dense.dp == 2 * micro_batches * 3 * (each * 4 // 2)
    padded = expert_volume(step({"count": 3, "per_token": 1}, shard="fsdp", ffn=95), 0, 1)
    assert padded.weights > 0

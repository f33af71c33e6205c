"""What ranks of a model with experts send, against a dense model of the same parameters, and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.job import Job
from plait.plan.estimate import PlannedStep, place_volume
from plait.plan.expert_volumes import expert_volume

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


def step(experts: dict[str, int] | None = None, *, ffn: int = FFN, **strategy: Any) -> PlannedStep:
    model = DENSE["model"] | {"ffn_hidden": ffn} | ({"experts": experts} if experts else {})
    return PlannedStep.of(Job.from_dict(DENSE | {"model": model, "strategy": DENSE["strategy"] | strategy}), 256)


def test_a_dense_model_is_counted_as_ever() -> None:
    for place in (0, 1):
        assert expert_volume(step(), place, 1) == place_volume(step(), place)


@pytest.mark.parametrize("shard", ["ddp", "zero2", "fsdp"])
def test_experts_are_an_mlp_as_wide_as_all_with_a_router(shard: str) -> None:
    """Three of them, so that their router is as large as one more number of the MLP's width."""
    dense = place_volume(step(shard=shard, ffn=3 * FFN + 1), 1)
    one = expert_volume(step({"count": 3, "per_token": 1}, shard=shard), 1, 1)
    assert one.weights == dense.weights
    assert one.dp == dense.dp
    assert (one.pp, one.ep) == (dense.pp, 0)


def test_experts_that_are_shared_out_send_tokens_in_place_of_gradients() -> None:
    many = {"count": 8, "per_token": 2}
    alone, shared = (expert_volume(step(many, shard="ddp"), 1, ep) for ep in (1, 4))
    expert = 3 * HIDDEN * FFN
    own = 8 * expert * LAYERS // 2 * 4  # bytes of all experts of a place
    assert alone.weights - shared.weights == own * 3 // 4
    assert alone.dp - shared.dp == 2 * own * 3 // 4  # an all-reduce over four ranks, and none over one
    rows = 2 * SEQUENCE * 2  # of two sequences of a micro-batch, each token twice
    micro_batches = 32 // 8
    assert shared.ep == 4 * (LAYERS // 2) * micro_batches * rows * HIDDEN * 4 * 3 // 4
    half = expert_volume(step(many, shard="ddp"), 1, 2)
    assert half.ep == shared.ep * 2 / 3 and shared.dp < half.dp < alone.dp


def test_layers_that_are_computed_again_send_their_tokens_again() -> None:
    many = {"count": 8, "per_token": 2}
    once = expert_volume(step(many), 0, 4).ep
    assert expert_volume(step(many, recompute="full"), 0, 4).ep == once * 3 / 2


def test_only_layers_with_experts_send_tokens() -> None:
    first = expert_volume(step({"count": 8, "per_token": 2, "first_dense": 2}), 0, 4)
    second = expert_volume(step({"count": 8, "per_token": 2, "first_dense": 2}), 1, 4)
    assert first.ep == 0 < second.ep

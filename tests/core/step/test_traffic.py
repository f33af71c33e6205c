"""What tensor and sequence parallelism send: the tensor of each collective, and bytes of a
micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.segments import SegmentGraph, SegmentOp
from plait.core.step.stages import Stage
from plait.core.step.traffic import SegmentTraffic, replicated_numbers

GPT = ModelSpec(family="gpt", num_layers=3, hidden=8, num_heads=4, vocab=10, max_sequence=16, ffn_hidden=24)
LLAMA = ModelSpec(
    family="llama", num_layers=3, hidden=8, num_heads=4, num_kv_heads=2, vocab=10, max_sequence=16, ffn_hidden=24
)
U = ModelSpec(family="utransformer", levels=1, num_layers=3, hidden=8, num_heads=4, vocab=10, max_sequence=16)
WHOLE, FIRST, INNER, LAST = Stage(0, 1, 0, 1), Stage(0, 3, 0, 1), Stage(1, 3, 1, 1), Stage(2, 3, 2, 1)


def traffic(model: ModelSpec = GPT, stage: Stage = WHOLE, batch: int = 5, **strategy: Any) -> SegmentTraffic:
    made = Strategy(**strategy)
    return SegmentTraffic(
        model=model, strategy=made, graph=SegmentGraph.of(model, made, stage), shares=slice_sizes(batch, made.p1),
        sequence=16 // made.cp, itemsize=2,
    )  # fmt: skip


def op(site: Any, kind: Any, at: int = 0, part: int = 0, layer: int = 0) -> SegmentOp:
    return SegmentOp(site, layer, kind, at, part)


def test_a_shorter_level_has_fewer_tokens() -> None:
    one = traffic(U, Stage(0, 1, 0, 3), tp=2)
    assert [one.tokens(op("attn", "F", layer=layer)) for layer in range(3)] == [80, 40, 80]
    assert one.tokens(op("embed", "R")) == one.tokens(op("head", "F")) == one.tokens(op("down", "N")) == 80


@pytest.mark.parametrize(
    ("model", "stage", "strategy", "numbers"),
    [
        (GPT, WHOLE, {"tp": 4}, 0),
        (GPT, WHOLE, {"tp": 1, "sequence_parallel": True}, 0),  # a pp rank of one rank beside wider ones
        (LLAMA, WHOLE, {"tp": 2}, 0),
        (LLAMA, Stage(0, 1, 0, 3), {"tp": 4}, 3 * 2 * 2 * 2 * 8),  # keys and values of two heads, on two ranks each
        (GPT, WHOLE, {"tp": 2, "sequence_parallel": True}, 2 * 8 + 16 * 8 + 2 * (16 + 8)),
        (GPT, FIRST, {"tp": 2, "sequence_parallel": True}, 16 * 8 + 2 * (16 + 8)),
        (GPT, Stage(1, 3, 1, 2), {"tp": 2, "sequence_parallel": True}, 2 * 2 * (16 + 8)),
        (GPT, LAST, {"tp": 2, "sequence_parallel": True}, 2 * 8 + 2 * (16 + 8)),
        (LLAMA, WHOLE, {"tp": 2, "sequence_parallel": True}, 8 + 2 * 8),
        (LLAMA, WHOLE, {"tp": 4, "sequence_parallel": True}, 64 + 8 + 2 * 8),
    ],
)
def test_numbers_that_tensor_parallel_ranks_hold_alike(
    model: ModelSpec, stage: Stage, strategy: dict[str, Any], numbers: int
) -> None:
    assert replicated_numbers(model, Strategy(**strategy), stage) == numbers


def test_a_parallel_block_has_one_norm() -> None:
    block = replace(GPT, parallel_block=True)
    assert replicated_numbers(block, Strategy(tp=2, sequence_parallel=True), INNER) == 16 + 8

"""Bytes of what a segment makes, by hand: streams, norms, products, attention and the MLP's core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.dropout import Blocks
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.segment_sizes import Core, Shared, Sizes
from plait.core.step.segments import SegmentGraph, SegmentOp
from plait.core.step.stages import Stage

GPT = ModelSpec(family="gpt", num_layers=2, hidden=32, num_heads=8, vocab=101, max_sequence=64, ffn_hidden=96)
LLAMA = ModelSpec(
    family="llama", num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, vocab=101, max_sequence=64, ffn_hidden=96
)
BLOCK = replace(GPT, parallel_block=True)
DROPS = replace(GPT, dropout=0.1)
T = 3 * 16
"""Tokens of the first of two slices, of five sequences of 32 tokens on one of two ranks that share each."""


def sizes(model: ModelSpec = GPT, itemsize: int = 2, *, gpu: bool = False, **strategy: Any) -> Sizes:
    made = Strategy(**{"p1": 2, "cp": 2, **strategy})
    graph = SegmentGraph.of(model, made, Stage(0, 1, 0, 2))
    return Sizes(model, made, graph, 5, 32, itemsize, gpu)


def op(site: Any, kind: Any = "F", at: int = 0, part: int = 0) -> SegmentOp:
    return SegmentOp(site, 0, kind, at, part)


def test_tensors_of_a_slice() -> None:
    one, flat = sizes(tp=4), sizes(tp=4, sequence_parallel=True)
    assert [one.rows(op("attn", at=at)) for at in (0, 1)] == [48, 32]
    assert one.full(op("mlp")) == one.stream(op("mlp")) == T * 32 * 2
    assert flat.full(op("mlp")) == 4 * flat.stream(op("mlp")) == T * 32 * 2
    assert one.looked_up(op("embed")) == T * 8 * 2
    assert one.head(op("head"), 4) == T * 26 * 4  # of 104 words
    assert one.loss(op("head")) == T * (8 + 2 + 12)
    assert sizes(itemsize=8).loss(op("head")) == T * (10 + 24)
    assert one.widened(op("mlp")) == one.wide(one.stream(op("mlp"))) == T * 32 * 4
    assert sizes(itemsize=8).wide(80) == 80
    assert one.hashed(op("mlp")) == 0
    assert sizes(DROPS, tp=4, sequence_parallel=True).hashed(op("mlp")) == T * 8 * 16
    assert (one.larger(3, 4), one.larger(4, 3)) == (4, 4)


@pytest.mark.parametrize(
    ("model", "itemsize", "gpu", "sharded", "kept"),
    [
        (GPT, 2, False, 1, T * 2 * 4),  # mean and variance
        (GPT, 8, True, 1, T * 2 * 8),
        (GPT, 2, False, 4, T // 4 * 2 * 4),
        (LLAMA, 2, True, 1, T * 4),
        (LLAMA, 4, False, 1, T * 4 + T * 32 * 4),  # without a kernel, what is normalised ...
        (LLAMA, 2, False, 1, T * 4 + 2 * T * 32 * 4),  # ... and what it was converted to
        (LLAMA, 2, False, 4, T // 4 * 4 + 2 * T * 8 * 4),
    ],
)
def test_what_a_norm_keeps(model: ModelSpec, itemsize: int, gpu: bool, sharded: int, kept: int) -> None:
    one = sizes(model, itemsize, gpu=gpu, tp=sharded, sequence_parallel=sharded > 1)
    assert one.normed(op("attn")) == kept


@pytest.mark.parametrize(
    ("model", "site", "part", "numbers"),
    [
        (GPT, "head", 0, 51 * 32),
        (GPT, "attn", 0, 16 * 32), (GPT, "attn", 1, 3 * 16 * 32),
        (GPT, "mlp", 0, 48 * 32), (GPT, "mlp", 1, 48 * 32),
        (LLAMA, "attn", 0, 16 * 32), (LLAMA, "attn", 1, (16 + 2 * 8) * 32),
        (LLAMA, "mlp", 0, 48 * 32), (LLAMA, "mlp", 1, 2 * 48 * 32),
        (BLOCK, "block", 0, 16 * 32), (BLOCK, "block", 1, 3 * 16 * 32),
        (BLOCK, "block", 2, 48 * 32), (BLOCK, "block", 3, 48 * 32),
    ],
)  # fmt: skip
def test_a_weight_gradient_in_sixteen_bits_is_made_and_then_added(
    model: ModelSpec, site: Any, part: int, numbers: int
) -> None:
    """On a CPU in both precisions, on a GPU in fp32 alone; in fp32 it is added in one go."""
    asked = op(site, "W", part=part)
    assert sizes(model, 2, tp=2).product(asked) == numbers * 6
    assert sizes(model, 2, gpu=True, tp=2).product(asked) == numbers * 4
    assert sizes(model, 4, tp=2).product(asked) == sizes(model, 8, tp=2).product(asked) == 0


def test_more_ranks_than_key_heads_hold_one_head_each() -> None:
    assert sizes(LLAMA, 2, tp=8, cp=1).product(op("attn", "W", part=1)) == (4 + 2 * 4) * 32 * 6


def core(model: ModelSpec, number: int = 0, itemsize: int = 2, *, gpu: bool = True, **strategy: Any) -> Core:
    site = "block" if model.parallel_block else ("attn", "mlp")[number]
    return sizes(model, itemsize, gpu=gpu, **{"tp": 2, "cp": 1, **strategy}).branches(op(site))[
        number if model.parallel_block else 0
    ]


Q = 96 * 16 * 2
"""Bytes of a rank's half of the queries of three sequences of 32 tokens."""
LSE = 96 * 4 * 4


def test_an_mlp_keeps_what_its_activation_reads() -> None:
    inner = 96 * 48 * 2
    assert core(GPT, 1) == Core(inner, inner, 0, inner, 2 * inner, True)
    assert core(LLAMA, 1) == Core(2 * inner, inner, inner, 2 * inner, 4 * inner, True)


def test_a_parallel_block_has_both_branches() -> None:
    assert (core(BLOCK, 0), core(BLOCK, 1)) == (core(GPT, 0), core(GPT, 1))
    assert len(sizes(BLOCK).branches(op("block"))) == 2
    assert [len(sizes(GPT).branches(op(site))) for site in ("attn", "mlp")] == [1, 1]


@pytest.mark.parametrize(
    ("model", "itemsize", "gpu", "told"),
    [
        # Forward: the output and the log-sum-exp. Backward: gradients of output, its copy, and of q, k and v.
        (GPT, 2, True, Core(3 * Q, Q, LSE, Q + LSE, max(5 * Q, 7 * Q - LSE), False)),
        (GPT, 4, False, Core(6 * Q, 2 * Q, LSE, 2 * Q + LSE, max(10 * Q, 14 * Q - LSE), False)),
        # Two query heads a key head: a GPU's kernels share keys in bf16 ...
        (LLAMA, 2, True, Core(2 * Q, Q, LSE + 3 * Q // 2, max(5 * Q // 2 + LSE, 3 * Q), max(4 * Q, 7 * Q // 2 - LSE),
                              False)),
        # ... elsewhere they are copied for every query head.
        (LLAMA, 2, False, Core(2 * Q, Q, LSE + 3 * Q, Q + LSE + 3 * Q + Q // 2, max(5 * Q, 2 * Q - LSE), False)),
        (LLAMA, 4, True, Core(4 * Q, 2 * Q, LSE + 6 * Q, 2 * Q + LSE + 6 * Q + Q, max(10 * Q, 4 * Q - LSE), False)),
    ],
)  # fmt: skip
def test_attentions_core(model: ModelSpec, itemsize: int, gpu: bool, told: Core) -> None:
    assert core(model, 0, itemsize, gpu=gpu) == told


def test_attention_with_dropout_is_computed_in_blocks_that_share_keys() -> None:
    drops = replace(LLAMA, attention_dropout=0.1)
    blocks = Blocks(3 * 2, 2, 32, False)
    found = core(drops, 0, gpu=False)
    forward, backward = blocks.forward(4, 2), blocks.backward(4, 2)
    assert found.saved == LSE + 3 * Q // 2
    assert found.forward == Q + found.saved + forward
    assert found.backward == 2 * Q + Q + backward


def shared(model: ModelSpec, itemsize: int = 2, *, gpu: bool = False, **strategy: Any) -> Shared:
    return sizes(model, itemsize, gpu=gpu, **strategy).shared(op("attn"))


def test_what_attention_shares_with_ranks_that_exchange_heads() -> None:
    """Of 4 key heads on each of two tensor-parallel ranks, 4 Ulysses ranks have one each, copied."""
    tokens = 3 * 8
    query, kv = tokens * 16 * 2, tokens * 8 * 2
    one = shared(LLAMA, tp=2, cp=4, ring=1)
    assert (one.first, one.query) == (query + 2 * kv, query)
    assert (one.there, one.block) == (query + 2 * tokens * 4 * 4 * 2, 2 * tokens * 4 * 4 * 2)
    assert one.lse == tokens * 4 * 4
    assert one.turned == query + kv
    assert one.tables == 2 * 8 * 4 * 2
    assert one.turning == 3 * query + one.tables
    assert one.expanded == 0  # one head of queries a head of keys
    assert (one.forward, one.backward) == (0, 0)


def test_a_model_with_learned_positions_turns_nothing() -> None:
    one = shared(GPT, tp=2, cp=4, ring=4)
    assert (one.turned, one.turning, one.tables) == (0, 0, 0)
    assert one.first == 3 * one.query


@pytest.mark.parametrize(("itemsize", "gpu", "times"), [(2, True, 0), (2, False, 2), (4, True, 2)])
def test_keys_go_round_as_they_are_and_are_copied_where_kernels_want_it(itemsize: int, gpu: bool, times: int) -> None:
    one = shared(LLAMA, itemsize, gpu=gpu, tp=2, cp=4, ring=4)
    assert one.block == one.query
    assert one.expanded == times * one.query


def test_blocks_of_attention_with_dropout_are_of_all_tokens_of_the_exchange() -> None:
    drops = replace(LLAMA, attention_dropout=0.1)
    blocks = Blocks(3 * 1, 2, 16, False)  # of 4 query heads and 2 key heads, two ranks have 2 and 1
    one = shared(drops, tp=2, cp=4, ring=2)
    assert (one.forward, one.backward) == (blocks.forward(4, 2), blocks.backward(4, 2))
    assert one.expanded == 0

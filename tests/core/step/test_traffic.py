"""What tensor and sequence parallelism send: the tensor of each collective, and bytes of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.segments import SegmentGraph, SegmentOp
from plait.core.step.stages import Stage
from plait.core.step.traffic import SegmentTraffic, micro_batch_bytes, replicated_numbers

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


@pytest.mark.parametrize(
    ("asked", "whole", "sent"),
    [
        # Slices of three and of two sequences; a token is 16 bytes.
        (op("embed", "R"), 5 * 16 * 2, 80),  # no more rows than a rank's half of the vocabulary
        (op("attn", "R"), 48 * 16 // 2, 384),  # half of the columns
        (op("attn", "R", part=1), 48 * 16 // 2, 384),
        (op("mlp", "R", 1), 32 * 16 // 2, 256),
        (op("attn", "C", 1), 16 * 16, 256),  # half of the rows
        (op("head", "F"), 2 * 3 * 48 * 4, 576),  # three numbers a token of each rank
        (op("head", "F", 1), 2 * 3 * 32 * 4, 384),
        (op("head", "C", 1, 1), 16 * 16, 256),
        (op("attn", "N"), 48 * 16, 0),
    ],
)
def test_the_tensor_of_a_collective(asked: SegmentOp, whole: int, sent: int) -> None:
    one = traffic(tp=2, p1=2, p2=2)
    assert (one.whole(asked), one.sent(asked)) == (whole, sent)


def test_few_tokens_ask_for_fewer_rows_than_there_are() -> None:
    wide = replace(GPT, vocab=1001)
    assert traffic(wide, tp=2).whole(op("embed", "R")) == 80 * 16 * 2
    assert traffic(replace(GPT, vocab=9), tp=2).whole(op("embed", "R")) == 5 * 16 * 2  # padded to ten


def test_where_the_sequence_is_cut_it_is_gathered_and_scattered_whole() -> None:
    one = traffic(tp=4, sequence_parallel=True)
    for each in (op("attn", "N"), op("mlp", "R"), op("mlp", "C"), op("attn", "J"), op("head", "C"), op("head", "N")):
        assert (one.whole(each), one.sent(each)) == (80 * 16, 80 * 16 * 3 // 4)
    assert traffic(stage=INNER, tp=4, sequence_parallel=True).sent(op("attn", "J", layer=1)) == 0  # goes as it is


def test_a_shorter_level_has_fewer_tokens() -> None:
    one = traffic(U, Stage(0, 1, 0, 3), tp=2)
    assert [one.tokens(op("attn", "F", layer=layer)) for layer in range(3)] == [80, 40, 80]
    assert one.tokens(op("embed", "R")) == one.tokens(op("head", "F")) == one.tokens(op("down", "N")) == 80


@pytest.mark.parametrize(
    ("kind", "held", "sent"),
    [
        # Of 20 tokens, two bytes each and 2 numbers a head: 4 heads of queries, 2 of keys and of values.
        ("F", 20 * 2 * 2 * 8, 320), ("K", 20 * 2 * 2 * 4, 0), ("D", 20 * 2 * 2 * 4, 160),
        ("T", 20 * 2 * 2 * 4, 320), ("H", 20 * 2 * 2 * 4, 320), ("E", 20 * 2 * 2 * 8, 320),
    ],
)  # fmt: skip
def test_attention_exchanges_heads_and_passes_blocks_on(kind: str, held: int, sent: int) -> None:
    one = traffic(LLAMA, cp=4, ring=2)
    assert (one.whole(op("attn", kind)), one.sent(op("attn", kind))) == (held, sent)
    assert traffic(LLAMA, cp=4, ring=4).sent(op("attn", "F")) == 0
    assert traffic(LLAMA, cp=4, ring=1).sent(op("attn", "F")) == 20 * 2 * 2 * (4 + 2 * 4) * 3 // 4  # heads are copied


def sent(model: ModelSpec, stage: Stage, batch: int = 4, **strategy: Any) -> dict[str, int]:
    return micro_batch_bytes(traffic(model, stage, batch, **strategy))


@pytest.mark.parametrize(
    ("stage", "strategy", "told"),
    [
        (WHOLE, {}, {}),
        # R and C of two sublayers, C of the head, each reduced once: 64 tokens of 16 bytes; and the loss.
        (WHOLE, {"tp": 2}, {"tp": 5 * 1024 + 768, "rows": 80}),
        (WHOLE, {"tp": 2, "p1": 2, "p2": 2}, {"tp": 5 * 1024 + 768, "rows": 160}),
        (FIRST, {"tp": 2}, {"tp": 4 * 1024, "rows": 80}),
        (INNER, {"tp": 2}, {"tp": 4 * 1024}),
        (LAST, {"tp": 2}, {"tp": 5 * 1024 + 768}),
        # N, R, C and J of both sublayers, and of the head, which has no R; what leaves has a J alone.
        (WHOLE, {"tp": 2, "sequence_parallel": True}, {"tp": 11 * 512 + 768, "rows": 80}),
        (INNER, {"tp": 2, "sequence_parallel": True}, {"tp": 8 * 512}),
        # There and back: queries, keys and values forward, the output; backward likewise.
        (INNER, {"cp": 2}, {"ulysses": 2 * (32 * 2 * 2 * 12 + 32 * 2 * 2 * 4) // 2}),
        (INNER, {"cp": 2, "ring": 2}, {"ring": 3 * 32 * 2 * 2 * 8}),
    ],
)
def test_bytes_of_a_micro_batch(stage: Stage, strategy: dict[str, Any], told: dict[str, int]) -> None:
    assert sent(GPT, stage, **strategy) == {"tp": 0, "rows": 0, "ulysses": 0, "ring": 0, **told}


def test_statistics_of_a_loss_in_eight_bytes() -> None:
    asked = replace(traffic(batch=4, tp=2), itemsize=8)
    four, eight = (micro_batch_bytes(replace(asked, loss_itemsize=size)) for size in (4, 8))
    assert eight["tp"] - four["tp"] == 768


@pytest.mark.parametrize(
    ("model", "stage", "strategy", "numbers"),
    [
        (GPT, WHOLE, {"tp": 4}, 0),
        (GPT, WHOLE, {"tp": 1, "sequence_parallel": True}, 0),  # a place of one rank beside wider ones
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

"""Tensor parallelism, however sliced, ordered or delayed, is the unsharded computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.parallel.strategy import Strategy
from tests.dist import equality
from tests.dist.equality import Pool, TensorParallel, assert_equal
from tests.support.cases import pairwise
from tests.support.models import gpt, llama, mistral, qwen3, utransformer

GPT = gpt(dropout=0.1, attention_dropout=0.2)
LLAMA = llama(num_heads=8, num_kv_heads=4, dropout=0.1)
FEW_KV = llama(
    num_layers=1, head_size=6, vocab=33, tied_embeddings=True, dropout=0.1, attention_dropout=0.1, qkv_bias=True
)
UNTIED = gpt(num_layers=1, vocab=40, tied_embeddings=False)
MODELS = {"gpt": GPT, "llama": LLAMA, "few_kv": FEW_KV, "untied": UNTIED}
MODELS |= {f"{name}_block": replace(MODELS[name], parallel_block=True) for name in ("gpt", "llama")}
MODELS |= {"u": utransformer(dropout=0.1, attention_dropout=0.2)}
MODELS |= {"qwen3": qwen3(window=5, full_first=1), "mistral": mistral()}
"""Of the last two, transformers is the reference."""
OVERLAPS = ("domino", "sync", "async", "fixed")
AGAIN: dict[str, dict[str, Any]] = {kind: {"recompute": kind} for kind in ("none", "selective", "full", "layer")}
AGAIN |= {"first": {"recompute": "full", "recompute_layers": 1}}


def allowed(name: str, tp: int, p1: int, p2: int, *rest: Any) -> bool:
    """A model that halves sequences does not share them; nothing is late where there is one
    rank."""
    _, sharded, _, micro, delay = rest
    return not (name == "u" and sharded) and not (tp == 1 and delay is not None) and p1 <= micro


@pytest.mark.parametrize(
    ("name", "tp", "p1", "p2", "overlap", "sharded", "again", "micro", "delay"),
    pairwise(
        list(MODELS), (1, 2, 4), (1, 2, 3, 4), (1, 2, 4), OVERLAPS, (False, True), list(AGAIN), (4, 2), (None, 1),
        allowed=allowed,
    ),
)  # fmt: skip
def test_a_strategy_equals_the_reference(
    pool: Pool, name: str, tp: int, p1: int, p2: int, overlap: Any, sharded: bool, again: str, micro: int, delay: int
) -> None:
    strategy = Strategy(tp=tp, p1=p1, p2=p2, overlap=overlap, sequence_parallel=sharded, **AGAIN[again])
    assert_equal(pool, TensorParallel(MODELS[name], strategy, micro, delay))


SLICINGS = [(1, 1, False), (2, 1, False), (3, 2, False), (1, 2, False), (2, 1, True), (4, 2, True)]
NAMES = ["gpt", "few_kv", "llama_block", "qwen3", "mistral"]


@pytest.mark.parametrize(
    ("name", "slicing", "overlap", "again", "delay"), pairwise(NAMES, SLICINGS, OVERLAPS, list(AGAIN), (None, 1, 2))
)
def test_neither_order_nor_recomputation_changes_a_bit(
    pool: Pool, name: str, slicing: tuple[int, int, bool], overlap: Any, again: str, delay: int | None
) -> None:
    """Same slicing, fp32: the bits of the plain order that keeps everything, also under delays."""
    p1, p2, sharded = slicing
    plain = Strategy(tp=2, overlap="sync", p1=p1, p2=p2, sequence_parallel=sharded)
    case = TensorParallel(MODELS[name], replace(plain, overlap=overlap, **AGAIN[again]), delay=delay)
    assert all(equality.run(pool, case, equality.same_bits, plain))


def test_shards_are_not_replicas_of_each_other(pool: Pool) -> None:
    assert all(equality.run(pool, TensorParallel(GPT, Strategy(tp=2)), equality.peers_differ))


def test_without_communication_the_numbers_are_wrong(pool: Pool) -> None:
    """The measuring mode must not be mistaken for training: the suite above would notice."""
    found = equality.run(pool, TensorParallel(GPT, Strategy(tp=2, overlap="no-communication")))
    assert all(error > 1e-3 for error, _ in found)

"""Tensor parallelism, however sliced, ordered or delayed, is the unsharded computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from tests.dist import equality
from tests.support.cases import each_other
from tests.support.models import gpt, llama, mistral, qwen3, utransformer
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]

GPT = gpt(dropout=0.1, attention_dropout=0.2)
LLAMA = llama(num_heads=8, num_kv_heads=4, dropout=0.1)
FEW_KV = llama(num_layers=1, head_size=6, vocab=33, tied_embeddings=True, dropout=0.1, attention_dropout=0.1)
UNTIED = gpt(num_layers=1, vocab=40, tied_embeddings=False)
U = utransformer(dropout=0.1, attention_dropout=0.2)
MODELS = {"gpt": GPT, "llama": LLAMA, "few_kv": FEW_KV, "untied": UNTIED}
MODELS |= {f"{name}_block": replace(MODELS[name], parallel_block=True) for name in ("gpt", "llama")}
MODELS |= {"qwen3": qwen3(window=5, full_first=1), "mistral": mistral()}
"""Of the last two, transformers is the reference."""
TOLERANCE = 1e-10


def run(pool: Pool, size: int, function: Callable[..., object], *args: object) -> list[object]:
    return [function(0, *args)] if size == 1 else pool(size).run(function, *args)


def assert_equal(pool: Pool, spec: ModelSpec, strategy: Strategy, *args: object) -> None:
    for error, name in run(pool, strategy.tp, equality.worst_error, spec, strategy, *args):  # type: ignore[misc]
        assert error < TOLERANCE, f"{strategy}: {name} is off by {error:.1e}"


def grids() -> Iterator[Any]:
    """Slicings of every model, on 1, 2 and 4 ranks: all of them, or some of a small model's; on 4 ranks the
    suite has some of all."""
    every, some = list(product((1, 2, 3, 4), (1, 2, 4))), [(1, 1), (3, 2)]
    for name, tp, kind in product(MODELS, (1, 2, 4), ("all_reduce", "sequence_parallel")):
        large = name in ("gpt", "llama")
        yield pytest.param(name, tp, kind, every if large and tp < 4 else some, id=f"{name}-{tp}-{kind}")
        if large and tp == 4:
            yield pytest.param(name, tp, kind, every, id=f"{name}-{tp}-{kind}-all", marks=pytest.mark.contract)


@pytest.mark.parametrize(("name", "tp", "kind", "grid"), list(grids()))
def test_every_slicing_equals_the_reference(
    pool: Pool, name: str, tp: int, kind: str, grid: list[tuple[int, int]]
) -> None:
    sequence_parallel = kind == "sequence_parallel"
    for p1, p2 in grid:
        assert_equal(pool, MODELS[name], Strategy(tp=tp, p1=p1, p2=p2, sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("overlap", ["sync", "async", "fixed"])
def test_the_other_modes_equal_the_reference(pool: Pool, name: str, overlap: str) -> None:
    for p1, p2, sequence_parallel in ((1, 1, False), (2, 2, False), (1, 1, True), (3, 1, True)):
        assert_equal(
            pool,
            MODELS[name],
            Strategy(tp=2, overlap=overlap, p1=p1, p2=p2, sequence_parallel=sequence_parallel),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradient_accumulation_equals_one_large_batch(pool: Pool, name: str) -> None:
    for micro, p1 in ((2, 2), (1, 1)):
        assert_equal(pool, MODELS[name], Strategy(tp=2, p1=p1), micro)


@pytest.mark.parametrize("name", ["gpt", "few_kv"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.contract) for seed in (1, 2))])
def test_random_delays_in_every_collective_change_nothing(pool: Pool, name: str, seed: int) -> None:
    for p1, p2, sequence_parallel in ((2, 1, False), (4, 2, False), (1, 2, False), (3, 2, True)):
        assert_equal(
            pool, MODELS[name], Strategy(tp=2, p1=p1, p2=p2, sequence_parallel=sequence_parallel), equality.BATCH, seed
        )


SLICINGS = [(1, 1, False), (2, 1, False), (3, 2, False), (1, 2, False), (2, 1, True), (4, 2, True)]


@pytest.mark.parametrize(("name", "slicing"), list(each_other(["gpt", "llama"], SLICINGS)))
def test_the_order_changes_no_bit(pool: Pool, name: str, slicing: tuple[int, int, bool]) -> None:
    """Same slicing, other overlap, fp32: bitwise, also under delays."""
    (p1, p2, sequence_parallel), want = slicing, None
    for overlap, delay in (
        ("sync", None),
        ("async", None),
        ("domino", None),
        ("fixed", None),
        ("async", 1),
        ("fixed", 1),
        ("domino", 1),
        ("domino", 2),
    ):
        strategy = Strategy(tp=2, overlap=overlap, p1=p1, p2=p2, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
        found = pool(2).run(equality.bits, MODELS[name], strategy, delay)
        want = want or found
        for (loss, gradients), (loss_wanted, gradients_wanted) in zip(found, want, strict=True):
            assert loss == loss_wanted
            assert torch.equal(gradients, gradients_wanted), f"{overlap} with delay {delay} gives other bits"


@pytest.mark.parametrize(
    ("recompute", "name"),
    list(each_other(["selective", "full", "layer"], ["gpt", "few_kv", "llama_block", "qwen3", "mistral"])),
)
def test_what_is_computed_again_changes_no_bit(pool: Pool, name: str, recompute: str) -> None:
    """Equal to the reference, also for the first layers only, and in fp32 bitwise what keeping everything
    gives, also under delays."""
    shapes = ((1, 1, "sync", False), (2, 1, "domino", False), (1, 2, "async", False), (3, 1, "domino", True),
              (2, 2, "fixed", False))  # fmt: skip
    for p1, p2, overlap, sequence_parallel in shapes:
        kept = Strategy(tp=2, p1=p1, p2=p2, overlap=overlap, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
        want = pool(2).run(equality.bits, MODELS[name], kept)
        for layers, delay in ((None, None), (1, None), (None, 1)):
            again = replace(kept, recompute=recompute, recompute_layers=layers)  # type: ignore[arg-type]
            assert_equal(pool, MODELS[name], again, equality.BATCH, delay)
            for found, wanted in zip(pool(2).run(equality.bits, MODELS[name], again, delay), want, strict=True):
                assert found[0] == wanted[0]
                assert torch.equal(found[1], wanted[1]), f"{again} gives other bits"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_u_transformer_equals_the_reference(pool: Pool, tp: int) -> None:
    for p1, p2, overlap, again in ((1, 1, "sync", "none"), (2, 1, "domino", "full"), (3, 2, "domino", "selective"),
                              (2, 2, "domino", "layer"), (2, 1, "fixed", "full")):  # fmt: skip
        assert_equal(pool, U, Strategy(tp=tp, p1=p1, p2=p2, overlap=overlap, recompute=again))  # type: ignore[arg-type]


def test_shards_are_not_replicas_of_each_other(pool: Pool) -> None:
    assert all(pool(2).run(equality.peers_differ, GPT, Strategy(tp=2)))


def test_without_communication_the_numbers_are_wrong(pool: Pool) -> None:
    """The measuring mode must not be mistaken for training: the suite above would notice."""
    errors = pool(2).run(equality.worst_error, GPT, Strategy(tp=2, overlap="no-communication"))
    assert all(error > 1e-3 for error, _ in errors)

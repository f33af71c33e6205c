"""What routed experts add to a layer: grouped products, rows on their way, collectives of their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.experts_time import Routed
from tests.plan.layers import A100, BF16, FLAT, LLAMA, MIXTRAL, product, same, sent


def routed(model: ModelSpec = MIXTRAL, tokens: float = 1000.0, /, **row: int) -> Routed:
    return Routed(Shapes.of(model), Points.of([row]), A100, np.array([tokens]), BF16)


def grouped(groups: float, m: float, k: float, n: float) -> tuple[float, float]:
    """Forward; and backward beside it: tiles of 128 rows are half full, operands are read at least."""
    moved = float(rates.memory_bound(A100, 2 * groups * (m * k + k * n + m * n)))
    whole = groups * (m + 64)
    forward, inputs, weights = product(whole, k, n), product(whole, n, k), product(groups * k, m + 64, n)
    return max(float(forward), moved), max(float(inputs), moved) + max(float(weights), moved)


@pytest.mark.parametrize(("tokens", "flat"), [(100_000.0, False), (1000.0, True), (16.0, False), (1.0, False)])
def test_grouped_products_of_the_experts_on_a_rank(tokens: float, flat: bool) -> None:
    """Of a gated model two experts a rank, each cut over two; few rows take what reading weights takes."""
    one = routed(MIXTRAL, tokens, tp=2, dp=4, ep=4, sequence_parallel=int(flat))
    rows, residual = tokens * 2 / 2, tokens / (2 if flat else 1)
    parts = [grouped(2, rows, 4096, 2 * 7168), grouped(2, rows, 7168, 4096)]
    router = product(residual, 4096, 8)
    same(one.products(backward=False), sum(part[0] for part in parts) + router)
    told = sum(sum(part) for part in parts) + rates.three_products(A100, BF16, residual, 4096, 8)
    same(one.products(backward=True), told)


def test_where_half_of_the_layers_have_experts_each_is_charged_half() -> None:
    assert MIXTRAL.experts
    some = replace(MIXTRAL, experts=replace(MIXTRAL.experts, first_dense=MIXTRAL.num_layers // 2))
    row = {"tp": 2, "dp": 8, "ep": 8, "params": 8, "grads": 8, "optim": 8, **FLAT}
    half, whole = routed(some, **row), routed(**row)
    residual = np.array([5000.0])
    for name in ("products", "moves", "exchange"):
        given: Any = {"backward": True} if name == "products" else {"residual": residual}
        same(getattr(half, name)(**given), getattr(whole, name)(**given) / 2)
    same(half.more_reductions, 0.5)


def test_routed_rows_are_sorted_and_scores_are_made() -> None:
    residual = np.array([4096 * 500.0])
    same(routed().moves(residual), rates.memory_bound(A100, 4096 * 500 * 2 * 2 * 5 + 500 * 8 * 32))


def test_rows_go_to_their_experts_and_back() -> None:
    residual = np.array([4096 * 500.0])
    told = 2 * sent("all_to_all", 4096 * 500 * 2 * 2 * 4, 4, 2)
    same(routed(tp=2, dp=8, ep=4).exchange(residual), told)
    same(routed(tp=2, dp=8).exchange(residual), 0.0)


@pytest.mark.parametrize(("shared", "flat", "more"), [(0, 1, 1.0), (14336, 1, 2.0), (0, 0, 0.0), (14336, 0, 0.0)])
def test_reductions_grow_by_routed_and_shared_rows_where_the_sequence_is_cut(
    shared: int, flat: int, more: float
) -> None:
    model = replace(Shapes.of(MIXTRAL), shared_ffn=shared)
    one = Routed(model, Points.of([{"tp": 2, "sequence_parallel": flat}]), A100, np.array([1000.0]), BF16)
    same(np.asarray(one.more_reductions), more)


EXPERTS = 8 * 4096 * 3 * 14336 / (2 * 4)
"""Numbers of a layer's experts on one of two tensor-parallel and four expert-parallel ranks."""


def test_weights_of_experts_are_shared_out_over_those_that_have_the_same() -> None:
    """Of 16 replicas every fourth, 8 ranks apart."""
    one = routed(tp=2, dp=16, ep=4, params=8, grads=16, optim=16)
    same(one.gathered(np.array([8]), 2.0), sent("all_gather", EXPERTS * 2, 2, 8))
    same(one.gathered(np.array([4]), 2.0), 0.0)
    told = sent("reduce_scatter", EXPERTS * 4, 2, 8) + sent("reduce_scatter", EXPERTS * 4 / 2, 2, 16)
    same(one.reduced(4.0), told)


def test_a_dense_model_has_none_of_it() -> None:
    one, residual = routed(LLAMA, tp=2, dp=16, params=8, grads=8, optim=8), np.array([1.0])
    for found in (
        one.products(backward=True), one.moves(residual), one.exchange(residual), one.gathered(np.array([8]), 2.0),
        one.reduced(4.0), np.asarray(one.more_reductions).reshape(-1),
    ):  # fmt: skip
        assert found.tolist() == [0.0]


def test_columns_of_models_without_experts_send_nothing_for_them() -> None:
    """Beside models that have some."""
    both = Shapes.stack([Shapes.of(LLAMA), Shapes.of(replace(MIXTRAL, experts=Experts(count=8, per_token=2)))])
    points = Points.of([{"tp": 2, "dp": 16, "params": 16, "grads": 16, "optim": 16}] * 2)
    one = Routed(both, points, A100, np.array([1000.0, 1000.0]), BF16)
    found = one.gathered(points.params, 2.0)
    assert found[0] == 0 < found[1]
    assert one.reduced(4.0)[0] == 0 < one.reduced(4.0)[1]

"""Routers and products of experts on one rank, against the plainest computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.core.model.experts import Experts
from plait.train.model import grouped, router
from plait.train.model.expert_layer import numbers_of, packed
from plait.train.model.grouped import RowGroups
from plait.train.model.router import BalanceShare

TIER = "unit"
CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[4, 0, 9, 3], [0, 0, 16, 0], [5, 5, 5, 1]])
def test_a_grouped_product_is_one_product_an_expert(
    dtype: torch.dtype, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights, gradient = drawn(16, 32, dtype=dtype), drawn(4, 32, 24, dtype=dtype), drawn(16, 24, dtype=dtype)
    groups, into = RowGroups.of(sizes, CPU), torch.zeros(2, 4, 24, 32)
    at_once = grouped.product(rows, weights, groups)
    grouped.add_weight_gradient(into[0], gradient, rows, groups)
    assert grouped._fits(rows, weights)
    monkeypatch.setattr(grouped, "GROUPED", None)  # as before torch has it
    torch.testing.assert_close(at_once, grouped.product(rows, weights, groups))
    grouped.add_weight_gradient(into[1], gradient, rows, groups)
    torch.testing.assert_close(into[0], into[1], rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_rows_whose_stride_is_no_multiple_of_sixteen_bytes_are_multiplied_expert_by_expert() -> None:
    rows, weights = drawn(6, 10, dtype=torch.float32), drawn(2, 10, 8, dtype=torch.float32)
    assert not grouped._fits(rows, weights)
    found = grouped.product(rows, weights, RowGroups.of([2, 4], CPU))
    torch.testing.assert_close(found, torch.cat((rows[:2] @ weights[0], rows[2:] @ weights[1])))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_travels_behind_its_row(dtype: torch.dtype) -> None:
    rows, wide = drawn(5, 8).to(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    numbers = drawn(5, dtype=wide)
    buffer = packed(rows, numbers)
    assert torch.equal(buffer[:, :8], rows)
    assert torch.equal(numbers_of(buffer, wide), numbers)
    assert buffer.stride(0) * dtype.itemsize % 16 == 0


def settings(**more: Any) -> Experts:
    values: dict[str, Any] = {"count": 8, "per_token": 2, "ffn_hidden": 4}
    return Experts(**values | more)


def test_of_equal_scores_the_expert_with_the_lower_number_is_chosen_in_any_slice() -> None:
    scores = torch.tensor([[0.2, 0.5, 0.5, 0.1, 0.5, 0.2, 0.0, 0.0]]).repeat(300, 1)
    whole = router.chosen_experts(scores, settings())
    assert whole.tolist() == [[1, 2]] * 300
    assert torch.equal(whole[17:20], router.chosen_experts(scores[17:20], settings()))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_experts_come_from_the_best_groups(kind: str) -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.4, 0.3, 0.1, 0.1]])
    chosen = router.chosen_experts(scores, settings(groups=4, groups_per_token=1, score_function=kind))
    assert chosen.tolist() == ([[0, 1]] if kind == "softmax" else [[2, 3]])  # the best; the sum of the best two


def test_a_full_expert_drops_the_tokens_furthest_along_whatever_their_order_on_ranks() -> None:
    chosen = torch.zeros(6, 1, 1, dtype=torch.int64)
    positions = torch.tensor([4, 5, 0, 1, 2, 3])
    kept = router.kept_choices(chosen, positions, settings(count=2, per_token=1, capacity=1.0))
    assert kept.flatten().tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("more", [{}, {"score_function": "sigmoid", "scaling_factor": 2.5}, {"norm_topk_prob": False}])
def test_the_gradient_of_logits_is_autograd_s(more: dict[str, Any]) -> None:
    experts, logits, upstream = settings(**more), drawn(7, 8), drawn(7, 2)
    load = torch.rand(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = logits.clone().requires_grad_()
    scores = router.scores_of(leaf, experts)
    chosen = router.chosen_experts(scores.detach(), experts)
    even = scores / scores.sum(-1, keepdim=True)
    total = (router.expert_weights(scores, chosen, experts) * upstream).sum()
    total = total + 0.3 * 8 * (load * even).sum() + 0.2 * leaf.exp().sum(-1).log().square().sum()
    total.backward()
    found = router.logits_gradient(logits, chosen, upstream, experts, BalanceShare(load, 0.3, 0.2))
    torch.testing.assert_close(found, leaf.grad, rtol=1e-12, atol=1e-14)

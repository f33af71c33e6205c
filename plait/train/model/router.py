"""The router of an expert layer: scores, the choice of experts for each token, the weights of
their outputs, and losses that balance the experts.

Everything is computed in fp32 at least. Of equal scores the expert with the lower number wins,
whatever the number of ranks or slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.core.model.experts import Experts
from plait.train.model.kernels import gradients_of

TINY = 1e-20
"""Added to the sum of scores by which sigmoid scores are divided, as in DeepSeek-V3."""


@dataclass(frozen=True)
class BalanceShare:
    """Inputs of the balancing losses that depend on other tokens. load: [T, experts], of the tokens that
    the token is balanced with, the part of choices that went to each expert; None without a
    balancing loss. weight: factor of a token's balancing loss. z_weight: of its z-loss."""

    load: Tensor | None
    weight: float
    z_weight: float


def scores_of(logits: Tensor, experts: Experts) -> Tensor:
    """Return the scores of all experts, [T, experts]."""
    return logits.softmax(dim=-1) if experts.score_function == "softmax" else logits.sigmoid()


def chosen_experts(scores: Tensor, experts: Experts) -> Tensor:
    """Return the experts of each token, [T, per_token] int64, best first."""
    if experts.groups_per_token and experts.groups_per_token < experts.groups:
        scores = _within_groups(scores, experts)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, : experts.per_token].contiguous()  # the rest of the order need not be kept


def _within_groups(scores: Tensor, experts: Experts) -> Tensor:
    """Return the scores, -inf outside of a token's groups. A group's score is its best expert's, or
    for sigmoid scores the sum of its best two (DeepSeek-V2 and V3)."""
    grouped = scores.unflatten(-1, (experts.groups, -1))
    best = 1 if experts.score_function == "softmax" else min(2, grouped.shape[-1])
    of_group = grouped.sort(dim=-1, descending=True).values[..., :best].sum(-1)
    order = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : experts.groups_per_token]
    taken = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, order, True)
    return grouped.masked_fill(~taken[..., None], float("-inf")).flatten(1)


def expert_weights(scores: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Return the weights of the chosen experts' outputs, [T, per_token]."""
    found = scores.gather(1, chosen)
    if experts.norm_topk_prob:
        found = found / (found.sum(-1, keepdim=True) + (TINY if experts.score_function == "sigmoid" else 0.0))
    return found * experts.scaling_factor


def logits_gradient(logits: Tensor, chosen: Tensor, gradient: Tensor, experts: Experts, share: BalanceShare) -> Tensor:
    """Return the gradient of the logits from the gradient of the weights, [T, per_token], and of
    the balancing losses."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        scores = scores_of(leaf, experts)
        total = (expert_weights(scores, chosen, experts) * gradient).sum()
        if share.load is not None:
            even = scores if experts.score_function == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)
            total = total + share.weight * experts.count * (even * share.load).sum()
        if share.z_weight:
            total = total + share.z_weight * leaf.logsumexp(-1).square().sum()
    return gradients_of(total, [leaf], torch.ones_like(total))[0]


def kept_choices(chosen: Tensor, positions: Tensor, experts: Experts) -> Tensor:
    """Return which choices of whole sequences are within their expert's capacity, [S, b,
    per_token] bool. chosen: [S, b, per_token]; positions: [S] of the tokens. A token further along
    the sequence is dropped first."""
    sequence, _, each = chosen.shape
    capacity = -int(-experts.capacity * each * sequence // experts.count)
    order = positions.argsort()
    taken = torch.zeros((*chosen.shape[:2], experts.count), dtype=torch.int32, device=chosen.device)
    taken.scatter_(2, chosen[order], 1)
    before = taken.cumsum(dim=0, dtype=torch.int32)
    kept = torch.empty_like(chosen, dtype=torch.bool)
    kept[order] = before.gather(2, chosen[order]) <= capacity
    return kept


def load_of(chosen: Tensor, experts: Experts) -> Tensor:
    """Return the part of the choices of each sequence that goes to each expert, [b, experts] fp64.
    chosen: [S, b, per_token]."""
    counts = torch.zeros((chosen.shape[1], experts.count), dtype=torch.float64, device=chosen.device)
    flat = chosen.transpose(0, 1).flatten(1)
    counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float64))
    return counts / flat.shape[1]

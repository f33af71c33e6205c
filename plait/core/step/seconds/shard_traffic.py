"""Seconds of sharding's parameter gathers and gradient reductions in a micro-batch, without
overlap.

Experts are divided over ranks before sharding: every ``ep``-th rank holds the same experts
(docs/adr/0017). Tokens count as spread evenly, as an auxiliary loss or a router bias aims for
(GShard, arXiv 2006.16668; DeepSeek-V3, arXiv 2412.19437) and as benchmarks force it. Arrays hold
the mean over all layers: if only some layers have experts, every layer is charged its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from plait.core.step.columns.points import SHARD_OVERLAPS, Ints, StrategyTable
from plait.core.step.seconds import rates
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.rates import Seconds

HIDE_FORWARD, HIDE_BACKWARD = (
    np.array([name in (way, "both") for name in SHARD_OVERLAPS]) for way in ("forward", "backward")
)
"""Tables by overlap of sharding: True if the overlap hides transfers of a forward, and of a
backward."""


def expert_factor(factor: Any, ep: Any, tp: Any = 1) -> Any:
    """Return the sharding factor of experts: how many of ``factor`` neighbouring replicas hold the
    same experts, if each expert is on every ``ep``-th rank only.

    tp: tensor-parallel ranks of a replica that hold different experts. A factor of 0 or 1 (not
    sharded) stays as it is.

    >>> [int(expert_factor(factor, 8)) for factor in (0, 1, 8, 16, 64)]
    [0, 1, 1, 2, 8]
    >>> [int(expert_factor(factor, 8, 2)) for factor in (0, 1, 8, 16)]
    [0, 1, 2, 4]
    """
    ranks = factor * np.where(factor > 1, tp, 1)
    return ranks // np.gcd(ranks, ep)


def of_experts(points: StrategyTable, whole: Any = False) -> StrategyTable:
    """Return the strategies with the degrees of routed experts: fewer replicas, a larger stride,
    sharding factors over these replicas. whole: True if tensor parallelism does not split
    experts."""
    ep, among = points.ep, np.where(whole, points.tp, 1)
    factors: dict[str, Ints] = {
        name: expert_factor(getattr(points, name), ep, among) for name in ("params", "grads", "optim", "secondary")
    }
    apart = points.tp // among * ep
    return replace(points, tp=apart, dp=points.replicas * among // ep, cp=np.ones_like(ep), **factors)


def _units(priced: Priced) -> Iterator[tuple[int, Any, StrategyTable]]:
    """Yield the sharded units of a layer, grouped by size: (number of units, parameters of one unit
    on a rank, strategies with the replicas that shard it)."""
    model, points = priced.model, priced.points
    yield 2, model.layer_weights / points.tp / 2, points  # attention and MLP
    if model.has_experts:
        own = of_experts(points, priced.options.experts_whole)
        yield 1, model.expert_weights / own.tp, own


def gather_seconds(priced: Priced, *, near: bool = False) -> Seconds:
    """Return the seconds of gathering a layer's parameters. near: from the ranks that hold a
    secondary copy."""
    each, found = priced.options.weight_bytes * priced.options.quantised, np.zeros(len(priced.points))
    for count, numbers, points in _units(priced):
        ranks = np.maximum(1, points.secondary) if near else points.params
        sent = rates.collective(priced.cluster, "all_gather", numbers * each, ranks, points.tp)
        found = found + count * sent * (numbers > 0)
    return found


def sum_seconds(priced: Priced) -> Seconds:
    """Return the seconds of reducing a layer's gradients to the shard that a rank accumulates."""
    found = np.zeros(len(priced.points))
    for count, numbers, points in _units(priced):
        found = found + count * _summed(priced, points, numbers) * (numbers > 0)
    return found


def ends_of(priced: Priced) -> dict[str, Seconds]:
    """Return the sharding seconds of the embedding with positions (``embed``), of the head
    (``head``), and of the head's gradients alone (``sums``). Instruction lists gather the head
    again for a backward if its transfers are not hidden."""
    model, points, told = priced.model, priced.points, priced.options
    sizes = model.words / points.tp, np.asarray(model.max_sequence) * model.hidden
    gathered = [
        rates.collective(priced.cluster, "all_gather", numbers * told.weight_bytes, points.params, points.tp)
        for numbers in sizes
    ]
    summed = [_summed(priced, points, numbers) for numbers in sizes]
    again = priced.listed & ~HIDE_BACKWARD[points.shard_overlap]
    positions = (gathered[1] + summed[1]) * np.asarray(model.learned_positions) * priced.listed
    embedding = gathered[0] + summed[0] + positions
    return {"embed": embedding, "head": gathered[0] * (1 + again) + summed[0], "sums": summed[0]}


def _summed(priced: Priced, points: StrategyTable, numbers: Any) -> Seconds:
    """Return the seconds of reducing the gradients of ``numbers`` parameters: first over the ranks
    that shard the parameters, then over the remaining ones."""
    whole = numbers * priced.options.gradient_bytes
    inner = rates.collective(priced.cluster, "reduce_scatter", whole, points.params, points.tp)
    outer, apart = points.grads // points.params, points.tp * points.params
    return inner + rates.collective(priced.cluster, "reduce_scatter", whole / points.params, outer, apart)

"""What experts add to the time of a layer: grouped products, the way of tokens to their experts and back, and
the collectives of weights that fewer ranks have alike.

Tokens are taken to be spread evenly, as an auxiliary loss or a bias on the router has it (GShard, arXiv
2006.16668; DeepSeek-V3, arXiv 2412.19437) and as benchmarks force it. Columns, on the mean of all layers: of
a model that has experts in some layers, every layer is charged its share. docs/adr/0017 has the forms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.step.columns.points import Ints, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.rates import Seconds

TILE = 128
"""Rows of a tile of a matrix product (CUTLASS's usual): each expert's last one is half empty on average."""
PASSES = 5
"""Reads and writes of a routed row's numbers, a third of a step's: level 1 counts a forward thrice.
Forward, rows are sorted by expert for the way out and by their owner on arrival, both is undone, and they
are added up (6); backward the same, and the router's gradient reads what was added up (8)."""
ROUTER_BYTES = 32
"""Moved for each of a token's scores: logits and softmax in fp32, the choice of the best, the mask."""


def cut_by(factor: Any, ep: Any) -> Any:
    """Of ``factor`` neighbouring replicas that share something out, how many have the same experts as one of
    them where each expert is on every ``ep``-th rank only.

    >>> [int(cut_by(factor, 8)) for factor in (0, 1, 8, 16, 64)]
    [0, 1, 1, 2, 8]
    """
    return factor // np.gcd(factor, ep)


def of_experts(points: Points) -> Points:
    """Points as routed experts see them: fewer replicas, further apart, and factors over these."""
    ep = points.ep
    factors: dict[str, Ints] = {
        name: cut_by(getattr(points, name), ep) for name in ("params", "grads", "optim", "secondary")
    }
    return replace(points, tp=points.tp * ep, dp=points.replicas // ep, cp=np.ones_like(ep), **factors)


@dataclass(frozen=True)
class Routed:
    """Of one layer on one rank; 0 for a dense model. tokens: of the rank's tensor-parallel group."""

    model: Shapes
    points: Points
    cluster: Cluster
    tokens: Seconds
    precision: Precision

    @property
    def _none(self) -> Seconds:
        return np.zeros(len(self.points))

    def products(self, *, backward: bool) -> Seconds:
        """Grouped products of the experts on the rank, and the router's; forward, or all three."""
        model, tp, ep = self.model, self.points.tp, self.points.ep
        if not model.has_experts:
            return self._none
        inner, local = model.expert_ffn / tp, np.maximum(1, model.experts / ep)
        rows = self.tokens * model.routed / local
        shapes = ((model.hidden, inner * (1 + model.gated)), (inner, model.hidden))
        # Where other rows of the columns are dense models
        told = [(np.maximum(1, rows), np.maximum(1, k), np.maximum(1, n)) for k, n in shapes]
        found = sum((self._grouped(local, *shape, backward=backward) for shape in told), self._none)
        each = rates.three_products if backward else rates.matmul
        residual = self.tokens / np.where(self.points.sequence_parallel > 0, tp, 1)
        router = each(self.cluster, "bf16-mixed", residual, model.hidden, np.maximum(1, model.experts))
        return model.expert_share * (found + router)

    def _grouped(self, groups: Any, m: Any, k: Any, n: Any, *, backward: bool) -> Seconds:
        """Of ``groups`` products [m, k] x [k, n] launched as one: tiles of all of them fill the device, each
        has a tile that is half full; never faster than its operands are read."""
        cluster, precision = self.cluster, self.precision
        padded = m + TILE / 2
        found = rates.matmul(cluster, precision, groups * padded, k, n)
        moved = rates.memory_bound(cluster, 2 * groups * (m * k + k * n + m * n))
        seconds = np.maximum(found, moved)
        if backward:  # the input's gradient; the weights': sums over an expert's few rows
            inputs = rates.matmul(cluster, precision, groups * padded, n, k)
            weights = rates.matmul(cluster, precision, groups * k, padded, n)
            seconds = seconds + np.maximum(inputs, moved) + np.maximum(weights, moved)
        return seconds

    def moves(self, residual: Seconds) -> Seconds:
        """The router's scores, and routed rows being sorted, forward. residual: numbers of the stream that
        the rank sees."""
        model = self.model
        if not model.has_experts:
            return self._none
        rows = residual * model.routed * 2 * PASSES
        scores = residual / model.hidden * model.experts * ROUTER_BYTES
        return model.expert_share * rates.memory_bound(self.cluster, rows + scores)

    def exchange(self, residual: Seconds) -> Seconds:
        """Dispatch and combine: each sends every routed row, but those whose expert is here, to its owner."""
        model, points = self.model, self.points
        if not model.has_experts:
            return self._none
        whole = residual * model.routed * 2 * points.ep
        sent = rates.collective(self.cluster, "all_to_all", whole, points.ep, points.tp)
        return 2 * model.expert_share * sent

    @property
    def more_reductions(self) -> Any:
        """By how much the MLP's reduction over tensor-parallel ranks grows, to one of tokens: with sequence
        parallelism routed rows are gathered and scattered, each as often as it is routed; without, they are
        added up before."""
        model = self.model
        flat = self.points.sequence_parallel > 0
        return np.where(flat, model.expert_share * (model.routed + (np.asarray(model.shared_ffn) > 0) - 1), 0.0)

    def gathered(self, ranks: Any, itemsize: Any) -> Seconds:
        """Gathering the experts' parameters from ``ranks`` replicas' shares."""
        if not self.model.has_experts:
            return self._none
        return self._collective("all_gather", itemsize, 1, cut_by(ranks, self.points.ep))

    def reduced(self, itemsize: Any) -> Seconds:
        """Reducing their gradients to what a rank accumulates."""
        if not self.model.has_experts:
            return self._none
        own = of_experts(self.points)
        inner = self._collective("reduce_scatter", itemsize, 1, own.params)
        return inner + self._collective("reduce_scatter", itemsize, own.params, own.grads // own.params)

    def _collective(self, kind: rates.Kind, itemsize: Any, cut: Any, ranks: Any) -> Seconds:
        apart = self.points.tp * self.points.ep
        whole = self.model.expert_weights / apart * itemsize / cut
        return rates.collective(self.cluster, kind, whole, ranks, apart * cut) * (whole > 0)

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
from plait.core.model.precision import QUANTISED, Precision
from plait.core.step.columns.points import Ints, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.dispatch_time import dispatch
from plait.core.step.seconds.rates import Seconds

TILE = 128
"""Rows of a tile of a matrix product (CUTLASS's usual): each expert's last one is half empty on average."""
PASSES, PASSES_ONCE = 5, 3
"""Reads and writes of a routed row's numbers, a third of a step's: level 1 counts a forward thrice.
Forward, rows are sorted by expert for the way out and by their owner on arrival, both is undone, and they
are added up (6); backward the same, and the router's gradient reads what was added up (8). Where a token is
sent once nothing is sorted for the way out (4 and 5)."""
LAUNCHES = 2.8e-3
"""Seconds more in which the host launches a direction of a layer whose experts take all tokens that come: it
waits to hear how many. Qwen3-30B-A3B on 8 B200 with micro-batches of one sequence (Megatron-Bridge 25.11,
26.02): 27 and 28 s for 64 x 48 layers, which devices compute in half of that. CUDA graphs of whole steps take
it away."""
GROUPED_NARROW = 0.85
"""Of what dense layers' products in fp8, mxfp8 and nvfp4 reach, what grouped ones do: each expert's rows are
quantised on their own. Read off 14 steps of Grok-1 in fp8 (NVIDIA dgxc-benchmarking, H100): without it they
are 7 % too fast in the mean, where 14 in bf16 are 3 % too slow."""
ROUTER_BYTES = 32
"""Moved for each of a token's scores: logits and softmax in fp32, the choice of the best, the mask."""


def cut_by(factor: Any, ep: Any, tp: Any = 1) -> Any:
    """Of ``factor`` neighbouring replicas that share something out, how many have the same experts as one of
    them where each expert is on every ``ep``-th rank only. tp: tensor-parallel ranks of a replica among which
    experts are told apart, too; what is not shared out stays so.

    >>> [int(cut_by(factor, 8)) for factor in (0, 1, 8, 16, 64)]
    [0, 1, 1, 2, 8]
    >>> [int(cut_by(factor, 8, 2)) for factor in (0, 1, 8, 16)]
    [0, 1, 2, 4]
    """
    ranks = factor * np.where(factor > 1, tp, 1)
    return ranks // np.gcd(ranks, ep)


def of_experts(points: Points, whole: Any = False) -> Points:
    """Points as routed experts see them: fewer replicas, further apart, and factors over these. whole: as
    ``Options.experts_whole``."""
    ep, among = points.ep, np.where(whole, points.tp, 1)
    factors: dict[str, Ints] = {
        name: cut_by(getattr(points, name), ep, among) for name in ("params", "grads", "optim", "secondary")
    }
    apart = points.tp // among * ep
    return replace(points, tp=apart, dp=points.replicas * among // ep, cp=np.ones_like(ep), **factors)


@dataclass(frozen=True)
class Routed:
    """Of one layer on one rank; 0 for a dense model. tokens: of the rank's tensor-parallel group.
    dispatch_once, whole: as ``Options`` has them, ``whole`` as experts_whole."""

    model: Shapes
    points: Points
    cluster: Cluster
    tokens: Seconds
    precision: Precision
    dispatch_once: Any = False
    whole: Any = False

    @property
    def cut(self) -> Any:
        """Ranks over which tensor parallelism cuts an expert."""
        return np.where(self.whole, 1, self.points.tp)

    @property
    def launches(self) -> Any:
        """Seconds of a direction that the host takes longer than for an MLP."""
        return LAUNCHES * np.asarray(self.model.expert_share) * self.model.dropless

    @property
    def _none(self) -> Seconds:
        return np.zeros(len(self.points))

    def products(self, *, backward: bool) -> Seconds:
        """Grouped products of the experts on the rank, and the router's; forward, or all three."""
        model, tp, ep = self.model, self.points.tp, self.points.ep
        if not model.has_experts:
            return self._none
        inner, local = model.expert_ffn / self.cut, np.maximum(1, model.experts / ep)
        rows = self.tokens / np.where(self.whole, tp, 1) * model.routed / local
        shapes = ((model.hidden, inner * (1 + model.gated)), (inner, model.hidden))
        # Where other rows of the columns are dense models
        told = [(np.maximum(1, rows), np.maximum(1, k), np.maximum(1, n)) for k, n in shapes]
        found = sum((self._grouped(local, *shape, backward=backward) for shape in told), self._none)
        each = rates.three_products if backward else rates.matmul
        residual = self.tokens / np.where(self.points.sequence_parallel > 0, tp, 1)
        router = each(self.cluster, "bf16-mixed", residual, model.hidden, np.maximum(1, model.experts))
        return model.expert_share * (found / (GROUPED_NARROW if self.precision in QUANTISED else 1) + router)

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
        rows = residual * model.routed * 2 * np.where(self.dispatch_once, PASSES_ONCE, PASSES)
        scores = residual / model.hidden * model.experts * ROUTER_BYTES
        return model.expert_share * rates.memory_bound(self.cluster, rows + scores)

    def exchange(self, residual: Seconds) -> Seconds:
        """Dispatch and combine. NCCL: each sends every routed row, but those whose expert is here, to its
        owner."""
        model, points = self.model, self.points
        if not model.has_experts:
            return self._none
        whole = residual * model.routed * 2 * points.ep
        sent = rates.collective(self.cluster, "all_to_all", whole, points.ep, self.cut)
        told = {"experts": np.maximum(1, model.experts), "per_token": model.routed}
        once = dispatch(self.cluster, residual * 2, points.ep, self.cut, **told)
        return 2 * model.expert_share * np.where(self.dispatch_once, once, sent)

    @property
    def more_reductions(self) -> Any:
        """By how much the MLP's reduction over tensor-parallel ranks grows, to one of tokens: with sequence
        parallelism routed rows are gathered and scattered, each as often as it is routed; without, they are
        added up before. Whole experts need none."""
        model = self.model
        flat, routed = self.points.sequence_parallel > 0, np.where(self.whole, 0, model.routed)
        return np.where(flat, model.expert_share * (routed + (np.asarray(model.shared_ffn) > 0) - 1), 0.0)

    def gathered(self, ranks: Any, itemsize: Any) -> Seconds:
        """Gathering the experts' parameters from ``ranks`` replicas' shares."""
        if not self.model.has_experts:
            return self._none
        among = np.where(self.whole, self.points.tp, 1)
        return self._collective("all_gather", itemsize, 1, cut_by(ranks, self.points.ep, among))

    def reduced(self, itemsize: Any) -> Seconds:
        """Reducing their gradients to what a rank accumulates."""
        if not self.model.has_experts:
            return self._none
        own = of_experts(self.points, self.whole)
        inner = self._collective("reduce_scatter", itemsize, 1, own.params)
        return inner + self._collective("reduce_scatter", itemsize, own.params, own.grads // own.params)

    def _collective(self, kind: rates.Kind, itemsize: Any, cut: Any, ranks: Any) -> Seconds:
        apart = self.cut * self.points.ep
        whole = self.model.expert_weights / apart * itemsize / cut
        return rates.collective(self.cluster, kind, whole, ranks, apart * cut) * (whole > 0)

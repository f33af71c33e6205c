"""What one layer of one micro-batch computes on one rank, in seconds.

Columns, as everything of level 1. The backward is the input gradients and the weight gradients, each as long
as the forward's products, and what is computed again before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plait.core.parallel.strategy import SLICED
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES
from plait.core.step.seconds import rates
from plait.core.step.seconds.experts_time import Routed
from plait.core.step.seconds.layer_sums import LayerSums
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.rates import Seconds

LATENT: tuple[Literal["A", "B", "B+R", "Q+R", "2Q"], ...] = ("A", "B", "B+R", "Q+R", "2Q")
"""Widths of latent attention."""
SYNC = OVERLAPS.index("sync")
DOMINO = tuple(map(OVERLAPS.index, SLICED))
SELECTIVE, FULL, LAYER = (RECOMPUTES.index(name) for name in ("selective", "full", "layer"))


@dataclass(frozen=True)
class LayerWork(Priced):
    """Computation of one layer on one rank. Everything in seconds of one micro-batch."""

    @cached_property
    def domino(self) -> NDArray[np.bool_]:
        """Whether slices hide each other's collectives. The paper's fixed order is priced as the searched."""
        return np.isin(self.points.overlap, DOMINO)

    @cached_property
    def sums(self) -> LayerSums:
        """Of its ops, and of those at a stage's ends."""
        return LayerSums.of(self)

    def _latent(self, rate: Callable[..., Seconds]) -> Any:
        """Products of latent attention's first weights: down to queries', and to keys' and values', which
        every tensor-parallel rank does for its tokens; up from these, of its heads."""
        if not self.model.is_latent:
            return 0.0
        letters, tp, some = self.model.letters, self.points.tp, np.asarray(self.model.kv_lora_rank) > 0
        own, sizes = self._residual / self.model.hidden, {name: np.maximum(1, letters.size(name)) for name in LATENT}
        shapes = (
            (own, self.model.hidden, sizes["A"]),
            (own, self.model.hidden, sizes["B+R"]),
            (self.tokens, sizes["A"], np.maximum(1, sizes["Q+R"] / tp)),
            (self.tokens, sizes["B"], np.maximum(1, sizes["2Q"] / tp)),
        )
        return some * sum(rate(self.cluster, self.precision, *shape) for shape in shapes)

    @cached_property
    def routed(self) -> Routed:
        """What experts add."""
        told = self.options
        return Routed(
            self.model, self.points, self.cluster, self.tokens, self.precision,
            dispatch_once=told.dispatch_once, whole=told.experts_whole,
        )  # fmt: skip

    @cached_property
    def linear(self) -> Seconds:
        """Matrix products, forward."""
        return self.sums.forward.products + self._beside_ops

    @cached_property
    def _beside_ops(self) -> Seconds:
        """Forward products that no op of a list has: of latent attention's first weights, and of experts."""
        return self._latent(rates.matmul) + self.routed.products(backward=False)

    @cached_property
    def three(self) -> Seconds:
        """Matrix products, forward and backward."""
        own = self.sums.forward.products + self.sums.backward.products + self._latent(rates.three_products)
        return own + self.routed.products(backward=True)

    @cached_property
    def _sorting(self) -> Seconds:
        """Of routed rows, forward."""
        return self.routed.moves(self._residual)

    @cached_property
    def _residual(self) -> Seconds:
        """Numbers of the residual stream that a rank's norms see."""
        return self.tokens * self.model.hidden / np.where(self.points.sequence_parallel > 0, self.points.tp, 1)

    @cached_property
    def forward(self) -> Seconds:
        """All computation, forward."""
        return self.linear + self.sums.forward.attention + self.sums.forward.elementwise + self._sorting

    @cached_property
    def backward(self) -> Seconds:
        """All computation, backward, without what is computed again."""
        own = self.sums.backward
        return self.three - self.linear + own.attention + own.elementwise + 2 * self._sorting

    @cached_property
    def kept(self) -> Seconds:
        """Numbers that the layer keeps for its backward, about: its streams, what first weights read,
        queries, keys and values before and after their rotation, what the MLP's weights give and read, routed
        rows. The walk of memory knows them exactly."""
        model, tp, kind = self.model, self.points.tp, self.points.recompute
        rotated = (model.query + model.kv) * (1 - np.asarray(model.learned_positions))
        of_attention = 2 * model.query + 2 * model.kv + rotated
        wide = (1 + model.gated) * (model.whole_ffn + model.expert_share * model.routed * model.expert_ffn)
        rows = model.expert_share * model.routed * (self.tokens * model.hidden + self._residual)
        cheap = 2 * self.tokens * model.hidden + self.tokens * wide / tp  # which selective recomputation repeats
        every = 2 * self._residual + self.tokens * (of_attention + wide) / tp + rows
        streams = np.where(kind == LAYER, 1, 2) * self._residual
        return np.where(self._keeps_streams, streams, every + np.where(kind == SELECTIVE, 0, cheap))

    @property
    def _keeps_streams(self) -> Any:
        """Whether a layer keeps nothing else."""
        return (self.points.recompute == FULL) | (self.points.recompute == LAYER)

    @cached_property
    def waits_for_offload(self) -> Seconds:
        """Of a forward and a backward, what moving kept activations to the host and back takes longer than
        they do."""
        rate = self.cluster.device.host_rate
        if rate is None or not np.any(self.options.kept_on_host):
            return np.zeros(len(self.points))
        moved = self.kept * 2 * self.options.kept_on_host / rate.value
        return np.maximum(0, moved - self.forward) + np.maximum(0, moved - self.backward)

    @cached_property
    def again(self) -> Seconds:
        """What a layer that recomputes computes again. Plait keeps what attention and MLP begin with: all of
        a forward but the products whose results are summed, and what is then added; if only what the layer
        begins with, attention's too."""
        more = np.where(self._keeps_streams, self._beside_ops + self._sorting, 0.0)
        own = self.sums.again.seconds + more
        return self._repeated(self.forward, self.sums.forward.attention, own)

    @cached_property
    def linear_again(self) -> Seconds:
        """Of it, matrix products."""
        more = np.where(self._keeps_streams, self._beside_ops, 0.0)
        return self._repeated(self.linear, 0.0, self.sums.again.products + more)

    @cached_property
    def attention_again(self) -> Seconds:
        """Of it, attention's core."""
        whole = self.sums.forward.attention
        return self._repeated(whole, whole, self.sums.again.attention)

    def _repeated(self, whole: Any, selective: Any, own: Any) -> Seconds:
        """What of a forward runs again: as other frameworks' options say, or ``own``."""
        kind, told = self.points.recompute, self.options
        all_of_it = (kind == FULL) & np.asarray(told.recompute_collectives)
        core = (kind == SELECTIVE) & np.asarray(told.recompute_attention)
        found: Any = np.select([all_of_it, core], [whole, selective], own)
        return found

    @cached_property
    def weight_gradients(self) -> Seconds:
        """Products of weight gradients."""
        routed = self.routed.products(backward=True) - self.routed.products(backward=False)
        return self.sums.backward.weights + routed / 2

    def attention_of(self, ahead: Seconds) -> Seconds:
        """Of a forward the part that is attention: the MLP has products, and half of what passes over
        memory."""
        return ahead - self.model.mlp_share * self.sums.forward.products - self.sums.forward.elementwise / 2

"""Seconds of one layer for one micro-batch on one rank: computation, and exposed collectives of
tensor, context and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.parallel.strategy import SLICED
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, column
from plait.core.step.seconds.layer_sums import LayerSums, Pass
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.rates import Seconds, overlapped

SYNC = OVERLAPS.index("sync")
DOMINO = tuple(map(OVERLAPS.index, SLICED))
SELECTIVE, FULL, LAYER = (RECOMPUTES.index(name) for name in ("selective", "full", "layer"))


@dataclass(frozen=True)
class LayerWork(Priced):
    """One layer on one rank, without sharding and host overhead. All values are seconds of one
    micro-batch."""

    @cached_property
    def sums(self) -> LayerSums:
        """Sums over the ops of the layer, and over the ops at a stage's ends."""
        return LayerSums.of(self)

    @cached_property
    def domino(self) -> NDArray[np.bool_]:
        """True if batch or column slices hide each other's collectives. The fixed order of the
        Domino paper is priced like the searched order."""
        return np.isin(self.points.overlap, DOMINO)

    @property
    def mlp_share(self) -> Any:
        """Fraction of a layer's parameters that belong to the MLP."""
        return self.model.mlp_share

    # ---- computation ----

    @cached_property
    def linear(self) -> Seconds:
        """Seconds of one layer's matrix products in the forward."""
        return self.sums.forward.products + self.sums.unlisted.products

    @cached_property
    def linear_both(self) -> Seconds:
        """Seconds of one layer's matrix products, forward and backward."""
        return self.linear + self.sums.backward.products + self.sums.unlisted_backward.products

    @cached_property
    def forward(self) -> Seconds:
        """Seconds of one layer's computation in the forward."""
        own = self.sums.forward
        return self.linear + own.attention + own.elementwise + self.sums.unlisted.elementwise

    @cached_property
    def backward(self) -> Seconds:
        """Seconds of one layer's computation in the backward, without recomputation."""
        own = self.sums.backward
        return (
            self.linear_both - self.linear + own.attention + own.elementwise + self.sums.unlisted_backward.elementwise
        )

    @property
    def attention(self) -> Seconds:
        """Seconds of the attention core, forward and backward."""
        return self.sums.forward.attention + self.sums.backward.attention

    @property
    def attention_backward(self) -> Seconds:
        """Seconds of the attention core's backward."""
        return self.sums.backward.attention

    @cached_property
    def weight_gradients(self) -> Seconds:
        """Seconds of the matrix products of weight gradients."""
        return self.sums.backward.weights + self.sums.unlisted_backward.weights

    @cached_property
    def kept(self) -> Seconds:
        """Approximate count of numbers that the layer keeps for its backward. They are residual
        streams, inputs of first weights, queries, keys and values before and after rotation. The
        MLP's weights add their inputs and outputs, and experts their routed rows. The memory trace
        has the exact count."""
        model, tp, kind = self.model, self.points.tp, self.points.recompute
        stream: Seconds = self.tokens * model.hidden / np.where(self.points.sequence_parallel > 0, tp, 1)
        rotated = (model.query + model.kv) * (1 - np.asarray(model.learned_positions))
        of_attention = 2 * model.query + 2 * model.kv + rotated
        wide = (1 + model.gated) * (model.whole_ffn + model.expert_share * model.routed * model.expert_ffn)
        rows = model.expert_share * model.routed * (self.tokens * model.hidden + stream)
        cheap = 2 * self.tokens * model.hidden + self.tokens * wide / tp  # recomputed by selective recomputation
        every = 2 * stream + self.tokens * (of_attention + wide) / tp + rows
        streams: Seconds = np.where(kind == LAYER, 1, 2) * stream
        return np.where(self._keeps_streams, streams, every + np.where(kind == SELECTIVE, 0, cheap))

    @property
    def _keeps_streams(self) -> Any:
        """True if a layer keeps only its residual streams."""
        return (self.points.recompute == FULL) | (self.points.recompute == LAYER)

    @cached_property
    def waits_for_offload(self) -> Seconds:
        """Exposed seconds of moving kept activations to the host and back, beyond the layer's
        forward and backward."""
        rate = self.cluster.device.host_rate
        if rate is None or not np.any(self.options.kept_on_host):
            return np.zeros(len(self.points))
        moved = self.kept * 2 * self.options.kept_on_host / rate.value
        return np.maximum(0, moved - self.forward) + np.maximum(0, moved - self.backward)

    # ---- recomputation ----

    @cached_property
    def again(self) -> Seconds:
        """Seconds of recomputation in a layer that recomputes. Plait keeps the inputs of attention
        and MLP. So it repeats the forward without the products whose results are reduced, and
        without the additions after them. If only the layer's input is kept, attention's are
        repeated too."""
        more = np.where(self._keeps_streams, self.sums.unlisted.seconds, 0.0)
        return self._repeated(self.forward, self.sums.forward.attention, self.sums.again.seconds + more)

    @cached_property
    def linear_again(self) -> Seconds:
        """Seconds of the matrix products that recomputation repeats (part of ``again``)."""
        more = np.where(self._keeps_streams, self.sums.unlisted.products, 0.0)
        return self._repeated(self.linear, 0.0, self.sums.again.products + more)

    @cached_property
    def attention_again(self) -> Seconds:
        """Seconds of the attention core that recomputation repeats (part of ``again``)."""
        whole = self.sums.forward.attention
        return self._repeated(whole, whole, self.sums.again.attention)

    @cached_property
    def tp_again(self) -> Seconds:
        """Seconds of the forward's tensor-parallel collectives that recomputation repeats; Plait
        repeats only the gathers before attention and MLP."""
        sent = self.sums.forward.tp
        gathers = np.where(sent > 0, self.sums.again.tp / np.where(sent > 0, sent, 1), 0.0) * self.tp_forward
        return self._repeated(self.tp_forward, 0.0, gathers)

    @cached_property
    def cp_again(self) -> Seconds:
        """Seconds of the all-to-all of heads, if full recomputation repeats it."""
        return self._repeated(self.cp_forward, 0.0, self.sums.again.heads)

    @cached_property
    def ep_again(self) -> Seconds:
        """Seconds of sending tokens to their experts, if recomputation repeats it."""
        return self._repeated(self.ep_forward, 0.0, 0.0)

    @cached_property
    def sent_again(self) -> Seconds:
        """Seconds of all collectives that recomputation repeats."""
        return self.tp_again + self.cp_again + self.ep_again

    def _repeated(self, whole: Any, selective: Any, own: Any) -> Seconds:
        """Return the part of a forward that recomputation repeats: ``whole`` or ``selective`` if
        the options of other frameworks apply, else ``own``."""
        kind, told = self.points.recompute, self.options
        all_of_it = (kind == FULL) & np.asarray(told.recompute_collectives)
        core = (kind == SELECTIVE) & np.asarray(told.recompute_attention)
        found: Any = np.select([all_of_it, core], [whole, selective], own)
        return found

    @cached_property
    def forward_total(self) -> Seconds:
        """Seconds of the layer's forward, without sharding and without waiting for the host."""
        return self.forward + self.tp_forward + self.cp_forward + self.ep_forward

    @cached_property
    def backward_total(self) -> Seconds:
        """Seconds of the layer's backward, without sharding, recomputation and waiting for the
        host."""
        return self.backward + self.tp_backward + self.cp_backward + self.ep_forward

    # ---- collectives ----

    def _added(self, busy: Any, sent: Any) -> Seconds:
        """Return the exposed seconds of communication (``sent``) that runs concurrently with
        computation (``busy``)."""
        return overlapped(self.cluster, busy, sent) - busy

    @property
    def _more(self) -> Any:
        """Factor by which experts increase tensor-parallel collectives. With sequence parallelism
        routed rows are gathered and scattered, each as often as it is routed; without, they are
        added up before the collective. Whole experts need no such collectives."""
        model, flat = self.model, self.points.sequence_parallel > 0
        routed = np.where(self.options.experts_whole, 0, model.routed)
        more = np.where(flat, model.expert_share * (routed + (np.asarray(model.shared_ffn) > 0) - 1), 0.0)
        return 1 + more / np.where(np.asarray(model.parallel_block) > 0, 1, 2)

    @cached_property
    def tp_forward(self) -> Seconds:
        """Exposed seconds of the tensor-parallel collectives of the forward, for both sublayers.
        Batch slices hide each other's; column slices hide all but the last slice's."""
        points, sent = self.points, self.sums.forward.tp * self._more
        # Hidden behind the product of the next column slice.
        alone = self._exposed(sent, self.sums.forward.second, np.where(self.domino, points.p2, 1))
        attention = self._attention_of(self.forward)
        among = self._among_slices(sent, attention, self.forward - attention)
        return np.where((points.p1 > 1) & self.domino, among, alone)

    @cached_property
    def tp_backward(self) -> Seconds:
        """Exposed seconds of the tensor-parallel collectives of the backward. Unless the overlap is
        ``sync``, they run concurrently at least with weight gradients that follow at once."""
        points, sent, weights = self.points, self.sums.backward.tp * self._more, self.weight_gradients
        # Gradients are gathered before input gradients; domino's orders move other ops' weight gradients
        # there. The term for experts was fitted without this (docs/adr/0017).
        flat, dense = points.sequence_parallel > 0, np.asarray(self.model.experts) == 0
        first = np.where(flat & dense & ~self.domino, sent / 2, 0.0)
        # They also overlap with recomputation, unless batch slices are gathered, too.
        repeats = (points.recompute == FULL) & self.domino & self.listed & ~(flat & (points.p1 > 1))
        again = np.where(repeats, self.again, 0.0)
        busy = weights + again
        beside = first + overlapped(self.cluster, busy, sent - first) - busy
        sliced = np.where((points.p1 > 1) & ~flat, self._among_slices(sent, self.backward), beside)
        # A split backward's weight gradients run later: only other slices, or rows, can hide collectives.
        inputs, rows = self.backward - weights, self.sums.forward.products - self.sums.forward.second
        cut = np.where(flat, sent, self._exposed(sent, rows, points.p2))
        cut = np.minimum(cut, self._added(again, sent))
        split, whole = column("splits", points.schedule), flat | (points.p2 > 1)
        beside = np.where(split, sent, beside)
        among = self._exposed(sent, inputs, points.p1 * points.p2)
        among = np.where(whole, among, self._among_slices(sent, inputs))
        sliced = np.where(split, np.where(points.p1 > 1, among, cut), sliced)
        return np.where(points.overlap == SYNC, sent, np.where(self.domino, sliced, beside))

    def _attention_of(self, ahead: Seconds) -> Seconds:
        """Return the part of a forward's seconds that is attention. The MLP's part is its products
        and half of the memory passes."""
        return ahead - self.mlp_share * self.sums.forward.products - self.sums.forward.elementwise / 2

    def _among_slices(self, sent: Seconds, *busy: Seconds) -> Seconds:
        """Return the exposed seconds if one batch slice computes while others communicate, equally
        long beside each of the ``busy`` parts. That is the slowdown of computation or, if longer,
        the wait of a single slice's chain."""
        each, whole = sent / len(busy), sum(busy, np.zeros_like(sent))
        chain = (whole + sent) / np.maximum(1, self.points.p1) - whole
        return np.maximum(sum(overlapped(self.cluster, one, each) for one in busy) - whole, chain)

    def _exposed(self, sent: Seconds, busy: Seconds, slices: Any) -> Seconds:
        """Return the exposed seconds if all slices but one hide their communication behind
        computation."""
        rest = 1 - 1 / slices
        return sent / slices + overlapped(self.cluster, busy * rest, sent * rest) - busy * rest

    @property
    def tp(self) -> Seconds:
        """Exposed seconds of tensor-parallel collectives, forward and backward."""
        return self.tp_forward + self.tp_backward

    @property
    def cp(self) -> Seconds:
        """Exposed seconds of context-parallel collectives, forward and backward."""
        return self.cp_forward + self.cp_backward

    @cached_property
    def cp_forward(self) -> Seconds:
        """Exposed seconds of the context-parallel collectives of the forward: all-to-all of heads,
        rotation of keys and values along the ring."""
        return self._exposed_with_slices(self.sums.forward, self.tp_forward, self.forward)

    @cached_property
    def cp_backward(self) -> Seconds:
        """Exposed seconds of the context-parallel collectives of the backward, in which gradients
        of keys and values are sent too."""
        return self._exposed_with_slices(self.sums.backward, self.tp_backward, self.backward)

    def _exposed_with_slices(self, direction: Pass, exposed: Seconds, busy: Seconds) -> Seconds:
        """Return the exposed seconds of context-parallel collectives if slices hide them. The same
        computation hides tensor-parallel collectives, of which ``exposed`` seconds remain."""
        points, plain = self.points, direction.heads + self._ring(direction)
        both = direction.heads + direction.ring + direction.home + direction.tp * self._more
        rest = np.maximum(0.0, self._exposed(both, busy, points.p1) - exposed)
        return np.where(self.domino & (points.p1 > 1), np.minimum(plain, rest), plain)

    def _ring(self, direction: Pass) -> Seconds:
        """Return the exposed seconds of ring rotations without slices. Blocks travel while
        attention to earlier blocks runs, unless the overlap is ``sync``; with ``domino`` so do
        gradients on their way home."""
        turns, mode = np.maximum(1, self.points.ring), self.points.overlap
        beside: Any = direction.attention * (turns - 1) / turns
        hidden, both = (self._added(beside, sent) for sent in (direction.ring, direction.ring + direction.home))
        found: Any = np.select(
            [mode == SYNC, self.domino], [direction.ring + direction.home, both], hidden + direction.home
        )
        return found

    @cached_property
    def ep_forward(self) -> Seconds:
        """Exposed seconds of the expert-parallel exchange in one direction: half of forward and
        backward together. Nothing runs concurrently, unless another micro-batch's layer hides the
        exchange."""
        sent = self.sums.unlisted.ep
        beside = self._added(self.forward + self.backward, 2 * sent) / 2
        return np.where(self.options.exchange_hidden, beside, sent)

"""What one layer of one micro-batch takes on one rank: beside what it computes, what its collectives and its
host add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from plait.core.step.ops import Kind
from plait.core.step.schedule import Phase
from plait.core.step.seconds import rates
from plait.core.step.seconds.layer_sums import Pass, Waits, launch_seconds
from plait.core.step.seconds.layer_work import FULL, SYNC, LayerWork
from plait.core.step.seconds.pipeline_time import SPLIT
from plait.core.step.seconds.rates import Seconds
from plait.core.step.seconds.shard_sent import HIDE_BACKWARD, HIDE_FORWARD, gather_seconds, sum_seconds


@dataclass(frozen=True)
class Layer(LayerWork):
    """One layer on one rank. Everything in seconds of one micro-batch."""

    # ---- the host ----

    @cached_property
    def ahead(self) -> Seconds:
        """The forward, without sharding and without a host that is late."""
        return self.forward + self.tp_forward + self.cp_forward + self.ep_forward

    @cached_property
    def back(self) -> Seconds:
        """The same, backward, without what is computed again."""
        return self.backward + self.tp_backward + self.cp_backward + self.ep_forward

    @cached_property
    def late_forward(self) -> Seconds:
        """By how much the host takes longer to launch the forward than all that runs; less than 0 where it
        gets ahead."""
        beside = self.ahead + self.shard_forward
        return self._launched(self.sums.forward, Kind.FIRST) + self.routed.launches - beside

    @cached_property
    def late_backward(self) -> Seconds:
        """The same, backward, without what is computed again."""
        beside = self.back + self.shard_backward
        return self._launched(self.sums.backward, Kind.FIRST_GRAD) + self.routed.launches - beside

    @cached_property
    def late_again(self) -> Seconds:
        """The same of what is computed again: as many rows as other frameworks' options say."""
        whole, core = self.sums.forward, self.points.p1 * self.points.ring
        rows = self._repeated(whole.rows, core, self.sums.again.rows)
        one = Pass(rows=rows, calls=self._repeated(whole.calls, 0.0, self.sums.again.calls))
        return self._launched(one, Kind.FIRST_AGAIN) - (self.again + self.tp_again + self.cp_again + self.ep_again)

    def _launched(self, one: Pass, kind: Kind) -> Seconds:
        return launch_seconds(self, kind) * one.rows + self.cluster.efficiency.host_collective.value * one.calls

    @cached_property
    def lead_forward(self) -> Seconds:
        """What the forward of one layer waits for a host that begins with it."""
        waits = np.where(HIDE_FORWARD[self.points.shard_overlap], 0.0, self.shard_forward)
        return self._lead(self.sums.late["F"], self.late_forward, self.ahead - self.forward, waits)

    @cached_property
    def lead_backward(self) -> Seconds:
        """The same, backward, without what is computed again and without weight gradients that are a list of
        their own."""
        return self._lead_back(self.sums.late, self.late_backward, self.back - self.backward)

    @cached_property
    def lead_again(self) -> Seconds:
        """What that is longer in a layer that recomputes."""
        net, sent = self.late_backward + self.late_again, self.tp_again + self.cp_again + self.ep_again
        return self._lead_back(self.sums.late_again, net, self.back - self.backward + sent) - self.lead_backward

    @cached_property
    def lead_weights(self) -> Seconds:
        """The same of weight gradients alone; 0 where they are in one list with the others."""
        return np.where(self._split, self._lead(self.sums.late["W"], self.late_weights, 0.0, self._waits[1]), 0.0)

    @cached_property
    def late_weights(self) -> Seconds:
        """As ``late_backward``, of weight gradients alone; 0 where they are in one list with the others."""
        return np.where(self._split, self.sums.late["W"].bare.net, 0.0)

    @property
    def _split(self) -> Any:
        return SPLIT[self.points.schedule] & self.listed

    def _lead_back(self, late: Mapping[Phase, Waits], net: Seconds, exposed: Seconds) -> Seconds:
        gathers, sums = self._waits
        parts = self._lead(late["I"], net - self.late_weights, exposed, gathers)
        return np.where(self._split, parts, self._lead(late["B"], net, exposed, gathers + sums))

    @property
    def _waits(self) -> tuple[Seconds, Seconds]:
        """Exposed gathers and sums of the MLP in a backward, in which the host gets ahead for attention."""
        exposed = self.model.mlp_share * (self.listed & ~HIDE_BACKWARD[self.points.shard_overlap])
        return exposed * self.shard_gathered_again, exposed * self.shard_sums_sent

    def _lead(self, late: Waits, net: Seconds, exposed: Any, waits: Seconds) -> Seconds:
        """exposed: of the phase's collectives, seconds that nothing hides. waits: of the device, about half
        way through the layer."""
        sent = late.bare.net - late.sent.net
        share = np.clip(exposed / np.maximum(sent, 1e-30), 0, 1)
        alone = late.bare.most + share * (late.sent.most - late.bare.most)
        most: Seconds = np.maximum(net, alone - np.minimum(waits, alone / 2))
        return np.where(self.listed, most, np.maximum(0, net))

    # ---- collectives ----

    @property
    def _more(self) -> Any:
        """Factor by which experts make reductions over tensor-parallel ranks grow."""
        return 1 + self.routed.more_reductions / np.where(np.asarray(self.model.parallel_block) > 0, 1, 2)

    @cached_property
    def tp_forward(self) -> Seconds:
        """Exposed of the forward's reductions of both sublayers: what slices of the batch do not hide behind
        each other, or of columns the last one's."""
        points, sent = self.points, self.sums.forward.tp * self._more
        # Behind the next columns' product.
        alone = self._exposed(sent, self.sums.forward.second, np.where(self.domino, points.p2, 1))
        attention = self.attention_of(self.forward)
        among = self._among_slices(sent, attention, self.forward - attention)
        return np.where((points.p1 > 1) & self.domino, among, alone)

    @cached_property
    def tp_backward(self) -> Seconds:
        """Exposed of the backward's; unless ``sync``, they run beside weight gradients at least, where these
        follow at once."""
        points, sent, weights = self.points, self.sums.backward.tp * self._more, self.weight_gradients
        slices, mode = points.p1 * points.p2, points.overlap
        # Gradients are gathered before products of inputs; orders of domino move others' weight gradients
        # there. What experts add was fitted (docs/adr/0017) without.
        flat, dense = points.sequence_parallel > 0, np.asarray(self.model.experts) == 0
        first = np.where(flat & dense & ~self.domino, sent / 2, 0.0)
        # So do they with what a recomputed layer repeats, unless slices of the batch are gathered, too.
        repeats = (points.recompute == FULL) & self.domino & self.listed & ~(flat & (points.p1 > 1))
        again = np.where(repeats, self.again, 0.0)
        busy = weights + again
        beside = first + rates.together(self.cluster, busy, sent - first) - busy
        sliced = np.where((points.p1 > 1) & ~flat, self._among_slices(sent, self.backward), beside)
        # A split backward's weight gradients run later: other slices, or rows, are left to hide behind.
        inputs, rows = self.backward - weights, self.sums.forward.products - self.sums.forward.second
        cut = np.where(flat, sent, self._exposed(sent, rows, points.p2))
        cut = np.minimum(cut, rates.together(self.cluster, again, sent) - again)
        split = SPLIT[points.schedule]
        beside = np.where(split, sent, beside)
        among = np.where(flat | (points.p2 > 1), self._exposed(sent, inputs, slices), self._among_slices(sent, inputs))
        sliced = np.where(split, np.where(points.p1 > 1, among, cut), sliced)
        return np.where(mode == SYNC, sent, np.where(self.domino, sliced, beside))

    @cached_property
    def tp_again(self) -> Seconds:
        """Of the forward's, where recomputation repeats them: of Plait's, the gathers before attention and
        MLP."""
        sent = self.sums.forward.tp
        gathers = np.where(sent > 0, self.sums.again.tp / np.where(sent > 0, sent, 1), 0.0) * self.tp_forward
        return self._repeated(self.tp_forward, 0.0, gathers)

    def _among_slices(self, sent: Seconds, *busy: Seconds) -> Seconds:
        """Exposed where a slice of the batch is computed while others send, equally much beside each part
        that is computed: what that is slowed down by, or what one slice alone lacks."""
        each, whole = sent / len(busy), sum(busy, np.zeros_like(sent))
        chain = (whole + sent) / np.maximum(1, self.points.p1) - whole
        return np.maximum(sum(rates.together(self.cluster, one, each) for one in busy) - whole, chain)

    def _exposed(self, sent: Seconds, beside: Seconds, slices: Any) -> Seconds:
        rest = 1 - 1 / slices
        return sent / slices + rates.together(self.cluster, beside * rest, sent * rest) - beside * rest

    @cached_property
    def cp_forward(self) -> Seconds:
        """Exposed of attention's exchanges: heads by all-to-all, keys and values along the ring."""
        one = self.sums.forward
        return self._beside_slices(one, self.tp_forward, self.forward)

    @cached_property
    def cp_backward(self) -> Seconds:
        """The same backward, where gradients of keys and values travel too."""
        one = self.sums.backward
        return self._beside_slices(one, self.tp_backward, self.backward)

    @cached_property
    def cp_again(self) -> Seconds:
        """The exchange of heads where full recomputation repeats it."""
        return self._repeated(self.cp_forward, 0.0, self.sums.again.heads)

    def _beside_slices(self, one: Pass, exposed: Seconds, beside: Seconds) -> Seconds:
        """Exposed of attention's exchanges where slices hide them, and the reductions of tensor parallelism,
        of which so much is ``exposed``, with the same computation."""
        points, plain = self.points, one.heads + self._ring(one)
        both = one.heads + one.ring + one.home + one.tp * self._more
        rest = np.maximum(0.0, self._exposed(both, beside, points.p1) - exposed)
        return np.where(self.domino & (points.p1 > 1), np.minimum(plain, rest), plain)

    def _ring(self, one: Pass) -> Seconds:
        """Exposed of rotations without slices: blocks travel behind attention to those before, unless
        ``sync``; gradients on their way home do so with ``domino``."""
        turns, mode = np.maximum(1, self.points.ring), self.points.overlap
        beside: Any = one.attention * (turns - 1) / turns
        hidden, both = (rates.together(self.cluster, beside, sent) - beside for sent in (one.ring, one.ring + one.home))
        found: Any = np.select([mode == SYNC, self.domino], [one.ring + one.home, both], hidden + one.home)
        return found

    @cached_property
    def ep_forward(self) -> Seconds:
        """Exposed of tokens to their experts and back, of a direction: a half of both. Unless hidden behind
        another micro-batch's layer, nothing runs beside it."""
        sent, busy = self.routed.exchange(self._residual), self.forward + self.backward
        beside = (rates.together(self.cluster, busy, 2 * sent) - busy) / 2
        return np.where(self.options.exchange_hidden, beside, sent)

    @cached_property
    def ep_again(self) -> Seconds:
        """Of the forward's, where recomputation repeats them."""
        return self._repeated(self.ep_forward, 0.0, 0.0)

    @cached_property
    def shard_forward(self) -> Seconds:
        """Exposed of gathering the layer's parameters, which have links of their own beside collectives of
        other axes."""
        sent = self.shard_forward_sent
        beside = rates.together(self.cluster, self.ahead, sent) - self.ahead
        return np.where(HIDE_FORWARD[self.points.shard_overlap], beside, self._gathered_together)

    @property
    def _gathered_together(self) -> Seconds:
        """Exposed in a forward that hides no gathers: lists begin a layer with those of attention and MLP, so
        attention runs beside the latter."""
        part = self.model.mlp_share
        sent, own = part * self.shard_forward_sent, self.attention_of(self.ahead) - self.tp_forward / 2
        beside = rates.together(self.cluster, own, sent) - own
        apart = (1 - part) * self.shard_forward_sent + beside
        return np.where(self.listed & (np.asarray(self.model.parallel_block) == 0), apart, self.shard_forward_sent)

    @cached_property
    def shard_forward_sent(self) -> Seconds:
        """Of gathering them, as if alone."""
        return gather_seconds(self, self.routed, self.points.params)

    @cached_property
    def shard_backward(self) -> Seconds:
        """Exposed of gathering them again and of reducing gradients."""
        sent = self.shard_backward_sent
        beside = rates.together(self.cluster, self.back, sent) - self.back
        return np.where(HIDE_BACKWARD[self.points.shard_overlap], beside, sent)

    @property
    def shard_backward_sent(self) -> Seconds:
        """Of gathering them again and of reducing gradients, as if alone."""
        return self.shard_gathered_again + self.shard_sums_sent

    @cached_property
    def shard_gathered_again(self) -> Seconds:
        """Of the former, from near copies if there are any."""
        near = np.maximum(1, self.points.secondary)
        far = gather_seconds(self, self.routed, self.points.params)
        return np.where(self.points.secondary > 0, gather_seconds(self, self.routed, near), far)

    @cached_property
    def shard_sums_sent(self) -> Seconds:
        """Of the latter, to what a rank accumulates."""
        return sum_seconds(self, self.routed)

"""What one layer of one micro-batch takes on one rank: computation, and what its collectives add to it.

Columns, as everything of level 1. The backward is the input gradients and the weight gradients, each as long
as the forward's products, and what is computed again before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.model.spec import keys_seen
from plait.core.model.weights import widths
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SHARD_OVERLAPS, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.ops import Dims, Kind, steps_of
from plait.core.step.seconds import rates
from plait.core.step.seconds.experts_time import Routed
from plait.core.step.seconds.pipeline_time import SPLIT
from plait.core.step.seconds.rates import Seconds

LATENT: tuple[Literal["A", "B", "B+R", "Q+R", "2Q"], ...] = ("A", "B", "B+R", "Q+R", "2Q")
"""Widths of latent attention."""
SITES: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")
SYNC, ASYNC, DOMINO, NO_COLLECTIVES = (OVERLAPS.index(name) for name in ("sync", "async", "domino", "no-communication"))
SELECTIVE, FULL = RECOMPUTES.index("selective"), RECOMPUTES.index("full")
HIDE_FORWARD, HIDE_BACKWARD = (
    np.array([name in (way, "both") for name in SHARD_OVERLAPS]) for way in ("forward", "backward")
)
"""By overlap of sharding: whether it hides what is sent for a forward, and for a backward."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What other frameworks do otherwise than Plait; the defaults are Plait's own runs. Each may be a column.

    fused_attention: one kernel that never writes the scores. attention_work, norm_work: how much longer the
    kernels in use take than those that the cluster's constants are about. recompute_attention: selective
    recomputation repeats attention's core (Korthikanti 2022, arXiv 2205.05198), not norms and activations.
    recompute_collectives: full recomputation repeats the forward's collectives of tensor parallelism.
    transfers_hidden: transfers between stages run beside computation; rounds_hide_transfers: in interleaved
    schedules alone (Megatron-LM's overlap_p2p_comm, which its 1F1B has not). gradient_bytes: of a gradient on
    its way. weight_bytes: of a gathered parameter; quantised: of one of a layer's matrices, so many times
    that. steps_overlap: a place begins the next step while others end this one, and repairs what clipping
    would have changed (Qi 2023, arXiv 2401.10241). dispatch_once: a token is sent once to each node
    and rank with experts of its own (``dispatch_time``). exchange_hidden: exchanges of routed tokens run
    beside another micro-batch's layers: the forward of one and the backward of another go together
    (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). experts_whole: tensor parallelism cuts no expert; those
    who share them out are neighbours of dp x cp x tp (Megatron-LM's expert-tensor-parallel-size 1).
    states_moved: what the optimizer moves of a number, to what it moves of one in fp32. states_on_host,
    kept_on_host: shares of optimizer states, which are updated there, and of what layers keep for the
    backward. ends_shared: embedding and head are cut over all stages (vocabulary parallelism; Yeung 2024,
    arXiv 2411.05288), whose exchanges run beside layers.
    """

    fused_attention: Any = True
    attention_work: Any = 1.0
    norm_work: Any = 1.0
    recompute_attention: Any = False
    recompute_collectives: Any = False
    transfers_hidden: Any = False
    rounds_hide_transfers: Any = False
    gradient_bytes: Any = 4.0
    weight_bytes: Any = 2.0
    quantised: Any = 1.0
    steps_overlap: Any = False
    dispatch_once: Any = False
    exchange_hidden: Any = False
    experts_whole: Any = False
    states_moved: Any = 1.0
    states_on_host: Any = 0.0
    kept_on_host: Any = 0.0
    ends_shared: Any = False


@dataclass(frozen=True)
class Layer:
    """One layer on one rank. Everything in seconds of one micro-batch."""

    model: Shapes
    points: Points
    cluster: Cluster
    sequence: Any
    precision: Precision
    options: Options

    @cached_property
    def tokens(self) -> Seconds:
        """That a rank's layers see; its tensor-parallel neighbours see the same."""
        return self.points.micro * self.sequence / self.points.cp

    # ---- computation ----

    @cached_property
    def linear(self) -> Seconds:
        """Matrix products, forward."""
        return self._products(rates.matmul)

    @cached_property
    def three(self) -> Seconds:
        """Matrix products, forward and backward."""
        return self._products(rates.three_products)

    @cached_property
    def second_products(self) -> Seconds:
        """Of them, those whose results are summed over tensor-parallel ranks; without experts'."""
        return self._products(rates.matmul, only_second=True)

    def _products(self, rate: Callable[..., Seconds], *, only_second: bool = False) -> Any:
        """Slices of the batch (p1) and of columns (p2) make several smaller products of each."""
        model, points, seconds = self.model, self.points, partial(rate, self.cluster, self.precision)
        kv = model.kv_ranks(points.tp)
        found: list[Any] = []
        for kind, parts in ((Kind.FIRST, 1), (Kind.SECOND, points.p2))[only_second:]:
            for site in SITES:
                first, last = (np.maximum(1, width) for width in widths(site, model.letters, points.tp, kv))
                dims = Dims(T=self.tokens / points.p1, H=model.hidden, Z=first, O=last)
                # Else all of the MLP's width is routed experts', or first products of attention are latent.
                direct = kind == Kind.SECOND or np.asarray(model.kv_lora_rank) == 0
                times = points.p1 * parts * (direct if site == "attn" else np.asarray(model.whole_ffn) > 0)
                rows = (step for step in steps_of(site, kind) if step.product)
                found += [times * seconds(*dims.product(step, parts)) for step in rows]
        if not only_second and model.is_latent:
            found += self._latent_products(seconds)
        routed = 0.0 if only_second else self.routed.products(backward=rate is rates.three_products)
        return sum(found, routed)

    def _latent_products(self, seconds: Callable[..., Seconds]) -> list[Any]:
        """Of latent attention's first weights: down to queries', and to keys' and values', which every
        tensor-parallel rank does for its tokens; up from these, of its heads."""
        letters, tp, some = self.model.letters, self.points.tp, np.asarray(self.model.kv_lora_rank) > 0
        own, sizes = self._residual / self.model.hidden, {name: np.maximum(1, letters.size(name)) for name in LATENT}
        return [
            some * seconds(own, self.model.hidden, sizes["A"]),
            some * seconds(own, self.model.hidden, sizes["B+R"]),
            some * seconds(self.tokens, sizes["A"], np.maximum(1, sizes["Q+R"] / tp)),
            some * seconds(self.tokens, sizes["B"], np.maximum(1, sizes["2Q"] / tp)),
        ]

    @cached_property
    def routed(self) -> Routed:
        """What experts add."""
        told = self.options
        return Routed(
            self.model, self.points, self.cluster, self.tokens, self.precision,
            dispatch_once=told.dispatch_once, whole=told.experts_whole,
        )  # fmt: skip

    @cached_property
    def attention_forward(self) -> Seconds:
        """Attention's core, forward."""
        return self._attention(backward=False)

    @cached_property
    def attention_backward(self) -> Seconds:
        """Attention's core, backward."""
        return self._attention(backward=True)

    def _attention(self, *, backward: bool) -> Seconds:
        points, model = self.points, self.model
        shape = rates.AttentionShape(
            batch=points.micro,
            heads=model.num_heads / points.tp / (points.cp / points.ring),
            queries=self.sequence / points.ring,
            keys=keys_seen(self.sequence, model.window, model.windowed),
            head_size=model.core_size,
        )
        fused = np.asarray(self.options.fused_attention) & (np.asarray(model.attention_dropout) == 0)
        seconds = rates.attention(self.cluster, self.precision, shape, backward=backward, fused=fused)
        return seconds * self.options.attention_work

    @cached_property
    def norms(self) -> Seconds:
        """Both norms, forward."""
        return self._pass(8 * self._residual * self.options.norm_work)

    @cached_property
    def activation(self) -> Seconds:
        """GELU or SwiGLU, forward."""
        width = self.model.whole_ffn + self.model.expert_share * self.model.routed * self.model.expert_ffn
        return self._pass(self.tokens * (4 + 2 * self.model.gated) * width / self.points.tp)

    @cached_property
    def elementwise(self) -> Seconds:
        """Norms, activation, residual additions, and the rearrangement of queries, keys and values."""
        heads = self.tokens * 4 * (self.model.query + 2 * self.model.kv + self.model.normed_within) / self.points.tp
        passed = self._pass(12 * self._residual + heads)
        return self.norms + self.activation + passed + self.routed.moves(self._residual)

    @cached_property
    def _residual(self) -> Seconds:
        """Numbers of the residual stream that a rank's norms see."""
        return self.tokens * self.model.hidden / np.where(self.points.sequence_parallel > 0, self.points.tp, 1)

    def _pass(self, nbytes: Any) -> Seconds:
        return rates.memory_bound(self.cluster, nbytes * self.cluster.efficiency.elementwise.value)

    @cached_property
    def forward(self) -> Seconds:
        """All computation, forward."""
        return self.linear + self.attention_forward + self.elementwise

    @cached_property
    def backward(self) -> Seconds:
        """All computation, backward, without what is computed again."""
        return self.three - self.linear + self.attention_backward + 2 * self.elementwise

    def waits_for_host(self, device: Seconds) -> Seconds:
        """What a direction takes longer than ``device`` seconds because the host has not launched it yet."""
        told, tp = self.cluster.efficiency, self.points.tp
        launched = told.host_layer.value + np.where(tp > 1, 2 * told.host_collective.value, 0) + self.routed.launches
        return np.maximum(0, launched - device)

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
        return np.where(kind == FULL, 2 * self._residual, every + np.where(kind == SELECTIVE, 0, cheap))

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
        a forward but the products whose results are summed, and what is then added."""
        kept = np.where(self._repeats, 0.0, self.second_products + self._pass(12 * self._residual))
        selective = np.where(self.options.recompute_attention, self.attention_forward, self.norms + self.activation)
        return self._recomputed(self.forward - kept, selective)

    @cached_property
    def linear_again(self) -> Seconds:
        """Of it, matrix products."""
        return self._recomputed(self.linear - np.where(self._repeats, 0.0, self.second_products))

    @cached_property
    def attention_again(self) -> Seconds:
        """Of it, attention's core."""
        selective = np.where(self.options.recompute_attention, self.attention_forward, 0.0)
        return self._recomputed(self.attention_forward, selective)

    @property
    def _repeats(self) -> Any:
        """Whether full recomputation is of whole layers, their reductions included."""
        return np.asarray(self.options.recompute_collectives)

    def _recomputed(self, full: Seconds, selective: Seconds | float = 0.0) -> Seconds:
        kind = self.points.recompute
        return np.where(kind == FULL, full, np.where(kind == SELECTIVE, selective, 0.0))

    # ---- collectives ----

    @cached_property
    def _reduction(self) -> Seconds:
        """Of one sublayer's output over the tensor-parallel ranks; with sequence parallelism, a gather and a
        scatter."""
        whole = self.tokens * self.model.hidden * 2
        reduced = rates.collective(self.cluster, "all_reduce", whole, self.points.tp, 1)
        gathered = rates.collective(self.cluster, "all_gather", whole, self.points.tp, 1)
        scattered = rates.collective(self.cluster, "reduce_scatter", whole, self.points.tp, 1)
        both = np.where(self.points.sequence_parallel > 0, gathered + scattered, reduced)
        return np.where(self.points.overlap == NO_COLLECTIVES, 0.0, both)

    @cached_property
    def tp_forward(self) -> Seconds:
        """Exposed of the forward's reductions of both sublayers: of s slices, the last one's, and what does
        not fit beside the computation of the others."""
        points, sent = self.points, (2 + self.routed.more_reductions) * self._reduction
        domino = points.overlap == DOMINO
        slices, columns = np.where(domino, points.p1 * points.p2, 1), np.where(domino, points.p2, 1)
        alone = self._exposed(sent, self.second_products, columns)  # behind the next columns' product
        return np.where(points.p1 > 1, self._exposed(sent, self.forward, slices), alone)

    @cached_property
    def tp_backward(self) -> Seconds:
        """Exposed of the backward's; unless ``sync``, they run beside weight gradients at least, where these
        follow at once."""
        points, sent = self.points, (2 + self.routed.more_reductions) * self._reduction
        slices, mode = points.p1 * points.p2, points.overlap
        beside = rates.together(self.cluster, self.linear, sent) - self.linear
        sliced = np.minimum(beside, self._exposed(sent, self.backward, slices))
        # A split backward's weight gradients run later: other slices, or rows, are left to hide behind.
        inputs, rows = self.backward - (self.three - self.linear) / 2, self.linear - self.second_products
        cut = np.where(points.sequence_parallel > 0, sent, self._exposed(sent, rows, points.p2))
        split = SPLIT[points.schedule]
        beside = np.where(split, sent, beside)
        sliced = np.where(split, np.where(points.p1 > 1, self._exposed(sent, inputs, slices), cut), sliced)
        return np.where(mode == SYNC, sent, np.where(mode == DOMINO, sliced, beside))

    @cached_property
    def tp_again(self) -> Seconds:
        """Of the forward's, where recomputation repeats them: of Plait's, the gathers before attention and
        MLP, half of what sequence parallelism sends."""
        gathers = np.where(self.points.sequence_parallel > 0, self.tp_forward / 2, 0.0)
        return self._recomputed(np.where(self._repeats, self.tp_forward, gathers))

    def _exposed(self, sent: Seconds, beside: Seconds, slices: Any) -> Seconds:
        rest = 1 - 1 / slices
        return sent / slices + rates.together(self.cluster, beside * rest, sent * rest) - beside * rest

    @cached_property
    def cp_forward(self) -> Seconds:
        """Exposed of attention's exchanges: heads by all-to-all, keys and values along the ring."""
        sent, plain = self._exchange(), self._ring(1, self.attention_forward)
        return self._beside_slices(sent + plain, sent + self._round(1), self.tp_forward, self.forward)

    @cached_property
    def cp_backward(self) -> Seconds:
        """The same backward, where gradients of keys and values travel too."""
        sent, plain = self._exchange(), self._ring(2, self.attention_backward)
        return self._beside_slices(sent + plain, sent + self._round(2), self.tp_backward, self.backward)

    def _beside_slices(self, plain: Seconds, sent: Seconds, exposed: Seconds, beside: Seconds) -> Seconds:
        """Exposed of attention's exchanges where slices hide them, and the reductions of tensor parallelism,
        of which so much is ``exposed``, with the same computation."""
        points = self.points
        both = sent + (2 + self.routed.more_reductions) * self._reduction
        rest = np.maximum(0.0, self._exposed(both, beside, points.p1) - exposed)
        return np.where((points.overlap == DOMINO) & (points.p1 > 1), np.minimum(plain, rest), plain)

    def _exchange(self) -> Seconds:
        points, model = self.points, self.model
        ranks, size = points.cp // points.ring, model.letters.D
        heads = np.maximum(model.kv / size / points.tp, ranks)  # fewer are copied
        query = self.tokens * (model.num_heads * model.core_size) / points.tp * 2 * ranks
        kv = self.tokens * heads * model.core_size * 2 * ranks
        pair = [rates.collective(self.cluster, "all_to_all", whole, ranks, points.tp) for whole in (query, kv)]
        return 2 * pair[0] + 2 * pair[1]

    def _ring(self, tensors: int, attention: Seconds) -> Seconds:
        """Exposed where blocks travel behind attention to those before alone."""
        points = self.points
        turn = attention / points.ring
        return (points.ring - 1) * (rates.together(self.cluster, turn, self._rotation(tensors)) - turn)

    def _round(self, tensors: int) -> Seconds:
        """Of all rotations, as if alone."""
        return (self.points.ring - 1) * self._rotation(tensors)

    def _rotation(self, tensors: int) -> Seconds:
        points = self.points
        stride = points.tp * points.cp // points.ring
        width = self.model.num_kv_heads * self.model.core_size
        moved = tensors * 2 * self.tokens * width / self.model.kv_ranks(points.tp) * 2
        return rates.collective(self.cluster, "send", moved, points.ring, stride)

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
        return self._recomputed(np.where(self._repeats, self.ep_forward, 0.0))

    @cached_property
    def shard_forward(self) -> Seconds:
        """Exposed of gathering the layer's parameters."""
        sent = self.shard_forward_sent
        beside = rates.together(self.cluster, self.forward, sent) - self.forward
        return np.where(HIDE_FORWARD[self.points.shard_overlap], beside, sent)

    @cached_property
    def shard_forward_sent(self) -> Seconds:
        """Of gathering them, as if alone."""
        return self._gather(self.points.params)

    @cached_property
    def shard_backward(self) -> Seconds:
        """Exposed of gathering them again and of reducing gradients."""
        sent = self.shard_backward_sent
        beside = rates.together(self.cluster, self.backward, sent) - self.backward
        return np.where(HIDE_BACKWARD[self.points.shard_overlap], beside, sent)

    @cached_property
    def shard_backward_sent(self) -> Seconds:
        """Of gathering them again, from near copies if there are any, and of reducing gradients to what a
        rank accumulates, as if alone."""
        points = self.points
        near = np.maximum(1, points.secondary)
        gathered = np.where(points.secondary > 0, self._gather(near), self._gather(points.params))
        # Attention and MLP are a unit each.
        whole = self.model.layer_weights / points.tp * self.options.gradient_bytes / 2
        inner = rates.collective(self.cluster, "reduce_scatter", whole, points.params, points.tp)
        outer = rates.collective(
            self.cluster,
            "reduce_scatter",
            whole / points.params,
            points.grads // points.params,
            points.tp * points.params,
        )
        return gathered + 2 * (inner + outer) + self.routed.reduced(self.options.gradient_bytes)

    def _gather(self, ranks: Any) -> Seconds:
        each = self.options.weight_bytes * self.options.quantised
        whole = self.model.layer_weights / self.points.tp * each / 2
        own = 2 * rates.collective(self.cluster, "all_gather", whole, ranks, self.points.tp)
        return own + self.routed.gathered(ranks, each)

"""What one micro-batch takes on one rank: a layer's parts, and the ends of the model.

Strategies share it that differ in their pipeline, in their number of micro-batches, in the layers that are
computed again or in who owns optimizer states. So of a space it is found for a few percent of the points
(``ALIKE``), and taken for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from numpy.typing import NDArray

from plait.core.model.precision import unquantised
from plait.core.step.columns.distinct import Ints
from plait.core.step.columns.points import Points
from plait.core.step.seconds import rates
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.pipeline_time import SPLIT
from plait.core.step.seconds.rates import Seconds

ALIKE = (
    "tp", "cp", "ring", "ep", "micro", "p1", "p2", "overlap", "sequence_parallel", "recompute", "params", "grads",
    "secondary", "shard_overlap",
)  # fmt: skip
"""Columns that a micro-batch depends on, besides whether its backward is split."""


def decides(points: Points) -> list[NDArray[Any]]:
    """Columns that are equal where ``MicroBatchSeconds`` is."""
    return [*(getattr(points, name) for name in ALIKE), SPLIT[points.schedule]]


@dataclass(frozen=True, kw_only=True)
class MicroBatchSeconds:
    """Seconds of one layer: columns, one number a kind of point.

    linear, attention_forward, attention_backward: computation; three: products of both directions. forward,
    backward: all computation, without what is computed again. again: of a layer that recomputes, of which
    linear_again and attention_again. host: what the host is late, and what is offloaded to it. sent, tp, cp,
    ep, sharding: what all collectives add, and those of each axis; sent_again, tp_again, ep_again: in a layer
    that recomputes. gathered, reduced: what sharding sends in a forward and in a backward, as if alone. head:
    head and loss; embedding.
    """

    linear: Seconds
    three: Seconds
    attention_forward: Seconds
    attention_backward: Seconds
    forward: Seconds
    backward: Seconds
    again: Seconds
    linear_again: Seconds
    attention_again: Seconds
    host: Seconds
    sent: Seconds
    sent_again: Seconds
    tp: Seconds
    tp_again: Seconds
    cp: Seconds
    ep: Seconds
    ep_again: Seconds
    sharding: Seconds
    gathered: Seconds
    reduced: Seconds
    head: Seconds
    embedding: Seconds

    @staticmethod
    def of(layer: Layer) -> MicroBatchSeconds:
        """Of every point of a layer."""
        ahead = layer.tp_forward + layer.cp_forward + layer.shard_forward + layer.ep_forward
        back = layer.tp_backward + layer.cp_backward + layer.shard_backward + layer.ep_forward
        return MicroBatchSeconds(
            linear=layer.linear,
            three=layer.three,
            attention_forward=layer.attention_forward,
            attention_backward=layer.attention_backward,
            forward=layer.forward,
            backward=layer.backward,
            again=layer.again,
            linear_again=layer.linear_again,
            attention_again=layer.attention_again,
            host=layer.waits_for_host(layer.forward + ahead)
            + layer.waits_for_host(layer.backward + back)
            + layer.waits_for_offload,
            sent=ahead + back,
            sent_again=layer.tp_again + layer.ep_again,
            tp=layer.tp_forward + layer.tp_backward,
            tp_again=layer.tp_again,
            cp=layer.cp_forward + layer.cp_backward,
            ep=layer.ep_forward,
            ep_again=layer.ep_again,
            sharding=layer.shard_forward + layer.shard_backward,
            gathered=layer.shard_forward_sent,
            reduced=layer.shard_backward_sent,
            head=_head(layer),
            embedding=_embedding(layer),
        )

    def take(self, which: Ints) -> MicroBatchSeconds:
        """By numbers."""
        return MicroBatchSeconds(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def _head(layer: Layer) -> Seconds:
    """Head and loss of one micro-batch, forward and backward: products, and passes over the logits in
    fp32."""
    words = layer.model.vocab / layer.points.tp
    named = unquantised(layer.precision)
    products = rates.three_products(layer.cluster, named, layer.tokens, layer.model.hidden, words)
    passes = rates.memory_bound(layer.cluster, layer.tokens * words * layer.cluster.efficiency.logit_bytes.value)
    return products + passes + _edge(layer, layer.model.words)


def _embedding(layer: Layer) -> Seconds:
    """Embedding of one micro-batch, forward and backward: rows read, and added to the gradient."""
    moved = layer.tokens * layer.model.hidden * 12
    return rates.memory_bound(layer.cluster, moved) + _edge(layer, layer.model.words)


def _edge(layer: Layer, weights: Any) -> Seconds:
    """What sharded parameters of the embedding or of the head cost a micro-batch; nothing runs beside it."""
    cluster, points, told, whole = layer.cluster, layer.points, layer.options, weights / layer.points.tp
    gathered = rates.collective(cluster, "all_gather", whole * told.weight_bytes, points.params, points.tp)
    reduced = rates.collective(cluster, "reduce_scatter", whole * told.gradient_bytes, points.params, points.tp)
    return gathered + reduced

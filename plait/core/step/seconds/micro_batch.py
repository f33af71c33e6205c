"""What one micro-batch takes on one rank: a layer's parts, and the ends of the model.

Strategies share it that differ in their pipeline, in their number of micro-batches, in the layers that are
computed again or in who owns optimizer states. So of a space it is found for a few percent of the points
(``ALIKE``), and taken for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.step.columns.distinct import Ints
from plait.core.step.columns.points import Points
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.pipeline_time import SPLIT
from plait.core.step.seconds.rates import Seconds
from plait.core.step.seconds.shard_sent import HIDE_BACKWARD, ends_of

ALIKE = (
    "tp", "cp", "ring", "ep", "micro", "p1", "p2", "overlap", "sequence_parallel", "recompute", "params", "grads",
    "secondary", "shard_overlap", "graphs",
)  # fmt: skip
"""Columns that a micro-batch depends on, besides whether its backward is split."""


def decides(points: Points) -> list[NDArray[Any]]:
    """Columns that are equal where ``MicroBatchSeconds`` is."""
    return [*(getattr(points, name) for name in ALIKE), SPLIT[points.schedule]]


@dataclass(frozen=True, kw_only=True)
class MicroBatchSeconds:
    """Seconds of one layer: columns, one number a kind of point.

    linear, attention_forward, attention_backward: computation; three: products of both directions. forward,
    backward: all computation, without what is computed again; ahead, back: with collectives, but for
    sharding's. again: of a layer that recomputes, of which linear_again and attention_again.
    weight_gradients: products of these, of a backward. late_forward,
    late_backward, late_again, late_weights: by how much the host is late for one layer more; lead_forward,
    lead_backward, lead_again, lead_weights: for the first of a list. sent, tp, cp, ep, sharding: what all
    collectives add, and those of each axis; sent_again, tp_again, cp_again, ep_again: in a layer that
    recomputes. shard_forward: of sharding, the forward's. gathered, reduced: what sharding sends in a forward
    and in a backward, as if alone; summed: of the latter, its sums. waits_for_offload: for activations on
    their way to the host and back. head: head and loss, head_backward: its computation, backward;
    head_weights: its part of a list of weight gradients, with their sum. embedding: both ways, of which
    embedding_forward. leave: the last join of a stage without a head. edge: of sums of the head's or the
    embedding's gradient, as if alone, where backwards hide them.
    """

    linear: Seconds
    three: Seconds
    attention_forward: Seconds
    attention_backward: Seconds
    forward: Seconds
    backward: Seconds
    ahead: Seconds
    back: Seconds
    again: Seconds
    linear_again: Seconds
    attention_again: Seconds
    weight_gradients: Seconds
    late_forward: Seconds
    late_backward: Seconds
    late_again: Seconds
    late_weights: Seconds
    lead_forward: Seconds
    lead_backward: Seconds
    lead_again: Seconds
    lead_weights: Seconds
    waits_for_offload: Seconds
    sent: Seconds
    sent_again: Seconds
    tp: Seconds
    tp_again: Seconds
    cp: Seconds
    cp_again: Seconds
    ep: Seconds
    ep_again: Seconds
    sharding: Seconds
    shard_forward: Seconds
    gathered: Seconds
    reduced: Seconds
    summed: Seconds
    head: Seconds
    embedding: Seconds
    embedding_forward: Seconds
    leave: Seconds
    head_backward: Seconds
    head_weights: Seconds
    edge: Seconds

    @staticmethod
    def of(layer: Layer) -> MicroBatchSeconds:
        """Of every point of a layer."""
        sent = layer.ahead - layer.forward + layer.back - layer.backward
        own = {name: getattr(layer, name) for name in _OF_LAYER}
        edges, points = ends_of(layer), layer.points
        hides = layer.listed & (points.params == 1) & HIDE_BACKWARD[points.shard_overlap]
        ends = {"head": layer.sums.head, "embedding": layer.sums.embed, "leave": layer.sums.leave}
        return MicroBatchSeconds(
            attention_forward=layer.sums.forward.attention,
            head_backward=layer.sums.head_backward.seconds,
            head_weights=layer.sums.head_backward.seconds / 2 + np.where(hides, 0.0, edges["sums"]),
            attention_backward=layer.sums.backward.attention,
            embedding_forward=layer.sums.embed.tp + layer.sums.embed.seconds / 2,
            sent=sent + layer.shard_forward + layer.shard_backward,
            sent_again=layer.tp_again + layer.cp_again + layer.ep_again,
            tp=layer.tp_forward + layer.tp_backward,
            cp=layer.cp_forward + layer.cp_backward,
            ep=layer.ep_forward,
            sharding=layer.shard_forward + layer.shard_backward,
            gathered=layer.shard_forward_sent,
            reduced=layer.shard_backward_sent,
            summed=layer.shard_sums_sent,
            edge=np.where(hides, edges["head"], 0.0),
            **{name: one.seconds + one.tp + np.where(hides, 0.0, edges.get(name, 0.0)) for name, one in ends.items()},
            **own,
        )

    def take(self, which: Ints) -> MicroBatchSeconds:
        """By numbers."""
        return MicroBatchSeconds(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


_OF_LAYER = (
    "linear", "three", "forward", "backward", "ahead", "back", "again", "linear_again", "attention_again",
    "weight_gradients",
    "late_forward", "late_backward", "late_again", "late_weights", "lead_forward",
    "lead_backward", "lead_again", "lead_weights", "tp_again", "cp_again", "ep_again", "waits_for_offload",
    "shard_forward",
)  # fmt: skip

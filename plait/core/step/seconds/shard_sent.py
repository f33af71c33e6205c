"""What sharing out parameters and gradients over replicas sends in a micro-batch, in seconds as if alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.core.step.columns.points import SHARD_OVERLAPS
from plait.core.step.seconds import rates
from plait.core.step.seconds.experts_time import Routed
from plait.core.step.seconds.op_seconds import Priced
from plait.core.step.seconds.rates import Seconds

HIDE_FORWARD, HIDE_BACKWARD = (
    np.array([name in (way, "both") for name in SHARD_OVERLAPS]) for way in ("forward", "backward")
)
"""By overlap of sharding: whether it hides what is sent for a forward, and for a backward."""


def gather_seconds(asked: Priced, routed: Routed, ranks: Any) -> Seconds:
    """Of a layer's parameters, from so many ranks: attention and MLP are a unit each."""
    each = asked.options.weight_bytes * asked.options.quantised
    whole = asked.model.layer_weights / asked.points.tp * each / 2
    return 2 * rates.collective(asked.cluster, "all_gather", whole, ranks, asked.points.tp) + routed.gathered(
        ranks, each
    )


def sum_seconds(asked: Priced, routed: Routed) -> Seconds:
    """Of a layer's gradients, to what a rank accumulates."""
    whole = asked.model.layer_weights / asked.points.tp / 2
    return 2 * _summed(asked, whole) + routed.reduced(asked.options.gradient_bytes)


def ends_of(asked: Priced) -> dict[str, Seconds]:
    """Of the embedding, with positions, and of the head; sums: of the head's gradients alone. Lists gather
    the head for a backward again, where nothing hides that."""
    model, points, told = asked.model, asked.points, asked.options
    sizes = model.words / points.tp, np.asarray(model.max_sequence) * model.hidden
    gathered = [
        rates.collective(asked.cluster, "all_gather", numbers * told.weight_bytes, points.params, points.tp)
        for numbers in sizes
    ]
    summed = [_summed(asked, numbers) for numbers in sizes]
    again = asked.listed & ~HIDE_BACKWARD[points.shard_overlap]
    positions = (gathered[1] + summed[1]) * np.asarray(model.learned_positions) * asked.listed
    embedding = gathered[0] + summed[0] + positions
    return {"embedding": embedding, "head": gathered[0] * (1 + again) + summed[0], "sums": summed[0]}


def _summed(asked: Priced, numbers: Any) -> Seconds:
    """Of so many numbers' gradients: over the ranks that share out their parameters, then over the others."""
    points, whole = asked.points, numbers * asked.options.gradient_bytes
    inner = rates.collective(asked.cluster, "reduce_scatter", whole, points.params, points.tp)
    outer, apart = points.grads // points.params, points.tp * points.params
    return inner + rates.collective(asked.cluster, "reduce_scatter", whole / points.params, outer, apart)

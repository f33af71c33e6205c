"""Seconds of single operations on a cluster: matrix products, attention, elementwise passes, collectives.

Everything takes numbers or numpy columns and gives seconds of the same shape. Peaks come from the cluster's
datasheet figures, what of them is reached from its ``efficiency``, whose constants are fitted to measured
steps (``plait.plan.calibrate``). Forms that few constants describe are preferred to tables: they extrapolate
to shapes that nobody measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.core.base.errors import JobError
from plait.core.cluster.efficiency import Links
from plait.core.cluster.hardware import Cluster, Tier
from plait.core.model.precision import Precision, unquantised
from plait.core.step.ops import ATTENTION_GRAD

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Seconds = NDArray[np.float64]

RINGS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "broadcast")
"""Pass every rank of a group; all-reduces of few bytes are trees."""


def peak(cluster: Cluster, precision: Precision) -> float:
    """FLOP/s of the device. Raises JobError where its file does not say."""
    if precision not in cluster.device.peak:
        raise JobError(
            f"{cluster.device.name} has no peak for {precision}",
            key=f"cluster.device.peak.{precision}",
            fix=f"Use {' or '.join(cluster.device.peak)}, or add the datasheet's figure",
        )
    return cluster.device.peak[precision].value


def matmul(cluster: Cluster, precision: Precision, m: ArrayLike, k: ArrayLike, n: ArrayLike) -> Seconds:
    """Of one product [m, k] x [k, n]. Small results leave processors without a tile, short sums do not
    amortise a tile's beginning and end."""
    m, k, n = _columns(m, k, n)
    reached = cluster.efficiency
    ideal = 2 * m * k * n / (peak(cluster, precision) * reached.matmul_in(precision).value)
    wave, depth = reached.matmul_wave.value, reached.matmul_depth.value
    return ideal * (1 + wave / (m * n)) * (1 + depth / k) + reached.matmul_launch.value


def three_products(cluster: Cluster, precision: Precision, m: ArrayLike, k: ArrayLike, n: ArrayLike) -> Seconds:
    """Of the forward's product [m, k] x [k, n], its input gradient and its weight gradient."""
    shapes = ((m, k, n), (m, n, k), (k, m, n))
    return sum((matmul(cluster, precision, *shape) for shape in shapes[1:]), matmul(cluster, precision, *shapes[0]))


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention of ``queries`` tokens to ``keys`` tokens, of each sequence and head. causal: half of the
    scores are masked."""

    batch: ArrayLike
    heads: ArrayLike
    queries: ArrayLike
    keys: ArrayLike
    head_size: ArrayLike
    causal: bool = True


def attention(
    cluster: Cluster, precision: Precision, shape: AttentionShape, *, backward: bool, fused: ArrayLike = True
) -> Seconds:
    """Seconds of attention's core, without its projections. fused: one kernel that never writes the scores,
    and skips what a causal mask hides; else two batched products and passes over all scores between them.

    Where products are quantised, attention computes in bf16 all the same.
    """
    b, h, q, k, d = _columns(shape.batch, shape.heads, shape.queries, shape.keys, shape.head_size)
    reached, top = cluster.efficiency, peak(cluster, unquantised(precision))
    scores = b * h * q * k
    share = reached.attention_backward if backward else reached.attention_forward
    flops = 4 * scores * d * (ATTENTION_GRAD if backward else 1) * (0.5 if shape.causal else 1)
    short = 1 + reached.attention_short.value / k
    one_kernel = flops / (top * share.value) * short + reached.attention_launch.value
    odd = np.where(d % 8 > 0, reached.matmul_odd.value, 1.0)
    products = 4 * scores * d / (top * reached.matmul.value) * (1 + reached.matmul_depth.value / d) * odd
    passes = memory_bound(cluster, scores * reached.attention_score_bytes.value)
    several = (products + passes) * (2 if backward else 1) + reached.attention_launch.value
    return np.where(np.asarray(fused), one_kernel, several)


def memory_bound(cluster: Cluster, nbytes: ArrayLike) -> Seconds:
    """Of passes that read and write so many bytes of the device's memory."""
    (moved,) = _columns(nbytes)
    return moved / (cluster.device.memory_rate.value * cluster.efficiency.memory.value)


def collective(cluster: Cluster, kind: Kind, nbytes: ArrayLike, ranks: ArrayLike, stride: ArrayLike) -> Seconds:
    """Of a collective over groups of ``ranks`` ranks, ``stride`` apart in rank order, all groups at once.

    nbytes: of the whole tensor, gathered or reduced, over all ranks of a group (send: of what one rank
    sends). A group's ranks on one node pool their share of the node's links to others; the other ranks' share
    is used by their own groups meanwhile. What tiers take adds up, or counts where it is most
    (``Efficiency.tiers``).
    """
    whole, n, step = _columns(nbytes, ranks, stride)
    n, step = np.maximum(n, 1), np.maximum(step, 1)  # points that are refused elsewhere
    if not np.any(n > 1):
        return np.zeros_like(whole)
    n = np.maximum(n, 1)  # no group at all sends as little as one rank
    if kind == "send":
        return _send(cluster, whole, n, step)
    at_once = cluster.efficiency.tiers == "slowest" and kind != "all_to_all"
    moved = np.zeros_like(whole)
    delay = np.zeros_like(whole)
    pooled = np.ones_like(whole)  # ranks of a group within the tier before
    for at, tier in enumerate(cluster.tiers):
        last = at == len(cluster.tiers) - 1
        within = n if last or not tier.ranks else np.minimum(n, np.maximum(1, tier.ranks // step))
        part = _links(cluster, at)
        rate = part.share.value * rate_of(tier, within)
        crosses = within > pooled
        taken = _wire(kind, whole, n, pooled) / rate
        pieces = n - pooled if kind in RINGS else np.log2(np.maximum(n, 2) / pooled)
        fills = part.half.value * pieces / (pooled * rate)
        if at_once:
            moved = np.maximum(moved, np.where(crosses, taken, 0))
            delay += np.where(crosses, fills, 0)
        else:
            moved = moved + np.where(crosses, taken + fills, 0)
        delay += latency(cluster, at) * np.log2(within / pooled)
        if kind in RINGS:
            delay += tier.latency.value * part.hop.value * (within / pooled - 1) * (n / within)
        pooled = within
    return np.where(n > 1, moved + delay, 0.0)


def _wire(kind: Kind, whole: Seconds, n: Seconds, together: Seconds) -> Seconds:
    """Bytes that a rank moves over one tier, of whose subgroups each has ``together`` ranks of the group."""
    if kind == "broadcast":
        return whole / together
    if kind == "all_to_all":  # what a rank has, but for what stays with its neighbours
        return whole / n * (n - together) / n
    return whole * (n - together) / n / together * (2 if kind == "all_reduce" else 1)


def _send(cluster: Cluster, nbytes: Seconds, ranks: Seconds, stride: Seconds) -> Seconds:
    """Of ``nbytes`` to the rank ``stride`` further on: over the outermost tier that a chain of ``ranks``
    crosses."""
    seconds = np.zeros_like(nbytes)
    inner = 1
    for at, tier in enumerate(cluster.tiers):
        part = _links(cluster, at)
        taken = (nbytes + part.half.value) / (part.share.value * rate_of(tier, 2))
        taken = taken + latency(cluster, at)
        seconds = np.where((ranks - 1) * stride >= inner, taken, seconds)
        inner = tier.ranks or 2**31
    return np.where(ranks > 1, seconds, 0.0)


def together(cluster: Cluster, compute: ArrayLike, communication: ArrayLike) -> Seconds:
    """Seconds until both are done when they run side by side, each slowing the other as long as both run."""
    busy, sent = _columns(compute, communication)
    k_c, k_m = cluster.efficiency.slow_computation.value, cluster.efficiency.slow_communication.value
    outlasts = busy * k_c >= sent * k_m  # computation ends last
    return np.where(outlasts, busy + sent * k_m * (1 - 1 / k_c), sent + busy * k_c * (1 - 1 / k_m))


def rate_of(tier: Tier, ranks: Any) -> Any:
    """Bytes per second that a rank in a group of so many of a tier's ranks has: all of the rate unless every
    pair has a link of its own."""
    return tier.rate.value * (np.maximum(1, np.asarray(ranks) - 1) / (tier.ranks - 1) if tier.mesh else 1.0)


def latency(cluster: Cluster, tier: int) -> float:
    """Seconds of a collective of two ranks over a tier, however little is sent."""
    return cluster.tiers[tier].latency.value * _links(cluster, tier).latency.value


def _links(cluster: Cluster, tier: int) -> Links:
    return cluster.efficiency.across if tier else cluster.efficiency.inside


def _columns(*values: ArrayLike) -> list[Seconds]:
    """As float columns of one shape."""
    arrays: list[Any] = [np.asarray(value, dtype=np.float64) for value in values]
    return list(np.broadcast_arrays(*arrays))

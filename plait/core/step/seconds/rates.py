"""Seconds of single operations on a cluster: matrix products, attention, elementwise passes,
collectives.

Functions take numbers or numpy arrays and return seconds of the same shape. Peaks are the datasheet
figures of the cluster; its ``efficiency`` is the fraction reached, with constants fitted to
measured steps (``plan.calibrate.fit``). Formulas with few constants are preferred to tables, as
they extrapolate to shapes that were never measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
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
"""Collectives whose message passes through every rank of a group. All-reduces of few bytes are
trees instead."""
INSIDE, ACROSS = 0.8, 0.87
"""Fraction of a link's rate that dispatch reaches, inside a node and across nodes. Sources: DeepEP
README (commit 0297fc8): 726 to 740 of 900 GB/s on SM100. docs/legacy.md: 153 to 158 of 200 GB/s on
H800. Over 400 Gbit/s: 43 GB/s at 16 ranks; 58 at 32 ranks, of which three quarters leave a node; 51
at 64 ranks, of which seven eighths do."""


def peak(cluster: Cluster, precision: Precision) -> float:
    """Return the device's peak FLOP/s. Raises JobError if the cluster file has no peak for
    ``precision``."""
    if precision not in cluster.device.peak:
        raise JobError(
            f"{cluster.device.name} has no peak for {precision}",
            key=f"cluster.device.peak.{precision}",
            fix=f"Use {' or '.join(cluster.device.peak)}, or add the datasheet's figure",
        )
    return cluster.device.peak[precision].value


def matmul(cluster: Cluster, precision: Precision, m: ArrayLike, k: ArrayLike, n: ArrayLike) -> Seconds:
    """Return the seconds of one product [m, k] x [k, n]. Small results leave processors without a
    tile; short inner dimensions do not amortise a tile's prologue and epilogue."""
    m, k, n = _columns(m, k, n)
    reached = cluster.efficiency
    ideal = 2 * m * k * n / (peak(cluster, precision) * reached.matmul_in(precision).value)
    wave, depth = reached.matmul_wave.value, reached.matmul_depth.value
    return ideal * (1 + wave / (m * n)) * (1 + depth / k) + reached.matmul_launch.value


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention of ``queries`` tokens to ``keys`` tokens, for each sequence and head. causal: half
    of the scores are masked."""

    batch: ArrayLike
    heads: ArrayLike
    queries: ArrayLike
    keys: ArrayLike
    head_size: ArrayLike
    causal: bool = True


def attention(
    cluster: Cluster, precision: Precision, shape: AttentionShape, *, backward: bool, fused: ArrayLike = True
) -> Seconds:
    """Return the seconds of the attention core, without its projections.

    fused: one kernel that never writes the scores and skips masked ones; otherwise two batched
    products and passes over all scores between them. Attention runs in bf16 even if other products
    are quantised.
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
    """Return the seconds of passes that read and write ``nbytes`` of device memory."""
    (moved,) = _columns(nbytes)
    return moved / (cluster.device.memory_rate.value * cluster.efficiency.memory.value)


def collective(cluster: Cluster, kind: Kind, nbytes: ArrayLike, ranks: ArrayLike, stride: ArrayLike) -> Seconds:
    """Return the seconds of a collective over groups of ``ranks`` ranks that lie ``stride`` apart
    in rank order, all groups at once.

    nbytes: of the whole tensor, gathered or reduced, over all ranks of a group (send: bytes that
    one rank sends). A group's ranks on one node pool their share of the node's links to other
    nodes; the other ranks' share serves their own groups at the same time. Times of the network
    tiers add up, or only the slowest tier counts (``Efficiency.tiers``).
    """
    whole, n, step = _columns(nbytes, ranks, stride)
    n, step = np.maximum(n, 1), np.maximum(step, 1)  # strategies that other checks refuse
    if not np.any(n > 1):
        return np.zeros_like(whole)
    n = np.maximum(n, 1)  # an empty group sends as little as one rank
    if kind == "send":
        return _send(cluster, whole, n, step)
    at_once = cluster.efficiency.tiers == "slowest" and kind != "all_to_all"
    moved = np.zeros_like(whole)
    delay = np.zeros_like(whole)
    pooled = np.ones_like(whole)  # ranks of a group within the previous tier
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
    """Return the bytes that a rank moves over one network tier. whole: bytes of the tensor. n:
    ranks of the group that the tier connects. together: ranks of the group in each of the tier's
    subgroups."""
    if kind == "broadcast":
        return whole / together
    if kind == "all_to_all":  # a rank's own tensor, without the part that stays within the subgroup
        return whole / n * (n - together) / n
    return whole * (n - together) / n / together * (2 if kind == "all_reduce" else 1)


def _send(cluster: Cluster, nbytes: Seconds, ranks: Seconds, stride: Seconds) -> Seconds:
    """Return the seconds of sending ``nbytes`` to the rank ``stride`` further on, over the
    outermost tier that a chain of ``ranks`` ranks crosses."""
    seconds = np.zeros_like(nbytes)
    inner = 1
    for at, tier in enumerate(cluster.tiers):
        part = _links(cluster, at)
        taken = (nbytes + part.half.value) / (part.share.value * rate_of(tier, 2))
        taken = taken + latency(cluster, at)
        seconds = np.where((ranks - 1) * stride >= inner, taken, seconds)
        inner = tier.ranks or 2**31
    return np.where(ranks > 1, seconds, 0.0)


def overlapped(cluster: Cluster, compute: ArrayLike, communication: ArrayLike) -> Seconds:
    """Return the seconds until computation and communication are both done if they run
    concurrently. Each slows the other while both run."""
    busy, sent = _columns(compute, communication)
    k_c, k_m = cluster.efficiency.slow_computation.value, cluster.efficiency.slow_communication.value
    outlasts = busy * k_c >= sent * k_m  # computation ends last
    return np.where(outlasts, busy + sent * k_m * (1 - 1 / k_c), sent + busy * k_c * (1 - 1 / k_m))


def rate_of(tier: Tier, ranks: Any) -> Any:
    """Return the bytes per second of a rank in a group of ``ranks`` of the tier's ranks: the full
    rate, or less if every pair of ranks has its own link."""
    return tier.rate.value * (np.maximum(1, np.asarray(ranks) - 1) / (tier.ranks - 1) if tier.mesh else 1.0)


def latency(cluster: Cluster, tier: int) -> float:
    """Return the seconds of a collective of two ranks over a tier with an empty message."""
    return cluster.tiers[tier].latency.value * _links(cluster, tier).latency.value


def _links(cluster: Cluster, tier: int) -> Links:
    return cluster.efficiency.across if tier else cluster.efficiency.inside


def _columns(*values: ArrayLike) -> list[Seconds]:
    """Return the values as float arrays, broadcast to one shape."""
    arrays: list[Any] = [np.asarray(value, dtype=np.float64) for value in values]
    return list(np.broadcast_arrays(*arrays))


# ---- dispatch that sends each token once ----


def expected_parts(parts: Any, experts: Any, per_token: Any) -> Any:
    """Return to how many of ``parts`` equal parts of the experts a token goes, on average.
    per_token: experts per token; a fraction if tokens are dropped.

    Divide E experts into m equal parts. A part holds none of a token's k distinct experts with
    probability C(E - E/m, k) / C(E, k). The token is sent to all other parts.

    >>> [round(float(expected_parts(*each)), 2) for each in ((8, 8, 2), (8, 64, 8), (1, 8, 2))]
    [2.0, 5.43, 1.0]
    """
    parts, experts, chosen = (np.asarray(value, dtype=np.float64) for value in (parts, experts, per_token))
    others = experts - experts / parts
    missed: list[Any] = [
        1 - np.clip(chosen - one, 0, 1) * (1 - np.maximum(0, others - one) / np.maximum(1, experts - one))
        for one in range(int(np.ceil(np.max(chosen, initial=0))))
    ]
    return parts * (1 - prod(missed, start=1.0))


def dispatch(cluster: Cluster, row: Any, ranks: Any, stride: Any, *, experts: Any, per_token: Any) -> Seconds:
    """Return the seconds of sending tokens, or their experts' results back, over groups of
    ``ranks`` ranks ``stride`` apart. row: bytes of all tokens of a rank, each counted once.

    A token is sent once to every node that holds one of its experts, and forwarded there once to
    every such rank (DeepEP; DeepSeek-V3, section 3.2.2; NVIDIA's HybridEP). NCCL instead sends it
    once per expert. Tiers work concurrently on successive tokens, so the slowest tier decides. A
    message for a part of a group arrives at one rank of the part, which forwards it to the others
    over the inner links.
    """
    row, n, step = (np.asarray(value, dtype=np.float64) for value in (row, np.maximum(1, ranks), np.maximum(1, stride)))
    longest, delay, pooled = np.zeros_like(row * n), np.zeros_like(row * n), np.ones_like(n)
    for at, tier in enumerate(cluster.tiers):
        last = at == len(cluster.tiers) - 1
        within = n if last or not tier.ranks else np.minimum(n, np.maximum(1, tier.ranks // step))
        moved = row * expected_parts(n / pooled, experts, per_token) * (1 - pooled / within)
        longest = np.maximum(longest, moved / (rate_of(tier, within) * (ACROSS if at else INSIDE)))
        delay = delay + latency(cluster, at) * np.log2(within / pooled)
        pooled = within
    return np.where(n > 1, longest + delay, 0.0)

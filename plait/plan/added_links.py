"""Why a measured collective is faster than any share of the links between nodes explains.

Predictions add up what a collective takes inside nodes and between them (``step.seconds.rates``), as steps
of training show it. Large collectives alone, as nccl-tests time them, pass both at once, and take little more
than the slower of the two. Links inside nodes then explain all of the time, and nothing is left for others,
unless the cluster's file says that the slowest tier counts (``Efficiency.tiers``).
"""

from __future__ import annotations

from plait.core.base.text import in_bytes, in_seconds
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.profile import Profile
from plait.core.step.seconds import rates
from plait.plan.constants import constant_of, with_constants

FREE = {"across.share": (1e9, 0.0), "across.latency": (1e-9, 0.0), "across.hop": (1e-9, 0.0)}
"""Links between nodes that take no time."""
BLAMED = 0.5
"""Share of a measured time from which on links inside nodes are why nothing is left for others."""


def why_too_fast(cluster: Cluster, profile: Profile) -> str:
    """What links inside nodes take of the largest collective between nodes, as the cluster has them, in
    words; nothing where that is not why it is too fast."""
    if cluster.efficiency.tiers == "slowest":
        return ""
    curves = [one for one in profile.collectives if one.group.nodes > 1 and one.group.per_node > 1 and one.points]
    if not curves:
        return ""
    free = with_constants(cluster, FREE, source="supposed", date=profile.date)
    largest = max(curves, key=lambda one: one.points[-1].bytes)
    point, group = largest.points[-1], largest.group
    inside = float(rates.collective(free, largest.kind, point.bytes, group.ranks, group.stride))
    if inside < BLAMED * point.seconds:
        return ""
    share = constant_of(cluster, "inside.share").value
    return (
        f"predictions add up what links inside nodes and between them take, and of the {in_seconds(point.seconds)} of "
        f"its {largest.kind} of {in_bytes(point.bytes)} over {group.nodes} nodes of {group.per_node} the first take "
        f"{in_seconds(inside)} alone (inside.share = {share:.3g}, which a log of one node tells). A collective that "
        'passes both at once is faster than such a sum; efficiency.tiers = "slowest" in the cluster\'s file predicts '
        "it so"
    )

"""A whole profile, measured by a few ranks in a few seconds."""

from __future__ import annotations

from typing import Any

from plait.core.cluster.profile import Profile
from plait.plan.calibrate.profiled import cluster_from_profile
from tests.dist.equality import Pool
from tests.train.profile.test_measure import of_rank, small


def measured(rank: int, world: int, per_node: int) -> tuple[dict[str, Any], list[str]]:
    """The profile as plain values, and what was said."""
    with small():
        found, said = of_rank(rank, world, per_node, {"seconds": 3.0})
    return found.to_dict(), said


def test_a_profile(pool: Pool) -> None:
    results = pool(4).run(measured, 4, 2)
    profiles = [Profile.from_dict(values) for values, _ in results]
    for one in profiles[1:]:  # every rank has the same collectives, which all have measured together
        assert (one.collectives, one.products) == (profiles[0].collectives, profiles[0].products)
    found, said = profiles[0], results[0][1]
    assert any("all_reduce" in line for line in said)
    assert {one.group.stride for one in found.collectives} == {1, 2}
    for curve in found.collectives:
        assert len(curve.points) >= 2 and curve.points[0].bytes >= 4096
    assert {one.kind for one in found.overlaps} == {"all_reduce", "all_gather"}
    assert (found.machine.ranks, found.machine.ranks_per_node, found.machine.backend) == (4, 2, "gloo")
    cluster = cluster_from_profile(found)
    assert (cluster.ranks_per_node, cluster.nodes) == (2, 2)
    for constant in (cluster.efficiency.matmul, cluster.tiers[0].rate, cluster.device.memory_rate):
        assert constant.source.startswith("profile of ")  # how well they fit is a unit test's, without a clock
        assert constant.value > 0

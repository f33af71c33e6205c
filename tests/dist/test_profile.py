"""A whole profile, measured by a few ranks in a few seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.core.cluster.profile import Profile
from plait.plan.profiled import here
from tests.dist import profiling
from tests.support.ranks import Ranks


@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (4, 2)])
def test_a_profile(pool: Callable[[int], Ranks], world: int, per_node: int) -> None:
    results = pool(world).run(profiling.whole_profile, world, per_node, 4.0)
    profiles = [Profile.from_dict(values) for values, _ in results]
    for one in profiles[1:]:  # every rank has the same collectives, which all have measured together
        assert one.collectives == profiles[0].collectives
        assert one.products == profiles[0].products
    found, said = profiles[0], results[0][1]
    assert any("all_reduce" in line for line in said)
    strides = {2: {1}, 4: {1, 2}}[world]
    assert {one.group.stride for one in found.collectives} == strides
    for curve in found.collectives:
        assert len(curve.points) >= 2
        assert curve.points[0].bytes >= 4096
    kinds = {one.kind for one in found.collectives}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}
    assert {one.tp for one in found.modules} == {1, 2}
    assert {one.kind for one in found.overlaps} == {"all_reduce", "all_gather"}
    assert (found.machine.ranks, found.machine.ranks_per_node, found.machine.backend) == (world, per_node, "gloo")
    cluster = here(found)
    assert (cluster.ranks_per_node, cluster.nodes) == (per_node, world // per_node)
    for constant in (cluster.efficiency.matmul, cluster.tiers[0].rate, cluster.device.memory_rate):
        assert constant.source.startswith("profile of ")  # how well they fit is a unit test's, without a clock
        assert constant.value > 0

"""Groups by how many minipods they spread over."""

from __future__ import annotations

import datetime
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.env import RankEnv
from plait.core.base.errors import JobError
from plait.core.cluster.network import PlacementProfile
from plait.core.cluster.profile import Group
from plait.train.profile import collectives
from plait.train.profile import measure as spreads
from plait.train.profile.collectives import EqualGroups
from plait.train.profile.measure import measure_spreads, spread_layouts
from plait.train.tune.timing import Clock, MedianSeconds
from tests.dist.equality import DEVICE
from tests.support.threads import threads


@given(pods=st.integers(2, 6), nodes=st.integers(1, 6), per_node=st.integers(1, 4))
def test_groups_cover_the_world_and_lie_evenly(pods: int, nodes: int, per_node: int) -> None:
    world = pods * nodes * per_node
    for layout in spread_layouts(world, per_node, nodes):
        assert sorted(rank for group in layout.groups for rank in group) == list(range(world))
        for group in layout.groups:
            where = [rank // (nodes * per_node) for rank in group]
            assert {where.count(pod) for pod in where} == {len(group) // layout.group.minipods}
            assert len(set(where)) == layout.group.minipods


def test_both_spreads_of_pairs_are_there() -> None:
    found = {(one.group.ranks, one.group.minipods): one.groups for one in spread_layouts(8, 2, 2)}
    assert found[2, 1] == ((0, 2), (1, 3), (4, 6), (5, 7)), "one rank of each node, as a DP group has"
    assert found[2, 2] == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert set(found) == {(2, 1), (2, 2), (4, 1), (4, 2), (8, 2)}


@pytest.mark.parametrize(("world", "per_node", "nodes"), [(4, 1, 0), (4, 1, 4), (6, 1, 4), (4, 2, 2), (4, 1, -2)])
def test_what_is_no_whole_number_of_several_minipods_is_refused(world: int, per_node: int, nodes: int) -> None:
    rank = RankEnv(world_size=world, local_world_size=per_node)
    with pytest.raises(
        JobError, match=rf"nodes_per_minipod: {world // per_node} nodes are not several minipods of {nodes}"
    ):
        measure_spreads(nodes, rank, DEVICE, deadline=0.0, cores=1, say=print)


def test_collectives_and_what_pairs_lose_side_by_side_are_measured() -> None:
    def measure(rank: int) -> tuple[PlacementProfile, list[str]]:
        said = list[str]()
        env = RankEnv(rank=rank, world_size=4, local_rank=0, local_world_size=1, node_rank=rank)
        return measure_spreads(2, env, DEVICE, deadline=0.0, cores=2, say=said.append), said

    with mock.patch.object(collectives, "LARGEST", {"gloo": 1 << 16}):
        (found, said), *others = threads(4).run(measure)
    assert all(other.interference == found.interference for other, _ in others)
    assert (found.nodes_per_minipod, found.machine.ranks, found.machine.ranks_per_node) == (2, 4, 1)
    assert set(found.versions) >= {"plait", "python", "torch"}
    assert found.date == datetime.datetime.now(datetime.UTC).date().isoformat()
    assert {one.kind for one in found.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    pairs = [(one.kind, one.group.ranks, one.group.minipods) for one in found.interference]
    assert pairs == [("all_reduce", 2, 1), ("all_reduce", 2, 2)]
    last = {one.group.minipods: one.points[-1].bytes for one in found.collectives
            if (one.kind, one.group.ranks) == ("all_reduce", 2)}  # fmt: skip
    for one in found.interference:
        assert one.bytes == last[one.group.minipods]
        assert one.alone > 0 and one.together > 0
        assert f"two jobs side by side, all_reduce of {one.bytes >> 10} KiB, {one.group}" in said


def test_every_other_group_is_timed_alone_with_its_part_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one node, and a layout of one group, have nobody beside them."""
    layouts = spread_layouts(8, 2, 2)
    layouts += [EqualGroups(((0, 1), (2, 3), (4, 5), (6, 7)), Group.of((0, 1), 2, nodes_per_minipod=2, at_once=4))]
    layouts += [EqualGroups(((0, 2),), Group.of((0, 2), 2, nodes_per_minipod=2, at_once=1))]
    asked, ran = list[tuple[float, bool]](), list[str]()

    class Lines:
        rank = 2
        layouts: list[EqualGroups]

        def operation(self, kind: str, at: int, size: int, dtype: torch.dtype) -> collectives.Operation:
            assert (kind, dtype) == ("all_reduce", torch.float32)
            return collectives.Operation(size + 1, lambda: ran.append(f"own {at}"))

    class Counting(Clock):
        def __init__(self) -> None:
            pass

        def left(self) -> float:
            return 12.0

        def sample(self, run: Any, budget: float, *, together: bool) -> MedianSeconds:
            asked.append((budget, together))
            run()
            return MedianSeconds(float(len(asked)), 0.0)

    lines: Any = Lines()
    lines.layouts = layouts
    clock: Any = Counting()
    sizes = {("all_reduce", str(one.group)): 4096 for one in layouts}
    found = spreads._interference(lines, clock, lambda text: None, sizes)
    pairs = [at for at, one in enumerate(layouts[:-2]) if one.group.ranks == 2]
    assert [one.group for one in found] == [layouts[at].group for at in pairs]
    assert asked == [(3.0, True), (3.0, True), (6.0, True), (6.0, True)]
    assert [(one.bytes, one.alone, one.together) for one in found] == [(4097, 1.0, 2.0), (4097, 3.0, 4.0)]
    first = [any(2 in group for group in layouts[at].groups[::2]) for at in pairs]
    assert ran == [f"own {at}" for at, alone in zip(pairs, first, strict=True) for _ in range(1 + alone)]
    assert True in first

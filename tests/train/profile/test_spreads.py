"""Groups by how many minipods they spread over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.train.profile.spreads import spread_layouts


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

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.layout import AXES, Axis, Layout

degrees = st.integers(1, 4)
layouts = st.builds(Layout.of, pp=degrees, dp=degrees, cp=degrees, tp=degrees)


uneven = st.builds(Layout, st.lists(st.tuples(degrees, degrees), min_size=1, max_size=4).map(tuple), degrees)


def degree(layout: Layout, axis: Axis) -> int:
    return {"pp": len(layout.degrees), "cp": layout.cp, "dp": layout.degrees[0][0], "tp": layout.degrees[0][1]}[axis]


@given(layouts)
def test_coordinates_and_rank_are_inverse(layout: Layout) -> None:
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank


@given(layouts, st.sampled_from(AXES))
def test_groups_of_an_axis_partition_the_ranks(layout: Layout, axis) -> None:
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert all(len(group) == degree(layout, axis) for group in groups)
    assert groups == tuple(sorted(groups))
    for group in groups:
        for place, rank in enumerate(group):
            assert layout.group_of(rank, axis) == group
            assert layout.coordinates(rank)[axis] == place


def test_tensor_parallel_ranks_are_neighbours() -> None:
    assert Layout.of(pp=2, dp=2, tp=2).groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Layout.of(pp=2, dp=2, tp=2).groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_rank_or_coordinate_outside_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 4 outside 0\.\.3"):
        Layout.of(tp=4).coordinates(4)
    with pytest.raises(ValueError, match=r"tp=4 outside 0\.\.3"):
        Layout.of(tp=4).rank(tp=4)


@given(uneven)
def test_places_that_differ_share_out_the_ranks_in_order(layout: Layout) -> None:
    assert [rank for mesh in layout.meshes for rank in mesh.ranks] == list(range(layout.world_size))
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank
        assert rank in layout.mesh_of(rank).group_of(rank, "replicas")

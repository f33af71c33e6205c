from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.parallel.layout import AXES, Axis, ContextSplit, Layout, Mesh

degrees = st.integers(1, 4)
layouts = st.builds(Layout.of, pp=degrees, dp=degrees, cp=degrees, tp=degrees)


uneven = st.builds(Layout, st.lists(st.tuples(degrees, degrees), min_size=1, max_size=4).map(tuple), degrees)


def degree(layout: Layout, axis: Axis) -> int:
    return {"pp": len(layout.degrees), "cp": layout.cp, "dp": layout.degrees[0][0], "tp": layout.degrees[0][1]}[axis]


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


@given(uneven)
def test_places_that_differ_share_out_the_ranks_in_order(layout: Layout) -> None:
    assert [rank for mesh in layout.meshes for rank in mesh.ranks] == list(range(layout.world_size))
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank
        assert rank in layout.mesh_of(rank).group_of(rank, "replicas")


@pytest.mark.parametrize(
    ("coordinates", "told"),
    [({"pp": 2}, "pp=2 outside 0..1"), ({"pp": -1}, "pp=-1 outside"), ({"cp": 3}, "cp=3 outside 0..2"),
     ({"dp": 4}, "dp=4 outside 0..3"), ({"dp": -1}, "dp=-1 outside"), ({"tp": 5}, "tp=5 outside 0..4"),
     ({"tp": -1}, "tp=-1 outside")],
)  # fmt: skip
def test_every_coordinate_has_bounds(coordinates: dict[str, int], told: str) -> None:
    layout = Layout.of(pp=2, dp=4, cp=3, tp=5)
    assert layout.rank(pp=1, dp=3, cp=2, tp=4) == layout.world_size - 1 == 119
    with pytest.raises(ValueError, match=told):
        layout.rank(**coordinates)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_has_bounds(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} outside 0\.\.3"):
        Layout.of(dp=4).pp_rank_of(rank)


def test_a_mesh_of_two_replicas_of_two_sequence_parts_of_three() -> None:
    mesh = Mesh(6, dp=2, cp=2, tp=3)
    assert mesh.ranks == range(6, 18) and mesh.replicas == 4
    assert [mesh.replica(rank) for rank in mesh.ranks] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    groups = [mesh.group_of(10, axis) for axis in ("tp", "cp", "dp", "replicas")]
    assert groups == [(9, 10, 11), (7, 10), (10, 16), (7, 10, 13, 16)]
    assert mesh.coordinates(10) == {"dp": 0, "cp": 1, "tp": 1}
    assert mesh.rank(dp=0, cp=1, tp=1) == 10


def test_places_that_differ_are_not_uniform() -> None:
    assert Layout.of(pp=3, dp=2).uniform
    assert not Layout(((2, 1), (1, 2))).uniform


cuts = st.integers(1, 4).flatmap(
    lambda ring: st.integers(1, 4).map(lambda each: ContextSplit(cp=ring * each, ring=ring))
)


@given(cuts, st.integers(1, 3))
def test_a_sequence_is_shared_out_once_and_evenly(cut: ContextSplit, each: int) -> None:
    """Rings pair a chunk from the front with its mirror image: causal attention costs all the
    same."""
    sequence = 2 * cut.cp * each
    own = [[at for run in cut.tokens(sequence, rank) for at in run] for rank in range(cut.cp)]
    assert sorted(at for tokens in own for at in tokens) == list(range(sequence))
    assert {len(tokens) for tokens in own} == {2 * each}
    assert all(tokens == sorted(tokens) for tokens in own)
    for rank in range(cut.cp):
        group = cut.ulysses_group(rank)
        together = {at for other in group for at in own[other]}
        assert rank in group and len(group) == cut.ulysses
        if cut.ring > 1:
            assert together == {sequence - 1 - at for at in together}


@pytest.mark.parametrize(
    ("cp", "ring", "runs"),
    [
        (1, 1, [[(0, 16)]]), (4, 1, [[(0, 4)], [(4, 8)], [(8, 12)], [(12, 16)]]),
        (2, 2, [[(0, 4), (12, 16)], [(4, 8), (8, 12)]]),
        (4, 2, [[(0, 4)], [(12, 16)], [(4, 8)], [(8, 12)]]),
        (8, 2, [[(0, 2)], [(2, 4)], [(12, 14)], [(14, 16)], [(4, 6)], [(6, 8)], [(8, 10)], [(10, 12)]]),
    ],
)  # fmt: skip
def test_positions_of_a_rank_of_sixteen_tokens(cp: int, ring: int, runs: list[list[tuple[int, int]]]) -> None:
    cut = ContextSplit(cp=cp, ring=ring)
    assert [[(run.start, run.stop) for run in cut.tokens(16, rank)] for rank in range(cp)] == runs

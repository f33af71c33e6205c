"""Repairs: only what failed moves, spares first, near first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import PlacementError
from plait.core.topology.placement import Placement
from plait.place.placing import Spot, place
from plait.place.repair import Repair, from_table, repair
from plait.place.solve.problem import Pool, Problem, Spares

LEAF = 4


def cluster(free: list[int]) -> tuple[tuple[Pool, ...], dict[str, Spot]]:
    pools = tuple(Pool.plain(f"m{at}", count, leaf=LEAF) for at, count in enumerate(free))
    where = {
        name: Spot(pool.minipod, f"{pool.minipod}l{number}")
        for pool in pools
        for number, leaf in enumerate(pool.leaves)
        for name in leaf
    }
    return pools, where


def without(problem: Problem, placed: Placement, down: set[str]) -> Problem:
    """What is free once the job runs and some nodes failed."""
    taken = {*placed.hosts, *placed.spares, *down}
    pools = tuple(
        replace(pool, leaves=tuple(tuple(name for name in leaf if name not in taken) for leaf in pool.leaves))
        for pool in problem.pools
    )
    return replace(problem, pools=pools)


def mend(problem: Problem, placed: Placement, down: set[str], where: dict[str, Spot], **more: float) -> Repair:
    return repair(without(problem, placed, down), placed, down=down, where=where, **more)


def square(pools: tuple[Pool, ...], alpha: float = 0.3, **more: Any) -> Problem:
    """Two rows by two columns."""
    return Problem(heights=(2, 2), pools=pools, alpha=alpha, **more)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), free=st.lists(st.integers(2, 9), min_size=2, max_size=4), per=st.integers(0, 1))
def test_nothing_moves_that_need_not(data: st.DataObject, free: list[int], per: int) -> None:
    pools, where = cluster(free)
    problem = square(pools, spares=Spares(per_minipod=per))
    try:
        placed = place(problem)
    except PlacementError:
        return
    down = set(data.draw(st.lists(st.sampled_from(placed.hosts), min_size=1, max_size=2, unique=True)))
    after = without(problem, placed, down)
    room = len(placed.spares) + sum(pool.free for pool in after.pools)
    if room < len(down):
        with pytest.raises(PlacementError, match="No node is left"):
            repair(after, placed, down=down, where=where)
        return
    mended = repair(after, placed, down=down, where=where)
    assert {move.old for move in mended.moves} == down
    assert all((old == new) == (old not in down) for old, new in zip(placed.hosts, mended.placement.hosts, strict=True))
    assert len(set(mended.placement.hosts)) == 4
    assert not set(mended.placement.spares) & set(mended.placement.hosts)
    assert mended.placement.minipods == tuple(where[host].minipod for host in mended.placement.hosts)
    assert mended.placement.bound <= mended.placement.score + 1e-9
    assert mended.placement.rank_table.world_size == 32


def test_spares_come_before_free_nodes_and_near_ones_before_far() -> None:
    pools, where = cluster([12, 12])
    problem = square(pools, spares=Spares(per_minipod=2))
    placed = place(problem)
    assert placed.used == 1
    victim = placed.hosts[0]
    mended = mend(problem, placed, {victim}, where)
    assert mended.moves[0].new in placed.spares
    assert len(mended.placement.spares) == 1
    bare = replace(placed, spares=())
    mended = mend(problem, bare, {victim}, where)
    assert where[mended.moves[0].new].minipod == where[victim].minipod


def test_a_spare_far_away_gives_way_to_a_free_node_that_spreads_nothing() -> None:
    pools, where = cluster([5, 5])
    problem = square(pools)
    placed = replace(place(problem), spares=("m1-0000",))
    assert set(placed.minipods) == {"m0"}
    victim = placed.hosts[3]
    mended = mend(problem, placed, {victim}, where)
    assert mended.moves[0].new == "m0-0004"
    assert mended.placement.spares == ("m1-0000",)
    assert mended.placement.score == placed.score


def test_more_moves_only_for_their_price() -> None:
    """A failure pushes a cell out of its minipod, and another has room for all."""
    pools, where = cluster([4, 2, 6])
    old_pools = pools[:2]
    problem = square(old_pools, alpha=0.5)
    placed = place(problem)
    assert set(placed.minipods) == {"m0"}
    victim = placed.hosts[0]
    after = without(replace(problem, pools=pools), placed, {victim})
    least = repair(after, placed, down={victim}, where=where)
    assert len(least.moves) == 1
    assert least.placement.score == pytest.approx(2)
    assert repair(after, placed, down={victim}, where=where, move_price=1.0).moves == least.moves
    better = repair(after, placed, down={victim}, where=where, move_price=0.1)
    assert better.placement.score == pytest.approx(1)
    assert len(better.moves) == 4
    assert better.placement.minipods == ("m2",) * 4 == tuple(where[host].minipod for host in better.placement.hosts)


@pytest.mark.parametrize("also", [False, True])
def test_placed_anew_those_stay_that_are_where_they_belong(also: bool) -> None:
    """Rows of m0 and of m1, which has grown: all have room in m1. also: one of its nodes fails
    too."""
    pools, where = cluster([2, 7])
    small = (pools[0], replace(pools[1], leaves=(pools[1].leaves[0][:2],)))
    problem = square(small, edges=((0, 1),))
    placed = place(problem)
    assert placed.minipods == ("m0", "m1", "m0", "m1")
    down = {placed.hosts[0], *([placed.hosts[1]] if also else [])}
    placed = replace(placed, spares=("m1-0006",))
    after = without(replace(problem, pools=pools), placed, down)
    least = repair(after, placed, down=down, where=where)
    assert least.placement.score == pytest.approx(2.0)
    assert repair(after, placed, down=down, where=where, move_price=1.01).moves == least.moves
    better = repair(after, placed, down=down, where=where, move_price=0.99)
    assert better.placement.minipods == ("m1",) * 4
    assert [move.node_rank for move in better.moves] == ([0, 1, 2] if also else [0, 2])
    assert better.moves[0].new == "m1-0006" and better.placement.spares == (), "spares first"
    assert len(set(better.placement.hosts)) == 4 and not down & set(better.placement.hosts)
    assert (better.placement.note, least.placement.note) == ("placed anew", "repaired")
    assert better.placement.solved_in == least.placement.solved_in == 0.0
    assert better.placement.preempted == () and better.placement.topology == problem.topology


def test_rows_are_named_so_that_most_cells_stay() -> None:
    """Placed anew, the rows lie the other way round."""
    pools, where = cluster([2, 2, 2])
    problem = square(pools, edges=((0, 1),))
    hosts = ("m1-0000", "m0-0000", "m1-0001", "m2-0000")
    placed = replace(place(problem), hosts=hosts, minipods=tuple(where[host].minipod for host in hosts), row_spread=2)
    down = {"m2-0000"}
    better = mend(problem, placed, down, where, move_price=0.0)
    assert better.placement.minipods == ("m1", "m0", "m1", "m0")
    assert [(move.node_rank, move.new) for move in better.moves] == [(3, "m0-0001")]


def test_a_rank_table_can_be_repaired_and_another_jobs_not() -> None:
    pools, where = cluster([6, 6])
    problem = square(pools)
    placed = place(problem)
    old = from_table(problem, placed.rank_table, where)
    assert (old.hosts, old.minipods) == (placed.hosts, placed.minipods)
    some = {name: spot for name, spot in where.items() if name != placed.hosts[1]}
    assert from_table(problem, placed.rank_table, some).minipods == ("m0", "", "m0", "m0")
    with pytest.raises(PlacementError, match="has 4 hosts, the job 6"):
        from_table(replace(problem, heights=(3, 3)), placed.rank_table, where)
    with pytest.raises(PlacementError, match="another shape"):
        repair(replace(problem, heights=(4,)), placed, down={"m0-0000"}, where=where)
    with pytest.raises(PlacementError, match="not in the topology"):
        repair(problem, replace(placed, hosts=("x", *placed.hosts[1:])), down={placed.hosts[1]}, where=where)


def test_blocks_move_whole_where_their_minipod_is_full() -> None:
    pools, where = cluster([4, 2])
    problem = Problem(heights=(2,), pools=pools, nodes_per_cell=2, alpha=1.0)
    placed = place(problem)
    assert set(placed.minipods) == {"m0"}
    mended = mend(problem, placed, {placed.hosts[0]}, where)
    assert [move.node_rank for move in mended.moves] == [0, 1]
    assert mended.placement.minipods == ("m1", "m1", "m0", "m0")


def test_a_lost_host_that_is_named_as_down_need_not_be_in_the_topology() -> None:
    pools, where = cluster([6, 6])
    problem = square(pools)
    placed = place(problem)
    victim = placed.hosts[2]
    left = {name: spot for name, spot in where.items() if name != victim}
    mended = mend(problem, placed, {victim}, left)
    assert [move.old for move in mended.moves] == [victim]
    with pytest.raises(PlacementError, match=r"^m0-\d+ of the placement to repair is not in the topology"):
        mend(problem, placed, {placed.hosts[0]}, left)
    with pytest.raises(PlacementError, match=r"of the placement to repair are not in the topology"):
        repair(problem, placed, down=(), where={})


def test_of_two_minipods_that_cost_as_much_the_one_with_a_spare() -> None:
    """The job's own is full; the other two have room, the first more of it."""
    pools, where = cluster([4, 4, 2])
    problem = square(pools)
    placed = replace(place(square(pools[:1])), spares=("m2-0000",))
    victim = placed.hosts[0]
    mended = mend(problem, placed, {victim}, where)
    assert mended.moves[0].new == "m2-0000"
    bare = replace(placed, spares=())
    mended = mend(problem, bare, {victim}, where)
    assert mended.moves[0].new == "m1-0000"


def test_the_second_of_two_that_failed_goes_where_the_first_has_gone() -> None:
    """Both cells of a row: a second minipod is touched anyway, and a third would spread the row
    more."""
    pools, where = cluster([4, 3, 3])
    problem = square(pools, edges=((0, 1),))
    placed = place(square(pools[:1]))
    down = {placed.hosts[0], placed.hosts[2]}
    mended = mend(problem, placed, down, where)
    assert [where[move.new].minipod for move in mended.moves] == ["m1", "m1"]
    assert (mended.placement.row_spread, mended.placement.column_spread) == (1, 2)
    assert mended.placement.used == 2 and mended.placement.minipods == ("m1", "m0", "m1", "m0")


@pytest.mark.parametrize("each", [1, 2])
def test_where_no_node_is_left_is_said(each: int) -> None:
    pools, where = cluster([4])
    problem = Problem(heights=(4 // each,), pools=pools, nodes_per_cell=each)
    placed = place(problem)
    down = {placed.hosts[0], placed.hosts[3]}
    parts = 2
    says = "No node is left for m0-0000: 0 are free or spare"
    blocks = f" in one minipod \\(blocks of {each} nodes stay together\\)" if each > 1 else ""
    with pytest.raises(PlacementError, match=f"^{says}{blocks}, and {parts} parts of the job need one"):
        mend(problem, placed, down, where)


def test_a_block_of_which_a_part_has_failed() -> None:
    """It keeps the rest of its nodes where one is left in its minipod; elsewhere it needs as many
    anew."""
    pools, where = cluster([5, 1, 2])
    problem = Problem(heights=(2,), pools=pools[:1], nodes_per_cell=2, alpha=1.0)
    placed = place(problem)
    victim = placed.hosts[3]
    near = mend(replace(problem, pools=pools), placed, {victim}, where)
    assert [(move.node_rank, move.new) for move in near.moves] == [(3, "m0-0004")]
    full = replace(problem, pools=(Pool.plain("m0", 4, leaf=LEAF), *pools[1:]))
    far = mend(full, placed, {victim}, where)
    assert [move.node_rank for move in far.moves] == [2, 3], "m1 has one node only"
    assert far.placement.minipods == ("m0", "m0", "m2", "m2")
    with pytest.raises(PlacementError, match="1 are free or spare"):
        mend(replace(full, pools=full.pools[:2]), placed, {victim}, where)


@pytest.mark.parametrize("heights", [(3,), (1, 1, 1)])
def test_of_one_column_or_row_a_near_node_comes_before_a_spare_that_spreads_it(heights: tuple[int, ...]) -> None:
    pools, where = cluster([4, 2])
    problem = Problem(heights=heights, pools=pools, alpha=0.5)
    placed = replace(place(problem), spares=("m1-0000",))
    assert set(placed.minipods) == {"m0"}
    victim = placed.hosts[1]
    mended = mend(problem, placed, {victim}, where)
    assert [move.new for move in mended.moves] == ["m0-0003"]

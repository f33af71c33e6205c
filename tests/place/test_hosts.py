"""Which hosts inside a minipod: few leaves, rows together, consecutive ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import PlacementError
from plait.place.placing import arranged, hosts_of, place
from plait.place.solve.problem import Pool, Problem, Spares


def pool(*sizes: int, name: str = "m") -> Pool:
    leaves = tuple(tuple(f"{name}l{leaf}n{at}" for at in range(size)) for leaf, size in enumerate(sizes))
    return Pool(minipod=name, leaves=leaves)


def leaves_of(hosts: tuple[str, ...]) -> list[str]:
    return [host.partition("n")[0] for host in hosts]


def test_the_leaf_that_fits_is_taken_before_larger_ones_are_broken() -> None:
    placed = place(Problem(heights=(4,), pools=(pool(8, 4, 6),)))
    assert leaves_of(placed.hosts) == ["ml1"] * 4


def test_whole_leaves_first_then_the_tightest() -> None:
    placed = place(Problem(heights=(10,), pools=(pool(8, 3, 2, 5),)))
    assert leaves_of(placed.hosts) == ["ml0"] * 8 + ["ml2"] * 2


def test_rows_are_contiguous() -> None:
    """Two leaves of four: each has whole rows, and columns cross between them once."""
    placed = place(Problem(heights=(4, 4), pools=(pool(4, 4),)))
    assert leaves_of(placed.hosts) == ["ml0", "ml0", "ml1", "ml1"] * 2


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), data=st.data())
def test_as_few_leaves_as_can_be(sizes: list[int], data: st.DataObject) -> None:
    if not sum(sizes):
        return
    count = data.draw(st.integers(1, sum(sizes)))
    problem = Problem(heights=(count,), pools=(pool(*sizes),))
    hosts = hosts_of(problem, (0,) * count).nodes
    ordered, least = sorted(sizes, reverse=True), 0
    while sum(ordered[:least]) < count:
        least += 1
    assert len(set(hosts)) == count
    assert len(set(leaves_of(hosts))) == least


def test_blocks_are_not_cut_by_leaves() -> None:
    placed = place(Problem(heights=(2,), pools=(pool(3, 3),), nodes_per_cell=2))
    assert leaves_of(placed.hosts) == ["ml0", "ml0", "ml1", "ml1"]


def test_what_blocks_leave_over_in_leaves_makes_blocks_after_all() -> None:
    """Two blocks of two from two leaves of three; the third is of what these have left."""
    placed = place(Problem(heights=(3,), pools=(pool(3, 3),), nodes_per_cell=2))
    assert placed.hosts == ("ml0n0", "ml0n1", "ml0n2", "ml1n0", "ml1n1", "ml1n2")
    more = place(Problem(heights=(4,), pools=(pool(3, 3, 2, 1),), nodes_per_cell=2))
    assert leaves_of(more.hosts) == ["ml0"] * 3 + ["ml1"] * 2 + ["ml2"] * 2 + ["ml3"]


def test_spares_lie_beside_the_jobs_own_leaves() -> None:
    problem = Problem(heights=(4,), pools=(pool(3, 6, name="a"), pool(3, 9, name="b")), spares=Spares(total=3))
    assert hosts_of(problem, (0, 0, 0, 0)).spares == ("al1n4", "al1n5", "al0n0"), "its own leaf before another one"
    assert hosts_of(problem, (1, 1, 1, 1)).spares == ("bl1n4", "bl1n5", "bl1n6")
    both = replace(problem, spares=Spares(per_minipod=1))
    assert hosts_of(both, (0, 0, 1, 1)).spares == ("al0n2", "bl0n2")
    assert hosts_of(both, (0, 0, 0, 0), [1]).spares == ("al1n4", "bl0n0")


def test_spares_that_cannot_be_kept_are_refused() -> None:
    problem = Problem(heights=(3,), pools=(pool(3, name="a"), pool(4, name="b")), spares=Spares(total=4))
    assert hosts_of(problem, (0, 0, 0)).spares == ("bl0n0", "bl0n1", "bl0n2", "bl0n3")
    with pytest.raises(PlacementError, match="No node is left to be a spare"):
        hosts_of(replace(problem, spares=Spares(total=5)), (0, 0, 0))
    held = Pool(minipod="a", leaves=(), held=("h0", "h1", "h2"))
    with pytest.raises(PlacementError, match=r"a has no node left to be a spare.*place.method=cpsat"):
        hosts_of(Problem(heights=(3,), pools=(held,), price=1.0, spares=Spares(per_minipod=1)), (0, 0, 0))


def test_what_is_free_is_taken_before_what_others_hold() -> None:
    held = Pool(minipod="a", leaves=(("f0", "f1", "f2"),), held=("h0", "h1", "h2"))
    problem = Problem(heights=(4,), pools=(held,), price=1.0, spares=Spares(per_minipod=1))
    found = hosts_of(problem, (0, 0, 0, 0))
    assert found[:3] == (("f0", "f1", "h0", "h1"), ("f2",), ("h0", "h1"))
    pairs = Problem(heights=(2,), pools=(held,), price=1.0, nodes_per_cell=2)
    assert hosts_of(pairs, (0, 0)).nodes == ("f0", "f1", "f2", "h0")


def test_nodes_stand_row_by_row_in_leaves_and_cell_by_cell_in_ranks() -> None:
    """Two columns, of four cells and of two: a row of the short one is as long as two of the
    other."""
    found = hosts_of(Problem(heights=(4, 2), pools=(pool(6),)), (0,) * 6)
    assert found.nodes == ("ml0n0", "ml0n2", "ml0n3", "ml0n5", "ml0n1", "ml0n4")


def test_rows_are_put_in_the_order_of_fewest_crossings() -> None:
    problem = Problem.plain(3, 2, [9, 9])
    assert arranged(problem, (0, 1, 0, 0, 1, 0)) == (0, 0, 1, 0, 0, 1)
    assert arranged(problem, (1, 1, 0, 1, 1, 0)) == (1, 1, 0, 1, 1, 0), "no better"
    unequal = Problem(heights=(2, 1), pools=(pool(9),))
    assert arranged(unequal, (1, 0, 1)) == (1, 0, 1)


def leaves_over(problem: Problem, hosts: tuple[str, ...]) -> tuple[int, int]:
    """Most leaves of a row and of a column, from the names of nodes."""
    rows, columns = (
        max(len({leaves_of(hosts)[cell] for cell in group}) for group in groups)
        for groups in (problem.rows, problem.columns)
    )
    return rows, columns


@pytest.mark.parametrize(("alpha", "rows", "columns"), [(0.0, 1, 4), (1.0, 4, 1), (0.5, 2, 2)])
def test_leaves_are_traded_as_minipods_are(alpha: float, rows: int, columns: int) -> None:
    """4 x 4 on four leaves of four: whole rows, whole columns, or squares of two by two."""
    problem = Problem(heights=(4,) * 4, pools=(pool(4, 4, 4, 4),), alpha=alpha)
    placed = place(problem)
    assert (placed.row_leaves, placed.column_leaves) == (rows, columns) == leaves_over(problem, placed.hosts)
    assert (placed.row_spread, placed.column_spread) == (1, 1)


@given(
    rows=st.integers(1, 5), columns=st.integers(1, 5), leaf=st.integers(1, 6), alpha=st.sampled_from((0.0, 0.3, 1.0))
)
def test_leaves_never_cost_minipods_and_are_never_worse_than_row_by_row(
    rows: int, columns: int, leaf: int, alpha: float
) -> None:
    sizes = [leaf] * (-(-rows * columns // leaf) + 1)
    pools = (pool(*sizes, name="a"), pool(*sizes[1:], name="b"))
    problem = Problem(heights=(rows,) * columns, pools=pools, alpha=alpha, limit=0.0)
    placed = place(problem)
    flat = [replace(one, leaves=(tuple(name for own in one.leaves for name in own),)) for one in pools]
    by_row = place(replace(problem, pools=tuple(flat))).hosts
    assert (placed.row_spread, placed.column_spread) == (1, 1)
    mine, before = (leaves_over(problem, hosts) for hosts in (placed.hosts, by_row))
    assert mine == (placed.row_leaves, placed.column_leaves)
    assert alpha * mine[1] + (1 - alpha) * mine[0] <= alpha * before[1] + (1 - alpha) * before[0] + 1e-9

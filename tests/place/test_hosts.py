"""Which hosts inside a minipod: few leaves, rows together, consecutive ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.place.hosts import hosts_of
from plait.place.placing import place
from plait.place.problem import Pool, Problem


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

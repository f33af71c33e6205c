"""The default: equal to enumeration where that can be done, close to the bound where not, fast
always."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.brute import brute_force
from benchmarks.baselines.cells import cell_program
from plait.place.placing import place, placed_by
from plait.place.solve.bounds import Relaxation, fewest_minipods, fewest_of_each, frontier, kappa, lower_bound
from plait.place.solve.exact import exact
from plait.place.solve.problem import Problem, Spares, spread_of
from tests.place.cases import problems


@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_equal_to_enumeration(problem: Problem) -> None:
    best = placed_by(problem, brute_force, "brute-force").score
    placed = place(problem)
    assert placed.score == pytest.approx(best)
    assert placed.bound == pytest.approx(best)
    assert lower_bound(problem) <= best + 1e-9


@pytest.mark.contract
@settings(max_examples=400, deadline=None)
@given(problem=problems(rows=4, columns=3, pods=4))
def test_equal_to_enumeration_always(problem: Problem) -> None:
    assert place(problem).score == pytest.approx(placed_by(problem, brute_force, "brute-force").score)


@settings(max_examples=10, deadline=None)
@given(problem=problems(rows=6, columns=4, pods=3))
def test_no_better_than_the_cell_model_and_the_bound_not_above_it(problem: Problem) -> None:
    solved = cell_program(problem)
    assert solved.proven and solved.score
    best = solved.score
    placed = place(problem)
    assert placed.bound <= best + 1e-6 <= placed.score + 2e-6
    assert placed.score <= best * 1.25


def test_the_papers_first_setting() -> None:
    """3 minipods of 6 nodes, 6 PP groups of 2: two minipods hold whole groups."""
    assert fewest_minipods([6, 6, 6], 6, 2) == 2
    assert fewest_minipods([6, 5, 4], 6, 2) == 3
    placed = place(Problem.plain(6, 2, [6, 6, 6], alpha=0.3))
    assert (placed.row_spread, placed.column_spread, placed.used) == (1, 2, 2)
    assert placed.score == pytest.approx(0.3 * 2 + 0.7)
    assert placed.gap == 0


def test_bands_beat_whole_groups() -> None:
    """40 equal minipods: r * c >= minipods used, so rows of 2 minipods halve the spread of
    columns."""
    placed = place(Problem.plain(64, 8, [16] * 40, alpha=0.3))
    whole = place(Problem.plain(64, 8, [16] * 40, alpha=0.0))
    assert (whole.row_spread, whole.column_spread) == (1, 32)
    assert placed.row_spread * placed.column_spread == 32
    assert placed.score < 0.3 * 32 + 0.7
    assert kappa([16] * 40, 64, 8, 512) == pytest.approx(32)


def test_units_can_be_forced() -> None:
    free = [12, 12, 12, 12]
    rows = place(Problem.plain(12, 4, free, alpha=0.5, keep_together="pp"))
    columns = place(Problem.plain(12, 4, free, alpha=0.5, keep_together="dp"))
    assert rows.note.endswith("columns")
    assert columns.note.endswith("rows")


@given(problem=problems())
def test_the_frontier_falls(problem: Problem) -> None:
    found = frontier(problem)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(found))
    assert all(rows <= min(len(problem.heights), len(problem.pools)) for rows, _ in found)


def test_columns_that_no_two_small_minipods_hold_need_large_ones() -> None:
    """Each of 16 columns of 256 needs 131 of a minipod over 125: two hold that twice, six once."""
    free = [285, 278, 251, 221, 217, 208, 197, 196] + [125] * 40
    assert fewest_of_each(free, 16, 256) == 3
    assert fewest_of_each([*free, *[250] * 5], 16, 256) == 3
    assert fewest_of_each([*free, *[250] * 6], 16, 256) == 2
    assert min(c for _, c in frontier(Problem.plain(256, 16, free))) == 3


def test_a_group_has_a_large_part_or_several() -> None:
    """Of 16 columns of 256 in two minipods each all have 134 of one over 122, or lie in two such:
    15 do."""
    free = [425, 279, 278, 264, 243, 193, 173, 143, 142, 140, 128, 122, *[117] * 20]
    assert fewest_of_each(free, 16, 256) == 3
    assert fewest_of_each(free, 14, 256) == 2


@given(free=st.lists(st.integers(0, 12), min_size=2, max_size=5), groups=st.integers(1, 3), size=st.integers(2, 9))
def test_groups_are_never_said_to_spread_further_than_they_must(free: list[int], groups: int, size: int) -> None:
    def possible(left: tuple[int, ...], group: int, spread: int) -> bool:
        if not group:
            return True
        shares = (
            share for share in itertools.product(*(range(min(room, size) + 1) for room in left))
            if sum(share) == size and sum(map(bool, share)) <= spread
        )  # fmt: skip
        lefts = {tuple(sorted(room - part for room, part in zip(left, share, strict=True))) for share in shares}
        return any(possible(one, group - 1, spread) for one in lefts)

    least = fewest_of_each(free, groups, size)
    assert least == 1 or not possible(tuple(sorted(free)), groups, least - 1)


def test_spares_beside_the_job() -> None:
    problem = Problem.plain(4, 2, [6, 6], alpha=0.3, spares=Spares(per_minipod=1))
    placed = place(problem)
    assert len(placed.spares) == placed.used == 2
    rows = place(Problem.plain(2, 3, [5, 5], alpha=0.0, spares=Spares(per_row=1)))
    assert rows.row_spread == 1
    assert sorted(host[:4] for host in rows.spares) == ["m000", "m001"]
    assert len(place(Problem.plain(4, 2, [6, 6], spares=Spares(total=3))).spares) == 3


@pytest.mark.parametrize("shape", [(75, 16), (312, 16)])
def test_ten_thousand_nodes(shape: tuple[int, int]) -> None:
    free = [(37 * at) % 95 + 8 for at in range(110)]
    problem = Problem.plain(*shape, free, alpha=0.3)
    start = time.process_time()
    placed = place(problem)
    took = time.process_time() - start
    assert took < 2  # a tenth of that on a quiet machine
    assert placed.gap < 0.1
    assert spread_of(problem, exact(problem).cells).used <= 110


def test_crossings_along_rows_and_along_columns_add_up() -> None:
    """Three rows of two; the edge is that of the pipeline."""
    problem = Problem.plain(3, 2, [9, 9], edges=((0, 1),))
    assert spread_of(problem, (0, 0, 1, 0, 1, 1)).crossings == 2 + 1
    assert spread_of(problem, (0, 0, 0, 1, 1, 1)).crossings == 0 + 3
    assert spread_of(problem, (0, 1, 0, 0, 1, 0)).crossings == 4 + 0
    assert spread_of(problem, (0, 1, 0, 0, 1, 0)).used == 2


def test_the_fewest_minipods_of_whole_groups() -> None:
    assert fewest_minipods([9, 3], 0, 2) == 0
    assert fewest_minipods([9, 3], 4, 2) == 1
    assert fewest_minipods([9, 3], 5, 2) == 2
    assert fewest_minipods([9, 3], 6, 2) is None
    assert fewest_minipods([1, 1], 1, 2) is None
    assert fewest_minipods([], 1, 1) is None


def test_bounds_of_equal_groups_know_how_many_lie_whole_in_a_minipod() -> None:
    """Two rows of three cells: no minipod holds two columns, so two are never whole in each."""
    assert frontier(Problem.plain(2, 3, [3, 3])) == [(1, 2)]
    assert frontier(Problem.plain(3, 2, [3, 3])) == [(2, 1)]
    assert frontier(Problem.plain(2, 2, [2, 2])) == [(1, 2), (2, 1)]


def test_bounds_of_unequal_groups_and_of_taken_nodes() -> None:
    pools = Problem.plain(1, 1, [4, 4]).pools
    unequal = Problem(heights=(4, 2), pools=pools, edges=((0, 1),))
    assert frontier(unequal) == [(1, 2), (2, 1)]
    held = tuple(replace(pool, held=("x", "y")) for pool in pools)
    assert frontier(Problem(heights=(6,), pools=held)) == [(1, 2)]
    assert frontier(Problem(heights=(6,), pools=held, price=1.0)) == [(1, 1)]
    assert frontier(Problem(heights=(6,), pools=held, price=1.0, spares=Spares(per_minipod=1))) == [(1, 2)]
    assert frontier(Problem(heights=(3,), pools=pools, nodes_per_cell=2)) == [(1, 2)]


def test_whole_rows_and_columns_exclude_more_than_areas_do() -> None:
    """Spreads of 2 and 3 have area enough, and no whole rows and columns."""
    problem = Problem.plain(15, 5, [4, 9, 13, 2, 5, 20, 2, 2, 3, 14, 14, 1])
    assert (2, 3) in frontier(problem) or min(c for r, c in frontier(problem) if r <= 2) <= 3
    known = Relaxation(problem)
    assert known.excludes(2, 3) and known.excludes(2, 2) and known.excludes(1, 3)
    assert not known.excludes(5, 12) and not known.excludes(5, 3) and not known.excludes(2, 4)
    placed = place(problem)
    assert (placed.row_spread, placed.column_spread) != (2, 3)
    assert placed.bound > problem.score(2, 3) or placed.score > problem.score(2, 3)


@pytest.mark.parametrize(
    ("rows", "columns", "free", "alpha"),
    [
        (4, 3, [7, 1, 4], 0.9), (6, 2, [7, 1, 4], 0.7), (4, 4, [7, 4, 1, 5], 0.3), (6, 3, [7, 8, 3], 0.1),
        (4, 4, [3, 5, 8], 0.5), (5, 3, [2, 7, 6], 0.1), (6, 3, [2, 3, 8, 1, 5], 0.3),
    ],
)  # fmt: skip
def test_what_no_construction_reaches_is_solved(rows: int, columns: int, free: list[int], alpha: float) -> None:
    """Both spreads are two; no bands have that, and less is excluded."""
    problem = Problem.plain(rows, columns, free, alpha=alpha)
    answer = exact(problem)
    assert answer.note == "solved" and answer.bound == problem.score(2, 2)
    found = spread_of(problem, answer.cells)
    assert (found.rows, found.columns) == (2, 2)

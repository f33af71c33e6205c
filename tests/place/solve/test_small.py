"""Small matrices that stay open after bands: the best placement there is, or the gap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.brute import brute_force
from benchmarks.placement_tight import drawn
from plait.place.placing import place
from plait.place.solve import small
from plait.place.solve.exact import exact
from plait.place.solve.problem import Assignment, Problem, check_legal, spread_of
from plait.place.solve.small import annealed, solve_small


def scored(problem: Problem, found: Assignment) -> float:
    check_legal(problem, found.cells)
    spread = spread_of(problem, found.cells)
    return problem.score(spread.rows, spread.columns)


@pytest.mark.parametrize(
    ("rows", "columns", "free", "alpha", "best"),
    [
        (7, 3, [4, 2, 8, 7], 0.923, 2.077), (4, 6, [3, 13, 7, 2], 0.1, 2.0), (7, 5, [5, 4, 1, 0, 2, 6, 23], 0.724, 2.0),
        (7, 3, [4, 2, 1, 13, 1, 2, 2], 0.956, 2.044), (6, 6, [4, 5, 5, 27, 0, 5], 0.867, 2.0),
        (8, 6, [2, 5, 5, 8, 28, 2, 1, 5, 8, 5, 3, 2], 0.7, 2.0),
        (10, 5, [4, 15, 12, 3, 1, 2, 15, 9], 0.043, 2.0),
        (3, 15, [2, 15, 3, 6, 3, 3, 13, 2, 4], 0.512, 2.976), (13, 3, [1, 5, 5, 2, 12, 13, 1, 4, 3], 0.962, 2.962),
    ],
)  # fmt: skip
def test_a_tight_matrix_has_the_best_placement_that_there_is(
    rows: int, columns: int, free: list[int], alpha: float, best: float
) -> None:
    found = place(Problem.plain(rows, columns, free, alpha=alpha))
    assert found.score == pytest.approx(best)
    assert found.bound == pytest.approx(best)


def test_bands_that_are_best_are_proven_so() -> None:
    problem, unlimited = (
        Problem.plain(6, 4, [0, 2, 5, 4, 1, 1, 13], alpha=0.955, **how) for how in ({}, {"limit": 0.0})
    )
    asked, without = exact(problem), exact(unlimited)
    assert scored(problem, asked) == scored(problem, without) == asked.bound
    assert without.bound < asked.bound


@pytest.mark.parametrize(
    ("rows", "columns", "free", "alpha"),
    [
        (6, 3, [5, 4, 5, 6, 3, 1], 0.414), (3, 6, [5, 4, 7, 5, 1, 1, 0], 0.617),
        (16, 2, [7, 1, 3, 2, 4, 2, 4, 3, 3, 7, 6, 4], 0.872),
    ],
)  # fmt: skip
def test_bands_are_proven_without_a_solver(rows: int, columns: int, free: list[int], alpha: float) -> None:
    """No shares of rows and columns for the minipods hold all cells within better spreads, or no
    group can lie in fewer."""
    problem = Problem.plain(rows, columns, free, alpha=alpha, limit=0.0)
    assert scored(problem, found := exact(problem)) == found.bound


def test_what_the_time_does_not_suffice_for_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "LIMIT", 1e-3)
    monkeypatch.setattr(small, "TRIES", 0)
    problem = Problem.plain(5, 6, [8, 5, 4, 1, 4, 6, 5], alpha=0.819)
    found = exact(problem)
    assert found.bound == pytest.approx(2.181)
    assert scored(problem, found) == pytest.approx(2.362)


def test_what_the_solver_leaves_open_is_annealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "LIMIT", 0.5)
    found = exact(problem := Problem.plain(4, 10, [4, 5, 7, 3, 6, 4, 2, 2, 4, 4, 3], alpha=0.683))
    assert scored(problem, found) == pytest.approx(2.951)


@settings(max_examples=8)
@given(st.integers(0, 1000))
def test_what_is_annealed_lies_within_its_spreads(number: int) -> None:
    problem = drawn(7, number)
    assert problem.shape
    rows, columns = problem.shape
    spreads = min(columns, 4), min(rows, 4)
    if cells := annealed(problem.capacity, problem.shape, spreads):
        check_legal(problem, cells)
        spread = spread_of(problem, cells)
        assert spread.rows <= spreads[0]
        assert spread.columns <= spreads[1]


def test_a_large_matrix_is_left_to_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.plain(5, 6, [8, 5, 4, 1, 4, 6, 5], alpha=0.819)
    monkeypatch.setattr("plait.place.solve.exact.MOST_CELLS", 29)
    monkeypatch.setattr("plait.place.solve.exact.solve_small", None)
    assert exact(problem).note == "3 bands of columns"


@given(
    free=st.lists(st.integers(0, 5), min_size=2, max_size=4), shape=st.sampled_from([(2, 2), (3, 2), (2, 3), (4, 2)]),
    alpha=st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]),
)  # fmt: skip
def test_a_solver_asked_for_every_spread_finds_the_best(free: list[int], shape: tuple[int, int], alpha: float) -> None:
    """All pairs of spreads, the best first, from nothing known."""
    problem = Problem.plain(*shape, free, alpha=alpha)
    rows, columns = shape
    pairs = [(r, c) for r in range(1, min(columns, len(free)) + 1) for c in range(1, min(rows, len(free)) + 1)]
    targets = sorted(pairs, key=lambda pair: problem.score(*pair))
    nothing = Assignment((), note="nothing")
    found = solve_small(problem, targets, nothing)
    if sum(free) < rows * columns:
        assert found is nothing
    else:
        assert found.note == "solved"
        assert scored(problem, found) == pytest.approx(scored(problem, brute_force(problem)))
        assert found.bound == pytest.approx(scored(problem, found))


def test_more_minipods_than_bits_are_placed_all_the_same() -> None:
    problem = Problem.plain(2, 2, [1] * 60, alpha=0.5)
    assert scored(problem, solve_small(problem, [(1, 2), (2, 2)], Assignment(()))) == 2.0

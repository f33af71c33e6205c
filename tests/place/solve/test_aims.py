"""Bands that are aimed at two spreads: both are kept, rows are split in turn, effort has an end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.cells import cell_program
from benchmarks.placement_tight import drawn
from plait.place.placing import place
from plait.place.solve.bands import TargetedBands, TargetedPlacement
from plait.place.solve.exact import exact
from plait.place.solve.problem import MinipodSpread, Problem, check_legal, spread_of


def aimed(free: list[int], rows: int, columns: int, *spreads: int) -> TargetedPlacement | None:
    return TargetedBands(free, rows, columns).at(*spreads)


def spread(free: list[int], rows: int, columns: int, found: TargetedPlacement) -> MinipodSpread:
    check_legal(problem := Problem.plain(rows, columns, free), found.cells)
    return spread_of(problem, found.cells)


@given(free=st.lists(st.integers(0, 30), min_size=2, max_size=12), rows=st.integers(2, 12), columns=st.integers(2, 9),
       row_spread=st.integers(1, 9), column_spread=st.integers(1, 9))  # fmt: skip
def test_what_is_aimed_has_the_spreads(
    free: list[int], rows: int, columns: int, row_spread: int, column_spread: int
) -> None:
    """Every cell once, no minipod over its room, neither spread larger than was asked for."""
    if found := aimed(free, rows, columns, row_spread, column_spread):
        there = spread(free, rows, columns, found)
        assert there.rows <= row_spread
        assert there.columns <= column_spread


@pytest.mark.parametrize(
    ("rows", "columns", "free", "spreads"),
    [
        (312, 16, [70] * 80, (16, 5)),  # five of 70 hold a column of 312: each has its own
        (12, 5, [24, 24, 8, 8], (3, 3)),  # bands of unequal width
        (6, 4, [12, 12], (2, 1)),
        (10, 6, [24, 24, 24], (1, 3)),
        (4, 3, [5, 5, 2], (2, 3)),  # a row is cut where the first ends
    ],
)
def test_what_can_be_aimed_at(rows: int, columns: int, free: list[int], spreads: tuple[int, int]) -> None:
    found = aimed(free, rows, columns, *spreads)
    assert found
    there = spread(free, rows, columns, found)
    assert there.rows <= spreads[0]
    assert there.columns <= spreads[1]


@pytest.mark.parametrize(
    ("rows", "columns", "free", "spreads", "count"),
    [
        (256, 16, [98] * 60, (10, 5), 8),  # 60 rows of two columns are split: others in every band
        (128, 32, [125] * 80, (25, 2), 16),
        (1024, 4, [100] * 60, (3, 17), 2),
    ],
)
def test_rows_that_minipods_do_not_hold_are_split_in_turn(
    rows: int, columns: int, free: list[int], spreads: tuple[int, int], count: int
) -> None:
    for turned in (False, True):
        shape = (columns, rows) if turned else (rows, columns)
        found = aimed(free, *shape, *(spreads[::-1] if turned else spreads))
        assert found
        there = spread(free, *shape, found)
        assert (there.rows, there.columns) == (spreads[::-1] if turned else spreads)
        assert (found.bands, found.exchanged) == (count, turned)


def test_what_cannot_be_had_is_not_aimed_at() -> None:
    assert aimed([5, 5], 4, 4, 4, 4) is None
    assert aimed([8, 8], 4, 4, 1, 1) is None


def test_effort_has_an_end() -> None:
    aims = TargetedBands([12, 12], 6, 4, effort=1)
    assert aims.at(2, 1)
    assert aims.effort <= 0
    assert aims.at(2, 1) is None


@pytest.mark.parametrize("number", range(6))
def test_what_a_solver_knows_lies_between_the_bound_and_the_bands(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As if these matrices were large."""
    monkeypatch.setattr("plait.place.solve.exact.MOST_CELLS", 0)
    problem = drawn(70, number)
    solved = cell_program(problem, limit=2.0)
    placed = place(problem)
    if solved.score:
        assert placed.bound <= solved.score + 1e-6
    assert placed.score >= solved.bound - 1e-6


@pytest.mark.parametrize(
    ("shape", "free", "alpha", "spreads"),
    [
        ((256, 16), [98] * 100, 0.7, (10, 5)),
        ((128, 32), [125] * 80, 0.95, (25, 2)),
        ((312, 16), [(37 * at) % 80 + 1 for at in range(140)], 0.3, (6, 16)),
    ],
)
def test_large_matrices(shape: tuple[int, int], free: list[int], alpha: float, spreads: tuple[int, int]) -> None:
    """The best that is known; bands that are not split are further spread."""
    problem = Problem.plain(*shape, free, alpha=alpha)
    found = exact(problem)
    there = spread_of(problem, found.cells)
    assert (there.rows, there.columns) == spreads
    assert found.bound <= problem.score(*spreads)
    assert exact(problem) == found

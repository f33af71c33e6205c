"""Constructions by hand: which minipod serves which band, and how far rows and columns are spread
by it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from plait.place.solve.bands import Banding, Offer, bands


def made(free: list[int], rows: int, columns: int, count: int, **how: bool) -> Banding:
    found = bands(free, rows, columns, count, **how)
    assert found is not None
    return found


def test_what_a_band_leaves_of_a_minipod_serves_the_next() -> None:
    assert made([6], 2, 3, 3).runs == (((0, 2),), ((0, 2),), ((0, 2),))
    assert made([9, 4], 2, 4, 2).runs == (((0, 4),), ((0, 4),)), "5 are left of 9, more than 4"
    assert made([9, 6], 2, 4, 2).runs == (((0, 4),), ((1, 4),)), "6 are more than what is left of 9"


def test_tight_ends_a_band_with_the_smallest_that_can() -> None:
    assert made([9, 4], 2, 4, 2, tight=True).runs == (((1, 4),), ((0, 4),))
    assert made([9, 4, 6], 2, 4, 2, tight=True).runs == (((1, 4),), ((2, 4),))
    assert made([9, 3, 5], 2, 4, 2, tight=True).runs == (((2, 4),), ((0, 4),)), "3 do not suffice"
    assert made([5, 5], 2, 4, 2, tight=True).runs == (((0, 4),), ((1, 4),)), "of two that are as large, the first"


def test_whole_rows_of_a_band_unless_cut() -> None:
    assert bands([5, 3], 2, 4, 1) is None, "of each minipod four cells or none"
    cut = made([5, 3], 2, 4, 1, cut=True)
    assert cut.runs == (((0, 5), (1, 3)),)
    assert cut.spreads() == (2, 2), "the second row is cut"
    assert made([8, 3], 2, 4, 1, cut=True).spreads() == (1, 1)
    assert made([4, 4], 2, 4, 1).spreads() == (1, 2)
    assert bands([3, 4], 2, 4, 1, cut=True) is None and bands([], 2, 4, 1) is None


def test_bands_of_columns_are_as_wide_as_can_be_and_turn_by_turn_from_both_ends() -> None:
    found = made([4, 4, 3, 3], 4, 3, 2, cut=True)
    assert found.widths == (2, 1)
    assert found.runs == (((0, 4), (1, 4)), ((3, 1), (2, 3))), "twice the cells, so it is served twice first"
    turned = made([2, 2, 1, 1], 3, 2, 2)
    assert turned.runs == (((0, 2), (2, 1)), ((3, 1), (1, 2))), "the second from the bottom"
    assert turned.cells() == [0, 0, 2, 3, 1, 1]
    assert turned.spreads() == (2, 2)
    three = made([2, 2, 2, 1, 1, 1], 3, 3, 3)
    assert three.runs == (((0, 2), (3, 1)), ((4, 1), (1, 2)), ((2, 2), (5, 1))), "the third from the top again"


def test_cuts_are_counted_where_most_meet() -> None:
    def across(*runs: tuple[tuple[int, int], ...], widths: tuple[int, ...]) -> tuple[int, int]:
        return Banding(4, widths, runs).spreads()

    assert across(((0, 3), (1, 5)), widths=(2,)) == (2, 2), "one row is cut"
    assert across(((0, 3), (1, 1), (2, 4)), widths=(2,)) == (2, 3)
    assert across(((0, 5), (1, 1), (2, 6)), widths=(3,)) == (2, 3), "the second cut is between rows"
    assert across(((0, 4), (1, 1), (2, 7)), widths=(3,)) == (3, 3), "two cuts in one row"
    assert across(((0, 1), (1, 1), (2, 3), (3, 7)), widths=(3,)) == (3, 4), "two cuts in the first row, one in the next"
    assert across(((0, 3), (1, 5)), ((2, 3), (3, 5)), widths=(2, 2)) == (4, 2), "of both bands in the same row"
    assert across(((0, 3), (1, 5)), ((2, 5), (3, 3)), widths=(2, 2)) == (3, 2), "in different ones"
    assert Banding(4, (2,), (((0, 3), (1, 1), (2, 4)),), exchanged=True).spreads() == (3, 2)


def test_exchanged_bands_are_those_of_rows() -> None:
    found = Offer(1, 2, 2, exchanged=True, tight=False, cut=False).made([6, 4], 4, 2)
    assert found is not None and found.exchanged
    assert found.runs == (((0, 4),), ((1, 4),)) and found.spreads() == (1, 2)
    assert found.cells() == [0, 0, 1, 1, 0, 0, 1, 1], "the first two rows here, the others there"
    assert Offer(1, 1, 1, exchanged=True, tight=False, cut=False).made([3], 4, 2) is None
    plain = Offer(1, 1, 1, exchanged=False, tight=False, cut=True).made([5, 3], 2, 4)
    assert plain == bands([5, 3], 2, 4, 1, cut=True)


@given(
    free=st.lists(st.integers(0, 9), min_size=1, max_size=5), rows=st.integers(1, 5), columns=st.integers(1, 4),
    data=st.data(), tight=st.booleans(), cut=st.booleans(),
)  # fmt: skip
def test_spreads_are_those_of_the_cells(
    free: list[int], rows: int, columns: int, data: st.DataObject, tight: bool, cut: bool
) -> None:
    count = data.draw(st.integers(1, columns))
    found = bands(free, rows, columns, count, tight=tight, cut=cut)
    if found is None:
        assert not cut or sum(free) < rows * columns
        return
    cells = found.cells()
    assert all(used <= free[pod] for pod, used in Counter(cells).items()) and len(cells) == rows * columns
    across = max(len(set(cells[row::rows])) for row in range(rows))
    down = max(len(set(cells[at : at + rows])) for at in range(0, len(cells), rows))
    told = found.spreads()
    assert across <= told[0] and down <= told[1]

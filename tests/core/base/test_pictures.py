"""Bars drawn as text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.pictures import Bar, Drawing, drawn_rows

times = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted)


@given(st.lists(st.tuples(st.sampled_from("ab"), times), max_size=20), st.integers(1, 80))
def test_every_row_has_its_width_whatever_the_bars(bars: list[tuple[str, list[int]]], width: int) -> None:
    made = [Bar(row, start, end, f"F{start}", row) for row, (start, end) in bars]
    assert {len("".join(piece.text for piece in pieces)) for _, pieces in drawn_rows(made, width)} <= {width}


def test_a_label_is_cut_to_its_number_before_it_is_left_out() -> None:
    bars = [Bar("r", 0, 3, "F12", "F"), Bar("r", 3, 5, "F13", "F"), Bar("r", 5, 6, "F14", "F")]
    ((_, pieces),) = drawn_rows(bars, width=6)
    assert [piece.text for piece in pieces] == ["F1213▪"]


def test_pieces_of_one_kind_are_joined() -> None:
    ((_, pieces),) = drawn_rows([Bar("r", 0, 2, "", "x"), Bar("r", 2, 4, "", "x"), Bar("r", 6, 8, "", "y")], width=8)
    assert [(len(piece.text), piece.kind) for piece in pieces] == [(4, "x"), (2, ""), (2, "y")]


def test_names_of_any_length_stand_in_one_column() -> None:
    lines = Drawing([Bar("a", 0, 1, "", "F"), Bar("longer", 1, 2, "", "F")]).lines(40)
    assert [line.index("|") for line in lines] == [7, 7]
    assert {len(line) for line in lines} == {40}
    assert len(Drawing([Bar("a", 0, 1, "", "F")]).lines(4)[0]) == 24  # as narrow as can be seen
    assert Drawing([]).lines(40) == []

"""Quantities over time, drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.core.errors import DataError
from plait.core.gantt import Curve
from plait.diagnose.plots import draw_curves

FIRST, SECOND = Curve("first", [(0, 1), (1, 2)]), Curve("second", [(0, 2), (1, 1)])


def test_a_name_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    """Also in a panel where another comes before it or is absent."""
    file = tmp_path / "curves.svg"
    draw_curves([("above", [FIRST, SECOND]), ("below", [SECOND])], file, title="t", across="hours", marks=[0.5])
    drawn = file.read_text()
    assert all(f">{word}<" in drawn for word in ("above", "below", "first", "second", "hours", "t"))
    blue, orange = (len(re.findall(f"stroke: {colour}", drawn)) for colour in ("#1f77b4", "#ff7f0e"))
    assert (blue, orange) == (2, 3)  # with one of each in the legend
    again = tmp_path / "again.svg"
    draw_curves([("above", [FIRST, SECOND]), ("below", [SECOND])], again, title="t", across="hours", marks=[0.5])
    assert again.read_text() == drawn


def test_a_picture_of_nothing_and_one_of_no_known_form(tmp_path: Path) -> None:
    draw_curves([("above", [])], tmp_path / "empty.png", title="t", across="hours")
    with pytest.raises(DataError, match="a picture's name ends in"):
        draw_curves([("above", [FIRST])], tmp_path / "curves.txt", title="t", across="hours")

"""Quantities over time, drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.api.pictures import GREY, draw_curves, draw_gantt, draw_step
from plait.core.base.errors import DataError
from plait.core.base.pictures import Bar, PlotCurve

FIRST, SECOND = PlotCurve("first", [(0, 1), (1, 2)]), PlotCurve("second", [(0, 2), (1, 1)])


def test_a_name_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    """Also in a panel where another comes before it or is absent."""
    file = tmp_path / "curves.svg"
    draw_curves([("above", [FIRST, SECOND]), ("below", [SECOND])], file, title="t", x_label="hours", marks=[0.5])
    drawn = file.read_text()
    assert all(f">{word}<" in drawn for word in ("above", "below", "first", "second", "hours", "t"))
    blue, orange = (len(re.findall(f"stroke: {colour}", drawn)) for colour in ("#1f77b4", "#ff7f0e"))
    assert (blue, orange) == (2, 3)  # with one of each in the legend
    again = tmp_path / "again.svg"
    draw_curves([("above", [FIRST, SECOND]), ("below", [SECOND])], again, title="t", x_label="hours", marks=[0.5])
    assert again.read_text() == drawn


def test_a_picture_of_nothing_and_one_of_no_known_form(tmp_path: Path) -> None:
    draw_curves([("above", [])], tmp_path / "empty.png", title="t", x_label="hours")
    with pytest.raises(DataError, match="a picture's name ends in"):
        draw_curves([("above", [FIRST])], tmp_path / "curves.txt", title="t", x_label="hours")


BARS = [
    Bar("rank 0", 0.0, 4.0, "F0", "forward"), Bar("rank 0", 4.0, 10.0, "B0", "backward"),
    Bar("rank 1", 2.0, 2.5, "tiny label", "forward"), Bar("rank 1", 5.0, 9.0, "", "waiting"),
]  # fmt: skip


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_bars_are_drawn_with_the_labels_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "bars.svg"
    draw_gantt(BARS, file, title="a schedule", unit="ms")
    said = texts(file)
    assert {"F0", "B0", "rank 0", "rank 1", "forward", "backward", "waiting", "time (ms)", "a schedule"} <= set(said)
    assert "tiny label" not in said and said.index("rank 0") < said.index("rank 1")
    drawn = file.read_text()
    assert drawn.count("fill: #b8bec6") == 2, "a bar that waits, and its kind in the legend"
    assert [drawn.count(f"fill: {colour}") for colour in ("#1f77b4", "#ff7f0e")] == [3, 2], "and those of two kinds"
    assert "stroke: #ffffff" in drawn and GREY in drawn


@pytest.mark.parametrize(("length", "shown"), [(101, False), (102, True)])
def test_a_label_needs_so_much_room(tmp_path: Path, length: int, shown: bool) -> None:
    """A letter takes a 150th of the whole: here ten need 100 of 1500."""
    file = tmp_path / "bars.svg"
    bars = [Bar("r", 0, 1500, "", "a"), Bar("r", 100, 100 + length - 1, "ten letter", "a")]
    draw_gantt(bars, file, title="t")
    assert ("ten letter" in texts(file)) == shown


def test_no_bars_are_a_picture_too(tmp_path: Path) -> None:
    draw_gantt([], tmp_path / "none.png", title="t")
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match=r"ends in \.svg, \.png, \.pdf$"):
        draw_gantt([], tmp_path / "none.html", title="t")


@pytest.mark.parametrize("form", ["svg", "html"])
def test_a_step_and_its_memory_with_the_limit(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"step.{form}"
    memory = PlotCurve("stage 0", [(0, 2**30), (10, 3 * 2**30)])
    draw_step(BARS, [memory], file, title="a <step>", limit=4 * 2**30)
    said = texts(file)
    assert {"rank 0", "forward", "stage 0", "usable", "GiB of a rank", "time (s)", "a &lt;step&gt;"} <= set(said)
    ticks = {float(one) for one in said if re.fullmatch(r"\d+(\.\d+)?", one)}
    assert 0.0 in ticks and 4 <= max(ticks) < 12
    drawn = file.read_text()
    assert drawn.startswith("<!doctype html>" if form == "html" else "<?xml") and drawn.count("<svg") == 1
    assert ("<title>a &lt;step&gt;</title>" in drawn) == (form == "html")
    with pytest.raises(DataError, match=r"ends in \.svg, \.png, \.pdf, \.html$"):
        draw_step(BARS, [memory], tmp_path / "step.txt", title="t", limit=1.0)

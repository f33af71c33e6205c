"""Pictures in files, by matplotlib, which needs no browser: bars and curves over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import DataError
from plait.core.base.files import replacing
from plait.core.base.pictures import Bar, PlotCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

FORMATS = ("svg", "png", "pdf")
SAME: dict[Any, Any] = {"svg.hashsalt": "plait", "svg.fonttype": "none"}
"""matplotlib's settings while a figure is saved: the same picture is the same file."""
GREY = "#808890"
"""Of lines and words: it can be read on white and on black."""
COLOURS = {"waiting": "#b8bec6"}
"""Of kinds that are not to stand out."""
MANY = 500
"""Bars from which on edges would hide them."""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>svg {{ width: 100%; height: auto }}</style>
<svg{svg}
</html>
"""


def check_format(path: Path, known: Sequence[str] = FORMATS) -> None:
    """Raise DataError for a picture that cannot be drawn as its name says."""
    if kind_of(path) not in known:
        raise DataError(f"{path}: a picture's name ends in .{', .'.join(known)}")


def kind_of(path: Path) -> str:
    """A picture's format, by its name."""
    return path.suffix.lstrip(".").lower()


def draw_gantt(bars: Sequence[Bar], path: Path, *, title: str, unit: str = "s") -> None:
    """Bars as a picture whose format the file's ending names; a colour a kind, labels where they fit. Appears
    whole or not at all. An SVG has no background, for light pages and dark ones."""
    check_format(path)
    rows = len({bar.row for bar in bars})
    figure = _figure(1.2 + 0.5 * rows)
    axes = figure.add_subplot()
    _draw_bars(axes, bars)
    axes.set(xlabel=f"time ({unit})", title=title)
    kinds = len({bar.kind for bar in bars})
    if kinds:
        _legend(axes, kinds, -0.02 - 0.6 / (1 + rows))
    save(figure, path, title)


def draw_step(bars: Sequence[Bar], curves: Sequence[PlotCurve], path: Path, *, title: str, limit: float) -> None:
    """A step over time: bars, and below them curves of memory in bytes with the ``limit`` that there is. The
    file's ending names its format; HTML is the SVG on a page."""
    check_format(path, (*FORMATS, "html"))
    rows = len({bar.row for bar in bars})
    figure = _figure(4.5 + 0.35 * rows)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(0.5 + 0.35 * rows, 2.5))
    _draw_bars(above, bars)
    above.set_title(title)
    _legend(above, len({bar.kind for bar in bars}), -0.02)
    for curve in curves:
        below.plot([at for at, _ in curve.points], [size / 2**30 for _, size in curve.points], label=curve.name, lw=1)
    below.axhline(limit / 2**30, color=GREY, linestyle="--", linewidth=1, label="usable")
    below.set(xlabel="time (s)", ylabel="GiB of a rank")
    below.set_ylim(bottom=0)
    below.margins(x=0.01)
    below.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    save(figure, path, title)


def draw_curves(
    panels: Sequence[tuple[str, Sequence[PlotCurve]]],
    path: Path,
    *,
    title: str,
    across: str,
    marks: Sequence[float] = (),
) -> None:
    """Quantities over time, a panel for each with its name and curves, one below the other. across: what
    their points' first number is. marks: vertical lines."""
    check_format(path)
    figure = _figure(1.2 + 2.2 * len(panels))
    below = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    lines: dict[str, Line2D] = {}  # a curve's name has the same colour in all panels
    colours = {name: f"C{number % 10}" for number, name in enumerate(_names(panels))}
    for axes, (name, curves) in zip(below, panels, strict=True):
        for curve in curves:
            (lines[curve.name],) = axes.plot(*zip(*curve.points, strict=True), color=colours[curve.name], lw=1.2)
        for mark in marks:
            axes.axvline(mark, color=GREY, linestyle="--", linewidth=1)
        axes.set(ylabel=name)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
    below[0].set_title(title)
    below[-1].set_xlabel(across)
    below[-1].legend(
        lines.values(), lines, ncols=len(lines), loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False
    )
    save(figure, path, title)


def _names(panels: Sequence[tuple[str, Sequence[PlotCurve]]]) -> list[str]:
    return list(dict.fromkeys(curve.name for _, curves in panels for curve in curves))


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(14, height), layout="constrained")


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    rows = list(dict.fromkeys(bar.row for bar in bars))
    span = max((bar.end for bar in bars), default=1.0) - min((bar.start for bar in bars), default=0.0)
    edges = "white" if len(bars) < MANY else "none"
    for number, kind in enumerate(dict.fromkeys(bar.kind for bar in bars)):
        own = [bar for bar in bars if bar.kind == kind]
        axes.barh(
            [rows.index(bar.row) for bar in own],
            [bar.end - bar.start for bar in own],
            left=[bar.start for bar in own],
            height=0.8,
            color=COLOURS.get(kind, f"C{number % 10}"),
            edgecolor=edges,
            linewidth=0.5,
            label=kind,
        )
    for bar in bars:
        if bar.label and (bar.end - bar.start) * 150 > span * len(bar.label):
            middle = (bar.start + bar.end) / 2
            axes.text(middle, rows.index(bar.row), bar.label, ha="center", va="center", fontsize=7, color="white")
    axes.set(yticks=range(len(rows)), yticklabels=rows)
    axes.invert_yaxis()


def _legend(axes: Axes, columns: int, below: float) -> None:
    axes.legend(ncols=columns, loc="upper center", bbox_to_anchor=(0.5, below), frameon=False)


def save(figure: Figure, path: Path, title: str = "") -> None:
    """Write a figure whole or not at all, without the date. An SVG has no background, for light pages and
    dark ones; HTML is the SVG on a page with that title."""
    from matplotlib import rc_context

    kind = kind_of(path)
    svg = kind in ("svg", "html")
    options: dict[str, Any] = {"dpi": 120, "transparent": svg, "metadata": {"Date": None} if svg else None}
    for axes in figure.axes if svg else ():
        _tone_down(axes)
    with rc_context(SAME), replacing(path) as partial:
        if kind != "html":
            figure.savefig(partial, format=kind, **options)
            return
        drawn = StringIO()
        figure.savefig(drawn, format="svg", **options)
        partial.write_text(PAGE.format(title=escape(title), svg=drawn.getvalue().partition("<svg")[2]))


def _tone_down(axes: Axes) -> None:
    """Lines and words in a grey that can be read on white and on black."""
    axes.tick_params(which="both", colors=GREY)
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.spines.values(), *_legend_words(axes)):
        part.set_color(GREY)


def _legend_words(axes: Axes) -> list[Text]:
    legend = axes.get_legend()
    return legend.get_texts() if legend else []

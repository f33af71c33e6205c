"""Pictures of the same kind as the papers': bars of published beside Plait's numbers, curves, matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from plait.api.pictures import GREY, save

Drawn = Mapping[str, Any]
STYLES, COLOURS = ("-", "--", ":"), 10
FIRST: dict[str, Any] = {"color": GREY, "linewidth": 4, "alpha": 0.5, "zorder": 1}
DASHES = ("-", (0, (2, 6)), (2, (2, 6)), (4, (2, 6)), "-")
"""Of curves that lie on each other: each is seen in the gaps of the others."""
MARKS = "os^DvPX"
"""Of points that are not joined, hollow: where they coincide each is seen."""
TITLE, LABELS = 80, 40
"""Letters of a line of a title, and of all names below an axis that stand upright."""
TICKS, FAR = 10, 8
"""The most points of an axis that have a tick each; how many times the first is the last of one by powers."""


def draw(figure: Drawn, kept: Drawn, file: Path) -> None:
    """A figure's picture, by its ``chart``."""
    KINDS[figure["chart"]](figure, kept, file)


def _bars(figure: Drawn, kept: Drawn, file: Path) -> None:
    """Two bars a row, to the middle of a range, which a line shows. Those of ratios begin at one, where
    nothing is gained."""
    found = {row["name"]: row["value"] for row in kept["rows"]}
    names = [row["name"] for row in figure["rows"]]
    drawn = Figure(figsize=(9, 1.3 + 0.42 * len(names)), layout="constrained")
    axes = drawn.add_subplot()
    nothing = 1.0 if figure.get("unit") == "x" else 0.0
    kinds = (("published", {row["name"]: row.get("published") for row in figure["rows"]}), ("Plait", found))
    for number, (label, values) in enumerate(kinds):
        ranges = {name: ends for name in names if (ends := _ends(values.get(name)))}
        if not ranges:
            continue
        at = [names.index(name) + (number - 0.5) * 0.38 for name in ranges]
        middle = [(low + high) / 2 for low, high in ranges.values()]
        reach = [(high - low) / 2 for low, high in ranges.values()]
        longs = [value - nothing for value in middle]
        axes.barh(at, longs, left=nothing, height=0.36, xerr=reach, ecolor=GREY, label=label, color=f"C{number}")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel=figure.get("along", ""))
    _count(axes.xaxis, figure)
    axes.invert_yaxis()
    _finish(drawn, figure, file)


def _ends(value: Any) -> tuple[float, float] | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value, value
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else None


def _lines(figure: Drawn, kept: Drawn, file: Path) -> None:
    """A curve for each of Plait's series, or its points alone (``joined``); what is published stands in the
    table."""
    drawn = Figure(figsize=(9, 4.2), layout="constrained")
    axes = drawn.add_subplot()
    renamed = figure.get("names", {})
    names = [renamed.get(series["name"], series["name"]) for series in kept["series"]]
    curves: list[dict[str, Any]] = [
        {"color": colour, "linestyle": line, "marker": "o", "markersize": 3} for colour, line in styles(names)
    ]
    if not figure.get("joined", True):
        curves = [{"color": f"C{at}", "linestyle": "", "fillstyle": "none", "marker": MARKS[at]}
                  for at in range(len(names))]  # fmt: skip
    for series, name, look in zip(kept["series"], names, curves, strict=True):
        xs, ys = zip(*series["points"], strict=True)
        axes.plot([renamed.get(x, x) for x in xs], ys, linewidth=1.2, label=name, **look)
    _across(axes, list(dict.fromkeys(x for series in kept["series"] for x, _ in series["points"])))
    if figure.get("logarithmic"):
        axes.set_yscale("log")
    else:
        _count(axes.yaxis, figure)
    axes.set(xlabel=figure.get("across", ""), ylabel=figure.get("along", ""))
    _finish(drawn, figure, file)


def _training(figure: Drawn, kept: Drawn, file: Path) -> None:
    """Of each group, "fp32" of "fp32: 2 x 1", the curves, the first one wide below the others; and under them
    how far each is from the first, where it is at all."""
    groups: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for series in kept["series"]:
        group, _, name = series["name"].partition(": ")
        xs, ys = map(list, zip(*series["points"], strict=True))
        groups.setdefault(group, []).append((name, xs, ys))
    drawn = Figure(figsize=(9, 5.2), layout="constrained")
    panels = drawn.subplots(2, len(groups), sharex=True, sharey="row")
    for (group, own), above, below in zip(groups.items(), *panels, strict=True):
        for at, (name, xs, ys) in enumerate(own):
            look = {"color": f"C{at}", "linestyle": DASHES[at], "linewidth": 1.2, "zorder": 2 - 0.1 * at}
            above.plot(xs, ys, label=name, **look if at else FIRST)
            between = [abs(y - first) or nan for y, first in zip(ys, own[0][2], strict=True)]
            below.plot(xs, between, color=f"C{at}", linewidth=1)
        above.set_title(group, fontsize=9)
        below.set(yscale="log", xlabel=figure["across"])
    panels[0, 0].set_ylabel(figure["along"])
    panels[1, 0].set_ylabel(f"difference from {next(iter(groups.values()))[0][0]}")
    for panel in panels.flat:
        panel.grid(alpha=0.25)
    _legend(panels[0, -1], figure)
    drawn.suptitle(fill(figure["title"], TITLE), fontsize=10, color=GREY)
    save(drawn, file)


def _across(axes: Axes, xs: Sequence[Any]) -> None:
    """A tick at every point where there are few; by powers of two where the last is far from the first."""
    if any(isinstance(x, str) for x in xs):
        axes.tick_params(axis="x", labelrotation=30 if sum(map(len, xs)) > LABELS else 0)
    elif len(xs) <= TICKS:
        if min(xs) > 0 and max(xs) >= FAR * min(xs):
            axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:,.4g}" if x < 1000 else f"{x:,}" for x in xs])
        axes.minorticks_off()


def _count(axis: Axis, figure: Drawn) -> None:
    """Shares in hundredths, as the table has them. scale: the picture's unit where rows have another."""
    if figure.get("scale", figure.get("unit")) in ("%", "+%", "MFU"):
        axis.set_major_formatter(PercentFormatter(1.0))


def styles(names: Sequence[str]) -> list[tuple[str, str]]:
    """Colour and line of each series, no two alike: of names such as "7B, Ulysses" a colour for each first
    part and a line for each last one.

    >>> styles(["a, x", "a, y", "b, x"])
    [('C0', '-'), ('C0', '--'), ('C1', '-')]
    >>> styles(["a", "b"])
    [('C0', '-'), ('C1', '-')]
    """
    parts = [name.rpartition(", ") for name in names]
    firsts, lasts = (list(dict.fromkeys(part[at] for part in parts)) for at in (0, 2))
    if len(lasts) <= len(STYLES) and all(first for first, _, _ in parts):
        return [(f"C{firsts.index(first)}", STYLES[lasts.index(last)]) for first, _, last in parts]
    return [(f"C{at % COLOURS}", STYLES[at // COLOURS]) for at in range(len(names))]


def _matrix(figure: Drawn, kept: Drawn, file: Path) -> None:
    """A row a series, depth of colour by value."""
    rows = kept["series"]
    drawn = Figure(figsize=(9, 1.6 + 0.3 * len(rows)), layout="constrained")
    axes = drawn.add_subplot()
    shown = axes.imshow([[value for _, value in row["points"]] for row in rows], aspect="auto", cmap="Blues")
    axes.set(
        yticks=range(len(rows)), yticklabels=[row["name"] for row in rows],
        xlabel=figure.get("across", ""), ylabel=figure.get("along", ""),
    )  # fmt: skip
    drawn.colorbar(shown, ax=axes, label=figure["depth"])
    axes.set_title(fill(figure["title"], TITLE), fontsize=10)
    save(drawn, file)


def _finish(drawn: Figure, figure: Drawn, file: Path) -> None:
    (axes,) = drawn.axes
    axes.set_title(fill(figure["title"], TITLE), fontsize=10)
    axes.grid(alpha=0.25)
    if len(axes.get_lines()) != 1:  # the axis names what a single curve is
        _legend(axes, figure)
    save(drawn, file)


def _legend(axes: Axes, figure: Drawn) -> None:
    """Beside a picture."""
    legend = axes.legend(
        title=figure.get("legend"), frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    legend.get_title().set(color=GREY, fontsize=8)


KINDS = {"bars": _bars, "lines": _lines, "matrix": _matrix, "training": _training}

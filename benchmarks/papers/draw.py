"""Pictures of the papers' pages: published beside Plait's numbers, curves, matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from plait.api.pictures import GREY, save

Drawn = Mapping[str, Any]
STYLES, COLOURS = ("-", "--", ":", "-."), 10
FIRST: dict[str, Any] = {"color": GREY, "linewidth": 4, "alpha": 0.5, "zorder": 1}
DASHES = ("-", (0, (2, 6)), (2, (2, 6)), (4, (2, 6)), "-")
"""Of curves that lie on each other: each is seen in the gaps of the others."""
MARKS = "os^DvPX"
"""Of points that are not joined, hollow: where they coincide each is seen."""
TITLE, LABELS = 80, 40
"""Letters of a line of a title, and of all names below an axis that stand upright."""
FEW = 20
"""The most points of a curve that have a mark each."""
TICKS, FAR = 10, 8
"""The most points of an axis that have a tick each; how many times the first is the last of one by powers."""


def draw(figure: Drawn, kept: Drawn, file: Path) -> None:
    """A figure's picture, by its ``chart``."""
    KINDS[figure["chart"]](figure, kept, file)


def _ranges(figure: Drawn, kept: Drawn, file: Path) -> None:
    """Of every row what is published beside Plait's numbers: a mark, or a line from the least to the most. A
    line stands where nothing is gained."""
    found = {row["name"]: row for row in kept["rows"]}
    every = ((row["name"], {"published": row.get("published"), **_ours(found.get(row["name"], {}))})
             for row in figure["rows"])  # fmt: skip
    ranges = {name: ends for name, values in every
              if (ends := {kind: pair for kind, value in values.items() if (pair := _ends(value))})}  # fmt: skip
    kinds = [kind for kind in WHOSE if any(kind in ends for ends in ranges.values())]
    drawn = Figure(figsize=(9, 1.3 + (0.18 + 0.12 * len(kinds)) * len(ranges)), layout="constrained")
    axes = drawn.add_subplot()
    axes.axvline(1.0 if figure.get("unit") == "x" else 0.0, color=GREY, linewidth=0.8, zorder=0)
    for number, kind in enumerate(kinds):
        look: dict[str, Any] = {"color": f"C{WHOSE.index(kind)}", "marker": MARKS[WHOSE.index(kind)], "markersize": 5}
        for at, ends in enumerate(ranges.values()):
            if kind in ends:
                y = at + (number - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
                axes.plot(ends[kind], (y, y), linewidth=3, label=kind, **look)
    axes.set(yticks=range(len(ranges)), yticklabels=list(ranges), xlabel=figure.get("along", ""))
    axes.set_ylim(len(ranges) - 0.5, -0.5)  # the first on top
    _count(axes.xaxis, figure)
    _finish(drawn, figure, file)


WHOSE = ("published", "Plait", "by a reading")


def _ours(row: Drawn) -> dict[str, Any]:
    """Plait's value, or all values over what is not printed, and that by a reading."""
    ends = [end for value in row.get("over", ()) for end in _ends(value) or ()]
    return {"Plait": [min(ends), max(ends)] if ends else row.get("value"), "by a reading": row.get("reading")}


def _ends(value: Any) -> tuple[float, float] | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value, value
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    low, high = value
    return low, low if high == inf else high


def _lines(figure: Drawn, kept: Drawn, file: Path) -> None:
    """A curve for each of Plait's series, or its points alone (``joined``); ``marks`` are published."""
    drawn = Figure(figsize=(9, 4.2), layout="constrained")
    axes = drawn.add_subplot()
    renamed = figure.get("names", {})
    names = [renamed.get(series["name"], series["name"]) for series in kept["series"]]
    curves: list[dict[str, Any]] = [
        {"color": colour, "linestyle": line, "marker": MARKS[at % len(MARKS)] if len(series["points"]) <= FEW else "",
         "markersize": 4, "fillstyle": "none"}
        for at, ((colour, line), series) in enumerate(zip(styles(names), kept["series"], strict=True))
    ]  # fmt: skip
    if not figure.get("joined", True):
        curves = [{"color": f"C{at}", "linestyle": "", "fillstyle": "none", "marker": MARKS[at]}
                  for at in range(len(names))]  # fmt: skip
    for series, name, look in zip(kept["series"], names, curves, strict=True):
        xs, ys = zip(*series["points"], strict=True)
        axes.plot([renamed.get(x, x) for x in xs], ys, linewidth=1.2, label=name, **look)
    _mark(axes, figure.get("marks", ()))
    _across(axes, list(dict.fromkeys(x for series in kept["series"] for x, _ in series["points"])))
    if figure.get("zero"):
        axes.set_ylim(bottom=0)
    if figure.get("logarithmic"):
        axes.set_yscale("log")
    else:
        _count(axes.yaxis, figure)
    axes.set(xlabel=figure.get("across", ""), ylabel=figure.get("along", ""))
    _finish(drawn, figure, file)


def _mark(axes: Axes, marks: Sequence[Drawn]) -> None:
    """Published values: a star at an x, else a line, or a band for a range."""
    for at, mark in enumerate(marks):
        y, look = mark["y"], {"color": f"C{COLOURS - 1 - at}", "label": mark["name"]}
        if "x" in mark:
            axes.plot([mark["x"]], [y], linestyle="", marker="*", markersize=11, clip_on=False, zorder=3, **look)
        elif isinstance(y, Sequence):
            axes.axhspan(*y, alpha=0.2, linewidth=0, zorder=0, **look)
        else:
            axes.axhline(y, linestyle=(0, (1, 2)), zorder=0, **look)


def _panels(figure: Drawn, kept: Drawn, file: Path) -> None:
    """A panel of curves for each group, "7B" of "7B, Ulysses"."""
    groups: dict[str, list[Drawn]] = {}
    for series in kept["series"]:
        groups.setdefault(series["name"].partition(", ")[0], []).append(series)
    drawn = Figure(figsize=(9, 5.6), layout="constrained")
    panels = drawn.subplots(-(-len(groups) // 2), 2, sharex=True, sharey=True)
    names = list(dict.fromkeys(one["name"].partition(", ")[2] for own in groups.values() for one in own))
    for axes, (group, own) in zip(panels.flat, groups.items(), strict=False):
        for series in own:
            name = series["name"].partition(", ")[2]
            at = names.index(name)
            axes.plot(*zip(*series["points"], strict=True), label=name, color=f"C{at}", marker=MARKS[at],
                      fillstyle="none", linewidth=1.2)  # fmt: skip
        _mark(axes, [mark for mark in figure.get("marks", ()) if mark["panel"] == group])
        axes.set_title(group, fontsize=9)
        axes.grid(alpha=0.25)
        _count(axes.yaxis, figure)
    for axes in panels[-1]:
        axes.set_xlabel(figure["across"])
    for axes in panels[:, 0]:
        axes.set_ylabel(figure["along"], fontsize=8)
    handles = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    drawn.suptitle(fill(figure["title"], TITLE), fontsize=10, color=GREY)
    save(drawn, file)


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
    [('C0', '-'), ('C1', '--')]
    """
    parts = [name.rpartition(", ") for name in names]
    firsts, lasts = (list(dict.fromkeys(part[at] for part in parts)) for at in (0, 2))
    if len(lasts) <= len(STYLES) and all(first for first, _, _ in parts):
        return [(f"C{firsts.index(first)}", STYLES[lasts.index(last)]) for first, _, last in parts]
    return [(f"C{at % COLOURS}", STYLES[at % len(STYLES)]) for at in range(len(names))]


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
    """Beside a picture, each name once."""
    names = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    legend = axes.legend(
        names.values(), names.keys(), title=figure.get("legend"), frameon=False, fontsize=8, loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )  # fmt: skip
    legend.get_title().set(color=GREY, fontsize=8)


KINDS = {"ranges": _ranges, "lines": _lines, "panels": _panels, "matrix": _matrix, "training": _training}

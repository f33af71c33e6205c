"""Pictures of the same kind as the papers': bars of published beside Plait's numbers, curves, matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from plait.api.pictures import GREY, save

Drawn = Mapping[str, Any]
STYLES, COLOURS = ("-", "--", ":"), 10
TITLE, LABELS = 80, 40
"""Letters of a line of a title, and of all names below an axis that stand upright."""


def draw(figure: Drawn, kept: Drawn, file: Path) -> None:
    """A figure's picture, by its ``chart``."""
    KINDS[figure["chart"]](figure, kept, file)


def _bars(figure: Drawn, kept: Drawn, file: Path) -> None:
    """Two bars a row, to the middle of a range, which a line shows."""
    found = {row["name"]: row["value"] for row in kept["rows"]}
    names = [row["name"] for row in figure["rows"]]
    drawn = Figure(figsize=(9, 1.3 + 0.42 * len(names)), layout="constrained")
    axes = drawn.add_subplot()
    kinds = (("published", {row["name"]: row.get("published") for row in figure["rows"]}), ("Plait", found))
    for number, (label, values) in enumerate(kinds):
        ranges = {name: ends for name in names if (ends := _ends(values.get(name)))}
        if not ranges:
            continue
        at = [names.index(name) + (number - 0.5) * 0.38 for name in ranges]
        middle = [(low + high) / 2 for low, high in ranges.values()]
        reach = [(high - low) / 2 for low, high in ranges.values()]
        axes.barh(at, middle, height=0.36, xerr=reach, ecolor=GREY, label=label, color=f"C{number}")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel=figure.get("along", ""))
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
    names = [series["name"] for series in kept["series"]]
    looks = styles(names) if figure.get("joined", True) else [(f"C{at}", "") for at in range(len(names))]
    for series, (colour, line) in zip(kept["series"], looks, strict=True):
        xs, ys = zip(*series["points"], strict=True)
        axes.plot(xs, ys, linestyle=line, color=colour, marker="o", markersize=3, linewidth=1.2, label=series["name"])
    named = [x for x, _ in kept["series"][0]["points"] if isinstance(x, str)]
    if sum(map(len, named)) > LABELS:
        axes.tick_params(axis="x", labelrotation=30)
    if figure.get("logarithmic"):
        axes.set_yscale("log")
    axes.set(xlabel=figure.get("across", ""), ylabel=figure.get("along", ""))
    _finish(drawn, figure, file)


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
    drawn.colorbar(shown, ax=axes)
    axes.set_title(fill(figure["title"], TITLE), fontsize=10)
    save(drawn, file)


def _finish(drawn: Figure, figure: Drawn, file: Path) -> None:
    (axes,) = drawn.axes
    axes.set_title(fill(figure["title"], TITLE), fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(drawn, file)


KINDS = {"bars": _bars, "lines": _lines, "matrix": _matrix}

"""Pictures of the same kind as the papers': bars of published beside Plait's numbers, curves, matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from plait.api.pictures import GREY, save

Drawn = Mapping[str, Any]


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
    """A curve for each of Plait's series; published ranges of rows are drawn as bands at their names only in
    the table."""
    drawn = Figure(figsize=(9, 4.2), layout="constrained")
    axes = drawn.add_subplot()
    for series in kept["series"]:
        xs, ys = zip(*series["points"], strict=True)
        axes.plot(xs, ys, marker="o", markersize=3, linewidth=1.2, label=series["name"])
    if figure.get("logarithmic"):
        axes.set_yscale("log")
    axes.set(xlabel=figure.get("across", ""), ylabel=figure.get("along", ""))
    _finish(drawn, figure, file)


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
    axes.set_title(figure["title"], fontsize=10)
    save(drawn, file)


def _finish(drawn: Figure, figure: Drawn, file: Path) -> None:
    (axes,) = drawn.axes
    axes.set_title(figure["title"], fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(drawn, file)


KINDS = {"bars": _bars, "lines": _lines, "matrix": _matrix}

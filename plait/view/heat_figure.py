"""The heat map as a figure: ranks below each other, code segments or steps beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.heat import Heat, HeatColumn, Pooled
from plait.diagnose.outliers import MINIMUM
from plait.diagnose.places import WORDS, place_of
from plait.view.words import FONT, layout, packed, plain, seconds_text

Value = Literal["excess", "seconds"]
HEIGHT, WIDTH = 560, 900
"""Pixels: of the figure, and across all columns."""
SINE, SMALLEST = 0.57, 7
"""Of the angle at which labels of columns stand as long as they have room; pixels of a letter, at least."""
NAMED = 12
"""Ranks that are pointed at, at most."""
TICKS = 40
"""Rows that are all labelled, at most."""
OWN_COLOURS = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f7f7f7"], [0.75, "#f4a582"], [1, "#b2182b"]]
WAIT_COLOURS = [[0, "#542788"], [0.25, "#b2abd2"], [0.5, "#f7f7f7"], [0.75, "#fdb863"], [1, "#b35806"]]
RISING = [[0, "#f7fbff"], [0.35, "#9ecae1"], [0.7, "#2171b5"], [1, "#08306b"]]


class HeatMarks(NamedTuple):
    """What a heat map points at. named: ranks, and as what. cursor: row and column of the marked cell."""

    named: Mapping[int, str] | None = None
    cursor: tuple[int, int] | None = None


NO_MARKS = HeatMarks()


def heat_figure(
    heat: Heat,
    shown: Pooled,
    grid: pl.DataFrame,
    *,
    order: Sequence[str],
    value: Value = "excess",
    marks: HeatMarks = NO_MARKS,
) -> dict[str, Any]:
    """A heat map as plotly draws it. shown: the part of ``heat`` that is drawn."""
    named, cursor = marks
    bins = shown.seconds.shape[0]
    rows = shown.first + np.arange(bins) * shown.size + (shown.size - 1) / 2
    last = min(shown.first + bins * shown.size, heat.ranks.size)
    segments = bool(heat.columns) and isinstance(heat.columns[0], HeatColumn)
    labels = column_labels(heat)
    data: list[dict[str, Any]] = []
    for own, axis in ((True, "coloraxis"), (False, "coloraxis2")):
        at = [n for n, one in enumerate(heat.columns) if (not isinstance(one, HeatColumn) or one.own) == own]
        if not at:
            continue
        numbers = (shown.excess if value == "excess" else shown.seconds)[:, at] * 1e3
        what = "beyond its equals" if value == "excess" else "of a step"
        column = "%{x}" if segments else "step %{x}"
        data.append({
            "type": "heatmap", "x": [labels[n] for n in at], "y": packed(rows, "f8"), "z": packed(numbers),
            "customdata": packed(shown.rank[:, at], "i4"), "coloraxis": axis, "hoverongaps": False,
            "hovertemplate": f"rank %{{customdata}}, {column}<br>%{{z:.3f}} ms {what}<extra></extra>",
        })  # fmt: skip
    ticks, texts = _ticks(heat.ranks, grid, order, shown.first, last)
    figure = layout(
        height=HEIGHT, uirevision=f"{shown.first}-{last}",
        yaxis={"range": [last - 0.5, shown.first - 0.5], "tickvals": ticks, "ticktext": texts, "automargin": True},
        xaxis=_columns(labels, segments), shapes=[], annotations=_pointers(heat, named or {}, shown.first, last),
        **_colours(heat, shown, value),
    )  # fmt: skip
    if cursor is not None:
        figure["shapes"] = [_mark(heat, shown, cursor, segments)]
    figure["margin"] = {"l": 90, "r": 250, "t": 20, "b": 110}
    return {"data": data, "layout": figure}


def column_labels(heat: Heat) -> list[Any]:
    """What stands below every column; no two alike."""
    found: list[Any] = []
    for column in heat.columns:
        label = plain(column) if isinstance(column, HeatColumn) else column + 1
        while label in found:
            label = f"{label} "
        found.append(label)
    return found


def _columns(labels: Sequence[Any], segments: bool) -> dict[str, Any]:
    if not segments:
        return {"title": {"text": "step"}, "fixedrange": False}
    apart = WIDTH / max(1, len(labels))
    upright = apart * SINE < FONT["size"]
    size = max(SMALLEST, min(FONT["size"], int(0.9 * apart))) if upright else FONT["size"]
    return {
        "type": "category", "categoryarray": list(labels), "categoryorder": "array",
        "tickangle": -90 if upright else -35, "tickfont": {"size": size}, "automargin": True,
        "range": [-0.5, len(labels) - 0.5], "fixedrange": True,
    }  # fmt: skip


def _colours(heat: Heat, shown: Pooled, value: Value) -> dict[str, Any]:
    """A scale for own work, another for waiting; each with the range of the whole map, so that a colour means
    the same at every zoom."""
    own = [n for n, one in enumerate(heat.columns) if not isinstance(one, HeatColumn) or one.own]
    other = [n for n in range(len(heat.columns)) if n not in own]
    works = heat.seconds[:, own]
    sums = np.nansum(works, axis=1) if own and isinstance(heat.columns[0], HeatColumn) else works[np.isfinite(works)]
    worth = MINIMUM * float(np.median(sums)) * 1e3 if sums.size else 0.0  # less is noise, and stays pale
    found: dict[str, Any] = {}
    for name, at, colours, place, title in (
        ("coloraxis", own, OWN_COLOURS, 1.1, "own"),
        ("coloraxis2", other, WAIT_COLOURS, 1.2, "waiting"),
    ):  # fmt: skip
        if not at:
            continue
        numbers = (heat.excess if value == "excess" else heat.seconds)[:, at] * 1e3
        numbers = numbers[np.isfinite(numbers)]
        most = max(float(np.abs(numbers).max(initial=0.0)), worth if value == "excess" else 0.0) or 1.0
        bar = {"x": place, "thickness": 12, "title": {"text": f"{title}<br>ms"}, "len": 0.9}
        ends = {"cmin": -most, "cmax": most} if value == "excess" else {"cmin": 0.0, "cmax": most}
        found[name] = {"colorscale": colours if value == "excess" else RISING, "colorbar": bar, **ends}
    return found


def _ticks(
    ranks: np.ndarray, grid: pl.DataFrame, order: Sequence[str], first: int, last: int
) -> tuple[list[int], list[str]]:
    """Every rank, where they are few; else where the outermost axis changes that changes in view."""
    own = ranks[first:last]
    if own.size <= TICKS:
        return list(range(first, last)), [f"rank {rank}" for rank in own]
    shown = pl.DataFrame({"rank": own}).join(
        grid.with_columns(pl.col("rank").cast(pl.Int64)), on="rank", how="left", maintain_order="left"
    )  # fmt: skip
    for axis in order:
        changes = np.flatnonzero(shown[axis].ne_missing(shown[axis].shift(1)).to_numpy())
        changes = changes if changes.size and changes[0] == 0 else np.concatenate([[0], changes])
        if 1 < changes.size <= TICKS:
            return [first + int(at) for at in changes], [
                f"{WORDS[axis]} {plain(shown[axis][int(at)])}" for at in changes
            ]
    at = np.linspace(0, own.size - 1, 12).astype(int)
    return [first + int(one) for one in at], [f"rank {own[one]}" for one in at]


def _pointers(heat: Heat, named: Mapping[int, str], first: int, last: int) -> list[dict[str, Any]]:
    rows = {int(rank): row for row, rank in enumerate(heat.ranks[first:last], first) if int(rank) in named}
    return [
        {
            "x": 1, "y": row, "xref": "paper", "yref": "y", "text": f"<b>rank {rank}</b>", "showarrow": True, "ax": 24,
            "ay": 0, "arrowhead": 2, "arrowcolor": "#d00000", "font": {"color": "#d00000"}, "xanchor": "left",
            "bgcolor": "#ffffff", "hovertext": plain(f"rank {rank}: {named[rank]}"),
        }
        for rank, row in list(rows.items())[:NAMED]
    ]  # fmt: skip


def _mark(heat: Heat, shown: Pooled, cursor: tuple[int, int], segments: bool) -> dict[str, Any]:
    row, column = cursor
    begin = shown.first + (row - shown.first) // shown.size * shown.size - 0.5
    high = max(shown.size, shown.seconds.shape[0] * shown.size / 120)  # to be seen where a cell is thin
    middle = begin + shown.size / 2
    x = column if segments else float(heat.columns[column]) + 1  # type: ignore[arg-type]
    return {
        "type": "rect", "x0": x - 0.5, "x1": x + 0.5, "y0": middle - high / 2, "y1": middle + high / 2,
        "line": {"color": "#111111", "width": 3}, "name": "cursor",
    }  # fmt: skip


def cell_text(heat: Heat, shown: Pooled, grid: pl.DataFrame, cursor: tuple[int, int]) -> str:
    """What a cell says, in words: what a screen reader gets."""
    row, column = cursor
    cell = (row - shown.first) // shown.size
    what = heat.columns[column]
    of = f"step {what + 1}" if isinstance(what, int) else str(what)
    rank = int(shown.rank[cell, column])
    seconds, excess = float(shown.seconds[cell, column]), float(shown.excess[cell, column])
    if not np.isfinite(seconds):
        return f"{place_of(grid, rank)}: no {of}"
    beyond = f", {seconds_text(excess, signed=True)} against its equals" if np.isfinite(excess) else ""
    most = f"; of {shown.size} ranks the one furthest above its equals" if shown.size > 1 else ""
    return f"{place_of(grid, rank)}, {of}: {seconds_text(seconds)}{beyond}{most}"

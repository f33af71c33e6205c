"""Figures of ranks: the heat map of ranks x code segments or steps, and the tp x dp x pp grid.

The grid is coloured by the state of each rank. It is flat if ranks differ on one or two axes,
otherwise three-dimensional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.text import seconds_text
from plait.diagnose.measured.recording import WORDS, rank_phrase
from plait.diagnose.rank_map import STATES, Heat, HeatColumn, Pooled, RankState, edges
from plait.diagnose.verdicts.outliers import MINIMUM
from plait.view.words import FONT, LEGEND_ABOVE, STATE_COLOURS, layout, packed, plain

Value = Literal["excess", "seconds"]
HEIGHT, WIDTH = 560, 900
"""Height of the figure and width of all columns, in pixels."""
SINE, SMALLEST = 0.57, 7
"""Sine of the angle of column labels that have enough room, and the least size of a letter in
pixels."""
NAMED = 12
"""The largest number of named ranks that get a pointer on the heat map."""
TICKS = 40
"""The largest number of rows that are all labelled; of more, only the changes of an axis are."""
OWN_COLOURS = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f7f7f7"], [0.75, "#f4a582"], [1, "#b2182b"]]
WAIT_COLOURS = [[0, "#542788"], [0.25, "#b2abd2"], [0.5, "#f7f7f7"], [0.75, "#fdb863"], [1, "#b35806"]]
RISING = [[0, "#f7fbff"], [0.35, "#9ecae1"], [0.7, "#2171b5"], [1, "#08306b"]]


class HeatMarks(NamedTuple):
    """Marks on a heat map. named: findings of the diagnosis, by rank. cursor: row and column of the
    marked cell; None: no cell is marked."""

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
    """Return a heat map as a plotly figure. shown: the pooled part of ``heat`` to draw."""
    named, cursor = marks
    bins: int = shown.seconds.shape[0]
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
        what = "beyond its peers" if value == "excess" else "of a step"
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
    """Return the label of every column of the heat map; all labels differ."""
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
    """Return the colours of the heat map as fields of a plotly figure: a scale for own work and one
    for waiting. Each has the range of the whole map, so that a colour means the same at every zoom.
    """
    own = [n for n, one in enumerate(heat.columns) if not isinstance(one, HeatColumn) or one.own]
    other = [n for n in range(len(heat.columns)) if n not in own]
    works = heat.seconds[:, own]
    sums = np.nansum(works, axis=1) if own and isinstance(heat.columns[0], HeatColumn) else works[np.isfinite(works)]
    worth = MINIMUM * float(np.median(sums)) * 1e3 if sums.size else 0.0  # a smaller excess is noise, and stays pale
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
    """Return (positions, labels) of ticks on the rows: every rank if there are few, otherwise the
    changes of the outermost axis that varies between rows ``first`` and ``last``."""
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
    high = max(shown.size, shown.seconds.shape[0] * shown.size / 120)  # keeps the frame of a thin cell visible
    middle = begin + shown.size / 2
    x = column if segments else float(heat.columns[column]) + 1  # type: ignore[arg-type]
    return {
        "type": "rect", "x0": x - 0.5, "x1": x + 0.5, "y0": middle - high / 2, "y1": middle + high / 2,
        "line": {"color": "#111111", "width": 3}, "name": "cursor",
    }  # fmt: skip


def cell_text(heat: Heat, shown: Pooled, grid: pl.DataFrame, cursor: tuple[int, int]) -> str:
    """Return a cell's content in words, for screen readers."""
    row, column = cursor
    cell = (row - shown.first) // shown.size
    what = heat.columns[column]
    of = f"step {what + 1}" if isinstance(what, int) else str(what)
    rank = int(shown.rank[cell, column])
    seconds, excess = float(shown.seconds[cell, column]), float(shown.excess[cell, column])
    if not np.isfinite(seconds):
        return f"{rank_phrase(grid, rank)}: no {of}"
    beyond = f", {seconds_text(excess, signed=True)} against its peers" if np.isfinite(excess) else ""
    most = f"; of {shown.size} ranks the one furthest above its peers" if shown.size > 1 else ""
    return f"{rank_phrase(grid, rank)}, {of}: {seconds_text(seconds)}{beyond}{most}"


STANDS_OUT = ("named", "crashed", "stopped", "silent", "slow")
TP, DP, PP = 0, 1, 2
"""Axes: tp to the right, dp (and cp) to the back, pp upwards. On a flat figure dp goes to the right
before tp, and pp downwards."""
FLOWS = {TP: "partial sums, both ways", DP: "gradients and parameters, both ways",
         PP: "activations up, gradients down"}  # fmt: skip
"""Data that travels along each axis, with its direction."""
LABELLED = 64
"""The largest number of ranks of a flat figure that are labelled with their numbers."""
MOST_ROWS, ROW = 10, 64
"""MOST_ROWS: number of rows of a flat figure up to which each has its full height. ROW: that height
in pixels."""
POINTED = 20
"""The largest number of ranks of a three-dimensional figure that are labelled with their
numbers."""
FLOW = "#0f766e"
"""Colour of arrows along axes."""
DRAWN_AS_POINTS = 2000
"""Number of ranks above which the browser draws points with its GPU (WebGL)."""
Coordinates = tuple[int, int, int]


def is_flat(grid: pl.DataFrame) -> bool:
    """True if ranks differ on two axes at most."""
    return len(_varying(_coordinates(grid))) < 3


def grid_figure(rank_states: Sequence[RankState], grid: pl.DataFrame) -> dict[str, Any]:
    """Return the grid of ranks as a plotly figure: a point for each rank, and a line from each rank
    to those that it waits for. The three-dimensional figure also shows the data that travels along
    each axis."""
    at = _coordinates(grid)
    varying = _varying(at)
    flat = len(varying) < 3
    axes = sorted((DP, TP, PP), key=lambda axis: axis not in varying)[:2] if flat else [TP, DP, PP]
    kind = "scatter3d" if not flat else "scattergl" if len(rank_states) > DRAWN_AS_POINTS else "scatter"

    def along(points: Sequence[Coordinates | None]) -> dict[str, list[int | None]]:
        return {
            name: [None if point is None else point[axis] for point in points]
            for name, axis in zip("xyz", axes, strict=False)
        }

    pairs = [(at[waits], at[on]) for waits, on in edges(rank_states) if waits in at and on in at]
    lines = {
        "type": kind, "mode": "lines", "name": "waits for", **along([end for a, b in pairs for end in (a, b, None)]),
        "line": {"color": "#64748b", "width": 2}, "hoverinfo": "skip",
    }  # fmt: skip
    states = {state: [one for one in rank_states if one.state == state and one.rank in at] for state in STATES}
    points = [
        {"type": kind, **along([at[one.rank] for one in own]), **_points(state, own, len(rank_states), flat)}
        for state, own in states.items() if own
    ]  # fmt: skip
    data: list[dict[str, Any]] = [lines, *points] if pairs else points
    if not flat:
        data += _arrows(at)
    cp = int(grid["cp"].max() or 0) + 1  # type: ignore[arg-type]
    titles = {TP: "tp", DP: "dp" if cp == 1 else f"dp x cp {cp}", PP: "pp (stage)"}
    pointed = [one.rank for state in STANDS_OUT for one in states[state]][:POINTED]
    figure = _flat(axes, varying, titles, at) if flat else _deep(titles, at, pointed)
    return {"data": data, "layout": figure}


def _arrows(at: dict[int, Coordinates]) -> list[dict[str, Any]]:
    """Return plotly traces: a line along each axis, next to the grid, with its label and an
    arrowhead at each end. at: position of each rank."""
    most = [max(point[axis] for point in at.values()) for axis in (TP, DP, PP)]
    found = list[dict[str, Any]]()
    for axis, what in FLOWS.items():
        along = (0, most[axis] / 2, most[axis])
        ends = [[end if other == axis else -0.5 for other in (TP, DP, PP)] for end in along]
        line = {name: [end[other] for end in ends] for other, name in enumerate("xyz")}
        found.append({
            "type": "scatter3d", "name": what, "mode": "lines+text", **line, "text": ["", what, ""],
            "hoverinfo": "skip", "showlegend": False, "line": {"color": FLOW, "width": 4}, "textfont": {"color": FLOW},
        })  # fmt: skip
        heads = {name: line[name][::2] for name in "xyz"}
        way = {name: [-1.0, 1.0] if other == axis else [0.0, 0.0] for other, name in enumerate("uvw")}
        found.append({
            "type": "cone", "name": what, **heads, **way, "sizemode": "absolute", "sizeref": 0.3, "anchor": "tip",
            "showscale": False, "colorscale": [[0, FLOW], [1, FLOW]], "hoverinfo": "skip",
        })  # fmt: skip
    return found


def _coordinates(grid: pl.DataFrame) -> dict[int, Coordinates]:
    cp = int(grid["cp"].max() or 0) + 1  # type: ignore[arg-type]
    rows = grid.select("rank", "pp", "dp", "cp", "tp").iter_rows()
    return {rank: (tp, dp * cp + of_cp, pp) for rank, pp, dp, of_cp, tp in rows}


def _varying(at: dict[int, Coordinates]) -> list[int]:
    """Return the axes (0: tp, 1: dp, 2: pp) on which ranks differ. at: position of each rank."""
    return [axis for axis in (TP, DP, PP) if len({point[axis] for point in at.values()}) > 1]


def _points(state: str, own: Sequence[RankState], ranks: int, flat: bool) -> dict[str, Any]:
    big = state in STANDS_OUT
    size = (13 if flat else 9) if ranks <= LABELLED else 8 if ranks <= 1024 else 4
    named = flat and ranks <= LABELLED
    return {
        "name": f"{state} ({len(own)})", "mode": "markers+text" if named else "markers",
        "hovertext": [_hover(one) for one in own], "hoverinfo": "text", "customdata": [one.rank for one in own],
        "text": [f"rank {one.rank}" for one in own] if named else None, "textposition": "bottom center",
        "marker": {
            "size": size * 1.5 if big else size, "color": STATE_COLOURS[state],
            "symbol": "diamond" if big else "circle", "opacity": 1.0 if big or ranks <= LABELLED else 0.65,
            "line": {"width": 1, "color": "#333333"} if size > 4 else {"width": 0},
        },
    }  # fmt: skip


def _flat(
    axes: Sequence[int], varying: Sequence[int], titles: dict[int, str], at: dict[int, Coordinates]
) -> dict[str, Any]:
    across, down = (1 + max((point[axis] for point in at.values()), default=0) for axis in axes)
    one_row = axes[1] not in varying
    figure = layout(
        height=130 + ROW * min(down, MOST_ROWS), uirevision="grid",
        legend=LEGEND_ABOVE,
        xaxis={"title": {"text": titles[axes[0]]}, "range": [-0.5, across - 0.5], "zeroline": False, **_whole(across)},
        yaxis={
            "title": {"text": "" if one_row else titles[axes[1]]}, "range": [down - 0.45, -0.55], "zeroline": False,
            "showticklabels": not one_row, "showgrid": not one_row, **_whole(down),
        },
    )  # fmt: skip
    figure["margin"] = {"l": 70, "r": 20, "t": 40, "b": 60}
    return figure


def _deep(titles: dict[int, str], at: dict[int, Coordinates], pointed: Sequence[int]) -> dict[str, Any]:
    """Return the layout of the three-dimensional figure. pointed: ranks with labels next to their
    points, since a point's own text would be inside it."""
    most = [1 + max(point[axis] for point in at.values()) for axis in (TP, DP, PP)]
    scene = {
        **{
            f"{name}axis": {"title": {"text": titles[axis]}, "zeroline": False, **_whole(most[axis])}
            for name, axis in zip("xyz", (TP, DP, PP), strict=True)
        },
        "annotations": [
            {**dict(zip("xyz", at[rank], strict=True)), "text": f"rank {rank}", "ax": 30, "ay": -24, "arrowhead": 0}
            for rank in pointed
        ],
        "aspectmode": "manual", "aspectratio": {"x": 0.9, "y": 1.5, "z": 0.8},
        "camera": {"eye": {"x": 1.5, "y": -1.6, "z": 0.9}},
    }  # fmt: skip
    figure = layout(height=520, scene=scene, uirevision="grid", legend={"x": 0, "y": 1})
    figure["margin"] = {"l": 0, "r": 0, "t": 10, "b": 0}
    return figure


def _whole(many: int) -> dict[str, Any]:
    """Return plotly settings of an axis with a tick at every whole number, if there are few; else
    empty. many: number of values."""
    return {"dtick": 1} if many <= 16 else {}


def _hover(one: RankState) -> str:
    parts = [f"rank {one.rank}{f' on {one.host}' if one.host else ''}: {STATES[one.state]}"]
    parts += [text for text in (one.doing, one.where, one.error[-200:]) if text]
    if one.waits_for:
        more = f" and {len(one.waits_for) - 8} more" if len(one.waits_for) > 8 else ""
        parts.append(f"waits for rank {', '.join(map(str, one.waits_for[:8]))}{more}")
    return "<br>".join(plain(part) for part in parts)

"""The tp x dp x pp grid as a picture, coloured by the state of each rank: flat where ranks differ on one or
two of the axes, else in three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from plait.diagnose.states import STATES, Standing, edges
from plait.view.words import STATE_COLOURS, layout, plain

STANDS_OUT = ("named", "crashed", "stopped", "silent", "slow")
TP, DP, PP = 0, 1, 2
"""Axes: tp to the right, dp (and cp) to the back, pp upwards. On a flat picture dp goes to the right before
tp, and pp downwards."""
FLOWS = {TP: "partial sums, both ways", DP: "gradients and parameters, both ways",
         PP: "activations up, gradients down"}  # fmt: skip
"""What travels along an axis, and which way."""
LABELLED = 64
"""Ranks of a flat picture up to which each has its number beside it."""
MOST_ROWS, ROW = 10, 64
"""Of a flat picture: rows that have room of their own, and pixels of each."""
POINTED = 20
"""Ranks of a picture in three dimensions that have their numbers beside them, at most."""
FLOW = "#0f766e"
"""Colour of arrows along axes."""
DRAWN_AS_POINTS = 2000
"""Ranks from which on a browser is to draw with its GPU."""
Place = tuple[int, int, int]


def is_flat(grid: pl.DataFrame) -> bool:
    """Whether ranks differ on two axes at most."""
    return len(_varying(_places(grid))) < 3


def grid_figure(found: Sequence[Standing], grid: pl.DataFrame) -> dict[str, Any]:
    """A point for each rank; a line from each to those it waits for. In three dimensions, also what travels
    along each axis, and which way."""
    at = _places(grid)
    varying = _varying(at)
    flat = len(varying) < 3
    axes = sorted((DP, TP, PP), key=lambda axis: axis not in varying)[:2] if flat else [TP, DP, PP]
    kind = "scatter3d" if not flat else "scattergl" if len(found) > DRAWN_AS_POINTS else "scatter"

    def along(places: Sequence[Place | None]) -> dict[str, list[int | None]]:
        return {
            name: [None if place is None else place[axis] for place in places]
            for name, axis in zip("xyz", axes, strict=False)
        }

    pairs = [(at[waits], at[on]) for waits, on in edges(found) if waits in at and on in at]
    lines = {
        "type": kind, "mode": "lines", "name": "waits for", **along([end for a, b in pairs for end in (a, b, None)]),
        "line": {"color": "#64748b", "width": 2}, "hoverinfo": "skip",
    }  # fmt: skip
    states = {state: [one for one in found if one.state == state and one.rank in at] for state in STATES}
    points = [
        {"type": kind, **along([at[one.rank] for one in own]), **_points(state, own, len(found), flat)}
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


def _arrows(at: dict[int, Place]) -> list[dict[str, Any]]:
    """Beside the grid, along each axis: a line with what travels there, and a head at each end to which it
    does."""
    most = [max(place[axis] for place in at.values()) for axis in (TP, DP, PP)]
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


def _places(grid: pl.DataFrame) -> dict[int, Place]:
    cp = int(grid["cp"].max() or 0) + 1  # type: ignore[arg-type]
    rows = grid.select("rank", "pp", "dp", "cp", "tp").iter_rows()
    return {rank: (tp, dp * cp + of_cp, pp) for rank, pp, dp, of_cp, tp in rows}


def _varying(at: dict[int, Place]) -> list[int]:
    """The axes on which ranks differ."""
    return [axis for axis in (TP, DP, PP) if len({place[axis] for place in at.values()}) > 1]


def _points(state: str, own: Sequence[Standing], ranks: int, flat: bool) -> dict[str, Any]:
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


def _flat(axes: Sequence[int], varying: Sequence[int], titles: dict[int, str], at: dict[int, Place]) -> dict[str, Any]:
    across, down = (1 + max((place[axis] for place in at.values()), default=0) for axis in axes)
    one_row = axes[1] not in varying
    figure = layout(
        height=130 + ROW * min(down, MOST_ROWS), uirevision="grid",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        xaxis={"title": {"text": titles[axes[0]]}, "range": [-0.5, across - 0.5], "zeroline": False, **_whole(across)},
        yaxis={
            "title": {"text": "" if one_row else titles[axes[1]]}, "range": [down - 0.45, -0.55], "zeroline": False,
            "showticklabels": not one_row, "showgrid": not one_row, **_whole(down),
        },
    )  # fmt: skip
    figure["margin"] = {"l": 70, "r": 20, "t": 40, "b": 60}
    return figure


def _deep(titles: dict[int, str], at: dict[int, Place], pointed: Sequence[int]) -> dict[str, Any]:
    """pointed: ranks whose numbers are written beside them, as a text of a point would be within it."""
    most = [1 + max(place[axis] for place in at.values()) for axis in (TP, DP, PP)]
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
    """Whole numbers, where they are few."""
    return {"dtick": 1} if many <= 16 else {}


def _hover(one: Standing) -> str:
    parts = [f"rank {one.rank}{f' on {one.host}' if one.host else ''}: {STATES[one.state]}"]
    parts += [text for text in (one.doing, one.where, one.error[-200:]) if text]
    if one.waits_for:
        more = f" and {len(one.waits_for) - 8} more" if len(one.waits_for) > 8 else ""
        parts.append(f"waits for rank {', '.join(map(str, one.waits_for[:8]))}{more}")
    return "<br>".join(plain(part) for part in parts)

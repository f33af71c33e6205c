"""The tp x dp x pp grid as a picture in three dimensions, coloured by the state of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from plait.diagnose.states import STATES, Standing, edges
from plait.view.words import STATE_COLOURS, layout, plain

STANDS_OUT = ("named", "crashed", "stopped", "silent", "slow")


def grid_figure(found: Sequence[Standing], grid: pl.DataFrame) -> dict[str, Any]:
    """tp to the right, dp (and cp) to the back, pp upwards; a line from each rank to those it waits for."""
    cp = int(grid["cp"].max() or 0) + 1  # type: ignore[arg-type]
    at = {
        rank: (tp, dp * cp + of_cp, pp)
        for rank, pp, dp, of_cp, tp in grid.select("rank", "pp", "dp", "cp", "tp").iter_rows()
    }  # fmt: skip
    size = 13 if len(found) <= 64 else 8 if len(found) <= 1024 else 4
    data: list[dict[str, Any]] = []
    lines: list[list[float | None]] = [[], [], []]
    for waits, on in edges(found):
        if waits in at and on in at:
            for line, a, b in zip(lines, at[waits], at[on], strict=True):
                line += [a, b, None]
    if lines[0]:
        data.append({
            "type": "scatter3d", "mode": "lines", "name": "waits for", "x": lines[0], "y": lines[1], "z": lines[2],
            "line": {"color": "#64748b", "width": 2}, "hoverinfo": "skip",
        })  # fmt: skip
    for state in STATES:
        own = [one for one in found if one.state == state and one.rank in at]
        if not own:
            continue
        big = state in STANDS_OUT
        x, y, z = zip(*(at[one.rank] for one in own), strict=True)
        data.append({
            "type": "scatter3d", "name": f"{state} ({len(own)})",
            "mode": "markers+text" if big and len(own) <= 20 else "markers",
            "x": x, "y": y, "z": z, "hovertext": [_hover(one) for one in own], "hoverinfo": "text",
            "customdata": [one.rank for one in own],
            "text": [f"rank {one.rank}" for one in own] if big and len(own) <= 20 else None,
            "marker": {
                "size": size * 1.5 if big else size, "color": STATE_COLOURS[state],
                "symbol": "diamond" if big else "circle", "opacity": 1.0 if big or len(found) <= 64 else 0.65,
                "line": {"width": 1, "color": "#333333"} if size > 4 else {"width": 0},
            },
        })  # fmt: skip
    second = "dp" if cp == 1 else f"dp x cp {cp}"
    scene = {
        "xaxis": _axis("tp", at, 0), "yaxis": _axis(second, at, 1), "zaxis": _axis("pp (stage)", at, 2),
        "aspectmode": "manual",
        "aspectratio": {"x": 0.9, "y": 1.5, "z": 0.8}, "camera": {"eye": {"x": 1.5, "y": -1.6, "z": 0.9}},
    }  # fmt: skip
    figure = layout(height=520, scene=scene, uirevision="grid", legend={"x": 0, "y": 1})
    figure["margin"] = {"l": 0, "r": 0, "t": 10, "b": 0}
    return {"data": data, "layout": figure}


def _axis(title: str, at: dict[int, tuple[int, int, int]], which: int) -> dict[str, Any]:
    """Whole numbers, where they are few."""
    most = max((place[which] for place in at.values()), default=0)
    return {"title": {"text": title}, "zeroline": False, **({"dtick": 1} if most < 16 else {})}


def _hover(one: Standing) -> str:
    parts = [f"rank {one.rank}{f' on {one.host}' if one.host else ''}: {STATES[one.state]}"]
    parts += [text for text in (one.doing, one.where, one.error[-200:]) if text]
    if one.waits_for:
        more = f" and {len(one.waits_for) - 8} more" if len(one.waits_for) > 8 else ""
        parts.append(f"waits for rank {', '.join(map(str, one.waits_for[:8]))}{more}")
    return "<br>".join(plain(part) for part in parts)

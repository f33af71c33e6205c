"""The timeline as a figure: a row for each lane of each rank, a bar for each span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from plait.diagnose.dependencies import Around, Dependency
from plait.diagnose.window import SpanWindow
from plait.view.words import PALETTE, layout, plain, seconds_text

ROW = 22
"""Pixels of a row."""
LABELLED = 160
"""Bars up to which their names stand in them."""
ARROWS = 40
"""Dependencies that are drawn, at most."""
AXIS_COLOURS = {"": "#1f2933", "tp": "#d97706", "cp": "#0891b2", "dp": "#15803d", "pp": "#7c3aed"}


def rows_of(bars: pl.DataFrame) -> dict[tuple[int, str], int]:
    """The row of every rank's lane, from the top."""
    pairs = bars.select("rank", "lane").unique(maintain_order=True).iter_rows()
    return {pair: row for row, pair in enumerate(pairs)}


def timeline_figure(
    shown: SpanWindow,
    *,
    origin: float,
    chosen: Around | None = None,
    hosts: Mapping[int, str] | None = None,
    titles: Sequence[str] = (),
) -> dict[str, Any]:
    """origin: seconds that are 0 on the axis. chosen: a span to be marked, with arrows to and from those it
    depends on as far as their ranks are shown. titles: of rows, in place of rank and lane."""
    bars, rows = shown.bars, rows_of(shown.bars)
    data = [
        _bars(own, kind, rows, origin, bars.height <= LABELLED)
        for (kind,), own in sorted(
            bars.with_row_index("number").group_by("kind", maintain_order=True), key=lambda item: _order(item[0][0])
        )
    ]  # fmt: skip
    of = hosts or {}
    texts = list(titles) or [
        f"rank {rank}{f' {plain(of[rank])}' if of.get(rank) else ''} {plain(lane)}" for rank, lane in rows
    ]  # fmt: skip
    marks, arrows = _dependencies(chosen, rows, origin) if chosen else ([], [])
    ends = [(shown.begin - origin) * 1e3, (shown.end - origin) * 1e3]
    figure = layout(
        height=max(220, 120 + ROW * len(rows)), barmode="overlay", bargap=0.1, uirevision=f"{ends}",
        xaxis={"title": {"text": "ms from the begin of the step"}, "range": ends, "side": "top"},
        yaxis={
            "tickvals": list(range(len(rows))), "ticktext": texts, "range": [len(rows) - 0.5, -0.5], "automargin": True,
            "fixedrange": True,
        },
        shapes=marks, annotations=arrows, legend={"orientation": "h", "y": 0, "yanchor": "top"}, dragmode="zoom",
    )  # fmt: skip
    figure["margin"] = {"l": 150, "r": 20, "t": 60, "b": 40}
    return {"data": data, "layout": figure}


def _order(kind: str) -> int:
    return list(PALETTE).index(kind) if kind in PALETTE else len(PALETTE)


def _bars(
    own: pl.DataFrame, kind: str, rows: Mapping[tuple[int, str], int], origin: float, labelled: bool
) -> dict[str, Any]:
    starts = [(start - origin) * 1e3 for start in own["start"].to_list()]
    lengths = [(end - start) * 1e3 for start, end in own.select("start", "end").iter_rows()]
    hover = [
        plain(f"rank {rank}, step {step + 1}: {kind} {name}, {seconds_text(end - start)}") if count == 1
        else plain(
            f"rank {rank}: {count} spans, mostly {kind}, {seconds_text(busy)} of {seconds_text(end - start)}; zoom in"
        )
        for rank, step, name, start, end, count, busy in own.select(
            "rank", "step", "name", "start", "end", "count", "busy"
        ).iter_rows()
    ]  # fmt: skip
    return {
        "type": "bar", "orientation": "h", "name": plain(kind), "base": starts, "x": lengths,
        "y": [rows[pair] for pair in own.select("rank", "lane").iter_rows()], "width": 0.82,
        "marker": {"color": PALETTE.get(kind, "#999999"), "line": {"width": 0.4, "color": "#ffffff"}},
        "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>", "customdata": own["number"].to_list(),
        "text": [plain(name) for name in own["name"].to_list()] if labelled else None,
        "textposition": "inside" if labelled else "none", "insidetextanchor": "middle", "textangle": 0,
        "constraintext": "both",
    }  # fmt: skip


def _dependencies(
    chosen: Around, rows: Mapping[tuple[int, str], int], origin: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A frame around the span; an arrow from the end of what it needs to it, and from its end on."""
    one = chosen.span
    row = rows.get((one["rank"], one["lane"]))
    if row is None:
        return [], []
    start, end = (one["start"] - origin) * 1e3, (one["end"] - origin) * 1e3
    frame = {
        "type": "rect", "x0": start, "x1": end, "y0": row - 0.48, "y1": row + 0.48, "name": "chosen",
        "line": {"color": "#000000", "width": 3},
    }  # fmt: skip
    arrows: list[dict[str, Any]] = []
    for link, needed in [*((one, True) for one in chosen.needs), *((one, False) for one in chosen.needed_by)][:ARROWS]:
        at = _row_of(link, rows)
        if at is None:
            continue
        # An arrow goes on in time: to the end of a wait that began before what it waited for was over.
        if needed:
            there = ((link.start if link.why == "member" else link.end) - origin) * 1e3
            tail, head = (there, at), (start if there <= start else end, row)
        else:
            there = ((link.start if link.start >= one["end"] else link.end) - origin) * 1e3
            tail, head = (end, row), (there, at)
        arrows.append({
            "x": head[0], "y": head[1], "ax": tail[0], "ay": tail[1],
            "xref": "x", "yref": "y", "axref": "x", "ayref": "y",
            "text": "", "showarrow": True, "arrowhead": 2, "arrowwidth": 3 if link.last else 1.6,
            "arrowcolor": AXIS_COLOURS.get(link.axis, "#444444"), "opacity": 0.9,
        })  # fmt: skip
    return [frame], arrows


def _row_of(link: Dependency, rows: Mapping[tuple[int, str], int]) -> int | None:
    """The row in which a linked span stands."""
    lane = link.axis if link.key.kind in ("comm", "transfer") else "processor"
    return rows.get((link.key.rank, lane), rows.get((link.key.rank, "processor")))

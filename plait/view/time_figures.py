"""Figures over time: the timeline, series over steps, memory of stages, and the prediction next to
the measurement.

The timeline has a row for each lane of each rank, and a bar for each span. Neighbouring spans of
one kind share a bar if there are more than a browser draws at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.text import seconds_text
from plait.diagnose.measured.compare import Prediction
from plait.diagnose.measured.dependencies import Dependency, SpanDependencies
from plait.diagnose.series import SERIES, StepSeries
from plait.view.words import LEGEND_ABOVE, PALETTE, layout, nothing, plain

ROW = 22
"""Height of a row of the timeline in pixels."""
LABELLED = 160
"""The largest number of bars that are labelled with their names."""
ARROWS = 40
"""The largest number of a span's dependencies that are drawn."""
AXIS_COLOURS = {"": "#1f2933", "tp": "#d97706", "cp": "#0891b2", "ep": "#be185d", "dp": "#15803d", "pp": "#7c3aed"}
MOST = 3000
"""The largest number of bars that a browser draws without delay."""
LANES = ("processor", "tp", "cp", "ep", "dp", "pp", "other")
Group = Literal["rank", "tp", "cp", "dp", "pp", "host"]


def rows_of(bars: pl.DataFrame) -> dict[tuple[int, str], int]:
    """Return the number of the row, from the top, of every (rank, lane) with bars."""
    pairs = bars.select("rank", "lane").unique(maintain_order=True).iter_rows()
    return {pair: row for row, pair in enumerate(pairs)}


def timeline_figure(
    shown: SpanWindow,
    *,
    origin: float,
    chosen: SpanDependencies | None = None,
    hosts: Mapping[int, str] | None = None,
    titles: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the timeline as a plotly figure. origin: seconds at the axis' 0. chosen: a span to
    mark, with arrows to and from its dependencies on shown ranks. hosts: by rank. titles: of rows,
    in place of rank and lane."""
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
    chosen: SpanDependencies, rows: Mapping[tuple[int, str], int], origin: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (plotly shapes: a frame around the span; annotations: arrows from the end of each
    dependency to the span, and from the span's end to each dependent)."""
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
        # Arrows point forward in time: to a wait's end if the wait began before its dependency ended.
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
    """Return the row of a linked span; None if it is not shown."""
    lane = link.axis if link.key.kind in ("comm", "transfer") else "processor"
    return rows.get((link.key.rank, lane), rows.get((link.key.rank, "processor")))


class SpanWindow(NamedTuple):
    """Bars of the spans in a window of time. bars: a table (rank, lane, kind, name, seq, step,
    start, end, count, busy), in order of ranks and lanes. count: number of spans in the bar. busy:
    their seconds. begin, end: of the window, in seconds. single: True if every bar is one span."""

    bars: pl.DataFrame
    begin: float
    end: float
    single: bool


def window(
    spans: pl.DataFrame, ranks: Sequence[int], steps: tuple[int, int], *,
    between: tuple[float, float] | None = None, most: int = MOST,
) -> SpanWindow | None:  # fmt: skip
    """Return the bars of a window; None if it has no spans. between: seconds; None: all of the
    steps, which are counted from 0.

    Spans longer than a part of the window stay single; all lanes together have ``most`` parts.
    Shorter spans are merged with neighbours of the same kind in the same part.
    """
    own = spans.filter(pl.col("rank").is_in(list(ranks)), pl.col("step").is_between(*steps))
    if own.is_empty():
        return None
    begin, end = between or (float(own["start"].min()), float(own["end"].max()))  # type: ignore[arg-type]
    own = own.filter(pl.col("end") >= begin, pl.col("start") <= end)
    keep = ["rank", "lane", "kind", "name", "seq", "step", "start", "end"]
    single = own.height <= most
    bars = own.select(*keep, count=pl.lit(1, pl.Int64), busy=pl.col("end") - pl.col("start"))
    if not single and end > begin:
        lanes = max(1, own.select("rank", "lane").n_unique())
        part = (end - begin) / max(8, most // lanes)
        long = bars.filter(pl.col("busy") >= part)
        short = bars.filter(pl.col("busy") < part).sort("start")
        at = ((pl.col("start") - begin) / part).floor().cast(pl.Int64)
        merged = short.group_by("rank", "lane", at.alias("part"), "kind", maintain_order=True).agg(
            pl.col("name").first(), pl.col("seq").first(), pl.col("step").first(), pl.col("start").min(),
            pl.col("end").max(), pl.col("count").sum(), pl.col("busy").sum(),
        )  # fmt: skip
        # The longest kind in a part of a lane represents all kinds: a pixel has one colour.
        merged = merged.sort("busy", descending=True).unique(
            ["rank", "lane", "part"], keep="first", maintain_order=True
        )
        bars = pl.concat([long, merged.select(bars.columns)])
    order = pl.col("rank").replace_strict({rank: n for n, rank in enumerate(ranks)}, default=len(ranks))
    position = pl.col("lane").replace_strict({lane: n for n, lane in enumerate(LANES)}, default=len(LANES))
    return SpanWindow(bars.sort(order, position, "start"), begin, end, single)


def together(grid: pl.DataFrame, rank: int, group: Group, most: int = 32) -> list[int]:
    """Return the ranks of a rank's tp, cp or dp group, of its pipeline (``pp``), or of its host; at
    most ``most``, the nearest ones."""
    at = grid.filter(pl.col("rank") == rank)
    if at.is_empty():
        return []
    place = at.row(0, named=True)
    same = [axis for axis in ("pp", "dp", "cp", "tp") if axis != group] if group != "host" else ["host"]
    if group == "rank" or (group == "host" and place["host"] is None):
        return [rank]
    others = grid.filter(*(pl.col(axis) == place[axis] for axis in same))["rank"].sort().to_list()
    if len(others) <= most:
        return others
    middle = others.index(rank)
    first = max(0, min(middle - most // 2, len(others) - most))
    return others[first : first + most]


def shifted(spans: pl.DataFrame, offsets: dict[int, float]) -> pl.DataFrame:
    """Return spans with each rank's times moved by its offset in seconds."""
    if not any(offsets.values()):
        return spans
    by = pl.col("rank").replace_strict(offsets, default=0.0, return_dtype=pl.Float64)
    return spans.with_columns(start=pl.col("start") + by, end=pl.col("end") + by)


RUNS = ("#2f6db3", "#e08a2e", "#3a9a6a", "#b8425c", "#7a6a50", "#8a5cb8")
MOST_POINTS, MOST_KINDS = 2000, 12
"""MOST_POINTS: largest number of points of a line. MOST_KINDS: largest number of kinds of ops in
the comparison with the prediction."""
PANELS: Sequence[Mapping[str, str]] = (
    {"seconds": "s of a step"}, {"loss": "loss", "eval_loss": "loss"}, {"tokens_per_second": "tokens/s"},
    {"mfu": "MFU", "hidden": "hidden"}, {"norm": "norm"},
)  # fmt: skip
"""Quantities that share a panel, with their words in its title."""
MEMORY = {
    "parameters": "#2f6db3", "gradients": "#e08a2e", "optimizer": "#b8425c", "buffers": "#7a6a50",
    "activations": "#3a9a6a",
}  # fmt: skip


def thinned(series: StepSeries) -> tuple[list[int], list[float]]:
    """Return (steps, values) of a quantity, at most ``POINTS``: the least and the largest of each
    part of a long line, so that peaks stay."""
    steps, values = np.array(series.steps), np.array(series.values)
    if steps.size <= MOST_POINTS:
        return steps.tolist(), values.tolist()
    kept: set[int] = {0, steps.size - 1}
    for part in np.array_split(np.arange(steps.size), MOST_POINTS // 2 - 1):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    at = sorted(kept)
    return steps[at].tolist(), values[at].tolist()


def _line(series: StepSeries, unit: float = 1.0) -> dict[str, Any]:
    steps, values = thinned(series)
    mode = "lines+markers" if len(steps) < 60 else "lines"
    return {"type": "scatter", "mode": mode, "x": steps, "y": [value / unit for value in values]}


def series_figure(runs: Mapping[str, Sequence[StepSeries]]) -> dict[str, Any]:
    """Return quantities over steps as a plotly figure: a panel for each, from top to bottom, with a
    colour for each run. runs: quantities by the run's name."""
    there = {one.name for found in runs.values() for one in found}
    panels = [names for panel in PANELS if (names := {name: panel[name] for name in panel if name in there})]
    if not panels:
        return nothing("No metrics of steps: the run has no metrics.jsonl, or no step was finished yet.")
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    high = 1 / len(panels)
    for number, names in enumerate(panels):
        title, panel = ", ".join(dict.fromkeys(names.values())), list(names)
        suffix = "" if number == 0 else str(number + 1)
        top = 1 - number * high
        axes[f"yaxis{suffix}"] = {"domain": [top - high * 0.82, top], "title": {"text": title, "font": {"size": 11}}}
        if panel[0] in ("seconds", "tokens_per_second", "mfu", "hidden"):
            axes[f"yaxis{suffix}"]["rangemode"] = "tozero"
        for place, (run, found) in enumerate(runs.items()):
            for one in (one for one in found if one.name in panel):
                dash = "dot" if one.name != panel[0] else "solid"
                data.append({
                    **_line(one), "name": plain(f"{run}: {SERIES[one.name]}" if len(runs) > 1 else SERIES[one.name]),
                    "yaxis": f"y{suffix}", "line": {"color": RUNS[place % len(RUNS)], "dash": dash, "width": 1.6},
                    "hovertemplate": "step %{x}: %{y:.5g}<extra></extra>",
                    "showlegend": len(panel) > 1 or len(runs) > 1,
                })  # fmt: skip
    last = "" if len(panels) == 1 else str(len(panels))
    figure = layout(
        height=90 + 150 * len(panels), xaxis={"title": {"text": "step"}, "anchor": f"y{last}"}, uirevision="series",
        legend=LEGEND_ABOVE, **axes,
    )  # fmt: skip
    return {"data": data, "layout": figure}


def memory_figure(predicted: Sequence[tuple[str, Mapping[str, int]]], measured: Sequence[StepSeries]) -> dict[str, Any]:
    """Return memory as a plotly figure. predicted: (stage, bytes of a rank by kind). measured:
    bytes of each rank over steps."""
    if not predicted and not measured:
        return nothing(
            "Nothing is known of memory: the run's plan has no job to predict it from, and none was measured."
        )
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "name": kind, "x": [plain(place) for place, _ in predicted],
            "y": [sizes.get(kind, 0) / 2**20 for _, sizes in predicted], "marker": {"color": colour},
            "hovertemplate": f"{kind}: %{{y:.1f}} MiB<extra></extra>",
        }
        for kind, colour in MEMORY.items() if predicted
    ]  # fmt: skip
    if reached := _reached([place for place, _ in predicted], measured):
        data.append({
            "type": "scatter", "mode": "markers", "name": "measured, at most", "x": [plain(place) for place in reached],
            "y": [value / 2**20 for value, _ in reached.values()], "customdata": [who for _, who in reached.values()],
            "marker": {"symbol": "line-ew-open", "size": 28, "line": {"width": 3, "color": "#222222"}},
            "hovertemplate": "%{customdata}: %{y:.1f} MiB<extra></extra>",
        })  # fmt: skip
    for number, one in enumerate(measured):
        data.append({
            **_line(one, 2**20), "name": plain(f"measured: {one.name}"),
            "xaxis": "x2", "yaxis": "y2" if predicted else "y",
            "line": {"color": RUNS[number % len(RUNS)], "width": 1.5},
        })  # fmt: skip
    both = bool(predicted and measured)
    figure = layout(
        height=360, barmode="stack", legend=LEGEND_ABOVE,
        xaxis={"domain": [0, 0.46 if both else 1], "title": {"text": "predicted, of a rank of each place"}},
        yaxis={"title": {"text": "MiB"}, "rangemode": "tozero"},
        xaxis2={"domain": [0.56 if both else 0, 1], "title": {"text": "step"}, "anchor": "y2" if predicted else "y"},
        yaxis2={"anchor": "x2", "title": {"text": "MiB measured"}, "rangemode": "tozero"},
    )  # fmt: skip
    return {"data": data, "layout": figure}


def _reached(places: Sequence[str], measured: Sequence[StepSeries]) -> dict[str, tuple[float, str]]:
    """Return, by stage, (the most bytes measured on any of its ranks, that rank). measured: series
    whose names hold stage and rank."""
    found: dict[str, tuple[float, str]] = {}
    for place in places:
        own = [(max(one.values), one.name) for one in measured if f", {place}, " in one.name]
        if own:
            found[place] = max(own)[0], plain(max(own)[1].rpartition(", ")[2])
    return found


def prediction_figure(prediction: Prediction | None) -> dict[str, Any]:
    """Return predicted and measured seconds of a mean rank's step by kind of op, side by side, as a
    plotly figure; without a prediction, the reason."""
    if prediction is None or not prediction.rows:
        return nothing("The run has no plan with measured costs, or nothing that it predicts was recorded.")
    rows = list(prediction.rows[:MOST_KINDS])[::-1]
    names = [plain(" ".join(part for part in (row.kind, row.where, row.direction) if part)) for row in rows]
    data = [
        {
            "type": "bar", "orientation": "h", "name": word, "y": names, "x": [value * 1e3 for value in values],
            "marker": {"color": colour}, "hovertemplate": "%{y}: %{x:.3f} ms " + word + "<extra></extra>",
        }
        for word, values, colour in (
            ("measured", [row.measured for row in rows], "#2f6db3"),
            ("predicted", [row.predicted or 0.0 for row in rows], "#f0b26a"),
        )
    ]  # fmt: skip
    figure = layout(
        height=120 + 34 * len(rows), barmode="group", xaxis={"title": {"text": "ms of the mean rank's mean step"}},
        yaxis={"automargin": True},
        legend=LEGEND_ABOVE | {"traceorder": "reversed"},
    )  # fmt: skip
    return {"data": data, "layout": figure}

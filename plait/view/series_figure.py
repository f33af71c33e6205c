"""Numbers over steps, memory of places, and what was predicted beside what was measured, as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plait.diagnose.compare import Prediction
from plait.diagnose.series import SERIES, StepSeries
from plait.view.words import layout, nothing, plain

RUNS = ("#2f6db3", "#e08a2e", "#3a9a6a", "#b8425c", "#7a6a50", "#8a5cb8")
POINTS = 2000
"""Of a line, at most."""
PANELS: Sequence[Mapping[str, str]] = (
    {"seconds": "s of a step"}, {"loss": "loss", "eval_loss": "loss"}, {"tokens_per_second": "tokens/s"},
    {"mfu": "MFU", "hidden": "hidden"}, {"norm": "norm"},
)  # fmt: skip
"""Quantities that share a panel, with their words in its title."""
MEMORY = {
    "parameters": "#2f6db3", "gradients": "#e08a2e", "optimizer": "#b8425c", "buffers": "#7a6a50",
    "activations": "#3a9a6a",
}  # fmt: skip


def thinned(series: StepSeries, most: int = POINTS) -> tuple[list[int], list[float]]:
    """At most ``most`` points: of each part of a long line the least and the largest, so that peaks stay."""
    steps, values = np.array(series.steps), np.array(series.values)
    if steps.size <= most:
        return steps.tolist(), values.tolist()
    kept: set[int] = {0, steps.size - 1}
    for part in np.array_split(np.arange(steps.size), most // 2 - 1):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    at = sorted(kept)
    return steps[at].tolist(), values[at].tolist()


def series_figure(runs: Mapping[str, Sequence[StepSeries]]) -> dict[str, Any]:
    """A panel for each quantity, one below the other; a colour for each run."""
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
                steps, values = thinned(one)
                dash = "dot" if one.name != panel[0] else "solid"
                data.append({
                    "type": "scatter", "mode": "lines+markers" if len(steps) < 60 else "lines", "x": steps, "y": values,
                    "name": plain(f"{run}: {SERIES[one.name]}" if len(runs) > 1 else SERIES[one.name]),
                    "yaxis": f"y{suffix}", "line": {"color": RUNS[place % len(RUNS)], "dash": dash, "width": 1.6},
                    "hovertemplate": "step %{x}: %{y:.5g}<extra></extra>",
                    "showlegend": len(panel) > 1 or len(runs) > 1,
                })  # fmt: skip
    last = "" if len(panels) == 1 else str(len(panels))
    figure = layout(
        height=90 + 150 * len(panels), xaxis={"title": {"text": "step"}, "anchor": f"y{last}"}, uirevision="series",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, **axes,
    )  # fmt: skip
    return {"data": data, "layout": figure}


def memory_figure(predicted: Sequence[tuple[str, Mapping[str, int]]], measured: Sequence[StepSeries]) -> dict[str, Any]:
    """predicted: bytes by kind, of every place of the pipeline. measured: over steps."""
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
        steps, values = thinned(one)
        data.append({
            "type": "scatter", "mode": "lines+markers" if len(steps) < 60 else "lines",
            "name": plain(f"measured: {one.name}"), "x": steps,
            "y": [value / 2**20 for value in values], "xaxis": "x2", "yaxis": "y2" if predicted else "y",
            "line": {"color": RUNS[number % len(RUNS)], "width": 1.5},
        })  # fmt: skip
    both = bool(predicted and measured)
    figure = layout(
        height=360, barmode="stack", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        xaxis={"domain": [0, 0.46 if both else 1], "title": {"text": "predicted, of a rank of each place"}},
        yaxis={"title": {"text": "MiB"}, "rangemode": "tozero"},
        xaxis2={"domain": [0.56 if both else 0, 1], "title": {"text": "step"}, "anchor": "y2" if predicted else "y"},
        yaxis2={"anchor": "x2", "title": {"text": "MiB measured"}, "rangemode": "tozero"},
    )  # fmt: skip
    return {"data": data, "layout": figure}


def _reached(places: Sequence[str], measured: Sequence[StepSeries]) -> dict[str, tuple[float, str]]:
    """The most that was measured of any rank of a place, and of which; rank and place are in a series'
    name."""
    found: dict[str, tuple[float, str]] = {}
    for place in places:
        own = [(max(one.values), one.name) for one in measured if f", {place}, " in one.name]
        if own:
            found[place] = max(own)[0], plain(max(own)[1].rpartition(", ")[2])
    return found


def prediction_figure(found: Prediction | None, most: int = 12) -> dict[str, Any]:
    """Seconds of a mean rank's step by kind of op: predicted and measured side by side."""
    if found is None or not found.rows:
        return nothing("The run has no plan with measured costs, or nothing that it predicts was recorded.")
    rows = list(found.rows[:most])[::-1]
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
        height=120 + 34 * len(rows), barmode="group", xaxis={"title": {"text": "ms of a mean rank's step"}},
        yaxis={"automargin": True},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "reversed"},
    )  # fmt: skip
    return {"data": data, "layout": figure}

"""The page as one file that needs no server and no network, with the current figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from plait.core.base.errors import DataError
from plait.core.base.files import replacing
from plait.core.base.ignored_input import IgnoredInput
from plait.core.record.timeline import SpanKey
from plait.core.runs.folder import check_run_folder
from plait.diagnose.rank_map import orders, pooled
from plait.diagnose.series import series_of
from plait.view.callbacks import (
    attempts_table,
    hang_of,
    memory_of_run,
    notes_of,
    prediction_text,
    standing_table,
    status_of,
    text_of,
)
from plait.view.layout import SECTIONS
from plait.view.rank_figures import HeatMarks, grid_figure, heat_figure
from plait.view.store import Snapshot, Watched, heat_of
from plait.view.time_figures import prediction_figure, series_figure
from plait.view.timeline_callbacks import clock_text, figure_of, links_of, shown_of, side_by_side, span_text
from plait.view.words import series_words

CELLS = 1024
"""The largest number of rows of the heat map in the file: more than on the page, since zooming
cannot load finer rows."""
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
DRAW = """
document.querySelectorAll("script[data-figure]").forEach(function (one) {
  var figure = JSON.parse(one.textContent);
  Plotly.newPlot(one.dataset.figure, figure.data, figure.layout, {displaylogo: false, responsive: true});
});
"""
ATTRIBUTES = {"id": "id", "className": "class", "scope": "scope", "tabIndex": "tabindex"}


def report_run(run: Path, path: Path) -> tuple[int, IgnoredInput]:
    """Write a run's page into the file ``path``; return (its size in bytes, counts of skipped
    content). Raises DataError if no part of the run can be shown, or if the file cannot be written.
    """
    check_run_folder(run)
    watched = Watched(run, run.absolute().name)
    found = watched.read()
    if found.recording is None and not found.hang:
        raise DataError(found.problem or f"{run} holds nothing that can be shown; name a run with a timeline")
    text = report_of(found)
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    return len(text.encode()), found.run.passed_over if found.run else IgnoredInput()


def report_of(snapshot: Snapshot) -> str:
    """Return the page of a run as the text of one HTML file."""
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

    style = (Path(__file__).parent / "assets" / "style.css").read_text()
    title = escape(f"plait view: {snapshot.name}")
    titles = dict(SECTIONS)
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{titles[name]}</h2>{as_html(parts)}'
        "</section>"
        for name, parts in _sections(snapshot)
    )
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title><style>{style}</style></head>
<body><header><h1>{title}</h1><p id="status">{escape(status_of(snapshot))}</p></header>
<main>
{body}
</main>
<script>{get_plotlyjs()}</script>
<script>{DRAW}</script>
</body>
</html>
"""


def _sections(snapshot: Snapshot) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the parts of each section, as on the page."""
    yield (
        "verdict",
        [*hang_of(snapshot), html.Pre(text_of(snapshot), id="text", tabIndex=0), html.Ul(notes_of(snapshot))],
    )
    recording = snapshot.recording
    if recording is not None:
        yield "heat", _heat(snapshot)
        shown = shown_of(snapshot, _worth_showing(snapshot), None, None)
        if shown and shown.window:
            figure = _figure("timeline-figure", figure_of(shown, recording), span_text(shown, recording))
            yield "timeline", [html.P(clock_text(snapshot)), *figure, *links_of(shown, recording)]
    if snapshot.grid is not None:
        found = snapshot.standings()
        yield "grid", [*_figure("grid-figure", grid_figure(found, snapshot.grid)), *standing_table(found)]
    if snapshot.run is not None:
        series = {snapshot.name: series_of(snapshot.run.metrics)}
        yield "progress", _figure("series-figure", series_figure(series), series_words(series))
        yield "memory", _figure("memory-figure", *memory_of_run(snapshot))
        prediction = snapshot.report.prediction if snapshot.report else None
        shown = shown_of(snapshot, {}, None, "rank")
        both = _figure("both-figure", *side_by_side(snapshot, shown)) if shown else []
        first = _figure("prediction-figure", prediction_figure(prediction), prediction_text(snapshot))
        yield "predicted", [*first, *both]
        yield "attempts", [attempts_table(snapshot)]


def _heat(snapshot: Snapshot) -> list[Any]:
    assert snapshot.recording is not None
    grid = snapshot.recording.grid
    order = orders(grid)[0]
    figures: list[Any] = []
    for name, columns in (("heat-figure", "segments"), ("steps-figure", "steps")):
        heat = heat_of(snapshot, "mean", None, order, columns)
        if heat is not None and heat.columns:
            figure = heat_figure(heat, pooled(heat, CELLS), grid, marks=HeatMarks(named=snapshot.named()), order=order)
            figures += _figure(name, figure, f"Ranks by {columns}; red: longer than their peers.")
    latest = html.Ul([html.Li(text) for _, text in snapshot.latest()])
    return [*figures, html.H3("Furthest above their peers"), latest]


def _worth_showing(snapshot: Snapshot) -> dict[str, Any]:
    """Return the choice (``rank``, ``step``, ``span``) of the span to open: the longest wait of a
    rank that the diagnosis names, or of any rank. Its dependencies are the most informative."""
    recording = snapshot.recording
    assert recording is not None
    waits = recording.spans.filter(pl.col("kind").is_in(["wait", "idle"]))
    if waits.is_empty():
        return {}
    step = waits["step"].max()
    waits = waits.filter(pl.col("step") == step)
    named = snapshot.named()
    beside = recording.grid.filter(pl.col("rank").is_in(list(named)))
    near = waits.join(recording.grid.select("rank", "dp"), on="rank").filter(pl.col("dp").is_in(beside["dp"].to_list()))
    one = (near if near.height else waits).sort(pl.col("end") - pl.col("start")).row(-1, named=True)
    return {"rank": one["rank"], "step": one["step"], "span": [one[name] for name in SpanKey._fields]}


# ---- HTML, every text escaped ----


def _figure(name: str, figure: dict[str, Any], words: str = "") -> list[Any]:
    """Return the HTML parts of a figure, and its content in words."""
    return [dcc.Graph(id=name, figure=figure), *([html.P(words)] if words else [])]


def as_html(part: Any) -> str:
    """Return a component of the page, or several, as HTML without interactive parts."""
    if isinstance(part, list | tuple):
        return "".join(map(as_html, cast("Sequence[Any]", part)))
    if not isinstance(part, Component):
        return escape("" if part is None else str(part))
    values = vars(part)
    if isinstance(part, dcc.Graph):
        return _drawn(values["id"], values["figure"])
    tag = "li" if isinstance(part, html.Button) else type(part).__name__.lower()
    named = {ATTRIBUTES[name]: values[name] for name in ATTRIBUTES if isinstance(values.get(name), str | int)}
    words = "".join(f' {name}="{escape(str(value))}"' for name, value in named.items())
    return f"<{tag}{words}>{as_html(values.get('children'))}</{tag}>"


def _drawn(name: str, figure: dict[str, Any]) -> str:
    """Return a figure's place and its JSON, escaped so that no text ends the script."""
    text = json.dumps(figure, allow_nan=False, default=lambda value: value.item())
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<div id="{name}"></div><script type="application/json" data-figure="{name}">{text}</script>'

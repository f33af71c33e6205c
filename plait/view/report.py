"""The page as one file that needs no server and no network: the same figures, as they are now."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from plait.core.base.errors import DataError
from plait.core.base.files import replacing
from plait.core.base.passed_over import PassedOver
from plait.core.record.timeline import SpanKey
from plait.diagnose.heat import orders, pooled
from plait.diagnose.series import attempts_of, series_of
from plait.diagnose.states import STATES
from plait.view.callbacks import memory_of_run, prediction_text, status_of
from plait.view.figure_words import series_words
from plait.view.grid_figure import STANDS_OUT, grid_figure
from plait.view.heat_figure import HeatMarks, heat_figure
from plait.view.series_figure import prediction_figure, series_figure
from plait.view.store import Snapshot, Watched, heat_of
from plait.view.timeline_callbacks import ShownStep, clock_text, link_text, shown_of, side_by_side, span_text
from plait.view.timeline_figure import timeline_figure

ROWS = 200
"""Of a table, at most."""
CELLS = 1024
"""Rows of the heat map: there is nobody to ask for more when somebody zooms."""
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
DRAW = """
document.querySelectorAll("script[data-figure]").forEach(function (one) {
  var figure = JSON.parse(one.textContent);
  Plotly.newPlot(one.dataset.figure, figure.data, figure.layout, {displaylogo: false, responsive: true});
});
"""


def report_run(run: Path, path: Path) -> tuple[int, PassedOver]:
    """Write a run's page into a file; its bytes, and what of the run's files was passed over. Raises
    DataError for a run of which nothing can be shown, and for a file that cannot be written."""
    if not run.is_dir():
        raise DataError(f"{run}: no such run folder")
    watched = Watched(run, run.absolute().name)
    found = watched.read()
    if found.recording is None and not found.hang:
        raise DataError(found.problem or f"{run} holds nothing that can be shown")
    try:
        size = write_report(watched, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    return size, found.run.passed_over if found.run else PassedOver()


def write_report(watched: Watched, path: Path) -> int:
    """Write the page of a run that was read; its bytes. The file appears whole or not at all. Raises
    OSError."""
    text = report_of(watched, watched.snapshot)
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return len(text.encode())


def report_of(watched: Watched, snapshot: Snapshot) -> str:
    """The whole file."""
    from plotly.offline import get_plotlyjs

    style = (Path(__file__).parent / "assets" / "style.css").read_text()
    title = html.escape(f"plait view: {snapshot.name}")
    body = "\n".join(_sections(watched, snapshot))
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title><style>{style}</style></head>
<body><header><h1>{title}</h1><p id="status">{html.escape(status_of(snapshot))}</p></header>
<main>
{body}
</main>
<script>{get_plotlyjs()}</script>
<script>{DRAW}</script>
</body>
</html>
"""


def _sections(watched: Watched, snapshot: Snapshot) -> Iterator[str]:
    yield _section("verdict", "What is wrong", _verdict(snapshot))
    recording = snapshot.recording
    if recording is not None:
        yield _section("heat", "Heat map", _heat(snapshot))
        shown = shown_of(snapshot, _worth_showing(snapshot), None, None)
        if shown and shown.window:
            yield _section("timeline", "Timeline", _timeline(snapshot, shown))
    if snapshot.grid is not None:
        yield _section("grid", "The ranks' grid", _grid(snapshot))
    if snapshot.run is not None:
        series = {snapshot.name: series_of(snapshot.run.metrics)}
        yield _section(
            "progress", "Step time and loss", _told("series-figure", series_figure(series), series_words(series))
        )
        memory = memory_of_run(snapshot)
        yield _section("memory", "Memory", _told("memory-figure", *memory))
        prediction = snapshot.told.prediction if snapshot.told else None
        shown = shown_of(snapshot, {}, "rank", None)
        both = _told("both-figure", *side_by_side(watched, snapshot, shown)) if shown else ""
        figure = _told("prediction-figure", prediction_figure(prediction), prediction_text(snapshot))
        yield _section("predicted", "Predicted and measured", figure + both)
        tries = attempts_of(snapshot.run.attempts, live=snapshot.live)
        heads = ("attempt", "started (UTC)", "ended (UTC)", "outcome", "cause", "hosts", "step reached")
        table = _table(heads, tries[-ROWS:]) if tries else _words("One start, as far as the run's folder tells.")
        yield _section("attempts", "Attempts", table)


def _verdict(snapshot: Snapshot) -> str:
    parts: list[str] = []
    if snapshot.hang and snapshot.hang[0].cause != "none":
        verdict = snapshot.hang[0]
        parts.append(
            f'<p class="alarm"><strong>{html.escape(verdict.heading)}.</strong> {html.escape(verdict.why)}</p>'
        )
    text = snapshot.told.text() if snapshot.told else snapshot.problem
    notes = "".join(f"<li>note: {html.escape(note)}</li>" for note in snapshot.notes)
    return (
        "".join(parts)
        + f'<pre id="text" tabindex="0">{html.escape(text)}</pre>'
        + (f"<ul>{notes}</ul>" if notes else "")
    )


def _heat(snapshot: Snapshot) -> str:
    assert snapshot.recording is not None
    grid = snapshot.recording.grid
    order = orders(grid)[0]
    parts: list[str] = []
    for name, columns in (("heat-figure", "segments"), ("steps-figure", "steps")):
        heat = heat_of(snapshot, "mean", None, order, columns)
        if heat is None or not heat.columns:
            continue
        figure = heat_figure(heat, pooled(heat, CELLS), grid, marks=HeatMarks(named=snapshot.named()), order=order)
        parts.append(_figure(name, figure, f"Heat map of {heat.ranks.size} ranks by {columns}."))
        if columns == "segments":
            words = [text for _, text in snapshot.latest()]
            parts.insert(0, _words("Red in own work: the rank takes longer for it than its equals."))
            parts.append("<h3>Furthest above their equals</h3>" + _list(words))
            parts.append(_words("Below, all own work of every rank, step by step."))
    return "".join(parts) or _words("There are no sums of steps.")


def _grid(snapshot: Snapshot) -> str:
    assert snapshot.grid is not None
    found = snapshot.standings()
    rows = [
        (one.rank, one.host, one.state, one.doing, one.where, one.error, ", ".join(map(str, one.waits_for[:8])))
        for one in found
        if one.state in STANDS_OUT or one.waits_for or one.error
    ]
    there = {one.state for one in found}
    words = "; ".join(f"{state}: {means}" for state, means in STATES.items() if state in there)
    heads = ("rank", "host", "state", "doing", "where", "error", "waits for")
    table = _table(heads, rows[:ROWS]) if rows else ""
    return _told("grid-figure", grid_figure(found, snapshot.grid), words) + table


def _worth_showing(snapshot: Snapshot) -> dict[str, Any]:
    """The longest wait of all for the rank that is named, or of all: whose dependencies tell the most."""
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


def _timeline(snapshot: Snapshot, shown: ShownStep) -> str:
    recording = snapshot.recording
    assert recording is not None and shown.window is not None
    hosts = dict(recording.grid.select("rank", "host").iter_rows())
    figure = timeline_figure(shown.window, origin=shown.origin, chosen=shown.around, hosts=hosts)
    parts = [_words(clock_text(snapshot)), _told("timeline-figure", figure, span_text(shown, recording))]
    if shown.around:
        for title, links in (("What it needed", shown.around.needs), ("What needed it", shown.around.needed_by)):
            parts.append(f"<h3>{title}</h3>" + _list([link_text(link, shown, recording) for link in links[:24]]))
    return "".join(parts)


# ---- HTML, every text escaped ----


def _section(name: str, title: str, inner: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{inner}</section>'


def _words(text: str) -> str:
    return f"<p>{html.escape(text)}</p>" if text else ""


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else _words("nothing")


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(one)}</th>' for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _told(name: str, figure: dict[str, Any], words: str) -> str:
    """A figure, and what it shows in words."""
    return _figure(name, figure, words) + _words(words)


def _figure(name: str, figure: dict[str, Any], words: str = "") -> str:
    """A place for a figure, and what is drawn there, in a form in which no text ends the script. words: for
    who does not see it."""
    text = json.dumps(figure, allow_nan=False, default=_plain)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    said = f' role="img" aria-label="{html.escape(words)}"' if words else ""
    return f'<div id="{name}"{said}></div><script type="application/json" data-figure="{name}">{text}</script>'


def _plain(value: Any) -> Any:
    return value.item()

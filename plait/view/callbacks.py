"""Callbacks from the page's controls to the page's content: verdicts, grid, series over steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from dash import Dash, Input, Output, State, html, no_update

from plait.api.diagnosing import predicted_memory
from plait.core.base.text import seconds_text
from plait.diagnose.rank_map import STATES, RankState, orders
from plait.diagnose.series import attempts_of, memory_of, series_of
from plait.view import heat_callbacks, layout, timeline_callbacks
from plait.view.layout import LATE_FIGURES, graph, on, place_of_figure, unanswered
from plait.view.rank_figures import STANDS_OUT, grid_figure, is_flat
from plait.view.store import Snapshot, Watched, chosen_run, heat_of
from plait.view.time_figures import memory_figure, prediction_figure, series_figure
from plait.view.timeline_callbacks import group_options
from plait.view.words import memory_words, nothing, prediction_words, series_words

ROWS = 60
"""The largest number of rows of a table on the page."""


def connect(app: Dash, runs: Sequence[Watched]) -> None:
    """Register all callbacks of the page."""
    _tick(app, runs)
    outputs = (
        "series-figure.figure memory-figure.figure prediction-figure.figure prediction-text.children "
        "series-words.children memory-words.children"
    )
    numbers = (outputs, "version.data", "", partial(_numbers, runs))
    layout.connect(app, lambda number: chosen_run(runs, number), numbers)


def version_of(number: object, snapshot: Snapshot) -> str:
    """Return a text that changes with every change of the shown content."""
    return f"{number}:{snapshot.generation}"


def first_paint(run: Watched) -> dict[str, Any]:
    """Return the content of the first run's page that is known at once: ``figure``, ``orders``,
    ``besides``, ``version``; empty if its folder was not read yet."""
    snapshot = run.first()
    found = order_options(snapshot)
    if not found:
        return {}
    known: dict[str, Any] = {"orders": found, "besides": group_options(snapshot.grid)}
    heat = heat_of(snapshot, "mean", None, tuple(found[0]["value"].split()), "segments")
    if heat is None:
        return known
    figure = heat_callbacks.figure_of(snapshot, heat, found[0]["value"].split(), "excess", heat_callbacks.HeatCell())
    return {**known, "figure": figure, "version": version_of(0, snapshot)}


def order_options(snapshot: Snapshot) -> list[dict[str, str]]:
    """Return the options of the control that sorts a run's ranks, as Dash expects them (``label``,
    ``value``)."""
    words = {"pp": "stage"}
    return [
        {"value": " ".join(order), "label": ", ".join(words.get(axis, axis) for axis in order)}
        for order in orders(snapshot.grid)
    ] if snapshot.grid is not None else []  # fmt: skip


def _tick(app: Dash, runs: Sequence[Watched]) -> None:
    @cast("Any", app).callback(
        Output("version", "data"), Output("status", "children"), Output("order", "options"), Output("order", "value"),
        Output("beside", "options"), Output("beside", "value"),
        Input("tick", "n_intervals"), Input("run", "value"), State("below", "data"), State("version", "data"),
        State("status", "children"), State("order", "value"), State("beside", "value"),
        # No tick during a callback: Dash drops a callback's result if the callback was triggered again
        # meanwhile, so that a slow machine would never show any.
        running=[(Output("tick", "disabled"), True, False)],
    )  # fmt: skip
    def _look(
        ticks: int | None, number: object, below: object, version: str, status: str, *standing: Any
    ) -> tuple[Any, ...]:
        place = number if isinstance(number, int) and 0 <= number < len(runs) else 0
        snapshot = runs[place].look(all_of_it=bool(ticks))
        line = status_of(snapshot)
        now = version_of(place, snapshot) + ":" * bool(below)
        said = line if line != status else no_update
        if now == version:
            return no_update, said, *[no_update] * 4
        # Content below the heat map is requested once its places exist.
        chosen = [
            part
            for options, value in zip((order_options(snapshot), group_options(snapshot.grid)), standing, strict=True)
            for part in (options, _among(value, options))
        ]
        return now if below else no_update, said, *chosen


def _among(value: Any, options: Sequence[dict[str, str]]) -> Any:
    """Return Dash's ``no_update`` if ``value`` is among the options; otherwise the first option's
    value."""
    known = [one["value"] for one in options]
    return no_update if value in known else next(iter(known), None)


@on(" ".join(f"{place_of_figure(name)}.children" for name in LATE_FIGURES) + " below.data", "painted.data")
def _below(*_: object) -> tuple[Any, ...]:
    return *(graph(name) for name in LATE_FIGURES), True


def status_of(snapshot: Snapshot) -> str:
    """Return one line on the run: name, number of ranks and steps, whether it is running, and
    whether its folder is being read."""
    recording, first = snapshot.recording, snapshot.glance
    parts = [f"{snapshot.name}: "]
    if recording is None and (snapshot.problem or first is None):
        parts.append(snapshot.problem or "reading ...")
    else:
        if recording:
            ranks, steps = recording.ranks, recording.steps
        else:
            assert first is not None
            ranks, steps = first.segments["rank"].n_unique(), [first.first, first.last]
        span = f"steps {steps[0] + 1} to {steps[-1] + 1}" if steps else "no steps"
        parts.append(f"{ranks} ranks, {span}, {'goes on' if snapshot.live else 'has ended'}")
        if snapshot.problem:
            parts.append(f"; this is what was read before: {snapshot.problem}")
    if snapshot.doing:
        parts.append(f"; {snapshot.doing} ...")
    return "".join(parts)


@on("text.children hang.children notes.children attempts-table.children", "version.data")
def _verdict(snapshot: Snapshot, _: str) -> tuple[Any, ...]:
    return text_of(snapshot), hang_of(snapshot), notes_of(snapshot), attempts_table(snapshot)


def text_of(snapshot: Snapshot) -> str:
    """Return the diagnosis of the run as text; or why there is none yet."""
    if snapshot.report:
        return snapshot.report.text()
    return snapshot.problem or f"{snapshot.doing or 'reading all spans'} ..."


def notes_of(snapshot: Snapshot) -> list[Any]:
    """Return components with the notes on skipped content; empty if there are none."""
    return [html.Li(f"note: {note}") for note in snapshot.notes]


def hang_of(snapshot: Snapshot) -> list[Any]:
    """Return components with the verdict on a hang; empty if there is none."""
    if not snapshot.hang or snapshot.hang[0].cause == "none":
        return []
    verdict = snapshot.hang[0]
    return [
        html.P(
            [html.Strong(f"{verdict.heading}."), " ", verdict.why, *(f" Besides: {one.why}" for one in verdict.also)],
            className="alarm",
        )
    ]


def attempts_table(snapshot: Snapshot) -> Any:
    """Return the table of the run's starts, with the outcome of each."""
    found = attempts_of(snapshot.run.attempts, live=snapshot.live) if snapshot.run else []
    if not found:
        return html.P("One start, as far as the run's folder tells: it has no attempts.jsonl.")
    heads = ("attempt", "started (UTC)", "ended (UTC)", "outcome", "cause", "hosts", "step reached")
    return table(heads, found[-ROWS:])


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> html.Table:
    """Return an HTML table with texts in its cells. heads: titles of columns."""
    return html.Table([
        html.Thead(html.Tr([html.Th(head, scope="col") for head in heads])),
        html.Tbody([html.Tr([html.Td(str(cell)) for cell in row]) for row in rows]),
    ])  # fmt: skip


@on("grid-figure.figure grid-table.children", "version.data seen.data")
def _grid(snapshot: Snapshot, _: str, seen: Any) -> tuple[Any, Any]:
    found = snapshot.standings()
    if snapshot.grid is None:
        return nothing(snapshot.problem or "reading ..."), []
    if not seen and not is_flat(snapshot.grid):  # three dimensions are slow without a GPU
        return nothing("drawn as soon as it is in view"), standing_table(found)
    return grid_figure(found, snapshot.grid), standing_table(found)


def standing_table(states: Sequence[RankState]) -> list[Any]:
    """Return components with the number of ranks in each state, and a table of the notable ranks,
    the most important first, at most ``ROWS``."""
    counts = [(sum(one.state == state for one in states), state, means) for state, means in STATES.items()]
    words = "; ".join(f"{n} {state}: {means}" for n, state, means in counts if n)
    order = list(STATES)
    ones = [one for one in states if one.state in STANDS_OUT or one.waits_for or one.error]
    ones.sort(key=lambda one: (order.index(one.state), one.rank))
    rows = [
        (
            one.rank, one.host, one.state, one.doing, one.where, one.error,
            ", ".join(map(str, one.waits_for[:8])) + (" ..." if len(one.waits_for) > 8 else ""),
        )
        for one in ones[:ROWS]
    ]  # fmt: skip
    more = [html.P(f"{len(ones) - ROWS} more ranks are not listed.")] if len(ones) > ROWS else []
    if not rows:
        return [html.P(words)]
    return [html.P(words), table(("rank", "host", "state", "doing", "where", "error", "waits for"), rows), *more]


def _numbers(runs: Sequence[Watched], snapshot: Snapshot, _: Any) -> tuple[Any, ...]:
    others = {one.snapshot.name: one.snapshot for one in runs}
    series = {name: series_of(one.run.metrics) for name, one in others.items() if one.run}
    prediction = snapshot.report.prediction if snapshot.report else None
    first = prediction_figure(prediction) if snapshot.report or snapshot.problem else nothing("reading all spans ...")
    memory, words = memory_of_run(snapshot)
    return series_figure(series), memory, first, prediction_text(snapshot), series_words(series), words


def memory_of_run(snapshot: Snapshot) -> tuple[dict[str, Any], str]:
    """Return (figure of predicted memory by pipeline stage and measured memory over steps, the same
    in words)."""
    if snapshot.run is None:
        return nothing(snapshot.problem or "reading ..."), ""
    run = snapshot.run
    predicted = predicted_memory(run.plan, run.metrics) if run.plan else ()
    measured = memory_of(run.metrics)
    return memory_figure(predicted, measured), memory_words(predicted, measured)


def prediction_text(snapshot: Snapshot) -> str:
    """Return sentences on the predicted and the measured step, and on planned and measured
    overlap."""
    prediction = snapshot.report.prediction if snapshot.report else None
    if prediction is None:
        return ""
    overlap = " ".join(
        f"{one.axis}: {one.planned:.0%} of its communication was to be hidden, {one.measured:.0%} was."
        for one in prediction.overlap
    )
    if prediction.seconds is None:
        return overlap
    steps = snapshot.report.steps if snapshot.report else None
    measured = f", {seconds_text(steps.median)} measured (the median of {steps.count})" if steps else ""
    rows = prediction_words(prediction)
    return f"A step: {seconds_text(prediction.seconds)} predicted{measured}. {overlap} {rows}"


@on(
    "heat-at.data chosen.data zoom.data answered.data",
    "keys.data",
    f"answered.data {timeline_callbacks.CHOSEN} {heat_callbacks.CONTROLS}",
)
def _press(
    snapshot: Snapshot, keys: Any, answered: Any, chosen: Any, zoom: Any, beside: Any, *controls: Any
) -> tuple[Any, ...]:
    """Answer keys on all figures: a key on one figure may move the focus to another, where the next
    key applies. Keys arrive faster than results, and Dash drops the result of a callback that is
    triggered again meanwhile. So every call processes all unanswered keys in order."""
    pressed, count = unanswered(keys, answered)
    heat, now, marked = heat_callbacks.shown_heat(snapshot, controls)
    before = (now, marked), chosen, zoom
    for where, key in pressed:
        if where == "heat-box" and heat and key == "Enter":
            chosen = heat_callbacks.opened(heat, now)
        elif where == "heat-box" and heat:
            now, marked = heat_callbacks.by_key(heat, now, marked, key), True
        elif where == "time-box":
            shown = timeline_callbacks.shown_of(snapshot, chosen, zoom, beside)
            chosen, zoom = timeline_callbacks.by_key(key, shown, chosen, zoom) if shown else (chosen, zoom)
    after = (now, marked), chosen, zoom
    values = (now._asdict(), chosen, zoom)
    changed = [no_update if new == old else value for new, old, value in zip(after, before, values, strict=True)]
    return *changed, count

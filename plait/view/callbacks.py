"""From what the page's controls say to what the page shows: verdicts, grid, numbers over steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from plait.api.diagnosing import predicted_memory
from plait.diagnose.heat import orders
from plait.diagnose.series import attempts_of, memory_of, series_of
from plait.diagnose.states import STATES, Standing
from plait.view import heat_callbacks, key_callbacks, timeline_callbacks
from plait.view.figure_words import memory_words, prediction_words, series_words
from plait.view.grid_figure import STANDS_OUT, grid_figure, is_flat
from plait.view.layout import LATER, graph, place_of_figure
from plait.view.series_figure import memory_figure, prediction_figure, series_figure
from plait.view.store import Snapshot, Watched, chosen_run, heat_of
from plait.view.timeline_callbacks import besides
from plait.view.words import nothing, seconds_text

ROWS = 60
"""Of a table, at most."""


def connect(app: Dash, runs: Sequence[Watched]) -> None:
    """All callbacks of the page."""
    _tick(app, runs)
    _below(app)
    _verdict(app, runs)
    _grid(app, runs)
    _numbers(app, runs)
    heat_callbacks.connect(app, runs)
    timeline_callbacks.connect(app, runs)
    key_callbacks.connect(app, runs)


def version_of(number: object, snapshot: Snapshot) -> str:
    """Another text with every change of what is shown."""
    return f"{number}:{snapshot.generation}"


def first_paint(run: Watched) -> dict[str, Any]:
    """What of the first run's page is known when it is asked for; nothing if its folder was not read yet."""
    snapshot = run.first()
    found = order_options(snapshot)
    if not found:
        return {}
    known: dict[str, Any] = {"orders": found, "besides": besides(snapshot.grid)}
    heat = heat_of(snapshot, "mean", None, tuple(found[0]["value"].split()), "segments")
    if heat is None:
        return known
    figure = heat_callbacks.figure_of(snapshot, heat, found[0]["value"].split(), "excess", heat_callbacks.HeatCell())
    return {**known, "figure": figure, "version": version_of(0, snapshot)}


def order_options(snapshot: Snapshot) -> list[dict[str, str]]:
    """Ways to sort a run's ranks."""
    words = {"pp": "stage"}
    return [
        {"value": " ".join(order), "label": ", ".join(words.get(axis, axis) for axis in order)}
        for order in orders(snapshot.grid)
    ] if snapshot.grid is not None else []  # fmt: skip


def _tick(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("version", "data"), Output("status", "children"), Output("order", "options"), Output("order", "value"),
        Output("beside", "options"), Output("beside", "value"),
        Input("tick", "n_intervals"), Input("run", "value"), State("below", "data"), State("version", "data"),
        State("status", "children"), State("order", "value"), State("beside", "value"),
        # No tick while one is answered: Dash drops an answer if its question was asked again meanwhile, so
        # that a slow machine would never see any.
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
        # What lies below the heat map is asked for once it is there.
        chosen = [
            part
            for options, value in zip((order_options(snapshot), besides(snapshot.grid)), standing, strict=True)
            for part in (options, _among(value, options))
        ]
        return now if below else no_update, said, *chosen


def _among(value: Any, options: Sequence[dict[str, str]]) -> Any:
    """What a choice is to be: as it is, if it is among the options, else the first of them."""
    known = [one["value"] for one in options]
    return no_update if value in known else next(iter(known), None)


def _below(app: Dash) -> None:
    @app.callback(
        *(Output(place_of_figure(name), "children") for name in LATER), Output("below", "data"),
        Input("painted", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def _figures(_: object) -> tuple[Any, ...]:
        return *(graph(name) for name in LATER), True


def status_of(snapshot: Snapshot) -> str:
    """One line: which run, how large, whether it goes on, what is being done."""
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


def _verdict(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("text", "children"), Output("hang", "children"), Output("notes", "children"),
        Output("attempts-table", "children"), Input("version", "data"), State("run", "value"),
        prevent_initial_call=True,
    )  # fmt: skip
    def _tell(_: str, number: object) -> tuple[Any, ...]:
        snapshot = chosen_run(runs, number)
        text = (
            snapshot.told.text()
            if snapshot.told
            else snapshot.problem or f"{snapshot.doing or 'reading all spans'} ..."
        )
        return text, hang_of(snapshot), [html.Li(f"note: {note}") for note in snapshot.notes], attempts_table(snapshot)


def hang_of(snapshot: Snapshot) -> list[Any]:
    """The verdict on a hang, if there is one."""
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
    """How often the run was started, and how each start ended."""
    found = attempts_of(snapshot.run.attempts, live=snapshot.live) if snapshot.run else []
    if not found:
        return html.P("One start, as far as the run's folder tells: it has no attempts.jsonl.")
    heads = ("attempt", "started (UTC)", "ended (UTC)", "outcome", "cause", "hosts", "step reached")
    return table(heads, found[-ROWS:])


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> html.Table:
    """Texts in cells."""
    return html.Table([
        html.Thead(html.Tr([html.Th(head, scope="col") for head in heads])),
        html.Tbody([html.Tr([html.Td(str(cell)) for cell in row]) for row in rows]),
    ])  # fmt: skip


def _grid(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("grid-figure", "figure"), Output("grid-table", "children"), Input("version", "data"),
        Input("seen", "data"), State("run", "value"), prevent_initial_call=True,
    )  # fmt: skip
    def _draw(_: str, seen: Any, number: object) -> tuple[Any, Any]:
        snapshot = chosen_run(runs, number)
        found = snapshot.standings()
        if snapshot.grid is None:
            return nothing(snapshot.problem or "reading ..."), []
        if not seen and not is_flat(snapshot.grid):  # three dimensions are dear where there is no GPU
            return nothing("drawn as soon as it is in view"), standing_table(found)
        return grid_figure(found, snapshot.grid), standing_table(found)


def standing_table(found: Sequence[Standing]) -> list[Any]:
    """How many ranks are in each state; those that matter one by one, the most important first."""
    counts = [(sum(one.state == state for one in found), state, means) for state, means in STATES.items()]
    words = "; ".join(f"{n} {state}: {means}" for n, state, means in counts if n)
    order = list(STATES)
    ones = [one for one in found if one.state in STANDS_OUT or one.waits_for or one.error]
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


def _numbers(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("series-figure", "figure"), Output("memory-figure", "figure"), Output("prediction-figure", "figure"),
        Output("prediction-text", "children"), Output("series-words", "children"), Output("memory-words", "children"),
        Input("version", "data"), State("run", "value"),
        prevent_initial_call=True,
    )  # fmt: skip
    def _draw(_: str, number: object) -> tuple[Any, ...]:
        snapshot = chosen_run(runs, number)
        others = {one.snapshot.name: one.snapshot for one in runs}
        series = {name: series_of(one.run.metrics) for name, one in others.items() if one.run}
        prediction = snapshot.told.prediction if snapshot.told else None
        first = prediction_figure(prediction) if snapshot.told or snapshot.problem else nothing("reading all spans ...")
        memory, words = memory_of_run(snapshot)
        return series_figure(series), memory, first, prediction_text(snapshot), series_words(series), words


def memory_of_run(snapshot: Snapshot) -> tuple[dict[str, Any], str]:
    """Of every place of the pipeline, as predicted, and what was measured; and the same in words."""
    if snapshot.run is None:
        return nothing(snapshot.problem or "reading ..."), ""
    run = snapshot.run
    predicted = predicted_memory(run.plan, run.metrics) if run.plan else ()
    measured = memory_of(run.metrics)
    return memory_figure(predicted, measured), memory_words(predicted, measured)


def prediction_text(snapshot: Snapshot) -> str:
    """The step as a whole, and overlap that did not happen."""
    prediction = snapshot.told.prediction if snapshot.told else None
    if prediction is None:
        return ""
    overlap = " ".join(
        f"{one.axis}: {one.planned:.0%} of its communication was to be hidden, {one.measured:.0%} was."
        for one in prediction.overlap
    )
    if prediction.seconds is None:
        return overlap
    steps = snapshot.told.steps if snapshot.told else None
    measured = f", {seconds_text(steps.median)} measured (the median of {steps.count})" if steps else ""
    rows = prediction_words(prediction)
    return f"A step: {seconds_text(prediction.seconds)} predicted{measured}. {overlap} {rows}"

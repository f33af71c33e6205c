"""The timeline's controls, keys and clicks: which span is chosen, and what it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl
from dash import ALL, Dash, Input, Output, State, ctx, html, no_update

from plait.core.record.timeline import SpanKey
from plait.diagnose.compare import UNMEASURED
from plait.diagnose.dependencies import Around, Dependency, around
from plait.diagnose.places import place_of
from plait.diagnose.recording import AFTER, Recording
from plait.diagnose.window import SpanWindow, shifted, together, window
from plait.view.figure_words import spans_words
from plait.view.layout import WITH
from plait.view.moves import is_number, next_span, point_of
from plait.view.store import Snapshot, Watched, chosen_run
from plait.view.timeline_figure import timeline_figure
from plait.view.words import nothing, seconds_text

LINKED = 12
"""Ranks of dependencies that are shown beside those that were asked for."""
WAYS = ("needs", "needed by")
CHOSEN = (State("chosen", "data"), State("zoom", "data"), State("beside", "value"), State("run", "value"))


class ShownStep(NamedTuple):
    """What the timeline shows. spans: of the step, with clocks led to each other. origin: where it begins."""

    rank: int
    step: int
    spans: pl.DataFrame
    ranks: list[int]
    window: SpanWindow | None
    origin: float
    around: Around | None


def connect(app: Dash, runs: Sequence[Watched]) -> None:
    """The callbacks; one for each cause, as for the heat map."""
    _click(app, runs)
    _follow(app, runs)
    _ask(app)
    _draw(app, runs)
    _compare(app, runs)

    @app.callback(Output("chosen", "data"), Output("zoom", "data"), Input("run", "value"), prevent_initial_call=True)
    def _other_run(_: Any) -> tuple[Any, Any]:
        return {}, None

    @app.callback(
        Output("zoom", "data", allow_duplicate=True), Input("timeline-figure", "relayoutData"), State("zoom", "data"),
        prevent_initial_call=True,
    )  # fmt: skip
    def _moved(moved: Any, zoom: Any) -> Any:
        return _zoomed(moved, zoom)

    @app.callback(
        Output("chosen", "data", allow_duplicate=True), Output("zoom", "data", allow_duplicate=True),
        Input("grid-figure", "clickData"), prevent_initial_call=True,
    )  # fmt: skip
    def _in_grid(click: Any) -> tuple[Any, Any]:
        one = point_of(click).get("customdata")
        return ({"rank": int(one)}, None) if is_number(one) else (no_update, no_update)


def shown_of(snapshot: Snapshot, chosen: Any, beside: object, zoom: Any) -> ShownStep | None:
    """chosen: ``rank``, ``step`` and ``span`` (a key), as far as they are. None where no spans were kept."""
    chosen = chosen if isinstance(chosen, dict) else {}
    recording = snapshot.recording
    if recording is None or recording.spans.is_empty():
        return None
    rank = chosen.get("rank")
    rank = int(rank) if is_number(rank) else first_rank(snapshot)
    step = step_of(recording, rank, chosen.get("step"))
    if step is None:
        return None
    spans = recording.spans.filter(pl.col("step") == step)
    spans = shifted(spans, snapshot.clocks.offsets if snapshot.clocks else {})
    key = key_of(chosen.get("span"))
    agree = recording.clocks_agree or bool(snapshot.clocks and not snapshot.clocks.lost)
    found = around(spans, key, clocks_agree=agree) if key and key.step == step else None
    company = str(beside) if str(beside) in WITH else besides(recording.grid)[0]["value"]
    ranks = together(recording.grid, rank, company)  # type: ignore[arg-type]
    linked = [link.key.rank for link in (*found.needs, *found.needed_by)] if found else []
    ranks += [one for one in dict.fromkeys(linked) if one not in ranks][:LINKED]
    own = spans.filter(pl.col("rank").is_in(ranks))
    origin = float(own["start"].min() or 0.0)  # type: ignore[arg-type]
    between = None
    if isinstance(zoom, list) and len(zoom) == 2 and all(map(is_number, zoom)):
        between = origin + zoom[0] / 1e3, origin + zoom[1] / 1e3
    return ShownStep(rank, step, spans, ranks, window(own, ranks, (step, step), between=between), origin, found)


def besides(grid: pl.DataFrame | None) -> list[dict[str, str]]:
    """Whom a rank can be shown beside: those of an axis on which ranks differ, of its host, nobody."""
    if grid is None:
        return []
    axes = [axis for axis in ("pp", "dp", "tp", "cp") if grid[axis].n_unique() > 1]
    hosts = ["host"] if grid["host"].drop_nulls().is_duplicated().any() else []
    return [{"value": axis, "label": WITH[axis]} for axis in (*axes, *hosts, "rank")]


def first_rank(snapshot: Snapshot) -> int:
    """Whose timeline is shown before anybody has asked: a rank that is named, else the first with spans."""
    recording = snapshot.recording
    assert recording is not None
    there = recording.spans["rank"].unique()
    return next((rank for rank in snapshot.named() if rank in there), int(there.min() or 0))  # type: ignore[arg-type]


def step_of(recording: Recording, rank: int, wanted: Any) -> int | None:
    """The step that is wanted, if the rank's spans of it were kept; else the nearest; the last if none is."""
    steps = recording.spans.filter(pl.col("rank") == rank)["step"].unique().sort()
    if steps.is_empty():
        return None
    if not isinstance(wanted, int):
        return int(steps[-1])
    return min(steps.to_list(), key=lambda step: abs(step - wanted))


def key_of(values: Any) -> SpanKey | None:
    """A span's key, as it comes with a request; None for anything else."""
    kinds = (int, int, str, str, int)
    if not isinstance(values, list) or len(values) != len(kinds):
        return None
    if not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        return None
    return SpanKey(*values)


def _click(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("chosen", "data", allow_duplicate=True), Output("zoom", "data", allow_duplicate=True),
        Input("timeline-figure", "clickData"), *CHOSEN, prevent_initial_call=True,
    )  # fmt: skip
    def _bar(click: Any, chosen: Any, zoom: Any, beside: Any, number: Any) -> tuple[Any, Any]:
        shown = shown_of(chosen_run(runs, number), chosen, beside, zoom)
        return _clicked(click, shown) if shown else (no_update, no_update)


def _follow(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("chosen", "data", allow_duplicate=True), Input({"kind": "link", "way": ALL, "n": ALL}, "n_clicks"),
        *CHOSEN, prevent_initial_call=True,
    )  # fmt: skip
    def _linked(_: Any, chosen: Any, zoom: Any, beside: Any, number: Any) -> Any:
        cause = ctx.triggered_id
        shown = shown_of(chosen_run(runs, number), chosen, beside, zoom)
        if shown is None or shown.around is None or not isinstance(cause, dict) or not ctx.triggered[0]["value"]:
            return no_update
        links = shown.around.needs if cause.get("way") == WAYS[0] else shown.around.needed_by
        n = cause.get("n")
        return _with(links[int(n)].key) if is_number(n) and 0 <= n < len(links) else no_update


def _ask(app: Dash) -> None:
    @app.callback(
        Output("chosen", "data", allow_duplicate=True), Output("zoom", "data", allow_duplicate=True),
        Input("rank", "value"), Input("step", "value"), State("shown", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def _numbers(rank: Any, step: Any, shown: Any) -> tuple[Any, Any]:
        now = shown if isinstance(shown, dict) else {}
        wanted = {"rank": rank if isinstance(rank, int) else now.get("rank")}
        wanted["step"] = step - 1 if isinstance(step, int) else now.get("step")
        # A figure writes into these fields, too, and says so in the same answer.
        return (no_update, no_update) if wanted == now else (wanted, None)


def _with(key: SpanKey) -> dict[str, Any]:
    return {"rank": key.rank, "step": key.step, "span": list(key)}


def _zoomed(moved: Any, zoom: Any) -> Any:
    moved = moved if isinstance(moved, dict) else {}
    if moved.get("xaxis.autorange"):
        return no_update if zoom is None else None
    ends = [moved.get("xaxis.range[0]"), moved.get("xaxis.range[1]")]
    return ends if all(map(is_number, ends)) and ends != zoom else no_update


def _clicked(click: Any, shown: ShownStep) -> tuple[Any, Any]:
    """A bar: its span; of several put together, a closer look."""
    number = point_of(click).get("customdata")
    bars = shown.window.bars if shown.window else pl.DataFrame()
    if not is_number(number) or not 0 <= int(number) < bars.height:
        return no_update, no_update
    one = bars.row(int(number), named=True)
    if one["count"] > 1:
        return no_update, _around(one, shown, 4 * (one["end"] - one["start"]))
    return _with(SpanKey(one["step"], one["rank"], one["kind"], one["name"], one["seq"])), no_update


def _around(span: Mapping[str, Any], shown: ShownStep, length: float) -> list[float]:
    middle = (span["start"] + span["end"]) / 2 - shown.origin
    return [(middle - length / 2) * 1e3, (middle + length / 2) * 1e3]


def by_key(key: str, shown: ShownStep, chosen: Any, zoom: Any) -> tuple[Any, Any]:
    """What a key makes of what is chosen and of the zoom."""
    view = shown.window
    if view is None:
        return chosen, zoom
    if key == "0":
        return chosen, None
    if key in ("+", "=", "-"):
        length = (view.end - view.begin) * (4 if key == "-" else 0.25)
        middle = {"start": view.begin, "end": view.end}
        return chosen, _around(shown.around.span if shown.around else middle, shown, length)
    if key in ("n", "b") and shown.around:
        link = shown.around.held_up_by if key == "n" else next(iter(shown.around.needed_by), None)
        return (_with(link.key), zoom) if link else (chosen, zoom)
    if key.startswith("Arrow"):
        one = shown.around.span if shown.around else None
        at = SpanKey(*(one[name] for name in SpanKey._fields)) if one else SpanKey(-1, shown.rank, "", "", -1)
        to = next_span(view.bars, at, key)
        return (_with(to), zoom) if to else (chosen, zoom)
    return chosen, zoom


def _draw(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("timeline-figure", "figure"), Output("span", "children"), Output("links", "children"),
        Output("rank", "value"), Output("step", "value"), Output("shown", "data"), Output("clocks", "children"),
        Input("version", "data"), Input("chosen", "data"), Input("zoom", "data"), Input("beside", "value"),
        State("run", "value"), prevent_initial_call=True,
    )  # fmt: skip
    def _figure(_: str, chosen: Any, zoom: Any, beside: Any, number: Any) -> tuple[Any, ...]:
        snapshot = chosen_run(runs, number)
        shown = shown_of(snapshot, chosen, beside, zoom)
        if shown is None or shown.window is None or snapshot.recording is None:
            kept = _kept(snapshot)
            return nothing(kept), "", [], no_update, no_update, no_update, ""
        hosts = dict(snapshot.recording.grid.select("rank", "host").iter_rows())
        figure = timeline_figure(shown.window, origin=shown.origin, chosen=shown.around, hosts=hosts)
        return (
            figure, span_text(shown, snapshot.recording), links_of(shown, snapshot.recording), shown.rank,
            shown.step + 1, {"rank": shown.rank, "step": shown.step}, clock_text(snapshot),
        )  # fmt: skip


def _compare(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("both-figure", "figure"), Output("both-words", "children"), Input("version", "data"),
        Input("chosen", "data"), State("run", "value"),
        prevent_initial_call=True,
    )  # fmt: skip
    def _both(_: str, chosen: Any, number: Any) -> tuple[dict[str, Any], str]:
        snapshot = chosen_run(runs, number)
        shown = shown_of(snapshot, chosen, "rank", None)
        return side_by_side(runs[0], snapshot, shown) if shown else (nothing(_kept(snapshot)), "")


def _kept(snapshot: Snapshot) -> str:
    """Why no spans are shown."""
    return "No spans of this rank were kept." if snapshot.told else snapshot.problem or "reading all spans ..."


def clock_text(snapshot: Snapshot) -> str:
    """How far times of different ranks can be compared."""
    clocks = snapshot.clocks
    if clocks is None or (not clocks.offsets and not clocks.lost):
        return "All ranks have one clock."
    lost = (
        f" The clock of {', '.join(clocks.lost[:5])} could not be compared: nothing can be said of the order of what "
        "happens there and elsewhere." if clocks.lost else ""
    )  # fmt: skip
    if clocks.error == 0:
        return lost.strip()
    return (
        f"Clocks of hosts were led to each other by the ends of common collectives; what lies closer together than "
        f"{seconds_text(clocks.error)} on two hosts has no order.{lost}"
    )


def side_by_side(run: Watched, snapshot: Snapshot, shown: ShownStep) -> tuple[dict[str, Any], str]:
    """The rank's step as the plan predicts it, above the step as it was; and both in words. What came after
    the step is no part of either."""
    plan = snapshot.run.plan if snapshot.run else None
    if plan is not None and not plan.costs:
        return nothing("The plan holds no measured costs to be compared with."), UNMEASURED
    predicted = run.predicted(plan, [shown.rank]) if plan else None
    if predicted is None or predicted.is_empty():
        return nothing("The run has no plan that could be simulated."), ""
    measured = shown.spans.filter((pl.col("rank") == shown.rank) & ~pl.col("kind").is_in(AFTER))
    parts: list[pl.DataFrame] = []
    for place, part in enumerate((predicted, measured)):  # told apart by a rank of their own
        begin = part["start"].min() or 0.0
        times = (pl.col("start") - begin, pl.col("end") - begin)
        parts.append(part.with_columns(*times, rank=pl.lit(place, pl.Int32), step=pl.lit(0, pl.Int64)))
    both = window(pl.concat(parts, how="vertical_relaxed"), [0, 1], (0, 0), most=2000)
    if both is None:
        return nothing("Neither has spans."), ""
    lanes = both.bars.select("rank", "lane").unique(maintain_order=True).iter_rows()
    titles = [f"{('predicted', 'measured')[place]} {lane}" for place, lane in lanes]
    figure = timeline_figure(both, origin=0.0, titles=titles)
    figure["layout"]["xaxis"]["title"]["text"] = f"rank {shown.rank}, step {shown.step + 1}: ms from its begin"
    return figure, " ".join(map(spans_words, ("Predicted", "Measured"), (predicted, measured)))


def span_text(shown: ShownStep, recording: Recording) -> str:
    """The chosen span in words."""
    if shown.around is None:
        ranks = f"{len(shown.ranks)} rank{'s' if len(shown.ranks) > 1 else ''}"
        assert shown.window is not None
        more = "" if shown.window.single else " Neighbouring short spans are drawn together: zoom in to see each."
        return f"Step {shown.step + 1} of {ranks}.{more} Choose a span to see what it depends on."
    one = shown.around.span
    size = f", {one['bytes']:,} bytes" if one["bytes"] else ""
    group = f", {one['axis']} group of rank {one['group']}" if one["axis"] and one["group"] else ""
    return (
        f"{place_of(recording.grid, one['rank'])}, step {one['step'] + 1}: {one['kind']} {one['name']}, "
        f"{seconds_text(one['end'] - one['start'])}, from {seconds_text(one['start'] - shown.origin)} on{group}{size}"
    )


def links_of(shown: ShownStep, recording: Recording) -> list[Any]:
    """Buttons to what the span needed and what needed it."""
    if shown.around is None:
        return []
    found: list[Any] = []
    for way, links in zip(WAYS, (shown.around.needs, shown.around.needed_by), strict=True):
        buttons = [
            html.Button(
                link_text(link, shown, recording), id={"kind": "link", "way": way, "n": n}, n_clicks=0,
                className="named" if link.last else "",
            )
            for n, link in enumerate(links[:24])
        ]  # fmt: skip
        title = "What it needed" if way == WAYS[0] else "What needed it"
        found.append(html.Div([html.H3(title), *(buttons or [html.P("nothing that was recorded")])]))
    return found


WHY = {
    "order": "before or after it on its rank", "collective": "the collective", "member": "takes part too",
    "transfer": "the transfer", "wait": "waits for it",
}  # fmt: skip


def link_text(link: Dependency, shown: ShownStep, recording: Recording) -> str:
    """A neighbour in words."""
    last = f", LAST to come, {seconds_text(link.late)} after the first" if link.last else ""
    axis = f"{link.axis}: " if link.axis else ""
    return (
        f"{axis}{place_of(recording.grid, link.key.rank)}: {link.key.kind} {link.key.name} ({WHY[link.why]}{last}), "
        f"{seconds_text(link.start - shown.origin)} to {seconds_text(link.end - shown.origin)}"
    )

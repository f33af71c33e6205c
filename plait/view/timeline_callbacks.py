"""Callbacks for the timeline's controls, keys and clicks: the chosen span and its dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import polars as pl
from dash import ALL, Input, ctx, html, no_update

from plait.api.diagnosing import page_predictions
from plait.core.base.codec.json_text import is_list, is_table
from plait.core.base.text import seconds_text
from plait.core.record.timeline import SpanKey
from plait.diagnose.measured.compare import UNMEASURED
from plait.diagnose.measured.dependencies import Dependency, SpanDependencies, dependencies_of, is_span
from plait.diagnose.measured.recording import AFTER, Recording, rank_phrase
from plait.view.layout import WITH, is_number, on, point_of
from plait.view.store import Snapshot
from plait.view.time_figures import SpanWindow, shifted, timeline_figure, together, window
from plait.view.words import nothing, spans_words

LINKED = 12
"""The largest number of ranks that are shown, besides the requested ones, since the chosen span
depends on them or they on it."""
WAYS = ("needs", "needed by")
CHOSEN = "chosen.data zoom.data beside.value"
predicted_spans = page_predictions()


class ShownStep(NamedTuple):
    """The content of the timeline. rank, step: the chosen ones, the step from 0. spans: of the
    step, with aligned clocks. ranks: those shown. window: the bars; None without spans in view.
    origin: begin of the step, in seconds. around: the chosen span with its dependencies; None: no
    span is chosen."""

    rank: int
    step: int
    spans: pl.DataFrame
    ranks: list[int]
    window: SpanWindow | None
    origin: float
    around: SpanDependencies | None


@on("chosen.data zoom.data", "run.value")
def _reset_choice(*_: Any) -> tuple[Any, Any]:
    return {}, None


@on("zoom.data", "timeline-figure.relayoutData", "zoom.data")
def _zoomed(_: Snapshot, moved: Any, zoom: Any) -> Any:
    moved = moved if is_table(moved) else {}
    if moved.get("xaxis.autorange"):
        return no_update if zoom is None else None
    ends = [moved.get("xaxis.range[0]"), moved.get("xaxis.range[1]")]
    return ends if all(map(is_number, ends)) and ends != zoom else no_update


@on("chosen.data zoom.data", "grid-figure.clickData")
def _in_grid(_: Snapshot, click: Any) -> tuple[Any, Any]:
    one = point_of(click).get("customdata")
    return ({"rank": int(one)}, None) if is_number(one) else (no_update, no_update)


def shown_of(snapshot: Snapshot, chosen: Any, zoom: Any, group: object) -> ShownStep | None:
    """Return the content of the timeline; None if no spans were kept. chosen: ``rank``, ``step``
    and ``span`` (a key), as far as chosen. zoom: begin and end in seconds; None: the whole step.
    group: which other ranks are shown."""
    chosen = chosen if is_table(chosen) else {}
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
    found = dependencies_of(spans, key, clocks_agree=agree) if key and key.step == step else None
    company = str(group) if str(group) in WITH else group_options(recording.grid)[0]["value"]
    ranks = together(recording.grid, rank, company)  # type: ignore[arg-type]
    linked = [link.key.rank for link in (*found.needs, *found.needed_by)] if found else []
    ranks += [one for one in dict.fromkeys(linked) if one not in ranks][:LINKED]
    own = spans.filter(pl.col("rank").is_in(ranks))
    origin = float(own["start"].min() or 0.0)  # type: ignore[arg-type]
    between = None
    if is_list(zoom) and len(zoom) == 2 and all(map(is_number, zoom)):
        between = origin + zoom[0] / 1e3, origin + zoom[1] / 1e3
    return ShownStep(rank, step, spans, ranks, window(own, ranks, (step, step), between=between), origin, found)


def group_options(grid: pl.DataFrame | None) -> list[dict[str, str]]:
    """Return the options for ranks to show together with a rank: of an axis on which ranks differ,
    of its host, or none."""
    if grid is None:
        return []
    axes = [axis for axis in ("pp", "dp", "tp", "cp") if grid[axis].n_unique() > 1]
    hosts = ["host"] if grid["host"].drop_nulls().is_duplicated().any() else []
    return [{"value": axis, "label": WITH[axis]} for axis in (*axes, *hosts, "rank")]


def first_rank(snapshot: Snapshot) -> int:
    """Return the rank that is shown before any is chosen: a named rank, or else the first with
    spans."""
    recording = snapshot.recording
    assert recording is not None
    there = recording.spans["rank"].unique()
    return next((rank for rank in snapshot.named() if rank in there), int(there.min() or 0))  # type: ignore[arg-type]


def step_of(recording: Recording, rank: int, wanted: Any) -> int | None:
    """Return the step to show, from 0: ``wanted`` if the rank's spans of it were kept, or else the
    nearest; the last if ``wanted`` is invalid; None if no spans of the rank were kept."""
    steps = recording.spans.filter(pl.col("rank") == rank)["step"].unique().sort()
    if steps.is_empty():
        return None
    if not isinstance(wanted, int):
        return int(steps[-1])
    return min(steps.to_list(), key=lambda step: abs(step - wanted))


def key_of(values: Any) -> SpanKey | None:
    """Return a span's key from a request; None for an invalid value."""
    kinds = (int, int, str, str, int)
    if not is_list(values) or len(values) != len(kinds):
        return None
    if not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        return None
    return SpanKey(*values)


@on("chosen.data zoom.data", "timeline-figure.clickData", CHOSEN)
def _clicked(snapshot: Snapshot, click: Any, *asked: Any) -> tuple[Any, Any]:
    """Return (the new choice, the new zoom) after a click on a bar: its span is chosen; for a bar
    of several spans, the zoom goes to it."""
    shown, number = shown_of(snapshot, *asked), point_of(click).get("customdata")
    bars = shown.window.bars if shown and shown.window else pl.DataFrame()
    if not shown or not is_number(number) or not 0 <= int(number) < bars.height:
        return no_update, no_update
    one = bars.row(int(number), named=True)
    if one["count"] > 1:
        return no_update, _around(one, shown, 4 * (one["end"] - one["start"]))
    return _with(SpanKey(one["step"], one["rank"], one["kind"], one["name"], one["seq"])), no_update


@on("chosen.data", Input({"kind": "link", "way": ALL, "n": ALL}, "n_clicks"), CHOSEN)
def _linked(snapshot: Snapshot, _: Any, *asked: Any) -> Any:
    cause, shown = cast("Any", ctx).triggered_id, shown_of(snapshot, *asked)
    if shown is None or shown.around is None or not is_table(cause) or not ctx.triggered[0]["value"]:
        return no_update
    links = shown.around.needs if cause.get("way") == WAYS[0] else shown.around.needed_by
    n = cause.get("n")
    return _with(links[int(n)].key) if is_number(n) and 0 <= n < len(links) else no_update


@on("chosen.data zoom.data", "rank.value step.value", "shown.data")
def _numbers(_: Snapshot, rank: Any, step: Any, shown: Any) -> tuple[Any, Any]:
    now = shown if is_table(shown) else {}
    wanted = {"rank": rank if isinstance(rank, int) else now.get("rank")}
    wanted["step"] = step - 1 if isinstance(step, int) else now.get("step")
    # Drawing a figure also writes these fields, and stores the same values in ``shown``.
    return (no_update, no_update) if wanted == now else (wanted, None)


def _with(key: SpanKey) -> dict[str, Any]:
    return {"rank": key.rank, "step": key.step, "span": list(key)}


def _around(span: Mapping[str, Any], shown: ShownStep, length: float) -> list[float]:
    middle = (span["start"] + span["end"]) / 2 - shown.origin
    return [(middle - length / 2) * 1e3, (middle + length / 2) * 1e3]


def by_key(key: str, shown: ShownStep, chosen: Any, zoom: Any) -> tuple[Any, Any]:
    """Return (the chosen span, the zoom) after a key on the timeline."""
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


@on(
    "timeline-figure.figure span.children links.children rank.value step.value shown.data clocks.children",
    f"version.data {CHOSEN}",
)
def _figure(snapshot: Snapshot, _: str, *asked: Any) -> tuple[Any, ...]:
    shown = shown_of(snapshot, *asked)
    if shown is None or shown.window is None or snapshot.recording is None:
        return nothing(_kept(snapshot)), "", [], no_update, no_update, no_update, ""
    return (
        figure_of(shown, snapshot.recording), span_text(shown, snapshot.recording),
        links_of(shown, snapshot.recording), shown.rank, shown.step + 1, {"rank": shown.rank, "step": shown.step},
        clock_text(snapshot),
    )  # fmt: skip


def figure_of(shown: ShownStep, recording: Recording) -> dict[str, Any]:
    """Return the timeline of a step whose window has spans, as a plotly figure."""
    assert shown.window is not None
    hosts = dict(recording.grid.select("rank", "host").iter_rows())
    return timeline_figure(shown.window, origin=shown.origin, chosen=shown.around, hosts=hosts)


@on("both-figure.figure both-words.children", "version.data chosen.data")
def _both(snapshot: Snapshot, _: str, chosen: Any) -> tuple[dict[str, Any], str]:
    shown = shown_of(snapshot, chosen, None, "rank")
    return side_by_side(snapshot, shown) if shown else (nothing(_kept(snapshot)), "")


def _kept(snapshot: Snapshot) -> str:
    """Return a text on why no spans are shown."""
    return "No spans of this rank were kept." if snapshot.report else snapshot.problem or "reading all spans ..."


def clock_text(snapshot: Snapshot) -> str:
    """Return a sentence on how precisely times of different ranks can be compared."""
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
        f"Clocks of hosts were aligned by the ends of common collectives; events of two hosts that are less than "
        f"{seconds_text(clocks.error)} apart cannot be ordered.{lost}"
    )


def side_by_side(snapshot: Snapshot, shown: ShownStep) -> tuple[dict[str, Any], str]:
    """Return (figure of the rank's predicted step above the measured step, both in words). Spans
    after the step are left out."""
    plan = snapshot.run.plan if snapshot.run else None
    if plan is not None and not plan.costs:
        return nothing("The plan holds no measured costs to be compared with."), UNMEASURED
    predicted = predicted_spans(plan, [shown.rank]) if plan else None
    if predicted is None or predicted.is_empty():
        return nothing("The run has no plan that could be simulated."), ""
    measured = shown.spans.filter((pl.col("rank") == shown.rank) & ~pl.col("kind").is_in(AFTER))
    parts: list[pl.DataFrame] = []
    for place, part in enumerate((predicted, measured)):  # a pseudo-rank for each part
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
    """Return the chosen span in words."""
    if shown.around is None:
        ranks = f"{len(shown.ranks)} rank{'s' if len(shown.ranks) > 1 else ''}"
        assert shown.window is not None
        more = "" if shown.window.single else " Neighbouring short spans are drawn together: zoom in to see each."
        return f"Step {shown.step + 1} of {ranks}.{more} Choose a span to see what it depends on."
    one = shown.around.span
    size = f", {one['bytes']:,} bytes" if one["bytes"] else ""
    group = f", {one['axis']} group of rank {one['group']}" if one["axis"] and one["group"] else ""
    return (
        f"{rank_phrase(recording.grid, one['rank'])}, step {one['step'] + 1}: {one['kind']} {one['name']}, "
        f"{seconds_text(one['end'] - one['start'])}, from {seconds_text(one['start'] - shown.origin)} on{group}{size}"
    )


def links_of(shown: ShownStep, recording: Recording) -> list[Any]:
    """Return buttons to the span's dependencies and dependents."""
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
    """Return a dependency in words."""
    last = f", LAST to come, {seconds_text(link.late)} after the first" if link.last else ""
    axis = f"{link.axis}: " if link.axis else ""
    return (
        f"{axis}{rank_phrase(recording.grid, link.key.rank)}: {link.key.kind} {link.key.name} ({WHY[link.why]}{last}), "
        f"{seconds_text(link.start - shown.origin)} to {seconds_text(link.end - shown.origin)}"
    )


def next_span(bars: pl.DataFrame, key: SpanKey, press: str) -> SpanKey | None:
    """Return the key of the span next to the one with ``key``; None if there is none. press:
    ArrowLeft, ArrowRight: the previous or next span in the lane. ArrowUp, ArrowDown: the span at
    the same time in the row above or below. bars: of a window, in the order of rows.

    If no span has the key, return the first span of the key's rank, or else the first of all."""
    single = bars.filter(pl.col("count") == 1)
    own = single.filter(is_span(key))
    if own.is_empty():
        of_rank = single.filter(pl.col("rank") == key.rank)
        return _key(single if of_rank.is_empty() else of_rank, 0)
    one = own.row(0, named=True)
    if press in ("ArrowLeft", "ArrowRight"):
        lane = single.filter(pl.col("rank") == one["rank"], pl.col("lane") == one["lane"]).sort("start", "end")
        return _key(lane, int(lane.select(is_span(key).arg_max()).item()) + (1 if press == "ArrowRight" else -1))
    rows = list(single.select("rank", "lane").unique(maintain_order=True).iter_rows())
    at = rows.index((one["rank"], one["lane"])) + (1 if press == "ArrowDown" else -1)
    if not 0 <= at < len(rows):
        return None
    rank, lane = rows[at]
    other = single.filter(pl.col("rank") == rank, pl.col("lane") == lane)
    middle = (one["start"] + one["end"]) / 2
    away = pl.max_horizontal(pl.col("start") - middle, middle - pl.col("end"), 0.0)
    return _key(other.sort(away, "start"), 0)


def _key(bars: pl.DataFrame, row: int) -> SpanKey | None:
    """Return the key of the span in a row of ``bars``; None for a row out of range."""
    return SpanKey(*bars.select(SpanKey._fields).row(row)) if 0 <= row < bars.height else None

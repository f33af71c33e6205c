"""The heat map's controls, keys and clicks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, html, no_update

from plait.diagnose.heat import STATISTICS, Heat, Unlike, pooled, unlike
from plait.view.heat_figure import Value, cell_text, heat_figure, place_of
from plait.view.moves import Place, around_row, moved
from plait.view.store import Snapshot, Watched, chosen_run, heat_of
from plait.view.words import nothing, seconds_text

CELLS = 512
"""Rows that are drawn at once: as many as there are pixels."""
WANTED = ("value", "statistic", "columns", "order", "first", "last")


def figure_of(
    snapshot: Snapshot, heat: Heat, order: Sequence[str], value: Value, at: Place, marked: bool = False
) -> dict[str, Any]:
    """The map with the ranks that the diagnosis names."""
    assert snapshot.grid is not None
    shown = pooled(heat, CELLS, at.window)
    return heat_figure(
        heat, shown, snapshot.grid, order=order, value=value, named=snapshot.named(),
        cursor=(at.row, at.column) if marked else None,
    )  # fmt: skip


def place(data: Mapping[str, Any] | None, heat: Heat) -> tuple[Place, bool]:
    """Where the marked cell is, inside the map whatever a request says; and whether there is one."""
    values = data if isinstance(data, dict) else {}
    rows, columns = heat.ranks.size, len(heat.columns)

    def number(name: str, most: int) -> int:
        value = values.get(name)
        return max(0, min(int(value), most - 1)) if isinstance(value, int | float) else 0

    window = values.get("window")
    both = isinstance(window, list) and len(window) == 2 and all(isinstance(one, int | float) for one in window)
    ends = (max(0, int(window[0])), min(rows, int(window[1]))) if both and window else None
    ends = ends if ends and ends[1] - ends[0] >= 1 and ends != (0, rows) else None
    return Place(number("row", rows), number("column", columns), ends), "row" in values


def asked(snapshot: Snapshot, controls: Sequence[Any]) -> tuple[Heat | None, list[str], Value]:
    """The heat map that the controls ask for; what they may not ask for counts as not asked."""
    value, statistic, columns, order, first, last = controls
    names = [name for name in str(order or "").split() if name in ("pp", "dp", "cp", "tp", "host")]
    steps = None
    if isinstance(first, int) or isinstance(last, int):
        steps = ((first or 1) - 1, (last or 1 << 40) - 1)
    heat = heat_of(
        snapshot, statistic if statistic in STATISTICS else "mean", steps, tuple(names or ("pp", "dp", "cp", "tp")),
        "steps" if columns == "steps" else "segments",
    )  # fmt: skip
    return heat, names, "seconds" if value == "seconds" else "excess"


def connect(app: Dash, runs: Sequence[Watched]) -> None:
    """The callbacks."""
    _move(app, runs)
    _draw(app, runs)


def _move(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("heat-at", "data"), Output("chosen", "data", allow_duplicate=True),
        Input("keys", "data"), Input("heat-figure", "clickData"), Input("heat-figure", "relayoutData"),
        Input({"kind": "unlike", "rank": ALL}, "n_clicks"), Input("columns", "value"), Input("order", "value"),
        State("heat-at", "data"), State("run", "value"), *(State(name, "value") for name in WANTED),
        prevent_initial_call=True,
    )  # fmt: skip
    def _where(
        keys: Any, click: Any, zoom: Any, pressed: Any, _c: Any, _o: Any, at: Any, number: Any, *controls: Any
    ) -> tuple[Any, Any]:
        snapshot = chosen_run(runs, number)
        heat, _, _ = asked(snapshot, controls)
        if heat is None or not heat.columns:
            return no_update, no_update
        now, marked = place(at, heat)
        cause = "keys" if any(one["prop_id"] == "keys.data" for one in ctx.triggered) else ctx.triggered_id
        if cause in ("columns", "order"):
            return {}, no_update
        if isinstance(cause, dict):
            if not ctx.triggered[0]["value"]:  # it has just appeared
                return no_update, no_update
            return _marked(heat, now, int(cause["rank"])), {"rank": int(cause["rank"])}
        if cause == "heat-figure":
            return _by_mouse(heat, now, marked, click, zoom)
        if not isinstance(keys, dict) or keys.get("where") != "heat-box":
            return no_update, no_update
        return _by_key(heat, now, marked, str(keys.get("key")))


def _by_key(heat: Heat, now: Place, marked: bool, key: str) -> tuple[Any, Any]:
    cells = pooled(heat, CELLS, now.window)
    if key == "Enter":
        column = heat.columns[now.column]
        rank = (
            int(cells.rank[(now.row - cells.first) // cells.size, now.column])
            if _inside(now, cells)
            else int(heat.ranks[now.row])
        )
        return no_update, {"rank": rank, **({"step": column} if isinstance(column, int) else {})}
    if not marked and key.startswith(("Arrow", "Page")):
        first = now.window[0] if now.window else 0
        return now._replace(row=first, column=0)._asdict(), no_update
    to = moved(now, key, rows=heat.ranks.size, columns=len(heat.columns), cells=CELLS)
    return to._asdict(), no_update


def _inside(now: Place, cells: Any) -> bool:
    return 0 <= (now.row - cells.first) // cells.size < cells.rank.shape[0]


def _marked(heat: Heat, now: Place, rank: int) -> dict[str, Any]:
    """The rank's row, in view."""
    rows = [n for n, one in enumerate(heat.ranks) if int(one) == rank]
    if not rows:
        return now._asdict()
    window = now.window
    if heat.ranks.size > CELLS:
        window = around_row(rows[0], 64, heat.ranks.size)
    return now._replace(row=rows[0], window=window)._asdict()


def _by_mouse(heat: Heat, now: Place, marked: bool, click: Any, zoom: Any) -> tuple[Any, Any]:
    if any(one["prop_id"].endswith("clickData") for one in ctx.triggered) and click:
        point = (click.get("points") or [{}])[0]
        rank, row = point.get("customdata"), point.get("y")
        if not isinstance(rank, int | float) or not isinstance(row, int | float):
            return no_update, no_update
        label = point.get("x")
        columns = {str(one): n for n, one in enumerate(heat.columns)}
        column = columns.get(str(label).strip(), now.column)
        chosen: dict[str, Any] = {"rank": int(rank)}
        if heat.columns and isinstance(heat.columns[0], int) and isinstance(label, int | float):
            chosen["step"] = int(label) - 1
            column = heat.columns.index(chosen["step"]) if chosen["step"] in heat.columns else now.column  # type: ignore[arg-type]
        return now._replace(row=int(row), column=column)._asdict(), chosen
    zoom = zoom if isinstance(zoom, dict) else {}
    data = now._asdict() if marked else {}
    if zoom.get("yaxis.autorange"):
        return {**data, "window": None}, no_update
    low, high = zoom.get("yaxis.range[0]"), zoom.get("yaxis.range[1]")
    if isinstance(low, int | float) and isinstance(high, int | float):
        first, last = sorted((low, high))
        window = [max(0, round(first + 0.5)), min(heat.ranks.size, round(last + 0.5))]
        if window != list(now.window or (0, heat.ranks.size)):
            return {**data, "window": window}, no_update
    return no_update, no_update


def _draw(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("heat-figure", "figure"), Output("cell", "children"), Output("unlike", "children"),
        Input("version", "data"), Input("heat-at", "data"), *(Input(name, "value") for name in WANTED),
        State("run", "value"), prevent_initial_call=True,
    )  # fmt: skip
    def _figure(_: str, at: Any, *rest: Any) -> tuple[Any, Any, Any]:
        *controls, number = rest
        snapshot = chosen_run(runs, number)
        heat, order, value = asked(snapshot, controls)
        if heat is None or not heat.columns or snapshot.grid is None:
            return nothing(snapshot.problem or "reading the sums of all steps ..."), "", []
        now, marked = place(at, heat)
        figure = figure_of(snapshot, heat, order, value, now, marked)
        shown = pooled(heat, CELLS, now.window)
        text = cell_text(heat, shown, snapshot.grid, (now.row, now.column)) if marked and _inside(now, shown) else ""
        if ctx.triggered_id == "heat-at":
            return figure, text, no_update
        segments = asked(snapshot, [*controls[:2], "segments", *controls[3:]])[0]
        return figure, text, _list(unlike(segments) if segments else [], snapshot)


def _list(found: Sequence[Unlike], snapshot: Snapshot) -> list[Any]:
    """Buttons, so that a keyboard finds them; who is named is said."""
    if not found or snapshot.grid is None:
        return [html.P("Nobody: no rank has equals to be compared with.")]
    named = snapshot.named()
    return [
        html.Button(
            f"{place_of(snapshot.grid, one.rank)}: {one.share:+.1%}, "
            f"{seconds_text(one.seconds, signed=True)} of a step (z {one.z:.1f})"
            + (f", {named[one.rank]}" if one.rank in named else ""),
            id={"kind": "unlike", "rank": one.rank}, n_clicks=0, className="named" if one.rank in named else "",
        )
        for one in found
    ]  # fmt: skip

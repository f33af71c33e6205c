"""The heat map's controls, keys and clicks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, html, no_update

from plait.diagnose.heat import STATISTICS, Heat, Statistic, pooled
from plait.view.heat_figure import HeatMarks, Value, cell_text, heat_figure
from plait.view.moves import HeatCell, around_row, is_number, moved, point_of
from plait.view.store import Snapshot, Watched, chosen_run, heat_of
from plait.view.words import nothing

CELLS = 512
"""Rows that are drawn at once: as many as there are pixels."""
WANTED = ("value", "statistic", "columns", "order", "first", "last")
CONTROLS = (State("heat-at", "data"), State("run", "value"), *(State(name, "value") for name in WANTED))


def figure_of(
    snapshot: Snapshot, heat: Heat, order: Sequence[str], value: Value, at: HeatCell, marked: bool = False
) -> dict[str, Any]:
    """The map with the ranks that the diagnosis names."""
    assert snapshot.grid is not None
    shown = pooled(heat, CELLS, at.window)
    return heat_figure(
        heat,
        shown,
        snapshot.grid,
        marks=HeatMarks(named=snapshot.named(), cursor=(at.row, at.column) if marked else None),
        order=order,
        value=value,
    )


def place(data: Mapping[str, Any] | None, heat: Heat) -> tuple[HeatCell, bool]:
    """Where the marked cell is, inside the map whatever a request says; and whether there is one."""
    values = data if isinstance(data, dict) else {}
    rows, columns = heat.ranks.size, len(heat.columns)

    def number(name: str, most: int) -> int:
        value = values.get(name)
        return max(0, min(int(value), most - 1)) if is_number(value) else 0

    window = values.get("window")
    both = isinstance(window, list) and len(window) == 2 and all(map(is_number, window))
    ends = (max(0, int(window[0])), min(rows, int(window[1]))) if both and window else None
    ends = ends if ends and ends[1] - ends[0] >= 1 and ends != (0, rows) else None
    return HeatCell(number("row", rows), number("column", columns), ends), "row" in values


def asked(snapshot: Snapshot, controls: Sequence[Any]) -> tuple[Heat | None, list[str], Value]:
    """The heat map that the controls ask for; what they may not ask for counts as not asked."""
    value, statistic, columns, order, first, last = controls
    names = [name for name in str(order or "").split() if name in ("pp", "dp", "cp", "tp", "host")]
    steps = None
    if is_number(first) or is_number(last):
        steps = (int(first) - 1 if is_number(first) else 0, int(last or 1 << 40) - 1 if is_number(last) else 1 << 40)
    known: list[Statistic] = [one for one in STATISTICS if one == statistic]
    heat = heat_of(
        snapshot, known[0] if known else "mean", steps, tuple(names or ("pp", "dp", "cp", "tp")),
        "steps" if columns == "steps" else "segments",
    )  # fmt: skip
    return heat, names, "seconds" if value == "seconds" else "excess"


def connect(app: Dash, runs: Sequence[Watched]) -> None:
    """The callbacks. One for each cause: Dash drops the answer of a callback that it asks again meanwhile, so
    that what somebody did would be lost if a figure that is drawn anew asked the same one."""
    _click(app, runs)
    _zoom(app, runs)
    _mark(app, runs)
    _draw(app, runs)
    _list(app, runs)

    @app.callback(
        Output("heat-at", "data"), Input("columns", "value"), Input("order", "value"), prevent_initial_call=True
    )  # fmt: skip
    def _other_cells(*_: Any) -> dict[str, Any]:
        return {}


def standing(runs: Sequence[Watched], controls: Sequence[Any]) -> tuple[Heat | None, HeatCell, bool]:
    """The heat shown, its cell where one is, and whether that is marked. controls: values of ``CONTROLS``."""
    at, number, *wanted = controls
    heat = asked(chosen_run(runs, number), wanted)[0]
    if heat is None or not heat.columns:
        return None, HeatCell(), False
    return heat, *place(at, heat)


def _click(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("heat-at", "data", allow_duplicate=True), Output("chosen", "data", allow_duplicate=True),
        Input("heat-figure", "clickData"), *CONTROLS, prevent_initial_call=True,
    )  # fmt: skip
    def _clicked(click: Any, *controls: Any) -> tuple[Any, Any]:
        heat, now, _ = standing(runs, controls)
        return _by_mouse(heat, now, click) if heat else (no_update, no_update)


def _zoom(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("heat-at", "data", allow_duplicate=True), Input("heat-figure", "relayoutData"), *CONTROLS,
        prevent_initial_call=True,
    )  # fmt: skip
    def _zoomed(zoom: Any, *controls: Any) -> Any:
        heat, now, marked = standing(runs, controls)
        return _window(heat, now, marked, zoom) if heat else no_update


def _mark(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("heat-at", "data", allow_duplicate=True), Output("chosen", "data", allow_duplicate=True),
        Input({"kind": "unlike", "rank": ALL}, "n_clicks"), *CONTROLS, prevent_initial_call=True,
    )  # fmt: skip
    def _named(_: Any, *controls: Any) -> tuple[Any, Any]:
        heat, now, _ = standing(runs, controls)
        cause = ctx.triggered_id
        rank = cause.get("rank") if isinstance(cause, dict) else None
        if heat is None or not is_number(rank) or not ctx.triggered[0]["value"]:  # it has just appeared
            return no_update, no_update
        return _marked(heat, now, int(rank)), {"rank": int(rank)}


def opened(heat: Heat, now: HeatCell) -> dict[str, Any]:
    """The rank of the marked cell, and its step where columns are steps."""
    cells = pooled(heat, CELLS, now.window)
    column = heat.columns[now.column]
    rank = (
        int(cells.rank[(now.row - cells.first) // cells.size, now.column])
        if _inside(now, cells)
        else int(heat.ranks[now.row])
    )
    return {"rank": rank, **({"step": column} if isinstance(column, int) else {})}


def by_key(heat: Heat, now: HeatCell, marked: bool, key: str) -> HeatCell:
    """Where a key leads to from a place, which is marked or not."""
    if not marked and key.startswith(("Arrow", "Page")):
        return now._replace(row=now.window[0] if now.window else 0, column=0)
    return moved(now, key, rows=heat.ranks.size, columns=len(heat.columns), cells=CELLS)


def _inside(now: HeatCell, cells: Any) -> bool:
    return 0 <= (now.row - cells.first) // cells.size < cells.rank.shape[0]


def _marked(heat: Heat, now: HeatCell, rank: int) -> dict[str, Any]:
    """The rank's row, in view."""
    rows = [n for n, one in enumerate(heat.ranks) if int(one) == rank]
    if not rows:
        return now._asdict()
    window = now.window
    if heat.ranks.size > CELLS:
        window = around_row(rows[0], 64, heat.ranks.size)
    return now._replace(row=rows[0], window=window)._asdict()


def _by_mouse(heat: Heat, now: HeatCell, click: Any) -> tuple[Any, Any]:
    point = point_of(click)
    rank, row = point.get("customdata"), point.get("y")
    if not is_number(rank) or not is_number(row):
        return no_update, no_update
    label = point.get("x")
    columns = {str(one): n for n, one in enumerate(heat.columns)}
    column = columns.get(str(label).strip(), now.column)
    chosen: dict[str, Any] = {"rank": int(rank)}
    if heat.columns and isinstance(heat.columns[0], int) and is_number(label):
        chosen["step"] = int(label) - 1
        column = heat.columns.index(chosen["step"]) if chosen["step"] in heat.columns else now.column  # type: ignore[arg-type]
    return now._replace(row=int(row), column=column)._asdict(), chosen


def _window(heat: Heat, now: HeatCell, marked: bool, zoom: Any) -> Any:
    zoom = zoom if isinstance(zoom, dict) else {}
    data = now._asdict() if marked else {}
    if zoom.get("yaxis.autorange"):
        return {**data, "window": None} if now.window else no_update
    low, high = zoom.get("yaxis.range[0]"), zoom.get("yaxis.range[1]")
    if is_number(low) and is_number(high):
        first, last = sorted((low, high))
        window = [max(0, round(first + 0.5)), min(heat.ranks.size, round(last + 0.5))]
        if window != list(now.window or (0, heat.ranks.size)):
            return {**data, "window": window}
    return no_update


def _draw(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("heat-figure", "figure"), Output("cell", "children"), Input("version", "data"), Input("heat-at", "data"),
        *(Input(name, "value") for name in WANTED), State("run", "value"), prevent_initial_call=True,
    )  # fmt: skip
    def _figure(_: str, at: Any, *rest: Any) -> tuple[Any, Any]:
        *controls, number = rest
        snapshot = chosen_run(runs, number)
        heat, order, value = asked(snapshot, controls)
        if heat is None or not heat.columns or snapshot.grid is None:
            return nothing(why_not(snapshot)), ""
        now, marked = place(at, heat)
        figure = figure_of(snapshot, heat, order, value, now, marked)
        shown = pooled(heat, CELLS, now.window)
        text = cell_text(heat, shown, snapshot.grid, (now.row, now.column)) if marked and _inside(now, shown) else ""
        return figure, text


def _list(app: Dash, runs: Sequence[Watched]) -> None:
    @app.callback(
        Output("unlike", "children"), Input("version", "data"), State("run", "value"), prevent_initial_call=True
    )  # fmt: skip
    def _furthest(_: str, number: object) -> Any:
        return buttons_of(chosen_run(runs, number))


def why_not(snapshot: Snapshot) -> str:
    """Why there is no map."""
    if snapshot.recording is None:
        return snapshot.problem or "reading the sums of all steps ..."
    return "no step in this range was recorded"


def buttons_of(snapshot: Snapshot) -> list[Any]:
    """Buttons, so that a keyboard finds them; who is named is said."""
    if snapshot.told is None:
        return [html.P(snapshot.problem or f"{snapshot.doing or 'reading all spans'} ...")]
    named = snapshot.named()
    return [
        html.Button(
            text, id={"kind": "unlike", "rank": rank}, n_clicks=0, className="named" if rank in named else ""
        )
        for rank, text in snapshot.latest()
    ] or [html.P("Nobody: no rank has equals to be compared with.")]  # fmt: skip

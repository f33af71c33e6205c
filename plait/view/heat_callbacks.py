"""Callbacks for the heat map's controls, keys and clicks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from dash import ALL, Input, ctx, html, no_update

from plait.core.base.codec.json_text import is_list, is_table
from plait.diagnose.rank_map import STATISTICS, Heat, Statistic, pooled
from plait.view.layout import is_number, on, point_of
from plait.view.rank_figures import HeatMarks, Value, cell_text, heat_figure
from plait.view.store import Snapshot, heat_of
from plait.view.words import nothing

CELLS = 512
"""The largest number of rows of the heat map that are drawn at once: as many as there are
pixels."""
WANTED = ("value", "statistic", "columns", "order", "first", "last")
CONTROL_VALUES = " ".join(f"{name}.value" for name in WANTED)
CONTROLS = f"heat-at.data {CONTROL_VALUES}"
ZOOM = 4
"""Factor by which ``+`` reduces the heat map's rows in view."""


class HeatCell(NamedTuple):
    """A cell of the heat map. row, column: indices from 0. window: first and end of the rows in
    view; None: all."""

    row: int = 0
    column: int = 0
    window: tuple[int, int] | None = None


def figure_of(
    snapshot: Snapshot, heat: Heat, order: Sequence[str], value: Value, at: HeatCell, marked: bool = False
) -> dict[str, Any]:
    """Return the heat map as a plotly figure, with the ranks marked that the diagnosis names. at:
    the current cell, drawn if ``marked``."""
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


def marked_cell(data: Mapping[str, Any] | None, heat: Heat) -> tuple[HeatCell, bool]:
    """Return (the marked cell that a request names, clipped to the map; True if it names one)."""
    values = data if isinstance(data, dict) else {}
    rows, columns = heat.ranks.size, len(heat.columns)

    def number(name: str, most: int) -> int:
        value = values.get(name)
        return max(0, min(int(value), most - 1)) if is_number(value) else 0

    window = values.get("window")
    both = is_list(window) and len(window) == 2 and all(map(is_number, window))
    ends = (max(0, int(window[0])), min(rows, int(window[1]))) if both and window else None
    ends = ends if ends and ends[1] - ends[0] >= 1 and ends != (0, rows) else None
    return HeatCell(number("row", rows), number("column", columns), ends), "row" in values


def requested_heat(snapshot: Snapshot, controls: Sequence[Any]) -> tuple[Heat | None, list[str], Value]:
    """Return (the requested heat map, None if it cannot be computed yet; the order of ranks; the
    shown value: seconds or excess). Invalid settings of controls fall back to the defaults."""
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


@on("heat-at.data", "columns.value order.value")
def _reset_cell(*_: Any) -> dict[str, Any]:
    return {}


def shown_heat(snapshot: Snapshot, controls: Sequence[Any]) -> tuple[Heat | None, HeatCell, bool]:
    """Return (the shown heat map, its current cell, True if the cell is marked). controls: values
    of the components ``CONTROLS``."""
    at, *wanted = controls
    heat = requested_heat(snapshot, wanted)[0]
    if heat is None or not heat.columns:
        return None, HeatCell(), False
    return heat, *marked_cell(at, heat)


@on("heat-at.data chosen.data", "heat-figure.clickData", CONTROLS)
def _clicked(snapshot: Snapshot, click: Any, *controls: Any) -> tuple[Any, Any]:
    heat, now, _ = shown_heat(snapshot, controls)
    return _by_mouse(heat, now, click) if heat else (no_update, no_update)


@on("heat-at.data", "heat-figure.relayoutData", CONTROLS)
def _zoomed(snapshot: Snapshot, zoom: Any, *controls: Any) -> Any:
    heat, now, marked = shown_heat(snapshot, controls)
    return _window(heat, now, marked, zoom) if heat else no_update


@on("heat-at.data chosen.data", Input({"kind": "unlike", "rank": ALL}, "n_clicks"), CONTROLS)
def _named(snapshot: Snapshot, _: Any, *controls: Any) -> tuple[Any, Any]:
    heat, now, _ = shown_heat(snapshot, controls)
    cause: Any = cast("Any", ctx).triggered_id
    rank = cause.get("rank") if is_table(cause) else None
    if (
        heat is None or not is_number(rank) or not ctx.triggered[0]["value"]
    ):  # the button has just appeared and was not clicked
        return no_update, no_update
    return _marked(heat, now, int(rank)), {"rank": int(rank)}


def opened(heat: Heat, now: HeatCell) -> dict[str, Any]:
    """Return the choice that opens a cell in the timeline: ``rank``, and ``step`` if columns are
    steps."""
    cells = pooled(heat, CELLS, now.window)
    column = heat.columns[now.column]
    rank = (
        int(cells.rank[(now.row - cells.first) // cells.size, now.column])
        if _inside(now, cells)
        else int(heat.ranks[now.row])
    )
    return {"rank": rank, **({"step": column} if isinstance(column, int) else {})}


def cell_after_key(at: HeatCell, key: str, *, rows: int, columns: int, cells: int) -> HeatCell:
    """Return the current cell after a key. Arrows move by one cell, PageUp and PageDown by a tenth
    of the view; ``+`` and ``-`` zoom around the cell, ``0`` shows all rows. rows, columns: of the
    map. cells: largest number of rows that are drawn at once.

    >>> cell_after_key(HeatCell(0, 0), "ArrowDown", rows=1000, columns=3, cells=500)
    HeatCell(row=2, column=0, window=None)
    """
    first, last = at.window or (0, rows)
    size = max(1, -(-(last - first) // max(1, cells)))
    row, column = min(at.row, rows - 1), min(at.column, columns - 1)
    by = {"ArrowDown": size, "ArrowUp": -size, "PageDown": max(size, (last - first) // 10),
          "PageUp": -max(size, (last - first) // 10)}  # fmt: skip
    if key in by:
        row = max(0, min(rows - 1, row + by[key]))
    elif key in ("ArrowLeft", "ArrowRight"):
        column = max(0, min(columns - 1, column + (1 if key == "ArrowRight" else -1)))
    elif key in ("Home", "End"):
        row = first if key == "Home" else last - 1
    elif key == "0":
        return HeatCell(row, column, None)
    elif key in ("+", "=", "-"):
        wanted = (last - first) // ZOOM if key != "-" else (last - first) * ZOOM
        return HeatCell(row, column, around_row(row, max(8, wanted), rows))
    if at.window and not first <= row < last:
        return HeatCell(row, column, around_row(row, last - first, rows))
    return HeatCell(row, column, at.window)


def around_row(row: int, size: int, rows: int) -> tuple[int, int] | None:
    """Return (first, end) of ``size`` rows with ``row`` in the middle; None if these are all
    rows."""
    if size >= rows:
        return None
    first = max(0, min(row - size // 2, rows - size))
    return first, first + size


def by_key(heat: Heat, now: HeatCell, marked: bool, key: str) -> HeatCell:
    """Return the current cell after a key; if no cell is marked yet, arrows mark the first in
    view."""
    if not marked and key.startswith(("Arrow", "Page")):
        return now._replace(row=now.window[0] if now.window else 0, column=0)
    return cell_after_key(now, key, rows=heat.ranks.size, columns=len(heat.columns), cells=CELLS)


def _inside(now: HeatCell, cells: Any) -> bool:
    return 0 <= (now.row - cells.first) // cells.size < cells.rank.shape[0]


def _marked(heat: Heat, now: HeatCell, rank: int) -> dict[str, Any]:
    """Return the cell of a rank's row as a dictionary, with that row in view."""
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
    zoom = zoom if is_table(zoom) else {}
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


@on("heat-figure.figure cell.children", f"version.data heat-at.data {CONTROL_VALUES}")
def _figure(snapshot: Snapshot, _: str, at: Any, *controls: Any) -> tuple[Any, Any]:
    heat, order, value = requested_heat(snapshot, controls)
    if heat is None or not heat.columns or snapshot.grid is None:
        return nothing(why_not(snapshot)), ""
    now, marked = marked_cell(at, heat)
    figure = figure_of(snapshot, heat, order, value, now, marked)
    shown = pooled(heat, CELLS, now.window)
    text = cell_text(heat, shown, snapshot.grid, (now.row, now.column)) if marked and _inside(now, shown) else ""
    return figure, text


def why_not(snapshot: Snapshot) -> str:
    """Return why no heat map is shown."""
    if snapshot.recording is None:
        return snapshot.problem or "reading the sums of all steps ..."
    return "no step in this range was recorded"


@on("unlike.children", "version.data")
def _buttons(snapshot: Snapshot, _: str) -> list[Any]:
    """Return buttons for the ranks that are the latest, for use by keyboard; ranks that the
    diagnosis names are marked."""
    if snapshot.report is None:
        return [html.P(snapshot.problem or f"{snapshot.doing or 'reading all spans'} ...")]
    named = snapshot.named()
    return [
        html.Button(
            text, id={"kind": "unlike", "rank": rank}, n_clicks=0, className="named" if rank in named else ""
        )
        for rank, text in snapshot.latest()
    ] or [html.P("None: no rank has peers to compare with.")]  # fmt: skip

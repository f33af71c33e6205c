"""What keys and clicks do: pure functions from where one is to where one goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import polars as pl

from plait.core.record.timeline import SpanKey

ZOOM = 4
"""Rows of the heat map in view are so many times fewer after a ``+``."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a request says a number that may be a place: finite, and no larger than a browser counts.

    >>> [is_number(value) for value in (3, -0.5, True, "3", float("inf"), 10**30)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def point_of(click: object) -> Mapping[str, Any]:
    """Of a figure's ``clickData`` the point; empty for anything else that a request says.

    >>> point_of({"points": [{"customdata": 3}]}), point_of({"points": "x"}), point_of([1])
    ({'customdata': 3}, {}, {})
    """
    points = click.get("points") if isinstance(click, dict) else None
    first = points[0] if isinstance(points, list) and points else None
    return first if isinstance(first, dict) else {}


class HeatCell(NamedTuple):
    """On the heat map: a row and a column, and the rows in view (None: all)."""

    row: int = 0
    column: int = 0
    window: tuple[int, int] | None = None


def unanswered(keys: object, answered: object) -> tuple[list[tuple[str, str]], int]:
    """Where which keys were pressed after the first ``answered``, and how many were pressed in all. keys: how
    many were (``count``) and the ``latest``, as the page sends them.

    >>> unanswered({"count": 5, "latest": [["heat-box", "+"], ["heat-box", "Enter"], ["time-box", "n"]]}, 3)
    ([('heat-box', 'Enter'), ('time-box', 'n')], 5)
    """
    values = keys if isinstance(keys, dict) else {}
    count, latest = values.get("count"), values.get("latest")
    if not isinstance(count, int) or not isinstance(latest, list):
        return [], 0
    new = count - answered if isinstance(answered, int) and 0 <= answered <= count else count
    pressed = latest[max(0, len(latest) - new) :] if new > 0 else []
    return [(str(one[0]), str(one[1])) for one in pressed if isinstance(one, list) and len(one) == 2], count


def moved(at: HeatCell, key: str, *, rows: int, columns: int, cells: int) -> HeatCell:
    """cells: of rows, in view. Arrows go a cell on, with PageUp and PageDown a tenth of the view; ``+`` and
    ``-`` zoom around the cell, ``0`` shows all.

    >>> moved(HeatCell(0, 0), "ArrowDown", rows=1000, columns=3, cells=500)
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
    """So many rows with ``row`` in the middle; None if that is all."""
    if size >= rows:
        return None
    first = max(0, min(row - size // 2, rows - size))
    return first, first + size


def next_span(bars: pl.DataFrame, key: SpanKey, press: str) -> SpanKey | None:
    """The span before or after in its lane (ArrowLeft, ArrowRight), or at the same time in the row above or
    below (ArrowUp, ArrowDown). bars: those of a window, in the order of rows. None if there is none.

    From nowhere to the first of the key's rank, if it has any there.
    """
    single = bars.filter(pl.col("count") == 1)
    if single.is_empty():
        return None
    rows = list(single.select("rank", "lane").unique(maintain_order=True).iter_rows())
    own = single.filter(
        pl.col("step") == key.step, pl.col("rank") == key.rank, pl.col("kind") == key.kind,
        pl.col("name") == key.name, pl.col("seq") == key.seq,
    )  # fmt: skip
    if own.is_empty():
        of_rank = single.filter(pl.col("rank") == key.rank)
        return _key(single if of_rank.is_empty() else of_rank, 0)
    one = own.row(0, named=True)
    if press in ("ArrowLeft", "ArrowRight"):
        lane = single.filter(pl.col("rank") == one["rank"], pl.col("lane") == one["lane"]).sort("start", "end")
        at = _index(lane, key) + (1 if press == "ArrowRight" else -1)
        return _key(lane, at) if 0 <= at < lane.height else None
    at = rows.index((one["rank"], one["lane"])) + (1 if press == "ArrowDown" else -1)
    if not 0 <= at < len(rows):
        return None
    rank, lane = rows[at]
    other = single.filter(pl.col("rank") == rank, pl.col("lane") == lane)
    middle = (one["start"] + one["end"]) / 2
    away = pl.max_horizontal(pl.col("start") - middle, middle - pl.col("end"), 0.0)
    return _key(other.with_columns(away=away).sort("away", "start"), 0)


def _index(lane: pl.DataFrame, key: SpanKey) -> int:
    names: Sequence[str] = ("step", "rank", "kind", "name", "seq")
    return list(lane.select(names).iter_rows()).index(tuple(key))


def _key(bars: pl.DataFrame, row: int) -> SpanKey:
    return SpanKey(*bars.select("step", "rank", "kind", "name", "seq").row(row))

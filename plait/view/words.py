"""Texts, numbers and arrays in figures and pages: escape texts, shorten numbers, pack arrays.

Plotly interprets `<b>`, `<a href=...>` and a few more tags in any text, and `%{...}` in a template.
So texts from files pass through ``plain``, and never go into a template.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from plait.core.base.text import printable, seconds_text
from plait.diagnose.measured.compare import Prediction
from plait.diagnose.series import SERIES, StepSeries

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST = 300
"""The largest number of characters of a file's text in a figure; longer texts are cut."""
PALETTE = {
    "compute": "#2f6db3", "wait": "#c9ced6", "idle": "#dfe3e8", "comm": "#e08a2e", "transfer": "#8a5cb8",
    "data": "#3a9a6a", "host": "#7a6a50", "optimizer": "#b8425c", "checkpoint": "#4d5661", "evaluation": "#66a3a8",
    "own work": "#2f6db3",
}  # fmt: skip
"""Colours by kind of span. Waiting is pale, so that work stands out."""
STATE_COLOURS = {
    "named": "#d00000", "crashed": "#8b0000", "stopped": "#c2410c", "silent": "#7c2d92", "slow": "#e07b00",
    "works": "#0f766e", "waits": "#9fb3c8", "ended": "#5b6770", "runs": "#2f855a", "unknown": "#d1d5db",
}  # fmt: skip
LEGEND_ABOVE: dict[str, Any] = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
"""A legend above its figure."""
FONT: dict[str, Any] = {"family": "system-ui, sans-serif", "size": 13}
MOST_ROWS_IN_WORDS = 8
"""The largest number of rows of a figure that are put in words."""


def plain(text: object) -> str:
    """Return ``text`` for a figure: markup escaped, unprintable characters removed, at most
    ``LONGEST`` characters."""
    words = printable(str(text), kept="")
    return html.escape(words if len(words) <= LONGEST else words[: LONGEST - 1] + "…", quote=True)


def packed(values: NDArray[Any], kind: str = "f4") -> dict[str, Any]:
    """Return an array in plotly.js's binary form: a tenth of the parsing time and half of the bytes
    of a list. kind: type of its numbers, ``f4``, ``f8`` or ``i4``."""
    array = values.astype(f"<{kind}")
    found: dict[str, Any] = {"dtype": kind, "bdata": base64.b64encode(array.tobytes()).decode()}
    return found if array.ndim == 1 else {**found, "shape": ", ".join(map(str, array.shape))}


def layout(**more: Any) -> dict[str, Any]:
    """Return the layout that all plotly figures share, with ``more`` settings."""
    return {
        "font": FONT, "margin": {"l": 70, "r": 20, "t": 30, "b": 60}, "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff", "hoverlabel": {"align": "left"}, **more,
    }  # fmt: skip


def nothing(why: str) -> dict[str, Any]:
    """Return an empty plotly figure with the reason as its text."""
    axis = {"visible": False}
    note = {"text": plain(why), "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}
    return {"data": [], "layout": layout(xaxis=axis, yaxis=axis, annotations=[note], height=160)}


def series_words(runs: Mapping[str, Sequence[StepSeries]]) -> str:
    """Return the last value and the range of every quantity, in words.

    >>> series_words({"job": [StepSeries("loss", (1, 2, 3), (5.0, 6.0, 4.5))]})
    'Loss 4.5 at step 3, between 4.5 and 6.'
    """
    parts: list[str] = []
    for run, found in runs.items():
        told = [
            f"{SERIES.get(one.name, one.name)} {one.values[-1]:.4g} at step {one.steps[-1]}, between "
            f"{min(one.values):.4g} and {max(one.values):.4g}"
            for one in found
        ]
        if told:
            parts.append(_sentence(f"{run}: {'; '.join(told)}" if len(runs) > 1 else "; ".join(told)))
    return " ".join(parts) or "No step has numbers."


def memory_words(predicted: Sequence[tuple[str, Mapping[str, int]]], measured: Sequence[StepSeries]) -> str:
    """Return the predicted memory of every stage and the most measured memory of every rank, in
    words."""
    places = [f"{place} {_mib(sum(sizes.values()))} predicted" for place, sizes in predicted[:MOST_ROWS_IN_WORDS]]
    most = [f"{one.name} {_mib(max(one.values))} at most" for one in measured[:MOST_ROWS_IN_WORDS]]
    left = max(0, len(predicted) - MOST_ROWS_IN_WORDS) + max(0, len(measured) - MOST_ROWS_IN_WORDS)
    more = [f"and {left} more"] if left else []
    return _sentence("; ".join([*places, *most, *more])) if places or most else "Nothing is known of memory."


def prediction_words(prediction: Prediction | None) -> str:
    """Return a sentence on the kinds of ops with the most seconds, predicted and measured."""
    if prediction is None or not prediction.rows:
        return ""
    rows = [
        f"{' '.join(part for part in (row.kind, row.where, row.direction) if part)} "
        f"{seconds_text(row.predicted or 0.0)} predicted, {seconds_text(row.measured)} measured"
        for row in prediction.rows[:MOST_ROWS_IN_WORDS]
    ]
    return _sentence("; ".join(rows))


def spans_words(name: str, spans: pl.DataFrame) -> str:
    """Return a sentence on the step's length and the sum of each kind of span. name: of the step,
    as the sentence begins."""
    if spans.is_empty():
        return ""
    sums = spans.group_by("kind").agg(seconds=(pl.col("end") - pl.col("start")).sum()).sort("seconds", descending=True)
    kinds = ", ".join(f"{kind} {seconds_text(seconds)}" for kind, seconds in sums.head(MOST_ROWS_IN_WORDS).iter_rows())
    length = float(spans["end"].max() - spans["start"].min())  # type: ignore[operator, arg-type]
    return f"{name}: {seconds_text(length)}, of which {kinds}."


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."

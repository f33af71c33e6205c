"""What figures show, in words: for who does not see them, and for a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from plait.diagnose.compare import Prediction
from plait.diagnose.series import SERIES, StepSeries
from plait.view.words import seconds_text

TOLD = 8
"""Rows of a figure that are put in words."""


def series_words(runs: Mapping[str, Sequence[StepSeries]]) -> str:
    """Of every quantity its last value, and between what it lay.

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
    """Of every place what is predicted, of every rank the most that was measured."""
    places = [f"{place} {_mib(sum(sizes.values()))} predicted" for place, sizes in predicted[:TOLD]]
    most = [f"{one.name} {_mib(max(one.values))} at most" for one in measured[:TOLD]]
    left = max(0, len(predicted) - TOLD) + max(0, len(measured) - TOLD)
    more = [f"and {left} more"] if left else []
    return _sentence("; ".join([*places, *most, *more])) if places or most else "Nothing is known of memory."


def prediction_words(found: Prediction | None) -> str:
    """The longest kinds of ops, predicted and measured."""
    if found is None or not found.rows:
        return ""
    rows = [
        f"{' '.join(part for part in (row.kind, row.where, row.direction) if part)} "
        f"{seconds_text(row.predicted or 0.0)} predicted, {seconds_text(row.measured)} measured"
        for row in found.rows[:TOLD]
    ]
    return _sentence("; ".join(rows))


def spans_words(name: str, spans: pl.DataFrame) -> str:
    """How long a step took and what its kinds of spans add up to."""
    if spans.is_empty():
        return ""
    sums = spans.group_by("kind").agg(seconds=(pl.col("end") - pl.col("start")).sum()).sort("seconds", descending=True)
    kinds = ", ".join(f"{kind} {seconds_text(seconds)}" for kind, seconds in sums.head(TOLD).iter_rows())
    length = float(spans["end"].max() - spans["start"].min())  # type: ignore[operator, arg-type]
    return f"{name}: {seconds_text(length)}, of which {kinds}."


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."

"""What a plan predicts beside what was measured: by kind of op, and how much communication was hidden."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from plait.core.timeline import Timeline
from plait.diagnose.recording import SPANS, Recording

KEY = ("rank", "kind", "name", "seq")
MISSED = 0.01
"""Share of a step that was to be hidden and was not, from which on it is told."""
LEAST = 1e-6
"""Seconds that are predicted from which on a ratio means something."""


class Row(NamedTuple):
    """Seconds of the mean rank in a step, of spans that both have."""

    kind: str
    axis: str
    direction: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where next to nothing is predicted."""
        return self.measured / self.predicted if self.predicted >= LEAST else None


class Overlap(NamedTuple):
    """An axis' communication in a step: shares that computation was to hide, and did; seconds of the mean
    rank that it took, and that were exposed."""

    axis: str
    planned: float
    measured: float
    total: float
    exposed: float

    @property
    def missed(self) -> float:
        """Seconds that were to be hidden and were not."""
        return max(0.0, self.planned - self.measured) * self.total


class Prediction(NamedTuple):
    """rows: the longest first. matched: share of measured spans that were predicted."""

    rows: tuple[Row, ...]
    overlap: tuple[Overlap, ...]
    seconds: tuple[float, float]
    matched: float


def against(recording: Recording, predicted: Timeline, axes: pl.DataFrame) -> Prediction | None:
    """predicted: one steady step, of the ranks that are to be compared. axes: its spans with their axes, as
    the recording has them. None where the two have nothing in common."""
    ranks = axes["rank"].unique().to_list()
    steps = [step for step in recording.spans["step"].unique().sort().to_list() if step > 0]
    seen = recording.spans.filter(pl.col("rank").is_in(ranks), pl.col("step").is_in(steps))
    both = seen.join(axes.select(*KEY, begin="start", finish="end"), on=KEY)
    if both.is_empty() or not predicted.spans:
        return None
    lanes = both.select("step", "rank").n_unique()
    length = pl.col("end") - pl.col("start")
    rows = both.group_by("kind", "axis", "direction").agg(
        predicted=(pl.col("finish") - pl.col("begin")).sum() / lanes, measured=length.sum() / lanes
    )
    hidden = [_hidden(axes), _hidden(seen)]
    overlap = [Overlap(axis, hidden[0][axis][0], *hidden[1][axis]) for axis in sorted(set(hidden[0]) & set(hidden[1]))]
    whole = axes["end"].max(), axes["start"].min()
    measured = [recording.seconds[step] for step in steps if step in recording.seconds]
    return Prediction(
        rows=tuple(Row(*row) for row in rows.sort("measured", descending=True).iter_rows()),
        overlap=tuple(overlap),
        seconds=(float(whole[0]) - float(whole[1]), float(pl.Series(measured).median() or 0.0)),  # type: ignore[arg-type]
        matched=both.height / max(1, seen.height),
    )


def _hidden(spans: pl.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Of every axis with collectives: share that was hidden; seconds of a rank's step, all and exposed."""
    lanes = max(1, spans.select("step", "rank").n_unique())
    length = (pl.col("end") - pl.col("start")).sum()
    comm = dict(spans.filter(pl.col("kind") == "comm").group_by("axis").agg(length).iter_rows())
    waits = dict(spans.filter(pl.col("kind") == "wait").group_by("axis").agg(length).iter_rows())
    return {
        axis: (max(0.0, 1 - waits.get(axis, 0.0) / total), total / lanes, waits.get(axis, 0.0) / lanes)
        for axis, total in comm.items()
        if total > 0
    }


def table_of(timeline: Timeline) -> pl.DataFrame:
    """Spans of a timeline as they stand in its files."""
    columns = timeline.columns()
    return pl.DataFrame(columns).cast({name: SPANS[name] for name in columns})  # type: ignore[arg-type]

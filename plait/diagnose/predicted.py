"""What a plan predicts beside what was measured: by kind of op, and how much communication was hidden."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import polars as pl

from plait.core.record.records import axis_of
from plait.core.record.timeline import PLANNED, Timeline
from plait.diagnose.compare import hidden_by_lane, hidden_in
from plait.diagnose.recording import SPANS, Recording

KEY = ("rank", "kind", "name", "seq")
MISSED = 0.01
"""Share of a step that was to be hidden and was not, from which on it is told."""
LEAST = 1e-6
"""Seconds that are predicted from which on a ratio means something."""


UNMEASURED = (
    "The plan holds no measured costs, so its times compare with nothing that was measured. Costs are measured before "
    'training where strategy.slices = "auto"; of any job by plait profile JOB, for plait plan check JOB '
    "cluster.profile=profile.json to predict from."
)
"""What is said in place of a comparison."""


MEASURED = ("", "tp", "cp")
"""Axes whose costs are measured before training, with those of computation. Those of gradients, parameters
and tensors between stages are not."""


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
    rank that it was under way, and that were exposed, as ``core.record.timeline.Hidden`` has them."""

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
    """rows: the longest first. seconds: of a step, predicted and measured (the median); None where some of it
    is not made of measured costs. matched: share of measured spans that were predicted, of kinds that are."""

    rows: tuple[Row, ...]
    overlap: tuple[Overlap, ...]
    seconds: tuple[float, float] | None
    matched: float


def against(recording: Recording, predicted: Timeline, axes: pl.DataFrame) -> Prediction | None:
    """predicted: one steady step, of the ranks that are to be compared. axes: its spans with their axes, as
    the recording has them. Only what is made of measured costs is compared. None where the two have nothing
    in common."""
    alone = axes["axis"].is_in(MEASURED).all()
    axes = axes.filter(pl.col("axis").is_in(MEASURED))
    ranks = axes["rank"].unique().to_list()
    steps = [step for step in recording.spans["step"].unique().sort().to_list() if step > 0]
    seen = recording.spans.filter(
        pl.col("rank").is_in(ranks),
        pl.col("step").is_in(steps),
        pl.col("axis").is_in(MEASURED),
        pl.col("kind").is_in(PLANNED),
    )
    planned = axes.unique(KEY, keep="first", maintain_order=True).select(*KEY, begin="start", finish="end")
    both = seen.join(planned, on=KEY)
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
        seconds=(float(whole[0]) - float(whole[1]), float(np.median(measured))) if alone and measured else None,  # type: ignore[arg-type]
        matched=both.height / max(1, seen.height),
    )


def _hidden(spans: pl.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Of every axis with collectives: share that was hidden; seconds of a rank's step, all and exposed."""
    lanes = max(1, spans.select("step", "rank").n_unique())
    found: dict[str, tuple[float, float, float]] = {}
    for axis in spans.filter(pl.col("kind") == "comm")["axis"].unique().sort().to_list():
        own = hidden_in(hidden_by_lane(spans.filter(pl.col("axis") == axis)), lanes)
        if own.fraction is not None:
            found[axis] = own.fraction, own.total, own.exposed
    return found


def kinds_of_measured_costs(predicted: pl.DataFrame) -> Collection[str]:
    """Of a plan that has some: the kinds of its spans whose times they tell; of communication only where all
    of it is along ``MEASURED``."""
    names = predicted.filter(pl.col("kind").is_in(["comm", "wait"])).select("kind", "name").unique()
    along = {axis_of(*one) for one in names.iter_rows()}
    return ("compute", "comm", "wait") if along <= set(MEASURED) else ("compute",)


def table_of(timeline: Timeline) -> pl.DataFrame:
    """Spans of a timeline as they stand in its files."""
    columns = timeline.columns()
    return pl.DataFrame(columns).cast({name: SPANS[name] for name in columns})  # type: ignore[arg-type]

"""Compare two timelines: a plan's prediction with a measurement, or two runs of one job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.errors import DataError
from plait.core.record.exposure import Exposure
from plait.core.record.records import axis_of
from plait.core.record.rollup import EXPOSED
from plait.core.record.timeline import PLANNED, Timeline
from plait.diagnose.measured.recording import RANK_STEP, SPANS, Recording, exposed, sum_exposure
from plait.diagnose.measured.shares import steady_steps

GROUP_COLUMNS = ("kind", "site", "direction")
"""Columns by which the rows of a comparison are grouped."""
KEY = ("rank", "kind", "name", "seq")
"""Columns on which two timelines of one job are joined, within a step:
``core.record.timeline.SpanKey``."""
LENGTH = pl.col("end") - pl.col("start")
LEAST = 1e-6
"""Least predicted time in seconds for which a ratio is meaningful."""
MISSED = 0.01
"""Least share of a step's seconds that was to be hidden and was not, for a report to mention it."""
MEASURED = ("", "tp", "cp")
"""Axes whose costs are measured before training, besides computation. Costs of gradients,
parameters and transfers between stages are not measured."""
UNMEASURED = (
    "The plan holds no measured costs, so its times compare with nothing that was measured. Costs are measured before "
    'training where strategy.slices = "auto"; of any job by plait measure machine JOB, for plait plan JOB '
    "--evaluate cluster.profile=profile.json to predict from."
)
"""Message in place of a comparison with a plan that has no measured costs."""


class ComparedRow(NamedTuple):
    """Spans in both timelines, in seconds of a rank in a mean step. where: site or axis. predicted:
    None if the prediction has no measured costs."""

    kind: str
    where: str
    direction: str
    predicted: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted seconds; None if less than ``LEAST`` is predicted."""
        return self.measured / self.predicted if self.predicted and self.predicted >= LEAST else None

    def named(self, where: str) -> dict[str, Any]:
        """Return the row as a dictionary. where: the key for the field ``where``."""
        return {
            "kind": self.kind, where: self.where, "direction": self.direction, "predicted": self.predicted,
            "measured": self.measured, "ratio": self.ratio,
        }  # fmt: skip


class Unmatched(NamedTuple):
    """Spans in only one timeline. count: per rank and step. seconds: per rank and step; None as in
    ``ComparedRow``. example: one span's name."""

    kind: str
    site: str
    direction: str
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]: a key of the JSON
    seconds: float | None
    example: str


@dataclass(frozen=True)
class Comparison:
    """The comparison of two timelines. steps, ranks: those in both timelines; nothing else is
    compared. rows: spans in both. not_measured, not_planned: spans in the first, or in the second,
    alone. predicted, measured: seconds of all communication of a rank in a step, in the first and
    the second timeline; None as in ``ComparedRow``."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[ComparedRow, ...]
    not_measured: tuple[Unmatched, ...]
    not_planned: tuple[Unmatched, ...]
    predicted: Exposure | None
    measured: Exposure


class AxisOverlap(NamedTuple):
    """The overlap of an axis' communication with computation, in the mean rank's mean step.
    planned, measured: hidden share of the communication. total, exposed: measured seconds
    (``core.record.exposure``). to_be_exposed: predicted exposed seconds."""

    axis: str
    planned: float
    measured: float
    total: float
    exposed: float
    to_be_exposed: float = 0.0

    @property
    def missed(self) -> float:
        """Seconds that were to be hidden and were not."""
        return max(0.0, self.planned - self.measured) * self.total


class Prediction(NamedTuple):
    """A recording compared with its plan. rows: ops by axis and exposed communication by axis, the
    longest first, over ``ranks`` ranks and ``steps`` steps from ``first`` to ``last``. seconds: of
    the predicted step; None if some of its costs are not measured. matched: share of the measured
    spans, of predicted kinds, that were predicted."""

    rows: tuple[ComparedRow, ...]
    overlap: tuple[AxisOverlap, ...]
    seconds: float | None
    matched: float
    steps: int = 0
    first: int = 0
    last: int = 0
    ranks: int = 0


def compare(predicted: pl.DataFrame, measured: pl.DataFrame, *, timed: Collection[str] | None = None) -> Comparison:
    """Compare the steps of ranks that two timelines have in common. Both are in the columns of
    timeline files, with times in seconds. Rows are in order of measured time.

    timed: kinds whose predicted times are meaningful; None: all. For other kinds only the presence
    of spans is compared. Raises DataError if no step of any rank is in both.
    """
    lanes = predicted.select(RANK_STEP).unique().join(measured.select(RANK_STEP).unique(), on=RANK_STEP)
    if lanes.is_empty():
        raise DataError("the two timelines have no step of any rank in common; name runs with spans of the same steps")
    left, right = (one.join(lanes, on=RANK_STEP, how="semi", maintain_order="left") for one in (predicted, measured))

    def told(row: Any, name: str) -> Any:
        return row if timed is None or row.kind in timed else row._replace(**{name: None})

    rows = _rows(_paired(left, right, ("step", *KEY)), GROUP_COLUMNS, lanes.height)
    return Comparison(
        steps=tuple(lanes["step"].unique().sort().to_list()),
        ranks=tuple(lanes["rank"].unique().sort().to_list()),
        rows=tuple(told(row, "predicted") for row in rows),
        not_measured=tuple(told(one, "seconds") for one in _unmatched(left, right, lanes.height)),
        not_planned=_unmatched(right, left, lanes.height),
        predicted=sum_exposure(exposed(left), lanes.height) if timed is None or "comm" in timed else None,
        measured=sum_exposure(exposed(right), lanes.height),
    )


def compare_with_plan(recording: Recording, predicted: Timeline, axes: pl.DataFrame) -> Prediction | None:
    """Compare a recording with one steady step of its plan, on the ranks in ``axes``. axes: the
    spans of ``predicted`` with their axes, in the recording's columns. Only measured costs are
    compared. Returns None if the two have nothing in common."""
    timed = axes.filter(pl.col("axis").is_in(MEASURED))
    steps = steady_steps(recording)
    of_ranks = recording.chosen(timed["rank"].unique().to_list(), steps)
    seen = of_ranks.filter(pl.col("axis").is_in(MEASURED), pl.col("kind").is_in(PLANNED))
    both = _paired(timed, seen, KEY)
    if both.is_empty() or not predicted.spans:
        return None
    first, second = _by_axis(axes), _by_axis(of_ranks)
    ends = timed["start", "end"].to_numpy()
    overlap = tuple(
        AxisOverlap(axis, first[axis].fraction or 0.0, second[axis].fraction or 0.0, *second[axis], first[axis].exposed)
        for axis in sorted(set(first) & set(second) & set(MEASURED))
    )
    ops = _rows(both.filter(pl.col("kind") != "wait"), ("kind", "axis", "direction"), both.select(RANK_STEP).n_unique())
    exposed = (ComparedRow(EXPOSED, one.axis, "", one.to_be_exposed, one.exposed) for one in overlap)
    return Prediction(
        rows=tuple(sorted((*ops, *exposed), key=lambda row: -row.measured)),
        overlap=overlap,
        seconds=float(np.ptp(ends)) if timed.height == axes.height else None,
        matched=both.height / max(1, seen.height),
        steps=len(steps), first=steps[0], last=steps[-1], ranks=timed["rank"].n_unique(),
    )  # fmt: skip


def _by_axis(spans: pl.DataFrame) -> dict[str, Exposure]:
    """Return total and exposed seconds of communication in a rank's mean step, by axis."""
    lanes = spans.select(RANK_STEP).n_unique()
    parts = exposed(spans, by_axis=True).partition_by("axis", as_dict=True)
    return {str(axis): sum_exposure(rows, lanes) for (axis,), rows in parts.items()}


def _paired(first: pl.DataFrame, second: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """Return the spans of ``second`` whose values in the columns ``key`` occur in ``first``, with
    the seconds of the first such span there (``planned``)."""
    planned = first.unique(key, keep="first", maintain_order=True).select(*key, planned=LENGTH)
    return second.join(planned, on=key)


def _rows(pairs: pl.DataFrame, by: Sequence[str], lanes: int) -> tuple[ComparedRow, ...]:
    found = pairs.group_by(by).agg(pl.sum("planned") / lanes, LENGTH.sum() / lanes)
    return tuple(sorted((ComparedRow(*row) for row in found.iter_rows()), key=lambda row: -row.measured))


def _unmatched(spans: pl.DataFrame, other: pl.DataFrame, lanes: int) -> tuple[Unmatched, ...]:
    alone = spans.join(other, on=("step", *KEY), how="anti", maintain_order="left")
    groups = alone.group_by(GROUP_COLUMNS, maintain_order=True).agg(
        pl.len() / lanes, LENGTH.sum() / lanes, pl.first("name")
    )  # fmt: skip
    found = (Unmatched(*row) for row in groups.iter_rows())
    return tuple(sorted(found, key=lambda one: (-(one.seconds or 0.0), one.example)))


def kinds_of_measured_costs(predicted: pl.DataFrame) -> Collection[str]:
    """Return the kinds of spans that a plan's measured costs predict. Communication is among them
    only if all of it is along ``MEASURED``."""
    names = predicted.filter(pl.col("kind").is_in(["comm", "wait"])).select("kind", "name").unique()
    along = {axis_of(*one) for one in names.iter_rows()}
    return ("compute", "comm", "wait") if along <= set(MEASURED) else ("compute",)


def table_of(timeline: Timeline) -> pl.DataFrame:
    """Return the spans of a timeline as a table in the columns of timeline files."""
    columns = timeline.columns()
    return pl.DataFrame(columns).cast({name: SPANS[name] for name in columns})  # type: ignore[arg-type]

"""Two timelines side by side: what a plan predicts and what was measured, or two runs of one job."""

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
from plait.diagnose.exposed import LANE, added_up, exposed
from plait.diagnose.recording import SPANS, Recording
from plait.diagnose.shares import steady

WHAT = ("kind", "site", "direction")
"""Columns that the rows of a comparison of two timelines are grouped by."""
KEY = ("rank", "kind", "name", "seq")
"""Columns that two timelines of one job are joined on, within a step: ``core.record.timeline.SpanKey``."""
LENGTH = pl.col("end") - pl.col("start")
LEAST = 1e-6
"""Seconds that are predicted from which on a ratio means something."""
MISSED = 0.01
"""Share of a step that was to be hidden and was not, from which on it is told."""
MEASURED = ("", "tp", "cp")
"""Axes whose costs are measured before training, with those of computation. Those of gradients, parameters
and tensors between stages are not."""
UNMEASURED = (
    "The plan holds no measured costs, so its times compare with nothing that was measured. Costs are measured before "
    'training where strategy.slices = "auto"; of any job by plait measure machine JOB, for plait plan JOB '
    "--evaluate cluster.profile=profile.json to predict from."
)
"""What is said in place of a comparison."""


class ComparedRow(NamedTuple):
    """Spans that both timelines have: seconds of a rank in a mean step. where: site or axis. predicted: None
    where no costs were measured to predict from."""

    kind: str
    where: str
    direction: str
    predicted: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where next to nothing is predicted."""
        return self.measured / self.predicted if self.predicted and self.predicted >= LEAST else None

    def named(self, where: str) -> dict[str, Any]:
        """The row for programs. where: name of that field."""
        return {
            "kind": self.kind, where: self.where, "direction": self.direction, "predicted": self.predicted,
            "measured": self.measured, "ratio": self.ratio,
        }  # fmt: skip


class Unmatched(NamedTuple):
    """Spans that only one timeline has: how many and how many seconds of a rank in a step, None as in
    ``ComparedRow``; the name of one."""

    kind: str
    site: str
    direction: str
    count: float
    seconds: float | None
    example: str


@dataclass(frozen=True)
class Comparison:
    """steps, ranks: in both timelines; nothing else is compared. predicted, measured: all communication of a
    rank in a step; None as in ``ComparedRow``."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[ComparedRow, ...]
    never_seen: tuple[Unmatched, ...]
    not_planned: tuple[Unmatched, ...]
    predicted: Exposure | None
    measured: Exposure


class AxisOverlap(NamedTuple):
    """An axis' communication in the mean rank's mean step: shares that computation was to hide, and did;
    seconds that it was under way, and exposed, as ``core.record.exposure`` defines them; predicted ones."""

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
    """rows: ops by axis, the longest first, and what is exposed of an axis; over ``steps`` from ``first`` to
    ``last``. seconds: of the step; None where some of it is not made of measured costs. matched: share of
    measured spans that were predicted, of kinds that are."""

    rows: tuple[ComparedRow, ...]
    overlap: tuple[AxisOverlap, ...]
    seconds: float | None
    matched: float
    steps: int = 0
    first: int = 0
    last: int = 0


def compare(predicted: pl.DataFrame, measured: pl.DataFrame, *, timed: Collection[str] | None = None) -> Comparison:
    """The steps of ranks that two timelines have in common; both in columns of a timeline's files, times in
    seconds. Rows in order of their measured time. timed: kinds of which the times of the first mean anything,
    all if None; of others only which spans there are is compared. Raises DataError if no step of any rank is
    in both."""
    lanes = predicted.select(LANE).unique().join(measured.select(LANE).unique(), on=LANE)
    if lanes.is_empty():
        raise DataError("the two timelines have no step of any rank in common")
    left, right = (one.join(lanes, on=LANE, how="semi", maintain_order="left") for one in (predicted, measured))

    def told(row: Any, name: str) -> Any:
        return row if timed is None or row.kind in timed else row._replace(**{name: None})

    rows = _rows(_paired(left, right, ("step", *KEY)), WHAT, lanes.height)
    return Comparison(
        steps=tuple(lanes["step"].unique().sort().to_list()),
        ranks=tuple(lanes["rank"].unique().sort().to_list()),
        rows=tuple(told(row, "predicted") for row in rows),
        never_seen=tuple(told(one, "seconds") for one in _unmatched(left, right, lanes.height)),
        not_planned=_unmatched(right, left, lanes.height),
        predicted=added_up(exposed(left), lanes.height) if timed is None or "comm" in timed else None,
        measured=added_up(exposed(right), lanes.height),
    )


def against(recording: Recording, predicted: Timeline, axes: pl.DataFrame) -> Prediction | None:
    """A recording beside one steady step that its plan predicts, of the ranks that are to be compared. axes:
    the spans of ``predicted`` with their axes, as the recording has them. Only what is made of measured costs
    is compared. None where the two have nothing in common."""
    timed = axes.filter(pl.col("axis").is_in(MEASURED))
    steps = steady(recording)
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
    ops = _rows(both.filter(pl.col("kind") != "wait"), ("kind", "axis", "direction"), both.select(LANE).n_unique())
    exposed = (ComparedRow(EXPOSED, one.axis, "", one.to_be_exposed, one.exposed) for one in overlap)
    return Prediction(
        rows=tuple(sorted((*ops, *exposed), key=lambda row: -row.measured)),
        overlap=overlap,
        seconds=float(np.ptp(ends)) if timed.height == axes.height else None,
        matched=both.height / max(1, seen.height),
        steps=len(steps), first=steps[0], last=steps[-1],
    )  # fmt: skip


def _by_axis(spans: pl.DataFrame) -> dict[str, Exposure]:
    """Communication of a rank's mean step by axis."""
    lanes = spans.select(LANE).n_unique()
    parts = exposed(spans, by_axis=True).partition_by("axis", as_dict=True)
    return {str(axis): added_up(rows, lanes) for (axis,), rows in parts.items()}


def _paired(first: pl.DataFrame, second: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """Spans of ``second`` whose key a span of ``first`` has, with its seconds (``planned``); of several the
    first."""
    planned = first.unique(key, keep="first", maintain_order=True).select(*key, planned=LENGTH)
    return second.join(planned, on=key)


def _rows(pairs: pl.DataFrame, by: Sequence[str], lanes: int) -> tuple[ComparedRow, ...]:
    found = pairs.group_by(by).agg(pl.col("planned").sum() / lanes, LENGTH.sum() / lanes)
    return tuple(sorted((ComparedRow(*row) for row in found.iter_rows()), key=lambda row: -row.measured))


def _unmatched(spans: pl.DataFrame, other: pl.DataFrame, lanes: int) -> tuple[Unmatched, ...]:
    alone = spans.join(other, on=("step", *KEY), how="anti", maintain_order="left")
    groups = alone.group_by(WHAT, maintain_order=True).agg(
        pl.len() / lanes, LENGTH.sum() / lanes, pl.col("name").first()
    )  # fmt: skip
    found = (Unmatched(*row) for row in groups.iter_rows())
    return tuple(sorted(found, key=lambda one: (-(one.seconds or 0.0), one.example)))


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

"""Two timelines side by side: what was predicted and what was measured, or two runs of one job."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from plait.core.base.errors import DataError
from plait.core.record.timeline import Hidden

WHAT = ("kind", "site", "direction")
"""The rows of a comparison."""
LANE = ("step", "rank")
KEY = (*LANE, "kind", "name", "seq")
"""What two timelines of one job join on, as ``core.record.timeline.SpanKey``."""
LENGTH = pl.col("end") - pl.col("start")


class Row(NamedTuple):
    """Spans that both timelines have: seconds of a rank in a step. predicted: None where no costs were
    measured to predict from."""

    kind: str
    site: str
    direction: str
    predicted: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted to take any time."""
        return self.measured / self.predicted if self.predicted else None


class Unmatched(NamedTuple):
    """Spans that only one timeline has: how many and how many seconds of a rank in a step, None as in
    ``Row``; the name of one."""

    kind: str
    site: str
    direction: str
    count: float
    seconds: float | None
    example: str


@dataclass(frozen=True)
class Comparison:
    """steps, ranks: in both timelines; nothing else is compared. predicted, measured: all communication of a
    rank in a step; None as in ``Row``."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[Row, ...]
    never_seen: tuple[Unmatched, ...]
    not_planned: tuple[Unmatched, ...]
    predicted: Hidden | None
    measured: Hidden


def compare(predicted: pl.DataFrame, measured: pl.DataFrame, *, timed: Collection[str] | None = None) -> Comparison:
    """Spans in the columns of a timeline's files, times in seconds. Rows in order of their measured time.
    timed: kinds of which the times of the first mean anything, all if None; of others only which spans there
    are is compared. Raises DataError if no step of any rank is in both."""
    lanes = predicted.select(LANE).unique().join(measured.select(LANE).unique(), on=LANE)
    if lanes.is_empty():
        raise DataError("the two timelines have no step of any rank in common")
    left, right = (one.join(lanes, on=LANE, how="semi", maintain_order="left") for one in (predicted, measured))

    def told(row: Any, name: str) -> Any:
        return row if timed is None or row.kind in timed else row._replace(**{name: None})

    planned = left.unique(KEY, keep="first", maintain_order=True).select(*KEY, planned=LENGTH)
    pairs = right.join(planned, on=KEY)
    rows = pairs.group_by(WHAT).agg(pl.col("planned").sum() / lanes.height, LENGTH.sum() / lanes.height)
    return Comparison(
        steps=tuple(lanes["step"].unique().sort().to_list()),
        ranks=tuple(lanes["rank"].unique().sort().to_list()),
        rows=tuple(sorted((told(Row(*row), "predicted") for row in rows.iter_rows()), key=lambda row: -row.measured)),
        never_seen=tuple(told(one, "seconds") for one in _unmatched(left, right, lanes.height)),
        not_planned=_unmatched(right, left, lanes.height),
        predicted=hidden_in(hidden_by_lane(left), lanes.height) if timed is None or "comm" in timed else None,
        measured=hidden_in(hidden_by_lane(right), lanes.height),
    )


def hidden_by_lane(spans: pl.DataFrame) -> pl.DataFrame:
    """Per step and rank ``core.record.timeline.hidden``, in seconds: ``total``, ``exposed``, ``waiting``."""
    lanes = spans.select(LANE).unique()
    for name, kinds in (("total", ["comm"]), ("waited", ["wait"]), ("either", ["comm", "wait"])):
        lanes = lanes.join(_busy(spans.filter(pl.col("kind").is_in(kinds)), name), on=LANE, how="left")
    total, waited, either = (pl.col(name).fill_null(0.0) for name in ("total", "waited", "either"))
    exposed = (total + waited - either).clip(0.0, total)
    return lanes.select(*LANE, total=total, exposed=exposed, waiting=waited - exposed).sort(LANE)


def _busy(spans: pl.DataFrame, name: str) -> pl.DataFrame:
    """Per step and rank, how long at least one of these was under way."""
    before = pl.col("end").cum_max().shift(1).over(LANE, order_by="start")
    alone = (pl.col("end") - pl.max_horizontal("start", before)).clip(0)
    return spans.with_columns(alone=alone).group_by(LANE).agg(pl.col("alone").sum().alias(name))


def hidden_in(lanes: pl.DataFrame, steps: int = 1) -> Hidden:
    """All that ``hidden_by_lane`` found added up, over so many steps of a rank."""
    return Hidden(*(float(lanes[name].sum()) / steps for name in Hidden._fields))


def _unmatched(spans: pl.DataFrame, other: pl.DataFrame, lanes: int) -> tuple[Unmatched, ...]:
    alone = spans.join(other, on=KEY, how="anti", maintain_order="left")
    groups = alone.group_by(WHAT, maintain_order=True).agg(
        pl.len() / lanes, LENGTH.sum() / lanes, pl.col("name").first()
    )  # fmt: skip
    found = (Unmatched(*row) for row in groups.iter_rows())
    return tuple(sorted(found, key=lambda one: (-(one.seconds or 0.0), one.example)))

"""What a run's timeline says in few numbers: a mean step by kind of op, how much communication was hidden,
over the whole run as far as it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from plait.core.record.exposure import Exposure
from plait.diagnose.compare import LENGTH, WHAT
from plait.diagnose.exposed import added_up, exposed

GROUPS = 5
"""Groups of steps over which the trend of hidden communication is shown."""
SLOWEST = 3
"""Steps that are named."""


class What(NamedTuple):
    """Seconds of a rank's mean step: of the last steps, whose spans are kept, and of all, from roll-ups; None
    where there are none, or none of it."""

    kind: str
    site: str
    direction: str
    seconds: float | None
    of_all: float | None


class StepGroup(NamedTuple):
    """Some steps that follow each other. hidden: of those whose spans are kept, all or a sample."""

    first: int
    last: int
    hidden: Exposure


class Slow(NamedTuple):
    """A step that took long. seconds: of the rank that took the longest; times: of the median step."""

    step: int
    seconds: float
    times: float


@dataclass(frozen=True)
class TimelineSummary:
    """spans: how many are kept of the last steps, sampled: of others. lanes: steps of ranks whose spans are
    kept. ranks: whose these are. steps: that are known at all, from 0. hidden: over all lanes, of nothing
    where spans tell communication alone; hidden_first: the same of rank 0 alone, of which a run's own lines
    tell. slowest: the longest first."""

    spans: int
    sampled: int
    lanes: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    hidden: Exposure
    hidden_first: Exposure
    whats: tuple[What, ...]
    trend: tuple[StepGroup, ...]
    slowest: tuple[Slow, ...]


def summarise(spans: pl.DataFrame, sampled: pl.DataFrame, rollups: pl.DataFrame) -> TimelineSummary:
    """spans: of the last steps. sampled: of some before them. rollups: of all, or nothing."""
    lanes = spans.select("step", "rank").n_unique()
    rollups = rollups.with_columns(pl.col(WHAT).cast(pl.String))
    known = pl.concat([spans["step"], sampled["step"], rollups["step"]]).unique().sort().to_list()
    recent = exposed(spans)
    by_lane, telling = pl.concat([exposed(sampled), recent]), recent if _tells_work(spans) else recent.clear()
    return TimelineSummary(
        spans=spans.height,
        sampled=sampled.height,
        lanes=lanes,
        ranks=tuple(spans["rank"].unique().sort().to_list()),
        steps=tuple(known),
        hidden=added_up(telling),
        hidden_first=added_up(telling.filter(pl.col("rank") == 0)),
        whats=_whats(spans, rollups, lanes),
        trend=_trend(by_lane),
        slowest=_slowest(rollups),
    )


def _tells_work(spans: pl.DataFrame) -> bool:
    """Whether spans tell more than communication, so that what was hidden can be known: dumps of hangs do
    not."""
    return bool((~spans["kind"].is_in(["comm", "transfer"])).any())


def _whats(spans: pl.DataFrame, rollups: pl.DataFrame, lanes: int) -> tuple[What, ...]:
    own = spans.group_by(WHAT).agg(seconds=LENGTH.sum() / max(1, lanes))
    every = rollups.select("step", "rank").n_unique()
    kinds = ("compute", "wait", "comm", "idle", "transfer", "data", "optimizer", "checkpoint", "evaluation")
    told = rollups.filter(pl.col("kind").is_in(kinds)).with_columns(
        site=pl.when(pl.col("site") == "").then(pl.col("kind")).otherwise("site")  # as spans without a place have it
    )
    all_of_them = told.group_by(WHAT).agg(of_all=pl.col("sum").sum() / max(1, every))
    both = own.join(all_of_them, on=WHAT, how="full", coalesce=True)
    ordered = both.sort(pl.max_horizontal("seconds", "of_all"), descending=True)
    return tuple(What(*row) for row in ordered.select(*WHAT, "seconds", "of_all").iter_rows())


def _trend(lanes: pl.DataFrame) -> tuple[StepGroup, ...]:
    """A few groups of equally many steps."""
    steps = lanes.group_by("step").agg(pl.col(*Exposure._fields).sum()).sort("step")
    size = max(1, -(-steps.height // GROUPS))
    groups = [steps.slice(at, size) for at in range(0, steps.height, size)]
    return tuple(StepGroup(own["step"][0], own["step"][-1], added_up(own)) for own in groups)


def _slowest(rollups: pl.DataFrame) -> tuple[Slow, ...]:
    """Of the steps that took at least a quarter longer than the median one."""
    steps = rollups.filter(pl.col("kind") == "step").group_by("step").agg(pl.col("sum").max())
    if steps.is_empty():
        return ()
    median = float(steps["sum"].median())  # type: ignore[arg-type]
    slow = steps.filter(pl.col("sum") > 1.25 * median).sort("sum", descending=True).head(SLOWEST)
    return tuple(Slow(step, seconds, seconds / median) for step, seconds in slow.iter_rows()) if median > 0 else ()

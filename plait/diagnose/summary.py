"""What a run's timeline says in few numbers: a mean step by kind of op, how much communication was hidden,
over the whole run as far as it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from plait.core.record.exposure import Exposure
from plait.core.record.rollup import COMMUNICATION, EXPOSED
from plait.diagnose.compare import LENGTH, WHAT
from plait.diagnose.exposed import LANE, added_up, exposed
from plait.diagnose.recording import Recording
from plait.diagnose.shares import steady, steps_of

GROUPS = 5
"""Groups of steps over which the trend of hidden communication is shown."""
SLOWEST = 3
"""Steps that are named."""
KINDS = ("compute", "wait", "comm", "idle", "transfer", "data", "optimizer", "checkpoint", "evaluation")


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
    """spans: how many are kept of the last steps, sampled: of others. last, every: the steps that numbers are
    means over, from 0, in order, without the run's first. ranks: whose spans are kept. waited: seconds of the
    exposed communication in which the rank's program stood in a wait. hidden: of the mean rank, of nothing
    where spans tell communication alone; hidden_first: of rank 0 alone, of which a run's own lines tell;
    hidden_of_all: over all steps, None where roll-ups do not tell it. slowest: the longest first."""

    spans: int
    sampled: int
    last: tuple[int, ...]
    every: tuple[int, ...]
    ranks: tuple[int, ...]
    hidden: Exposure
    hidden_first: Exposure
    hidden_of_all: Exposure | None
    waited: float
    whats: tuple[What, ...]
    trend: tuple[StepGroup, ...]
    slowest: tuple[Slow, ...]


def summarise(recording: Recording) -> TimelineSummary:
    """Numbers of a recording's timeline, over the steps that the rest of the diagnosis is over, too."""
    last = steady(recording) if recording.spans.height else []
    every = [step for step in recording.steps if step > 0] or recording.steps
    drawn = pl.col("step").is_in([*recording.sampled])
    spans = recording.spans.filter(pl.col("step").is_in(last))
    lanes = max(1, spans.select(LANE).n_unique())
    by_lane = exposed(recording.spans)
    of_last = by_lane.filter(pl.col("step").is_in(last)) if _tells_work(spans) else by_lane.clear()
    first = of_last.filter(pl.col("rank") == 0)
    rollup = recording.rollup.filter(pl.col("step").is_in(every)).with_columns(pl.col(WHAT).cast(pl.String))
    return TimelineSummary(
        spans=recording.spans.filter(~drawn).height,
        sampled=recording.spans.filter(drawn).height,
        last=tuple(last),
        every=tuple(every),
        ranks=tuple(spans["rank"].unique().sort().to_list()),
        hidden=added_up(of_last, lanes),
        hidden_first=added_up(first, first.height),
        hidden_of_all=_of_all(rollup),
        waited=float(spans.filter(pl.col("kind") == "wait").select(LENGTH.sum()).item() or 0.0) / lanes,
        whats=_whats(spans, rollup, lanes),
        trend=_trend(by_lane),
        slowest=_slowest(recording),
    )


def _tells_work(spans: pl.DataFrame) -> bool:
    """Whether spans tell more than communication, so that what was hidden can be known: dumps of hangs do
    not."""
    return bool((~spans["kind"].is_in(["comm", "transfer"])).any())


def _of_all(rollup: pl.DataFrame) -> Exposure | None:
    """Of the mean rank in the mean step, where the roll-ups of all that communicate tell it."""
    communicates = rollup.filter(pl.col("kind").is_in(["comm", "wait"])).select(LANE).unique()
    told = rollup.filter(pl.col("kind") == COMMUNICATION)
    if told.is_empty() or communicates.join(told, on=LANE, how="anti").height:
        return None
    lanes = rollup.select(LANE).n_unique()
    still = rollup.filter(pl.col("kind") == EXPOSED)["seconds"].sum()
    return Exposure(float(told["seconds"].sum()) / lanes, float(still) / lanes)


def _whats(spans: pl.DataFrame, rollup: pl.DataFrame, lanes: int) -> tuple[What, ...]:
    own = spans.group_by(WHAT).agg(seconds=LENGTH.sum() / lanes)
    every = max(1, rollup.select(LANE).n_unique())
    told = rollup.filter(pl.col("kind").is_in(KINDS)).with_columns(
        site=pl.when(pl.col("site") == "").then(pl.col("kind")).otherwise("site")  # as spans without a place have it
    )
    all_of_them = told.group_by(WHAT).agg(of_all=pl.col("seconds").sum() / every)
    both = own.join(all_of_them, on=WHAT, how="full", coalesce=True)
    ordered = both.sort(-pl.max_horizontal("seconds", "of_all"), *WHAT)
    return tuple(What(*row) for row in ordered.select(*WHAT, "seconds", "of_all").iter_rows())


def _trend(lanes: pl.DataFrame) -> tuple[StepGroup, ...]:
    """A few groups of equally many steps."""
    steps = lanes.group_by("step").agg(pl.col(*Exposure._fields).sum()).sort("step")
    size = max(1, -(-steps.height // GROUPS))
    groups = [steps.slice(at, size) for at in range(0, steps.height, size)]
    return tuple(StepGroup(own["step"][0], own["step"][-1], added_up(own)) for own in groups)


def _slowest(recording: Recording) -> tuple[Slow, ...]:
    """Of the steps that took at least a quarter longer than the median one."""
    known = steps_of(recording, ())
    if known is None or not known.median > 0:
        return ()
    slow = sorted(
        ((seconds, step) for step, seconds in recording.seconds.items() if step > 0 and seconds > 1.25 * known.median),
        reverse=True,
    )
    return tuple(Slow(step, seconds, seconds / known.median) for seconds, step in slow[:SLOWEST])

"""Series over a run's steps, its attempts, and a summary of its timeline: a mean step by kind of
op, and how much communication was hidden."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import polars as pl

from plait.core.base.codec.json_text import is_list, is_table
from plait.core.cluster.mfu import mfu_of
from plait.core.record.exposure import Exposure
from plait.core.record.rollup import COMMUNICATION, EXPOSED
from plait.core.runs.memory_peaks import TENSORS
from plait.diagnose.measured.compare import GROUP_COLUMNS, LENGTH
from plait.diagnose.measured.recording import RANK_STEP, Recording, exposed, sum_exposure
from plait.diagnose.measured.shares import steady_steps, steps_of

SERIES = {
    "seconds": "seconds of a step",
    "loss": "loss",
    "eval_loss": "loss in evaluations",
    "tokens_per_second": "tokens a second",
    "mfu": "model FLOPs utilisation",
    "hidden": "communication hidden",
    "norm": "norm of the gradients",
}
"""Titles of the quantities of metrics.jsonl that are shown over steps, by key."""


NEVER = "never trained"
"""Text in place of the last step of an attempt that did none."""
GROUPS = 5
"""Number of groups of steps in the trend of hidden communication."""
SLOWEST = 3
"""The largest number of slow steps that are listed."""
SERIES_KINDS = ("compute", "wait", "comm", "idle", "transfer", "data", "optimizer", "checkpoint", "evaluation")


class StepSeries(NamedTuple):
    """A quantity over steps. steps: counted from 1. values: one for each step."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class AttemptRow(NamedTuple):
    """A start of the run, as texts for people; empty if unknown."""

    number: str
    started: str
    ended: str
    outcome: str
    cause: str
    hosts: str
    step: str


def series_of(metrics: Iterable[Mapping[str, Any]], names: Sequence[str] = tuple(SERIES)) -> list[StepSeries]:
    """Return the quantities ``names`` over steps, without those that no line has. Values that are
    no finite numbers are left out."""
    rows = [line for line in metrics if _number(line.get("step")) is not None]
    found: list[StepSeries] = []
    for name in names:
        pairs = [(int(line["step"]), value) for line in rows if (value := _number(_read(line, name))) is not None]
        if pairs:
            found.append(StepSeries(name, *zip(*pairs, strict=True)))
    return found


def _read(line: Mapping[str, Any], name: str) -> Any:
    return mfu_of(line) if name == "mfu" else line.get(name)


def memory_of(metrics: Sequence[Mapping[str, Any]]) -> list[StepSeries]:
    """Return the bytes of a rank's tensors over steps, one series for every rank in the metrics."""
    told = [(line.get("step"), line.get(TENSORS)) for line in metrics]
    rows = [{"step": step} | {f"tensors, {rank}": size for rank, size in (of if is_table(of) else {}).items()}
            for step, of in told]  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    return series_of(rows, names)


def attempts_of(lines: Sequence[Mapping[str, Any]], *, live: bool) -> list[AttemptRow]:
    """Return the rows of attempts.jsonl. live: True if the run is still running; otherwise an
    attempt recorded as running was cut off together with its launcher."""
    found: list[AttemptRow] = []
    for number, line in enumerate(lines, 1):
        hosts, step = line.get("hosts"), line.get("step", line.get("steps", ""))
        cut_off = line.get("outcome") == "running" and not live
        found.append(
            AttemptRow(
                str(line.get("attempt", number)), _moment(line.get("started")), _moment(line.get("ended")),
                "cut off" if cut_off else str(line.get("outcome") or ""), str(line.get("cause") or ""),
                ", ".join(map(str, hosts)) if is_list(hosts) else str(hosts or ""),
                NEVER if _number(step) == -1 else str(step),
            )
        )  # fmt: skip
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _moment(value: Any) -> str:
    """Return a time, in seconds since 1970, as text; any other value as it is."""
    number = _number(value)
    if number is None:
        return str(value or "")
    try:
        return datetime.fromtimestamp(number, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return str(value)


class OpSeconds(NamedTuple):
    """Seconds of a kind of op in a rank's mean step. seconds: over the last steps, whose spans are
    kept. all_steps: over all steps, from roll-ups. None if unknown."""

    kind: str
    site: str
    direction: str
    seconds: float | None
    all_steps: float | None


class StepGroup(NamedTuple):
    """Consecutive steps, from ``first`` to ``last``. hidden: total and exposed communication in
    seconds, of the steps in the group whose spans are kept, all or a sample."""

    first: int
    last: int
    hidden: Exposure


class SlowStep(NamedTuple):
    """A slow step. seconds: its length on the slowest rank. times: its length as a multiple of the
    median step's."""

    step: int
    seconds: float
    times: float


@dataclass(frozen=True)
class TimelineSummary:
    """A summary of a timeline. spans: number of spans kept of the last steps; sampled: of older
    steps. last, every: the last steps and all steps, over which means are taken, from 0, in order,
    without the run's first. ranks: ranks with spans.

    waited: seconds of exposed communication in which the rank's program was in a wait. hidden: of
    the mean rank; zero if spans show communication alone. hidden_first: of rank 0, which
    metrics.jsonl also holds. hidden_of_all: over all steps; None if roll-ups lack it. slowest: the
    slowest step first.
    """

    spans: int
    sampled: int
    last: tuple[int, ...]
    every: tuple[int, ...]
    ranks: tuple[int, ...]
    hidden: Exposure
    hidden_first: Exposure
    hidden_of_all: Exposure | None
    waited: float
    whats: tuple[OpSeconds, ...]
    trend: tuple[StepGroup, ...]
    slowest: tuple[SlowStep, ...]


def summarise(recording: Recording) -> TimelineSummary:
    """Return the summary of a recording's timeline, over the last steps without the run's first."""
    last = steady_steps(recording) if recording.spans.height else []
    every = [step for step in recording.steps if step > 0] or recording.steps
    drawn = pl.col("step").is_in([*recording.sampled])
    spans = recording.spans.filter(pl.col("step").is_in(last))
    lanes = max(1, spans.select(RANK_STEP).n_unique())
    by_lane = exposed(recording.spans)
    of_last = by_lane.filter(pl.col("step").is_in(last)) if _has_work(spans) else by_lane.clear()
    first = of_last.filter(rank=0)
    rollup = recording.rollup.filter(pl.col("step").is_in(every)).with_columns(pl.col(GROUP_COLUMNS).cast(pl.String))
    return TimelineSummary(
        spans=recording.spans.filter(~drawn).height,
        sampled=recording.spans.filter(drawn).height,
        last=tuple(last),
        every=tuple(every),
        ranks=tuple(spans["rank"].unique().sort().to_list()),
        hidden=sum_exposure(of_last, lanes),
        hidden_first=sum_exposure(first, first.height),
        hidden_of_all=_of_all(rollup),
        waited=float(spans.filter(kind="wait").select(LENGTH.sum()).item() or 0.0) / lanes,
        whats=_whats(spans, rollup, lanes),
        trend=_trend(by_lane),
        slowest=_slowest(recording),
    )


def _has_work(spans: pl.DataFrame) -> bool:
    """True if spans show more than communication, so that hidden communication can be computed.
    Dumps of hangs do not."""
    return bool((~spans["kind"].is_in(["comm", "transfer"])).any())


def _of_all(rollup: pl.DataFrame) -> Exposure | None:
    """Return total and exposed seconds of communication of the mean rank's mean step over all
    steps; None if a roll-up with communication lacks them."""
    communicates = rollup.filter(pl.col("kind").is_in(["comm", "wait"])).select(RANK_STEP).unique()
    told = rollup.filter(kind=COMMUNICATION)
    if told.is_empty() or communicates.join(told, on=RANK_STEP, how="anti").height:
        return None
    lanes = rollup.select(RANK_STEP).n_unique()
    still = rollup.filter(kind=EXPOSED)["seconds"].sum()
    return Exposure(float(told["seconds"].sum()) / lanes, float(still) / lanes)


def _whats(spans: pl.DataFrame, rollup: pl.DataFrame, lanes: int) -> tuple[OpSeconds, ...]:
    own = spans.group_by(GROUP_COLUMNS).agg(seconds=LENGTH.sum() / lanes)
    every = max(1, rollup.select(RANK_STEP).n_unique())
    told = rollup.filter(pl.col("kind").is_in(SERIES_KINDS)).with_columns(
        site=pl.when(pl.col("site") == "").then(pl.col("kind")).otherwise("site")  # as for spans without a site
    )
    all_of_them = told.group_by(GROUP_COLUMNS).agg(all_steps=pl.sum("seconds") / every)
    both = own.join(all_of_them, on=GROUP_COLUMNS, how="full", coalesce=True)
    ordered = both.sort(-pl.max_horizontal("seconds", "all_steps"), *GROUP_COLUMNS)
    return tuple(OpSeconds(*row) for row in ordered.select(*GROUP_COLUMNS, "seconds", "all_steps").iter_rows())


def _trend(lanes: pl.DataFrame) -> tuple[StepGroup, ...]:
    """Return total and exposed communication of ``GROUPS`` groups with equally many steps. lanes:
    these seconds for each (rank, step)."""
    steps = lanes.group_by("step").agg(pl.col(*Exposure._fields).sum()).sort("step")
    size = max(1, -(-steps.height // GROUPS))
    groups = [steps.slice(at, size) for at in range(0, steps.height, size)]
    return tuple(StepGroup(own["step"][0], own["step"][-1], sum_exposure(own)) for own in groups)


def _slowest(recording: Recording) -> tuple[SlowStep, ...]:
    """Return the slowest steps that took at least a quarter longer than the median step."""
    known = steps_of(recording, ())
    if known is None or not known.median > 0:
        return ()
    slow = sorted(
        ((seconds, step) for step, seconds in recording.seconds.items() if step > 0 and seconds > 1.25 * known.median),
        reverse=True,
    )
    return tuple(SlowStep(step, seconds, seconds / known.median) for seconds, step in slow[:SLOWEST])

"""Where the step went, and how that changed: seconds of the mean rank in the mean step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.numbers import is_number
from plait.diagnose.awaited import awaited
from plait.diagnose.exposed import exposed
from plait.diagnose.noise import SIGMA
from plait.diagnose.recording import AFTER, Recording

NAMES = {
    "compute": "computing", "tp": "exposed tp communication", "cp": "exposed cp communication",
    "dp": "exposed dp communication", "pp": "exposed pp transfers", "other": "other collectives",
    "idle": "waiting for other ranks", "bubble": "idle: nothing to do yet (bubble)", "data": "waiting for data",
    "optimizer": "optimizer", "checkpoint": "checkpoint", "evaluation": "evaluation", "host": "host, between ops",
    "exposed": "exposed communication", "rest": "beside recorded ops",
}  # fmt: skip
CHANGED = 0.03
"""Share by which steps must have become longer or shorter to be told."""
CLEAR = 6.0
"""And how many standard errors."""


class StepShare(NamedTuple):
    """what: a key of ``NAMES``. seconds: of a step. late: of ``seconds``, what was waiting for the last of a
    group to arrive, where that is known. share: of the step; of what is ``AFTER`` it, how much longer it is
    with that."""

    what: str
    seconds: float
    late: float | None = None
    share: float = 0.0


class Drift(NamedTuple):
    """Median seconds of a step in the first and in the last quarter. grew: what changed most, and by how many
    seconds, likewise; of: that is this share of the change, more than 1 where something else changed the
    other way."""

    first: float
    last: float
    grew: str
    by: float
    of: float

    @property
    def share(self) -> float:
        """By which steps are longer at the end."""
        return self.last / self.first - 1 if self.first > 0 else 0.0


class StepTimes(NamedTuple):
    """Of all steps but a run's first: seconds, and how many tokens a second the median one is."""

    count: int
    first: int
    last: int
    median: float
    p10: float
    p90: float
    longest: float
    longest_at: int
    tokens_per_second: float | None


def steady(recording: Recording) -> list[int]:
    """Steps without the run's first, which is like no other; those whose spans are kept, if there are any,
    because roll-ups do not tell all axes apart."""
    spans = recording.spans.filter(pl.col("kind") == "compute")["step"].unique().sort().to_list()
    steps = recording.steps
    return [step for step in spans if step > 0] or [step for step in steps if step > 0] or steps


def shares(recording: Recording) -> list[StepShare]:
    """The largest first. They add up to the mean step, with the evaluations and checkpoints after it."""
    steps = steady(recording)
    found = {what: seconds for what, seconds in _means(recording, steps).items() if seconds > 0}
    inside = sum(seconds for what, seconds in found.items() if what not in AFTER)
    late = _late(recording, steps)
    return sorted(
        (
            StepShare(what, seconds, late.get(what), seconds / inside if inside > 0 else 0.0)
            for what, seconds in found.items()
        ),
        key=lambda one: -one.seconds,
    )


def _seconds(recording: Recording, steps: Sequence[int]) -> pl.DataFrame:
    """Rows (step, what, seconds) that add up to the time on the processors of all ranks."""
    rollup = recording.rollup.filter(pl.col("step").is_in(list(steps)))
    kind, axis = pl.col("kind").cast(pl.String), pl.col("axis").cast(pl.String)
    if recording.blocking:
        own = rollup.filter(~kind.is_in(["comm", "transfer"])).with_columns(what=kind)
        other = rollup.filter((kind == "comm") & (axis == "other")).with_columns(what=pl.lit("other"))
        parts = [own, other, *_blocking(recording, steps)]
    else:
        own = rollup.filter(kind.is_in([*NAMES, "wait"]))
        own = own.with_columns(
            what=pl.when(kind == "wait").then(axis).when(kind == "idle").then(pl.lit("bubble")).otherwise(kind)
        )
        parts = [*_exposed(recording, own, steps), *_crossing(recording, steps)]
    return pl.concat([part.select("step", pl.col("what").cast(pl.String), "seconds") for part in parts])


def _exposed(recording: Recording, rows: pl.DataFrame, steps: Sequence[int]) -> list[pl.DataFrame]:
    """``rows``, where waits are replaced by exposed communication (``core.record.exposure``) if the spans of
    all steps are kept; roll-ups know no more than waits. What is exposed without a wait is no time of the
    host's between ops."""
    spans = recording.spans.filter(pl.col("step").is_in(list(steps)))
    if spans["step"].n_unique() < rows["step"].n_unique():
        return [rows]
    waits, lane = pl.col("kind").cast(pl.String) == "wait", ("step", "rank")
    found = exposed(spans, by_axis=True)
    host = rows.filter(pl.col("what") == "host").group_by(lane).agg(host=pl.col("seconds").sum())
    waited = rows.filter(waits).group_by(lane).agg(waited=pl.col("seconds").sum())
    still = found.group_by(lane).agg(pl.col("exposed").sum())
    still = still.join(host.cast({"rank": still.schema["rank"]}), on=lane).join(
        waited.cast({"rank": still.schema["rank"]}), on=lane, how="left"
    )
    beyond = (pl.col("exposed") - pl.col("waited").fill_null(0.0)).clip(0.0)
    return [
        rows.filter(~waits),
        found.select("step", what=pl.col("axis"), seconds=pl.col("exposed")),
        still.select("step", what=pl.lit("host"), seconds=-pl.min_horizontal(beyond, "host")),
    ]


def _blocking(recording: Recording, steps: Sequence[int]) -> list[pl.DataFrame]:
    """Of ranks that communicate in the middle of their program: the transfers, and the waiting for others."""
    met = recording.met.select("meeting", "transfer")
    length = pl.col("end") - pl.col("start")
    rows = recording.meetings.filter(pl.col("step").is_in(list(steps))).join(met, on="meeting")
    rows = rows.with_columns(moving=pl.min_horizontal(length, "transfer"), length=length)
    # Sends and receives of one batch begin and end together: their time passed once.
    rows = rows.unique(["step", "rank", "start"], keep="first")
    return [
        rows.select("step", what=pl.col("axis"), seconds="moving"),
        rows.select("step", what=pl.lit("idle"), seconds=pl.col("length") - pl.col("moving")),
    ]


def _crossing(recording: Recording, steps: Sequence[int]) -> list[pl.DataFrame]:
    """Of the time in which a stage waited for another, what a transfer took: from the bubble to pp."""
    spans = recording.spans.filter(pl.col("step").is_in(list(steps)))
    moves = spans.filter(pl.col("kind") == "transfer").group_by("meeting").agg(
        begun=pl.col("start").max(), over=pl.col("end").max()
    )  # fmt: skip
    waits = spans.filter(pl.col("kind") == "idle").join(moves, on="meeting")
    if waits.is_empty():
        return []
    if recording.clocks_agree:
        under = pl.min_horizontal("end", "over") - pl.max_horizontal("start", "begun")
    else:
        under = pl.min_horizontal(pl.col("over") - pl.col("begun"), pl.col("end") - pl.col("start"))
    moving = waits.select("step", seconds=under.clip(0))
    return [
        moving.with_columns(what=pl.lit("pp")),
        moving.with_columns(what=pl.lit("bubble"), seconds=-pl.col("seconds")),
    ]


def _late(recording: Recording, steps: Sequence[int]) -> dict[str, float]:
    """Of every axis' exposed communication, seconds of a rank and step in which it waited for the last to
    come, as far as waits have their collective and this all of its ranks."""
    if recording.blocking:
        return {}
    met = recording.meetings.filter(pl.col("step").is_in(list(steps)), pl.col("axis") != "pp")
    shortest = (pl.col("end") - pl.col("start")).min()  # that of the last: all leave at one moment
    last = pl.col("start").max() if recording.clocks_agree else pl.col("end") - shortest
    members = met.with_columns(last=last.over("meeting"), members=pl.len().over("meeting"))
    spans = recording.spans.filter(pl.col("step").is_in(list(steps)))
    one = ["meeting", "rank"]
    lasts = members.filter(pl.col("members") > 1).unique(one, keep="first", maintain_order=True).select(*one, "last")
    came = spans.select(one).with_row_index("on").join(lasts, on=one)
    waits = spans.select("axis", "start", "end").with_row_index("wait")
    found = awaited(spans).join(waits, on="wait").join(came.select("on", "last"), on="on")
    late = (pl.min_horizontal("end", "last") - pl.col("start")).clip(0)
    lanes = max(1, spans.select("step", "rank").n_unique())
    return dict(found.group_by("axis").agg(late.sum() / lanes).iter_rows())


def steps_of(recording: Recording, metrics: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """None where no step's length is known."""
    chosen = {step: seconds for step, seconds in recording.seconds.items() if step > 0} or dict(recording.seconds)
    if not chosen:
        return None
    seconds = np.array(list(chosen.values()))
    speeds = [one for one in metrics if all(is_number(one.get(name)) for name in ("seconds", "tokens_per_second"))]
    tokens = [float(one["tokens_per_second"]) * float(one["seconds"]) for one in speeds]
    at = max(chosen, key=lambda step: chosen[step])
    p10, median, p90 = (float(value) for value in np.quantile(seconds, (0.1, 0.5, 0.9)))
    return StepTimes(
        len(chosen), min(chosen), max(chosen), median, p10, p90, chosen[at], at,
        float(np.median(tokens)) / median if tokens and median > 0 else None,
    )  # fmt: skip


def drift_of(recording: Recording) -> Drift | None:
    """None where steps stayed as long as they were, or are too few or too uneven to tell."""
    steps = [step for step in sorted(recording.seconds) if step > 0]
    quarter = len(steps) // 4
    if quarter < 5:
        return None
    seconds = np.array([recording.seconds[step] for step in steps])
    first, last = float(np.median(seconds[:quarter])), float(np.median(seconds[-quarter:]))
    change = seconds[-quarter:], seconds[:quarter]
    error = max(SIGMA * float(np.median(np.abs(part - np.median(part)))) * 1.2533 / quarter**0.5 for part in change)
    if abs(last - first) < max(CHANGED * first, CLEAR * error):
        return None
    coarse = len(steady(recording)) < len(steps)
    before, after = (_typical(recording, some, coarse=coarse) for some in (steps[:quarter], steps[-quarter:]))
    grown = {what: after.get(what, 0.0) - before.get(what, 0.0) for what in {*before, *after} - set(AFTER)}
    direction = 1 if last > first else -1
    grew = max(sorted(grown), key=lambda what: direction * grown[what], default="rest")
    by = grown.get(grew, 0.0)
    return Drift(first, last, grew, by, by / (last - first))


def _means(recording: Recording, steps: Sequence[int]) -> dict[str, float]:
    """Seconds of the mean rank's step, which they add up to with ``rest``, and of what comes after it."""
    lanes = max(1, recording.rollup.filter(pl.col("step").is_in(list(steps))).select("step", "rank").n_unique())
    found = dict(_seconds(recording, steps).group_by("what").agg(pl.col("seconds").sum() / lanes).iter_rows())
    length = float(np.mean([recording.seconds[step] for step in steps if step in recording.seconds] or [0.0]))
    inside = sum(seconds for what, seconds in found.items() if what not in AFTER)
    return found | ({"rest": length - inside} if length > inside else {})


def _typical(recording: Recording, steps: Sequence[int], *, coarse: bool) -> dict[str, float]:
    """Medians over steps of the mean rank's seconds, as those of whole steps are. coarse: where some steps
    have roll-ups only, which tell no axes and not what passes between ops."""
    rows = _seconds(recording, steps)
    if coarse:
        what = pl.col("what").replace({"tp": "exposed", "dp": "exposed", "cp": "exposed", "pp": "bubble"})
        rows = rows.filter(pl.col("what") != "host").with_columns(what=what)
    ranks = recording.rollup.group_by("step").agg(ranks=pl.col("rank").n_unique())
    sums = rows.group_by("step", "what").agg(pl.col("seconds").sum()).join(ranks, on="step")
    table = sums.with_columns(pl.col("seconds") / pl.col("ranks")).pivot("what", index="step", values="seconds")
    lengths = pl.DataFrame({"step": list(steps), "length": [recording.seconds[step] for step in steps]})
    table = table.with_columns(pl.exclude("step").fill_null(0.0)).join(lengths, on="step")
    inside = [name for name in table.columns if name not in ("step", "length", *AFTER)]
    table = table.with_columns(rest=(pl.col("length") - pl.sum_horizontal(inside)).clip(0))
    return {name: float(table[name].median() or 0.0) for name in (*inside, "rest")}  # type: ignore[arg-type]

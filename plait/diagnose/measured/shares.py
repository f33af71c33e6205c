"""Break the step down: seconds of the mean rank in the mean step, and their drift over the run.

Every moment of a rank's step belongs to one part: computation, waiting for data, the optimizer,
waiting for another stage, exposed communication by axis (``core.record.exposure``), the host
between ops, or the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.numbers import is_number
from plait.core.record.rollup import COMMUNICATION, EXPOSED, HOST, STEP
from plait.diagnose.measured.recording import AFTER, RANK_STEP, Recording, exposed
from plait.diagnose.verdicts.outliers import SIGMA

NAMES = {
    "compute": "computing", "tp": "exposed tp communication", "cp": "exposed cp communication",
    "ep": "exposed ep communication",
    "dp": "exposed dp communication", "pp": "exposed pp transfers", "other": "other collectives",
    "idle": "waiting for other ranks", "bubble": "idle: nothing to do yet (bubble)", "data": "waiting for data",
    "optimizer": "optimizer", "checkpoint": "checkpoint", "evaluation": "evaluation", "host": "host, between ops",
    "rest": "beside recorded ops",
}  # fmt: skip
OWN = ("compute", "data", "optimizer", "idle", *AFTER)
"""Kinds of ops that are parts of the step by themselves; waits and communication are divided
further."""
CHANGED = 0.03
"""Least relative change of the step's length that counts as drift."""
CLEAR = 6.0
"""Least size of a drift, as a multiple of its standard error."""


class StepShare(NamedTuple):
    """A part of the mean step. what: a key of ``NAMES``. seconds: of a step. late: those of
    ``seconds`` spent waiting for the last rank of a group; None if unknown. share: of the step; a
    part ``AFTER`` the step counts in addition to the step's length."""

    what: str
    seconds: float
    late: float | None = None
    share: float = 0.0


class MeanStep(NamedTuple):
    """The mean rank's mean step over ``count`` steps, from ``first`` to ``last``. parts: the
    largest first; they add up to ``seconds``, except for parts ``AFTER`` a step."""

    seconds: float
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]: a key of the JSON
    first: int
    last: int
    parts: tuple[StepShare, ...]


class Drift(NamedTuple):
    """Seconds of the mean step in the first and the last quarter of the run, over the middle half
    of each quarter's steps by length. grew: the part that changed most in the step's direction;
    empty if unknown. before, after: that part's seconds in the same steps. So no part changes by
    more than its own length, and all changes add up."""

    first: float
    last: float
    grew: str = ""
    before: float = 0.0
    after: float = 0.0

    @property
    def share(self) -> float:
        """Relative growth of the step from the first to the last quarter."""
        return self.last / self.first - 1 if self.first > 0 else 0.0

    @property
    def by(self) -> float:
        """Seconds by which the part ``grew`` changed from the first to the last quarter."""
        return self.after - self.before

    @property
    def of(self) -> float:
        """Share of the step's change that is due to the part ``grew``; above 1 if other parts
        changed in the other direction."""
        return self.by / (self.last - self.first) if self.last != self.first else 0.0


class StepTimes(NamedTuple):
    """Seconds per step over all steps but a run's first. count: number of steps. first, last: their
    numbers. longest_at: the longest step. tokens_per_second: of the median step; None if unknown.
    """

    count: int  # pyright: ignore[reportIncompatibleMethodOverride]: a key of the JSON
    first: int
    last: int
    median: float
    p10: float
    p90: float
    longest: float
    longest_at: int
    tokens_per_second: float | None


def step_range(first: int, last: int) -> str:
    """Return steps, counted from 0, as text, in which they count from 1.

    >>> step_range(1, 11), step_range(4, 4)
    ('2 to 12', '5')
    """
    return f"{first + 1} to {last + 1}" if last > first else f"{first + 1}"


def steady_steps(recording: Recording) -> list[int]:
    """Return the last steps whose spans are kept, or else all steps, without the run's first, which
    is atypical."""
    spans = recording.spans.filter(kind="compute")["step"].unique().sort().to_list()
    kept = [step for step in spans if step not in recording.sampled] or spans
    return [step for step in kept if step > 0] or [step for step in recording.steps if step > 0] or recording.steps


def mean_step(recording: Recording, steps: Sequence[int] | None = None) -> MeanStep | None:
    """Return the breakdown of the mean rank's mean step, over ``steps`` or by default
    ``steady_steps``; None without any step."""
    steps = steady_steps(recording) if steps is None else steps
    if not steps:
        return None
    found = {what: seconds for what, seconds in _means(recording, steps).items() if seconds > 0}
    inside = sum(seconds for what, seconds in found.items() if what not in AFTER)
    late = _late(recording, steps)
    parts = (
        StepShare(
            what, seconds, min(seconds, late[what]) if what in late else None, seconds / inside if inside > 0 else 0.0
        )
        for what, seconds in found.items()
    )
    return MeanStep(inside, len(steps), steps[0], steps[-1], tuple(sorted(parts, key=lambda one: -one.seconds)))


def _means(recording: Recording, steps: Sequence[int], *, whole: bool = False) -> dict[str, float]:
    """Return seconds of the mean rank's mean step by part, with ``rest``. whole: do not split the
    waiting for other stages into transfers and the bubble, which needs spans."""
    rollup = recording.rollup.filter(pl.col("step").is_in(list(steps)))
    rows = rollup.with_columns(pl.col("kind", "axis").cast(pl.String)).sort(*RANK_STEP, "kind", "axis", "seconds")
    lanes = rows.select(RANK_STEP).unique()
    parts = _blocking(recording, rows, steps) if recording.blocking else _streaming(rows)
    if not recording.blocking and not whole:
        parts += _crossing(recording, steps)
    every = pl.concat([part.select("what", pl.col("seconds").cast(pl.Float64)) for part in parts])
    every = every.sort("what", "seconds")  # one order of summation, so that results are reproducible to the last digit
    count = max(1, lanes.height)
    found = dict(every.group_by("what", maintain_order=True).agg(pl.sum("seconds") / count).iter_rows())
    if not whole and not recording.blocking and "idle" in found:
        found["bubble"] = found.pop("idle")
    inside = sum(seconds for what, seconds in found.items() if what not in AFTER)
    rest = _length(recording, rows, lanes) - inside
    return found | ({"rest": rest} if rest > 0 else {})


def _length(recording: Recording, rows: pl.DataFrame, lanes: pl.DataFrame) -> float:
    """Return the seconds of the mean rank's mean step: as each rank recorded it, or else as
    metrics.jsonl holds it for all. lanes: the (rank, step) pairs that count."""
    known = pl.DataFrame({"step": list(recording.seconds), "length": list(recording.seconds.values())})
    own = rows.filter(kind=STEP).group_by(RANK_STEP).agg(pl.sum("seconds"))
    each = lanes.join(own, on=RANK_STEP, how="left").join(known.cast({"step": pl.Int64}), on="step", how="left")
    return float(each.sort(RANK_STEP).select(pl.coalesce("seconds", "length").mean()).item() or 0.0)


def _streaming(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Return tables (part, seconds) for ranks that communicate concurrently with their program. If
    roll-ups of an earlier version lack exposed communication, only waits count."""
    kind = pl.col("kind")
    waits, still = rows.filter(kind == "wait"), rows.filter(kind == EXPOSED)
    told = rows.filter(kind == COMMUNICATION).select(RANK_STEP)
    # Communication that is exposed without a wait is no host time between ops.
    beyond = (
        pl.concat([still, waits.with_columns(-pl.col("seconds"))]).group_by(RANK_STEP).agg(beyond=pl.sum("seconds"))
    )
    host = rows.filter(kind == HOST).group_by(RANK_STEP).agg(pl.sum("seconds")).join(beyond, on=RANK_STEP, how="left")
    return [
        rows.filter(kind.is_in(OWN)).select(*RANK_STEP, "seconds", what="kind"),
        still.select(*RANK_STEP, "seconds", what="axis"),
        waits.join(told, on=RANK_STEP, how="anti").select(*RANK_STEP, "seconds", what="axis"),
        host.select(
            *RANK_STEP,
            what=pl.lit("host"),
            seconds=(pl.col("seconds") - pl.col("beyond").fill_null(0.0).clip(0)).clip(0),
        ),
    ]


def _blocking(recording: Recording, rows: pl.DataFrame, steps: Sequence[int]) -> list[pl.DataFrame]:
    """Return tables (part, seconds) for ranks that communicate inside their program: transfers, and
    the waiting for other ranks."""
    met = recording.met.select("meeting", "transfer")
    length = pl.col("end") - pl.col("start")
    each = recording.meetings.filter(pl.col("step").is_in(list(steps))).join(met, on="meeting")
    each = each.with_columns(moving=pl.min_horizontal(length, "transfer"), length=length)
    # Sends and receives of one batch begin and end together: count their time once.
    each = each.unique(["step", "rank", "start"], keep="first")
    kind = pl.col("kind")
    return [
        rows.filter(~kind.is_in(["comm", "transfer"])).select("seconds", what="kind"),
        rows.filter((kind == "comm") & (pl.col("axis") == "other")).select("seconds", what=pl.lit("other")),
        each.select(what=pl.col("axis"), seconds="moving"),
        each.select(what=pl.lit("idle"), seconds=pl.col("length") - pl.col("moving")),
    ]


def _crossing(recording: Recording, steps: Sequence[int]) -> list[pl.DataFrame]:
    """Return tables that move seconds from the bubble to pp: those of waiting for another stage in
    which the transfer was under way."""
    spans = recording.spans.filter(pl.col("step").is_in(list(steps)))
    moves = spans.filter(kind="transfer").group_by("meeting").agg(
        begun=pl.max("start"), over=pl.max("end")
    )  # fmt: skip
    waits = spans.filter(kind="idle").join(moves, on="meeting")
    if recording.clocks_agree:
        under = pl.min_horizontal("end", "over") - pl.max_horizontal("start", "begun")
    else:
        under = pl.min_horizontal(pl.col("over") - pl.col("begun"), pl.col("end") - pl.col("start"))
    moving = waits.select(seconds=under.clip(0))
    return [moving.with_columns(what=pl.lit("pp")), moving.select(what=pl.lit("idle"), seconds=-pl.col("seconds"))]


def _late(recording: Recording, steps: Sequence[int]) -> dict[str, float]:
    """Return, by axis, the seconds of a rank's step in exposed communication that had to wait for a
    late member. Only known meetings count."""
    if recording.blocking:
        return {}
    spans = recording.spans.filter(pl.col("step").is_in(list(steps)), pl.col("kind") != "wait")
    shortest = (pl.col("end") - pl.col("start")).min().over("meeting")  # the last arrival's: all leave at one moment
    last = pl.max("start").over("meeting") if recording.clocks_agree else pl.col("end") - shortest
    comm = spans.filter(kind="comm").with_columns(end=pl.min_horizontal("end", last))
    comm = comm.filter(pl.n_unique("rank").over("meeting") > 1)
    found = exposed(pl.concat([spans.filter(pl.col("kind") != "comm"), comm]), by_axis=True)
    lanes = max(1, spans.select(RANK_STEP).n_unique())
    return dict(found.sort("axis", "exposed").group_by("axis").agg(pl.sum("exposed") / lanes).iter_rows())


def steps_of(recording: Recording, metrics: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """Return statistics of the steps' lengths; None if no length is known."""
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
    """Return the drift of the step's length; None if the length stayed, varies too much, or has too
    few steps."""
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
    ends = _middle(recording, steps[:quarter]), _middle(recording, steps[-quarter:])
    if not all(_has_exposure(recording, some) for some in ends):
        return Drift(first, last)
    before, after = (_means(recording, some, whole=True) for some in ends)
    whole = [sum(seconds for what, seconds in some.items() if what not in AFTER) for some in (before, after)]
    change = {what: after.get(what, 0.0) - before.get(what, 0.0) for what in {*before, *after} - set(AFTER)}
    direction = 1 if whole[1] > whole[0] else -1
    grew = max(sorted(change), key=lambda what: direction * change[what], default="")
    return Drift(whole[0], whole[1], grew, before.get(grew, 0.0), after.get(grew, 0.0))


def _middle(recording: Recording, steps: Sequence[int]) -> list[int]:
    """Return the middle half of the steps by length, in order."""
    low, high = np.quantile([recording.seconds[step] for step in steps], (0.25, 0.75))
    return [step for step in steps if low <= recording.seconds[step] <= high]


def _has_exposure(recording: Recording, steps: Sequence[int]) -> bool:
    """True if exposed communication is known for all steps; roll-ups of an earlier version lack
    it."""
    rows = recording.rollup.filter(pl.col("step").is_in(list(steps)))
    kind = pl.col("kind").cast(pl.String)
    waits, told = (rows.filter(kind == one).select(RANK_STEP).unique() for one in ("wait", COMMUNICATION))
    return recording.blocking or not waits.join(told, on=RANK_STEP, how="anti").height

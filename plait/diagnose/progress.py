"""How a run got on: loss, checkpoints, and how much of the time went into steps that count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.numbers import is_number
from plait.diagnose.recording import Recording


class Loss(NamedTuple):
    """Of the first and the last step, the least of any, and of the last evaluation. worst_rise: by how much
    a step's loss was above the median of the ten before it, at most, and at which step."""

    first: float
    last: float
    least: float
    evaluation: float | None
    skipped: int


class CheckpointPauses(NamedTuple):
    """seconds: for which training paused for one, between two steps, beyond what passes there without; None
    where no step after one was recorded. every: steps between two. share: of the run's time. last: seconds
    for which the end of the run waited until the last one was written; None if that was not recorded."""

    count: int
    seconds: float | None
    every: float | None
    share: float | None
    last: float | None = None


class Goodput(NamedTuple):
    """productive: seconds in steps that were kept. total: seconds in which the run was run, launchers that
    start it again included. attempts: how often it was started, as far as it is known; redone: steps that
    were done more than once. apart: seconds between a launcher's end and the next one's start, which are no
    part of ``total``: nobody ran it."""

    productive: float
    total: float
    attempts: int
    redone: int
    apart: float = 0.0

    @property
    def share(self) -> float:
        """Of the time, in steps that count."""
        return min(1.0, self.productive / self.total) if self.total > 0 else 1.0


def loss_of(metrics: Sequence[Mapping[str, Any]]) -> Loss | None:
    """None without metrics."""
    found = [float(one["loss"]) for one in metrics if is_number(one.get("loss"))]
    evaluated = [float(one["eval_loss"]) for one in metrics if is_number(one.get("eval_loss"))]
    skipped = max((int(one["skipped"]) for one in metrics if isinstance(one.get("skipped"), int)), default=0)
    if not found:
        return None
    return Loss(found[0], found[-1], min(found), evaluated[-1] if evaluated else None, skipped)


def checkpoints_of(recording: Recording, folder: Path) -> CheckpointPauses | None:
    """What checkpoints cost, by what passed between the steps around each. None where there are none."""
    saved = sorted(
        int(found[1])
        for path in (folder / "checkpoints").glob("step-*")
        if (found := re.fullmatch(r"step-(\d+)", path.name))
    )
    if not saved:
        return None
    told = recording.rollup.filter(pl.col("kind") == "checkpoint")
    if told.height:
        times = dict(told.group_by("step").agg(pl.col("seconds").max()).iter_rows())
        last = times.pop(recording.steps[-1], None)
        seconds = float(np.median([*times.values()])) if times else None
    else:
        seconds, last = _between_steps(recording, saved), None
    every = float(np.median(np.diff(saved))) if len(saved) > 1 else None
    step = float(np.median(list(recording.seconds.values()))) if recording.seconds else 0.0
    share = seconds / (seconds + every * step) if seconds is not None and every and step else None
    return CheckpointPauses(len(saved), seconds, every, share, last)


def _between_steps(recording: Recording, saved: Sequence[int]) -> float | None:
    """Seconds from the end of a step after which was saved to the start of the next, beyond what passes
    there otherwise; of the rank that took longest."""
    pauses = _pauses(recording)
    is_saved = pl.col("step").is_in([step - 1 for step in saved])
    with_, without = pauses.filter(is_saved)["pause"], pauses.filter(~is_saved)["pause"]
    if not with_.len() or not without.len():
        return None
    return max(0.0, float(with_.median()) - float(without.median()))  # type: ignore[arg-type]


def _pauses(recording: Recording) -> pl.DataFrame:
    """What passed between each step and the next, on the rank on which that was longest."""
    ends = recording.spans.group_by("step", "rank").agg(pl.col("start").min(), pl.col("end").max()).sort("rank", "step")
    following = ends.with_columns(
        after=pl.col("start").shift(-1).over("rank"), next=pl.col("step").shift(-1).over("rank")
    )
    following = following.filter(pl.col("next") == pl.col("step") + 1, pl.col("after") >= pl.col("end"))
    return following.group_by("step").agg(pause=(pl.col("after") - pl.col("end")).max())


def goodput_of(
    recording: Recording,
    attempts: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
    alive: float | None = None,
) -> Goodput | None:
    """From the run's history of attempts, if it has one; else of the steps whose spans are kept, by the clock
    of one rank. alive: when the run was last heard of, in seconds since 1970. None where neither tells."""
    known = [one for one in attempts if is_number(one.get("started"))]
    if known and (metrics or recording.spans.is_empty()):
        tries = [_tried(one, first=one is known[0]) for one in known[:-1]]
        tries.append(_tried(known[-1], first=len(known) == 1, metrics=metrics, alive=alive))
        apart = _apart(known, [end for end, _ in tries])
        total = max(end for end, _ in tries) - min(float(one["started"]) for one in known) - apart
        productive = sum(float(one["seconds"]) for one in metrics if is_number(one.get("seconds")))
        again = max(0, sum(steps for _, steps in tries) - len(metrics))
        return Goodput(productive, total, len(known), again, apart)
    spans = recording.spans
    if spans.is_empty():
        return None
    rank = int(spans["rank"].min())  # type: ignore[arg-type]
    times = spans.filter(pl.col("rank") == rank).group_by("step").agg(pl.col("start").min(), pl.col("end").max())
    times = times.sort("step").with_columns(step_seconds=pl.col("end") - pl.col("start"))
    restarts = int((times["start"].diff() < 0).sum() or 0)  # a clock of its own: another host, or a reboot
    parts = times.with_columns(part=(pl.col("start").diff() < 0).fill_null(value=False).cum_sum())
    lengths = parts.group_by("part").agg(total=pl.col("end").max() - pl.col("start").min())
    productive = sum(recording.seconds.get(step, own) for step, own in times.select("step", "step_seconds").iter_rows())
    return Goodput(productive, float(lengths["total"].sum()), restarts + 1, 0)


def _apart(attempts: Sequence[Mapping[str, Any]], ends: Sequence[float]) -> float:
    """Seconds in which no launcher ran: before every attempt that has waited for none (null), as the first of
    a launcher. A line without the key, of another program, says nothing of that."""
    found, until = 0.0, ends[0]
    for one, end in zip(attempts[1:], ends[1:], strict=True):
        if one.get("wait_seconds", 0) is None:
            found += max(0.0, float(one["started"]) - until)
        until = max(until, end)
    return found


def _tried(
    one: Mapping[str, Any], *, first: bool, metrics: Sequence[Mapping[str, Any]] = (), alive: float | None = None
) -> tuple[float, int]:
    """When an attempt ended, and how many steps it did. The line of one that goes on, or whose launcher was
    killed, stays as it was after its first step: what came since is in the metrics."""
    started, ended = float(one["started"]), one.get("ended")
    resumed = _whole(one.get("resumed"), -1)
    trained, resumed = resumed >= 0 or first, max(resumed, 0)
    step, steps = _whole(one.get("step"), -1), _whole(one.get("steps"), 0)
    if not is_number(ended):
        since = [line for line in metrics if trained and _whole(line.get("step"), -1) > resumed]
        step = max([step, *(_whole(line.get("step"), -1) for line in since)])
        took = [one.get("restart_seconds"), *(line.get("seconds") for line in since)]
        ended = max(alive or 0.0, started + sum(filter(is_number, took)))
    return max(started, float(ended)), max(steps, step - resumed) if trained else steps


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise

"""Measure a run's progress: loss, checkpoints, goodput, memory use and device utilisation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.core.base.numbers import is_number
from plait.core.cluster.mfu import device_of, mfu_of
from plait.core.runs.memory_peaks import PROCESS, peaks_of
from plait.diagnose.measured.recording import Recording


class Loss(NamedTuple):
    """Loss of the first and the last step, the least loss, and the loss of the last evaluation.
    skipped: updates that were skipped."""

    first: float
    last: float
    least: float
    evaluation: float | None
    skipped: int


class CheckpointPauses(NamedTuple):
    """The pauses of training for checkpoints. seconds: pause per checkpoint beyond the usual time
    between two steps; None if no step after one was recorded. every: steps between two checkpoints.
    share: of the run's time. last: seconds that the end of the run waited for the last checkpoint;
    None if unrecorded."""

    count: int  # pyright: ignore[reportIncompatibleMethodOverride]: a key of the JSON
    seconds: float | None
    every: float | None
    share: float | None
    last: float | None = None


class Goodput(NamedTuple):
    """Time in productive steps. productive: seconds in steps that were kept. total: seconds in
    which the run was running, including launchers that restarted it. attempts: number of starts, as
    far as known. redone: steps done more than once. apart: seconds between one launcher's end and
    the next one's start, not in ``total``."""

    productive: float
    total: float
    attempts: int
    redone: int
    apart: float = 0.0

    @property
    def share(self) -> float:
        """Share of the total time in productive steps."""
        return min(1.0, self.productive / self.total) if self.total > 0 else 1.0


def loss_of(metrics: Sequence[Mapping[str, Any]]) -> Loss | None:
    """Return the loss statistics from lines of metrics.jsonl; None without any."""
    found = [float(one["loss"]) for one in metrics if is_number(one.get("loss"))]
    evaluated = [float(one["eval_loss"]) for one in metrics if is_number(one.get("eval_loss"))]
    skipped = max((int(one["skipped"]) for one in metrics if isinstance(one.get("skipped"), int)), default=0)
    if not found:
        return None
    return Loss(found[0], found[-1], min(found), evaluated[-1] if evaluated else None, skipped)


def checkpoints_of(recording: Recording, folder: Path) -> CheckpointPauses | None:
    """Return the cost of checkpoints, from the time between the steps around each; None without
    checkpoints."""
    saved = sorted(
        int(found[1])
        for path in (folder / "checkpoints").glob("step-*")
        if (found := re.fullmatch(r"step-(\d+)", path.name))
    )
    if not saved:
        return None
    told = recording.rollup.filter(kind="checkpoint")
    if told.height:
        times = dict(told.group_by("step").agg(pl.max("seconds")).iter_rows())
        last = times.pop(recording.steps[-1], None)
        seconds = float(np.median([*times.values()])) if times else None
    else:
        seconds, last = _between_steps(recording, saved), None
    every = float(np.median(np.diff(saved))) if len(saved) > 1 else None
    step = float(np.median(list(recording.seconds.values()))) if recording.seconds else 0.0
    share = seconds / (seconds + every * step) if seconds is not None and every and step else None
    return CheckpointPauses(len(saved), seconds, every, share, last)


def _between_steps(recording: Recording, saved: Sequence[int]) -> float | None:
    """Return the seconds between a step with a checkpoint and the next step, beyond the usual time
    between steps, on the rank that took longest."""
    pauses = _pauses(recording)
    is_saved = pl.col("step").is_in([step - 1 for step in saved])
    with_, without = pauses.filter(is_saved)["pause"], pauses.filter(~is_saved)["pause"]
    if not with_.len() or not without.len():
        return None
    return max(0.0, float(with_.median()) - float(without.median()))  # type: ignore[arg-type]


def _pauses(recording: Recording) -> pl.DataFrame:
    """Return the table of seconds between each step and the next, on the rank with the longest
    pause."""
    ends = recording.spans.group_by("step", "rank").agg(pl.min("start"), pl.max("end")).sort("rank", "step")
    following = ends.with_columns(
        after=pl.col("start").shift(-1).over("rank"), next=pl.col("step").shift(-1).over("rank")
    )
    following = following.filter(pl.col("next") == pl.col("step") + 1, pl.col("after") >= pl.col("end"))
    return following.group_by("step").agg(pause=(pl.col("after") - pl.col("end")).max())


def goodput_of(
    recording: Recording,
    attempts: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
    last_written: float | None = None,
) -> Goodput | None:
    """Return the goodput from the run's attempts, or else from the steps with spans, on one rank's
    clock. last_written: last sign of life, in seconds since 1970. Returns None if neither is
    known."""
    known = [one for one in attempts if is_number(one.get("started"))]
    if known and (metrics or recording.spans.is_empty()):
        tries = [_tried(one, first=one is known[0]) for one in known[:-1]]
        tries.append(_tried(known[-1], first=len(known) == 1, metrics=metrics, alive=last_written))
        apart = _apart(known, [end for end, _ in tries])
        total = max(end for end, _ in tries) - min(float(one["started"]) for one in known) - apart
        productive = sum(float(one["seconds"]) for one in metrics if is_number(one.get("seconds")))
        again = max(0, sum(steps for _, steps in tries) - len(metrics))
        return Goodput(productive, total, len(known), again, apart)
    spans = recording.spans
    if spans.is_empty():
        return None
    rank = int(spans["rank"].min())  # type: ignore[arg-type]
    times = spans.filter(rank=rank).group_by("step").agg(pl.min("start"), pl.max("end"))
    times = times.sort("step").with_columns(step_seconds=pl.col("end") - pl.col("start"))
    restarts = int((times["start"].diff() < 0).sum() or 0)  # a different clock: another host, or a reboot
    parts = times.with_columns(part=(pl.col("start").diff() < 0).fill_null(value=False).cum_sum())
    lengths = parts.group_by("part").agg(total=pl.max("end") - pl.min("start"))
    productive = sum(recording.seconds.get(step, own) for step, own in times.select("step", "step_seconds").iter_rows())
    return Goodput(productive, float(lengths["total"].sum()), restarts + 1, 0)


def _apart(attempts: Sequence[Mapping[str, Any]], ends: Sequence[float]) -> float:
    """Return the seconds in which no launcher ran: before every attempt with ``wait_seconds`` null,
    which is the first of its launcher. Lines without the key, of other programs, are ignored."""
    found, until = 0.0, ends[0]
    for one, end in zip(attempts[1:], ends[1:], strict=True):
        if one.get("wait_seconds", 0) is None:
            found += max(0.0, float(one["started"]) - until)
        until = max(until, end)
    return found


def _tried(
    one: Mapping[str, Any], *, first: bool, metrics: Sequence[Mapping[str, Any]] = (), alive: float | None = None
) -> tuple[float, int]:
    """Return (end of an attempt in seconds since 1970, number of its steps). one: its line of
    attempts.jsonl. first: True for the first attempt. The line of an attempt that is running, or
    whose launcher was killed, is as old as its first step; the metrics hold the later steps."""
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


class MemoryUse(NamedTuple):
    """Peak memory in bytes of a stage's ranks. predicted: None without a prediction. measured:
    tensors of ``rank``, the rank with the most; None without metrics. process: of that rank's
    process, with interpreter and libraries; None if unknown. If tensors are unknown, ``rank`` is
    the one with the largest process."""

    place: str
    predicted: int | None
    measured: int | None
    rank: int | None
    process: int | None = None


def memory_use(metrics: Sequence[Mapping[str, Any]], predicted: Mapping[str, int]) -> tuple[MemoryUse, ...]:
    """Return memory use by stage; empty if nothing was measured. predicted: bytes of a rank, by
    stage."""
    measured, processes = peaks_of(metrics), peaks_of(metrics, PROCESS)
    found: list[MemoryUse] = []
    for place in dict.fromkeys([*predicted, *measured, *processes]):
        tensors, own = measured.get(place, {}), processes.get(place, {})
        rank = max(tensors or own, key=(tensors or own).__getitem__, default=None)
        known = (tensors.get(rank), rank, own.get(rank)) if rank is not None else (None, None, None)
        found.append(MemoryUse(place, predicted.get(place), *known))
    return tuple(found) if measured or processes else ()


class Utilisation(NamedTuple):
    """Utilisation of rank 0's device in the median step. mfu: None if the device's peak is unknown.
    peak_flops: in FLOP/s. matmul_rate_share: share of the rate of plain matrix products, measured
    when the run began."""

    device: str
    mfu: float | None
    peak_flops: float | None
    matmul_rate_share: float | None

    @property
    def sentence(self) -> str:
        """One sentence on the utilisation."""
        share, told = self.matmul_rate_share, list[str]()
        if self.mfu is not None:
            told.append(f"MFU {self.mfu:.1%}, of {(self.peak_flops or 0) / 1e12:,.4g} TFLOP/s ({self.device})")
        if share is not None:
            rate = f"{share:.0%} of the rate that matrix products alone reached on rank 0"
            busy = "rank 0 was busy when the rate of matrix products alone was measured"
            told.append(busy if share > 1 else f"model FLOPs at {rate} when the run began")
        return f"In the median step, over all ranks: {'; '.join(told)}."


def utilisation_of(metrics: Sequence[Mapping[str, Any]], median: float) -> Utilisation | None:
    """Return the utilisation of rank 0's device in a step of ``median`` seconds; None if no line
    holds any.

    metrics: lines of metrics.jsonl, of steps with one batch size."""
    lines = [line for line in metrics if device_of(line) and is_number(line.get("seconds"))]
    if not lines or median <= 0:
        return None

    def at_median(values: Sequence[Any]) -> float | None:
        """Return the median of shares per step, weighted as at the median step, since a share is
        inverse to its step's seconds; None without numbers."""
        pairs = zip(values, lines, strict=True)
        known = [value * line["seconds"] for value, line in pairs if is_number(value)]
        return float(np.median(known)) / median if known else None

    device = device_of(lines[-1])
    return Utilisation(
        str(device.get("name", "")), at_median([mfu_of(line) for line in lines]), device.get("peak_flops"),
        at_median([device_of(line).get("matmul_rate_share") for line in lines]),
    )  # fmt: skip

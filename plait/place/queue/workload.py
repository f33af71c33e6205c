"""Workload of a replay: jobs of a trace, once or in overlaid copies that load a cluster of another
size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import DataError
from plait.formats.job_traces.table import Trace
from plait.place.queue.forecast import Predicted

Floats = NDArray[np.float64]
INSTANCES = 1000
"""Maximum number of periods that a job may last in an overlay."""
MOST_JOBS = 5_000_000
"""Maximum number of jobs in a replay, which takes minutes, and gigabytes of memory."""


@dataclass(frozen=True, kw_only=True)
class JobTrace:
    """Jobs by submission, (J,).

    submit: seconds from the replay's start; negative for jobs that have been running since before
    it. duration: seconds of the whole job. mean, upper: predicted seconds. priority: higher goes
    first. job: its number in the trace. window: seconds during which jobs arrive. oversize:
    numbers, in the trace, of jobs that want more GPUs than the cluster has; they are left out.
    offered: mean share of all GPUs that the trace's jobs ask for.
    """

    submit: Floats
    duration: Floats
    gpus: NDArray[np.int64]
    mean: Floats
    upper: Floats
    preemptible: NDArray[np.bool_]
    priority: NDArray[np.int64]
    job: NDArray[np.int64]
    window: float
    oversize: tuple[int, ...] = ()
    offered: float = 0.0

    def __len__(self) -> int:
        return len(self.submit)


def workload(
    trace: Trace,
    predicted: Predicted,
    *,
    gpus: int,
    copies: float | None = None,
    load: float | None = None,
    window: float | None = None,
) -> JobTrace:
    """Return the jobs for a cluster of ``gpus`` GPUs.

    Without ``copies`` and ``load``, the trace as it is, on an empty cluster. Otherwise the trace
    repeats endlessly, and ``copies`` of it are overlaid, shifted by equal parts of its span; jobs
    that would be running at the start run then. A fraction of a copy (as in 2.5) takes every second
    job, or accordingly. load: use as many copies as ask for this share of the GPUs. window: seconds
    of arrivals.
    """
    oversize = tuple(np.flatnonzero(trace.gpus > gpus).tolist())
    window = trace.span if window is None else window
    chosen, one, copies = copies_of(trace, gpus=gpus, copies=copies, load=load, window=window)
    if copies is None:
        chosen = chosen[trace.submit[chosen] < window]
        found = _columns(trace, predicted, chosen, trace.submit[chosen], window)
    else:
        found = _overlaid(trace, predicted, chosen, copies, window)
    if load is not None and not len(found):
        raise DataError(f"{trace.name}: a load of {load:g} asks for less than one of its jobs. Give it copies instead.")
    return replace(found, oversize=oversize, offered=one * (copies or 1.0))


def copies_of(
    trace: Trace, *, gpus: int, copies: float | None, load: float | None, window: float | None
) -> tuple[NDArray[np.int64], float, float | None]:
    """Return (numbers of the jobs that fit the cluster, share of its GPUs that one copy of them
    asks for, number of copies of the trace; None: the trace as it is).

    Raises DataError for a load that no number of copies reaches, or for more than ``MOST_JOBS``
    jobs: those that arrive, and those that run before."""
    chosen = np.flatnonzero(trace.gpus <= gpus)
    one = float(trace.gpus[chosen] @ trace.duration[chosen]) / trace.span / gpus
    if load is not None:
        if not one:
            raise DataError(f"{trace.name}: no job fits the cluster, so no number of copies loads it.")
        copies = load / one
    if copies is None:
        return chosen, one, None
    asked = copies * float((trace.duration[chosen] + (window or trace.span)).sum()) / trace.span
    if asked > MOST_JOBS:
        raise DataError(
            f"{trace.name}: {copies:.4g} copies have {asked:.3g} jobs; a replay has at most {MOST_JOBS:,}. Ask for "
            "fewer copies, less load, or a shorter window."
        )
    return chosen, one, copies


def _overlaid(trace: Trace, predicted: Predicted, chosen: NDArray[np.int64], copies: float, window: float) -> JobTrace:
    period = trace.span
    submits: list[Floats] = []
    jobs: list[NDArray[np.int64]] = []
    for copy in range(int(np.ceil(copies - 1e-9))):
        part = copies - copy  # 1 or more: every job
        at = np.arange(len(chosen) + 1)
        own = chosen[np.diff(np.floor(at * part + 1e-9)) > 0]
        submit = (trace.submit[own] + copy * period / copies) % period
        turns = int(min(INSTANCES, np.ceil(float(trace.duration[own].max(initial=0)) / period) + 1))
        for turn in range(-turns, int(np.ceil(window / period))):
            when = submit + turn * period
            use = (when < window) & (when + np.where(when < 0, trace.duration[own], np.inf) > 0)
            submits.append(when[use])
            jobs.append(own[use])
    submit = np.concatenate([np.zeros(0), *submits])
    job = np.concatenate([np.zeros(0, np.int64), *jobs])
    order = np.argsort(submit, kind="stable")
    return _columns(trace, predicted, job[order], submit[order], window)


def _columns(trace: Trace, predicted: Predicted, job: NDArray[np.int64], submit: Floats, window: float) -> JobTrace:
    return JobTrace(
        submit=submit,
        duration=trace.duration[job],
        gpus=trace.gpus[job],
        mean=predicted.mean[job],
        upper=predicted.upper[job],
        preemptible=trace.preemptible[job],
        priority=trace.priority[job],
        job=job,
        window=window,
    )

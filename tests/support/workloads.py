"""Traces and workloads that nobody has recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plait.formats.job_traces.read import parse_columns, read_trace
from plait.formats.job_traces.table import Trace
from plait.place.queue.forecast import Predicted
from plait.place.queue.workload import JobTrace


def heavy_tailed(jobs: int = 1500, seed: int = 0, groups: int = 5) -> str:
    """A table of jobs whose sizes and lengths have long tails, and groups that differ."""
    draw = np.random.default_rng(seed)
    group = draw.integers(0, groups, jobs)
    submit = np.cumsum(draw.exponential(120.0, jobs))
    duration = np.exp(draw.normal(5.0 + group, 1.2)) + 1
    gpus = 2 ** np.minimum(draw.geometric(0.55, jobs) - 1, 6)
    lines = [f"{s:.1f},{d:.1f},{g},{v}" for s, d, g, v in zip(submit, duration, gpus, group, strict=True)]
    return "\n".join(["submit_time,duration,num_gpu,cluster", *lines]) + "\n"


def trace_of(text: str, folder: Path, name: str = "jobs.csv", *, columns: str | None = None) -> Trace:
    """A trace as it is read from a file, with columns as the command line names them."""
    file = folder / name
    file.write_text(text)
    return read_trace(file, columns=None if columns is None else parse_columns(columns))


def known(trace: Trace) -> Predicted:
    """What every job will take, exactly."""
    return Predicted(mean=trace.duration, upper=trace.duration)


def jobs_of(
    rows: list[tuple[float, float, int]], *, guesses: list[float] | None = None,
    preemptible: list[bool] | None = None, priority: list[int] | None = None,
) -> JobTrace:  # fmt: skip
    """Of (submit, duration, gpus); guesses: predicted durations."""
    rows = sorted(rows, key=lambda row: row[0])
    submit, duration, gpus = (np.array([row[at] for row in rows], float) for at in range(3))
    said = duration if guesses is None else np.array(guesses, float)
    return JobTrace(
        submit=submit,
        duration=duration,
        gpus=gpus.astype(np.int64),
        mean=said,
        upper=said,
        preemptible=np.zeros(len(rows), bool) if preemptible is None else np.array(preemptible, bool),
        priority=np.zeros(len(rows), np.int64) if priority is None else np.array(priority),
        job=np.arange(len(rows)),
        window=float(submit[-1]) + 1 if rows else 1.0,
    )

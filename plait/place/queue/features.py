"""Features of jobs at their submission, as columns of numbers; nothing later is used.

Running statistics cover jobs that had *ended* by then, on the trace's own cluster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from plait.formats.job_traces.table import Trace

Floats = NDArray[np.float64]
WINDOW = 128
"""Number of ended jobs of a kind that its running statistics cover."""
PARTS = ("count", "mean", "median", "q90", "last")


@dataclass(frozen=True, kw_only=True)
class Features:
    """Features of jobs. names: of the columns. matrix: (J, F), NaN where a job lacks a feature.
    categorical: names of columns that hold codes."""

    names: tuple[str, ...]
    matrix: Floats
    categorical: tuple[str, ...]

    def column(self, name: str) -> Floats:
        """Return the values of one feature for all jobs, (J,); NaN where a job lacks it."""
        return self.matrix[:, self.names.index(name)]


def features(trace: Trace, progress: Callable[[int, int], None] | None = None) -> Features:
    """Return the features of every job of a trace, from what was known at its submission. progress:
    called with (jobs done, number of jobs) now and then."""
    columns: dict[str, Floats] = {"gpus": trace.gpus.astype(float)}
    columns |= {name: np.asarray(column, float) for name, column in trace.numbers.items()}
    clock = trace.first + trace.submit
    columns["hour"] = clock / 3600 % 24
    columns["weekday"] = np.floor(clock / 86400) % 7
    categorical = tuple(trace.categories)
    for name, category in trace.categories.items():
        columns[name] = np.where(category.codes < 0, np.nan, category.codes).astype(float)
    columns |= history(trace, progress)
    return Features(names=tuple(columns), matrix=np.column_stack(list(columns.values())), categorical=categorical)


class _Recent:
    """The last ``WINDOW`` log run times of a group of jobs, both in the order in which the jobs
    ended and sorted by length."""

    __slots__ = ("count", "ordered", "running", "submitted", "times", "total")

    def __init__(self) -> None:
        self.times: deque[float] = deque()
        self.ordered: list[float] = []
        self.total = 0.0
        self.count = self.running = 0
        self.submitted = -np.inf

    def add(self, value: float) -> None:
        if len(self.times) == WINDOW:
            oldest = self.times.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.total -= oldest
        self.times.append(value)
        insort(self.ordered, value)
        self.total += value
        self.count += 1

    def read(self) -> tuple[float, float, float, float, float]:
        size = len(self.ordered)
        if not size:
            return 0.0, np.nan, np.nan, np.nan, np.nan
        return (
            float(self.count),
            self.total / size,
            self.ordered[size // 2],
            self.ordered[min(size - 1, int(0.9 * size))],
            self.times[-1],
        )


def history(trace: Trace, progress: Callable[[int, int], None] | None = None) -> dict[str, Floats]:
    """Return, by ``GROUPING:STATISTIC`` such as ``group_gpus:median``, an array (J,) over jobs:
    statistics of similar jobs that had ended when each job was submitted, and the number of similar
    jobs that ran. progress: called with (jobs done, number of jobs) now and then."""
    keys = _keys(trace)
    rows: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in keys}
    known: dict[str, dict[int, _Recent]] = {kind: {} for kind in keys}
    submit, end = trace.submit.tolist(), trace.end.tolist()
    size = np.log(np.maximum(1.0, trace.duration)).tolist()
    running: list[tuple[float, int]] = []
    for job, now in enumerate(submit):
        if progress and job % 5000 == 0:
            progress(job, len(submit))
        while running and running[0][0] <= now:
            over = heappop(running)[1]
            for kind, codes in keys.items():
                recent = known[kind][codes[over]]
                recent.add(size[over])
                recent.running -= 1
        for kind, codes in keys.items():
            recent = known[kind].get(codes[job])
            if recent is None:
                recent = known[kind][codes[job]] = _Recent()
            rows[kind].append((*recent.read(), recent.running, now - recent.submitted))
            recent.running += 1
            recent.submitted = now
        heappush(running, (end[job], job))
    found: dict[str, Floats] = {}
    for kind, values in rows.items():
        table = np.array(values, float).reshape(-1, len(PARTS) + 2)
        table[~np.isfinite(table)] = np.nan
        found |= {f"{kind}:{part}": table[:, at] for at, part in enumerate((*PARTS, "running", "since"))}
    return found


def _keys(trace: Trace) -> dict[str, list[int]]:
    """Return, for each grouping of jobs (all, by GPUs, user, ...), the number of each job's
    group."""
    sizes = np.unique(trace.gpus, return_inverse=True)[1].astype(np.int64)
    width = int(sizes.max(initial=0)) + 1
    keys = {"all": np.zeros(len(trace), np.int64), "all_gpus": sizes}
    for name in ("group", "user"):
        if name in trace.categories:
            codes = trace.categories[name].codes
            keys |= {name: codes, f"{name}_gpus": codes * width + sizes}
    return {kind: codes.tolist() for kind, codes in keys.items()}

"""Upper bounds that are exceeded as often as they say, whatever the model: online conformal prediction.

A bound in log seconds gets a margin. Every job whose fate is known moves it: up by ``rate * level`` if the
job ran longer than its bound, down by ``rate * (1 - level)`` if not, so that in the long run a share of ``1
- level`` is late under any drift (Gibbs and Candes, Adaptive Conformal Inference Under Distribution Shift,
NeurIPS 2021, eq. 2, on the bound itself instead of its level). A job's fate is known when it ends or when
its bound passes, whichever is first: nothing is used before it has happened.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RATE = 0.05
"""Log seconds; a run of ten late jobs moves bounds by about 0.45."""


def first_margin(logs: Floats, bounds: Floats, level: float, ended: NDArray[np.bool_] | None = None) -> float:
    """The margin that leaves a share ``1 - level`` of past jobs late (split conformal prediction).

    logs: what they took, bounds: what was said, both in log seconds. ended: False where a job still runs, of
    which ``logs`` is what it has run for; without these the longest jobs would be missing, so the quantile is
    that of the Kaplan-Meier estimate.
    """
    if not len(logs):
        return 0.0
    over = logs - bounds
    order = np.lexsort((np.zeros(len(over)) if ended is None else ~ended, over))
    happened = np.ones(len(over)) if ended is None else ended[order].astype(float)
    at_risk = len(over) - np.arange(len(over))
    surviving = np.cumprod(1 - happened / (at_risk + 1))  # + 1: the next job counts as one of them
    low = np.flatnonzero(surviving <= 1 - level)
    return float(over[order][low[0]] if len(low) else over.max())


class JobTimes(NamedTuple):
    """When jobs were submitted and started, in seconds, by ascending submission; logs: log seconds that each
    ran."""

    submit: Floats
    begin: Floats
    logs: Floats


def follow(jobs: JobTimes, bounds: Floats, *, level: float, margin: float, rate: float = RATE) -> tuple[Floats, float]:
    """Bounds with the margin that was in force when each job was submitted, and the margin after the
    last."""
    submit, begin, logs = jobs
    found = np.empty(len(submit))
    waiting: list[tuple[float, int, float]] = []
    runs = np.exp(np.minimum(logs, 700.0))
    for job, now in enumerate(submit.tolist()):
        while waiting and waiting[0][0] <= now:
            margin += heappop(waiting)[2]
        found[job] = bounds[job] + margin
        late = logs[job] > found[job]
        known = float(begin[job]) + (float(np.exp(min(found[job], 700.0))) if late else float(runs[job]))
        heappush(waiting, (known, job, rate * level if late else -rate * (1 - level)))
    return found, margin + sum(step for *_, step in waiting)

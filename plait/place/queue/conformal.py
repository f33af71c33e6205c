"""Upper bounds that are exceeded at the promised rate, whatever the model: online conformal
prediction, for all jobs and for every group of jobs.

A bound in log seconds gets a margin, the sum of four: for all jobs, for the job's number of GPUs,
for its cluster, and for both. Every job with a known outcome moves each of its four margins: up by
``rate * level`` if the job ran longer than its bound, down by ``rate * (1 - level)`` if not. So the
error of a group's share of late jobs is at most the movement of the group's own margin, divided by
its rate and its number of jobs (Gibbs and Candes, Adaptive Conformal Inference Under Distribution
Shift, NeurIPS 2021, eq. 2, on the bound itself; for groups: Bastani et al., Practical Adversarial
Multivalid Conformal Prediction, NeurIPS 2022). A job's outcome is known when it ends or when its
bound passes, whichever is first: nothing is used before it has happened.

In a burst, many jobs get bounds before the first outcome is known, and together they would move a
margin too far. So the rate is divided by the square root of the number of jobs with open outcomes
(Quanrud and Khashabi, Online Learning with Adversarial Delays, NeurIPS 2015).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import exp, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = Mapping[str, Sequence[str]]
"""Each job's group, by level, the most general level first."""
Margins = Mapping[str, Mapping[str, float]]
"""Margins in log seconds, by level and group; 0 for a missing group."""
RATE, LAST = 0.07, 0.28
"""Step sizes by which margins move, in log seconds. RATE: of every level. LAST: of the last level,
whose groups have the fewest jobs."""
PRIOR_JOBS = 100.0
"""Number of jobs as which a margin of zero counts in a group's first margin."""


def first_margin(logs: Floats, bounds: Floats, level: float, ended: NDArray[np.bool_] | None = None) -> float:
    """Return the margin in log seconds to add to ``bounds``, so that a share ``1 - level`` of past
    jobs runs longer than its bound (split conformal prediction).

    logs: measured, bounds: predicted log seconds. ended: False where a job still runs; its ``logs``
    is the time that it has run so far. Without running jobs the longest ones would be missing, so
    the quantile is that of the Kaplan-Meier estimate."""
    if not len(logs):
        return 0.0
    over = logs - bounds
    order = np.lexsort((np.zeros(len(over)) if ended is None else ~ended, over))
    happened = np.ones(len(over)) if ended is None else ended[order].astype(float)
    at_risk = len(over) - np.arange(len(over))
    surviving = np.cumprod(1 - happened / (at_risk + 1))  # + 1: count the next job, too
    low = np.flatnonzero(surviving <= 1 - level)
    return float(over[order][low[0]] if len(low) else over.max())


def first_margins(
    logs: Floats, bounds: Floats, labels: Labels, level: float, ended: NDArray[np.bool_]
) -> dict[str, dict[str, float]]:
    """Return the margins in log seconds by level and group. Each level corrects what the levels
    before it leave, shrunk towards 0 if few jobs have ended. logs, bounds: measured and predicted
    log seconds of past jobs; ended: False where a job still runs."""
    said, found = bounds.copy(), dict[str, dict[str, float]]()
    for number, (name, own) in enumerate(labels.items()):
        groups, where = np.unique(np.asarray(own, str), return_inverse=True)
        found[name] = {}
        for at, group in enumerate(groups.tolist()):
            here = where == at
            known = int(ended[here].sum())
            weight = 1.0 if number == 0 else known / (known + PRIOR_JOBS)
            found[name][group] = weight * first_margin(logs[here], said[here], level, ended[here])
            said[here] += found[name][group]
    return found


def margin_of(margins: Margins, labels: Labels) -> Floats:
    """Return the sum of each job's margins over all levels, in log seconds."""
    parts = [[margins.get(name, {}).get(group, 0.0) for group in own] for name, own in labels.items()]
    return np.sum(np.array(parts, float).reshape(len(parts), -1), axis=0)


class JobTimes(NamedTuple):
    """Times of jobs, in order of submission. submit, begin: seconds. logs: log seconds that each
    job ran."""

    submit: Floats
    begin: Floats
    logs: Floats


class _Level:
    """Margins of the groups of one level, moved while jobs arrive and end."""

    def __init__(self, groups: Sequence[str], margins: Mapping[str, float], rate: float) -> None:
        self.groups, self.rate = groups, rate
        self.margins = defaultdict[str, float](float, margins)
        self.open = defaultdict[str, int](int)

    def move(self, job: int, by: float) -> None:
        group = self.groups[job]
        self.margins[group] += self.rate * by / sqrt(self.open[group])
        self.open[group] -= 1


def follow(
    jobs: JobTimes, bounds: Floats, labels: Labels, *, level: float, margins: Margins, scale: float = 1.0
) -> tuple[Floats, dict[str, dict[str, float]]]:
    """Return (upper bounds in log seconds with the margins in force when each job was submitted,
    margins after the last job by level and group). bounds: predicted log seconds. level: promised
    share of jobs within their bound. margins: at the start. scale: factor of the step sizes
    ``RATE``."""
    submit, begin, logs = jobs
    rates = [*[RATE] * (len(labels) - 1), LAST]
    levels = [
        _Level(own, margins.get(name, {}), scale * rate)
        for (name, own), rate in zip(labels.items(), rates, strict=True)
    ]
    found = np.empty(len(submit))
    waiting: list[tuple[float, int, float]] = []

    def learn(job: int, by: float) -> None:
        for one in levels:
            one.move(job, by)

    for job, (now, began, ran) in enumerate(zip(submit.tolist(), begin.tolist(), logs.tolist(), strict=True)):
        while waiting and waiting[0][0] <= now:
            learn(*heappop(waiting)[1:])
        found[job] = said = bounds[job] + sum(one.margins[one.groups[job]] for one in levels)
        for one in levels:
            one.open[one.groups[job]] += 1
        known = began + exp(min(said, ran, 700.0))
        heappush(waiting, (known, job, level if ran > said else level - 1))
    while waiting:
        learn(*heappop(waiting)[1:])
    return found, {name: dict(one.margins) for name, one in zip(labels, levels, strict=True)}

"""How long jobs that wait on a cluster will run, by a fitted model and the jobs that it has had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from plait.place.features import features
from plait.place.forecast import names_of
from plait.place.jct import BUCKET, Predictor
from plait.place.traces.table import Category, Trace

GOES_ON = 1e9
"""Seconds that a job counts as running for which nobody knows."""


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """submit: seconds since 1970. known: what a trace calls ``user``, ``group``, ``queue``, ``cpus``, ..."""

    submit: float
    gpus: int
    known: Mapping[str, str]


def believed(model: Predictor, past: Trace, jobs: Sequence[WaitingJob]) -> list[float]:
    """Mean seconds of jobs, in their order. past: jobs of the cluster, with what had ended by then; those
    that wait count as running beside each other."""
    if not jobs:
        return []
    order = sorted(range(len(jobs)), key=lambda at: jobs[at].submit)
    whole = _appended(past, [jobs[at] for at in order])
    known = features(whole)
    last = replace(known, matrix=known.matrix[len(past) :])
    seconds = model.predict(last, names_of(whole)).buckets * BUCKET
    found = [0.0] * len(jobs)
    for at, value in zip(order, seconds.tolist(), strict=True):
        found[at] = value
    return found


def _appended(past: Trace, jobs: Sequence[WaitingJob]) -> Trace:
    """The trace with these jobs behind it. One whose times are relative is taken to end now."""
    end = float(past.submit[-1]) if len(past) else 0.0
    first = past.first or max(job.submit for job in jobs) - end
    submit = np.maximum([job.submit - first for job in jobs], end)
    numbers = {
        name: np.append(column, [_number(job.known.get(name, "")) for job in jobs])
        for name, column in past.numbers.items()
    }
    categories = {name: _extended(category, name, jobs) for name, category in past.categories.items()}
    return replace(
        past, id=(*past.id, *("" for _ in jobs)), first=first, submit=np.append(past.submit, submit),
        begin=np.append(past.begin, submit), duration=np.append(past.duration, np.full(len(jobs), GOES_ON)),
        gpus=np.append(past.gpus, [job.gpus for job in jobs]), numbers=numbers, categories=categories,
        preemptible=np.append(past.preemptible, np.zeros(len(jobs), bool)),
        priority=np.append(past.priority, np.zeros(len(jobs), np.int64)),
    )  # fmt: skip


def _extended(category: Category, name: str, jobs: Sequence[WaitingJob]) -> Category:
    told = [job.known.get(name, "") for job in jobs]
    names = list(dict.fromkeys([*category.names, *filter(None, told)]))
    codes = [names.index(one) if one else -1 for one in told]
    return Category(codes=np.append(category.codes, codes), names=tuple(names))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan

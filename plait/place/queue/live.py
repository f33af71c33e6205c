"""A live queue at one moment: which waiting jobs start now, and where, by the same ``Admission`` as
the replay.

No state is kept between two calls: decisions show in the cluster itself, as running jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from plait.formats.job_traces.table import Category, Trace
from plait.place.queue.admission import Admission, QueuedJobs, queue_places
from plait.place.queue.features import features
from plait.place.queue.forecast import names_of
from plait.place.queue.jct import BUCKET, Predictor
from plait.place.queue.pool import NodePool
from plait.place.queue.reservation import Planned, Reservation, Zone


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """A waiting job. submit: seconds since 1970. gpus: of all of its nodes. jct: expected seconds
    of running; inf: unknown."""

    name: str
    submit: float
    gpus: int
    jct: float = inf
    preemptible: bool = False
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class LiveZone:
    """Nodes reserved for a planned job that arrives at ``due``, in seconds since 1970. closes:
    seconds before ``due`` from which no job may enter."""

    name: str
    nodes: frozenset[str]
    due: float
    closes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LiveCluster:
    """A live cluster. used: GPUs in use on every node, by its name. size: GPUs per node. Nodes that
    cannot take jobs have all GPUs in use."""

    used: Mapping[str, int]
    size: int
    zones: Sequence[LiveZone] = ()


@dataclass(frozen=True, kw_only=True)
class LiveStart:
    """A job that is to start now. gpus: of each of its nodes. zones: the zones that it enters;
    empty if unreserved nodes suffice. until: seconds since 1970 at which the first of these zones
    is due; inf without a zone."""

    job: LiveJob
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    zones: tuple[str, ...] = ()
    until: float = inf


def decide(jobs: Sequence[LiveJob], cluster: LiveCluster, now: float) -> list[LiveStart]:
    """Return the jobs that Algorithm 1 starts at ``now`` (seconds since 1970), in the order of
    their start. A job that does not fit waits and is not returned."""
    names = list(cluster.used)
    number = {name: at for at, name in enumerate(names)}
    pool = NodePool(len(names), cluster.size, 2 * len(cluster.zones))
    pool.hold([(at, cluster.used[name]) for at, name in enumerate(names) if cluster.used[name]])
    reserved = [_reserved(at, one, number, now) for at, one in enumerate(cluster.zones, 1)]
    for one in reserved:
        pool.reserve(one.nodes, one.part)
    waiting = sorted(jobs, key=lambda job: (job.submit, job.name))
    queued = QueuedJobs(
        gpus=[job.gpus for job in waiting], jct=[job.jct for job in waiting],
        preemptible=[job.preemptible for job in waiting],
        places=queue_places(np.array([job.priority for job in waiting], np.int64)).tolist(),
    )  # fmt: skip
    queue = Admission(queued, pool, reserved)
    queue.now = now
    for job in range(len(waiting)):
        queue.enqueue(job)
    found: list[LiveStart] = []
    while start := queue.next():
        parts = {pool.part[node] for node, _ in start.held}
        zones = [zone for zone, one in zip(cluster.zones, reserved, strict=True) if one.part in parts]
        found.append(LiveStart(
            job=waiting[start.job], nodes=tuple(names[node] for node, _ in start.held),
            gpus=tuple(count for _, count in start.held),
            zones=tuple(zone.name for zone in zones), until=min((zone.due for zone in zones), default=inf),
        ))  # fmt: skip
    return found


def _reserved(number: int, zone: LiveZone, places: Mapping[str, int], now: float) -> Reservation:
    nodes = sorted(places[name] for name in zone.nodes if name in places)
    planned = Planned(nodes=len(nodes), arrival=zone.due, notice=0.0, closes=zone.closes)
    return Reservation(number=number, planned=planned, zone=Zone(nodes=nodes, spares=[]), closed=now >= zone.due)


UNKNOWN_RUN_SECONDS = 1e9
"""Seconds that a running job of unknown length is assumed to run on."""


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """A waiting job for a prediction. submit: seconds since 1970. known: fields that a trace calls
    ``user``, ``group``, ``queue``, ``cpus``, ..."""

    submit: float
    gpus: int
    known: Mapping[str, str]


def predict_jct(model: Predictor, past: Trace, jobs: Sequence[WaitingJob]) -> list[float]:
    """Return the predicted mean seconds of jobs, in their order. past: jobs of the cluster, with
    those that have ended so far; waiting jobs count as running at the same time."""
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
    """Return the trace ``past`` with these jobs appended. A trace with relative times is taken to
    end now."""
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
        begin=np.append(past.begin, submit), duration=np.append(past.duration, np.full(len(jobs), UNKNOWN_RUN_SECONDS)),
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

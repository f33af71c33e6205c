"""A live queue at one moment: who of those that wait starts now, and where, by the ``Admission`` of the
replay.

Nothing is remembered between two moments: what was decided shows in the cluster itself, in jobs that run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from plait.place.admission import Admission, QueuedJobs, queue_places
from plait.place.pool import NodePool
from plait.place.reservation import Planned, Reservation
from plait.place.zone import Zone


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """A job that waits. submit: seconds since 1970. gpus: of all of its nodes. jct: seconds that it is
    believed to run; inf: nobody knows."""

    name: str
    submit: float
    gpus: int
    jct: float = inf
    preemptible: bool = False
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class LiveZone:
    """Nodes reserved for a planned job that comes at ``due``, in seconds since 1970. closes: seconds before
    that from which on nobody enters any more."""

    name: str
    nodes: frozenset[str]
    due: float
    closes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LiveCluster:
    """used: GPUs of every node that are in use, by its name; size: GPUs that each has. Nodes that cannot take
    jobs are all in use."""

    used: Mapping[str, int]
    size: int
    zones: Sequence[LiveZone] = ()


@dataclass(frozen=True, kw_only=True)
class LiveStart:
    """A job that is to start now. gpus: of each of its nodes. zones: those that it enters; empty: it fits
    outside. until: when the
    first of these is due; inf outside."""

    job: LiveJob
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    zones: tuple[str, ...] = ()
    until: float = inf


def decide(jobs: Sequence[LiveJob], cluster: LiveCluster, now: float) -> list[LiveStart]:
    """What Algorithm 1 starts at ``now``, in its order. A job that more GPUs would be needed for waits."""
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

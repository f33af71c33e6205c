"""A trace played back on a cluster: jobs arrive, wait, run, end; nodes are reserved for one planned job.

Time advances from event to event. At each the policy lets in whom it lets in (``Waiting.next``); nothing
looks ahead except through the predictions that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.errors import PlacementError
from plait.place.meter import Meter, Series
from plait.place.policy import Policy
from plait.place.pool import Held, Pool
from plait.place.waiting import Waiting
from plait.place.workload import Workload
from plait.place.zone import check_zone, choose_zone

Floats = NDArray[np.float64]
END, ANNOUNCED, PLANNED = 0, 1, 2
"""Kinds of events, in the order in which they happen at one time."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job that is known before it comes: nodes, when it arrives, how long before it is announced, how
    long it runs; seconds from the replay's start. zone: its nodes, if a placement has chosen them."""

    nodes: int
    arrival: float
    notice: float
    duration: float = 12 * 3600.0
    zone: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """nodes of so many GPUs each; minipod: how many of them one has, numbered one after the other."""

    nodes: int
    gpus_per_node: int = 8
    minipod: int = 50


class Run(NamedTuple):
    """A job, -1 for the planned one, on its GPUs from ``start`` to ``end``; preempted jobs run several
    times."""

    job: int
    start: float
    end: float
    held: Held


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one policy made of a workload. started: first start of each job, ended: its end, both (J,) and
    in seconds of the replay; restarts: how often it was preempted. late: jobs let into the zone by a
    prediction that were still there when the planned job came; spared: preemptible ones that were; held:
    those from before the announcement. admitted: jobs let into the zone, flexible: the preemptible ones of
    them. planned_start: when the planned job started. lost: GPU-seconds of work done twice. announced,
    before, at: share of the zone that others held when it was announced, just before the planned arrival,
    and just after."""

    policy: str
    started: Floats
    ended: Floats
    restarts: NDArray[np.int64]
    admitted: int = 0
    flexible: int = 0
    late: int = 0
    spared: int = 0
    held: int = 0
    planned_start: float | None = None
    planned_end: float | None = None
    lost: float = 0.0
    announced: float | None = None
    before: float | None = None
    at: float | None = None
    zone: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    series: Series


def replay(
    jobs: Workload,
    cluster: ClusterShape,
    policy: Policy,
    planned: Planned | None = None,
    *,
    delay_late: bool = False,
    checkpoint: float = 3600.0,
    sample: float = 300.0,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Play a workload back until every job has ended.

    delay_late: the planned job waits for those that are late instead of preempting them (preemptible jobs go
    in any case). checkpoint: a preempted job keeps its work up to the last whole multiple of so many seconds.
    sample: seconds between points of the series. Raises PlacementError for a planned job that cannot be.
    """
    if planned is not None:
        check_planned(planned, cluster)
    queue = planned is not None and not policy.reserves
    whole = _with_planned(jobs, cluster, planned) if planned and queue else jobs
    run = _Run(whole, cluster, policy, planned, delay_late, checkpoint, sample)
    run.play(progress)
    return run.outcome(queue)


def check_planned(planned: Planned, cluster: ClusterShape) -> None:
    """Raise PlacementError for a planned job that no cluster of this shape can take."""
    if not 0 < planned.nodes <= cluster.nodes:
        raise PlacementError(
            f"The planned job wants {planned.nodes} nodes; the cluster has {cluster.nodes}. Reserve from 1 to as many."
        )
    if planned.notice < 0 or planned.arrival < planned.notice:
        raise PlacementError(
            f"The planned job arrives {planned.arrival / 3600:g} h after the replay's start and is announced "
            f"{planned.notice / 3600:g} h before that. Let it arrive later, or be announced later."
        )
    if planned.zone is not None:
        check_zone(planned.zone, cluster.nodes, planned.nodes)


def _with_planned(jobs: Workload, cluster: ClusterShape, planned: Planned) -> Workload:
    """The planned job as one that queues when it comes, behind those that came at the same time."""
    at = int(np.searchsorted(jobs.submit, planned.arrival, side="right"))
    own = {
        "submit": planned.arrival,
        "duration": planned.duration,
        "gpus": planned.nodes * cluster.gpus_per_node,
        "mean": np.inf,
        "upper": np.inf,
        "preemptible": False,
        "job": -1,
    }
    return replace(jobs, **{name: np.insert(getattr(jobs, name), at, value) for name, value in own.items()})


class _Run:
    """One replay under way."""

    def __init__(
        self, jobs: Workload, cluster: ClusterShape, policy: Policy, planned: Planned | None, delay_late: bool,
        checkpoint: float, sample: float,
    ) -> None:  # fmt: skip
        self.jobs, self.cluster, self.policy, self.checkpoint = jobs, cluster, policy, checkpoint
        self.evicts = policy.evicts and not delay_late
        self.planned = planned if policy.reserves else None
        self.submit, self.gpus = jobs.submit.tolist(), jobs.gpus.tolist()
        self.left = jobs.duration.tolist()  # seconds of work
        self.jct, self.preemptible = policy.jct(jobs).tolist(), jobs.preemptible.tolist()
        self.pool, self.waiting = Pool(cluster.nodes, cluster.gpus_per_node), Waiting()
        self.held: dict[int, Held] = {}
        self.since: dict[int, float] = {}
        self.inside: dict[int, bool] = {}  # who entered the zone while it was one, by a prediction or not
        self.events: list[tuple[float, int, int, int]] = []
        self.turn = [0] * len(jobs)  # starts of a job; an end of an earlier one does not count
        self.started, self.ended = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan)
        self.restarts = np.zeros(len(jobs), np.int64)
        self.zone: list[int] = []
        self.due = np.inf  # when the zone must be empty; inf: there is none
        self.closed = False  # the planned job waits, or runs, in its zone
        self.now = 0.0
        self.admitted = self.flexible = self.late = self.spared = self.held_over = 0
        self.lost = 0.0
        self.runs: list[Run] = []
        self.announced: float | None = None
        self.before: float | None = None
        self.at: float | None = None
        self.planned_start: float | None = None
        self.planned_end: float | None = None
        self.meter = Meter(cluster.nodes, cluster.gpus_per_node, sample)

    # ---- events ----

    def play(self, progress: Callable[[float], None] | None) -> None:
        """Until every job has ended."""
        if self.planned:
            heappush(self.events, (self.planned.arrival - self.planned.notice, ANNOUNCED, -1, 0))
            heappush(self.events, (self.planned.arrival, PLANNED, -1, 0))
        arrived = self._running_at_start()
        count, done, told = len(self.submit), 0, 0
        while arrived < count or self.events or len(self.waiting):
            now = min(self.submit[arrived] if arrived < count else np.inf, self.events[0][0] if self.events else np.inf)
            assert now < np.inf, "a job waits that will never start"
            self.meter.advance(now, self.pool, self._retention())
            self.now = now
            while self.events and self.events[0][0] <= now:
                done += self._happen(*heappop(self.events)[1:])
            while arrived < count and self.submit[arrived] <= now:
                self._enqueue(arrived)
                arrived += 1
            self._admit()
            if progress and done >= told:
                progress(done / max(1, count))
                told = done + max(1, count // 100)
        self.meter.finish(self.pool)

    def _retention(self) -> float:
        """The share of the zone that others hold; NaN where there is no zone."""
        if self.due == np.inf:
            return np.nan
        return 0.0 if self.planned_start is not None else self.pool.zone_busy / len(self.zone)

    def _running_at_start(self) -> int:
        """Start what was submitted before the replay, the largest first; what finds no room waits."""
        before = int(np.searchsorted(self.jobs.submit, 0.0, side="left"))
        for job in sorted(range(before), key=lambda job: (-self.gpus[job], job)):
            if self.pool.fits(self.gpus[job], False):
                self.left[job] += self.submit[job]  # which is negative: it has run that long
                self._start(job, False)
                self.started[job] = self.submit[job]
                self.since[job] = self.submit[job]
            else:
                self._enqueue(job)
        return before

    def _happen(self, kind: int, job: int, turn: int) -> int:
        """One event; how many jobs ended in it."""
        if kind == END and job < 0:
            self._leave()
        elif kind == END:
            if self.turn[job] != turn:
                return 0  # it was preempted meanwhile
            self._stop(job)
            self.ended[job] = self.now
            self._enter()
            return 1
        elif kind == ANNOUNCED:
            self._announce()
        else:
            self._arrive()
        return 0

    # ---- ordinary jobs ----

    def _enqueue(self, job: int) -> None:
        self.waiting.add(job, self.gpus[job])
        if self.due < np.inf and not self.closed and self._may_enter(job):
            self.waiting.admit(job, self.gpus[job])

    def _may_enter(self, job: int) -> bool:
        """Algorithm 1: preemptible, or out again before the planned job arrives."""
        return self.preemptible[job] or self.now + self.jct[job] <= self.due

    def _admit(self) -> None:
        """Start whoever finds room."""
        if self.policy.strict:
            while (job := self.waiting.first()) is not None and self.pool.fits(self.gpus[job], False):
                self._start(job, False)
            return
        still = self._may_enter if self.due < np.inf and not self.closed else None
        while found := self.waiting.next(self.pool.fits, still):
            self._start(*found)

    def _start(self, job: int, zone: bool) -> None:
        self.waiting.remove(job)
        self.held[job] = held = self.pool.take(self.gpus[job], zone)
        self.since[job] = self.now
        if np.isnan(self.started[job]):
            self.started[job] = self.now
        if zone:
            self.inside[job] = not self.preemptible[job]
            self.admitted += 1
            self.flexible += self.preemptible[job]
        self.turn[job] += 1
        assert held
        heappush(self.events, (self.now + self.left[job], END, job, self.turn[job]))

    def _stop(self, job: int) -> None:
        held = self.held.pop(job)
        self.pool.release(held)
        self.runs.append(Run(job, self.since[job], self.now, held))
        self.inside.pop(job, None)

    def _preempt(self, job: int) -> None:
        """Out of the cluster and back into the queue, with the work up to its last checkpoint."""
        ran = self.now - self.since[job]
        kept = min(ran, ran // self.checkpoint * self.checkpoint) if self.checkpoint > 0 else ran
        self.left[job] += max(0.0, -self.since[job]) - kept  # what ran before the replay is no longer in ``left``
        self.lost += (ran - kept) * self.gpus[job]
        self._stop(job)
        self.turn[job] += 1
        self.restarts[job] += 1
        self._enqueue(job)

    # ---- the planned job ----

    def _announce(self) -> None:
        assert self.planned is not None
        if self.planned.zone is not None:
            self.zone = check_zone(self.planned.zone, self.cluster.nodes, self.planned.nodes)
        else:
            self.zone = choose_zone(self._stays(), self.planned.nodes, self.cluster.minipod)
        self.due = self.planned.arrival
        self.pool.reserve(self.zone)
        self.announced = self.pool.zone_busy / len(self.zone)
        for job in self.waiting:
            if self._may_enter(job):
                self.waiting.admit(job, self.gpus[job])

    def _stays(self) -> list[float]:
        """For each node the GPUs in use that nobody expects to be free when the planned job comes."""
        assert self.planned is not None
        stays = [0.0] * self.cluster.nodes
        for job, held in self.held.items():
            ends = self.since[job] + self.jct[job] if self.policy.foresees else np.inf
            goes = self.preemptible[job] or self.now < ends <= self.planned.arrival
            for node, gpus in held:
                stays[node] += 0 if goes else gpus
        return stays

    def _arrive(self) -> None:
        """The zone must be empty now; who is in it goes, or the planned job waits."""
        self.closed = True
        self.before = self.pool.zone_busy / len(self.zone)
        zone = set(self.zone)
        for job in sorted(self.held):
            if not any(node in zone for node, _ in self.held[job]):
                continue
            by_prediction = self.inside.get(job)
            self.late += by_prediction is True
            self.spared += by_prediction is False
            self.held_over += by_prediction is None
            if self.evicts or (self.preemptible[job] and self.policy.evicts):
                self._preempt(job)
        self.at = self.pool.zone_busy / len(self.zone)
        self._enter()

    def _enter(self) -> None:
        """Start the planned job, if it is there and its nodes are empty."""
        if self.closed and self.planned and self.planned_start is None and not self.pool.zone_busy:
            self.planned_start = self.now
            self.held[-1] = self.pool.occupy(self.zone)
            heappush(self.events, (self.now + self.planned.duration, END, -1, 0))

    def _leave(self) -> None:
        self.planned_end = self.now
        assert self.planned_start is not None
        held = self.held.pop(-1)
        self.pool.release(held)
        self.runs.append(Run(-1, self.planned_start, self.now, held))
        self.pool.open(self.zone)
        self.due, self.closed = np.inf, False

    # ---- result ----

    def outcome(self, queued: bool) -> Outcome:
        """What came of it. queued: the planned job is one of the jobs."""
        keep = self.jobs.job >= 0
        if queued:
            own = int(np.flatnonzero(~keep)[0])
            self.planned_start, self.planned_end = float(self.started[own]), float(self.ended[own])
            self.runs = [run._replace(job=-1 if run.job == own else run.job - (run.job > own)) for run in self.runs]
        return Outcome(
            policy=self.policy.name,
            started=self.started[keep],
            ended=self.ended[keep],
            restarts=self.restarts[keep],
            admitted=self.admitted,
            flexible=self.flexible,
            late=self.late,
            spared=self.spared,
            held=self.held_over,
            planned_start=self.planned_start,
            planned_end=self.planned_end,
            lost=self.lost,
            announced=self.announced,
            before=self.before,
            at=self.at,
            zone=tuple(self.zone),
            runs=tuple(self.runs),
            series=self.meter.series(),
        )

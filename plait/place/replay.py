"""A trace played back on a cluster: jobs arrive, wait, run, end; nodes are reserved for planned jobs.

Time advances from event to event. At each the policy lets in whom it lets in (``Waiting.next``); nothing
looks ahead except through the predictions that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.place.meter import QueueMeter, Series
from plait.place.policy import QueuePolicy
from plait.place.pool import OUTSIDE, Held, NodePool
from plait.place.reservation import ClusterShape, Kept, Planned, Reservation, check_planned, queued
from plait.place.waiting import Parts, Waiting
from plait.place.workload import JobTrace
from plait.place.zone import check_zone, choose_zone

Floats = NDArray[np.float64]
END, ANNOUNCED, MOVED, PLANNED = 0, 1, 2, 3
"""Kinds of events, in the order in which they happen at one time."""
WORTH_MOVING = 0.01
"""A zone moves if so much of its GPUs more will be free in time: a smaller gain is within what predictions
miss."""


class JobRun(NamedTuple):
    """A job, -1 for the first planned one, -2 for the second, on its GPUs from ``start`` to ``end``;
    preempted jobs run several times."""

    job: int
    start: float
    end: float
    held: Held


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """What one policy made of a workload. started: first start of each job, ended: its end, both (J,) and
    in seconds of the replay; restarts: how often it was preempted. planned: what came of every planned job.
    lost: GPU-seconds of work done twice."""

    policy: str
    started: Floats
    ended: Floats
    restarts: NDArray[np.int64]
    planned: tuple[Kept, ...] = ()
    lost: float = 0.0
    runs: tuple[JobRun, ...] = ()
    series: Series


@dataclass(frozen=True, kw_only=True)
class ReplayRules:
    """What holds under every policy. delay_late: a planned job waits for those that are late instead of
    preempting them; preemptible jobs go in any case. checkpoint: a preempted job keeps its work up to the
    last whole multiple of so many seconds. replan: seconds after which the nodes of a zone are chosen anew,
    again and again, by what jobs have ended and begun meanwhile; 0 for never. A zone that a placement has
    given stays. sample: seconds between points of the series."""

    delay_late: bool = False
    checkpoint: float = 3600.0
    replan: float = 0.0
    sample: float = 300.0


USUAL = ReplayRules()


def replay(
    jobs: JobTrace,
    cluster: ClusterShape,
    policy: QueuePolicy,
    planned: Sequence[Planned] = (),
    *,
    rules: ReplayRules = USUAL,
    progress: Callable[[float], None] | None = None,
) -> ReplayOutcome:
    """Play a workload back until every job has ended. Raises PlacementError for planned jobs that cannot
    be."""
    check_planned(planned, cluster)
    whole = jobs if policy.reserves else queued(jobs, planned, cluster)
    run = _Run(whole, cluster, policy, planned, rules)
    run.play(progress)
    return run.outcome(len(planned))


class _Run:
    """One replay under way."""

    def __init__(
        self,
        jobs: JobTrace,
        cluster: ClusterShape,
        policy: QueuePolicy,
        planned: Sequence[Planned],
        rules: ReplayRules,
    ) -> None:
        self.jobs, self.cluster, self.policy, self.checkpoint = jobs, cluster, policy, rules.checkpoint
        self.evicts = policy.evicts and not rules.delay_late
        self.replan = rules.replan if policy.evicts else 0.0
        kept = planned if policy.reserves else ()
        self.reserved = [Reservation(number=number, planned=one) for number, one in enumerate(kept, 1)]
        self.submit, self.gpus = jobs.submit.tolist(), jobs.gpus.tolist()
        self.left = jobs.duration.tolist()  # seconds of work
        self.jct, self.preemptible = policy.jct(jobs).tolist(), jobs.preemptible.tolist()
        self.pool, self.waiting = NodePool(cluster.nodes, cluster.gpus_per_node, len(kept)), Waiting()
        self.rooms: list[Parts] = [(OUTSIDE,)]
        self.held: dict[int, Held] = {}
        self.since: dict[int, float] = {}
        self.inside: dict[int, frozenset[int]] = {}  # who entered which zones while they were ones
        self.events: list[tuple[float, int, int, int]] = []
        self.turn = [0] * len(jobs)  # times a job was preempted: the end of a start before that does not count
        self.started, self.ended = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan)
        self.restarts = np.zeros(len(jobs), np.int64)
        self.now = 0.0
        self.lost = 0.0
        self.runs: list[JobRun] = []
        self.meter = QueueMeter(cluster.nodes, cluster.gpus_per_node, rules.sample)

    # ---- events ----

    def play(self, progress: Callable[[float], None] | None) -> None:
        """Until every job has ended."""
        for at, one in enumerate(self.reserved):
            heappush(self.events, (one.planned.announced, ANNOUNCED, at, 0))
            heappush(self.events, (one.due, PLANNED, at, 0))
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
        """The share of the reserved nodes that others hold; NaN where there are none."""
        zones = [one for one in self.reserved if one.zone]
        if not zones:
            return np.nan
        held = sum(self.pool.busy_in[one.number] for one in zones if one.kept.start is None)
        return held / sum(len(one.zone) for one in zones)

    def _running_at_start(self) -> int:
        """Start what was submitted before the replay, the largest first; what finds no room waits."""
        before = int(np.searchsorted(self.jobs.submit, 0.0, side="left"))
        for job in sorted(range(before), key=lambda job: (-self.gpus[job], job)):
            if self.pool.fits(self.gpus[job], (OUTSIDE,)):
                self.left[job] += self.submit[job]  # which is negative: it has run that long
                self._start(job, (OUTSIDE,))
                self.started[job] = self.submit[job]
                self.since[job] = self.submit[job]
            else:
                self._enqueue(job)
        return before

    def _happen(self, kind: int, which: int, turn: int) -> int:
        """One event; how many jobs ended in it."""
        if kind == ANNOUNCED:
            self._announce(self.reserved[which])
        elif kind == MOVED:
            self._move(self.reserved[which])
        elif kind == PLANNED:
            self._arrive(self.reserved[which])
        elif which < 0:
            self._leave(self.reserved[-1 - which])
        elif self.turn[which] == turn:  # else it was preempted meanwhile
            self._stop(which)
            self.ended[which] = self.now
            self._enter()
            return 1
        return 0

    # ---- ordinary jobs ----

    def _enqueue(self, job: int) -> None:
        self.waiting.add(job, self.gpus[job])
        for one in self.reserved:
            if one.open and self._may_enter(job, one.number):
                self.waiting.admit(job, self.gpus[job], one.number)

    def _may_enter(self, job: int, zone: int) -> bool:
        """Algorithm 1: preemptible, or out again before the planned job arrives."""
        one = self.reserved[zone - 1]
        return one.open and (self.preemptible[job] or self.now + self.jct[job] <= one.due)

    def _admit(self) -> None:
        """Start whoever finds room."""
        if self.policy.strict:
            while (job := self.waiting.first()) is not None and self.pool.fits(self.gpus[job], (OUTSIDE,)):
                self._start(job, (OUTSIDE,))
            return
        while found := self.waiting.next(self.pool.fits, self.rooms, self._may_enter):
            self._start(*found)

    def _start(self, job: int, room: Parts) -> None:
        self.waiting.remove(job)
        self.held[job] = held = self.pool.take(self.gpus[job], room)
        self.since[job] = self.now
        if np.isnan(self.started[job]):
            self.started[job] = self.now
        if len(room) > 1:
            self.inside[job] = zones = frozenset(self.pool.part[node] for node, _ in held) - {OUTSIDE}
            for zone in zones:
                self.reserved[zone - 1].count("admitted")
                self.reserved[zone - 1].count("flexible", int(self.preemptible[job]))
        assert held
        heappush(self.events, (self.now + self.left[job], END, job, self.turn[job]))

    def _stop(self, job: int) -> None:
        held = self.held.pop(job)
        self.pool.release(held)
        self.runs.append(JobRun(job, self.since[job], self.now, held))
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

    # ---- planned jobs ----

    def _announce(self, one: Reservation) -> None:
        """Reserve its nodes. If a planned job that is late has them still, when that ends."""
        given = one.planned.zone
        elsewhere = [part != OUTSIDE for part in self.pool.part]
        if given is not None:
            zone = check_zone(given, self.cluster.nodes, one.planned.nodes)
            if any(elsewhere[node] for node in zone):
                return
        elif len(elsewhere) - sum(elsewhere) < one.planned.nodes:
            return
        else:
            zone = choose_zone(self._stays(one), one.planned.nodes, self.cluster.minipod)
        self._reserve(one, zone)
        one.note(announced=self.pool.busy_in[one.number] / len(zone))
        for job in self.waiting:
            if self._may_enter(job, one.number):
                self.waiting.admit(job, self.gpus[job], one.number)
        if self.replan and given is None:
            heappush(self.events, (self.now + self.replan, MOVED, one.number - 1, 0))
        if self.now > one.due:
            self._arrive(one)

    def _move(self, one: Reservation) -> None:
        """Choose its nodes anew; keep the old ones unless clearly more will be empty in time."""
        if not one.open:
            return
        stays = self._stays(one)
        zone = choose_zone(stays, one.planned.nodes, self.cluster.minipod)
        gain = sum(stays[node] for node in one.zone) - sum(stays[node] for node in zone)
        if gain > WORTH_MOVING * len(zone) * self.cluster.gpus_per_node:
            one.count("moved", len(set(zone) - set(one.zone)))
            self._reserve(one, zone)
        heappush(self.events, (self.now + self.replan, MOVED, one.number - 1, 0))

    def _reserve(self, one: Reservation, zone: list[int]) -> None:
        """From now on these are its nodes, none if there are none."""
        self.pool.reserve(set(one.zone) - set(zone), OUTSIDE)
        self.pool.reserve(zone, one.number)
        one.zone = zone
        self._open_rooms()

    def _open_rooms(self) -> None:
        """Who ends before one planned job is due ends before those that are due later."""
        zones = [one.number for one in sorted(self.reserved, key=lambda one: -one.due) if one.open]
        self.rooms = [(OUTSIDE, *zones[:many]) for many in range(len(zones) + 1)]

    def _stays(self, one: Reservation) -> list[float]:
        """For each node the GPUs in use that nobody expects to be free when a planned job comes; inf where
        nodes are kept for another one."""
        stays = [0.0 if part in (OUTSIDE, one.number) else np.inf for part in self.pool.part]
        for job, held in self.held.items():
            ends = self.since[job] + self.jct[job] if self.policy.foresees and job >= 0 else np.inf
            goes = job >= 0 and (self.preemptible[job] or self.now < ends <= one.due)
            for node, gpus in held:
                stays[node] += 0 if goes else gpus
        return stays

    def _arrive(self, one: Reservation) -> None:
        """Its zone must be empty now; who is in it goes, or the planned job waits."""
        if one.closed or not one.zone:
            return
        one.closed = True
        self._open_rooms()
        one.note(before=self.pool.busy_in[one.number] / len(one.zone))
        zone = set(one.zone)
        for job in sorted(self.held):
            if not any(node in zone for node, _ in self.held[job]):
                continue
            let_in = one.number in self.inside.get(job, ())
            one.count("held" if not let_in else "spared" if self.preemptible[job] else "late")
            if self.evicts or (self.preemptible[job] and self.policy.evicts):
                self._preempt(job)
        one.note(at=self.pool.busy_in[one.number] / len(one.zone))
        self._enter()

    def _enter(self) -> None:
        """Start the planned jobs that are there, and whose nodes are empty."""
        for one in self.reserved:
            if one.closed and one.zone and one.kept.start is None and not self.pool.busy_in[one.number]:
                one.note(start=self.now)
                self.held[-one.number] = self.pool.occupy(one.zone)
                heappush(self.events, (self.now + one.planned.duration, END, -one.number, 0))

    def _leave(self, one: Reservation) -> None:
        held = self.held.pop(-one.number)
        self.pool.release(held)
        assert one.kept.start is not None
        self.runs.append(JobRun(-one.number, one.kept.start, self.now, held))
        one.note(zone=tuple(one.zone), end=self.now)
        self._reserve(one, [])
        for other in self.reserved:
            if not other.zone and not other.closed and self.now > other.planned.announced:
                self._announce(other)

    # ---- result ----

    def outcome(self, planned: int) -> ReplayOutcome:
        """What came of it. planned: how many planned jobs there were."""
        number = self.jobs.job
        keep = number >= 0
        kept = tuple(one.kept for one in self.reserved)
        if not self.policy.reserves:
            at = {-1 - int(number[row]): row for row in np.flatnonzero(~keep)}
            kept = tuple(Kept(start=float(self.started[at[i]]), end=float(self.ended[at[i]])) for i in range(planned))
            own = np.where(keep, np.cumsum(keep) - 1, number).tolist()
            self.runs = [run._replace(job=own[run.job]) for run in self.runs]
        return ReplayOutcome(
            policy=self.policy.name,
            started=self.started[keep],
            ended=self.ended[keep],
            restarts=self.restarts[keep],
            planned=kept,
            lost=self.lost,
            runs=tuple(self.runs),
            series=self.meter.series(),
        )

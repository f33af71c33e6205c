"""A trace played back on a cluster: jobs arrive, wait, run, end; nodes are reserved for planned jobs.

Time advances from event to event. At each, ``Admission`` says who starts (Algorithm 1, as a live queue has it
decided); nothing looks ahead except through the predictions that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.place.admission import Admission, Decision, QueuedJobs
from plait.place.meter import QueueMeter, Series
from plait.place.policy import QueuePolicy
from plait.place.pool import OUTSIDE, Held, NodePool
from plait.place.reservation import NOTHING, ClusterShape, KeptZone, Planned, Reservation, check_planned, queued
from plait.place.workload import JobTrace
from plait.place.zone import Zone, check_zone, make_zone

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
    planned: tuple[KeptZone, ...] = ()
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
    run = _Replay(whole, cluster, policy, planned, rules)
    run.play(progress)
    return run.outcome(len(planned))


class _Replay:
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
        self.pool = NodePool(cluster.nodes, cluster.gpus_per_node, 2 * len(kept))
        self.queue = Admission(QueuedJobs.of(jobs, policy), self.pool, self.reserved, strict=policy.strict)
        self.preemptible = self.queue.jobs.preemptible
        self.held: dict[int, Held] = {}
        self.since: dict[int, float] = {}
        self.inside: dict[int, frozenset[int]] = {}  # who entered which parts while they were kept
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
        while arrived < count or self.events or len(self.queue.waiting):
            now = min(self.submit[arrived] if arrived < count else np.inf, self.events[0][0] if self.events else np.inf)
            assert now < np.inf, "a job waits that will never start"
            self.meter.advance(now, self.pool, self._retention())
            self.now = self.queue.now = now
            while self.events and self.events[0][0] <= now:
                done += self._happen(*heappop(self.events)[1:])
            while arrived < count and self.submit[arrived] <= now:
                self.queue.enqueue(arrived)
                arrived += 1
            while decision := self.queue.next():
                self._start(decision)
            if progress and done >= told:
                progress(done / max(1, count))
                told = done + max(1, count // 100)
        self.meter.finish(self.pool)

    def _retention(self) -> float:
        """The share of the reserved nodes that others hold; NaN where there are none."""
        zones = [one for one in self.reserved if one.zone.nodes]
        if not zones:
            return np.nan
        held = sum(self.pool.busy_in[one.part] for one in zones if one.kept.start is None)
        return held / sum(len(one.zone.nodes if one.closed else one.nodes) for one in zones)

    def _running_at_start(self) -> int:
        """Start what was submitted before the replay, the largest first; what finds no room waits."""
        before = int(np.searchsorted(self.jobs.submit, 0.0, side="left"))
        for job in sorted(range(before), key=lambda job: (-self.gpus[job], job)):
            if self.pool.fits(self.gpus[job], (OUTSIDE,)):
                self.left[job] += self.submit[job]  # which is negative: it has run that long
                self._start(Decision(job, (OUTSIDE,), self.pool.take(self.gpus[job], (OUTSIDE,))))
                self.started[job] = self.submit[job]
                self.since[job] = self.submit[job]
            else:
                self.queue.enqueue(job)
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

    def _start(self, decision: Decision) -> None:
        job, room, held = decision
        self.held[job], self.since[job] = held, self.now
        if np.isnan(self.started[job]):
            self.started[job] = self.now
        if len(room) > 1:
            self.inside[job] = parts = frozenset(self.pool.part[node] for node, _ in held) - {OUTSIDE}
            for one in self.reserved:
                one.count("admitted", int(one.part in parts))
                one.count("flexible", int(one.part in parts and self.preemptible[job]))
                one.count("lent", int(one.spare_part in parts))
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
        self.queue.enqueue(job)

    # ---- planned jobs ----

    def _announce(self, one: Reservation) -> None:
        """Reserve its nodes. If a planned job that is late has them still, when that ends."""
        given, wanted = one.planned.zone, one.planned.nodes
        elsewhere = [part != OUTSIDE for part in self.pool.part]
        if given is not None:
            zone = check_zone(given, self.cluster.nodes, one.planned.kept)
            if any(elsewhere[node] for node in zone):
                return
            found = Zone(nodes=sorted(zone[:wanted]), spares=zone[wanted:])
        elif len(elsewhere) - sum(elsewhere) < one.planned.kept:
            return
        else:
            found = self._chosen(one, self._stays(one))
        self._reserve(one, found)
        one.note(announced=self.pool.busy_in[one.part] / len(one.nodes))
        self.queue.open_part(one.part)
        if self.replan and given is None:
            heappush(self.events, (self.now + self.replan, MOVED, one.number - 1, 0))
        if self.now > one.due:
            self._arrive(one)

    def _chosen(self, one: Reservation, stays: list[float]) -> Zone:
        """Its nodes, by who will have them when it comes; placed, if its shape is known."""
        planned = one.planned
        return make_zone(stays, planned.nodes, planned.spares, self.cluster.minipod, planned.shape)

    def _move(self, one: Reservation) -> None:
        """Choose its nodes anew; keep the old ones unless clearly more will be empty in time."""
        if not one.open:
            return
        stays = self._stays(one)
        zone = self._chosen(one, stays)
        if one.zone.cost(stays) - zone.cost(stays) > WORTH_MOVING * len(one.nodes):
            one.count("moved", len({*zone.nodes, *zone.spares} - set(one.nodes)))
            self._reserve(one, zone)
        heappush(self.events, (self.now + self.replan, MOVED, one.number - 1, 0))

    def _reserve(self, one: Reservation, zone: Zone) -> None:
        """From now on these are its nodes, none if there are none."""
        self.pool.reserve(set(one.nodes) - {*zone.nodes, *zone.spares}, OUTSIDE)
        one.zone = zone
        self.pool.reserve(one.nodes, one.part)
        self.queue.open_rooms()

    def _stays(self, one: Reservation) -> list[float]:
        """For each node the share of it that nobody expects to be free when a planned job comes; inf where
        nodes are kept for another one."""
        stays = [0.0 if part in (OUTSIDE, one.part) else np.inf for part in self.pool.part]
        jct, size = self.queue.jobs.jct, self.cluster.gpus_per_node
        for job, held in self.held.items():
            ends = self.since[job] + jct[job] if self.policy.foresees and job >= 0 else np.inf
            goes = job >= 0 and (self.preemptible[job] or self.now < ends <= one.due)
            for node, gpus in held:
                stays[node] += 0 if goes else gpus / size
        return stays

    def _arrive(self, one: Reservation) -> None:
        """Its zone must be empty now; who is in it goes, or the planned job waits. Who is preemptible may
        stay on its spares."""
        if one.closed or not one.zone.nodes:
            return
        one.closed = True
        self.pool.reserve(one.zone.spares, one.spare_part)
        self.queue.open_rooms()
        one.note(before=self.pool.busy_in[one.part] / len(one.zone.nodes))
        zone, spares = set(one.zone.nodes), set(one.zone.spares)
        for job in sorted(self.held):
            there = {node for node, _ in self.held[job]}
            if not there & zone and (self.preemptible[job] or not there & spares):
                continue
            let_in = one.part in self.inside.get(job, ())
            one.count("held" if not let_in else "spared" if self.preemptible[job] else "late")
            if self.evicts or (self.preemptible[job] and self.policy.evicts):
                self._preempt(job)
        one.note(at=self.pool.busy_in[one.part] / len(one.zone.nodes))
        if one.lends:
            self.queue.open_part(one.spare_part)
        self._enter()

    def _enter(self) -> None:
        """Start the planned jobs that are there, and whose nodes are empty."""
        for one in self.reserved:
            if one.closed and one.zone.nodes and one.kept.start is None and not self.pool.busy_in[one.part]:
                one.note(start=self.now)
                self.held[-one.number] = self.pool.occupy(one.zone.nodes)
                heappush(self.events, (self.now + one.planned.duration, END, -one.number, 0))

    def _leave(self, one: Reservation) -> None:
        held = self.held.pop(-one.number)
        self.pool.release(held)
        assert one.kept.start is not None
        self.runs.append(JobRun(-one.number, one.kept.start, self.now, held))
        zone = one.zone
        one.note(
            zone=tuple(zone.nodes), spares=tuple(zone.spares), pp_spread=zone.pp_spread, dp_spread=zone.dp_spread,
            end=self.now,
        )  # fmt: skip
        self._reserve(one, NOTHING)
        for other in self.reserved:
            if not other.zone.nodes and not other.closed and self.now > other.planned.announced:
                self._announce(other)

    # ---- result ----

    def outcome(self, planned: int) -> ReplayOutcome:
        """What came of it. planned: how many planned jobs there were."""
        number = self.jobs.job
        keep = number >= 0
        kept = tuple(one.kept for one in self.reserved)
        if not self.policy.reserves:
            at = {-1 - int(number[row]): row for row in np.flatnonzero(~keep)}
            kept = tuple(
                KeptZone(start=float(self.started[at[i]]), end=float(self.ended[at[i]])) for i in range(planned)
            )
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

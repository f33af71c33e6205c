"""Replay of a trace on a cluster: jobs arrive, wait, run, end; nodes are reserved for planned jobs.

Time advances from event to event. At each event, ``Admission`` decides who starts (Algorithm 1, as
for a live queue). Only the given predictions look ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.place.queue.admission import Admission, Decision, QueuedJobs, QueuePolicy
from plait.place.queue.pool import OUTSIDE, Held, NodePool, QueueMeter, Series
from plait.place.queue.reservation import (
    NO_ZONE,
    ClusterShape,
    KeptZone,
    Planned,
    Reservation,
    Zone,
    check_planned,
    check_zone,
    make_zone,
    queued,
)
from plait.place.queue.workload import JobTrace

Floats = NDArray[np.float64]
END, ANNOUNCED, MOVED, PLANNED = 0, 1, 2, 3
"""Kinds of events, in the order in which simultaneous events happen: a job ends, a planned job is
announced, its zone may move, a planned job arrives."""
WORTH_MOVING = 0.01
"""Minimum gain for which a zone moves, as a fraction of its GPUs that become free in time: a
smaller gain is within the predictions' error."""


class JobRun(NamedTuple):
    """A run of a job from ``start`` to ``end``, in seconds of the replay; preempted jobs have
    several. held: (node, number of its GPUs) pairs. job: -1 for the first planned job, -2 for the
    second."""

    job: int
    start: float
    end: float
    held: Held


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """Result of one policy on a workload. started: first start of each job; ended: its end; both
    (J,), in seconds of the replay. restarts: number of preemptions. planned: result of every
    planned job. lost: GPU-seconds of repeated work."""

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
    """Rules that apply under every policy.

    delay_late: a planned job waits for late jobs instead of preempting them; preemptible jobs leave
    in any case. checkpoint: a preempted job keeps its work up to the last multiple of this many
    seconds. replan: interval in seconds at which the nodes of a zone are chosen anew, given the
    jobs that have ended and begun; 0: never. A zone from a placement stays. sample: seconds between
    points of the series.
    """

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
    """Replay a workload until every job has ended. Raises PlacementError for impossible planned
    jobs."""
    check_planned(planned, cluster)
    whole = jobs if policy.reserves else queued(jobs, planned, cluster)
    run = _Replay(whole, cluster, policy, planned, rules)
    run.play(progress)
    return run.outcome(len(planned))


class _Replay:
    """State of a replay while it runs."""

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
        self.inside: dict[int, frozenset[int]] = {}  # job -> reserved parts that it entered
        self.events: list[tuple[float, int, int, int]] = []
        self.turn = [0] * len(jobs)  # preemptions of each job: end events of earlier starts are void
        self.started, self.ended = np.full(len(jobs), np.nan), np.full(len(jobs), np.nan)
        self.restarts = np.zeros(len(jobs), np.int64)
        self.now = 0.0
        self.lost = 0.0
        self.runs: list[JobRun] = []
        self.meter = QueueMeter(cluster.nodes, cluster.gpus_per_node, rules.sample)

    # ---- events ----

    def play(self, progress: Callable[[float], None] | None) -> None:
        """Run the replay until every job has ended. progress: called with the share of jobs that
        have ended."""
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
        """Return the share of the reserved nodes that other jobs hold; NaN if none are reserved."""
        zones = [one for one in self.reserved if one.zone.nodes]
        if not zones:
            return np.nan
        held = sum(self.pool.busy_in[one.part] for one in zones if one.kept.start is None)
        return held / sum(len(one.zone.nodes if one.closed else one.nodes) for one in zones)

    def _running_at_start(self) -> int:
        """Start jobs submitted before the replay, the largest first; jobs without room wait. Return
        the number of jobs submitted before the replay."""
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
        """Handle one event and return the number of jobs that ended in it."""
        if kind == ANNOUNCED:
            self._announce(self.reserved[which])
        elif kind == MOVED:
            self._move(self.reserved[which])
        elif kind == PLANNED:
            self._arrive(self.reserved[which])
        elif which < 0:
            self._leave(self.reserved[-1 - which])
        elif self.turn[which] == turn:  # else the job was preempted since
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
        """Move a job from the cluster back into the queue; it keeps its work up to the last
        checkpoint."""
        ran = self.now - self.since[job]
        kept = min(ran, ran // self.checkpoint * self.checkpoint) if self.checkpoint > 0 else ran
        self.left[job] += max(0.0, -self.since[job]) - kept  # ``left`` excludes work from before the replay
        self.lost += (ran - kept) * self.gpus[job]
        self._stop(job)
        self.turn[job] += 1
        self.restarts[job] += 1
        self.queue.enqueue(job)

    # ---- planned jobs ----

    def _announce(self, reservation: Reservation) -> None:
        """Choose and reserve the planned job's nodes. If an earlier planned job that is late still
        has them, this is repeated when that job ends."""
        given, wanted = reservation.planned.zone, reservation.planned.nodes
        elsewhere = [part != OUTSIDE for part in self.pool.part]
        if given is not None:
            zone = check_zone(given, self.cluster.nodes, reservation.planned.kept)
            if any(elsewhere[node] for node in zone):
                return
            found = Zone(nodes=sorted(zone[:wanted]), spares=zone[wanted:])
        elif len(elsewhere) - sum(elsewhere) < reservation.planned.kept:
            return
        else:
            found = self._chosen(reservation, self._stays(reservation))
        self._reserve(reservation, found)
        reservation.note(announced=self.pool.busy_in[reservation.part] / len(reservation.nodes))
        self.queue.open_part(reservation.part)
        if self.replan and given is None:
            heappush(self.events, (self.now + self.replan, MOVED, reservation.number - 1, 0))
        if self.now > reservation.due:
            self._arrive(reservation)

    def _chosen(self, reservation: Reservation, stays: list[float]) -> Zone:
        """Return the nodes to reserve for the planned job. stays: for each node, the share that
        other jobs will still hold when it arrives. If its shape is known, its groups are placed on
        them."""
        planned = reservation.planned
        return make_zone(stays, planned.nodes, planned.spares, self.cluster.minipod, planned.shape)

    def _move(self, reservation: Reservation) -> None:
        """Choose the planned job's nodes anew; keep the old ones unless clearly more will be empty
        in time."""
        if not reservation.open:
            return
        stays = self._stays(reservation)
        zone = self._chosen(reservation, stays)
        if reservation.zone.cost(stays) - zone.cost(stays) > WORTH_MOVING * len(reservation.nodes):
            reservation.count("moved", len({*zone.nodes, *zone.spares} - set(reservation.nodes)))
            self._reserve(reservation, zone)
        heappush(self.events, (self.now + self.replan, MOVED, reservation.number - 1, 0))

    def _reserve(self, reservation: Reservation, zone: Zone) -> None:
        """Make these nodes the planned job's zone, in place of its old ones."""
        self.pool.reserve(set(reservation.nodes) - {*zone.nodes, *zone.spares}, OUTSIDE)
        reservation.zone = zone
        self.pool.reserve(reservation.nodes, reservation.part)
        self.queue.open_rooms()

    def _stays(self, reservation: Reservation) -> list[float]:
        """Return for each node the share that is not expected to be free when a planned job
        arrives; inf for nodes of other planned jobs."""
        stays = [0.0 if part in (OUTSIDE, reservation.part) else np.inf for part in self.pool.part]
        jct, size = self.queue.jobs.jct, self.cluster.gpus_per_node
        for job, held in self.held.items():
            ends = self.since[job] + jct[job] if self.policy.foresees and job >= 0 else np.inf
            goes = job >= 0 and (self.preemptible[job] or self.now < ends <= reservation.due)
            for node, gpus in held:
                stays[node] += 0 if goes else gpus / size
        return stays

    def _arrive(self, reservation: Reservation) -> None:
        """Close the zone, which must be empty now: jobs in it are preempted, or the planned job
        waits. Preemptible jobs may stay on its spares."""
        if reservation.closed or not reservation.zone.nodes:
            return
        reservation.closed = True
        self.pool.reserve(reservation.zone.spares, reservation.spare_part)
        self.queue.open_rooms()
        reservation.note(before=self.pool.busy_in[reservation.part] / len(reservation.zone.nodes))
        zone, spares = set(reservation.zone.nodes), set(reservation.zone.spares)
        for job in sorted(self.held):
            there = {node for node, _ in self.held[job]}
            if not there & zone and (self.preemptible[job] or not there & spares):
                continue
            let_in = reservation.part in self.inside.get(job, ())
            reservation.count("held" if not let_in else "spared" if self.preemptible[job] else "late")
            if self.evicts or (self.preemptible[job] and self.policy.evicts):
                self._preempt(job)
        reservation.note(at=self.pool.busy_in[reservation.part] / len(reservation.zone.nodes))
        if reservation.lends:
            self.queue.open_part(reservation.spare_part)
        self._enter()

    def _enter(self) -> None:
        """Start the planned jobs that have arrived and whose nodes are empty."""
        for one in self.reserved:
            if one.closed and one.zone.nodes and one.kept.start is None and not self.pool.busy_in[one.part]:
                one.note(start=self.now)
                self.held[-one.number] = self.pool.occupy(one.zone.nodes)
                heappush(self.events, (self.now + one.planned.duration, END, -one.number, 0))

    def _leave(self, reservation: Reservation) -> None:
        held = self.held.pop(-reservation.number)
        self.pool.release(held)
        assert reservation.kept.start is not None
        self.runs.append(JobRun(-reservation.number, reservation.kept.start, self.now, held))
        zone = reservation.zone
        reservation.note(
            zone=tuple(zone.nodes), spares=tuple(zone.spares), pp_spread=zone.pp_spread, dp_spread=zone.dp_spread,
            end=self.now,
        )  # fmt: skip
        self._reserve(reservation, NO_ZONE)
        for other in self.reserved:
            if not other.zone.nodes and not other.closed and self.now > other.planned.announced:
                self._announce(other)

    # ---- result ----

    def outcome(self, planned: int) -> ReplayOutcome:
        """Return the replay's result. planned: number of planned jobs."""
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

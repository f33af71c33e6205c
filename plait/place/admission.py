"""Admission: Algorithm 1 of Arnold (arXiv 2509.15940), decided in one place for the replay and for a live
cluster.

::

    Q <- jobs by priority, then by submission            ``queue_places``, ``Waiting``
    preemptable(J)                    -> start anywhere  ``may_enter``
    J.request < free outside the zone -> start there     the first of ``rooms``
    now + pred_JCT(J) <= arrival      -> start in the zone
    else                              -> wait

Parts of a cluster: outside; the zone of each planned job; its spare nodes once it runs, which are lent to
preemptible jobs alone. Who may be in one part may be in all that ``rooms`` lists before it: who ends before
one planned job is due ends before those that are due later, and who may be preempted may be anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.place.policy import QueuePolicy
from plait.place.pool import OUTSIDE, Held, NodePool
from plait.place.reservation import Reservation
from plait.place.waiting import Parts, Waiting
from plait.place.workload import JobTrace


class Decision(NamedTuple):
    """A job that starts now: the parts it was offered, the last of them needed; its nodes, already taken."""

    job: int
    room: Parts
    held: Held


@dataclass(frozen=True, kw_only=True)
class QueuedJobs:
    """What Algorithm 1 knows of jobs, by number: GPUs, seconds each is believed to run, whether it may be
    preempted, its place in the queue."""

    gpus: Sequence[int]
    jct: Sequence[float]
    preemptible: Sequence[bool]
    places: Sequence[int]

    @classmethod
    def of(cls, jobs: JobTrace, policy: QueuePolicy) -> QueuedJobs:
        """Jobs of a workload, believed to run as a policy says."""
        return cls(
            gpus=jobs.gpus.tolist(), jct=policy.jct(jobs).tolist(), preemptible=jobs.preemptible.tolist(),
            places=queue_places(jobs.priority).tolist(),
        )  # fmt: skip


def queue_places(priority: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places in the queue of jobs that are numbered by submission: the highest priority first, then the
    earliest.

    >>> queue_places(np.array([0, 5, 0, 5])).tolist()
    [2, 0, 3, 1]
    """
    places = np.empty(len(priority), np.int64)
    places[np.argsort(-priority, kind="stable")] = np.arange(len(priority))
    return places


class Admission:
    """The queue, the nodes and the zones at one moment, ``now``. strict: no job starts before one that stands
    before it in the queue."""

    def __init__(
        self, jobs: QueuedJobs, pool: NodePool, reserved: Sequence[Reservation], *, strict: bool = False
    ) -> None:
        self.jobs, self.pool, self.reserved, self.strict = jobs, pool, reserved, strict
        self.waiting = Waiting(jobs.places)
        self.rooms: list[Parts] = [(OUTSIDE,)]
        self.now = 0.0
        self.open_rooms()

    def enqueue(self, job: int) -> None:
        """A job that waits from now on."""
        self.waiting.add(job, self.jobs.gpus[job])
        for part in self.rooms[-1][1:]:
            self._let_into(job, part)

    def open_part(self, part: int) -> None:
        """A part that waiting jobs may enter from now on, if they may."""
        for job in self.waiting:
            self._let_into(job, part)

    def _let_into(self, job: int, part: int) -> None:
        if self.may_enter(job, part):
            self.waiting.admit(job, self.jobs.gpus[job], part)

    def may_enter(self, job: int, part: int) -> bool:
        """Whether Algorithm 1 lets a job into a zone, or onto the spare nodes of a planned job."""
        one = self.reserved[(part - 1) // 2]
        if part == one.spare_part:
            return one.lends and self.jobs.preemptible[job]
        in_time = self.jobs.preemptible[job] or self.now + self.jobs.jct[job] <= one.due
        return one.open and in_time and self.now <= one.due - one.planned.closes

    def open_rooms(self) -> None:
        """To be called when a zone, or a planned job's spares, open or close."""
        by_due = sorted(self.reserved, key=lambda one: -one.due)
        parts = [one.part for one in by_due if one.open] + [one.spare_part for one in by_due if one.lends]
        self.rooms = [(OUTSIDE, *parts[:many]) for many in range(len(parts) + 1)]

    def next(self) -> Decision | None:
        """The job that starts next, with its nodes taken; None if nobody may."""
        if self.strict:
            job = self.waiting.first()
            if job is None or not self.pool.fits(self.jobs.gpus[job], (OUTSIDE,)):
                return None
            room: Parts = (OUTSIDE,)
        else:
            found = self.waiting.next(self.pool.fits, self.rooms, self.may_enter)
            if found is None:
                return None
            job, room = found
        self.waiting.remove(job)
        return Decision(job, room, self.pool.take(self.jobs.gpus[job], room))

"""Admission: Algorithm 1 of Arnold (arXiv 2509.15940), implemented once for the replay and for a
live cluster.

::

    Q <- jobs by priority, then by submission            ``queue_places``, ``Waiting``
    preemptable(J)                    -> start anywhere  ``may_enter``
    J.request < free outside the zone -> start there     the first of ``rooms``
    now + pred_JCT(J) <= arrival      -> start in the zone
    else                              -> wait

Parts of a cluster: outside; the zone of each planned job; its spare nodes once it runs, which are
lent to preemptible jobs only. A job that may be in one part may be in all parts that ``rooms``
lists before it: a job that ends before one planned job is due also ends before later ones are due,
and a preemptible job may be anywhere.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import JobError, nearest
from plait.place.queue.pool import OUTSIDE, Held, NodePool
from plait.place.queue.reservation import Reservation
from plait.place.queue.workload import JobTrace


class Decision(NamedTuple):
    """A job that starts now. room: the parts of the cluster offered to it, of which the last was
    needed. held: its nodes with the GPUs of each, already taken from the pool."""

    job: int
    room: Parts
    held: Held


@dataclass(frozen=True, kw_only=True)
class QueuedJobs:
    """Properties of jobs that Algorithm 1 reads, each by job number. gpus: number of GPUs. jct:
    expected seconds of running. preemptible: True if the job may be stopped. places: position in
    the queue, from 0."""

    gpus: Sequence[int]
    jct: Sequence[float]
    preemptible: Sequence[bool]
    places: Sequence[int]

    @classmethod
    def of(cls, jobs: JobTrace, policy: QueuePolicy) -> QueuedJobs:
        """Return the jobs of a workload, with run times as the policy expects them."""
        return cls(
            gpus=jobs.gpus.tolist(), jct=policy.jct(jobs).tolist(), preemptible=jobs.preemptible.tolist(),
            places=queue_places(jobs.priority).tolist(),
        )  # fmt: skip


def queue_places(priority: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions in the queue for jobs that are numbered by submission: the highest priority
    first, then the earliest.

    >>> queue_places(np.array([0, 5, 0, 5])).tolist()
    [2, 0, 3, 1]
    """
    places = np.empty(len(priority), np.int64)
    places[np.argsort(-priority, kind="stable")] = np.arange(len(priority))
    return places


class Admission:
    """The state of Algorithm 1 at the time ``now``: the queue, the nodes and the reserved zones.
    strict: no job starts before another one that is ahead of it in the queue."""

    def __init__(
        self, jobs: QueuedJobs, pool: NodePool, reserved: Sequence[Reservation], *, strict: bool = False
    ) -> None:
        self.jobs, self.pool, self.reserved, self.strict = jobs, pool, reserved, strict
        self.waiting = Waiting(jobs.places)
        self.rooms: list[Parts] = [(OUTSIDE,)]
        self.now = 0.0
        self.open_rooms()

    def enqueue(self, job: int) -> None:
        """Add a job to the queue."""
        self.waiting.add(job, self.jobs.gpus[job])
        for part in self.rooms[-1][1:]:
            self._let_into(job, part)

    def open_part(self, part: int) -> None:
        """Let waiting jobs enter a part of the cluster (by number) from now on, if ``may_enter``
        allows."""
        for job in self.waiting:
            self._let_into(job, part)

    def _let_into(self, job: int, part: int) -> None:
        if self.may_enter(job, part):
            self.waiting.admit(job, self.jobs.gpus[job], part)

    def may_enter(self, job: int, part: int) -> bool:
        """True if Algorithm 1 lets a job into a zone, or onto the spare nodes of a planned job."""
        one = self.reserved[(part - 1) // 2]
        if part == one.spare_part:
            return one.lends and self.jobs.preemptible[job]
        in_time = self.jobs.preemptible[job] or self.now + self.jobs.jct[job] <= one.due
        return one.open and in_time and self.now <= one.due - one.planned.closes

    def open_rooms(self) -> None:
        """Recompute ``rooms``, the combinations of parts in which jobs may start. To be called when
        a zone, or the spares of a planned job, open or close."""
        by_due = sorted(self.reserved, key=lambda one: -one.due)
        parts = [one.part for one in by_due if one.open] + [one.spare_part for one in by_due if one.lends]
        self.rooms = [(OUTSIDE, *parts[:many]) for many in range(len(parts) + 1)]

    def next(self) -> Decision | None:
        """Return the job that starts at ``now``, with its nodes taken from the pool; None if no job
        may start."""
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


Parts = tuple[int, ...]
"""Numbers of the parts of the cluster (``OUTSIDE``, zones, lent spare nodes) where a job may be;
the last one is the most restricted. The job is in the last part's list of admitted jobs."""
EVERYBODY = 0


class Waiting:
    """Waiting jobs by number of GPUs, each list in queue order. places: positions of all jobs in
    the queue.

    There is one list of all jobs, and one per reserved zone of the jobs that may enter it. If a job
    fits, every smaller job fits. So the heads of the lists that fit give the job that Algorithm 1's
    walk over the sorted queue would start next. A job skipped earlier in a walk still does not fit,
    since room only shrinks during the walk.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places
        self._jobs = dict(zip(places, range(len(places)), strict=True))
        self._sizes: list[int] = []
        self._lists: dict[int, dict[int, list[int]]] = {}
        self._order: list[int] = []
        self._there: set[int] = set()

    def __len__(self) -> int:
        return len(self._there)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._there))

    def add(self, job: int, gpus: int) -> None:
        """Add a waiting job."""
        if gpus not in self._lists:
            insort(self._sizes, gpus)
            self._lists[gpus] = defaultdict(list)
        heappush(self._lists[gpus][EVERYBODY], self._places[job])
        heappush(self._order, self._places[job])
        self._there.add(job)

    def admit(self, job: int, gpus: int, zone: int) -> None:
        """Add a waiting job to the list of a zone that it may enter."""
        heappush(self._lists[gpus][zone], self._places[job])

    def remove(self, job: int) -> None:
        """Remove a job from the queue."""
        self._there.discard(job)

    def first(self) -> int | None:
        """Return the first job in the queue; None if the queue is empty."""
        head = self._head(self._order, None)
        return None if head is None else self._jobs[head]

    def next(
        self, fits: Callable[[int, Parts], bool], rooms: Sequence[Parts], still: Callable[[int, int], bool]
    ) -> tuple[int, Parts] | None:
        """Return (the first job in the queue that fits, the first of ``rooms`` in which it fits);
        None if no job fits.

        fits: returns True if a job of so many GPUs fits into parts of the cluster. rooms:
        combinations of parts: the unreserved nodes, then these with more and more zones. A job that
        may enter the last zone of a combination may enter its other zones. still: returns True if a
        job (by number) may enter a zone now; once False, it stays False."""
        best: int | None = None
        where: Parts = ()
        for room in rooms:
            zone = room[-1]
            for size in tuple(self._sizes):
                if not fits(size, room):
                    break
                head = self._head(self._lists[size][zone], still if zone else None, zone)
                if head is None:
                    if not zone:
                        self._sizes.remove(size)
                        del self._lists[size]
                elif best is None or head < best:
                    best, where = head, room
        return None if best is None else (self._jobs[best], where)

    def _head(self, heap: list[int], still: Callable[[int, int], bool] | None, zone: int = 0) -> int | None:
        jobs = self._jobs
        while heap and (jobs[heap[0]] not in self._there or (still is not None and not still(jobs[heap[0]], zone))):
            heappop(heap)
        return heap[0] if heap else None


Floats = NDArray[np.float64]


def _never(jobs: JobTrace) -> Floats:
    return np.full(len(jobs), np.inf)


def _at_once(jobs: JobTrace) -> Floats:
    return np.zeros(len(jobs))


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """A queue policy.

    jct: returns the expected seconds of each job, by which jobs may enter a zone until it is due;
    inf: never, 0: always. reserves: keep a zone for a planned job; otherwise the planned job queues
    when it arrives. strict: no job starts before one that has waited longer. evicts: jobs in the
    zone are preempted when the planned job arrives; otherwise the planned job waits. foresees: use
    ``jct`` to choose the zone, too."""

    name: str
    description: str
    jct: Callable[[JobTrace], Floats] = _never
    reserves: bool = True
    strict: bool = False
    evicts: bool = True
    foresees: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        QueuePolicy(name="fifo", description="in order; the planned job queues like any", reserves=False, strict=True),
        QueuePolicy(name="reserve-and-pack", description="the zone is filled last; no job is preempted", jct=_at_once,
               evicts=False),
        QueuePolicy(name="no-jct", description="only preemptible jobs enter the zone"),
        QueuePolicy(name="jct-mean", description="jobs enter that end in time by their mean duration",
               jct=lambda jobs: jobs.mean, foresees=True),
        QueuePolicy(name="jct-quantile", description="jobs enter that end in time with probability 0.9",
               jct=lambda jobs: jobs.upper, foresees=True),
        QueuePolicy(name="oracle", description="jobs enter that will end in time",
               jct=lambda jobs: jobs.duration, foresees=True),
    )
}  # fmt: skip
ALIASES = {"arnold": "jct-mean"}
"""Other names of policies. The paper predicts the 10-minute interval of a job's run time, and
compares it with the planned arrival."""


def find_policies(names: str) -> list[QueuePolicy]:
    """Return the policies of a list such as ``fifo,arnold``, or of ``all``. Raises JobError for
    unknown names.

    >>> [policy.name for policy in find_policies("arnold,fifo")]
    ['jct-mean', 'fifo']
    """
    if names.strip() == "all":
        return list(POLICIES.values())
    found: dict[str, QueuePolicy] = {}
    for name in (word.strip() for word in names.split(",")):
        known = POLICIES.get(ALIASES.get(name, name))
        if known is None:
            raise JobError(
                f"there is no policy '{name}'{nearest(name, [*POLICIES, *ALIASES])}",
                key="policy",
                fix=f"Policies are {', '.join([*POLICIES, *ALIASES])} and all",
            )
        found[known.name] = known
    return list(found.values())

"""Jobs that wait, by the GPUs they want: finds the first in the queue that fits without looking at all."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

Parts = tuple[int, ...]
"""Parts of the cluster where a job may be, by the pool's numbers; the last is the one let into last."""
EVERYBODY = 0


class Waiting:
    """Numbers of jobs, in the order of the queue within each number of GPUs. places: of every job in it.

    A list of all jobs, and one for each reserved zone of those that may enter it. What fits is monotone in
    the number of GPUs, so one look at the heads of the lists that fit finds what Algorithm 1's walk over the
    sorted queue would start next: whatever it passed over still finds no room, since room only shrinks in a
    walk.
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
        """A job that waits from now on."""
        if gpus not in self._lists:
            insort(self._sizes, gpus)
            self._lists[gpus] = defaultdict(list)
        heappush(self._lists[gpus][EVERYBODY], self._places[job])
        heappush(self._order, self._places[job])
        self._there.add(job)

    def admit(self, job: int, gpus: int, zone: int) -> None:
        """A waiting job that may enter this zone."""
        heappush(self._lists[gpus][zone], self._places[job])

    def remove(self, job: int) -> None:
        """A job that waits no more."""
        self._there.discard(job)

    def first(self) -> int | None:
        """The one that stands first."""
        head = self._head(self._order, None)
        return None if head is None else self._jobs[head]

    def next(
        self, fits: Callable[[int, Parts], bool], rooms: Sequence[Parts], still: Callable[[int, int], bool]
    ) -> tuple[int, Parts] | None:
        """The one that stands first of those that find room, and where: in the first of ``rooms`` that
        has it. rooms: outside, then outside with zones; who may enter the last zone of one may enter the
        others. still: whether a job may enter a zone now; once not, never again."""
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

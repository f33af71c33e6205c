"""Jobs that wait, by the GPUs they want: finds the longest waiting one that fits without looking at all."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush


class Waiting:
    """Numbers of jobs, in the order of their submission within each number of GPUs.

    Two lists each: all jobs, and those that may enter the reserved zone. What fits is monotone in the number
    of GPUs, so one look at the heads of the lists that fit finds what Algorithm 1's walk over the sorted
    queue would start next: whatever it passed over still finds no room, since room only shrinks in a walk.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._lists: dict[int, tuple[list[int], list[int]]] = {}
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
            self._lists[gpus] = ([], [])
        heappush(self._lists[gpus][0], job)
        heappush(self._order, job)
        self._there.add(job)

    def admit(self, job: int, gpus: int) -> None:
        """A waiting job that may enter the zone."""
        heappush(self._lists[gpus][1], job)

    def remove(self, job: int) -> None:
        """A job that waits no more."""
        self._there.discard(job)

    def first(self) -> int | None:
        """The one that has waited longest."""
        return self._head(self._order, None)

    def next(self, fits: Callable[[int, bool], bool], still: Callable[[int], bool] | None) -> tuple[int, bool] | None:
        """The one that has waited longest of those that find room, and whether it needs the zone for it.

        still: whether a job may enter the zone now; once not, never again. None: nobody may.
        """
        best: int | None = None
        for size in tuple(self._sizes):
            if not fits(size, False):
                break
            head = self._head(self._lists[size][0], None)
            if head is None:
                self._sizes.remove(size)
                del self._lists[size]
            elif best is None or head < best:
                best = head
        inside: int | None = None
        for size in self._sizes if still else ():
            if not fits(size, True):
                break
            head = self._head(self._lists[size][1], still)
            if head is not None and (inside is None or head < inside):
                inside = head
        if inside is not None and (best is None or inside < best):
            return inside, True
        return None if best is None else (best, False)

    def _head(self, heap: list[int], still: Callable[[int], bool] | None) -> int | None:
        while heap and (heap[0] not in self._there or (still is not None and not still(heap[0]))):
            heappop(heap)
        return heap[0] if heap else None

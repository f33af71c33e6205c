"""The GPUs of a cluster: which are free, and which job holds which.

Jobs of less than a node share nodes, taken where they leave least free (best fit); larger ones take whole
nodes and, for what is left over, part of one more. Ties go to the lowest number, which packs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

Held = list[tuple[int, int]]
"""Nodes of a job, and how many GPUs of each."""
OUTSIDE = 0
"""The part of the cluster that is kept for nobody."""


class NodePool:
    """Nodes of equal size, each in one part of the cluster: ``OUTSIDE``, or in the zone of this number.

    ``busy`` nodes have a GPU in use, ``busy_in`` so many of each part; ``used`` counts GPUs.
    """

    def __init__(self, nodes: int, size: int, zones: int = 0) -> None:
        self.size = size
        self.free = [size] * nodes
        self.part = [OUTSIDE] * nodes
        self.busy = self.used = 0
        self.busy_in = [0] * (zones + 1)
        self._heaps: list[list[list[int]]] = [[[] for _ in range(size + 1)] for _ in range(zones + 1)]
        self._heaps[OUTSIDE][size] = list(range(nodes))
        self._counts = [[0] * (size + 1) for _ in range(zones + 1)]
        self._counts[OUTSIDE][size] = nodes

    def fits(self, gpus: int, parts: Sequence[int]) -> bool:
        """Whether a job of so many GPUs finds room in these parts."""
        full, rest = divmod(gpus, self.size)
        counts = self._counts
        whole = sum([counts[part][self.size] for part in parts])
        if whole < full:
            return False
        return not rest or whole > full or any(counts[part][free] for part in parts for free in range(rest, self.size))

    def take(self, gpus: int, parts: Sequence[int]) -> Held:
        """Room for a job that fits, in the first parts as far as there is."""
        assert self.fits(gpus, parts)
        full, rest = divmod(gpus, self.size)
        held: Held = []
        for part in parts:
            while len(held) < full and self._counts[part][self.size]:
                held.append((self._grab(part, self.size, self.size), self.size))
        if rest:
            part, level = next(
                (part, level) for part in parts for level in range(rest, self.size + 1) if self._counts[part][level]
            )
            held.append((self._grab(part, level, rest), rest))
        return held

    def release(self, held: Held) -> None:
        """Give a job's GPUs back."""
        for node, gpus in held:
            self._move(node, self.free[node] + gpus)

    def hold(self, held: Held) -> None:
        """Take these GPUs of these nodes."""
        for node, gpus in held:
            self._move(node, self.free[node] - gpus)

    def reserve(self, zone: Iterable[int], part: int) -> None:
        """Nodes that belong to this part from now on."""
        for node in zone:
            was, free = self.part[node], self.free[node]
            if was != part:
                self._counts[was][free] -= 1
                self._counts[part][free] += 1
                self.part[node] = part
                heappush(self._heaps[part][free], node)
                self.busy_in[was] -= free < self.size
                self.busy_in[part] += free < self.size

    def occupy(self, zone: Iterable[int]) -> Held:
        """Take empty nodes whole."""
        held: Held = []
        for node in zone:
            assert self.free[node] == self.size, "the zone is empty when the planned job starts"
            held.append((node, self.size))
        self.hold(held)
        return held

    def _grab(self, part: int, level: int, gpus: int) -> int:
        heap = self._heaps[part][level]
        while True:  # entries of nodes that are elsewhere now are left in the heaps
            node = heappop(heap)
            if self.free[node] == level and self.part[node] == part:
                self._move(node, level - gpus)
                return node

    def _move(self, node: int, free: int) -> None:
        part, was = self.part[node], self.free[node]
        assert 0 <= free <= self.size, "a node is never over-committed"
        self._counts[part][was] -= 1
        self._counts[part][free] += 1
        heappush(self._heaps[part][free], node)
        self.free[node] = free
        self.used += was - free
        change = (was == self.size) - (free == self.size)
        self.busy += change
        self.busy_in[part] += change

"""The GPUs of a cluster: which are free, and which job holds which.

Jobs of less than a node share nodes, taken where they leave least free (best fit); larger ones take whole
nodes and, for what is left over, part of one more. Ties go to the lowest number, which packs.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

Held = list[tuple[int, int]]
"""Nodes of a job, and how many GPUs of each."""


class Pool:
    """Nodes of equal size, some of them in a reserved zone.

    ``busy`` nodes have a GPU in use; ``used`` counts GPUs, ``zone_busy`` nodes of the zone.
    """

    def __init__(self, nodes: int, size: int) -> None:
        self.size = size
        self.free = [size] * nodes
        self.inside = bytearray(nodes)
        self.busy = self.used = self.zone_busy = 0
        self._heaps: tuple[list[list[int]], ...] = ([[] for _ in range(size + 1)], [[] for _ in range(size + 1)])
        self._heaps[0][size] = list(range(nodes))
        self._counts = ([0] * (size + 1), [0] * (size + 1))
        self._counts[0][size] = nodes

    def fits(self, gpus: int, zone: bool) -> bool:
        """Whether a job of so many GPUs finds room. zone: it may use the reserved zone too."""
        full, rest = divmod(gpus, self.size)
        sides = self._counts if zone else self._counts[:1]
        whole = sum(side[self.size] for side in sides)
        if whole < full:
            return False
        return not rest or whole > full or any(side[free] for side in sides for free in range(rest, self.size))

    def take(self, gpus: int, zone: bool) -> Held:
        """Room for a job that fits, outside the zone as far as there is."""
        assert self.fits(gpus, zone)
        full, rest = divmod(gpus, self.size)
        sides = (0, 1) if zone else (0,)
        held: Held = []
        for side in sides:
            while len(held) < full and self._counts[side][self.size]:
                held.append((self._grab(side, self.size, self.size), self.size))
        if rest:
            side, level = next(
                (side, level) for side in sides for level in range(rest, self.size + 1) if self._counts[side][level]
            )
            held.append((self._grab(side, level, rest), rest))
        return held

    def release(self, held: Held) -> None:
        """Give a job's GPUs back."""
        for node, gpus in held:
            self._move(node, self.free[node] + gpus)

    def reserve(self, zone: Iterable[int]) -> None:
        """Nodes that belong to the zone from now on."""
        for node in zone:
            self._side(node, 1)

    def open(self, zone: Iterable[int]) -> None:
        """Nodes that belong to it no more."""
        for node in zone:
            self._side(node, 0)

    def occupy(self, zone: Iterable[int]) -> Held:
        """Take empty nodes whole."""
        held: Held = []
        for node in zone:
            assert self.free[node] == self.size, "the zone is empty when the planned job starts"
            self._move(node, 0)
            held.append((node, self.size))
        return held

    def _grab(self, side: int, level: int, gpus: int) -> int:
        heap = self._heaps[side][level]
        while True:  # entries of nodes that are elsewhere now are left in the heaps
            node = heappop(heap)
            if self.free[node] == level and self.inside[node] == side:
                self._move(node, level - gpus)
                return node

    def _move(self, node: int, free: int) -> None:
        side, was = self.inside[node], self.free[node]
        assert 0 <= free <= self.size, "a node is never over-committed"
        self._counts[side][was] -= 1
        self._counts[side][free] += 1
        heappush(self._heaps[side][free], node)
        self.free[node] = free
        self.used += was - free
        change = (was == self.size) - (free == self.size)
        self.busy += change
        self.zone_busy += change * side

    def _side(self, node: int, side: int) -> None:
        free = self.free[node]
        if self.inside[node] == side:
            return
        self._counts[1 - side][free] -= 1
        self._counts[side][free] += 1
        self.inside[node] = side
        heappush(self._heaps[side][free], node)
        if free < self.size:
            self.zone_busy += 1 if side else -1

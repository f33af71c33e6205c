"""GPUs of a cluster: which ones are free, and which job holds which.

Jobs smaller than a node share nodes, on the node where they leave the least free (best fit). Larger
jobs take whole nodes and, for the remainder, part of one more. Ties go to the lowest node number,
which packs jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Held = list[tuple[int, int]]
"""Nodes of a job, as (node, number of its GPUs)."""
OUTSIDE = 0
"""The part of the cluster that is not reserved."""


class NodePool:
    """Nodes of equal size, each in one part of the cluster: ``OUTSIDE``, a planned job's zone, or
    its spare nodes, by number.

    busy: nodes with a GPU in use; busy_in: the same for each part. used: GPUs in use."""

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
        """True if a job of ``gpus`` GPUs fits into these parts."""
        full, rest = divmod(gpus, self.size)
        counts = self._counts
        whole = sum([counts[part][self.size] for part in parts])
        if whole < full:
            return False
        return not rest or whole > full or any(counts[part][free] for part in parts for free in range(rest, self.size))

    def take(self, gpus: int, parts: Sequence[int]) -> Held:
        """Take nodes for a job that fits, from the first of ``parts`` as far as they suffice;
        return (node, number of its GPUs) pairs."""
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
        """Free the GPUs of a job. held: (node, number of its GPUs) pairs."""
        for node, gpus in held:
            self._move(node, self.free[node] + gpus)

    def hold(self, held: Held) -> None:
        """Mark GPUs as used. held: (node, number of its GPUs) pairs."""
        for node, gpus in held:
            self._move(node, self.free[node] - gpus)

    def reserve(self, zone: Iterable[int], part: int) -> None:
        """Move the nodes ``zone`` into the part of the cluster with the number ``part``."""
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
        """Mark all GPUs of the nodes ``zone`` as used, which must be free; return (node, number of
        its GPUs) pairs."""
        held: Held = []
        for node in zone:
            assert self.free[node] == self.size, "the zone is empty when the planned job starts"
            held.append((node, self.size))
        self.hold(held)
        return held

    def _grab(self, part: int, level: int, gpus: int) -> int:
        heap = self._heaps[part][level]
        while True:  # heaps still hold stale entries of nodes that have moved
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


Floats = NDArray[np.float64]
MOST_POINTS = 20_000
"""Maximum number of points in the series: jobs of years take years to drain."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Use of a cluster over time. time: (T,) seconds of the replay. allocation: share of nodes with
    a GPU in use. gpus: share of GPUs in use. retention: share of the reserved nodes that other jobs
    hold (NaN without a reservation).

    steps: (E, 3), the exact values at each event: seconds, and idle nodes and idle GPUs from then
    until the next event."""

    time: Floats
    allocation: Floats
    gpus: Floats
    retention: Floats
    steps: Floats

    def idle(self, start: float, end: float) -> tuple[float, float]:
        """Return the idle node-seconds and GPU-seconds from ``start`` to ``end``."""
        if not len(self.steps) or end <= start:
            return 0.0, 0.0
        edges = np.clip(np.append(self.steps[:, 0], max(end, self.steps[-1, 0])), start, end)
        lasted = np.diff(edges)
        return float(lasted @ self.steps[:, 1]), float(lasted @ self.steps[:, 2])


class QueueMeter:
    """Recorder of a cluster's use over time; called before every event of the replay."""

    def __init__(self, nodes: int, size: int, sample: float) -> None:
        self.nodes, self.gpus, self.sample = nodes, nodes * size, sample
        self.last = 0.0
        self.points: list[tuple[float, float, float, float]] = []
        self.steps: list[tuple[float, int, int]] = []

    def advance(self, now: float, pool: NodePool, retention: float) -> None:
        """Record that the pool's use has not changed since the last call, until ``now`` (seconds of
        the replay). retention: share of the reserved nodes that other jobs hold."""
        if now <= self.last:
            return
        while len(self.points) < MOST_POINTS and (at := len(self.points) * self.sample) < now:
            self.points.append((at, pool.busy / self.nodes, pool.used / self.gpus, retention))
        self.steps.append((self.last, self.nodes - pool.busy, self.gpus - pool.used))
        self.last = now

    def finish(self, pool: NodePool) -> None:
        """Record the pool's use after the last event."""
        self.steps.append((self.last, self.nodes - pool.busy, self.gpus - pool.used))

    def series(self) -> Series:
        """Return the recorded use over time, at most ``MOST_POINTS`` points."""
        points = np.array(self.points, float).reshape(-1, 4)
        return Series(
            time=points[:, 0],
            allocation=points[:, 1],
            gpus=points[:, 2],
            retention=points[:, 3],
            steps=np.array(self.steps, float).reshape(-1, 3),
        )

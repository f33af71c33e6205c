"""What is read off a cluster while a replay goes on: exact integrals, and points every few minutes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.place.pool import NodePool

Floats = NDArray[np.float64]
MOST_POINTS = 20_000
"""After so many points the series ends: jobs of years drain for years."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """time: seconds, (T,). allocation: share of nodes with a GPU in use; gpus: share of GPUs in use;
    retention: share of the reserved nodes that others hold (NaN without a reservation).

    steps: (E, 3), the exact course: time, idle nodes and idle GPUs from then until the next row."""

    time: Floats
    allocation: Floats
    gpus: Floats
    retention: Floats
    steps: Floats

    def idle(self, start: float, end: float) -> tuple[float, float]:
        """Node-seconds and GPU-seconds that were idle from ``start`` to ``end``."""
        if not len(self.steps) or end <= start:
            return 0.0, 0.0
        edges = np.clip(np.append(self.steps[:, 0], max(end, self.steps[-1, 0])), start, end)
        lasted = np.diff(edges)
        return float(lasted @ self.steps[:, 1]), float(lasted @ self.steps[:, 2])


class QueueMeter:
    """Told of every event before it happens."""

    def __init__(self, nodes: int, size: int, sample: float) -> None:
        self.nodes, self.gpus, self.sample = nodes, nodes * size, sample
        self.last = 0.0
        self.points: list[tuple[float, float, float, float]] = []
        self.steps: list[tuple[float, int, int]] = []

    def advance(self, now: float, pool: NodePool, retention: float) -> None:
        """Nothing has changed since the last call, until ``now``."""
        if now <= self.last:
            return
        while len(self.points) < MOST_POINTS and (at := len(self.points) * self.sample) < now:
            self.points.append((at, pool.busy / self.nodes, pool.used / self.gpus, retention))
        self.steps.append((self.last, self.nodes - pool.busy, self.gpus - pool.used))
        self.last = now

    def finish(self, pool: NodePool) -> None:
        """Nothing changes any more."""
        self.steps.append((self.last, self.nodes - pool.busy, self.gpus - pool.used))

    def series(self) -> Series:
        """All of it."""
        points = np.array(self.points, float).reshape(-1, 4)
        return Series(
            time=points[:, 0],
            allocation=points[:, 1],
            gpus=points[:, 2],
            retention=points[:, 3],
            steps=np.array(self.steps, float).reshape(-1, 3),
        )

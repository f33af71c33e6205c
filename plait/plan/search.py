"""The best strategies of a space, by time in closed form among those that fit into memory (levels 0 and 1 of
the planner).

Time is an expression over columns; memory needs every kind of structure walked once. So all points are timed,
and memory is asked of the fastest first, until enough are found that fit: the answer is that of asking all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster import Cluster
from plait.core.settings import Precision
from plait.plan.closed_form import step_seconds
from plait.plan.closed_memory import plait_on, step_memory, usable
from plait.plan.points import Points
from plait.plan.shortage import Shortage
from plait.plan.space import MOST, Cell, SearchRequest, enumerate_cells, enumerate_space

FIRST, BLOCK = 1 << 10, 1 << 14
"""Points whose memory is asked at once, the fastest first: few in the beginning, since often they are enough,
then eight times as many each time up to the second number. Not fewer: kinds of structures are walked for all
that are asked together."""
WALKED = 1 << 5
"""As ``FIRST``, for models of which every kind of point is walked on its own."""
FAMILY = ("pp", "dp", "cp", "ring", "tp", "ep", "sequence_parallel", "micro", "schedule", "virtual", "recompute")
"""Columns in which strategies differ that a person would call different. The rest is tuning: of all that
agree in these, the fastest stands for all."""
CELLS = 8
"""Arrangements of ranks that are looked at in full."""


@dataclass(frozen=True)
class Ranked:
    """The fastest point that fits of each family, the fastest first. searched: points of the space."""

    points: Points
    seconds: NDArray[np.float64]
    memory: NDArray[np.float64]
    searched: int


def search(asked: SearchRequest, cluster: Cluster, precision: Precision, *, keep: int = 64, most: int = MOST) -> Ranked:
    """The ``keep`` fastest families.

    Where the space had to be made coarser, its best arrangements of ranks are then looked at in full. Raises
    InfeasiblePlan where nothing fits: by how much the smallest does not.
    """
    space = enumerate_space(asked, most=most)
    first = _Search(asked, cluster, precision, keep).run(space)
    finer = enumerate_cells(asked, _cells(first.points)[:CELLS], most=most // 2)
    second = _Search(asked, cluster, precision, keep).run(finer)
    points = Points.joined([first.points, second.points])
    seconds, memory = np.concatenate([first.seconds, second.seconds]), np.concatenate([first.memory, second.memory])
    order = np.argsort(seconds, kind="stable")
    order = order[_first_of_family(points.take(order))][:keep]
    return Ranked(points.take(order), seconds[order], memory[order], len(space) + len(finer))


def _cells(points: Points) -> list[Cell]:
    """Of points in order, each once."""
    rows = zip(*(getattr(points, one.name).tolist() for one in fields(Cell)), strict=True)
    return [Cell(*row) for row in dict.fromkeys(rows)]


@dataclass(frozen=True)
class _Search:
    asked: SearchRequest
    cluster: Cluster
    precision: Precision
    keep: int

    @property
    def limit(self) -> float:
        """Bytes of a device that a plan may fill."""
        return usable(self.cluster.device, self.cluster.overhead)

    def run(self, space: Points) -> Ranked:
        """Of the points of a space."""
        asked, limit = self.asked, self.limit
        seconds = step_seconds(
            asked.model, space, self.cluster, sequence=asked.sequence, precision=self.precision
        ).total
        order, sizes = np.argsort(seconds, kind="stable"), list[NDArray[np.float64]]()
        found = np.zeros(0, dtype=np.int64)  # of ``order``, by place
        start, size = 0, WALKED if asked.model.levels else FIRST
        while start < len(order) and len(found) < self.keep:
            memory = self.memory(space.take(order[start : start + size]))
            sizes.append(memory)
            found = np.concatenate([found, start + np.flatnonzero(self._fits(memory, limit))])
            found = found[_first_of_family(space.take(order[found]))]
            start, size = start + size, min(8 * size, BLOCK)
        memory = np.concatenate(sizes)
        if not len(found):
            raise Shortage(asked, limit, self.memory).told(space.take(order), memory)
        best = found[: self.keep]
        return Ranked(space.take(order[best]), seconds[order[best]], memory[best], len(space))

    def memory(self, points: Points) -> NDArray[np.float64]:
        """Bytes of the fullest rank."""
        asked = self.asked
        return step_memory(
            asked.model, points, sequence=asked.sequence, precision=self.precision,
            options=plait_on(self.cluster.device), overhead=self.cluster.overhead,
        ).total  # fmt: skip

    def _fits(self, memory: NDArray[np.float64], limit: float) -> NDArray[np.bool_]:
        fits = memory <= limit
        for one in self.asked.constraints:
            if one.quantity == "memory":
                fits &= one.holds(memory)
        return fits


def _first_of_family(points: Points) -> NDArray[np.int64]:
    """Numbers of the points that are the first of their family, in order."""
    if not len(points):
        return np.zeros(0, dtype=np.int64)
    _, first = np.unique(np.stack([getattr(points, name) for name in FAMILY]), axis=1, return_index=True)
    return np.sort(first)

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
from plait.core.errors import InfeasiblePlan
from plait.core.settings import Precision
from plait.plan.closed_form import step_seconds
from plait.plan.closed_memory import step_memory, usable
from plait.plan.points import Points
from plait.plan.space import MOST, Asked, Cell, enumerate_cells, enumerate_space

BLOCK = 1 << 13
"""Points whose memory is asked at once: the fastest first."""
FAMILY = ("pp", "dp", "cp", "ring", "tp", "sequence_parallel", "micro", "schedule", "virtual", "recompute")
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


def search(asked: Asked, cluster: Cluster, precision: Precision, *, keep: int = 64, most: int = MOST) -> Ranked:
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
    asked: Asked
    cluster: Cluster
    precision: Precision
    keep: int

    def run(self, space: Points) -> Ranked:
        """Of the points of a space."""
        asked, limit = self.asked, usable(self.cluster.device, self.cluster.overhead)
        seconds = step_seconds(
            asked.model, space, self.cluster, sequence=asked.sequence, precision=self.precision
        ).total
        order, sizes = np.argsort(seconds, kind="stable"), list[NDArray[np.float64]]()
        found = np.zeros(0, dtype=np.int64)  # of ``order``, by place
        for start in range(0, len(order), BLOCK):
            memory = self._memory(space.take(order[start : start + BLOCK]))
            sizes.append(memory)
            found = np.concatenate([found, start + np.flatnonzero(self._fits(memory, limit))])
            found = found[_first_of_family(space.take(order[found]))]
            if len(found) >= self.keep:
                break
        memory = np.concatenate(sizes)
        if not len(found):
            raise _too_large(asked, space.take(order), memory, limit)
        best = found[: self.keep]
        return Ranked(space.take(order[best]), seconds[order[best]], memory[best], len(space))

    def _memory(self, points: Points) -> NDArray[np.float64]:
        asked = self.asked
        return step_memory(
            asked.model, points, sequence=asked.sequence, precision=self.precision, overhead=self.cluster.overhead
        ).total

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


def _too_large(asked: Asked, space: Points, memory: NDArray[np.float64], limit: float) -> InfeasiblePlan:
    """What the most frugal strategy lacks."""
    from plait.plan.fits import in_words

    least = int(np.argmin(memory))
    row = space.row(least)
    asked_less = [one for one in asked.constraints if one.quantity == "memory"]
    bound = min([limit, *(one.values[0] for one in asked_less if one.sign[0] == "<")])
    shape = " ".join(f"{key}={row[key]}" for key in ("pp", "dp", "cp", "tp"))
    more = next((factor for factor in (2, 4, 8, 16, 32, 64) if memory[least] / factor <= bound), None)
    advice = f"About {more} times as many ranks would do, " if more else ""
    return InfeasiblePlan(
        f"No strategy fits: the smallest of {len(space):,} needs {in_words(int(memory[least]))} on a rank ({shape}, "
        f"micro-batches of {row['micro']}), {in_words(int(memory[least] - bound))} more than the "
        f"{in_words(int(bound))} there are. {advice}{'or a' if more else 'Use a'} smaller model or shorter sequences"
        f"{', or a higher limit in plan.constraints' if bound < limit else ''}."
    )

"""The best strategies of a space: memory first, then time in closed form (levels 0 and 1 of the planner).

What does not fit is dropped. Of points that differ only in what is computed again, those that compute more
than they need to fit are dropped too: that never makes a step shorter. What is left is timed, in blocks, so
that memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster import Cluster
from plait.core.errors import InfeasiblePlan
from plait.core.settings import Precision
from plait.plan.closed_form import step_seconds
from plait.plan.closed_memory import step_memory, usable
from plait.plan.points import RECOMPUTES, Points
from plait.plan.space import MOST, Asked, Cell, enumerate_cells, enumerate_space

BLOCK = 1 << 18
"""Points whose memory is computed at once."""
FAMILY = ("pp", "dp", "cp", "ring", "tp", "sequence_parallel", "micro", "schedule", "virtual", "recompute")
"""Columns in which strategies differ that a person would call different. The rest is tuning: of all that
agree in these, the fastest stands for all."""
CELLS = 8
"""Arrangements of ranks that are looked at in full."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Ranked:
    """The best points, the fastest first. searched: points of the space; fitting: of these, into memory."""

    points: Points
    seconds: NDArray[np.float64]
    memory: NDArray[np.float64]
    searched: int
    fitting: int


def search(asked: Asked, cluster: Cluster, precision: Precision, *, keep: int = 64, most: int = MOST) -> Ranked:
    """The fastest points that fit of the ``keep`` fastest families.

    Where the space had to be made coarser, its best cells are then looked at in full. Raises InfeasiblePlan
    where none fits: by how much the smallest does not.
    """
    space = enumerate_space(asked, most=most)
    first = _ranked(asked, space, cluster, precision, keep)
    finer = enumerate_cells(asked, _cells(first.points)[:CELLS], most=most // 2)
    second = _ranked(asked, finer, cluster, precision, keep)
    points = Points.joined([first.points, second.points])
    seconds, memory = np.concatenate([first.seconds, second.seconds]), np.concatenate([first.memory, second.memory])
    order = _best(points, seconds, keep)
    return Ranked(
        points.take(order), seconds[order], memory[order], len(space) + len(finer), first.fitting + second.fitting
    )


def _cells(points: Points) -> list[Cell]:
    """Of points in order, each once."""
    rows = zip(*(getattr(points, one.name).tolist() for one in fields(Cell)), strict=True)
    return [Cell(*row) for row in dict.fromkeys(rows)]


def _ranked(asked: Asked, space: Points, cluster: Cluster, precision: Precision, keep: int) -> Ranked:
    load = {"sequence": asked.sequence, "precision": precision}
    memory = np.concatenate(
        [step_memory(asked.model, part, overhead=cluster.overhead, **load).total for part in _blocks(space)]
    )
    limit = usable(cluster.device, cluster.overhead)
    fits = memory <= limit
    for one in asked.constraints:
        if one.quantity == "memory":
            fits &= one.holds(memory)
    if not fits.any():
        raise _too_large(asked, space, memory, limit)
    left = np.flatnonzero(fits & needed(space, fits))
    chosen = space.take(left)
    seconds = step_seconds(asked.model, chosen, cluster, **load).total
    best = _best(chosen, seconds, keep)
    return Ranked(chosen.take(best), seconds[best], memory[left][best], len(space), int(fits.sum()))


def _blocks(points: Points) -> Iterator[Points]:
    for start in range(0, len(points), BLOCK):
        yield points.take(slice(start, start + BLOCK))


def needed(points: Points, fits: Mask) -> Mask:
    """Which points compute no more again than they must, of those that differ in nothing else: all kinds
    where nothing fits, otherwise none if that fits, else what fits of the others, and of ``full`` the fewest
    layers."""
    group = _groups(points)
    count = int(group[-1]) + 1 if len(group) else 0
    none, full = RECOMPUTES.index("none"), RECOMPUTES.index("full")
    without = np.zeros(count, dtype=bool)
    np.logical_or.at(without, group, fits & (points.recompute == none))
    layers = np.where(points.recompute_layers < 0, np.iinfo(np.int64).max, points.recompute_layers)
    fewest = np.full(count, np.iinfo(np.int64).max)
    again = fits & (points.recompute == full)
    np.minimum.at(fewest, group[again], layers[again])
    kept = np.where(without[group], points.recompute == none, True)
    return kept & ((points.recompute != full) | (layers == fewest[group]))


def _groups(points: Points) -> NDArray[np.int64]:
    """Numbers of the runs of points that differ only in recomputation: the space has them side by side."""
    changed = np.zeros(len(points), dtype=bool)
    for one in fields(Points):
        if not one.name.startswith("recompute"):
            column = getattr(points, one.name)
            changed[1:] |= column[1:] != column[:-1]
    return np.cumsum(changed)


def _best(points: Points, seconds: NDArray[np.float64], keep: int) -> NDArray[np.int64]:
    """Numbers of the fastest of the ``keep`` fastest families, in order of time; equals in the order of the
    space."""
    order = np.argsort(seconds, kind="stable")
    family = np.stack([getattr(points, name) for name in FAMILY])[:, order]
    _, first = np.unique(family, axis=1, return_index=True)
    return order[np.sort(first)[:keep]]


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

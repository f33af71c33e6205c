"""Points of the strategy space, as columns: what level 0 and level 1 of the planner compute on.

A point is one strategy for one job. Everything that depends on it is an expression over columns (numpy), so
that a million points take seconds. What a column can hold is exactly what a ``Strategy``, a ``Layout``, a
``Sharding`` and a schedule can say; ``plait.plan.search`` turns the best points into these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.parallel.strategy import WORDS
from plait.core.step.columns.distinct import distinct

SCHEDULES = WORDS["schedule"]
RECOMPUTES = WORDS["recompute"]
OVERLAPS = WORDS["overlap"]
SHARD_OVERLAPS = WORDS["shard_overlap"]

Ints = NDArray[np.int64]
Degrees = tuple[int, int, int, int]
"""tp, cp, ring; sequences of a micro-batch: what sizes of tensors depend on beside what there is of them."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """Columns of equal length.

    pp, dp, cp, tp: degrees; ring: of cp, ranks of a ring (cp / ring exchange heads). ep: expert-parallel
    degree, over neighbours of dp x cp; 1 for dense models. micro: sequences of a micro-batch of one replica.
    num_micro: micro-batches of a step. virtual: stages a rank. schedule, recompute, overlap, shard_overlap:
    numbers into the tuples above. recompute_layers: of every stage; -1 for all. params, grads, optim,
    secondary: of sharding over dp x cp. graphs: whether CUDA graphs are captured (0 or 1).
    """

    pp: Ints
    dp: Ints
    cp: Ints
    ring: Ints
    tp: Ints
    ep: Ints
    micro: Ints
    num_micro: Ints
    schedule: Ints
    virtual: Ints
    recompute: Ints
    recompute_layers: Ints
    sequence_parallel: Ints
    params: Ints
    grads: Ints
    optim: Ints
    secondary: Ints
    overlap: Ints
    shard_overlap: Ints
    p1: Ints
    p2: Ints
    graphs: Ints

    def __len__(self) -> int:
        return len(self.pp)

    def degrees(self) -> tuple[list[Degrees], Ints]:
        """Those that there are, each once, and the number of each point's."""
        columns = self.tp, self.cp, self.ring, self.micro
        first, each = distinct(columns)
        return cast("list[Degrees]", list(zip(*(column[first].tolist() for column in columns), strict=True))), each

    @property
    def replicas(self) -> Ints:
        """Ranks that hold the same weights."""
        return self.dp * self.cp

    @property
    def ranks(self) -> Ints:
        """Of the whole job."""
        return self.pp * self.dp * self.cp * self.tp

    def take(self, which: NDArray[Any] | slice) -> Points:
        """Some of them: by a mask or by numbers."""
        return Points(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def columns(self) -> dict[str, Ints]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def joined(parts: Sequence[Points]) -> Points:
        """One after the other."""
        names = [field.name for field in fields(Points)]
        return Points(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def row(self, at: int) -> dict[str, int]:
        """One point."""
        return {field.name: int(getattr(self, field.name)[at]) for field in fields(self)}

    @staticmethod
    def of(rows: Sequence[Mapping[str, int]]) -> Points:
        """From rows; what a row leaves out is 1, or 0 where that means nothing is done (``DEFAULTS``)."""
        columns = {
            field.name: [row.get(field.name, DEFAULTS.get(field.name, 1)) for row in rows] for field in fields(Points)
        }
        return Points(**{name: np.array(values, dtype=np.int64) for name, values in columns.items()})


DEFAULTS = {
    "schedule": SCHEDULES.index("1f1b"),
    "recompute": 0,
    "recompute_layers": -1,
    "sequence_parallel": 0,
    "secondary": 0,
    "overlap": OVERLAPS.index("domino"),
    "shard_overlap": SHARD_OVERLAPS.index("both"),
    "graphs": 0,
}

"""One published measurement as the planner's models take it, and what all formats of them share: numbers, and
clusters that are a preset's with other nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from plait.core.base.numbers import LARGEST
from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.step.columns.points import StrategyTable
from plait.core.step.columns.shapes import Options, Shapes

GIB = 2**30
VOCAB = 51200
"""Where a row gives none: GPT-2's, padded, as in Megatron-LM's examples."""


MOST_SECONDS = 1e5
"""Of a step: what is above is no time in seconds."""


class Skipped(Exception):
    """A row that says too little, or is about something else."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. point: one row of columns. seconds, memory: measured; None where not. memory: bytes,
    ``memory_kind`` says of what. job: what stays the same while layouts differ. stated: nothing that
    time hangs on was inferred; constants are fitted to such rows only. full: the row says
    everything."""

    name: str
    source: str
    shapes: Shapes
    point: StrategyTable
    cluster: Cluster
    sequence: int
    precision: Precision
    options: Options
    seconds: float | None
    memory: float | None
    memory_kind: str
    oom: bool
    full: bool
    stated: bool
    job: tuple[Any, ...]
    told: Mapping[str, str]

    def value(self, column: str) -> int:
        """One of the point's."""
        return int(np.ravel(getattr(self.point, column))[0])

    @property
    def device(self) -> str:
        """The preset's name."""
        return self.cluster.name


@dataclass(frozen=True)
class Rows:
    """What files gave. skipped: reason -> how many rows."""

    rows: list[Row]
    skipped: Counter[str]


class Bad(Exception):
    """A value that cannot be read."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(problem)
        self.column = column


def number(values: Mapping[str, str], column: str) -> float | None:
    """None where empty. Times and sizes are positive and finite. Raises Bad."""
    text = values[column].strip()
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        raise Bad(column, f"'{text}' is not a number") from None
    if not math.isfinite(found) or found <= 0:
        raise Bad(column, f"{text} is not a positive number")
    return found


def whole(values: Mapping[str, str], column: str) -> int | None:
    """As ``number``, of what is counted. Raises Skipped for a fraction, Bad for what is out of all
    proportion."""
    found = number(values, column)
    if found is None:
        return None
    if found > LARGEST:
        raise Bad(column, f"{values[column].strip()} is out of range")
    if found != int(found):
        raise Skipped(f"{column} is a fraction")
    return int(found)


def check_possible(shapes: Shapes, pp: int, virtual: int) -> None:
    """Raise Skipped for what no run can have been. virtual: as the row says it."""
    layers, stages = shapes.num_layers, pp * virtual
    if pp > layers:
        raise Skipped("more places than layers")
    if shapes.hidden % shapes.num_heads:
        raise Skipped("heads do not divide hidden")
    if shapes.num_heads % shapes.num_kv_heads:
        raise Skipped("kv_heads do not divide heads")
    # Zero-bubble pipelines count the embedding and the output layer among the layers of stages.
    if virtual > 1 and layers % stages and (layers + 2) % stages:
        raise Skipped("virtual stages do not divide layers")


def check_seconds(seconds: float | None, column: str) -> None:
    """Raise Bad for more than any step takes: another unit."""
    if seconds and seconds > MOST_SECONDS:
        raise Bad(column, f"{seconds:g} seconds are more than {MOST_SECONDS:g}, too many for a step")


@cache
def cluster_of(name: str, ranks_per_node: int, gigabits: float) -> Cluster:
    """A preset with other nodes. 0: the preset's."""
    cluster = Cluster.preset(name)
    ranks = ranks_per_node or cluster.ranks_per_node
    inner, outer = cluster.tiers[0], cluster.tiers[-1]
    if ranks_per_node:
        inner = inner.model_copy(update={"ranks": ranks})
    if gigabits:
        rate = outer.rate.model_copy(update={"value": gigabits * 1e9 / 8 / ranks, "source": "the row"})
        outer = outer.model_copy(update={"rate": rate})
    return cluster.model_copy(update={"ranks_per_node": ranks, "tiers": (inner, outer)})

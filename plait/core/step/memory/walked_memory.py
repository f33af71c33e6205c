"""Memory of a model whose layers work at different lengths (a utransformer): every kind of point walked once.

What is alive at a place no longer changes with micro-batches that only repeat what those before did, and
sharding changes states, not activations. So few lists are walked, and short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.optimizers import OptimizerName
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Overlap, Recompute, ShardOverlap, Strategy
from plait.core.step.columns.distinct import distinct
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, Points
from plait.core.step.memory.closed_states import KINDS
from plait.core.step.memory.estimate import Memory, MemoryOfPlace, Walked
from plait.core.step.schedules import Shape, generate, own_chunks
from plait.core.step.step import Step, Workload

Bytes = NDArray[np.float64]
Ints = NDArray[np.int64]

ALIKE: Mapping[str, int] = {
    "dp": 1, "params": 1, "grads": 1, "optim": 1, "secondary": 0, "shard_overlap": 0
}  # fmt: skip
"""Columns that walking does not depend on, and what they are while a point is walked."""


class WalkedWork(NamedTuple):
    """What all points of a job have alike. sequence: tokens."""

    sequence: int
    precision: Precision
    optimizer: OptimizerName = "adamw"


def walked_memory(
    model: ModelSpec, points: Points, enough: Ints, work: WalkedWork, *, gpu: bool
) -> tuple[dict[str, Bytes], Ints]:
    """Bytes of every point's fullest place by kind, and which place that is. enough: micro-batches that fill
    each point's places as all of its own do."""
    short = replace(points, num_micro=enough)
    first, kind_of = distinct([getattr(short, field.name) for field in fields(Points)])
    found = [_fullest(model, short.row(at), work, gpu) for at in first.tolist()]

    def column(kind: str) -> Bytes:
        return np.array([getattr(memory, kind) for _, memory in found], dtype=np.float64)[kind_of]

    place = np.array([place for place, _ in found], dtype=np.int64)[kind_of]
    return {kind: column(kind) for kind in (*KINDS[:-1], "activations")}, place


def _fullest(model: ModelSpec, row: Mapping[str, int], work: WalkedWork, gpu: bool) -> tuple[int, Memory]:
    """The first of the places that need the most."""
    walked = _walked(model, tuple({**row, **ALIKE}.items()), work, gpu)
    step = step_of(model, row, **work._asdict())
    every = [(at, MemoryOfPlace(step, at, gpu).memory(each)) for at, each in enumerate(walked)]
    return max(every, key=lambda one: one[1].total)


@lru_cache(maxsize=1 << 14)
def _walked(model: ModelSpec, row: tuple[tuple[str, int], ...], work: WalkedWork, gpu: bool) -> tuple[Walked, ...]:
    """A search asks for the same again: in blocks, in a finer space, for more ranks."""
    step = step_of(model, dict(row), **work._asdict())
    return tuple(MemoryOfPlace(step, index, gpu).walked() for index in range(len(step.layout.degrees)))


def step_of(
    model: ModelSpec,
    point: Mapping[str, int],
    *,
    sequence: int,
    precision: Precision,
    optimizer: OptimizerName = "adamw",
) -> Step:
    """A point of the strategy space (``Points.row``), to be walked. Raises ScheduleError or JobError where it
    cannot be."""
    name, pp = SCHEDULES[point["schedule"]], point["pp"]
    chunks = point["virtual"] if name == "interleaved" else own_chunks(name)
    slack = (2,) * (pp - 1) if name == "slack-1f1b" else ()
    shape = Shape(ranks=pp, micro_batches=point["num_micro"], chunks=chunks, slack=slack)
    limit = point["recompute_layers"]
    strategy = Strategy(
        tp=point["tp"], overlap=cast("Overlap", OVERLAPS[point["overlap"]]), p1=point["p1"], p2=point["p2"],
        sequence_parallel=bool(point["sequence_parallel"]), cp=point["cp"], ring=point["ring"],
        recompute=cast("Recompute", RECOMPUTES[point["recompute"]]), recompute_layers=limit if limit >= 0 else None,
        shard_overlap=cast("ShardOverlap", SHARD_OVERLAPS[point["shard_overlap"]]),
    )  # fmt: skip
    strategy.check(model, batch=point["micro"], sequence=sequence)
    sharding = Sharding(
        params=point["params"], grads=point["grads"], optim=point["optim"], secondary=point["secondary"]
    )
    sharding.check(point["dp"] * point["cp"])
    workload = Workload(
        micro_batch=point["micro"] * point["dp"],
        num_micro_batches=point["num_micro"],
        sequence=sequence,
        precision=precision,
        optimizer=optimizer,
    )
    layout = Layout.of(pp=pp, dp=point["dp"], cp=point["cp"], tp=point["tp"])
    return Step.of(model, workload, strategy, layout, generate(name, shape), shardings=[sharding] * pp)

"""Memory of a model whose layers work at different lengths (a utransformer): every kind of point walked once.

What is alive at a place no longer changes with micro-batches that only repeat what those before did, and
sharding changes states, not activations. So few lists are walked, and short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.distinct import distinct
from plait.core.step.columns.point_step import step_of
from plait.core.step.columns.points import Points
from plait.core.step.memory.closed_states import KINDS
from plait.core.step.memory.estimate import Memory, MemoryOfPlace, Walked

Bytes = NDArray[np.float64]
Ints = NDArray[np.int64]

ALIKE: Mapping[str, int] = {
    "dp": 1, "params": 1, "grads": 1, "optim": 1, "secondary": 0, "shard_overlap": 0
}  # fmt: skip
"""Columns that walking does not depend on, and what they are while a point is walked."""


def walked_memory(
    model: ModelSpec, points: Points, enough: Ints, *, sequence: int, precision: Precision, gpu: bool
) -> tuple[dict[str, Bytes], Ints]:
    """Bytes of every point's fullest place by kind, and which place that is. enough: micro-batches that fill
    each point's places as all of its own do."""
    short = replace(points, num_micro=enough)
    first, kind_of = distinct([getattr(short, field.name) for field in fields(Points)])
    found = [_fullest(model, short.row(at), sequence, precision, gpu) for at in first.tolist()]

    def column(kind: str) -> Bytes:
        return np.array([getattr(memory, kind) for _, memory in found], dtype=np.float64)[kind_of]

    place = np.array([place for place, _ in found], dtype=np.int64)[kind_of]
    return {kind: column(kind) for kind in (*KINDS[:-1], "activations")}, place


def _fullest(
    model: ModelSpec, row: Mapping[str, int], sequence: int, precision: Precision, gpu: bool
) -> tuple[int, Memory]:
    """The first of the places that need the most."""
    walked = _walked(model, tuple({**row, **ALIKE}.items()), sequence, precision, gpu)
    step = step_of(model, row, sequence=sequence, precision=precision)
    every = [(at, MemoryOfPlace(step, at, gpu).memory(each)) for at, each in enumerate(walked)]
    return max(every, key=lambda one: one[1].total)


@lru_cache(maxsize=1 << 14)
def _walked(
    model: ModelSpec, row: tuple[tuple[str, int], ...], sequence: int, precision: Precision, gpu: bool
) -> tuple[Walked, ...]:
    """A search asks for the same again: in blocks, in a finer space, for more ranks."""
    step = step_of(model, dict(row), sequence=sequence, precision=precision)
    return tuple(MemoryOfPlace(step, index, gpu).walked() for index in range(len(step.layout.degrees)))

"""What a rank holds: parameters that no unit shards, for checkpoints of a model alone; bytes of its
units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from plait.core.parallel.sharding import Sharding
from plait.core.reshard.layouts import Box
from plait.core.step.memory.memory_options import PLAIT
from plait.core.step.memory.states import HeldStates, States, states_of_pp_rank, unit_counts
from plait.core.step.traffic import Unit
from plait.train.model.pieces import Piece
from plait.train.model.units import ShardBox


def held_of(pieces: Sequence[Piece]) -> dict[str, list[ShardBox]]:
    """By parameter name: pieces one after the other along dim 0."""
    found: dict[str, list[ShardBox]] = {}
    for piece in pieces:
        start = [piece.start if dim == piece.dim else 0 for dim in range(len(piece.shape))]
        box = Box(tuple(start), tuple(a + b for a, b in zip(start, piece.local_shape, strict=True)))
        first = piece.offset * math.prod(piece.local_shape[1:])
        found.setdefault(piece.parameter, []).append(ShardBox(piece, box, first))
    return found


def states_held(units: Mapping[Unit, int], sharding: Sharding, *, itemsize: int) -> States:
    """Bytes from step to step of a rank with these units of so many numbers, and of nothing
    beside."""
    held = HeldStates(unit_counts(units), bare=True)
    return states_of_pp_rank(held, sharding, itemsize=itemsize, options=PLAIT)

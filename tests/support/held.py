"""What parameters hold that no unit shards, for checkpoints of a model alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.core.reshard.layouts import Box
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

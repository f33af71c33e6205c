"""Storage of a rank's parameters: one flat tensor per unit, sharded over the ranks that would
replicate it.

A unit (``core.parallel.sharding``) is the matrices of one segment. A rank's shard of it is
allocated once. The model's parameters are views: of the shard if the unit is not sharded, else of a
buffer into which the unit is gathered. Initial values, imports and checkpoints use ranges of
logical tensors instead (``ShardBox``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.core.parallel.sharding import EXPERTS, WHOLE, Level, Sharding, Unit, unit_of
from plait.core.reshard.layouts import Box, boxes_of_range
from plait.train.model.pieces import Piece


class ShardBox(NamedTuple):
    """A box of a logical tensor and its position in a local one. piece: this rank's range of the
    tensor. box: in the whole tensor's coordinates. start: the box's first element in the local
    tensor, where it is contiguous."""

    piece: Piece
    box: Box
    start: int

    def of(self, local: Tensor) -> Tensor:
        """Return the box's view of the local tensor."""
        return local.view(-1)[self.start : self.start + self.box.elements].view(self.box.shape)


def _first(piece: Piece) -> int:
    """Return the index of a piece's first element in its flattened parameter."""
    return piece.offset * math.prod(piece.local_shape[1:])


def _held(piece: Piece, first: int, last: int, start: int) -> list[ShardBox]:
    """Return the boxes that elements ``first`` to ``last`` (exclusive) of this rank's range of a
    piece form. start: position of the first element in the local tensor."""
    corner = [0] * len(piece.shape)
    if piece.dim is not None:
        corner[piece.dim] = piece.start
    if first == 0 and last == math.prod(piece.local_shape):  # also if the range is empty
        boxes = [Box(tuple(0 for _ in piece.shape), piece.local_shape)]
    else:
        boxes = list(boxes_of_range(piece.local_shape, first, last))
    found: list[ShardBox] = []
    for box in boxes:
        whole = Box(*(tuple(x + c for x, c in zip(side, corner, strict=True)) for side in box))
        found.append(ShardBox(piece, whole, start))
        start += box.elements
    return found


@dataclass(frozen=True)
class ShardSpec:
    """Storage settings of a rank's shards. rank: its index among the ranks over which a unit is
    sharded."""

    sharding: Sharding
    rank: int
    dtype: torch.dtype
    device: torch.device


class UnitLayout:
    """The layout of one unit's numbers, and the part that a rank keeps. It allocates no memory, so
    it can be computed for any rank.

    shapes: of the unit's parameters, by name, in order. cut: the sharding, and the rank's index
    among those over which the unit is sharded. whole: parameters and gradients are replicated, and
    only optimizer states are sharded. params, grads: sharding factors of parameters and gradients.
    """

    def __init__(
        self, unit: Unit, shapes: Mapping[str, tuple[int, ...]], pieces: Sequence[Piece], cut: tuple[Sharding, int]
    ) -> None:
        self.unit, (self.sharding, self.rank), self.pieces = unit, cut, list(pieces)
        self.extents: dict[str, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for name, shape in shapes.items():
            self.extents[name] = end, shape
            end += math.prod(shape)
        self.numel = self.sharding.padded(end)
        self.whole = unit[0] in WHOLE
        self.params, self.grads = (1, 1) if self.whole else (self.sharding.params, self.sharding.grads)

    @property
    def key(self) -> str:
        """The unit's name in checkpoints and reports."""
        return f"{self.unit[0]}.{self.unit[1]}"

    def view(self, name: str, whole: Tensor) -> Tensor:
        """Return a parameter's view of a tensor that holds the whole unit."""
        start, shape = self.extents[name]
        return whole[start : start + math.prod(shape)].view(shape)

    def part(self, level: Level, held: Level | None = None) -> slice:
        """Return this rank's range at a level, relative to the whole unit, or to its range at the
        wider level ``held``."""
        start, stop = self.sharding.shard(self.rank, level, self.numel)
        base = self.range(held)[0] if held else 0
        return slice(start - base, stop - base)

    def range(self, level: Level) -> tuple[int, int]:
        """Return (first, end) of the elements of the flat unit that this rank holds at a sharding
        level (``params``, ``grads``, ...)."""
        return (0, self.numel) if self.whole and level != "optim" else self.sharding.shard(self.rank, level, self.numel)

    def held(self, level: Level) -> list[ShardBox]:
        """Return the boxes of logical tensors in this rank's shard at a sharding level."""
        start, stop = self.range(level)
        found: list[ShardBox] = []
        for piece, first in self.firsts():
            low, high = max(start, first), min(stop, first + math.prod(piece.local_shape))
            if low < high:
                found += _held(piece, low - first, high - first, low - start)
        return found

    @property
    def everything(self) -> list[ShardBox]:
        """The boxes of logical tensors that the whole unit holds."""
        return [held for piece, first in self.firsts() for held in _held(piece, 0, math.prod(piece.local_shape), first)]

    def firsts(self) -> Iterator[tuple[Piece, int]]:
        """Yield every piece and the index of its first number in the unit."""
        for piece in self.pieces:
            yield piece, self.extents[piece.parameter][0] + _first(piece)


class UnitStore(UnitLayout):
    """One unit on one rank: its parameters, and this rank's shard of them.

    kept: this rank's shard of the parameters. second: its shard of the second copy, if there is one
    (``Sharding.secondary``).
    """

    def __init__(
        self, unit: Unit, shapes: Mapping[str, tuple[int, ...]], pieces: Sequence[Piece], spec: ShardSpec
    ) -> None:
        super().__init__(unit, shapes, pieces, (spec.sharding, spec.rank))
        sharding = spec.sharding
        self.kept = torch.zeros(self.numel // self.params, dtype=spec.dtype, device=spec.device)
        self.second = (
            self.kept.new_zeros(self.numel // sharding.secondary) if sharding.secondary and not self.whole else None
        )
        self.parameters = {name: nn.Parameter(self.kept.new_empty(0)) for name in shapes}
        self.point(self.kept if self.params == 1 else None)

    def point(self, whole: Tensor | None) -> None:
        """Make the parameters views of ``whole``, the gathered unit; empty tensors if it is
        None."""
        for name, parameter in self.parameters.items():
            parameter.data = self.kept.new_empty(0) if whole is None else self.view(name, whole)

    def fill(self, value: Callable[[Piece], Tensor]) -> None:
        """Set the numbers that this rank keeps. value: returns this rank's range of a piece, in any
        dtype."""
        start, stop = self.range("params")
        for piece, first in self.firsts():
            low, high = max(start, first), min(stop, first + math.prod(piece.local_shape))
            if low < high:
                self.kept[low - start : high - start].copy_(value(piece).reshape(-1)[low - first : high - first])


class UnitShape(NamedTuple):
    """Shapes of a unit's parameters, by name, and the pieces in them."""

    shapes: dict[str, tuple[int, ...]]
    pieces: list[Piece]


def unit_shapes(pieces: Sequence[Piece], rows: int, stage: int) -> dict[Unit, UnitShape]:
    """Return the shapes of a stage's units. rows: of vocabulary weights, which may exceed those of
    their pieces (padding)."""
    by_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append(piece)
    found: dict[Unit, UnitShape] = {}
    for name, members in by_parameter.items():
        last = members[-1]
        count = rows if name in ("embedding.weight", "head.weight") else last.offset + last.local_shape[0]
        shape = (count, *last.local_shape[1:])
        kind, at = unit_of(name, len(shape))
        unit = found.setdefault((kind, stage) if kind == "vectors" else (kind, at), UnitShape({}, []))
        unit.shapes[name] = shape
        unit.pieces.extend(members)
    return found


def make_units(
    pieces: Sequence[Piece], rows: int, stage: int, spec: ShardSpec, experts: ShardSpec | None = None
) -> dict[Unit, UnitStore]:
    """Return the units of a stage, with their memory. experts: storage settings of routed
    experts; None: as of others."""
    shapes = unit_shapes(pieces, rows, stage)
    return {
        unit: UnitStore(unit, one.shapes, one.pieces, experts if experts and unit[0] == EXPERTS else spec)
        for unit, one in shapes.items()
    }

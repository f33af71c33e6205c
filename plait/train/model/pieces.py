"""Which part of which tensor a rank holds, as data: what initialisation, checkpoints, import and export all
read.

A *parameter* is what a module holds (the fused query/key/value weight of this rank); a *piece* is a logical,
unsharded tensor with a name (``layers.0.attn.q.weight``) of which the parameter holds a range. Parameters are
concatenations of pieces along dim 0; a piece is cut along one dim, or replicated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Sums, Weight
from plait.core.parallel.strategy import Strategy
from plait.core.step.stages import Stage, stage_weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """One logical tensor and this rank's range of it.

    shape: of the whole tensor. dim: the sharded dim, None where replicated. start, stop: this rank's range
    along it. parameter: name of the module parameter that holds it, offset: first row (dim 0) there.
    replicas: how many tensor-parallel ranks hold this same range (replicated pieces: all of them). sums: when
    these add up its gradient. copy:
    another pipeline stage holds the tensor too, and counts it (tied embeddings: the last stage's head).
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    parameter: str
    offset: int
    replicas: int
    sums: Sums = "never"
    copy: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's range."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def view(self, parameter: Tensor) -> Tensor:
        """The piece's range inside its parameter (or a gradient or optimizer state of the same shape)."""
        return parameter.narrow(0, self.offset, self.local_shape[0])

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's range of the whole tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.stop - self.start)


def pieces(spec: ModelSpec, strategy: Strategy, tp_rank: int, stage: Stage | None = None) -> list[Piece]:
    """Every piece of the stage (of the model, if none is given) that tensor-parallel rank ``tp_rank`` holds,
    in a fixed order."""
    stage = stage or Stage(0, 1, 0, spec.num_layers)
    found, offsets = list[Piece](), dict[str, int]()
    for name, weight in stage_weights(spec, stage):
        shape = tuple(spec.letters.size(letter) for letter in weight.shape)
        held = name.removesuffix(weight.name) + (weight.held or weight.name)
        start, stop, replicas = _range(spec, strategy, tp_rank, weight, shape[weight.dim])
        offset = offsets.get(held, 0)
        cut = weight.dim if weight.cut else None
        piece = Piece(name, shape, cut, start, stop, held, offset, replicas, weight.sums)
        if name == "head.weight" and spec.tied_embeddings:
            piece = replace(piece, name="embedding.weight", copy=True)
        offsets[held] = offset + piece.local_shape[0]
        found.append(piece)
    return found


def _range(spec: ModelSpec, strategy: Strategy, rank: int, weight: Weight, size: int) -> tuple[int, int, int]:
    """What a rank holds of the dimension that is cut, and how many ranks hold the same."""
    if not weight.cut:
        return 0, size, strategy.tp
    copies, rows = strategy.kv_replicas(spec) if weight.cut == "kv" else 1, strategy.cut_size(spec, weight)
    start = rank // copies * rows
    return min(start, size), min(start + rows, size), copies  # rows beyond the vocabulary are padding


def initialise(spec: ModelSpec, piece: Piece, seed: int) -> Tensor:
    """This rank's range of the piece's initial value, fp32: the same numbers whatever the tensor-parallel
    degree.

    Normal(0, 0.02), projections into the residual stream scaled by 1/sqrt(2 layers) (Radford 2019); norms 1,
    biases 0. Every piece has its own generator, keyed by seed and name, so that shards are never replicas of
    each other.
    """
    import torch  # here, so that a start looks at names and shapes without the seconds this import takes

    if len(piece.shape) == 1:  # of norms, and biases
        return torch.full(piece.local_shape, 0.0 if piece.name.endswith(".bias") else 1.0)
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    key = int.from_bytes(digest[:4], "little")  # of a longer one torch's generator reads no more
    generator = torch.Generator().manual_seed(key)
    std = 0.02 / (2 * spec.num_layers) ** 0.5 if piece.name.endswith(("o.weight", "down.weight")) else 0.02
    return piece.cut(torch.randn(piece.shape, generator=generator) * std).contiguous()

"""Ranges of logical tensors that a rank holds, as data: read by initialisation, checkpoints, import
and export.

A *parameter* belongs to a module (this rank's fused query/key/value weight). A *piece* is a
logical, unsharded tensor with a name (``layers.0.attn.q.weight``); the parameter holds a range of
it. Parameters are concatenations of pieces along dim 0. A piece is sharded along one dim, or
replicated.
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

    shape: of the whole tensor. dim: the sharded dim, None if replicated. start, stop: this rank's
    range along it. parameter: name of the module parameter that holds it; offset: first row (dim 0)
    there. replicas: tensor-parallel ranks that hold this same range (replicated pieces: all of
    them). sums: when these ranks sum its gradient. copy: True if another pipeline stage also holds
    the tensor and counts it (tied embeddings: the last stage's head).
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
        """Shape of this rank's range of the logical tensor."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @property
    def routed(self) -> bool:
        """True for a routed expert's tensor."""
        return ".experts." in self.name

    def view(self, parameter: Tensor) -> Tensor:
        """Return the piece's view of its parameter (or of a gradient or optimizer state of the same
        shape)."""
        return parameter.narrow(0, self.offset, self.local_shape[0])

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's range of the whole tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.stop - self.start)


def pieces(
    spec: ModelSpec, strategy: Strategy, tp_rank: int, stage: Stage | None = None, experts: range | None = None
) -> list[Piece]:
    """Return every piece of the stage (None: of the model) that tensor-parallel rank ``tp_rank``
    holds, in a fixed order. experts: the routed experts that the rank holds; None: all."""
    stage = stage or Stage(0, 1, 0, spec.num_layers)
    found, offsets = list[Piece](), dict[str, int]()
    for name, weight in stage_weights(spec, stage, experts):
        shape = tuple(spec.letters.size(letter) for letter in weight.shape)
        held = name.removesuffix(weight.name) + (weight.fused_into or weight.name)
        if weight.sublayer == "experts":  # one parameter holds all of them
            held = f"{name.partition('.experts.')[0]}.experts.{weight.fused_into}"
        start, stop, replicas = _range(spec, strategy, tp_rank, weight, shape[weight.dim])
        offset = offsets.get(held, 0)
        cut = weight.dim if weight.cut else None
        piece = Piece(name, shape, cut, start, stop, held, offset, replicas, weight.grad_reduction)
        if name == "head.weight" and spec.tied_embeddings:
            piece = replace(piece, name="embedding.weight", copy=True)
        offsets[held] = offset + piece.local_shape[0]
        found.append(piece)
    return found


def _range(spec: ModelSpec, strategy: Strategy, rank: int, weight: Weight, size: int) -> tuple[int, int, int]:
    """Return (start, stop) of a rank's range along the sharded dim, and how many ranks hold the
    same range."""
    if weight.sublayer == "experts" and strategy.whole_experts:
        return 0, size, 1  # the tensor-parallel ranks are replicas of the unit, or hold other experts
    if not weight.cut:
        return 0, size, strategy.tp
    copies, rows = strategy.kv_replicas(spec) if weight.cut == "kv" else 1, strategy.cut_size(spec, weight)
    start = rank // copies * rows
    return min(start, size), min(start + rows, size), copies  # rows beyond the vocabulary are padding


def initialise(spec: ModelSpec, piece: Piece, seed: int) -> Tensor:
    """Return this rank's range of the piece's initial value, fp32: the same numbers at every
    tensor-parallel degree.

    Normal(0, 0.02), projections into the residual stream scaled by 1/sqrt(2 layers) (Radford 2019);
    norms 1, biases 0. Every piece has its own generator, keyed by seed and name, so that no shard
    repeats another's numbers.
    """
    import torch  # takes seconds, and names and shapes do not need it

    if len(piece.shape) == 1:  # norms and biases
        return torch.full(piece.local_shape, 0.0 if piece.name.endswith(".bias") else 1.0)
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    key = int.from_bytes(digest[:4], "little")  # torch's generator reads only 32 bits of a seed
    generator = torch.Generator().manual_seed(key)
    std = 0.02 / (2 * spec.num_layers) ** 0.5 if piece.name.endswith(("o.weight", "down.weight")) else 0.02
    return piece.cut(torch.randn(piece.shape, generator=generator) * std).contiguous()

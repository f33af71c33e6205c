"""Which part of which tensor a rank holds, as data: what initialisation, checkpoints, import and export all
read.

A *parameter* is what a module holds (the fused query/key/value weight of this rank); a *piece* is a logical,
unsharded tensor with a name (``layers.0.attn.q.weight``) of which the parameter holds a range. Parameters are
concatenations of pieces along dim 0; a piece is cut along one dim, or replicated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.stages import Stage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """One logical tensor and this rank's range of it.

    shape: of the whole tensor. dim: the sharded dim, None where replicated. start, stop: this rank's range
    along it. parameter: name of the module parameter that holds it, offset: first row (dim 0) there.
    replicas: how many tensor-parallel ranks hold this same range (replicated pieces: all of them). copy:
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
    return list(_Pieces(spec, strategy, tp_rank, stage or Stage(0, 1, 0, spec.num_layers)))


class _Pieces:
    def __init__(self, spec: ModelSpec, strategy: Strategy, tp_rank: int, stage: Stage) -> None:
        self.spec, self.tp, self.rank, self.stage = spec, strategy.tp, tp_rank, stage
        self.kv_replicas = strategy.kv_replicas(spec)
        self.vocab_rows = strategy.padded_vocab(spec) // strategy.tp

    def __iter__(self) -> Iterator[Piece]:
        spec, hidden = self.spec, self.spec.hidden
        if self.stage.embeds:
            yield self._vocabulary("embedding.weight")
        if self.stage.embeds and spec.learned_positions:
            yield self._whole("positions.weight", (spec.max_sequence, hidden))
        for layer in self.stage.layers:
            for _, direction, level in (change for change in spec.resampling if change[0] == layer):
                yield self._whole(f"{direction}.{level}.weight", (hidden, hidden * (2 if direction == "down" else 1)))
                yield self._whole(f"{direction}.{level}.bias", (hidden,))
            yield from self._attention(f"layers.{layer}.attn")
            yield from self._mlp(f"layers.{layer}.mlp")
        if self.stage.heads:
            yield from self._norm("norm")
        if self.stage.heads and not spec.tied_embeddings:
            yield self._vocabulary("head.weight")
        elif self.stage.heads and not self.stage.embeds:
            yield replace(self._vocabulary("embedding.weight"), parameter="head.weight", copy=True)

    def _attention(self, at: str) -> Iterator[Piece]:
        spec, size = self.spec, self.spec.head_size
        yield from self._norm(f"{at}.norm")
        for tail, width in self._weight_and_bias():
            offset = 0
            for name, heads, replicas in (
                ("q", spec.num_heads, 1),
                ("k", spec.num_kv_heads, self.kv_replicas),
                ("v", spec.num_kv_heads, self.kv_replicas),
            ):
                rows = heads * size * replicas // self.tp
                start = self.rank // replicas * rows
                yield Piece(
                    f"{at}.{name}.{tail}",
                    (heads * size, *width),
                    0,
                    start,
                    start + rows,
                    f"{at}.column.{tail}",
                    offset,
                    replicas,
                )
                offset += rows
        yield from self._row(at, "o", spec.num_heads * size, bias=not spec.parallel_block)

    def _mlp(self, at: str) -> Iterator[Piece]:
        spec, rows = self.spec, self.spec.ffn_hidden // self.tp
        if not spec.parallel_block:
            yield from self._norm(f"{at}.norm")
        for tail, width in self._weight_and_bias():
            for i, name in enumerate(("gate", "up") if spec.gated else ("up",)):
                start = self.rank * rows
                yield Piece(
                    f"{at}.{name}.{tail}",
                    (spec.ffn_hidden, *width),
                    0,
                    start,
                    start + rows,
                    f"{at}.column.{tail}",
                    i * rows,
                    1,
                )
        yield from self._row(at, "down", spec.ffn_hidden)

    def _row(self, at: str, name: str, inputs: int, *, bias: bool = True) -> Iterator[Piece]:
        share = inputs // self.tp
        start = self.rank * share
        yield Piece(
            f"{at}.{name}.weight", (self.spec.hidden, inputs), 1, start, start + share, f"{at}.row.weight", 0, 1
        )
        if self.spec.has_bias and bias:
            yield self._whole(f"{at}.{name}.bias", (self.spec.hidden,), f"{at}.row.bias")

    def _norm(self, at: str) -> Iterator[Piece]:
        for tail in ("weight", "bias") if self.spec.has_bias else ("weight",):
            yield self._whole(f"{at}.{tail}", (self.spec.hidden,))

    def _weight_and_bias(self) -> list[tuple[str, tuple[int, ...]]]:
        weight = [("weight", (self.spec.hidden,))]
        return [*weight, ("bias", ())] if self.spec.has_bias else [*weight]

    def _whole(self, name: str, shape: tuple[int, ...], parameter: str | None = None) -> Piece:
        return Piece(name, shape, None, 0, shape[0], parameter or name, 0, self.tp)

    def _vocabulary(self, name: str) -> Piece:
        start = min(self.rank * self.vocab_rows, self.spec.vocab)
        stop = min(
            start + self.vocab_rows, self.spec.vocab
        )  # rows beyond the vocabulary are padding: no piece holds them
        return Piece(name, (self.spec.vocab, self.spec.hidden), 0, start, stop, name, 0, 1)


def initialise(spec: ModelSpec, piece: Piece, seed: int) -> Tensor:
    """This rank's range of the piece's initial value, fp32: the same numbers whatever the tensor-parallel
    degree.

    Normal(0, 0.02), projections into the residual stream scaled by 1/sqrt(2 layers) (Radford 2019); norms 1,
    biases 0. Every piece has its own generator, keyed by seed and name, so that shards are never replicas of
    each other.
    """
    import torch  # here, so that a start looks at names and shapes without the seconds this import takes

    if ".norm." in f".{piece.name}" or piece.name.endswith(".bias"):
        value = 1.0 if piece.name.endswith("norm.weight") else 0.0
        return torch.full(piece.local_shape, value)
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    key = int.from_bytes(digest[:4], "little")  # of a longer one torch's generator reads no more
    generator = torch.Generator().manual_seed(key)
    std = 0.02 / (2 * spec.num_layers) ** 0.5 if piece.name.endswith(("o.weight", "down.weight")) else 0.02
    return piece.cut(torch.randn(piece.shape, generator=generator) * std).contiguous()

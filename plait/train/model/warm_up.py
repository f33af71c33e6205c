"""Compile a model's functions before its first step, on one rank alone. Every function is called
once on zeros of the expected shapes, with a dynamic number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.core.model.dropout import Blocks
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.compiled import Compiled

Example = tuple[str, tuple[Any, ...]]
"""A function's name in ``formulas.ALL``, and the arguments to call it with."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Shapes of one slice. sequence: tokens in the input of the weights. samples: number of
    sequences."""

    strategy: Strategy
    sequence: int
    samples: int

    @property
    def own(self) -> int:
        """The rank's tokens of the residual stream."""
        return self.sequence // (self.strategy.tp if self.strategy.sequence_parallel else 1)


@dataclass(frozen=True)
class WarmUp:
    """Compiles the functions of a stage's model. vocab: vocabulary rows of a rank's share; 0
    without a head. beyond: first column of vocabulary padding, as in ``Kernels.local_loss``.
    dropout: True if the model is trained with dropout."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    vocab: int
    beyond: int | None
    dropout: bool

    def run(self, kernels: Compiled, slices: Sequence[Slice]) -> None:
        """Compile all functions that are not compiled yet. Raises the compiler's errors."""
        with torch.no_grad():
            for cut in slices:
                for name, arguments in self.examples(cut):
                    kernels.functions[name](*arguments)

    def examples(self, cut: Slice) -> Iterator[Example]:
        """Yield the calls that the segments of a slice make."""
        yield from self._norms(cut)
        yield from self._activations(cut)
        if self.spec.family == "llama":
            yield from self._rotations(cut)
        if self.dropout and self.spec.attention_dropout:
            yield from self._weights(cut)
        if self.vocab:
            yield from self._loss(cut.sequence * cut.samples)

    def _norms(self, cut: Slice) -> Iterator[Example]:
        rows, hidden, parts, biased = cut.own * cut.samples, self.spec.hidden, cut.strategy.p2, self.spec.has_bias
        h, gradient, past = (self._zeros(rows, hidden) for _ in range(3))  # aliased arguments would be a variant
        y = self._zeros(parts, rows, hidden // parts, marked=(1,))
        weight, bias, added = (self._zeros(hidden, marked=()) for _ in range(3))
        kind, eps = "layer_norm" if biased else "rms_norm", self.spec.norm_eps
        scale = (weight, bias, eps) if biased else (weight, eps)
        statistics = [self._zeros(rows, 1, wide=True) for _ in range(2 if biased else 1)]
        yield kind, (h, *scale)
        for beside in (past, None) if self.vocab else (past,):  # no residual path goes around the last norm
            yield f"{kind}_gradient", (gradient, beside, h, weight, *statistics)
        dropouts: list[Any] = [None]
        if self.dropout and self.spec.dropout:
            yield "rows", (self._numbers(), self._numbers(1, cut.samples), self._numbers(cut.own, 1))
            dropouts.append((self._numbers(rows), *self._constants()))
            yield "drop", (h, *dropouts[1])
        for dropout in dropouts:
            summands = h, y, added if biased else None, dropout
            yield f"join_{kind}", (*summands, *scale)
            if not self.vocab or self.spec.levels:  # no norm follows where a stage ends or the length changes
                yield "join", summands

    def _activations(self, cut: Slice) -> Iterator[Example]:
        rows, width = cut.sequence * cut.samples, self.spec.ffn_hidden // cut.strategy.tp
        o, z = self._zeros(rows, width), self._zeros(rows, width * (2 if self.spec.gated else 1))
        name = "swiglu" if self.spec.gated else "gelu"
        yield name, (z,)
        yield f"{name}_gradient", (o, z)

    def _rotations(self, cut: Slice) -> Iterator[Example]:
        s, b, size, tp = cut.sequence, cut.samples, self.spec.head_size, cut.strategy.tp
        heads = [self.spec.num_heads // tp] + [max(1, self.spec.num_kv_heads // tp)] * 2
        cos, sin = self._zeros(s, 1, 1, size), self._zeros(s, 1, 1, size)
        q, k, _ = self._zeros(s, b, sum(heads), size, marked=()).split(heads, dim=2)
        yield "rotate", (*(self._marked(t, 0, 1) for t in (q, k)), cos, sin)
        # Memory layouts of attention's gradients: [B, S, N, D]; [B, N, S, D] if heads were repeated; with
        # dropout [S, B, N, D].
        g_q, g_k = (self._zeros(b, s, n, size, marked=()).transpose(0, 1) for n in heads[:2])
        if self.dropout and self.spec.attention_dropout:
            g_q, g_k = (self._zeros(s, b, n, size, marked=()) for n in heads[:2])
        elif heads[0] != heads[1]:
            g_k = self._zeros(b, heads[1], s, size, marked=()).permute(2, 0, 1, 3)
        yield "rotate_back", (*(self._marked(t, 0, 1) for t in (g_q, g_k)), cos, sin)

    def _weights(self, cut: Slice) -> Iterator[Example]:
        strategy, sequence = cut.strategy, cut.sequence * cut.strategy.cp  # ulysses only: dropout excludes a ring
        heads, kv_heads = (
            max(1, n // strategy.tp // strategy.cp) for n in (self.spec.num_heads, self.spec.num_kv_heads)
        )
        group, gpu, root = heads // kv_heads, self.device.type == "cuda", math.sqrt(self.spec.head_size)
        blocks = Blocks(cut.samples * kv_heads, group, sequence, gpu)
        for rows, queries in sorted({(b - a, d - c) for (a, b), (c, d) in blocks}, reverse=True):
            products, gradient = (self._zeros(rows * group, queries, sequence) for _ in range(2))
            lse, own = (self._zeros(rows * group, queries, wide=True) for _ in range(2))
            at, hashes = self._numbers(queries, marked=()), self._numbers(rows * group)
            yield "weights", (products, root, at, hashes, *self._constants())
            yield "weights_gradient", (gradient, products, root, lse, own, at, hashes, *self._constants())

    def _loss(self, rows: int) -> Iterator[Example]:
        logits, targets = self._zeros(rows, self.vocab, wide=True), self._numbers(rows)
        yield "local_loss", (logits, targets, self._marked(targets == 0, 0), self.beyond)
        yield "exponentials", (logits, self._zeros(rows, wide=True), self.beyond)

    def _zeros(self, *shape: int, marked: tuple[int, ...] = (0,), wide: bool = False) -> Tensor:
        dtype = torch.float32 if wide and self.dtype != torch.float64 else self.dtype
        return self._marked(torch.zeros(shape, dtype=dtype, device=self.device), *marked)

    def _numbers(self, *shape: int, marked: tuple[int, ...] | None = None) -> Tensor:
        found = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return self._marked(found, *(range(len(shape)) if marked is None else marked))

    def _constants(self) -> tuple[Tensor, Tensor]:
        return self._numbers(), torch.ones((), dtype=torch.float64, device=self.device)

    def _marked(self, tensor: Tensor, *dims: int) -> Tensor:
        """Mark dims as dynamic: all their sizes share one variant, except 1, which is always
        another."""
        for dim in dims:
            if tensor.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return tensor

"""Compiling what a model needs before its first step, without any other rank: every function is called once
on zeros of the shapes to come, whose number of rows is no constant of the code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.core.model import ModelSpec
from plait.core.strategy import Strategy
from plait.train.model.compiled import Compiled

Example = tuple[str, tuple[Any, ...]]
"""A function of ``formulas.ALL``, and what it is called with."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Shapes of one slice. sequence: tokens that weights see. samples: how many sequences."""

    strategy: Strategy
    sequence: int
    samples: int

    @property
    def own(self) -> int:
        """Tokens of the residual stream here."""
        return self.sequence // (self.strategy.tp if self.strategy.sequence_parallel else 1)


@dataclass(frozen=True)
class WarmUp:
    """Of a stage's model. vocab: rows of a rank's share; 0 where there is no head. dropout: whether it is
    trained."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    vocab: int
    dropout: bool

    def run(self, kernels: Compiled, slices: Sequence[Slice]) -> None:
        """Compile what is not compiled yet. Raises whatever the compiler does."""
        with torch.no_grad():
            for cut in slices:
                for name, arguments in self.examples(cut):
                    kernels.functions[name](*arguments)

    def examples(self, cut: Slice) -> Iterator[Example]:
        """What the segments of a slice call."""
        yield from self._norms(cut.own * cut.samples)
        yield from self._activations(cut)
        if self.spec.family == "llama":
            yield from self._rotations(cut)
        yield from self._joins(cut)
        if self.dropout and self.spec.attention_dropout:
            yield from self._weights(cut)
        if self.vocab:
            yield from self._loss(cut.sequence * cut.samples)

    def _norms(self, rows: int) -> Iterator[Example]:
        h, weight = self._zeros(rows, self.spec.hidden), self._zeros(self.spec.hidden, marked=())
        statistic, eps = self._zeros(rows, 1, wide=True), self.spec.norm_eps
        if self.spec.has_bias:
            yield "layer_norm", (h, weight, weight, eps)
            yield "layer_norm_gradient", (h, h, weight, statistic, statistic)
        else:
            yield "rms_norm", (h, weight, eps)
            yield "rms_norm_gradient", (h, h, weight, statistic)

    def _activations(self, cut: Slice) -> Iterator[Example]:
        rows, width = cut.sequence * cut.samples, self.spec.ffn_hidden // cut.strategy.tp
        o, z = self._zeros(rows, width), self._zeros(rows, width * (2 if self.spec.gated else 1))
        name = "swiglu" if self.spec.gated else "gelu"
        yield name, (z,)
        yield f"{name}_gradient", (o, z)

    def _rotations(self, cut: Slice) -> Iterator[Example]:
        s, b, size, tp = cut.sequence, cut.samples, self.spec.head_size, cut.strategy.tp
        heads = [self.spec.num_heads // tp] + [max(1, self.spec.num_kv_heads // tp)] * 2
        table = self._zeros(s, 1, 1, size)
        q, k, _ = self._zeros(s, b, sum(heads), size, marked=()).split(heads, dim=2)
        yield "rotate", (*(self._marked(t, 0, 1) for t in (q, k)), table, table)
        # As attention's backward leaves them: [B, S, N, D], or where heads were repeated [B, N, S, D].
        g_q = self._zeros(b, s, heads[0], size, marked=()).transpose(0, 1)
        grouped = heads[0] != heads[1]
        g_k = self._zeros(b, heads[1], s, size, marked=()).permute(2, 0, 1, 3)
        g_k = g_k if grouped else self._zeros(b, s, heads[1], size, marked=()).transpose(0, 1)
        yield "rotate_back", (*(self._marked(t, 0, 1) for t in (g_q, g_k)), table, table)

    def _joins(self, cut: Slice) -> Iterator[Example]:
        rows, hidden, parts = cut.own * cut.samples, self.spec.hidden, cut.strategy.p2
        h, y = self._zeros(rows, hidden), self._zeros(parts, rows, hidden // parts, marked=(1,))
        bias = self._zeros(hidden, marked=()) if self.spec.has_bias else None
        yield "join", (h, y, bias)
        if self.dropout and self.spec.dropout:
            yield "rows", (self._numbers(), self._numbers(1, cut.samples), self._numbers(cut.own, 1))
            hashes, constants = self._numbers(rows), self._constants()
            yield "join_dropped", (h, y, bias, hashes, *constants)
            yield "drop", (h, hashes, *constants)

    def _weights(self, cut: Slice) -> Iterator[Example]:
        s, heads = cut.sequence, self.spec.num_heads // cut.strategy.tp
        products, root = self._zeros(cut.samples * heads, s, s), self.spec.head_size**0.5
        hashes, constants = self._numbers(cut.samples * heads), self._constants()
        yield "rows", (self._numbers(), self._numbers(cut.samples, 1), self._numbers(1, heads))
        yield "weights", (products, root, hashes, *constants)
        yield "weights_gradient", (products, root, products, hashes, *constants)

    def _loss(self, rows: int) -> Iterator[Example]:
        logits, targets = self._zeros(rows, self.vocab, wide=True), self._numbers(rows)
        here, of_each = targets == 0, logits[:, 0].contiguous()
        self._marked(here, 0), self._marked(of_each, 0)
        yield "local_loss", (logits, targets, here, None)
        yield "finish_loss", (logits, of_each, targets, of_each.clone())

    def _zeros(self, *shape: int, marked: tuple[int, ...] = (0,), wide: bool = False) -> Tensor:
        dtype = torch.float32 if wide and self.dtype != torch.float64 else self.dtype
        return self._marked(torch.zeros(shape, dtype=dtype, device=self.device), *marked)

    def _numbers(self, *shape: int) -> Tensor:
        found = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return self._marked(found, *range(len(shape)))

    def _constants(self) -> tuple[Tensor, Tensor]:
        return self._numbers(), torch.ones((), dtype=torch.float64, device=self.device)

    def _marked(self, tensor: Tensor, *dims: int) -> Tensor:
        """Any size of these dims is one variant; but 1 is always another."""
        for dim in dims:
            if tensor.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return tensor

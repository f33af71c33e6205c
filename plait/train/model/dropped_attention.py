"""Causal attention with counter-based dropout of its weights (``plait.train.model.dropout``), in
blocks (``core.model.dropout``). Fused kernels cannot be used, because they draw their own random
numbers.

A block's weights are freed. Only attention's output and the log-sum-exp of its scores are kept for
the backward pass, which recomputes weights and masks (arXiv 2205.14135). Key/value heads are shared
by their group of queries without copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plait.core.model.dropout import Block, Blocks
from plait.train.model.dropout import Mask
from plait.train.model.kernels import Kernels, Scores, wide


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernels: Kernels, starts: Tensor | None = None) -> Tensor:
    """Return attention of queries [B, N, S, D], differentiable; keys and values may have fewer
    heads. starts: [B, S], the first key that each query sees; None: the sequence's first."""
    return _Attention.apply(q, k, v, mask, kernels, starts)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Inputs:
    """Inputs of attention's forward and backward, with queries [B, N, S, D], keys and values [B,
    N_kv, S, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    kernels: Kernels
    starts: Tensor | None

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks, in the order of computation."""
        b, kv_heads, sequence, _ = self.k.shape
        return Blocks(b * kv_heads, self.q.shape[1] // kv_heads, sequence, self.q.is_cuda)

    @cached_property
    def heads(self) -> Tensor:
        """Hashes of the dropout mask's heads, [B, N_kv, G], with G query heads for each key/value
        head."""
        return self.by_rows(self.mask.heads)

    def by_rows(self, x: Tensor) -> Tensor:
        """Return a tensor [B, N, ...] viewed as [B, N_kv, G, ...]."""
        return x.unflatten(1, (-1, self.blocks.group))

    def part(self, block: Block) -> _AttentionBlock:
        """Return the inputs of one block."""
        (first, last), (begin, end) = block
        numbers, kv_heads = torch.arange(first, last, device=self.q.device), self.k.shape[1]
        rows = numbers // kv_heads, numbers % kv_heads
        # Compiled kernels take whole rows.
        keys = slice(0, self.q.shape[2] if self.kernels.fuses else end)
        at = (*rows, slice(None), slice(begin, end))
        return _AttentionBlock(self, at, (*rows, keys), self.by_rows(self.q)[at].flatten(1, 2))


@dataclass(frozen=True)
class _AttentionBlock:
    """One block of r rows, each a sample's key/value head. at: its queries' index in [B, N_kv, G,
    S, ...]. key_index: its keys' index in [B, N_kv, S, ...]. q: [r, G * queries, D]."""

    inputs: _Inputs
    at: tuple[Any, ...]
    key_index: tuple[Any, ...]
    q: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The indices of samples and of key/value heads."""
        return self.at[:2]

    def scores(self) -> Scores:
        """Return the products [r * G, queries, keys], not yet divided."""
        inputs, queries = self.inputs, self.at[3]
        products = torch.bmm(self.q, inputs.k[self.key_index].transpose(1, 2))
        positions, heads, first = torch.arange(queries.start, queries.stop, device=self.q.device), inputs.heads, None
        if inputs.starts is not None:
            first = inputs.starts[self.rows[0], queries].repeat_interleave(inputs.blocks.group, dim=0)
        return Scores(
            products.view(-1, len(positions), products.shape[2]), math.sqrt(self.q.shape[2]), positions,
            heads[self.rows].flatten(), inputs.mask, first,
        )  # fmt: skip

    def forward(self, out: Tensor, lse: Tensor) -> None:
        """Write the block's part of attention and log-sum-exp."""
        inputs = self.inputs
        weights, sums = inputs.kernels.weights(self.scores())
        found = torch.bmm(weights.view(*self.q.shape[:2], -1), inputs.v[self.key_index])
        inputs.by_rows(out)[self.at] = found.unflatten(1, (inputs.blocks.group, -1))
        inputs.by_rows(lse)[self.at] = sums.view(len(self.q), inputs.blocks.group, -1)

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor, of_q: Tensor, sums: Sequence[Tensor]) -> None:
        """Write the block's part of the queries' gradient, and add its part of the keys' and
        values' gradients to ``sums``, [r, S, D]."""
        inputs = self.inputs
        gradient, out, lse = (inputs.by_rows(t)[self.at].flatten(1, 2) for t in (gradient, out, lse))
        own, scores = gradient.to(lse.dtype).mul(out).sum(-1), self.scores()
        shape = scores.products.shape
        through = torch.bmm(gradient, inputs.v[self.key_index].transpose(1, 2)).view(shape)
        weights, products = (
            t.view(*self.q.shape[:2], -1)
            for t in inputs.kernels.weights_gradient(scores, lse.view(shape[:2]), through, own.view(shape[:2]))
        )
        inputs.by_rows(of_q)[self.at] = torch.bmm(products, inputs.k[self.key_index]).unflatten(
            1, (inputs.blocks.group, -1)
        )
        keys = self.key_index[2]
        sums[0][:, keys] += torch.bmm(products.transpose(1, 2), self.q)
        sums[1][:, keys] += torch.bmm(weights.transpose(1, 2), gradient)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernels: Kernels, starts: Tensor | None
    ) -> Tensor:
        inputs = _Inputs(q, k, v, mask, kernels, starts)
        out, lse = _as_activations(q), q.new_empty(q.shape[:3], dtype=wide(q.dtype))
        for block in inputs.blocks:
            inputs.part(block).forward(out, lse)
        # If this is captured, every replay overwrites both; autograd must not see that as an in-place change.
        ctx.kept = out.detach(), lse
        ctx.mask, ctx.kernels, ctx.starts = mask, kernels, starts
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), (out, lse) = ctx.saved_tensors, ctx.kept
        inputs = _Inputs(q, k, v, ctx.mask, ctx.kernels, ctx.starts)
        of_q, of_k, of_v = (_as_activations(t) for t in (q, k, v))
        sums = list[Tensor]()
        for block in inputs.blocks:
            part = inputs.part(block)
            if block.queries[0] == 0:
                sums = [lse.new_zeros((len(part.q), *k.shape[2:])) for _ in range(2)]
            part.backward(gradients[0], out, lse, of_q, sums)
            if block.queries[1] == q.shape[2]:
                of_k[part.rows], of_v[part.rows] = (t.to(k.dtype) for t in sums)
        return of_q, of_k, of_v, None, None, None


def _as_activations(x: Tensor) -> Tensor:
    """Return an empty tensor of shape [B, N, S, D], laid out as [S, B, N, D]: the heads of a token
    are adjacent."""
    return torch.empty_permuted(x.shape, (2, 0, 1, 3), dtype=x.dtype, device=x.device)  # not a view

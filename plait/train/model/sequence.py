"""Attention over a sequence that ranks share: Ulysses all-to-all (arXiv 2309.14509), ring attention
(arXiv 2310.01889), and both nested.

Only the mathematics; instruction lists schedule the collectives (``core.step.attention_ops``,
``plait.train.engine.attention``). Every rank of a sequence-parallel group holds some tokens of
every sample (``core.parallel.layout.ContextSplit``). Everything but attention is computed on these
tokens alone. ``for_heads`` explains Ulysses, ``RingStep`` the ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.train.comm.wire import NullWire, Wire
from plait.train.model.documents import Documents, DocumentSpan


@dataclass(frozen=True)
class SequenceGroup:
    """One rank's process groups for attention: ``ulysses`` exchanges heads, ``ring`` passes keys
    and values."""

    ulysses: Wire
    ring: Wire


ALONE = SequenceGroup(NullWire(), NullWire())
FLASH = (torch.bfloat16, torch.float16)
"""The dtypes of a GPU's flash attention, the only kernel there that supports grouped key/value
heads."""


# ---- Ulysses ----


def for_heads(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Pack queries, keys and values for the Ulysses all-to-all (SP-2).

    [S / u, B, N, D] of all heads -> [u, S / u, B, heads of one rank, D], the part for every rank.
    Each rank gives the tokens of its part with all heads, and receives all tokens of some heads for
    attention. Where key/value heads are fewer than ranks, a head goes to all ranks whose query
    heads use it.
    """
    if k.shape[2] % size:  # a head goes to several ranks
        chosen = chosen_heads(size, q.shape[2], k.shape[2], q.device)
        k, v = (t.index_select(2, chosen) for t in (k, v))
    parts = [t.unflatten(2, (size, -1)) for t in (q, k, v)]
    return torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4).contiguous()


def from_heads(parts: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse ``for_heads``, for gradients; those of a key/value head that several ranks used are
    summed."""
    size = parts.shape[0]
    each, kv_each = heads // size, max(1, kv_heads // size)
    q, k, v = (t.permute(1, 2, 0, 3, 4).flatten(2, 3) for t in parts.split([each, kv_each, kv_each], dim=3))
    if k.shape[2] == kv_heads:
        return q, k, v
    chosen = chosen_heads(size, heads, kv_heads, parts.device)
    k, v = (t.new_zeros((*t.shape[:2], kv_heads, t.shape[3])).index_add_(2, chosen, t) for t in (k, v))
    return q, k, v


def split_heads(whole: Tensor, size: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack the parts received from all ranks, [u, S / u, B, heads of one rank, D], to queries,
    keys and values of this rank's heads, [B, N / u, S, D]."""
    each, kv_each = heads // size, max(1, kv_heads // size)
    q, k, v = (t.permute(1, 2, 0, 3) for t in whole.flatten(0, 1).split([each, kv_each, kv_each], dim=2))
    return q, k, v


@lru_cache(maxsize=64)
def chosen_heads(size: int, heads: int, kv_heads: int, device: torch.device) -> Tensor:
    """Return the key/value heads that each rank's query heads use, concatenated by rank; a head may
    appear more than once. Cached: a Python list that becomes a GPU tensor makes the host wait."""
    firsts = [rank * heads // size * kv_heads // heads for rank in range(size)]
    return torch.tensor([first + i for first in firsts for i in range(max(1, kv_heads // size))], device=device)


def for_tokens(o: Tensor, size: int) -> Tensor:
    """Pack attention of this rank's heads for the all-to-all back: [B, N / u, S, D] -> [u, S / u,
    B, N / u, D]."""
    return o.permute(2, 0, 1, 3).unflatten(0, (size, -1)).contiguous()


def from_tokens(parts: Tensor) -> Tensor:
    """Unpack the parts received from all ranks, [u, S / u, B, N / u, D], to [S / u * B, N * D]."""
    return parts.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


# ---- ring ----


class SlidingWindow(NamedTuple):
    """A sliding window. ahead: distance in tokens from the first key to the first query. size: keys
    that a query sees at most, its own included."""

    ahead: int
    size: int

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the term added to the scores of queries [..., queries, D] and keys [..., keys, D]:
        0 within the window, else minus infinity; cached."""
        return near_mask(self, q.shape[2], k.shape[2], q.dtype, q.device)


class MaskTile(NamedTuple):
    """A rectangle of queries and keys that the mask lets through. ``causal``: a query sees keys at
    its own and earlier positions of the rectangle; else all keys. near: the sliding window, if any.
    rows, columns: the queries and the keys. samples: the sequences of the batch."""

    rows: slice
    columns: slice
    causal: bool
    near: SlidingWindow | None = None
    samples: slice = slice(None)

    def of(self, x: Tensor) -> Tensor:
        """Return the part of a tensor [B, N, S, ...] of queries that lies in the rectangle."""
        return x[self.samples, :, self.rows]

    def keys_values(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of the rectangle, from a block [2, B, N_kv, S, D]."""
        k, v = block[:, self.samples, :, self.columns]
        return k, v


class RingStep(NamedTuple):
    """One step of ring attention (SP-3): the block of keys that a rank attends to. owner: the rank
    whose tokens they are. window: keys that a query sees; 0: all before it. documents: limits of
    attention, if any.

    Keys and values travel from rank to rank. Every rank attends to each block as it passes and
    merges the results by their log-sum-exp. The sequence is split into twice as many chunks as
    ranks. A rank has one chunk from the front and its mirror image from the end, which balances the
    causal mask. Its own block needs plain causal attention; an earlier rank's block, its first
    half; a later rank's block, all of it for the second half of the queries.
    """

    owner: int
    rank: int
    size: int
    window: int = 0
    documents: Documents | None = None

    @property
    def partial(self) -> bool:
        """True if some queries may see no key of the block."""
        return bool(self.window) or self.documents is not None

    def tiles(self, tokens: int) -> list[MaskTile]:
        """Return the rectangles in which queries of ``rank`` see keys of the block; both have
        ``tokens`` tokens."""
        if self.partial:
            return list(self._parts(tokens // 2))
        half, whole = tokens // 2, slice(0, tokens)
        if self.owner == self.rank:
            return [MaskTile(whole, whole, True)]
        earlier = self.owner < self.rank
        return [MaskTile(whole, slice(0, half), False) if earlier else MaskTile(slice(half, tokens), whole, False)]

    def _parts(self, half: int) -> Iterator[MaskTile]:
        """Yield the rectangle of every chunk of queries, chunk of keys and document, without
        queries that see no key and keys that no query sees."""
        queries, keys = ((rank, 2 * self.size - 1 - rank) for rank in (self.rank, self.owner))
        within = self.documents.stretches() if self.documents else [DocumentSpan(-1, 0, 2 * self.size * half)]
        for (row, query), (column, key) in product(enumerate(queries), enumerate(keys)):
            for sample, first, last in within if query >= key else ():
                begin, end = max(first, query * half), min(last, (query + 1) * half)
                seen, until = max(first, key * half), min(last, (key + 1) * half)
                if self.window:
                    seen, end = max(seen, begin - self.window + 1), min(end, until - 1 + self.window)
                if begin >= end or seen >= until:
                    continue
                near = SlidingWindow(begin - seen, self.window) if self.window and end - seen > self.window else None
                at, there = row * half - query * half, column * half - key * half
                yield MaskTile(
                    slice(at + begin, at + end),
                    slice(there + seen, there + until),
                    near is None and query == key,
                    near,
                    slice(None) if sample < 0 else slice(sample, sample + 1),
                )


@lru_cache(maxsize=32)
def near_mask(near: SlidingWindow, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the term added to scores [queries, keys]: 0 where a query sees a key within the
    window, else minus infinity; cached."""
    back = near.ahead + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    hidden = (back < 0) | (back >= near.size)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def attend_near(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return causal attention of [B, N, S, D] within a window, differentiable by autograd. A GPU's
    flash attention skips keys outside the window; other kernels compute and mask them."""
    if q.is_cuda and q.dtype in FLASH:
        q, k, v, length = *(t.transpose(1, 2) for t in (q, k, v)), q.shape[2]
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, length, length, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )[0]
        return out.transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=SlidingWindow(0, window).mask(q, k))


def attend_causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return causal attention of [B, N, S, D], differentiable by autograd. Keys and values may have
    fewer heads. window: keys that a query sees; 0: all."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and not (q.is_cuda and q.dtype in FLASH):
        (k, v), grouped = _expanded(k, v, q.shape[1]), False
    if 0 < window < q.shape[2]:
        return attend_near(q, k, v, window)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int) -> Tensor:
    """Return ``attend_causal`` within each document. A GPU's flash attention takes all documents in
    one call (variable lengths). Elsewhere documents are computed one after the other, at the cost
    of separate sequences."""
    if q.is_cuda and q.dtype in FLASH:
        b, _, tokens, _ = q.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        bounds, longest = documents.bounds, documents.longest
        left, right = (window - 1, 0) if 0 < window < longest else (None, None)
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False, window_size_left=left, window_size_right=right
        )[0]
        return out.view(b, tokens, *out.shape[1:]).transpose(1, 2)
    k, v = _expanded(k, v, q.shape[1])
    return cast("Tensor", _Documents.apply(q, k, v, documents, window))


class _Documents(torch.autograd.Function):
    """Attention within each document, with the results in one tensor: the backward pass keeps as
    much as without documents."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=sum_dtype(q.dtype))
        for sight in _document_sights(documents, window):
            parts = (sight.of(t) for t in (q, k, v))
            found = _attend(*parts, causal=sight.causal, near=sight.near)
            for whole, part in zip((out, lse), found, strict=True):
                sight.of(whole).copy_(part)
            del found  # free the memory before the next document
        ctx.documents, ctx.window = documents, window
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = kept = ctx.saved_tensors
        into = [torch.empty_like(t) for t in (q, k, v)]
        for sight in _document_sights(ctx.documents, ctx.window):
            parts = (sight.of(t) for t in (gradient, *kept))
            found = _attend_backward(*parts, causal=sight.causal, near=sight.near)
            for whole, part in zip(into, found, strict=True):
                sight.of(whole).copy_(part)
            del found
        return (*into, None, None)


def _document_sights(documents: Documents, window: int) -> Iterator[MaskTile]:
    """Yield the rectangle of queries and keys of each document."""
    for sample, first, last in documents.stretches():
        near, own = SlidingWindow(0, window) if 0 < window < last - first else None, slice(first, last)
        yield MaskTile(own, own, near is None, near, slice(sample, sample + 1))


def attend_block(accumulated: list[Tensor], q: Tensor, block: Tensor, turn: RingStep) -> None:
    """Attend with a rank's queries, [B, N, S / c, D], to the block of a ring step, [2, B, N_kv, S /
    c, D], and merge the result into ``accumulated``, [attention, log-sum-exp].

    The rank's own block, which every query sees, comes first. Keys and values may have fewer heads,
    shared by groups of queries.
    """
    if not accumulated and turn.partial:  # no rectangle has all queries
        accumulated += [
            torch.zeros_like(q, dtype=sum_dtype(q.dtype)),
            q.new_full(q.shape[:3], -math.inf, dtype=sum_dtype(q.dtype)),
        ]
    for sight in turn.tiles(q.shape[2]):
        part, part_lse = _attend(sight.of(q), *sight.keys_values(block), causal=sight.causal, near=sight.near)
        if not accumulated:
            accumulated += [part.to(sum_dtype(q.dtype), copy=True), part_lse.clone()]
        else:
            out, lse = accumulated
            _merge(sight.of(out), sight.of(lse), part, part_lse)


def block_gradient(
    gradient: Tensor, q: Tensor, block: Tensor, result: list[Tensor], into: tuple[Tensor, Tensor], turn: RingStep
) -> None:
    """Add the gradients of queries and of the block of a ring step to ``into``. result: attention
    and log-sum-exp over all blocks; nothing else of the other blocks is needed."""
    of_queries, of_block = into
    for sight in turn.tiles(q.shape[2]):
        out, lse = (sight.of(t) for t in result)
        dq, dk, dv = _attend_backward(
            sight.of(gradient), sight.of(q), *sight.keys_values(block), out, lse, causal=sight.causal, near=sight.near
        )
        of_q, (of_k, of_v) = sight.of(of_queries), sight.keys_values(of_block)
        of_q += dq
        of_k += dk
        of_v += dv


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts from all ranks are summed."""
    return torch.float32 if dtype in FLASH else dtype


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over two sets of keys into ``out`` and ``lse``, in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp()[..., None]).add_(part * (part_lse - both).exp()[..., None])
    lse.copy_(both)


def _expanded(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat key/value heads to the number of query heads."""
    group = heads // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, near: SlidingWindow | None = None
) -> tuple[Tensor, Tensor]:
    """Run torch's fused kernels of ``scaled_dot_product_attention`` and return the result and its
    log-sum-exp: [B, N, S, D] and [B, N, S]. On a GPU no fused kernel has a window within a ring."""
    ops, mask = torch.ops.aten, near and near.mask(q, k)
    if mask is not None:
        k, v = _expanded(k, v, q.shape[1])
        if q.is_cuda:
            return plain_attention(q, k, v, causal=False, mask=mask)
        return ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)
    if q.is_cuda and q.dtype in FLASH:
        return ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    k, v = _expanded(k, v, q.shape[1])
    if not q.is_cuda:
        return ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if q.dtype == torch.float64:
        return plain_attention(q, k, v, causal=causal)
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.narrow(2, 0, q.shape[2])  # the kernel pads lse


def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
    near: SlidingWindow | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients through one block from output and log-sum-exp over all blocks; the softmax
    needs nothing else of the other blocks."""
    kv_heads, ops, mask = k.shape[1], torch.ops.aten, near and near.mask(q, k)
    if mask is None and q.is_cuda and q.dtype in FLASH:
        none, lengths = torch.empty(0, dtype=torch.uint64, device=q.device), (q.shape[2], k.shape[2])
        return ops._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, none, none
        )
    k, v = _expanded(k, v, q.shape[1])
    if not q.is_cuda:
        dq, dk, dv = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, attn_mask=mask
        )
    elif q.dtype == torch.float64 or mask is not None:
        weights = attention_weights(q, k, lse, causal=causal, mask=mask)
        dq, dk, dv = plain_attention_backward(gradient, q, k, v, out, weights)
    else:
        # The kernel ignores the strides of ``out`` and reads [B, S, N, D], the layout that it wrote.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32)).contiguous()
        none = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = ops._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, padded, none, none, 0.0, [True, True, True, False], causal
        )
    if kv_heads == q.shape[1]:
        return dq, dk, dv
    dk, dv = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the results of the fused kernels where none exists (fp64 on a GPU), with all scores in
    memory."""
    scores = _scores(q, k, causal=causal, mask=mask)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attention_weights(q: Tensor, k: Tensor, lse: Tensor, *, causal: bool, mask: Tensor | None = None) -> Tensor:
    """Return the softmax of the scores, [B, N, queries, keys], from a log-sum-exp over all keys,
    including other blocks."""
    return (_scores(q, k, causal=causal, mask=mask) - lse[..., None]).exp()


def plain_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values (arXiv 2205.14135, appendix B.4)."""
    own = (gradient * out).sum(-1, keepdim=True)
    found = weights * (gradient @ v.transpose(2, 3) - own) / math.sqrt(q.shape[3])
    return found @ k, found.transpose(2, 3) @ q, weights.transpose(2, 3) @ gradient


def _scores(q: Tensor, k: Tensor, *, causal: bool, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores if mask is None else scores + mask

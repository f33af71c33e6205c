"""Attention over a sequence that several ranks share: Ulysses all-to-all (SP-2), ring attention (SP-3), and
one inside the other.

Every rank of a sequence-parallel group holds some tokens of every sample (``plait.core.layout.token_ranges``)
and computes everything but attention on them alone.

Ulysses (arXiv 2309.14509): tokens of this rank's part, all heads -> tokens of all parts, some heads;
attention; and back. Where key/value heads are fewer than ranks, a head goes to all the ranks whose query
heads use it.

Ring (arXiv 2310.01889): keys and values travel from rank to rank; every rank attends to each block as it
passes and merges the results by their log-sum-exp. The sequence is cut into twice as many chunks as ranks,
and a rank has one from the front and its mirror image from the end, so that the causal mask leaves all the
same work: with its own block plain causal attention, with an earlier rank's the first half of that block,
with a later rank's all of it for the second half of the queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from plait.train.comm.wire import Handle, NullWire, Wire


@dataclass(frozen=True)
class SequenceGroup:
    """One rank's wires for attention: heads are exchanged over ``ulysses``, keys and values travel along
    ``ring``."""

    ulysses: Wire
    ring: Wire


ALONE = SequenceGroup(NullWire(), NullWire())
FLASH = (torch.bfloat16, torch.float16)
"""What a GPU's flash attention takes, which is the only kernel there that shares key/value heads."""


# ---- Ulysses ----


def to_heads(q: Tensor, k: Tensor, v: Tensor, wire: Wire) -> tuple[Tensor, Tensor, Tensor]:
    """[S / u, B, N, D] of all heads -> [S, B, N / u, D] of this rank's; differentiable."""
    size, heads, kv_heads = wire.size, q.shape[2], k.shape[2]
    each, kv_each = heads // size, max(1, kv_heads // size)
    chosen = _chosen_heads(size, heads, kv_heads, q.device)
    parts = [q.unflatten(2, (size, each))]
    parts += [t.index_select(2, chosen).unflatten(2, (size, kv_each)) for t in (k, v)]
    packed = torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4).contiguous()  # [u, S / u, B, heads of one rank, D]
    whole: Tensor = _AllToAll.apply(packed, wire).flatten(0, 1)  # type: ignore[attr-defined]
    return whole.split([each, kv_each, kv_each], dim=2)  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _chosen_heads(size: int, heads: int, kv_heads: int, device: torch.device) -> Tensor:
    """The key/value heads that rank r's query heads use, r after r: a head may stand there more than once.
    Made once: a list that becomes a tensor on a GPU makes the host wait for it."""
    firsts = [rank * heads // size * kv_heads // heads for rank in range(size)]
    return torch.tensor([first + i for first in firsts for i in range(max(1, kv_heads // size))], device=device)


def to_tokens(o: Tensor, wire: Wire) -> Tensor:
    """[S, B, N / u, D] of this rank's heads -> [S / u, B, N, D]; differentiable."""
    parts: Tensor = _AllToAll.apply(o.unflatten(0, (wire.size, -1)).contiguous(), wire)  # type: ignore[attr-defined]
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Part r of [u, ...] goes to rank r; the parts that come stand in the order of ranks. Its own inverse,
    hence its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        result = torch.empty_like(parts)
        wire.start("all_to_all", result, parts).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        source = gradients[0].contiguous()
        result = torch.empty_like(source)
        ctx.wire.start("all_to_all", result, source).wait()
        return result, None


# ---- ring ----


def ring_attention(q: Tensor, k: Tensor, v: Tensor, wire: Wire, kept: list[Tensor] | None = None) -> Tensor:
    """Causal attention of [B, N, S / c, D] queries over the keys and values of all ranks; differentiable.

    Keys and values may have fewer heads, which the queries' groups share; that many travel. kept: takes
    result and log-sum-exp the first time, which are all that a second time needs of the other ranks.
    """
    found = kept or _around(q.detach(), k.detach(), v.detach(), wire)
    if kept is not None:
        kept[:] = found
    return _Ring.apply(q, k, v, *found, wire)  # type: ignore[no-any-return]


def _around(q: Tensor, k: Tensor, v: Tensor, wire: Wire) -> list[Tensor]:
    """[attention, log-sum-exp] over the blocks of all ranks."""
    block = torch.stack((k, v))
    out = lse = None
    for step in range(wire.size):
        following, flight = _rotate(block, wire) if step < wire.size - 1 else (block, None)
        owner = (wire.rank - step) % wire.size
        rows, columns = _visible(owner, wire.rank, q.shape[2])
        part, part_lse = _attend(
            q[:, :, rows], block[0][:, :, columns], block[1][:, :, columns], causal=owner == wire.rank
        )
        if out is None or lse is None:  # the first block is this rank's own, which every query sees
            out, lse = part.to(_sums(q.dtype), copy=True), part_lse.clone()
        else:
            _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        if flight is not None:
            flight.wait()
        block = following
    assert out is not None and lse is not None
    return [out.to(q.dtype), lse]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        ctx.save_for_backward(q, k, v, out, lse)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wire: Wire = ctx.wire
        gradient, block = gradients[0], torch.stack((k, v))
        sums = _sums(q.dtype)
        found = torch.zeros_like(q, dtype=sums)
        own = torch.zeros_like(block, dtype=sums)  # gradient of this rank's keys and values
        travelling = own  # of the block that is here, from the ranks it has passed
        for step in range(wire.size):
            following, flight = _rotate(block, wire) if step < wire.size - 1 else (block, None)
            owner = (wire.rank - step) % wire.size
            rows, columns = _visible(owner, wire.rank, q.shape[2])
            dq, dk, dv = _attend_backward(
                gradient[:, :, rows],
                q[:, :, rows],
                block[0][:, :, columns],
                block[1][:, :, columns],
                out[:, :, rows],
                lse[:, :, rows],
                causal=owner == wire.rank,
            )
            found[:, :, rows] += dq
            if step == 1:
                travelling = torch.zeros_like(block)  # rounded once a rank: in fp32 it would be twice as long
            travelling[0][:, :, columns] += dk
            travelling[1][:, :, columns] += dv
            del dq, dk, dv
            if flight is not None:
                flight.wait()
            block = following
            if step:  # after the last step it goes home
                moved, flight = _rotate(travelling, wire)
                flight.wait()
                travelling = moved
        own += travelling
        return found.to(q.dtype), own[0].to(q.dtype), own[1].to(q.dtype), None, None, None


def _sums(dtype: torch.dtype) -> torch.dtype:
    """In which parts from all ranks are added up."""
    return torch.float32 if dtype in FLASH else dtype


def _rotate(block: Tensor, wire: Wire) -> tuple[Tensor, Handle]:
    """What the rank before has, as soon as the handle says so; this rank's goes to the next."""
    received = torch.empty_like(block)
    return received, wire.start("rotate", received, block)


def _visible(owner: int, rank: int, tokens: int) -> tuple[slice, slice]:
    """(queries of ``rank`` that see something of ``owner``'s block, what they all see of it); of its own
    block the causal part."""
    half = tokens // 2
    if owner == rank:
        return slice(0, tokens), slice(0, tokens)
    return (slice(0, tokens), slice(0, half)) if owner < rank else (slice(half, tokens), slice(0, tokens))


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Attention over two sets of keys from attention over each; in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp()[..., None]).add_(part * (part_lse - both).exp()[..., None])
    lse.copy_(both)


def _expanded(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """As many key/value heads as query heads."""
    group = heads // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's fused kernels behind ``scaled_dot_product_attention``, with the log-sum-exp they keep: [B, N,
    S, D] and [B, N, S]."""
    ops = torch.ops.aten
    if q.is_cuda and q.dtype in FLASH:
        return ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    k, v = _expanded(k, v, q.shape[1])
    if not q.is_cuda:
        return ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if q.dtype == torch.float64:
        return plain_attention(q, k, v, causal=causal)
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.narrow(2, 0, q.shape[2])  # the kernel pads it


def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through one block, given output and log-sum-exp over all blocks, which is all the softmax
    needs to know of the others."""
    kv_heads, ops = k.shape[1], torch.ops.aten
    if q.is_cuda and q.dtype in FLASH:
        none, lengths = torch.empty(0, dtype=torch.uint64, device=q.device), (q.shape[2], k.shape[2])
        return ops._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, none, none
        )
    k, v = _expanded(k, v, q.shape[1])
    if not q.is_cuda:
        dq, dk, dv = ops._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, k, v, out, lse, 0.0, causal)
    elif q.dtype == torch.float64:
        dq, dk, dv = plain_attention_backward(gradient, q, k, v, out, lse, causal=causal)
    else:
        # The kernel reads ``out`` as it wrote it, [B, S, N, D], whatever its strides say.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32)).contiguous()
        none = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = ops._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, padded, none, none, 0.0, [True, True, True, False], causal
        )
    if kv_heads == q.shape[1]:
        return dq, dk, dv
    return dq, *(t.unflatten(1, (kv_heads, -1)).sum(2) for t in (dk, dv))


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """What fused kernels give, where there is none (fp64 on a GPU), with all scores in memory."""
    scores = _scores(q, k, causal=causal)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def plain_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients (arXiv 2205.14135, appendix B.4)."""
    weights = (_scores(q, k, causal=causal) - lse[..., None]).exp()
    own = (gradient * out).sum(-1, keepdim=True)
    found = weights * (gradient @ v.transpose(2, 3) - own) / math.sqrt(q.shape[3])
    return found @ k, found.transpose(2, 3) @ q, weights.transpose(2, 3) @ gradient


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores

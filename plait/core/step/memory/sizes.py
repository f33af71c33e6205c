"""Bytes of the tensors that ops make and of the ops' working memory: numbers for one strategy,
arrays for many.

Names are those of ``plait.core.step.tensors``, which defines when each tensor is alive. Counts
follow Korthikanti 2022 (arXiv 2205.05198) with fused attention kernels. The workspace of a kernel
is not counted: it does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from plait.core.model.dropout import HASH_BYTES, Blocks
from plait.core.model.precision import MASTER, master_size
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import normed, widths
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.ops import Number, Path, at_least_one, exchanged
from plait.core.step.traffic import EXTRA_BYTES

Site: TypeAlias = str


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """One rank's part of a micro-batch, as numbers or arrays. tp, cp, ring: degrees. tokens: of one
    sequence. shares: sequences of every slice. sharded: number of tensor-parallel ranks among which
    the residual stream is divided (1 without sequence parallelism). ep: ranks that share out experts.
    routing_tp: tensor-parallel ranks that share out the tokens to be routed."""

    tp: Number
    cp: Number
    ring: Number
    tokens: Number
    shares: tuple[Number, ...]
    sharded: Number
    ep: int = 1
    routing_tp: int = 1

    @staticmethod
    def of(strategy: Strategy, *, batch: int, sequence: int) -> RankLoad:
        """Return the part of a rank under one strategy."""
        return RankLoad(
            tp=strategy.tp, cp=strategy.cp, ring=strategy.ring, tokens=sequence // strategy.cp,
            shares=tuple(slice_sizes(batch, strategy.p1)), sharded=strategy.tp if strategy.sequence_parallel else 1,
            ep=strategy.ep, routing_tp=strategy.tp if strategy.whole_experts else 1,
        )  # fmt: skip


class Sizes:
    """Sizes of a model's tensors on a rank. gpu: True if norms, attention and bf16 products use a
    GPU's kernels."""

    def __init__(self, spec: ModelSpec, rank: RankLoad, itemsize: int, *, gpu: bool) -> None:
        self.spec, self.rank, self.itemsize, self.gpu = spec, rank, itemsize, gpu
        self.master = master_size(itemsize)
        self._known: dict[tuple[Path, Site, int, int], SegmentSizes] = {}

    def of(self, branch: Path, site: Site, level: int, at: int) -> SegmentSizes:
        """Return the sizes for one path (attention or MLP) of a segment. level: how often its
        sequence has been halved. at: index of the slice."""
        key = branch, site, level, at
        if key not in self._known:
            made = {
                "attn": SharedAttentionSizes if np.any(self.rank.cp > 1) else AttentionSizes,
                "mlp": SharedExpertSizes if site == "moe" else MlpSizes,
                "experts": ExpertSizes,
            }
            self._known[key] = made.get(branch, SegmentSizes)(self, site, level, at)
        return self._known[key]


class SegmentSizes:
    """Sizes of one slice of any segment, in bytes. Shapes use the letters of ``ModelSpec``."""

    def __init__(self, sizes: Sizes, site: Site, level: int, at: int) -> None:
        self.gpu, self.site = sizes.gpu, site
        self.spec, self.itemsize, self.master, self.rank = sizes.spec, sizes.itemsize, sizes.master, sizes.rank
        self.sequence = self.rank.tokens >> level
        self.share = self.rank.shares[at]
        self.rows = self.share * self.sequence
        self.row = self.rows * self.itemsize
        self.narrow = self.itemsize < self.master
        self.rms = self.spec.family == "llama"

    def wide(self, size: Number) -> Number:
        """Return the bytes of a tensor of ``size`` bytes in the precision of sums (``master``)."""
        return size // self.itemsize * self.master

    # ---- streams ----

    @cached_property
    def full(self) -> Number:
        """The residual stream gathered over the whole sequence, [S, b, H], in bytes."""
        return self.row * self.spec.hidden

    @cached_property
    def stream(self) -> Number:
        """The residual stream on a rank, [S_local, b, H], in bytes."""
        return self.full // self.rank.sharded

    @cached_property
    def came(self) -> Number:
        """The incoming residual stream, in bytes; an up of a U-Transformer doubles its length."""
        return self.stream // (2 if self.site == "up" else 1)

    @cached_property
    def y_partial(self) -> Number:
        """The segment's contribution to the stream before its collective, [S, b, H], in bytes. For
        embedding rows, a rank has [S, b, H / tp] on average."""
        return self.full // (self.rank.tp if self.site == "embed" else 1)

    @cached_property
    def widened(self) -> Number:
        """The residual stream in the precision of sums (``master``), in bytes."""
        return self.wide(self.stream)

    @cached_property
    def hashed(self) -> Number:
        """Working memory of drawing a dropout mask for the incoming stream; 0 without dropout."""
        return self.stream // self.itemsize * HASH_BYTES // (2 if self.site == "up" else 1) if self.spec.dropout else 0

    @property
    def joining(self) -> Number:
        """Working memory in bytes of adding the previous segment's output to the stream: a bias, or
        the dropped and undropped output beside the mask. An outgoing stream is copied."""
        return self._joined(int(self.spec.has_bias))

    @property
    def placing(self) -> Number:
        """Working memory in bytes of adding looked-up rows of an embedding."""
        return self._joined(1 + self.spec.learned_positions)

    def _joined(self, biased: int) -> Number:
        beside = max(biased, bool(self.spec.dropout), self.site == "leave")
        return larger(self.came * (1 + beside), self.came * biased + self.hashed)

    @property
    def dropping(self) -> Number:
        """Working memory in bytes of dropout's gradient: drawing a mask, then three streams."""
        return larger(self.came + self.hashed, 3 * self.came)

    @property
    def doubling(self) -> Number:
        """Bytes of a stream of twice the length, with its inputs (the up of a U-Transformer)."""
        return self.stream * 5 // 2

    # ---- norms ----

    @cached_property
    def n_saved(self) -> Number:
        """Bytes of the tensors that a norm keeps besides its input and output. Without a fused
        kernel, torch keeps the normalised numbers and their conversion."""
        statistics = self.rows // self.rank.sharded * self.master * (1 if self.rms else 2)
        return statistics + self.widened * (self.rms and not self.gpu) * (2 if self.narrow else 1)

    @cached_property
    def norming(self) -> Number:
        """Working memory in bytes of a norm's forward."""
        return self.stream + self.n_saved + self.widened * (self.rms and not self.gpu and self.narrow)

    @cached_property
    def norm_back(self) -> Number:
        """Working memory in bytes of a norm's backward, or of other changes of the stream."""
        if self.rms and not self.gpu and self.site not in ("down", "up", "leave"):
            return self.widened * 4
        return self.stream * (3 if self.site == "down" else 1)

    # ---- ends ----

    def _vocabulary(self, itemsize: int) -> Number:
        """Return the bytes of a rank's part of the logits, [S, b, V / tp]."""
        return self.rows * (-(-self.spec.vocab // self.rank.tp)) * itemsize

    @cached_property
    def loss(self) -> Number:
        """Bytes of the loss's inputs per token: the target's column, two flags, three sums."""
        return self.rows * (10 + 3 * self.master)

    @cached_property
    def logits(self) -> Number:
        """Bytes of the logits in the precision of sums."""
        return self._vocabulary(self.master)

    @cached_property
    def g_logits(self) -> Number:
        """Bytes of the logits' gradient in compute precision."""
        return self._vocabulary(self.itemsize)

    @property
    def softmax(self) -> Number:
        """Bytes of the logits together with the tensor that they are converted from."""
        return self.logits + self.narrowing

    @property
    def narrowing(self) -> Number:
        """Additional bytes of the logits' gradient: 0 if it overwrites the logits, else its own
        size, if it is narrower."""
        return self.g_logits * self.narrow

    @property
    def product(self) -> Number:
        """Bytes of the temporary result of the head's weight gradient."""
        return self._product(-(-self.spec.vocab // self.rank.tp))

    def _product(self, width: Number) -> Number:
        """Return the bytes of a weight gradient's product that cannot be accumulated in place: in
        bf16 on a CPU, and in fp32."""
        each = self.master if self.gpu else self.itemsize + self.master
        return self.spec.hidden * width * each * self.narrow

    @property
    def scattering(self) -> Number:
        """Working memory in bytes of adding a gradient into rows of an embedding."""
        return self.full + self.widened * (self.itemsize < MASTER)


class BranchSizes(SegmentSizes):
    """Sizes between a first and a second weight, in bytes. z: output of the first weight; o: input
    of the second; saved: kept by autograd in addition. core, core_back: peak of forward and
    backward on top of what was alive, results included."""

    z: Number
    o: Number
    saved: Number
    core: Number
    core_back: Number
    branch: Any

    def _widths(self) -> tuple[Number, Number]:
        tp, letters = self.rank.tp, self.spec.letters
        return widths(self.branch, letters, tp, tp / at_least_one(tp // (letters.K // letters.D)))

    @property
    def first_product(self) -> Number:
        """Bytes of the temporary result of the gradient of a sublayer's first weight."""
        return self._product(_whole(self._widths()[0]))

    @property
    def second_product(self) -> Number:
        """Bytes of the temporary result of the gradient of a sublayer's second weight."""
        return self._product(_whole(self._widths()[1]))


class MlpSizes(BranchSizes):
    """Sizes of an MLP; a gated one keeps the gate's activation."""

    branch = "mlp"

    def __init__(self, sizes: Sizes, site: Site, level: int, at: int) -> None:
        super().__init__(sizes, site, level, at)
        inner, gated = self.row * self.spec.letters.F // self.rank.tp, self.spec.gated
        self.z, self.o, self.saved = inner * (1 + gated), inner, inner * gated
        self.core, self.core_back = inner * (1 + gated), 2 * inner * (1 + gated)


class SharedExpertSizes(MlpSizes):
    """Sizes of all shared experts, which are one MLP; 0 without shared experts."""

    branch = "moe"

    def __init__(self, sizes: Sizes, site: Site, level: int, at: int) -> None:
        super().__init__(sizes, site, level, at)
        inner = self.row * self.spec.letters.G // self.rank.tp
        gate = self.row * bool(self.spec.experts and self.spec.experts.shared_gate)  # a logit for each token
        gated = inner * bool(gate)
        self.z, self.o, self.saved = 2 * inner + gate, inner, inner + gated + gate
        self.core, self.core_back = 2 * inner + gated, 4 * inner + gated


class ExpertSizes(BranchSizes):
    """Sizes of routed experts, in bytes, if tokens are spread evenly over experts.

    logits: of the router. chosen, choices: experts of a token, as numbers of 8 bytes. weights: of a
    token's experts; row_weights: of rows. routes, all_routes: choices of this rank, and of all ranks
    of its sequences. routed: rows of experts; packed: with a factor behind each. Others: working
    memory of the ops that name them in ``core.step.tensors``.
    """

    branch = "experts"

    def __init__(self, sizes: Sizes, site: Site, level: int, at: int) -> None:
        super().__init__(sizes, site, level, at)
        experts, rank = self.spec.experts, self.rank
        assert experts is not None
        self.held = experts.count // rank.ep
        tokens, each, master = self.rows // rank.routing_tp, experts.per_token, self.master
        rows = round(tokens * experts.load)
        inner = rows * experts.ffn_hidden * self.itemsize // (rank.tp // rank.routing_tp)
        self.logits, self.chosen, self.choices = tokens * experts.count * master, tokens * each * 8, tokens * each * 8
        self.weights, self.row_weights = tokens * each * master, rows * master
        self.routes = tokens * (each + 1) * 4
        self.all_routes = self.routes * rank.cp * rank.routing_tp
        self.counts, self.load = 2 * experts.count * 8, self.share * experts.count * 8
        self.all_counts, self.row_numbers = self.counts * rank.ep, rows * 8
        self.routed, self.packed = rows * self.spec.hidden * self.itemsize, 0
        self.packed = self.routed + rows * EXTRA_BYTES
        one = self.spec.hidden * self.itemsize
        self.returned, self.packed_back = self.routed + one, self.packed + one + EXTRA_BYTES
        wide = tokens * self.spec.hidden * master * self.narrow
        self.scoring, self.scoring_back = wide + 3 * self.logits + self.choices, wide + 4 * self.logits
        self.counting = 5 * self.choices + (tokens * experts.count * 12 if experts.capacity else 0)
        self.packing = self.packed + self.routed
        self.z, self.o, self.saved = 2 * inner, inner, inner
        self.core, self.core_back = 2 * inner, 5 * inner
        self.second = inner + 2 * self.routed
        self.summing = self.summing_back = tokens * each * self.spec.hidden * self.itemsize

    def _product(self, width: Number) -> Number:
        """Return the bytes of the grouped product of a gradient of weights, before it is added; none
        in fp64, where each product adds to its expert's gradient."""
        return self.held * self.spec.hidden * width * self.itemsize * (self.itemsize < 8)

    def _widths(self) -> tuple[Number, Number]:
        width = self.spec.letters.I / (self.rank.tp // self.rank.routing_tp)
        return 2 * width, width


class AttentionSizes(BranchSizes):
    """Sizes of attention on one rank, in bytes. query: queries. kv: keys, or values. lse:
    log-sum-exp. turned: rotated queries and keys. within, within_kept: results of norms inside
    attention, and what these norms keep in addition."""

    branch = "attn"

    def __init__(self, sizes: Sizes, site: Site, level: int, at: int) -> None:
        super().__init__(sizes, site, level, at)
        letters, tp = self.spec.letters, self.rank.tp
        self.heads, self.kv_heads = self.spec.num_heads // tp, at_least_one(letters.K // letters.D // tp)
        self.query, self.kv = self.row * self.heads * letters.D, self.row * self.kv_heads * letters.D
        self.lse = self.rows * self.heads * self.master
        self.turned = (self.query + self.kv) * self.rms
        numbers, groups = normed(letters, tp, tp / at_least_one(tp // (letters.K // letters.D)))
        self.within, wide = _whole(numbers * self.row), not sizes.gpu
        self.within_kept = _whole(groups * self.row) // self.itemsize * self.master + (
            self.wide(self.within) * wide * (2 if self.narrow else 1)
        )
        self.z, self.o = self.query + 2 * self.kv, self.query
        self._attend()

    def _attend(self) -> None:
        q, kv, repeats = self.query, self.kv, self._repeats(self.heads, self.kv_heads)
        # Repeated keys and values are kept instead of rotated keys, which the caller still holds.
        repeated = (2 * q - kv * self.rms) * repeats
        self.saved = self.lse + self.turned + repeated + self.within_kept
        rotating = larger(3 * q, q + 3 * kv) * self.rms + self.within + self.within_kept
        forward, backward = self._blocks(self.heads, self.kv_heads, 1)
        self.core = larger(q + self.saved + kv * (self.rms * repeats) + forward, rotating)
        # The output's gradient (and a copy for fused kernels), those of queries, keys and values; then
        # these three packed into one tensor.
        each = kv + (q - kv) * repeats
        kernel = q * (2 if self.spec.attention_dropout else 3) + 2 * each + backward
        self.core_back = larger(kernel, q + 2 * (q + 2 * kv) + self.within - self.saved)

    def _repeats(self, heads: Number, kv_heads: Number) -> Number:
        """Return 1 if keys and values are copied for every query head, else 0. Only a GPU's kernels
        for bf16, and blockwise attention, share them between heads."""
        shares = bool(self.spec.attention_dropout) or (self.gpu and self.itemsize < MASTER)
        return (heads != kv_heads) * (not shares)

    def _blocks(self, heads: Number, kv_heads: Number, ulysses: Number) -> tuple[Number, Number]:
        """Return the working memory of blockwise attention, (forward, backward); 0 without dropout.
        heads, kv_heads: heads that a rank attends to, for the tokens of ``ulysses`` ranks."""
        if not self.spec.attention_dropout:
            return 0, 0
        told = self.spec.letters.D, self.itemsize

        def working(name: str) -> Number:
            def of(rows: int, group: int, sequence: int) -> int:
                return getattr(Blocks(rows, group, sequence, self.gpu), name)(*told)

            return _each(of, self.share * kv_heads, heads // kv_heads, self.sequence * ulysses)

        return working("forward"), working("backward")


class SharedAttentionSizes(AttentionSizes):
    """Sizes of context-parallel attention, in bytes.

    there: the queries, keys and values after the exchange of heads. block: keys and values that
    circulate on the ring. leaving: working memory of rotating queries, with tables of scattered
    positions, and packing. kernel: tensors that one kernel keeps; keys and values for every query
    head if the kernel needs them. first_block, next_block, block_back, own_back: attention to one
    block of a ring. rounding: conversion of sums to compute precision.
    """

    def _attend(self) -> None:
        ulysses, wide = self.rank.cp // self.rank.ring, self.wide
        self.there, _, self.block = exchanged(self.spec.letters, self.row, tp=self.rank.tp, ulysses=ulysses)
        here, kv_here = self.heads // ulysses, at_least_one(self.kv_heads // ulysses)
        forward, backward = self._blocks(here, kv_here, ulysses)
        query, lse, block, there, turned = self.query, self.lse, self.block, self.there, self.turned
        expanded = 2 * query * self._repeats(here, kv_here)
        tables = 2 * self.rank.tokens * self.spec.letters.D * self.itemsize * self.rms
        turning = 3 * query * self.rms + tables

        self.leaving = larger(turning + self.within, turned + there * (1 + (ulysses > 1)))
        self.leaving_back = query * (1 + (ulysses > 1))
        self.kernel = lse + expanded
        self.core, self.core_back = forward, larger(2 * there + expanded, there + backward)
        # Results of all blocks are added up in fp32 at least. In another rank's block half of the queries see
        # all, or all see half.
        self.sums_of_query, self.g_own = wide(query), wide(block)
        self.sums, self.found = self.sums_of_query + lse, query + lse
        self.first_block = query + lse + larger(expanded, self.sums)
        self.next_block = (query + lse) // 2 + larger(expanded, self.sums_of_query // 2)
        keys = larger(block, expanded) + expanded
        self.own_back = keys + query + self.sums_of_query
        self.block_back = keys + (query + self.sums_of_query) // 2
        self.rounding = (2 * query + block) * (self.itemsize < MASTER)
        back = larger(turning, turned + self.z + tables)
        if self.spec.letters.qk_norm:  # norms are recomputed for their gradients
            back = larger(back, turned + self.within_kept + 4 * self.sums_of_query)
        self.turning_back = back + there * (ulysses > 1)


def larger(a: Number, b: Number) -> Number:
    """Return the larger of two numbers, or of two arrays row by row."""
    return np.maximum(a, b) if np.ndarray in (type(a), type(b)) else max(a, b)


def _whole(value: Number) -> Number:
    """Return a number or array converted to integers."""
    return np.asarray(value, np.int64) if isinstance(value, np.ndarray) else int(value)


def _each(function: Callable[..., int], *values: Number) -> Number:
    """Return the function's value; if the arguments are arrays, an array of its value for every
    row."""
    columns = any(isinstance(value, np.ndarray) for value in values)
    return np.vectorize(function, otypes=[np.int64])(*values) if columns else function(*values)

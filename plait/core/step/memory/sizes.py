"""Bytes of the tensors that ops make, and of what they work with: numbers for one strategy, columns for many.

Names are those of ``plait.core.step.tensors``, which says when each is there. Counts follow Korthikanti 2022
(arXiv 2205.05198) with fused attention kernels. What a kernel's own workspace takes is not counted, which no
batch makes larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from plait.core.model.dropout import HASHED, Blocks
from plait.core.model.precision import MASTER, master_size
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import normed, widths
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.ops import Branch, Number, exchanged, one_at_least

Site: TypeAlias = str


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What one rank has of a micro-batch, as numbers or columns. tp, cp, ring: degrees. tokens: of a
    sequence. shares: sequences of every slice. sharded: ranks that tensor parallelism cuts streams over."""

    tp: Number
    cp: Number
    ring: Number
    tokens: Number
    shares: tuple[Number, ...]
    sharded: Number

    @staticmethod
    def of(strategy: Strategy, *, batch: int, sequence: int) -> RankLoad:
        """Of one strategy."""
        return RankLoad(
            tp=strategy.tp, cp=strategy.cp, ring=strategy.ring, tokens=sequence // strategy.cp,
            shares=tuple(slice_sizes(batch, strategy.p1)), sharded=strategy.tp if strategy.sequence_parallel else 1,
        )  # fmt: skip


class Sizes:
    """Of a model on a rank. gpu: whose kernels norms, attention and products of bf16 are."""

    def __init__(self, spec: ModelSpec, rank: RankLoad, itemsize: int, *, gpu: bool) -> None:
        self.spec, self.rank, self.itemsize, self.gpu = spec, rank, itemsize, gpu
        self.master = master_size(itemsize)
        self._known: dict[tuple[Branch, Site, int, int], SegmentSizes] = {}

    def of(self, branch: Branch, site: Site, level: int, at: int) -> SegmentSizes:
        """Of a branch of a segment whose sequence has been halved ``level`` times, in slice ``at``."""
        key = branch, site, level, at
        if key not in self._known:
            made = {"attn": SharedAttentionSizes if np.any(self.rank.cp > 1) else AttentionSizes, "mlp": MlpSizes}
            self._known[key] = made.get(branch, SegmentSizes)(self, site, level, at)
        return self._known[key]


class SegmentSizes:
    """Of any segment of one slice. Shapes in the letters of ``ModelSpec``."""

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
        """A tensor of that size, in which sums are made."""
        return size // self.itemsize * self.master

    # ---- streams ----

    @cached_property
    def full(self) -> Number:
        """[S, b, H]."""
        return self.row * self.spec.hidden

    @cached_property
    def stream(self) -> Number:
        """[S_local, b, H]."""
        return self.full // self.rank.sharded

    @cached_property
    def came(self) -> Number:
        """The stream as it comes in, which an up doubles."""
        return self.stream // (2 if self.site == "up" else 1)

    @cached_property
    def y_partial(self) -> Number:
        """[S, b, H]. Of an embedding's rows, a rank has [S, b, H / tp] on average."""
        return self.full // (self.rank.tp if self.site == "embed" else 1)

    @cached_property
    def widened(self) -> Number:
        """A stream in which sums are made."""
        return self.wide(self.stream)

    @cached_property
    def hashed(self) -> Number:
        """What drawing a mask of the stream that comes in takes."""
        return self.stream // self.itemsize * HASHED // (2 if self.site == "up" else 1) if self.spec.dropout else 0

    @property
    def joining(self) -> Number:
        """Adding what the segment before gives: a bias; what is dropped and what is not, beside the mask.
        What leaves is copied."""
        return self._joined(int(self.spec.has_bias))

    @property
    def placing(self) -> Number:
        """Likewise, of rows of a table."""
        return self._joined(1 + self.spec.learned_positions)

    def _joined(self, biased: int) -> Number:
        beside = max(biased, bool(self.spec.dropout), self.site == "leave")
        return larger(self.came * (1 + beside), self.came * biased + self.hashed)

    @property
    def dropping(self) -> Number:
        """The gradient of what dropout leaves: a mask that is drawn, then three streams."""
        return larger(self.came + self.hashed, 3 * self.came)

    @property
    def doubling(self) -> Number:
        """A stream of twice the length beside what it is made of."""
        return self.stream * 5 // 2

    # ---- norms ----

    @cached_property
    def n_saved(self) -> Number:
        """What a norm keeps beside what comes in and what it gives. Without a kernel of its own, torch keeps
        the normalised numbers, and what it converts."""
        statistics = self.rows // self.rank.sharded * self.master * (1 if self.rms else 2)
        return statistics + self.widened * (self.rms and not self.gpu) * (2 if self.narrow else 1)

    @cached_property
    def norming(self) -> Number:
        """The working set of a norm."""
        return self.stream + self.n_saved + self.widened * (self.rms and not self.gpu and self.narrow)

    @cached_property
    def norm_back(self) -> Number:
        """The working set of its backward, or of what else changes the stream."""
        if self.rms and not self.gpu and self.site not in ("down", "up", "leave"):
            return self.widened * 4
        return self.stream * (3 if self.site == "down" else 1)

    # ---- ends ----

    def _vocabulary(self, itemsize: int) -> Number:
        """[S, b, V / tp]."""
        return self.rows * (-(-self.spec.vocab // self.rank.tp)) * itemsize

    @cached_property
    def loss(self) -> Number:
        """What a token's loss is made of: its target's column, two flags, three sums."""
        return self.rows * (10 + 3 * self.master)

    @cached_property
    def logits(self) -> Number:
        """In which sums are made."""
        return self._vocabulary(self.master)

    @cached_property
    def g_logits(self) -> Number:
        """As the model computes."""
        return self._vocabulary(self.itemsize)

    @property
    def softmax(self) -> Number:
        """Logits beside what they are converted from."""
        return self.logits + self.narrowing

    @property
    def narrowing(self) -> Number:
        """Their gradient takes their place, unless it is narrower."""
        return self.g_logits * self.narrow

    @property
    def product(self) -> Number:
        """Of the head's weight gradient."""
        return self._product(-(-self.spec.vocab // self.rank.tp))

    def _product(self, width: Number) -> Number:
        """What a weight gradient takes that cannot be added in one go: the product, in bf16 on a CPU, and the
        same in fp32."""
        each = self.master if self.gpu else self.itemsize + self.master
        return self.spec.hidden * width * each * self.narrow

    @property
    def scattering(self) -> Number:
        """Adding a gradient into rows of an embedding."""
        return self.full + self.widened * (self.itemsize < MASTER)


class BranchSizes(SegmentSizes):
    """Of what stands between a first and a second weight. z: of the first weight's output; o: of the second's
    input; saved: kept by autograd besides. core, core_back: the most beyond what was there before, results
    included."""

    z: Number
    o: Number
    saved: Number
    core: Number
    core_back: Number
    branch: Any

    def _widths(self) -> tuple[Number, Number]:
        tp, letters = self.rank.tp, self.spec.letters
        return widths(self.branch, letters, tp, tp / one_at_least(tp // (letters.K // letters.D)))

    @property
    def first_product(self) -> Number:
        """Of the first weight's gradient."""
        return self._product(_whole(self._widths()[0]))

    @property
    def second_product(self) -> Number:
        """Of the second's."""
        return self._product(_whole(self._widths()[1]))


class MlpSizes(BranchSizes):
    """Of an MLP; a gated one keeps the gate's activation."""

    branch = "mlp"

    def __init__(self, sizes: Sizes, site: Site, level: int, at: int) -> None:
        super().__init__(sizes, site, level, at)
        inner, gated = self.row * self.spec.letters.F // self.rank.tp, self.spec.gated
        self.z, self.o, self.saved = inner * (1 + gated), inner, inner * gated
        self.core, self.core_back = inner * (1 + gated), 2 * inner * (1 + gated)


class AttentionSizes(BranchSizes):
    """Of attention on one rank. query, kv: queries; keys, or values. lse: log-sum-exp. turned: rotated
    queries and keys. within, within_kept: results of norms within, and what these keep besides."""

    branch = "attn"

    def __init__(self, sizes: Sizes, site: Site, level: int, at: int) -> None:
        super().__init__(sizes, site, level, at)
        letters, tp = self.spec.letters, self.rank.tp
        self.heads, self.kv_heads = self.spec.num_heads // tp, one_at_least(letters.K // letters.D // tp)
        self.query, self.kv = self.row * self.heads * letters.D, self.row * self.kv_heads * letters.D
        self.lse = self.rows * self.heads * self.master
        self.turned = (self.query + self.kv) * self.rms
        numbers, groups = normed(letters, tp, tp / one_at_least(tp // (letters.K // letters.D)))
        self.within, wide = _whole(numbers * self.row), not sizes.gpu
        self.within_kept = _whole(groups * self.row) // self.itemsize * self.master + (
            self.wide(self.within) * wide * (2 if self.narrow else 1)
        )
        self.z, self.o = self.query + 2 * self.kv, self.query
        self._attend()

    def _attend(self) -> None:
        q, kv, repeats = self.query, self.kv, self._repeats(self.heads, self.kv_heads)
        # Repeated keys and values are kept in the place of rotated keys, which the caller still holds.
        repeated = (2 * q - kv * self.rms) * repeats
        self.saved = self.lse + self.turned + repeated + self.within_kept
        rotating = larger(3 * q, q + 3 * kv) * self.rms + self.within + self.within_kept
        forward, backward = self._blocks(self.heads, self.kv_heads, 1)
        self.core = larger(q + self.saved + kv * (self.rms * repeats) + forward, rotating)
        # The output's gradient, for fused kernels a copy of it, and those of queries, keys and values; then
        # those side by side.
        each = kv + (q - kv) * repeats
        kernel = q * (2 if self.spec.attention_dropout else 3) + 2 * each + backward
        self.core_back = larger(kernel, q + 2 * (q + 2 * kv) + self.within - self.saved)

    def _repeats(self, heads: Number, kv_heads: Number) -> Number:
        """Whether keys and values are copied for every query head: only a GPU's kernels for bf16 share them,
        and attention in blocks."""
        shares = bool(self.spec.attention_dropout) or (self.gpu and self.itemsize < MASTER)
        return (heads != kv_heads) * (not shares)

    def _blocks(self, heads: Number, kv_heads: Number, ulysses: Number) -> tuple[Number, Number]:
        """Working sets of attention in blocks, forward and backward; nothing without dropout. heads,
        kv_heads: that a rank attends to, of the tokens of ``ulysses``."""
        if not self.spec.attention_dropout:
            return 0, 0
        told = self.spec.letters.D, self.itemsize

        def working(name: str) -> Number:
            def of(rows: int, group: int, sequence: int) -> int:
                return getattr(Blocks(rows, group, sequence, self.gpu), name)(*told)

            return _each(of, self.share * kv_heads, heads // kv_heads, self.sequence * ulysses)

        return working("forward"), working("backward")


class SharedAttentionSizes(AttentionSizes):
    """Of attention that ranks share. there, block: as ``exchanged``. leaving: rotating queries, with tables
    of scattered positions, and packing. kernel: what one keeps, keys and values for every query head if it
    wants that. first_block, next_block, block_back, own_back: attention to a block of a ring. rounding: of
    sums to what the model computes in."""

    def _attend(self) -> None:
        ulysses, wide = self.rank.cp // self.rank.ring, self.wide
        self.there, _, self.block = exchanged(self.spec.letters, self.row, tp=self.rank.tp, ulysses=ulysses)
        here, kv_here = self.heads // ulysses, one_at_least(self.kv_heads // ulysses)
        forward, backward = self._blocks(here, kv_here, ulysses)
        query, lse, block, there, turned = self.query, self.lse, self.block, self.there, self.turned
        expanded = 2 * query * self._repeats(here, kv_here)
        tables = 2 * self.rank.tokens * self.spec.letters.D * self.itemsize * self.rms
        turning = 3 * query * self.rms + tables

        self.leaving = larger(turning + self.within, turned + there * (1 + (ulysses > 1)))
        self.leaving_back = query * (1 + (ulysses > 1))
        self.kernel = lse + expanded
        self.core, self.core_back = forward, larger(2 * there + expanded, there + backward)
        # What is found of each block is added up in fp32 at least. Of another's block half of the queries see
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
        if self.spec.letters.qk_norm:  # computed again for their gradients
            back = larger(back, turned + self.within_kept + 4 * self.sums_of_query)
        self.turning_back = back + there * (ulysses > 1)


def larger(a: Number, b: Number) -> Number:
    """Of two numbers, or row by row of columns."""
    return np.maximum(a, b) if np.ndarray in (type(a), type(b)) else max(a, b)


def _whole(value: Number) -> Number:
    """As integers."""
    return np.asarray(value, np.int64) if isinstance(value, np.ndarray) else int(value)


def _each(function: Callable[..., int], *values: Number) -> Number:
    """Of every row, where there are columns."""
    columns = any(isinstance(value, np.ndarray) for value in values)
    return np.vectorize(function, otypes=[np.int64])(*values) if columns else function(*values)

"""Bytes of the tensors that a segment of one slice makes: what ``step.memory.activations`` walks with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from plait.core.model.dropout import HASHED, Blocks
from plait.core.model.precision import MASTER, master_size
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.ops import exchanged
from plait.core.step.segments import SegmentGraph, SegmentOp


class Sizes:
    """Bytes of the tensors of one slice. Rows: tokens of this rank; streams are sharded where tensor
    parallelism shards the sequence. gpu: whose kernels norms, attention and products of bf16 are; workspaces
    inside a kernel are not counted, which no batch makes larger."""

    def __init__(
        self,
        spec: ModelSpec,
        strategy: Strategy,
        graph: SegmentGraph,
        batch: int,
        sequence: int,
        itemsize: int,
        gpu: bool,
    ) -> None:
        self.spec, self.strategy, self.graph, self.itemsize, self.gpu = spec, strategy, graph, itemsize, gpu
        self.master = master_size(itemsize)
        self.shares = slice_sizes(batch, strategy.p1)
        self.tokens = sequence // strategy.cp
        self.sharded = strategy.tp if graph.sequence_parallel else 1

    def rows(self, op: SegmentOp) -> int:
        """Tokens of a slice where the segment works."""
        return self.shares[op.slice] * (self.tokens >> self.graph.level(self.spec, op.site, op.layer))

    def full(self, op: SegmentOp) -> int:
        """[S, b, H]."""
        return self.rows(op) * self.spec.hidden * self.itemsize

    def stream(self, op: SegmentOp) -> int:
        """[S_local, b, H]."""
        return self.full(op) // self.sharded

    def looked_up(self, op: SegmentOp) -> int:
        """[S, b, H / tp]: the rows of an embedding that a rank has of those asked for, on average."""
        return self.full(op) // self.strategy.tp

    def head(self, op: SegmentOp, itemsize: int) -> int:
        """[S, b, V / tp]."""
        return self.rows(op) * (self.strategy.padded_vocab(self.spec) // self.strategy.tp) * itemsize

    def loss(self, op: SegmentOp) -> int:
        """What a token's loss is made of: its target's column, two flags, three sums."""
        return self.rows(op) * (10 + 3 * self.master)

    def normed(self, op: SegmentOp) -> int:
        """What a norm keeps beside what comes in and what it gives."""
        rms = self.spec.family == "llama"
        statistics = self.rows(op) // self.sharded * self.master * (1 if rms else 2)
        # Without a kernel of its own, torch keeps the normalised numbers, and what it converts.
        return statistics + self.widened(op) * (rms and not self.gpu) * (1 if self.itemsize == self.master else 2)

    def normed_within(self, row: int) -> Within:
        """What norms within attention's core take. row: bytes of one number of every token."""
        numbers, groups = self.strategy.normed(self.spec)
        given, statistics = int(numbers * row), int(groups * row) // self.itemsize * self.master
        wide = given // self.itemsize * self.master * (not self.gpu)
        return Within(given, statistics + wide * (1 if self.itemsize == self.master else 2))

    def wide(self, size: int) -> int:
        """A tensor of that size, in which sums are made."""
        return size // self.itemsize * self.master

    def widened(self, op: SegmentOp) -> int:
        """A stream in which sums are made."""
        return self.wide(self.stream(op))

    def hashed(self, op: SegmentOp) -> int:
        """What drawing a mask of a stream takes."""
        return self.stream(op) // self.itemsize * HASHED if self.spec.dropout else 0

    def product(self, op: SegmentOp) -> int:
        """What W takes where it cannot add to the gradient in one go: the product, in bf16 on a CPU, and the
        same in fp32."""
        spec, tp = self.spec, self.strategy.tp
        if self.itemsize == self.master:
            return 0
        each = self.master if self.gpu else self.itemsize + self.master
        if op.site == "head":
            return self.strategy.padded_vocab(spec) // tp * spec.hidden * each
        attends = op.site == "attn" or (op.site == "block" and op.part < 2)
        first, second = self.strategy.widths(spec, "attn" if attends else "mlp")
        return spec.hidden * int(first if op.part % 2 else second) * each

    def branches(self, op: SegmentOp) -> list[Core]:
        """What stands between a first and a second weight."""
        row = self.rows(op) * self.itemsize
        return [core(self, row, op) for core in {"attn": [_attention], "mlp": [_mlp]}.get(op.site, [_attention, _mlp])]

    def shared(self, op: SegmentOp) -> Shared:
        """What attention makes that other ranks have a part in."""
        return Shared.of(self, op)

    def larger(self, a: int, b: int) -> int:
        """Of two sizes."""
        return max(a, b)


class Within(NamedTuple):
    """Bytes of norms within a core. given: of their results. kept: beside what comes in, and these."""

    given: int
    kept: int


@dataclass(frozen=True)
class Core:
    """Bytes. z: of the first weight's output; o: of the second's input; saved: kept by autograd besides.
    forward, backward: the most beyond what was there before, results included. cheap: whether selective
    recomputation runs it again. Of attention that ranks share, only z counts: the rest is ``Shared``."""

    z: int
    o: int
    saved: int
    forward: int
    backward: int
    cheap: bool


def _mlp(sizes: Sizes, row: int, _op: SegmentOp) -> Core:
    inner = row * sizes.spec.ffn_hidden // sizes.strategy.tp
    if sizes.spec.gated:  # keeps the gate's activation
        return Core(2 * inner, inner, inner, 2 * inner, 4 * inner, True)
    return Core(inner, inner, 0, inner, 2 * inner, True)


def _attention(sizes: Sizes, row: int, op: SegmentOp) -> Core:
    heads, kv_heads = _heads(sizes)
    q, kv = row * heads * sizes.spec.head_size, row * kv_heads * sizes.spec.head_size
    blocks = _blocks(sizes, op, heads, kv_heads, 1)
    rotary, repeats = sizes.spec.family == "llama", _repeats(sizes, heads, kv_heads)
    lse = sizes.rows(op) * heads * sizes.master
    # Repeated keys and values are kept in the place of rotated keys, which the caller still holds.
    turned, repeated = (q + kv) * rotary, (2 * q - kv * rotary) * repeats
    within = sizes.normed_within(row)
    saved = lse + turned + repeated + within.kept
    rotating = max(3 * q, q + 3 * kv) * rotary + within.given + within.kept
    forward = max(q + saved + kv * (rotary and repeats) + blocks.forward, rotating)
    # The output's gradient, for fused kernels a copy of it, and those of queries, keys and values; then those
    # side by side.
    kernel = q * (2 if blocks.backward else 3) + 2 * (q if repeats else kv) + blocks.backward
    backward = max(kernel, q + 2 * (q + 2 * kv) + within.given - saved)
    return Core(q + 2 * kv, q, saved, forward, backward, False)


def _heads(sizes: Sizes) -> tuple[int, int]:
    """Of a rank: of queries, of keys and values."""
    return sizes.spec.num_heads // sizes.strategy.tp, max(1, sizes.spec.num_kv_heads // sizes.strategy.tp)


def _repeats(sizes: Sizes, heads: int, kv_heads: int) -> bool:
    """Whether keys and values are copied for every query head: only a GPU's kernels for bf16 share them, and
    attention in blocks."""
    return heads != kv_heads and not sizes.spec.attention_dropout and not (sizes.gpu and sizes.itemsize < MASTER)


class _Working(NamedTuple):
    """Bytes of a block of attention with dropout."""

    forward: int
    backward: int


def _blocks(sizes: Sizes, op: SegmentOp, heads: int, kv_heads: int, ulysses: int) -> _Working:
    """Nothing without dropout. heads, kv_heads: that a rank attends to, of the tokens of ``ulysses``."""
    if not sizes.spec.attention_dropout:
        return _Working(0, 0)
    sequence = (sizes.tokens >> sizes.graph.level(sizes.spec, op.site, op.layer)) * ulysses
    blocks = Blocks(sizes.shares[op.slice] * kv_heads, heads // kv_heads, sequence, sizes.gpu)
    size, itemsize = sizes.spec.head_size, sizes.itemsize
    return _Working(blocks.forward(size, itemsize), blocks.backward(size, itemsize))


@dataclass(frozen=True)
class Shared:
    """Bytes of attention that ranks share. first: of the first weight's output. query: of queries, and of
    what attention gives. there, block: as ``exchanged``. lse: log-sum-exp. turned: rotated queries and
    keys. turning: working set of rotating queries, with the tables of scattered positions. expanded: keys and
    values for every query head, where kernels want that. forward, backward: working sets of attention in
    blocks. within, within_kept: of norms within."""

    first: int
    query: int
    there: int
    block: int
    lse: int
    turned: int
    turning: int
    tables: int
    expanded: int
    forward: int
    backward: int
    within: int
    within_kept: int

    @staticmethod
    def of(sizes: Sizes, op: SegmentOp) -> Shared:
        """Of one slice."""
        spec, strategy, rows = sizes.spec, sizes.strategy, sizes.rows(op)
        row = rows * sizes.itemsize
        heads, kv_heads = _heads(sizes)
        query, kv = row * heads * spec.head_size, row * kv_heads * spec.head_size
        ulysses, (there, _, block) = strategy.cp // strategy.ring, exchanged(spec, strategy, row)
        here, kv_here = heads // ulysses, max(1, kv_heads // ulysses)
        blocks = _blocks(sizes, op, here, kv_here, ulysses)
        rotary = spec.family == "llama"
        within = sizes.normed_within(row)
        tables = 2 * sizes.tokens * spec.head_size * sizes.itemsize
        return Shared(
            first=query + 2 * kv,
            query=query,
            there=there,
            block=block,
            lse=rows * heads * sizes.master,
            turned=(query + kv) * rotary,
            turning=(3 * query + tables) * rotary,
            tables=tables * rotary,
            expanded=2 * query * _repeats(sizes, here, kv_here),
            forward=blocks.forward,
            backward=blocks.backward,
            within=within.given,
            within_kept=within.kept,
        )

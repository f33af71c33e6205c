"""Bytes of the tensors that a segment of one slice makes: what ``plait.plan.activations`` walks with."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.attention_ops import AttentionTraffic
from plait.core.model import ModelSpec
from plait.core.segments import SegmentGraph, SegmentOp
from plait.core.strategy import Strategy, slice_sizes

MASTER = 4
"""Bytes of a gradient, a master weight or a moment, unless the model itself computes in more."""


class Sizes:
    """Bytes of the tensors of one slice. Rows: tokens of this rank; streams are sharded where tensor
    parallelism shards the sequence."""

    def __init__(
        self,
        spec: ModelSpec,
        strategy: Strategy,
        graph: SegmentGraph,
        batch: int,
        sequence: int,
        itemsize: int,
        fused: bool,
    ) -> None:
        self.spec, self.strategy, self.graph, self.itemsize, self.fused = spec, strategy, graph, itemsize, fused
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

    def head(self, op: SegmentOp) -> int:
        """[S, b, V / tp], in fp32 at least."""
        return self.rows(op) * self.strategy.padded_vocab(self.spec) // self.strategy.tp * max(MASTER, self.itemsize)

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


@dataclass(frozen=True)
class Core:
    """Bytes. z: of the first weight's output; o: of the second's input; saved: kept by autograd besides;
    forward, backward: working sets beyond all these and the gradients of z and o. cheap: whether selective
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
        return Core(2 * inner, inner, inner, 0, inner, True)
    return Core(inner, inner, 0, 0, 0, True)


def _attention(sizes: Sizes, row: int, op: SegmentOp) -> Core:
    spec, strategy = sizes.spec, sizes.strategy
    heads, kv_heads = spec.num_heads // strategy.tp, max(1, spec.num_kv_heads // strategy.tp)
    q, kv = row * heads * spec.head_size, row * kv_heads * spec.head_size
    lse = sizes.rows(op) * heads * max(MASTER, sizes.itemsize)
    grouped = heads != kv_heads
    saved, forward, backward = lse, 0, q + 2 * kv
    if spec.family == "llama":  # rotated queries and keys
        forward, backward = 2 * q, backward + 2 * q
        saved += q + (0 if grouped else kv)
    if grouped:
        saved, backward = saved + 2 * q, backward + 2 * q
    return Core(q + 2 * kv, q, saved, forward, backward, False)


@dataclass(frozen=True)
class Shared:
    """Bytes of attention that ranks share. first: of the first weight's output. query: of queries, and of
    what attention gives. there, block: as ``AttentionTraffic``. lse: log-sum-exp. turned: rotated queries and
    keys. turning: working set of rotating queries, with the tables of scattered positions. expanded: keys and
    values for every query head, where kernels want that."""

    first: int
    query: int
    there: int
    block: int
    lse: int
    turned: int
    turning: int
    tables: int
    expanded: int

    @staticmethod
    def of(sizes: Sizes, op: SegmentOp) -> Shared:
        """Of one slice."""
        spec, strategy, rows = sizes.spec, sizes.strategy, sizes.rows(op)
        row = rows * sizes.itemsize
        heads, kv_heads = spec.num_heads // strategy.tp, max(1, spec.num_kv_heads // strategy.tp)
        query, kv = row * heads * spec.head_size, row * kv_heads * spec.head_size
        held, ulysses = AttentionTraffic.of(spec, strategy, row), strategy.cp // strategy.ring
        rotary = spec.family == "llama"
        tables = 2 * sizes.tokens * spec.head_size * sizes.itemsize
        return Shared(
            first=query + 2 * kv,
            query=query,
            there=held.there,
            block=held.block,
            lse=rows * heads * max(MASTER, sizes.itemsize),
            turned=(query + kv) * rotary,
            turning=(3 * query + tables) * rotary,
            tables=tables * rotary,
            expanded=2 * query * (heads // ulysses != max(1, kv_heads // ulysses)),
        )

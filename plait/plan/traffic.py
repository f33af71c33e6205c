"""What tensor and sequence parallelism send, in closed form: the counterpart of what the runtime's wires
carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.record.records import sent_bytes
from plait.core.step.attention_ops import AttentionTraffic
from plait.core.step.segments import SegmentGraph, SegmentOp
from plait.core.step.stages import Stage, stage_weights

STATISTICS = 3
"""Numbers of a token that vocabulary-parallel loss gathers."""


@dataclass(frozen=True, kw_only=True)
class SegmentTraffic:
    """The collectives of a segment list, one by one.

    shares: sequences of every slice. sequence: tokens of a rank of cp. loss_itemsize: of the loss's
    statistics.
    """

    model: ModelSpec
    strategy: Strategy
    graph: SegmentGraph
    shares: Sequence[int]
    sequence: int
    itemsize: int
    loss_itemsize: int = 4

    def tokens(self, op: SegmentOp) -> int:
        """Of a slice, where its segment works."""
        return self.shares[op.slice] * (self.sequence >> self.graph.level(self.model, op.site, op.layer))

    def whole(self, op: SegmentOp) -> int:
        """Bytes of the tensor that an op's collective gathers or reduces; of embedding rows, which depend on
        the tokens, at most."""
        tokens, tp = self.tokens(op), self.strategy.tp
        row = self.model.hidden * self.itemsize
        if op.site == "embed" and op.kind == "R":
            return min(tokens, self.strategy.padded_vocab(self.model) // tp) * row * tp  # distinct rows of one rank
        if op.site == "head" and op.kind == "F":
            return tp * STATISTICS * tokens * self.loss_itemsize
        if op.kind == "C":  # row blocks
            return slice_sizes(tokens, self.graph.parts(op.site, "C"))[op.part] * row
        return tokens * row // (self.graph.p2 if op.kind == "R" else 1)  # R: column blocks

    def sent(self, op: SegmentOp) -> int:
        """Bytes that a rank sends for an op's collective; 0 if it has none."""
        kind = self.graph.collective(op)
        if kind in ("all_to_all", "rotate"):
            return sent_bytes(kind, self.exchanged(op), self.strategy.cp // self.strategy.ring)
        return sent_bytes(kind, self.whole(op), self.strategy.tp) if kind else 0

    def exchanged(self, op: SegmentOp) -> int:
        """Bytes that a rank holds of what it exchanges after an op of attention."""
        row = self.tokens(op) * self.itemsize
        return AttentionTraffic.of(self.model, self.strategy, row).of_kind(op.kind)


def micro_batch_bytes(
    model: ModelSpec,
    strategy: Strategy,
    stage: Stage,
    *,
    batch: int,
    sequence: int,
    itemsize: int,
    loss_itemsize: int = 4,
) -> dict[str, int]:
    """Bytes that one rank of a stage sends for a micro-batch of ``batch`` x ``sequence``, by axis, as rings
    would.

    tp: the collectives of the segment list but for ``rows``, the exchange of embedding rows, which depends on
    the tokens: at most that. ulysses, ring: of attention. loss_itemsize: of the loss's statistics (8 for fp64
    models).
    """
    sent: Counter[str] = Counter(dict.fromkeys(("tp", "rows", "ulysses", "ring"), 0))
    graph = SegmentGraph.of(model, strategy, stage)
    traffic = SegmentTraffic(
        model=model, strategy=strategy, graph=graph, shares=slice_sizes(batch, strategy.p1),
        sequence=sequence // strategy.cp, itemsize=itemsize, loss_itemsize=loss_itemsize,
    )  # fmt: skip
    for op in graph.ops():
        axis = {"all_to_all": "ulysses", "rotate": "ring"}.get(graph.collective(op) or "", "tp")
        sent["rows" if op.site == "embed" and op.kind == "R" else axis] += traffic.sent(op)
    return dict(sent)


def replicated_numbers(model: ModelSpec, strategy: Strategy, stage: Stage) -> int:
    """Numbers whose gradients the ranks of a tensor-parallel group add up at the end of a step, a place for
    every set of ranks that hold the same ones: key/value heads that several hold; where the sequence is cut,
    norms and biases after it."""
    copied = strategy.kv_replicas(model) > 1
    return sum(
        weight.numbers(model.letters)
        for _, weight in stage_weights(model, stage)
        if (weight.cut == "kv" and copied) or (weight.summed and strategy.sequence_parallel)
    )

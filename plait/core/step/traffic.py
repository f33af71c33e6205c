"""What tensor and sequence parallelism send, in closed form: the counterpart of what the runtime's wires
carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Site
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.record.records import sent_bytes
from plait.core.step.ops import Kind, SendSizes, exchanged, send_of
from plait.core.step.segments import LAYERS, SegmentGraph, SegmentOp
from plait.core.step.stages import Stage, placed_sites, rows_of


@dataclass(frozen=True, kw_only=True)
class SegmentTraffic:
    """The collectives of a segment list, one by one.

    shares: sequences of every slice. sequence: tokens of a rank of cp. loss_itemsize: of the loss's
    statistics (8 for fp64 models).
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
        """Bytes that an op's collective gathers or reduces, or that a rank holds of what it exchanges."""
        tokens, parts = self.tokens(op), self.graph.parts(op.site, Kind.FIRST_GRAD)
        tp, ulysses = self.strategy.tp, self.strategy.cp // self.strategy.ring
        there, back, block = exchanged(self.model.letters, tokens * self.itemsize, tp=tp, ulysses=ulysses)
        return send_of(op.site, op.kind).nbytes(
            SendSizes(
                tokens=tokens, rows=slice_sizes(tokens, parts)[op.part] if op.kind == Kind.FIRST_GRAD else tokens,
                row=self.model.hidden * self.itemsize, columns=self.graph.p2 if op.site in LAYERS else 1,
                tp=tp, words=self.strategy.padded_vocab(self.model) // tp,
                number=self.loss_itemsize, there=there, back=back, block=block,
            )
        )  # fmt: skip

    def sent(self, op: SegmentOp) -> int:
        """Bytes that a rank sends for an op's collective; 0 if it has none."""
        kind = self.graph.collective(op)
        if kind is None:
            return 0
        shared = kind in ("all_to_all", "rotate")
        ranks = self.strategy.cp // self.strategy.ring if shared else self.strategy.tp
        return sent_bytes(kind, self.whole(op), ranks)


def micro_batch_bytes(traffic: SegmentTraffic) -> dict[str, int]:
    """Bytes that one rank of a stage sends for a micro-batch, by axis, as rings would.

    tp: the collectives of the segment list but for ``rows``, the exchange of embedding rows, which depends on
    the tokens: at most that. ulysses, ring: of attention.
    """
    sent: Counter[str] = Counter(dict.fromkeys(("tp", "rows", "ulysses", "ring"), 0))
    for op in traffic.graph.ops():
        if traffic.graph.collective(op):
            sent[send_of(op.site, op.kind).axis] += traffic.sent(op)
    return dict(sent)


def replicated_numbers(model: ModelSpec, strategy: Strategy, stage: Stage) -> int:
    """Numbers whose gradients the ranks of a tensor-parallel group add up at the end of a step, a place for
    every set of ranks that hold the same ones: key/value heads that several hold, norms of heads; where the
    sequence is cut, norms and biases after it."""
    copies, letters = {"kv": strategy.kv_replicas(model), "": strategy.tp}, model.letters
    cut = strategy.sequence_parallel and strategy.tp > 1
    times: Counter[Site] = Counter(at.site for at in placed_sites(model, stage))
    return sum(
        times[site] * row.numbers(letters)
        for site, rows in rows_of(model, embeds=stage.embeds).items()
        for row in rows
        if (row.sums == "always" and copies[row.cut] > 1) or (row.sums == "cut" and cut)
    )

"""What tensor and sequence parallelism send, in closed form: the counterpart of what the runtime's wires
carry."""

from __future__ import annotations

from collections import Counter

from plait.core.model import ModelSpec
from plait.core.segments import LAYERS, SegmentGraph
from plait.core.stages import Stage
from plait.core.strategy import Strategy, slice_sizes

STATISTICS = 3
"""Numbers of a token that vocabulary-parallel loss gathers."""


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
    shares, local = slice_sizes(batch, strategy.p1), sequence // strategy.cp
    for op in graph.ops():
        tokens = shares[op.slice] * (local >> graph.level(model, op.site, op.layer))
        if kind := graph.collective(op):
            whole = tokens * model.hidden * itemsize
            if op.site == "embed":
                distinct = min(tokens, strategy.padded_vocab(model) // strategy.tp)  # of one rank's share
                sent["rows"] += distinct * model.hidden * itemsize * (strategy.tp - 1)
                continue
            numbers = (
                strategy.tp * STATISTICS * tokens * loss_itemsize if op.site == "head" and op.kind == "F" else whole
            )
            if op.kind == "C":  # row blocks
                rows = slice_sizes(tokens, graph.parts(op.site, "C"))[op.part]
                numbers = rows * model.hidden * itemsize
            elif op.kind == "R":  # column blocks
                numbers = whole // graph.p2
            sent["tp"] += numbers * (strategy.tp - 1) // strategy.tp * (2 if kind == "all_reduce" else 1)
        if op.site in LAYERS and op.kind == "F" and op.site != "mlp":
            again = graph.again(op.site, op.layer)
            sent.update(
                _attention(model, strategy, tokens * itemsize, repeats="A" in again and graph.recompute == "full")
            )
    return dict(sent)


def replicated_numbers(model: ModelSpec, strategy: Strategy, stage: Stage) -> int:
    """Numbers whose gradients the ranks of a tensor-parallel group add up at the end of a step, a place for
    every set of ranks that hold the same ones: key/value heads that several hold; where the sequence is cut,
    norms and biases after it."""
    norm, heads = model.hidden * (1 + model.has_bias), strategy.kv_replicas(model)
    numbers = 0
    if heads > 1:
        numbers += len(stage.layers) * 2 * model.num_kv_heads * model.head_size * model.hidden
    if strategy.sequence_parallel:
        numbers += norm if stage.heads else 0
        numbers += model.max_sequence * model.hidden if stage.embeds and model.learned_positions else 0
        sublayers = 1 if model.parallel_block else 2
        numbers += len(stage.layers) * sublayers * (norm + model.hidden * model.has_bias)
    return numbers


def _attention(model: ModelSpec, strategy: Strategy, row: int, *, repeats: bool) -> dict[str, int]:
    """Of one attention core, forward and backward. row: bytes of one number for each token."""
    ulysses, ring = strategy.cp // strategy.ring, strategy.ring
    heads, kv_heads = model.num_heads // strategy.tp, max(1, model.num_kv_heads // strategy.tp)
    kv_each = max(1, kv_heads // ulysses)
    there = row * model.head_size * (heads + 2 * kv_each * ulysses) * (ulysses - 1) // ulysses
    back = row * model.head_size * heads * (ulysses - 1) // ulysses
    # Round the ring go the heads that this rank attends to, of the tokens that its Ulysses group has; keys
    # and values, then also gradients.
    block = 2 * row * model.head_size * kv_each * ulysses
    return {"ulysses": (there + back) * (3 if repeats else 2), "ring": block * (ring - 1) * 3}

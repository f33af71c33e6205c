"""Costs of segment ops and their collectives, in seconds of the processor and of the link. Costs
are estimated from shapes (``segment_costs``) or measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Literal

from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Sublayer
from plait.core.parallel.strategy import Recompute, Strategy, slice_sizes
from plait.core.record.records import CP_KINDS
from plait.core.step.ops import (
    AGAIN,
    ATTENDS,
    ATTENTION_GRAD,
    SENDS,
    STATISTICS,
    Dims,
    Kind,
    OpStep,
    Path,
    Whole,
    exchanged,
    steps_of,
)
from plait.core.step.segments import LAYERS, SegmentGraph, SegmentOp, numbered_needs

# FLOP/s of a rank and bytes/s of its link before any measurement: a 2020s CPU core and 1 Gbit/s. Only
# their ratio matters, and only for the order of ops.
FLOPS, BANDWIDTH = 5e10, 1.25e8
ITEMSIZE = 4
FLOPS_PER_BYTE = 4.0
"""FLOPs that one byte of memory traffic counts as."""
LAYER_PASSES: dict[Kind, int] = {Kind.NORM: 4, Kind.NORM_RECOMPUTE: 2, Kind.NORM_BACKWARD: 8}
PASSES: dict[str, dict[Kind, int]] = {
    "embed": {Kind.ROW_FORWARD: 1, Kind.WGRAD: 1}, "head": {Kind.NORM: 4, Kind.NORM_BACKWARD: 4}
}  # fmt: skip
"""Reads and writes of the residual stream; the ends of the model differ from layers."""
BRANCHES: tuple[tuple[Literal["attn", "mlp", "head"], tuple[str, ...]], ...] = (
    ("attn", ATTENDS), ("mlp", ("mlp", "block")), ("head", ("head",))
)  # fmt: skip
"""Paths with weight matrices, each with the segments that contain it."""
AGAIN_PRODUCTS = {"full": (Kind.COLUMN_RECOMPUTE,), "layer": (Kind.COLUMN_RECOMPUTE, Kind.ROW_RECOMPUTE)}
"""Recomputed op kinds with matrix products, by recomputation mode."""
SCORES = {"forward": 1.0, "backward": ATTENTION_GRAD}


@dataclass(frozen=True)
class SegmentCosts:
    """Seconds of every op and collective of one micro-batch, by ``site.kind`` for the whole batch
    (all slices, all parts).

    compute: e.g. ``{"attn.F": 0.02}``; missing ops cost nothing. collective: likewise, busy seconds
    of the link. latency: seconds that every collective costs in addition to its share of the bytes.
    """

    compute: dict[str, float]
    collective: dict[str, float]
    latency: float = 0.0

    def late(self, factor: float) -> SegmentCosts:
        """Return the costs with collectives ``factor`` times as long."""
        return replace(self, collective={key: seconds * factor for key, seconds in self.collective.items()})


def segment_costs(model: ModelSpec, strategy: Strategy, *, batch: int, sequence: int) -> SegmentCosts:
    """Return costs estimated from shapes: ``FLOPS`` per second of one rank, ``BANDWIDTH`` of its
    link in bytes per second and direction, numbers of ``ITEMSIZE`` bytes.

    Norms and their gradients count as memory traffic at an assumed ``FLOPS_PER_BYTE``.
    """
    tokens = batch * sequence // strategy.cp
    passed = FLOPS_PER_BYTE * ITEMSIZE
    work = _products(model, strategy, tokens, sequence)
    stream = tokens * model.hidden / (strategy.tp if strategy.sequence_parallel else 1)
    sites = tuple(site for site in LAYERS if site != "moe" or model.experts)
    for site in ("embed", *sites, "head"):
        for kind, times in PASSES.get(site, LAYER_PASSES).items():
            work[f"{site}.{kind}"] = work.get(f"{site}.{kind}", 0.0) + passed * times * stream
    if strategy.recompute == "layer":
        work |= {f"{site}.M": work[f"{site}.N"] for site in ("mlp", "moe") if site in sites}  # an addition, too
    if strategy.recompute not in AGAIN_PRODUCTS:
        for site in sites:
            key = f"{site}.{Kind.COLUMN_RECOMPUTE}"
            work[key] = work.get(key, 0.0) + passed * 4 * stream
    if strategy.cp > 1:
        moved = passed * tokens * strategy.widths(model, "attn")[0]
        again = (Kind.CORE_RECOMPUTE,) if strategy.ring > 1 else ()  # keys and values received from the ring are kept
        for kind in (Kind.RING_SEND_GRAD, Kind.HEADS_EXCHANGE_GRAD, Kind.COLUMN_OUTPUT_GRAD, *again):
            work |= {f"{site}.{kind}": moved for site in ATTENDS}
    if model.experts:
        _add_experts(work, model, strategy, tokens)
    return SegmentCosts({op: value / FLOPS for op, value in work.items()}, _sent(model, strategy, tokens))


def _add_experts(work: dict[str, float], model: ModelSpec, strategy: Strategy, tokens: int) -> None:
    """Add the FLOPs of experts whose tokens are spread evenly: of shared ones as of an MLP, of
    routed ones, and the copies of their rows."""
    experts = model.experts
    assert experts is not None
    own = tokens / (strategy.tp if strategy.whole_experts else 1)
    rows, routing = own * experts.load, 2 * own * model.hidden * experts.count
    first, second = (2 * rows * model.hidden * times * experts.ffn_hidden / strategy.expert_tp for times in (2, 1))
    copied = FLOPS_PER_BYTE * ITEMSIZE * 2 * rows * model.hidden
    again = first if strategy.recompute in AGAIN_PRODUCTS else 0.0
    for kind, value in (
        (Kind.ROUTER, routing), (Kind.DISPATCH, copied), (Kind.DISPATCH_RECOMPUTE, copied),
        (Kind.EXPERTS, first + second + copied), (Kind.COLUMN_RECOMPUTE, again), (Kind.ROW_FORWARD, copied),
        (Kind.ROW_DGRAD, copied), (Kind.EXPERTS_BACKWARD, first + second + copied),
        (Kind.ROUTER_BACKWARD, 2 * routing), (Kind.COLUMN_DGRAD, copied), (Kind.WGRAD, first + second),
    ):  # fmt: skip
        work[f"moe.{kind}"] = work.get(f"moe.{kind}", 0.0) + value


def _products(model: ModelSpec, strategy: Strategy, tokens: int, sequence: int) -> dict[str, float]:
    """Return FLOPs of matrix products and of attention's core; the core counts as recomputed under
    any recomputation."""
    work = dict[str, float]()
    rows = strategy.padded_vocab(model) / strategy.tp
    pairs = 4 * tokens * model.mean_keys(sequence) / 2  # causal: half the square
    for branch, sites in BRANCHES:
        places: list[tuple[tuple[str, ...], Sublayer]] = [(sites, branch)]
        if branch == "mlp" and model.experts:
            places.append((("moe",), "moe"))  # shared experts
        for names, weights in places:
            first, last = (0.0, 0.0) if branch == "head" else strategy.widths(model, weights)
            dims = Dims(T=tokens, H=model.hidden, Z=first, O=last, V=rows)
            for kind, step in _counted(branch, strategy.recompute, shared=strategy.cp > 1):
                flops = dims.flops(step) if step.product else pairs * last * SCORES[step.attends]
                for site in names:
                    key = site + kind
                    work[key] = work.get(key, 0.0) + flops
    return work


@cache
def _counted(branch: Path, recompute: Recompute, *, shared: bool) -> list[tuple[str, OpStep]]:
    """Return a path's steps that count in FLOPs, each with the op kind that runs it."""
    found = [(kind, step) for kind in Kind for step in steps_of(branch, kind, shared=shared)]
    again = AGAIN_PRODUCTS.get(recompute, ())
    runs = [(kind, step) for kind, step in found if step.attends or kind not in AGAIN or kind in again]
    return [(f".{kind}", step) for kind, step in runs if step.attends or step.product]


def _sent(model: ModelSpec, strategy: Strategy, tokens: int) -> dict[str, float]:
    """Return the seconds that collectives occupy the link, by ``site.kind``. A ring all-reduce
    sends 2 (tp - 1) / tp of its bytes."""
    tp, ulysses, ring = strategy.tp, strategy.cp // strategy.ring, strategy.ring
    there, back, block = exchanged(model.letters, tokens * ITEMSIZE, tp=tp, ulysses=ulysses)
    stream = tokens * model.hidden * ((tp - 1) / tp * ITEMSIZE / BANDWIDTH)
    summed = stream * (1 if strategy.sequence_parallel else 2)
    seconds: dict[Whole, float] = {
        "looked_up": stream,  # upper bound: no token occurs twice
        "statistics": STATISTICS * 4 * tokens * (tp - 1) / BANDWIDTH,
        "stream": summed,
        "column_block": summed,
        "row_block": summed,
        "qkv_bytes": there * (ulysses - 1) / ulysses / BANDWIDTH,
        "attention_bytes": back * (ulysses - 1) / ulysses / BANDWIDTH,
        "kv_bytes": block * (ring - 1) / BANDWIDTH,
        **_sent_to_experts(model, strategy, tokens),
    }
    return {  # an op's first row wins
        f"{site}.{kind}": seconds[send.whole]
        for send in reversed(SENDS)
        if send.whole in seconds
        for site, kind in product(send.sites or ("embed", *LAYERS, "head"), send.kinds)
        if site != "moe" or model.experts
    }


def _sent_to_experts(model: ModelSpec, strategy: Strategy, tokens: int) -> dict[Whole, float]:
    """Return the seconds of experts' exchanges; empty for a model without experts."""
    if model.experts is None:
        return {}
    own = tokens / (strategy.tp if strategy.whole_experts else 1)
    rows = own * model.experts.load * model.hidden * ITEMSIZE
    return {"routed": rows * (strategy.ep - 1) / strategy.ep / BANDWIDTH, "routes": 0.0, "counts": 0.0}


class Durations:
    """Seconds of single ops: costs divided among slices and parts."""

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int) -> None:
        self.graph, self.costs = graph, costs
        self.shares = [size / batch for size in slice_sizes(batch, graph.p1)]

    def compute(self, op: SegmentOp) -> float:
        """Return an op's seconds of the processor."""
        whole = self.costs.compute.get(f"{op.site}.{op.kind}", 0.0)
        return whole * self.shares[op.slice] / self.graph.parts(op.site, op.kind)

    def collective(self, op: SegmentOp) -> float:
        """Return the seconds of an op's collective on the link; 0 if it has none."""
        if self.graph.collective(op) is None:
            return 0.0
        whole = self.costs.collective.get(f"{op.site}.{op.kind}", 0.0)
        shared = self.graph.shared(op.site)
        parts = shared.sends(op.kind) if shared and op.kind in CP_KINDS else self.graph.parts(op.site, op.kind)
        return self.costs.latency + whole * self.shares[op.slice] / parts


class NumberedOps:
    """The ops of a graph as numbers, for algorithms that look at each many times. Lists are indexed
    by these numbers.

    needs: (number, True if its collective must have ended) of every op that an op needs. travels:
    True if a collective follows the op. sorts: a number that ops share if only the layer differs.
    slices: the op's slice. weight: True for a weight gradient.
    """

    def __init__(self, graph: SegmentGraph) -> None:
        self.graph, self.ops = graph, graph.ops()
        self.needs = numbered_needs(graph, self.ops)
        self.travels = [graph.collective(op) is not None for op in self.ops]
        self.slices, self.weight = [op.slice for op in self.ops], [op.kind == Kind.WGRAD for op in self.ops]
        firsts: dict[tuple[str, str, int, int, bool], int] = {}
        self.sorts = [
            firsts.setdefault((site, kind, at, part, travels), len(firsts))
            for (site, _, kind, at, part), travels in zip(self.ops, self.travels, strict=True)
        ]

    @cached_property
    def awaits(self) -> list[list[int]]:
        """The ops whose collectives must have ended before an op."""
        return [[source for source, collective in needs if collective] for needs in self.needs]

    @cached_property
    def feeds(self) -> list[list[tuple[int, bool]]]:
        """The consumers of an op, each with True if the op's collective must have ended."""
        feeds: list[list[tuple[int, bool]]] = [[] for _ in self.ops]
        for i, sources in enumerate(self.needs):
            for source, collective in sources:
                feeds[source].append((i, collective))
        return feeds

    @cached_property
    def following(self) -> list[list[int]]:
        """The consumers of an op in its own slice, without weight gradients."""
        slices, weight = self.slices, self.weight
        return [[j for j, _ in fed if not weight[j] and slices[j] == slices[i]] for i, fed in enumerate(self.feeds)]

    @cached_property
    def ranks(self) -> tuple[list[int], list[int]]:
        """Two priorities: sorted by the first, the slice that is behind goes first; by the second,
        the slice furthest along."""
        position: dict[tuple[str, int, str, int], int] = {}
        along = [
            position.setdefault((site, layer, kind, part), len(position)) * self.graph.p1
            for site, layer, kind, _, part in self.ops
        ]
        return [a + s for a, s in zip(along, self.slices, strict=True)], [
            s - a for a, s in zip(along, self.slices, strict=True)
        ]

    def seconds(self, costs: SegmentCosts, batch: int) -> tuple[list[float], list[float]]:
        """Return (each op's seconds on the processor, seconds of each op's collective on the link),
        by op number."""
        durations, sample = Durations(self.graph, costs, batch), dict(zip(self.sorts, self.ops, strict=True))
        compute = {sort: durations.compute(op) for sort, op in sample.items()}
        wire = {sort: durations.collective(op) for sort, op in sample.items()}
        return [compute[sort] for sort in self.sorts], [wire[sort] for sort in self.sorts]

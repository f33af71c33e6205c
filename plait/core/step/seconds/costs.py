"""What the segment ops of a stage and their collectives cost on a described cluster.

Every op is put together from the operations of ``step.seconds.rates``: matrix products of the slice that it
works on, attention, and elementwise passes. What a layer moves in these is counted as in the closed form
(``step.seconds.layer_time``), since the cluster's constants were fitted with it: a layer whose ops run one
after the other takes as long here as there.

Narrow slices fill a device badly; each slice is asked for by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import ITEMSIZE, Precision
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Site
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds import rates
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.segments import LAYERS, SegmentGraph, SegmentOp
from plait.core.step.stages import Stage
from plait.core.step.traffic import SegmentTraffic

FORWARD = ("N", "F", "T", "K", "R")
ROW_BYTES, ROW_GRADIENT_BYTES = 4, 8
"""Moved for each number of a row of the embedding, looked up and added to its gradient."""


def cluster_costs(
    model: ModelSpec, strategy: Strategy, load: Load, cluster: Cluster, *, precision: Precision
) -> SegmentCosts:
    """Costs of a micro-batch of ``load`` on ranks of ``cluster`` under a place's ``strategy``.

    Layers of a U-Transformer cost their mean over the lengths at which they work. Raises JobError where the
    device has no peak for ``precision``.
    """
    return _Costs(model, strategy, load, cluster, precision).costs


@dataclass(frozen=True)
class _Costs:
    model: ModelSpec
    strategy: Strategy
    load: Load
    cluster: Cluster
    precision: Precision

    @cached_property
    def graphs(self) -> list[SegmentGraph]:
        """One layer with both of the model's ends, and one between two stages."""
        alone = SegmentGraph.of(_flat(self.model), self.strategy, Stage(0, 1, 0, 1))
        ends = [alone, replace(alone, embeds=False, heads=False)]
        return [replace(graph, recompute=self.strategy.recompute, recomputed=None) for graph in ends]

    @cached_property
    def depth(self) -> float:
        """Mean length of a layer's sequence, as a share of the whole."""
        layers = self.model.num_layers
        return sum(0.5 ** self.model.level(layer) for layer in range(layers)) / layers

    @cached_property
    def costs(self) -> SegmentCosts:
        compute, wire = defaultdict[str, float](float), defaultdict[str, float](float)
        for graph in self.graphs:
            traffic = self._traffic(graph)
            known: dict[tuple[str, str, int, int], tuple[float, float]] = {}
            for op in graph.ops():
                key = f"{op.site}.{op.kind}"
                if not graph.embeds and op.site in LAYERS:
                    continue  # counted with the other graph
                alike = (op.site, op.kind, op.part, traffic.shares[op.slice])
                if alike not in known:
                    known[alike] = self._op(graph, op, traffic), self._collective(graph, op, traffic)
                found = known[alike]
                compute[key] += found[0]
                wire[key] += found[1]
        for table in (compute, wire):
            for key in table:
                table[key] *= self.depth if key.split(".")[0] in LAYERS else 1.0
        compute |= self._resampling()
        self._launches(compute, wire)
        return SegmentCosts(dict(compute), {key: seconds for key, seconds in wire.items() if seconds})

    def _traffic(self, graph: SegmentGraph) -> SegmentTraffic:
        return SegmentTraffic(
            model=_flat(self.model), strategy=self.strategy, graph=graph,
            shares=slice_sizes(self.load.batch, self.strategy.p1), sequence=self.load.sequence // self.strategy.cp,
            itemsize=self.itemsize, loss_itemsize=self.gradient,
        )  # fmt: skip

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.precision]

    @property
    def gradient(self) -> int:
        """Bytes of a number of a gradient."""
        return max(4, self.itemsize)

    # ---- operations ----

    def _matmul(self, m: float, k: float, n: float) -> float:
        return float(rates.matmul(self.cluster, self.precision, m, k, n))

    def _pass(self, numbers: float) -> float:
        """Of elementwise operations on so many numbers, each read or written once by a fused kernel."""
        return self._moved(numbers * self.itemsize * self.cluster.efficiency.elementwise.value)

    def _moved(self, nbytes: float) -> float:
        return float(rates.memory_bound(self.cluster, nbytes))

    def _collective(self, graph: SegmentGraph, op: SegmentOp, traffic: SegmentTraffic) -> float:
        kind = graph.collective(op)
        if kind is None:
            return 0.0
        tp, ulysses = self.strategy.tp, self.strategy.cp // self.strategy.ring
        whole = traffic.whole(op)
        if kind == "rotate":
            return float(rates.collective(self.cluster, "send", whole, 2, tp * ulysses))
        if kind == "all_to_all":
            return float(rates.collective(self.cluster, kind, whole * ulysses, ulysses, tp))
        return float(rates.collective(self.cluster, kind, whole, tp, 1))

    # ---- widths ----

    @property
    def rows(self) -> float:
        """Of the vocabulary."""
        return self.strategy.padded_vocab(self.model) / self.strategy.tp

    @cached_property
    def widths(self) -> dict[Site, tuple[float, float]]:
        """Numbers of a token after a first weight, and before a second."""
        sites: tuple[Site, ...] = ("attn", "mlp")
        return {site: self.strategy.widths(self.model, site) for site in sites}

    def _branches(self, site: str) -> list[tuple[Site, float, float]]:
        return [(one, *pair) for one, pair in self.widths.items() if site in (one, "block")]

    # ---- ops ----

    def _op(self, graph: SegmentGraph, op: SegmentOp, traffic: SegmentTraffic) -> float:
        """Seconds of one op of one slice."""
        tokens, hidden = float(traffic.tokens(op)), float(self.model.hidden)
        stream = tokens * hidden / (self.strategy.tp if graph.sequence_parallel else 1)
        if op.kind in "NMJ":  # a norm and two additions, the norm alone, and twice as much backward
            return self._pass(stream * {"N": 5, "M": 2, "J": 10}[op.kind])
        if op.site == "embed":
            return self._moved(tokens * hidden * (ROW_BYTES if op.kind == "R" else ROW_GRADIENT_BYTES))
        if op.site == "head":
            return self._head(graph, op, tokens, hidden)
        if op.kind in "TKXSGHEZ":
            return self._shared(op, tokens)
        kinds: Mapping[str, Callable[[str, float, float], float]] = {
            "F": lambda which, first, _: self._matmul(tokens, hidden, first) + self._core(op, which, tokens),
            "R": lambda _, __, second: self._matmul(tokens, second, hidden / graph.p2),
            "A": lambda which, first, _: self._again(graph, op, which, tokens, first),
            "D": lambda which, _, second: self._matmul(tokens, hidden, second) + self._core(op, which, tokens),
            "C": lambda _, first, __: self._matmul(tokens / graph.parts(op.site, "C"), first, hidden),
        }
        branches = self._branches(op.site)
        if op.kind == "W":
            _, first, second = branches[op.part // 2]
            return self._matmul(*((first, tokens, hidden) if op.part % 2 else (hidden, tokens, second)))
        return sum(kinds[op.kind](*branch) for branch in branches)

    def _head(self, graph: SegmentGraph, op: SegmentOp, tokens: float, hidden: float) -> float:
        match op.kind:
            case "F":
                return self._matmul(tokens, hidden, self.rows)
            case "L":
                return self._moved(tokens * self.rows * self.cluster.efficiency.logit_bytes.value)
            case "C":
                return self._matmul(tokens / graph.parts("head", "C"), self.rows, hidden)
            case _:
                return self._matmul(self.rows, tokens, hidden)

    def _again(self, graph: SegmentGraph, op: SegmentOp, which: str, tokens: float, first: float) -> float:
        if graph.recompute == "selective":
            return self._core(op, which, tokens) if which == "mlp" else 0.0
        return self._matmul(tokens, self.model.hidden, first) + self._core(op, which, tokens)

    def _core(self, op: SegmentOp, which: str, tokens: float) -> float:
        """Between a first and a second weight: forward, or backward in D."""
        times = 2 if op.kind == "D" else 1
        if which == "mlp":
            return self._pass(tokens * sum(self.widths["mlp"]) * times)
        turned = self._turned(tokens) * times
        if self.strategy.cp > 1:
            return 0.0 if op.kind == "D" else turned
        return self._attention(op, causal=True) + turned

    def _turned(self, tokens: float) -> float:
        """Queries, keys and values brought to the layout of kernels, normalised and rotated."""
        normed, _ = self.strategy.normed(self.model)
        return self._pass(tokens * (self.widths["attn"][0] + normed) * 2)

    def _shared(self, op: SegmentOp, tokens: float) -> float:
        """An op of attention that is shared: kernels, and what ``_core`` has beside them."""
        last = self.strategy.ring - 1
        match op.kind:
            case "K":
                return self._attention(op, causal=op.part == 0)
            case "G":
                return self._attention(op, causal=op.part == last)
            case "X" if last == 0:  # what came round a ring is kept
                return self._attention(op, causal=True)
            case "Z":
                return 2 * self._turned(tokens)
            case _:
                return 0.0

    def _attention(self, op: SegmentOp, *, causal: bool) -> float:
        """One kernel: the own block, or half of another's, which is what the mask leaves of any other."""
        ring, ulysses = self.strategy.ring, self.strategy.cp // self.strategy.ring
        share, block = slice_sizes(self.load.batch, self.strategy.p1)[op.slice], self.load.sequence / ring
        return float(rates.attention(
            self.cluster, self.precision, batch=share, heads=self.model.num_heads / self.strategy.tp / ulysses,
            queries=block, keys=block if causal else block / 2, head_size=self.model.head_size,
            backward=op.kind in "DG", fused=not self.model.attention_dropout, causal=causal,
        ))  # fmt: skip

    # ---- beside ----

    def _resampling(self) -> dict[str, float]:
        """Of a U's ways down and up, at their mean length."""
        levels, hidden = self.model.levels, float(self.model.hidden)
        if not levels:
            return {}
        tokens = self.load.batch * self.load.sequence / self.strategy.cp
        mean = sum(0.5**level for level in range(levels)) / levels * tokens  # before a down, after an up
        down, up = self._matmul(mean / 2, 2 * hidden, hidden), self._matmul(mean / 2, hidden, hidden)
        moved = self._pass(mean * hidden * 2)
        return {"down.N": down + moved, "down.J": 2 * down + moved, "up.N": up + moved, "up.J": 2 * up + moved}

    def _launches(self, compute: dict[str, float], wire: Mapping[str, float]) -> None:
        """Hold the layers to what the host can launch: of every slice, a forward and a backward, beside which
        collectives that nothing hides give it time."""
        told, mode, p1 = self.cluster.efficiency, self.strategy.overlap, self.strategy.p1
        launched = told.host_layer.value + (2 * told.host_collective.value if self.strategy.tp > 1 else 0.0)
        hidden = {"sync": 0.0, "async": 0.0, "domino": 1 - 1 / (p1 * self.strategy.p2), "no-communication": 1.0}[mode]
        for forward in (True, False):
            keys = [key for key in compute if key.split(".")[0] in LAYERS and (key[-1] in FORWARD) == forward]
            sent = sum(wire.get(key, 0.0) for key in keys)
            exposed = sent * (1 - (1.0 if mode == "async" and not forward else hidden))
            total, floor = sum(compute[key] for key in keys), launched * p1 - exposed
            if 0 < total < floor:
                for key in keys:
                    compute[key] *= floor / total


def _flat(model: ModelSpec) -> ModelSpec:
    """The model as if all layers worked at full length."""
    if not model.levels:
        return model
    return replace(model, family="gpt", levels=0)

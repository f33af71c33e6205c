"""What the segment ops of a stage and their collectives cost on a described cluster.

Every op is put together from the operations of ``plait.plan.rates``: matrix products of the slice that it
works on, attention, and elementwise passes, counted as the bytes that fused kernels would move at least.
Narrow slices fill a device badly; that is in the costs, since each slice is asked for by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from plait.core.cluster import Cluster
from plait.core.model import ModelSpec
from plait.core.overlap import Load
from plait.core.segment_costs import SegmentCosts
from plait.core.segments import LAYERS, SegmentGraph, SegmentOp
from plait.core.settings import ITEMSIZE, Precision
from plait.core.stages import Stage
from plait.core.strategy import Strategy, slice_sizes
from plait.plan import rates
from plait.plan.traffic import AttentionTraffic, SegmentTraffic

FORWARD = ("N", "F", "R")


def cluster_costs(
    model: ModelSpec, strategy: Strategy, load: Load, cluster: Cluster, *, precision: Precision
) -> SegmentCosts:
    """Costs of a micro-batch of ``load`` on ranks of ``cluster`` under a place's ``strategy``.

    Ulysses' and rings' collectives are part of the ops F, A and D of attention, as they are where these run.
    Layers of a U-Transformer cost their mean over the lengths at which they work. Raises JobError where the
    device has no peak for ``precision``.
    """
    return _Costs(model, strategy, load, cluster, precision).costs


def sequence_costs(
    model: ModelSpec, strategy: Strategy, load: Load, cluster: Cluster, *, precision: Precision
) -> dict[str, float]:
    """What of ``cluster_costs`` attention spends waiting for ranks that share its sequences, by
    ``site.kind``; empty where there are none."""
    return _Costs(model, strategy, load, cluster, precision).exposed if strategy.cp > 1 else {}


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
        self._launches(compute)
        return SegmentCosts(dict(compute), {key: seconds for key, seconds in wire.items() if seconds})

    @cached_property
    def exposed(self) -> dict[str, float]:
        found = defaultdict[str, float](float)
        graph = self.graphs[0]
        traffic = self._traffic(graph)
        for op in graph.ops():
            if op.site in ("attn", "block") and op.kind in "FAD":
                attention = self._attention(op, traffic.shares[op.slice])
                found[f"{op.site}.{op.kind}"] += attention.exposed * self.depth
        return dict(found)

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
        return float(rates.matmul(self.cluster, self.precision, m, k, n)) if min(m, k, n) > 0 else 0.0

    def _pass(self, numbers: float, itemsize: float = 0) -> float:
        """Of elementwise operations on so many numbers, each read or written once by a fused kernel."""
        least = numbers * (itemsize or self.itemsize)
        return float(rates.memory_bound(self.cluster, least * self.cluster.efficiency.elementwise.value))

    def _product(self, m: float, k: float, n: float) -> float:
        """A weight gradient [m, n] over ``k`` tokens, added to its accumulator."""
        apart = self.itemsize != self.gradient  # the product is made first, then added in another pass
        return self._matmul(m, k, n) + (self._pass(m * n, self.itemsize + 2 * self.gradient) if apart else 0.0)

    def _collective(self, graph: SegmentGraph, op: SegmentOp, traffic: SegmentTraffic) -> float:
        kind = graph.collective(op)
        if kind is None:
            return 0.0
        assert kind != "rotate"
        return float(rates.collective(self.cluster, kind, traffic.whole(op), self.strategy.tp, 1))

    # ---- widths ----

    @property
    def query(self) -> float:
        """Numbers of a token's queries on one rank."""
        return self.model.num_heads * self.model.head_size / self.strategy.tp

    @property
    def kv(self) -> float:
        """Of its keys, and of its values."""
        copies = self.strategy.kv_replicas(self.model)
        return self.model.num_kv_heads * self.model.head_size * copies / self.strategy.tp

    @property
    def inner(self) -> float:
        """Of the MLP."""
        return self.model.ffn_hidden / self.strategy.tp

    @property
    def rows(self) -> float:
        """Of the vocabulary."""
        return self.strategy.padded_vocab(self.model) / self.strategy.tp

    def _branches(self, site: str) -> list[tuple[str, float, float]]:
        """(which, numbers of a token after the first weight, and before the second)."""
        mlp = ("mlp", self.inner * (1 + self.model.gated), self.inner)
        attn = ("attn", self.query + 2 * self.kv, self.query)
        return {"attn": [attn], "mlp": [mlp]}.get(site, [attn, mlp])

    # ---- ops ----

    def _op(self, graph: SegmentGraph, op: SegmentOp, traffic: SegmentTraffic) -> float:
        """Seconds of one op of one slice."""
        tokens, hidden = float(traffic.tokens(op)), float(self.model.hidden)
        stream = tokens * hidden / (self.strategy.tp if graph.sequence_parallel else 1)
        if op.kind == "N":
            return self._pass(stream * (3 if op.site == "leave" else 4))  # adds two, writes the sum and its norm
        if op.kind == "M":
            return self._pass(stream * 2)
        if op.kind == "J":
            return self._pass(stream * (4 if op.site in LAYERS else 3))
        if op.site == "embed":
            return self._pass(tokens * hidden * 2) if op.kind == "R" else self._pass(tokens * hidden * 4, self.gradient)
        if op.site == "head":
            return self._head(graph, op, tokens, hidden)
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
            return self._product(*((first, tokens, hidden) if op.part % 2 else (hidden, tokens, second)))
        return sum(kinds[op.kind](*branch) for branch in branches)

    def _head(self, graph: SegmentGraph, op: SegmentOp, tokens: float, hidden: float) -> float:
        logits = tokens * self.rows
        match op.kind:
            case "F":
                return self._matmul(tokens, hidden, self.rows) + self._pass(logits)
            case "L":
                return self._pass(logits * 2)
            case "C":
                return self._matmul(tokens / graph.parts("head", "C"), self.rows, hidden)
            case _:
                return self._product(self.rows, tokens, hidden)

    def _again(self, graph: SegmentGraph, op: SegmentOp, which: str, tokens: float, first: float) -> float:
        if graph.recompute == "selective":
            return self._core(op, which, tokens) if which == "mlp" else 0.0
        return self._matmul(tokens, self.model.hidden, first) + self._core(op, which, tokens)

    def _core(self, op: SegmentOp, which: str, tokens: float) -> float:
        """Between a first and a second weight: forward, or backward in D."""
        backward = op.kind == "D"
        if which == "mlp":
            passes = 1 + 2 * (1 + self.model.gated) if backward else 2 + self.model.gated
            return self._pass(tokens * self.inner * passes)
        share = slice_sizes(self.load.batch, self.strategy.p1)[op.slice]
        turned = self._pass(tokens * (self.query + self.kv) * 2) if self.model.family == "llama" else 0.0
        return self._attention(op, share).seconds + turned

    def _attention(self, op: SegmentOp, share: int) -> _Attention:
        """Of ``share`` sequences, whose tokens cp ranks share."""
        ring, ulysses = self.strategy.ring, self.strategy.cp // self.strategy.ring
        backward, heads = op.kind == "D", self.model.num_heads / self.strategy.tp / ulysses
        block = self.load.sequence / ring

        def kernel(keys: float, *, causal: bool) -> float:
            return float(rates.attention(
                self.cluster, self.precision, batch=share, heads=heads, queries=block, keys=keys,
                head_size=self.model.head_size, backward=backward, fused=not self.model.attention_dropout,
                causal=causal,
            ))  # fmt: skip

        row = share * (self.load.sequence // self.strategy.cp) * self.itemsize
        held = AttentionTraffic.of(self.model, self.strategy, row)
        exchange = sum(self._exchange("all_to_all", size * ulysses, ulysses) for size in (held.there, held.back))
        own = kernel(block, causal=True)
        if ring == 1:
            return _Attention(own + exchange, exchange)
        if op.kind == "A":  # what came round the ring is kept
            return _Attention(exchange, exchange)
        other = kernel(block / 2, causal=False)
        hop = self._exchange("send", held.block, 2)
        turns = [own, *(other for _ in range(ring - 1))]
        around = sum(float(rates.together(self.cluster, turn, hop)) for turn in turns[:-1]) + turns[-1]
        around += (ring - 1) * hop if backward else 0.0  # gradients go on when they are complete
        return _Attention(around + exchange, around + exchange - sum(turns))

    def _exchange(self, kind: rates.Kind, nbytes: float, ranks: int) -> float:
        tp, ulysses = self.strategy.tp, self.strategy.cp // self.strategy.ring
        stride = tp if kind == "all_to_all" else tp * ulysses
        return float(rates.collective(self.cluster, kind, nbytes, ranks, stride)) if ranks > 1 else 0.0

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

    def _launches(self, compute: dict[str, float]) -> None:
        """Hold layers to what the host can launch: a forward of every slice, a backward of twice as many
        kernels."""
        least = self.cluster.efficiency.host_layer.value * self.strategy.p1
        for forward, floor in ((True, least), (False, 2 * least)):
            keys = [key for key in compute if key.split(".")[0] in LAYERS and (key[-1] in FORWARD) == forward]
            total = sum(compute[key] for key in keys)
            if 0 < total < floor:
                for key in keys:
                    compute[key] *= floor / total


@dataclass(frozen=True)
class _Attention:
    """seconds: of the whole op's core. exposed: of them, waiting for other ranks."""

    seconds: float
    exposed: float


def _flat(model: ModelSpec) -> ModelSpec:
    """The model as if all layers worked at full length."""
    if not model.levels:
        return model
    return replace(model, family="gpt", levels=0)

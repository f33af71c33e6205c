"""What the segment ops of a stage and their collectives cost on a described cluster.

Every op is put together from the operations of ``step.seconds.rates``: matrix products of the slice that it
works on, attention, and elementwise passes. What a layer moves in these is counted as in the closed form
(``step.seconds.layer_time``), since the cluster's constants were fitted with it: a layer whose ops run one
after the other takes as long here as there.

Narrow slices fill a device badly; each slice is asked for by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import ITEMSIZE, Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.ops import FORWARD_KINDS, Branch, Dims, Kind, OpStep, branches_of, steps_of
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds import rates
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.segments import LAYERS, SegmentGraph, SegmentOp
from plait.core.step.stages import Stage
from plait.core.step.traffic import SegmentTraffic

ROW_BYTES = 4
"""Moved for each number of a row of the embedding."""
SITES: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")


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

    @cached_property
    def dims(self) -> dict[Branch, Dims]:
        """Of each branch, for one token."""
        tp, hidden = self.strategy.tp, float(self.model.hidden)
        ends = Dims(
            T=1, H=hidden, S=hidden / (tp if self.strategy.sequence_parallel else 1),
            V=self.strategy.padded_vocab(self.model) / tp,
        )  # fmt: skip
        found: dict[Branch, Dims] = {"": ends, "embed": ends, "head": ends}
        for site in SITES:
            first, last = self.strategy.widths(self.model, site)
            normed = self.strategy.normed(self.model)[0] if site == "attn" else 0
            found[site] = replace(ends, Z=first, O=last, N=normed)
        return found

    # ---- ops ----

    def _op(self, graph: SegmentGraph, op: SegmentOp, traffic: SegmentTraffic) -> float:
        """Seconds of one op of one slice."""
        tokens, parts = float(traffic.tokens(op)), graph.parts(op.site, op.kind)
        branches = branches_of(op.site)
        if op.kind == Kind.WEIGHT_GRAD:  # two parts a branch
            branches = branches[op.part // 2 : op.part // 2 + 1]
        own = self.strategy.ring - 1 if op.kind == Kind.CORE_GRAD else 0  # the part that is about the own block
        found = 0.0
        for branch in ("", *branches):
            if not (steps := self._steps(graph, op, branch)):
                continue
            dims, products, core = replace(self.dims[branch], T=tokens), 0.0, 0.0
            for step in steps:
                if step.product:
                    products += self._matmul(*dims.product(step, parts))
                if step.attends:
                    core += self._attention(op, causal=op.part == own)
                if step.moved:
                    core += self._moved(dims.moved(step) * self._bytes(step))
            found += products + core
        return found

    def _steps(self, graph: SegmentGraph, op: SegmentOp, branch: Branch) -> list[OpStep]:
        """What the op computes."""
        shared, selective = self.strategy.cp > 1, graph.recompute == "selective"
        if op.kind == Kind.CORE_AGAIN and self.strategy.ring > 1:  # what came round a ring is kept
            return []
        found = steps_of(branch, op.kind, shared=shared, selective=selective)
        weight = op.part % 2 if op.kind == Kind.WEIGHT_GRAD else 0
        return [step for step in found if step.weight == weight]

    def _bytes(self, step: OpStep) -> float:
        """Moved for each number: by a fused kernel, each is read or written once."""
        told = self.cluster.efficiency
        ends = {"embed": ROW_BYTES, "head": told.logit_bytes.value}
        return ends.get(step.branch, self.itemsize * told.elementwise.value)

    def _attention(self, op: SegmentOp, *, causal: bool) -> float:
        """One kernel: the own block, or half of another's, which is what the mask leaves of any other."""
        ring, ulysses = self.strategy.ring, self.strategy.cp // self.strategy.ring
        seen = self.model.keys_seen(self.load.sequence) / self.load.sequence
        share, block = slice_sizes(self.load.batch, self.strategy.p1)[op.slice], self.load.sequence / ring
        shape = rates.AttentionShape(
            batch=share, heads=self.model.num_heads / self.strategy.tp / ulysses, queries=block,
            keys=seen * (block if causal else block / 2), head_size=self.model.letters.D, causal=causal,
        )  # fmt: skip
        backward, fused = op.kind in (Kind.SECOND_GRAD, Kind.CORE_GRAD), not self.model.attention_dropout
        return float(rates.attention(self.cluster, self.precision, shape, backward=backward, fused=fused))

    # ---- beside ----

    def _resampling(self) -> dict[str, float]:
        """Of a U's ways down and up, at their mean length."""
        levels, hidden = self.model.levels, float(self.model.hidden)
        if not levels:
            return {}
        tokens = self.load.batch * self.load.sequence / self.strategy.cp
        mean = sum(0.5**level for level in range(levels)) / levels * tokens  # before a down, after an up
        dims = Dims(T=mean / 2, H=hidden)
        down, up = (
            sum(self._matmul(*dims.product(step)) for step in steps_of(branch, Kind.NORM)) for branch in ("down", "up")
        )
        moved = self._pass(mean * hidden * 2)
        return {"down.N": down + moved, "down.J": 2 * down + moved, "up.N": up + moved, "up.J": 2 * up + moved}

    def _launches(self, compute: dict[str, float], wire: Mapping[str, float]) -> None:
        """Hold the layers to what the host can launch: of every slice, a forward and a backward, beside which
        collectives that nothing hides give it time."""
        told, mode, p1 = self.cluster.efficiency, self.strategy.overlap, self.strategy.p1
        launched = told.host_layer.value + (2 * told.host_collective.value if self.strategy.tp > 1 else 0.0)
        hidden = {"sync": 0.0, "async": 0.0, "domino": 1 - 1 / (p1 * self.strategy.p2), "no-communication": 1.0}[mode]
        for forward in (True, False):
            keys = [key for key in compute if key.split(".")[0] in LAYERS and (key[-1] in FORWARD_KINDS) == forward]
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

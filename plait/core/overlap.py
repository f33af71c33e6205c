"""Choosing the order of segment ops so that collectives hide behind computation (Domino, arXiv 2409.15241).

Two resources work side by side: the processor runs one op at a time, the link carries one collective at a
time in the order in which they start. ``domino_order`` is list scheduling on that model: slices are independent
chains, so while one slice's collective travels another slice computes, and weight gradients, which nobody waits
for, fill what is left. Beyond the paper's fixed interleaving: any number of slices, weight gradients deferred
to where the processor would idle, and slices that may run ahead of each other (one slice's compute-heavy backward
beside another's communication-heavy forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.core.model import ModelSpec
from plait.core.segments import Action, SegmentGraph, SegmentOp, async_order, insert_waits, needs_table, sync_order
from plait.core.strategy import Overlap, Strategy, slice_sizes


@dataclass(frozen=True)
class SegmentCosts:
    """Seconds of every op and collective of one micro-batch, by ``site.kind`` for the whole batch (all slices, all parts).

    compute: e.g. ``{"attn.F": 0.02}``; what is missing costs nothing. collective: likewise, busy time of the link.
    latency: seconds that every collective costs beyond its share of the bytes.
    """

    compute: dict[str, float]
    collective: dict[str, float]
    latency: float = 0.0


class Placed(NamedTuple):
    """When the simulator puts an action: seconds from the start of the micro-batch. A wait's span is the exposed time."""

    action: Action
    start: float
    end: float


def segment_costs(model: ModelSpec, strategy: Strategy, *, batch: int, sequence: int, flops: float, bandwidth: float,
                  latency: float = 0.0, bytes_per_number: int = 4) -> SegmentCosts:  # fmt: skip
    """Costs from shapes: ``flops`` per second of one rank, ``bandwidth`` of its link in bytes per second and direction.

    Norms and joins count as memory traffic at an assumed 4 FLOPs a byte; a ring all-reduce sends 2 (tp-1)/tp of its bytes.
    """
    tp, tokens, numbers = strategy.tp, batch * sequence, batch * sequence * model.hidden
    query, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size * strategy.kv_replicas(model)
    first = {
        "attn": 2 * tokens * model.hidden * (query + 2 * kv) / tp,
        "mlp": 2 * tokens * model.hidden * model.ffn_hidden * (1 + model.gated) / tp,
    }
    second = {"attn": 2 * tokens * model.hidden * query / tp, "mlp": 2 * tokens * model.hidden * model.ffn_hidden / tp}
    core = {"attn": 4 * tokens * sequence * query / tp / 2, "mlp": 0.0}  # causal: half the square
    norm = 4.0 * bytes_per_number * 4 * numbers / (tp if strategy.sequence_parallel else 1)
    work: dict[str, float] = {"embed.R": norm / 4, "embed.W": norm / 4}
    head = 2 * tokens * model.hidden * strategy.padded_vocab(model) / tp
    work |= {"head.N": norm, "head.F": head, "head.C": head, "head.W": head, "head.J": norm}
    for site in ("attn", "mlp"):
        work |= {f"{site}.N": norm, f"{site}.F": first[site] + core[site], f"{site}.R": second[site], f"{site}.J": 2 * norm}
        work |= {f"{site}.D": second[site] + 2.5 * core[site], f"{site}.C": first[site], f"{site}.W": first[site] + second[site]}
    share = (tp - 1) / tp * bytes_per_number / bandwidth
    whole = numbers * share * (1 if strategy.sequence_parallel else 2)
    wire = {f"{site}.{kind}": whole for site in ("embed", "attn", "mlp", "head") for kind in "RCNJ"}
    wire["head.F"] = 3 * 4 * tokens * (tp - 1) / bandwidth
    return SegmentCosts({op: value / flops for op, value in work.items()}, wire, latency)


class _Durations:
    """Costs spread over slices and parts."""

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int) -> None:
        self.graph, self.costs = graph, costs
        self.shares = [size / batch for size in slice_sizes(batch, graph.p1)]

    def compute(self, op: SegmentOp) -> float:
        whole = self.costs.compute.get(f"{op.site}.{op.kind}", 0.0)
        return whole * self.shares[op.slice] / self.graph.parts(op.site, op.kind)

    def collective(self, op: SegmentOp) -> float:
        if self.graph.collective(op) is None:
            return 0.0
        whole = self.costs.collective.get(f"{op.site}.{op.kind}", 0.0)
        return self.costs.latency + whole * self.shares[op.slice] / self.graph.parts(op.site, op.kind)


def simulate(graph: SegmentGraph, actions: Sequence[Action], costs: SegmentCosts, batch: int) -> list[Placed]:
    """Run ``actions`` on the two-resource model; one Placed per action, the collective's own time under its start."""
    durations, now, link = _Durations(graph, costs, batch), 0.0, 0.0
    arrival: dict[SegmentOp, float] = {}
    placed: list[Placed] = []
    for action in actions:
        verb, op = action
        if verb == "run":
            placed.append(Placed(action, now, now + durations.compute(op)))
            now = placed[-1].end
        elif verb == "start":
            begin = max(now, link)
            link = arrival[op] = begin + durations.collective(op)
            placed.append(Placed(action, begin, link))
        else:
            placed.append(Placed(action, now, max(now, arrival[op])))
            now = placed[-1].end
    return placed


def makespan(placed: Sequence[Placed]) -> float:
    """Seconds until the last op or collective ends."""
    return max((p.end for p in placed), default=0.0)


def segment_order(graph: SegmentGraph, overlap: Overlap, costs: SegmentCosts, batch: int) -> list[Action]:
    """The action list of an overlap mode for micro-batches of ``batch`` sequences."""
    if overlap == "domino":
        return domino_order(graph, costs, batch)
    return async_order(graph) if overlap == "async" else sync_order(graph)


def domino_order(graph: SegmentGraph, costs: SegmentCosts, batch: int) -> list[Action]:
    """The best of a few list-scheduling policies by simulated time; equal times go to the one that holds least."""
    candidates = [insert_waits(graph, _ListScheduler(graph, costs, batch, depth, hold).order())
                  for depth in (False, True) for hold in (1, 2, 4)]  # fmt: skip
    times = [makespan(simulate(graph, actions, costs, batch)) for actions in candidates]
    longest = max(times) or 1.0  # costs may all be zero
    return candidates[min(range(len(candidates)), key=lambda i: (round(times[i] / longest, 3), i))]


class _ListScheduler:
    """Greedy list scheduling: at every moment run the ready op of highest priority, or idle until one is ready.

    depth_first: a slice that is further along goes first (slices drift apart); otherwise the one behind goes first.
    hold: how many segments' weight gradients may be outstanding per slice before they take precedence; what is
    outstanding keeps its activations alive.
    """

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int, depth_first: bool, hold: int) -> None:
        self.graph, self.needs = graph, needs_table(graph)
        self.durations = _Durations(graph, costs, batch)
        self.limit = 2 * hold * graph.p1
        sign = -1 if depth_first else 1
        self.rank = {op: (sign * i, op.slice) for i, op in enumerate(_one_slice(graph))}
        self.rank = {op: (self.rank[op._replace(slice=0)][0], op.slice) for op in graph.ops()}

    def order(self) -> list[SegmentOp]:
        """All ops, in the order in which they should run."""
        missing = {op: len(needs) for op, needs in self.needs.items()}
        feeds: dict[SegmentOp, list[SegmentOp]] = {}
        for op, needs in self.needs.items():
            for need in needs:
                feeds.setdefault(need.op, []).append(op)
        self.finish: dict[SegmentOp, float] = {}  # when the result, reduced if it is to be, is there
        self.run_end: dict[SegmentOp, float] = {}
        ready = [op for op, count in missing.items() if not count]
        order: list[SegmentOp] = []
        now = link = 0.0
        while ready:
            op = self._choose(ready, now, link)
            ready.remove(op)
            now = max(now, self._ready_at(op)) + self.durations.compute(op)
            self.run_end[op] = self.finish[op] = now
            if self.graph.collective(op):
                link = self.finish[op] = max(now, link) + self.durations.collective(op)
            order.append(op)
            for fed in feeds.get(op, ()):
                missing[fed] -= 1
                if not missing[fed]:
                    ready.append(fed)
        assert len(order) == len(missing), "the segment graph has a cycle"
        return order

    def _ready_at(self, op: SegmentOp) -> float:
        return max((self.finish[n.op] if n.collective else self.run_end[n.op] for n in self.needs[op]), default=0.0)

    def _choose(self, ready: list[SegmentOp], now: float, link: float) -> SegmentOp:
        weights = [op for op in ready if op.kind == "W" and self._ready_at(op) <= now]
        chain = [op for op in ready if op.kind != "W" and self._ready_at(op) <= now]
        oldest = min(weights, key=self._ready_at, default=None)
        if oldest and (len(weights) > self.limit or not chain):
            return oldest
        if chain:
            first = min(chain, key=lambda op: self.rank[op])
            # While the link has work for longer than a weight gradient takes, nothing is lost by doing that first.
            return oldest if oldest and link - now > self.durations.compute(oldest) + self.durations.compute(first) else first
        return min(ready, key=lambda op: (self._ready_at(op), self.rank[op]))


def _one_slice(graph: SegmentGraph) -> list[SegmentOp]:
    return [op for op in graph.ops() if op.slice == 0]

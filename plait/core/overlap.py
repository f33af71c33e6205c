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
from dataclasses import dataclass, replace
from typing import NamedTuple

from plait.core.model import ModelSpec
from plait.core.segments import LAYERS, Action, SegmentGraph, SegmentOp, async_order, insert_waits, needs_table, sync_order
from plait.core.strategy import Overlap, Strategy, slice_sizes

# FLOP/s of a rank and bytes/s of its link before anything is measured: a 2020s CPU core and 1 Gbit/s. Only their ratio matters, and only
# to the order of ops.
FLOPS, BANDWIDTH = 5e10, 1.25e8
# Orders are made for collectives that are so many times slower than measured ...
ASSUMED = (1.0, 1.4, 1.75)
# ... and judged by these: a rank that is late, or a communication thread that shares its core, slows collectives down.
JUDGED = (1.0, 1.2)
# Weight gradients that may be outstanding per slice before they take precedence: what is outstanding keeps activations alive. Fewer where
# these are computed again, since then memory is what matters.
HELD_BACK, HELD_BACK_AGAIN = 8, 2


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


def segment_costs(
    model: ModelSpec,
    strategy: Strategy,
    *,
    batch: int,
    sequence: int,
    flops: float = FLOPS,
    bandwidth: float = BANDWIDTH,
    latency: float = 0.0,
    bytes_per_number: int = 4,
) -> SegmentCosts:
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
    for each in (first, second, core):
        each["block"] = each["attn"] + each["mlp"]
    norm = 4.0 * bytes_per_number * 4 * numbers / (tp if strategy.sequence_parallel else 1)
    work: dict[str, float] = {"embed.R": norm / 4, "embed.W": norm / 4}
    head = 2 * tokens * model.hidden * strategy.padded_vocab(model) / tp
    work |= {"head.N": norm, "head.F": head, "head.C": head, "head.W": head, "head.J": norm}
    for site in LAYERS:
        work |= {f"{site}.N": norm, f"{site}.F": first[site] + core[site], f"{site}.R": second[site], f"{site}.J": 2 * norm}
        work |= {f"{site}.M": norm / 2, f"{site}.A": core[site] + (first[site] if strategy.recompute == "full" else norm)}
        work |= {f"{site}.D": second[site] + 2.5 * core[site], f"{site}.C": first[site], f"{site}.W": first[site] + second[site]}
    share = (tp - 1) / tp * bytes_per_number / bandwidth
    whole = numbers * share * (1 if strategy.sequence_parallel else 2)
    wire = {f"{site}.{kind}": whole for site in ("embed", *LAYERS, "head") for kind in "RCNMJ"}
    wire["embed.R"] = numbers * share  # at most: as if no token occurred twice
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
    if not graph.communicates:  # nothing to hide: weight gradients at once, so that what they read can go
        return sync_order(graph)
    if overlap == "domino":
        return domino_order(graph, costs, batch)
    return async_order(graph) if overlap == "async" else sync_order(graph)


def domino_order(graph: SegmentGraph, costs: SegmentCosts, batch: int) -> list[Action]:
    """The best of a few list-scheduling policies by simulated time, with collectives as measured and late; the first of equals."""
    policies = [_Policy(ahead, fill, patience) for ahead in (True, False) for fill in (True, False) for patience in (0.0, 0.3, 0.7)]
    schedulers = [_ListScheduler(graph, _late(costs, factor), batch) for factor in ASSUMED]
    candidates = [insert_waits(graph, scheduler.order(policy)) for scheduler in schedulers for policy in policies]
    real = [_late(costs, factor) for factor in JUDGED]
    times = [sum(makespan(simulate(graph, actions, one, batch)) for one in real) for actions in candidates]
    longest = max(times) or 1.0  # costs may all be zero
    return candidates[min(range(len(candidates)), key=lambda i: (round(times[i] / longest, 3), i))]


def _late(costs: SegmentCosts, factor: float) -> SegmentCosts:
    return replace(costs, collective={key: seconds * factor for key, seconds in costs.collective.items()})


class _Policy(NamedTuple):
    """How the list scheduler chooses.

    ahead: the slice that is further along goes first, so that slices drift apart; otherwise the one behind.
    fill: while the link has work for longer than a weight gradient takes, that goes first: nothing is lost by it.
    patience: a slice holds an op back, even if the processor idles, when its collective would block the link for more than the share
    ``1 - patience`` of its time after a slice before it wants the link. On a link that is the bottleneck this lets the first slice reach
    its compute-heavy backward early, beside which the others' forward communication hides. 0: never.
    """

    ahead: bool
    fill: bool
    patience: float


class _ListScheduler:
    """Greedy list scheduling: at every moment run the ready op that the policy prefers, or idle until one is ready.

    Ops are numbered in the graph's own order; lists are indexed by these numbers.
    """

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int) -> None:
        self.ops = graph.ops()
        number, needs, durations = {op: i for i, op in enumerate(self.ops)}, needs_table(graph), _Durations(graph, costs, batch)
        self.seconds = [durations.compute(op) for op in self.ops]
        self.travels = [graph.collective(op) is not None for op in self.ops]
        self.wire = [durations.collective(op) for op in self.ops]
        self.needs = [[(number[need.op], need.collective) for need in needs[op]] for op in self.ops]
        self.feeds: list[list[int]] = [[] for _ in self.ops]
        for i, sources in enumerate(self.needs):
            for source, _ in sources:
                self.feeds[source].append(i)
        self.weight = [op.kind == "W" for op in self.ops]
        self.place = {op: i for i, op in enumerate(op for op in self.ops if op.slice == 0)}
        self.limit = (HELD_BACK if graph.recompute == "none" else HELD_BACK_AGAIN) * graph.p1
        self.until_wire = self._until_wire()

    def _until_wire(self) -> list[float]:
        """Processor seconds from the start of an op until its slice next has something for the link."""
        until = list(self.seconds)
        for i in reversed(range(len(self.ops))):
            if not self.travels[i]:
                following = [until[j] for j in self.feeds[i] if not self.weight[j] and self.ops[j].slice == self.ops[i].slice]
                until[i] += max(following, default=0.0)
        return until

    def order(self, policy: _Policy) -> list[SegmentOp]:
        """All ops, in the order in which they should run."""
        sign = -1 if policy.ahead else 1
        self.rank = [(sign * self.place[op._replace(slice=0)], op.slice) for op in self.ops]
        self.done, self.arrived = [0.0] * len(self.ops), [0.0] * len(self.ops)
        self.at = [0.0] * len(self.ops)  # when all that an op needs is there
        missing = [len(sources) for sources in self.needs]
        ready, order, now, link = [i for i, count in enumerate(missing) if not count], list[int](), 0.0, 0.0
        while ready:
            i = self._choose(policy, ready, now, link)
            ready.remove(i)
            order.append(i)
            now = self.done[i] = self.arrived[i] = max(now, self.at[i]) + self.seconds[i]
            if self.travels[i]:
                link = self.arrived[i] = max(now, link) + self.wire[i]
            for fed in self.feeds[i]:
                missing[fed] -= 1
                if not missing[fed]:
                    self.at[fed] = max(self.arrived[j] if collective else self.done[j] for j, collective in self.needs[fed])
                    ready.append(fed)
        assert len(order) == len(self.ops), "the segment graph has a cycle"
        return [self.ops[i] for i in order]

    def _choose(self, policy: _Policy, ready: list[int], now: float, link: float) -> int:
        chain = [i for i in ready if not self.weight[i]]
        free = [i for i in chain if not (policy.patience and self._blocks(i, policy.patience, chain, now, link))] or chain
        first = min(free, key=lambda i: (max(0.0, self.at[i] - now), self.rank[i]), default=None)
        weights = [i for i in ready if self.weight[i] and self.at[i] <= now]
        oldest = min(weights, key=lambda i: self.at[i], default=None)
        if oldest is not None and (first is None or self.at[first] > now or len(weights) > self.limit):
            return oldest
        if first is None:
            return min(ready, key=lambda i: self.at[i])
        backlog = policy.fill and oldest is not None and link - now > self.seconds[oldest] + self.seconds[first]
        return oldest if backlog and oldest is not None else first

    def _blocks(self, i: int, patience: float, chain: list[int], now: float, link: float) -> bool:
        """Whether the collective of op ``i`` would keep a slice before its own from the link for too long."""
        if not self.travels[i]:
            return False
        end = max(link, max(now, self.at[i]) + self.seconds[i]) + self.wire[i]
        wanted = [max(self.at[j], now) + self.until_wire[j] for j in chain if self.ops[j].slice < self.ops[i].slice]
        return any(end > moment + (1 - patience) * self.wire[i] for moment in wanted)

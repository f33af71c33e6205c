"""Choosing an order of segment ops in which collectives overlap computation (Domino, arXiv 2409.15241).

Orders are timed on a model of one processor and one link (``segment_costs``). ``domino_order`` is list
scheduling. Slices are independent chains: while one slice's collective travels, another slice computes.
Weight gradients, which nobody waits for, fill what is left. Then single ops are moved (``climb``).

Beyond the paper's fixed interleaving: any number of slices; weight gradients are deferred to where the
processor would idle; slices may run ahead of each other, so that one slice's compute-heavy backward overlaps
another's communication-heavy forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from plait.core.climb import Climber
from plait.core.model import ModelSpec
from plait.core.segment_costs import NumberedOps, SegmentCosts, segment_costs
from plait.core.segment_lists import async_order, insert_waits, sync_order
from plait.core.segments import Action, Phase, SegmentGraph
from plait.core.stages import Stage
from plait.core.strategy import Overlap, Strategy

# Orders are made for collectives that are so many times slower than measured ...
ASSUMED = (1.0, 1.4, 1.75)
# ... and judged by these: a rank that is late, or a communication thread that shares its core, slows
# collectives down, by a few percent where costs are medians of several steps.
JUDGED = (1.0, 1.1)
# Weight gradients that may be outstanding per slice before they take precedence: what is outstanding keeps
# activations alive. Fewer where these are computed again, since then memory is what matters.
HELD_BACK, HELD_BACK_AGAIN = 8, 2
# Of the lists made, so many of the best are improved.
IMPROVED = 4


def segment_order(graph: SegmentGraph, overlap: Overlap, costs: SegmentCosts, batch: int) -> list[Action]:
    """The action list of an overlap mode for micro-batches of ``batch`` sequences."""
    if not graph.communicates:  # nothing to hide: weight gradients at once, so that what they read can go
        return sync_order(graph)
    if overlap == "domino":
        return domino_order(graph, costs, batch)
    return async_order(graph) if overlap == "async" else sync_order(graph)


@dataclass(frozen=True)
class SegmentLists:
    """What a stage runs: its graph, and by phase the list of its actions."""

    graph: SegmentGraph
    phases: Mapping[Phase, Sequence[Action]]


@dataclass(frozen=True)
class Load:
    """What lists are made for: micro-batches of ``batch`` sequences of so many tokens. costs: measured; None:
    from shapes."""

    batch: int
    sequence: int
    costs: SegmentCosts | None = None


def segment_lists(
    model: ModelSpec, strategy: Strategy, stage: Stage, load: Load, phases: Iterable[Phase], *, backward: bool = True
) -> SegmentLists:
    """The lists of a stage's phases: a function of its arguments, so that every rank makes the same.
    backward: False to evaluate."""
    graph = SegmentGraph.of(model, strategy, stage, backward=backward)
    costs = load.costs or segment_costs(model, strategy, batch=load.batch, sequence=load.sequence)
    return SegmentLists(
        graph,
        {phase: segment_order(replace(graph, phase=phase), strategy.overlap, costs, load.batch) for phase in phases},
    )


def domino_order(graph: SegmentGraph, costs: SegmentCosts, batch: int) -> list[Action]:
    """The best of a few list-scheduling policies, improved, by simulated time with collectives as measured
    and late; the first if equal."""
    policies = [
        _Policy(ahead, fill, patience)
        for ahead in (True, False)
        for fill in (True, False)
        for patience in (0.0, 0.3, 0.7)
    ]
    held_back = (HELD_BACK if graph.recompute == "none" else HELD_BACK_AGAIN) * graph.p1
    schedulers = [_ListScheduler(graph, costs.late(factor), batch, held_back) for factor in ASSUMED]
    candidates = {tuple(scheduler.order(policy)): None for scheduler in schedulers for policy in policies}
    climber = Climber(graph, [costs.late(factor) for factor in JUDGED], batch, held_back)
    ranked = _ranked(climber, candidates)[:IMPROVED]
    best = _ranked(climber, [*ranked, *(climber.improve(order) for order in ranked)])[0]
    return insert_waits(graph, [climber.ops[i] for i in best])


def _ranked(climber: Climber, orders: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """By seconds, to a thousandth of the longest; equals as they come."""
    seconds = [(climber.seconds(order), order) for order in orders]
    longest = max(each for each, _ in seconds) or 1.0  # costs may all be zero
    return [order for _, order in sorted(seconds, key=lambda each: round(each[0] / longest, 3))]


class _Policy(NamedTuple):
    """How the list scheduler chooses.

    ahead: the slice that is further along goes first, so that slices drift apart; otherwise the one behind.
    fill: while the link has work for longer than a weight gradient takes, that goes first: nothing is lost by
    it. patience: a slice holds an op back, even if the processor idles, when its collective would block the
    link for more than the share ``1 - patience`` of its time after a slice before it wants the link. On a
    link that is the bottleneck this lets the first slice reach its compute-heavy backward early, beside which
    the others' forward communication hides. 0: never.
    """

    ahead: bool
    fill: bool
    patience: float


class _ListScheduler:
    """Greedy list scheduling: at every moment run the ready op that the policy prefers, or idle until one is
    ready.

    Lists are indexed by the numbers of ``NumberedOps``.
    """

    def __init__(self, graph: SegmentGraph, costs: SegmentCosts, batch: int, held_back: int) -> None:
        numbered = NumberedOps(graph)
        self.ops, self.needs, self.travels, self.held_back = numbered.ops, numbered.needs, numbered.travels, held_back
        self.seconds, self.wire = numbered.seconds(costs, batch)
        self.feeds: list[list[int]] = [[] for _ in self.ops]
        for i, sources in enumerate(self.needs):
            for source, _ in sources:
                self.feeds[source].append(i)
        self.weight = [op.kind == "W" for op in self.ops]
        self.place = {op: i for i, op in enumerate(op for op in self.ops if op.slice == 0)}
        self.until_wire = self._until_wire()
        # Of the order being made, by op: its preference, when it is done, when its result is there ...
        self.rank, self.done, self.arrived = list[tuple[int, int]](), list[float](), list[float]()
        self.at: list[float] = []  # ... and when all that it needs is there

    def _until_wire(self) -> list[float]:
        """Processor seconds from the start of an op until its slice next has something for the link."""
        until = list(self.seconds)
        for i in reversed(range(len(self.ops))):
            if not self.travels[i]:
                following = [
                    until[j] for j in self.feeds[i] if not self.weight[j] and self.ops[j].slice == self.ops[i].slice
                ]
                until[i] += max(following, default=0.0)
        return until

    def order(self, policy: _Policy) -> list[int]:
        """The numbers of all ops, in the order in which they should run."""
        sign = -1 if policy.ahead else 1
        self.rank = [(sign * self.place[op._replace(slice=0)], op.slice) for op in self.ops]
        self.done, self.arrived = [0.0] * len(self.ops), [0.0] * len(self.ops)
        self.at = [0.0] * len(self.ops)
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
                    self.at[fed] = max(
                        self.arrived[j] if collective else self.done[j] for j, collective in self.needs[fed]
                    )
                    ready.append(fed)
        assert len(order) == len(self.ops), "the segment graph has a cycle"
        return order

    def _choose(self, policy: _Policy, ready: list[int], now: float, link: float) -> int:
        chain = [i for i in ready if not self.weight[i]]
        free = [
            i for i in chain if not (policy.patience and self._blocks(i, policy.patience, chain, now, link))
        ] or chain
        first = min(free, key=lambda i: (max(0.0, self.at[i] - now), self.rank[i]), default=None)
        weights = [i for i in ready if self.weight[i] and self.at[i] <= now]
        oldest = min(weights, key=lambda i: self.at[i], default=None)
        if oldest is not None and (first is None or self.at[first] > now or len(weights) > self.held_back):
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

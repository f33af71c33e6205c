"""What a plan says a step will look like: a ``Timeline`` with the keys that the recorder gives what it
measures.

Segment ops and collectives of tensor parallelism, transfers between stages and the idle time for them.
Sharded data parallelism's collectives are not in it: what they cost stands in no plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from plait.core.dry_run import DryRun, dry_run
from plait.core.overlap import segment_order
from plait.core.plan import Plan
from plait.core.schedule import Op, Transfer, ends
from plait.core.segment_costs import SegmentCosts, TimedAction, makespan, segment_costs, simulate
from plait.core.segments import Phase, SegmentGraph
from plait.core.timeline import OpSpan, Span, SpanKind, Timeline, spans_of

_KINDS: dict[str, SpanKind] = {"run": "compute", "start": "comm", "wait": "wait"}


def predicted(plan: Plan, steps: Sequence[int] = (0,)) -> Timeline:
    """Every rank's spans of ``steps``, which are all alike; each begins at second 0.

    Times are those of ``plan.costs``; without any, of ``segment_costs`` from shapes, whose proportions mean
    more than their seconds.
    """
    stages = _Stages(plan)
    run = dry_run(plan.schedule, stages)
    spans: list[Span] = []
    for place, mesh in enumerate(plan.layout.meshes):
        found = [*stages.inside(run, place), *_between(run, place)]
        spans += [span for step in steps for rank in mesh.ranks for span in spans_of(step, rank, found)]
    return Timeline(tuple(spans), plan.hash)


class _Stages:
    """The inside of a plan's stages, phase by phase; what the ops of its schedule cost."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.placed = cache(self._placed)

    def _placed(self, stage: int, phase: Phase) -> list[TimedAction]:
        """A stage's list for a phase, from second 0."""
        plan, place = self.plan, self.plan.schedule.rank_of[stage]
        strategy, batch = plan.strategy_of(place), plan.largest_share(place)
        shapes = segment_costs(plan.model, strategy, batch=batch, sequence=plan.workload.sequence)
        costs = plan.costs or shapes
        graph = replace(SegmentGraph.of(plan.model, strategy, plan.stages[stage]), phase=phase)
        actions = segment_order(graph, strategy.overlap, costs, batch)
        silent = SegmentCosts(costs.compute, {})  # without overlap there is no network at all
        return simulate(graph, actions, silent if strategy.overlap == "none" else costs, batch)

    def seconds(self, op: Op) -> float:
        """Of a computation of the schedule."""
        return makespan(self.placed(op.stage, _phase(op)))

    def travel(self, transfer: Transfer) -> float:
        """Of the tensors that go from stage to stage, one after the other."""
        reshards = self.plan.reshards.get(self.plan.strategy.sequence_parallel, {})
        plans = reshards.get((transfer.source, transfer.target), {})
        return sum(plan.predicted for plan in plans.values()) * 1e-9

    def inside(self, run: DryRun, place: int) -> Iterator[OpSpan]:
        """Segment ops, where the schedule's ops are placed."""
        for at in run.computations(place):
            for (verb, op), start, end in self.placed(at.op.stage, _phase(at.op)):
                if verb != "start" or self.plan.strategy.overlap != "none":
                    yield OpSpan(op, _KINDS[verb], at.start + start, at.start + end)


def _phase(op: Op) -> Phase:
    assert op.computes
    return "step" if op.kind == "S" else op.kind  # type: ignore[return-value]  (the rest moves tensors)


def _between(run: DryRun, place: int) -> Iterator[OpSpan]:
    """Transfers that a place sends, and how long it stands still for those that it needs."""
    arrived = {p.op.transfer: p.end for p in run.placed if not p.op.computes}
    for p in run.placed:
        if p.rank == place and not p.op.computes:
            yield OpSpan(p.op, "transfer", p.start, p.end)
    now = 0.0
    for at in run.computations(place):
        for transfer in run.schedule.arrivals(at.op):
            begin, now = now, max(now, arrived[transfer])
            yield OpSpan(ends(transfer)[1], "idle", begin, now)
        now = at.end

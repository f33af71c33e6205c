"""Closing what a plan leaves open with what timed steps have found: a pure function, applied once, before the
first step of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from plait.core.job.plan import Choices, Plan
from plait.core.parallel.strategy import ShardOverlap, Strategy
from plait.core.step.schedule import Schedule, with_edges, with_transfers
from plait.core.step.schedules import Shape, enough_slack, generate
from plait.core.step.seconds.segment_costs import SegmentCosts

SLACK_TOLERANCE = 0.02
"""What a period may lose to transfers: measured times are no better than this, and a whole micro-batch alive
is a high price for less."""


@dataclass(frozen=True)
class TimedTrial:
    """A candidate and its median seconds for a step, the slowest rank's."""

    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class Times:
    """Seconds that decide slack. compute: of a micro-batch, forward and backward, on every place. transfer:
    of a lone transfer over every boundary between stages, 0 where both stages lie on one place."""

    compute: tuple[float, ...]
    transfer: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What timed steps have found. costs: of ops and collectives, by whether the residual stream was
    sequence-parallel. strategies: candidates timed. overlaps: likewise, that differ in sharding's overlap
    only. compiled: in whether they are compiled; graphed: in whether they are captured."""

    costs: Mapping[bool, SegmentCosts] = field(default_factory=dict[bool, SegmentCosts])
    strategies: tuple[TimedTrial, ...] = ()
    overlaps: tuple[TimedTrial, ...] = ()
    compiled: tuple[TimedTrial, ...] = ()
    graphed: tuple[TimedTrial, ...] = ()
    times: Times | None = None
    notes: Mapping[str, str] = field(default_factory=dict[str, str])


def refine(plan: Plan, found: Measurements) -> Plan:
    """The plan that ranks obey: what was open is what was fastest; nothing is open any more.

    Only the reshard plans of the chosen residual stream are kept.
    """
    chosen = fastest(found.strategies, plan.strategy)
    strategy = with_overlap(chosen, fastest(found.overlaps, chosen).shard_overlap)
    strategy = replace(strategy, compile=fastest(found.compiled, strategy).compile)
    strategy = replace(strategy, cuda_graphs=fastest(found.graphed, strategy).cuda_graphs)
    parallel = strategy.sequence_parallel
    schedule = slack_schedule(plan, found.times) if plan.choices.slack and found.times else plan.schedule
    return replace(
        plan,
        strategy=strategy,
        schedule=schedule,
        reshards={key: value for key, value in plan.reshards.items() if key == parallel},
        costs=found.costs.get(parallel, plan.costs),
        choices=Choices(),
        origin=plan.intent,
        notes={**plan.notes, **found.notes},
    )


def fastest(timed: tuple[TimedTrial, ...], otherwise: Strategy) -> Strategy:
    """The candidate that took least time."""
    return min(timed, key=lambda one: one.seconds).strategy if timed else otherwise


def with_overlap(strategy: Strategy, overlap: ShardOverlap) -> Strategy:
    """The same but for which of sharding's communication overlaps computation."""
    return replace(strategy, shard_overlap=overlap)


def slack_schedule(plan: Plan, times: Times) -> Schedule:
    """slack-1f1b with the slack that stages and links need, transfers included."""
    slack = enough_slack(times.compute, times.transfer, SLACK_TOLERANCE)
    shape = Shape(ranks=len(plan.layout.degrees), micro_batches=plan.workload.num_micro_batches, slack=slack)
    return with_transfers(with_edges(generate("slack-1f1b", shape), plan.schedule.edges))

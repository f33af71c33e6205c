"""Refinement of a plan: timed steps close its open decisions. ``refine`` is a pure function,
applied once, before the first step of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from plait.core.job.plan import Choices, Plan
from plait.core.parallel.strategy import ShardOverlap, Strategy
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.schedule import Schedule, with_edges, with_transfers
from plait.core.step.schedules import Shape, enough_slack, generate

SLACK_TOLERANCE = 0.02
"""Share of a period that may be lost to transfers: measured times are not more exact, and one more
micro-batch alive is a high price for less."""


@dataclass(frozen=True)
class TimedTrial:
    """A candidate and the median seconds of its step, on the slowest rank."""

    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class Times:
    """Seconds that determine slack. compute: forward and backward of a micro-batch, on every
    pipeline rank. transfer: a lone transfer over every boundary between stages; 0 if both stages
    are on one pipeline rank."""

    compute: tuple[float, ...]
    transfer: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Results of timed steps. costs: of ops and collectives, by whether the residual stream was
    sequence-parallel. strategies: timed candidates. overlaps: timed candidates that differ only in
    sharding's overlap; compiled: only in compilation; graphed: only in CUDA graphs."""

    costs: Mapping[bool, SegmentCosts] = field(default_factory=dict[bool, SegmentCosts])
    strategies: tuple[TimedTrial, ...] = ()
    overlaps: tuple[TimedTrial, ...] = ()
    compiled: tuple[TimedTrial, ...] = ()
    graphed: tuple[TimedTrial, ...] = ()
    times: Times | None = None
    notes: Mapping[str, str] = field(default_factory=dict[str, str])


def refine(plan: Plan, measured: Measurements) -> Plan:
    """Return the plan that ranks obey: every open decision takes the fastest candidate, and none
    stays open.

    Only the reshard plans of the chosen residual stream are kept.
    """
    chosen = fastest(measured.strategies, plan.strategy)
    strategy = with_overlap(chosen, fastest(measured.overlaps, chosen).shard_overlap)
    strategy = replace(strategy, compile=fastest(measured.compiled, strategy).compile)
    strategy = replace(strategy, cuda_graphs=fastest(measured.graphed, strategy).cuda_graphs)
    parallel = strategy.sequence_parallel
    schedule = slack_schedule(plan, measured.times) if plan.choices.slack and measured.times else plan.schedule
    return replace(
        plan,
        strategy=strategy,
        schedule=schedule,
        reshards={key: value for key, value in plan.reshards.items() if key == parallel},
        costs=measured.costs.get(parallel, plan.costs),
        choices=Choices(),
        origin=plan.intent,
        notes={**plan.notes, **measured.notes},
    )


def fastest(timed: tuple[TimedTrial, ...], otherwise: Strategy) -> Strategy:
    """Return the fastest candidate, or ``otherwise`` if none was timed."""
    return min(timed, key=lambda one: one.seconds).strategy if timed else otherwise


def with_overlap(strategy: Strategy, overlap: ShardOverlap) -> Strategy:
    """Return the strategy with another overlap of the communication of sharded data parallelism."""
    return replace(strategy, shard_overlap=overlap)


def slack_schedule(plan: Plan, times: Times) -> Schedule:
    """Return slack-1f1b with the slack that stages and links need, with transfers."""
    slack = enough_slack(times.compute, times.transfer, SLACK_TOLERANCE)
    shape = Shape(ranks=len(plan.layout.degrees), micro_batches=plan.workload.num_micro_batches, slack=slack)
    return with_transfers(with_edges(generate("slack-1f1b", shape), plan.schedule.edges))


# ---- whether timing pays ----


ROUNDS = 3
"""Timed rounds of all candidates, if the run can pay for them; the lowest median wins."""
WARM_UP = 1
"""Rounds before the timed rounds, which are not counted."""
TIMING_SHARE = 0.5
"""Share of the largest possible saving that timing may cost: hiding communication saves some two
thirds of it, and seldom all."""


COMPILE_SAVING = 0.25
"""Largest share of a step that compiling is assumed to save: what lies between matrix products
seldom takes more."""
COMPILE_SECONDS = 40.0
"""Seconds that compiling a model takes with an empty compiler cache, on a CPU."""


def worth_compiling(step_seconds: float, steps_left: int) -> str:
    """Return why compiling, and timing steps with and without it, cannot pay in the remaining
    steps; empty if it may pay.

    >>> worth_compiling(0.1, 400)
    'not tried: it can save at most 10 s of this run, and takes some 40 s itself'
    >>> worth_compiling(2.0, 400)
    ''
    """
    saves = COMPILE_SAVING * step_seconds * max(steps_left, 0)
    if TIMING_SHARE * saves >= COMPILE_SECONDS:
        return ""
    return f"not tried: it can save at most {saves:.0f} s of this run, and takes some {COMPILE_SECONDS:.0f} s itself"


@dataclass(frozen=True)
class Timing:
    """Numbers of candidates to time and of rounds. 0 and 0: none is timed, and the plain order is
    kept."""

    candidates: int
    rounds: int
    of: int
    """Number of all candidates."""
    saves: float
    """Most seconds that hiding communication can save in the remaining steps."""
    costs: float
    """Seconds that timing all candidates in all rounds would take."""

    def __str__(self) -> str:
        """Return one line for people, for the case that not everything is timed."""
        gain = f"hiding communication can save at most {self.saves:.1f} s of this run"
        if not self.candidates:
            return f"nothing is timed before training: {gain}, timing {self.of} candidates takes {self.costs:.1f} s"
        return f"timing {self.candidates} of {self.of} candidates, rounds: {self.rounds}; {gain}"


def timing_budget(
    step_seconds: float,
    exposed_seconds: float,
    steps_left: int,
    candidates: int,
    *,
    rounds: int = ROUNDS,
    overhead: float = 0.0,
) -> Timing:
    """Return how many of ``candidates`` to time, in how many of ``rounds``.

    step_seconds: measured seconds of a plain step. exposed_seconds: seconds of communication in it
    that overlap no computation. overhead: overhead in seconds of each candidate, to find its order.
    Rounds are given up first, down to one, then candidates: the caller lists candidates in the
    expected order of speed. A single candidate is never timed, since there is nothing to compare it
    with.

    >>> timing_budget(0.1, 0.03, 10_000, 8)
    Timing(candidates=8, rounds=3, of=8, saves=300.0, costs=3.2)
    >>> str(timing_budget(0.1, 0.03, 40, 8))
    'timing 2 of 8 candidates, rounds: 1; hiding communication can save at most 1.2 s of this run'
    """
    saves = min(exposed_seconds, step_seconds) * max(steps_left, 0)

    def each(tried: int) -> float:
        return overhead + (tried + WARM_UP) * step_seconds

    fit = [tried for tried in range(rounds, 0, -1) if candidates * each(tried) <= TIMING_SHARE * saves]
    count = 0 if saves <= 0 else candidates if fit else int(TIMING_SHARE * saves / each(1))
    costs = candidates * each(rounds)
    if count < 2:
        return Timing(0, 0, candidates, saves, costs)
    return Timing(count, fit[0] if fit else 1, candidates, saves, costs)

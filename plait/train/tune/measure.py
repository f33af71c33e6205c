"""Measure the choices that a plan leaves open, with the real kernels and links, before training.

First a step of the plain order gives the costs of all ops and collectives, and the communication
that could be hidden. A run too short to pay for more keeps the plain order. Otherwise the
candidates' orders are made with costs from several such steps. Whole steps of the candidates then
run interleaved, so that noise affects all equally. With the fastest: how much of sharding's
communication to overlap, and the slack that every stage boundary needs.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from plait.core.job.plan import Plan
from plait.core.job.refine import (
    ROUNDS,
    Measurements,
    TimedTrial,
    Times,
    Timing,
    refine,
    timing_budget,
    with_overlap,
    worth_compiling,
)
from plait.core.parallel.strategy import ShardOverlap, Strategy
from plait.core.record.timeline import OpSpan
from plait.core.step.schedule import Transfer
from plait.core.step.schedules import whole_steps
from plait.core.step.segments import SegmentOp
from plait.core.step.traffic import UnitOp
from plait.train.comm.tree import barrier, gather
from plait.train.engine.agreement import compile_ahead
from plait.train.engine.assembly import RankPart
from plait.train.engine.courier import LaneCourier
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import RankDevice
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import RECORDED, median_costs, recorded, time_interleaved

REPEATS = 5
"""Round trips over a stage boundary; the shortest counts."""


Step = Callable[[RankPart], Callable[[], object]]
"""Function that returns a callable running one step under a part's plan."""


def measure(part: RankPart, batches: Sequence[MicroBatch], steps_left: int) -> Measurements:
    """Return the results of timed steps of ``batches``, this rank's, for ``part.plan.choices``;
    equal on every rank.

    ``part`` must record. Its gradients are zero afterwards, as at a step's beginning. steps_left:
    of the run; timing must pay off within them.
    """
    plan = part.plan
    found = Measurements()
    if plan.choices.strategies:
        found = _slices(part, batches, steps_left)
    if plan.choices.shard_overlap:
        overlaps, note = _overlaps(part.under(refine(plan, found)), batches, steps_left)
        found = replace(found, overlaps=overlaps, notes={**found.notes, "sharding": note})
    if plan.choices.compile:
        compiled, note = _compiled(part.under(refine(plan, found)), batches, steps_left)
        found = replace(found, compiled=compiled, notes={**found.notes, "compile": note})
    if plan.choices.cuda_graphs:
        graphed, note = _graphed(part.under(refine(plan, found)), batches)
        found = replace(found, graphed=graphed, notes={**found.notes, "cuda_graphs": note})
    if plan.choices.slack:
        found = replace(found, times=_times(part.under(refine(plan, found)), batches))
    _forget(part)
    return found


def _slices(part: RankPart, batches: Sequence[MicroBatch], steps_left: int) -> Measurements:
    plan, runs = part.plan, steps_left
    if plan.schedule.whole:  # micro-batches run one after the other, so one is enough
        runs *= len(batches)
        plan, batches = replace(plan, schedule=whole_steps(1)), batches[:1]
    base, tried = plan.strategy, _likely(plan.choices.strategies, plan.strategy)
    plain = _PlainSteps(part.under(_plain(plan, base.sequence_parallel)), _runs(batches), SegmentOp)
    timing = plain.affordable(part.under(plan), runs, tried)
    if not timing.candidates:
        costs = median_costs(plain.steps, len(batches))
        return Measurements(costs={base.sequence_parallel: costs}, notes={"slices": str(timing)})
    tried, count = tried[: timing.candidates], RECORDED if timing.rounds == ROUNDS else timing.rounds
    costs = {base.sequence_parallel: median_costs(plain.more(count), len(batches))}
    for parallel in sorted({one.sequence_parallel for one in tried} - set(costs)):
        other = _PlainSteps(part.under(_plain(plan, parallel)), _runs(batches), SegmentOp)
        costs[parallel] = median_costs(other.more(count), len(batches))
    plans = [replace(plan, strategy=one, costs=costs[one.sequence_parallel]) for one in tried]
    timed = _time(part, plans, _runs(batches), timing.rounds)
    return Measurements(costs=costs, strategies=timed, notes={"slices": _note(timing)})


def _likely(candidates: Sequence[Strategy], base: Strategy) -> list[Strategy]:
    """Return the base strategy first, then candidates in order of likely speed, for the case that
    not all can be timed. First come those with the base's sequence parallelism and few slices of
    weights, which cost more than slices of the batch."""
    return sorted(candidates, key=lambda one: (one.sequence_parallel != base.sequence_parallel, one.p2, one.p1))


def _runs(batches: Sequence[MicroBatch]) -> Step:
    """Return a step function that runs forward and backward of ``batches`` only, without
    optimizer."""
    return lambda one: lambda: one.pipeline.run(batches)


def _plain(plan: Plan, sequence_parallel: bool) -> Plan:
    """Return the plan without any overlap, so that every op and collective shows its cost."""
    strategy = replace(plan.strategy, overlap="sync", p1=1, p2=1, sequence_parallel=sequence_parallel)
    return replace(plan, strategy=strategy, costs=None)


def _note(timing: Timing) -> str:
    everything = timing.candidates == timing.of and timing.rounds == ROUNDS
    return f"fastest of {timing.of} timed candidates" if everything else str(timing)


class _PlainSteps:
    """Recorded steps without overlap, after one warm-up step. kind: type of the ops whose
    communication could be hidden."""

    def __init__(self, part: RankPart, step: Step, kind: type[SegmentOp] | type[UnitOp]) -> None:
        assert part.recorder is not None
        self.recorder, self.kind, self._run = part.recorder, kind, step(part)
        self._run()
        start = time.perf_counter()
        self.steps = recorded(self._run, self.recorder, 1)
        self.seconds = time.perf_counter() - start

    def more(self, count: int) -> list[list[OpSpan]]:
        """Return the spans of ``count`` steps, including those already recorded."""
        self.steps += recorded(self._run, self.recorder, count - len(self.steps))
        return self.steps

    def affordable(self, base: RankPart, runs: int, tried: Sequence[Strategy]) -> Timing:
        """Return how many candidates to time, and how often, for ``runs`` steps; equal on every
        rank. base: the part with the plan's own order."""
        start = time.perf_counter()
        _ = base.pipeline  # computes the base's order; the candidates' take longer, as they have more ops
        order = time.perf_counter() - start
        sliced = statistics.fmean(one.p1 * one.p2 for one in tried) / (base.plan.strategy.p1 * base.plan.strategy.p2)
        hideable = sum(
            span.end - span.start for span in self.steps[0] if span.kind == "comm" and isinstance(span.op, self.kind)
        )
        every = gather([self.seconds, hideable, order])
        seconds, hideable, order = (max(column) for column in zip(*every, strict=True))
        beside = order * sliced + RECORDED * seconds / len(tried)
        return timing_budget(seconds, hideable, runs, len(tried), overhead=beside)


def _overlaps(part: RankPart, batches: Sequence[MicroBatch], steps_left: int) -> tuple[tuple[TimedTrial, ...], str]:
    """Time steps (without the optimizer) with every affordable overlap of sharding's communication.
    Return the trials and a note."""
    plan, step = part.plan, _steps(batches)
    tried = [with_overlap(plan.strategy, each) for each in reversed(get_args(ShardOverlap))]  # the base first
    plain = part.under(replace(plan, strategy=with_overlap(plan.strategy, "none")))
    timing = _PlainSteps(plain, step, UnitOp).affordable(part, steps_left, tried)
    plans = [replace(plan, strategy=one) for one in tried[: timing.candidates]]
    return _time(part, plans, step, timing.rounds) if plans else (), _note(timing)


def _compiled(part: RankPart, batches: Sequence[MicroBatch], steps_left: int) -> tuple[tuple[TimedTrial, ...], str]:
    """Time steps compiled and not, if compiling is possible and can pay. Return the trials and a
    note."""
    plan, step = part.plan, _steps(batches)
    (plain,) = _time(part, [plan], step, rounds=1)
    if why := worth_compiling(plain.seconds, steps_left):
        return (), why
    other = replace(plan, strategy=replace(plan.strategy, compile=True))
    done = compile_ahead(part.under(other))
    if done.problem:
        return (), f"not possible ({done.problem})"
    timed = _time(part, [plan, other], step, ROUNDS)
    op_by_op, compiled = (one.seconds * 1e3 for one in timed)
    return timed, f"{done}; a step takes {compiled:.1f} ms, {op_by_op:.1f} ms if not compiled"


def _graphed(part: RankPart, batches: Sequence[MicroBatch]) -> tuple[tuple[TimedTrial, ...], str]:
    """Time steps captured and not, if capture is possible. Return the trials and a note."""
    plan, step = part.plan, _steps(batches)
    if not part.device.captures:
        return (), f"not possible on {part.device.description}"
    if not all(sharding.keeps_buffers for sharding in plan.shardings):
        return (), "not possible: sharded weights or gradients have no fixed place in memory"
    other = replace(plan, strategy=replace(plan.strategy, cuda_graphs=True))
    timed = _time(part, [plan, other], step, ROUNDS)
    op_by_op, captured = (one.seconds * 1e3 for one in timed)
    return timed, f"a step takes {captured:.1f} ms with CUDA graphs, {op_by_op:.1f} ms without"


def _steps(batches: Sequence[MicroBatch]) -> Step:
    """Return a step without the optimizer."""

    def step(part: RankPart) -> Callable[[], object]:
        def run() -> None:
            part.pipeline.prefetch()
            part.pipeline.run(batches)
            if part.shards:
                part.shards.complete()
                part.shards.publish(later=True)

        return run

    return step


def _time(part: RankPart, plans: Sequence[Plan], step: Step, rounds: int) -> tuple[TimedTrial, ...]:
    """Return the seconds of a step under each plan, measured without recording."""
    silent = replace(part, recorder=None)
    seconds = time_interleaved([step(silent.under(plan)) for plan in plans], part.device, rounds=rounds)
    return tuple(TimedTrial(plan.strategy, taken) for plan, taken in zip(plans, seconds, strict=True))


def _times(part: RankPart, batches: Sequence[MicroBatch]) -> Times:
    assert part.recorder is not None
    busy = defaultdict[int, float](float)
    for pp_rank, seconds in gather([part.groups.pp_rank, _busy(part, batches, part.recorder) / len(batches)]):
        busy[pp_rank] = max(busy[pp_rank], seconds)
    compute = tuple(busy[pp_rank] for pp_rank in range(len(part.plan.layout.degrees)))
    return Times(compute, tuple(travel_times(part.courier, part.groups.pp_rank, part.device)))


def _busy(part: RankPart, batches: Sequence[MicroBatch], recorder: Recorder) -> float:
    """Return the seconds in which a step's segments compute or wait for their own collectives,
    after one warm-up step."""
    _, spans = recorded(lambda: part.pipeline.run(batches), recorder, 2)
    return sum(span.end - span.start for span in spans if span.kind != "comm" and isinstance(span.op, SegmentOp))


def travel_times(courier: LaneCourier, pp_rank: int, device: RankDevice) -> list[float]:
    """Return the seconds of a single transfer over each stage boundary, the mean of both
    directions; equal on every rank.

    It is half of the shortest of several round trips, by the clock of the pipeline rank that begins
    them. Disturbances only lengthen a transfer, and ranks do not leave a barrier at the same
    moment. Transfers of a running pipeline cannot be used: a sender is done when its kernel has the
    data.
    """
    rank_of = courier.schedule.rank_of

    def send(transfer: Transfer) -> None:
        courier.send(transfer, courier.tiles(transfer, receiving=False)).wait()

    def round_trip(stage: int) -> float:
        there, back = Transfer(stage, stage + 1, "F", 0), Transfer(stage + 1, stage, "B", 0)
        barrier()
        start, seconds = time.perf_counter(), 0.0
        if pp_rank == rank_of[stage]:
            send(there)
            courier.receive(back)[1].wait()
            device.synchronize()
            seconds = time.perf_counter() - start
        elif pp_rank == rank_of[stage + 1]:
            courier.receive(there)[1].wait()
            send(back)
        return max(gather(seconds))

    crossed = [rank_of[stage] != rank_of[stage + 1] for stage in range(courier.schedule.num_stages - 1)]
    return [min(round_trip(stage) for _ in range(REPEATS)) / 2 if far else 0.0 for stage, far in enumerate(crossed)]


def _forget(part: RankPart) -> None:
    """Discard the gradients of timed steps, including those still being reduced."""
    if part.shards:
        part.shards.complete()
        part.shards.settle()
    part.gradients.zero()
    if part.recorder:
        part.recorder.forget()  # timed steps are not steps of the run

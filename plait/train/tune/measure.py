"""Measuring what a plan leaves open, on the real kernels and links, before training.

First what every op and collective costs, from recorded steps of the plain order; with these costs the
candidates'
orders are made. Then whole steps of all candidates, interleaved, so that noise hits all alike; then, under
the fastest, what of sharding's communication is best left under way, and how much slack every boundary needs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import torch.distributed as dist

from plait.core.plan import Plan
from plait.core.refine import Measurements, Timed, Times, refine
from plait.core.schedule import Transfer, whole_steps
from plait.core.segment_costs import SegmentCosts
from plait.core.segments import SegmentOp
from plait.core.strategy import ShardOverlap, Strategy
from plait.core.timeline import OpSpan
from plait.train.comm.objects import gather
from plait.train.engine.assembly import Part
from plait.train.engine.courier import LaneCourier
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import Device
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import time_interleaved, typical_costs

ROUNDS = 3
REPEATS = 5
"""Round trips over a boundary; the shortest counts."""


def measure(part: Part, batches: Sequence[MicroBatch]) -> Measurements:
    """What timed steps of ``batches``, this rank's, say about ``part.plan.choices``; the same on every rank.

    ``part`` records. Its gradients are left as they were at a step's beginning.
    """
    plan = part.plan
    found = Measurements()
    if plan.choices.strategies:
        found = _slices(part, batches)
    if plan.choices.shard_overlap:
        found = replace(found, overlaps=_overlaps(part.under(refine(plan, found)), batches))
    if plan.choices.slack:
        found = replace(found, times=_times(part.under(refine(plan, replace(found, times=None))), batches))
    _forget(part)
    return found


def _slices(part: Part, batches: Sequence[MicroBatch]) -> Measurements:
    plan = part.plan
    if plan.schedule.whole:  # micro-batches follow one another: one tells as much as all
        plan, batches = replace(plan, schedule=whole_steps(1)), batches[:1]
    costs = {parallel: _costs(part.under(_plain(plan, parallel)), batches) for parallel in plan.reshards}
    tried = plan.choices.strategies
    plans = [replace(plan, strategy=one, costs=costs[one.sequence_parallel]) for one in tried]
    seconds = _time(part, plans, lambda one: lambda: one.pipeline.run(batches))
    timed = tuple(Timed(*pair) for pair in zip(tried, seconds, strict=True))
    return Measurements(costs=costs, strategies=timed, notes={"slices": f"fastest of {len(timed)} timed candidates"})


def _plain(plan: Plan, sequence_parallel: bool) -> Plan:
    """Nothing hidden, so that every op and collective shows what it takes."""
    strategy = replace(plan.strategy, overlap="sync", p1=1, p2=1, sequence_parallel=sequence_parallel)
    return replace(plan, strategy=strategy, costs=None)


def _costs(part: Part, batches: Sequence[MicroBatch]) -> SegmentCosts:
    assert part.recorder is not None
    return typical_costs(lambda: part.pipeline.run(batches), part.recorder, len(batches))


def _overlaps(part: Part, batches: Sequence[MicroBatch]) -> tuple[Timed, ...]:
    """Steps with every overlap of sharding's communication, the optimizer left out."""

    def step(one: Part) -> Callable[[], object]:
        def run() -> None:
            one.pipeline.ahead()
            one.pipeline.run(batches)
            if one.shards:
                one.shards.complete()
                one.shards.publish()

        return run

    tried: list[Strategy] = [replace(part.plan.strategy, shard_overlap=each) for each in get_args(ShardOverlap)]
    seconds = _time(part, [replace(part.plan, strategy=one) for one in tried], step)
    return tuple(Timed(*pair) for pair in zip(tried, seconds, strict=True))


def _time(part: Part, plans: Sequence[Plan], step: Callable[[Part], Callable[[], object]]) -> list[float]:
    """Seconds of a step under each plan, not recorded."""
    silent = replace(part, recorder=None)
    return time_interleaved([step(silent.under(plan)) for plan in plans], part.device, rounds=ROUNDS)


def _times(part: Part, batches: Sequence[MicroBatch]) -> Times:
    assert part.recorder is not None
    busy = defaultdict[int, float](float)
    for place, seconds in gather([part.groups.place, _busy(part, batches, part.recorder) / len(batches)]):
        busy[place] = max(busy[place], seconds)
    compute = tuple(busy[place] for place in range(len(part.plan.layout.degrees)))
    return Times(compute, tuple(travel_times(part.courier, part.groups.place, part.device)))


def _busy(part: Part, batches: Sequence[MicroBatch], recorder: Recorder) -> float:
    """Seconds in which a step's segments compute or wait for their own collectives, after a step to warm
    up."""
    spans: list[OpSpan] = []
    for _ in range(2):
        recorder.take()
        part.pipeline.run(batches)
        spans = recorder.take()
    return sum(span.end - span.start for span in spans if span.kind != "comm" and isinstance(span.op, SegmentOp))


def travel_times(courier: LaneCourier, place: int, device: Device) -> list[float]:
    """Seconds of a lone transfer over the boundary behind every stage until it has arrived, the mean of both
    directions; the same on every rank.

    Half of the shortest of several round trips, by the clock of the place that begins them: whatever disturbs
    a lone transfer makes it longer, and places do not leave a barrier at the same moment. Transfers of a
    running pipeline do
    not tell: a sender is done when its kernel has the data.
    """
    rank_of = courier.schedule.rank_of

    def send(transfer: Transfer) -> None:
        courier.send(transfer, courier.tiles(transfer, receiving=False)).wait()

    def round_trip(stage: int) -> float:
        there, back = Transfer(stage, stage + 1, "F", 0), Transfer(stage + 1, stage, "B", 0)
        dist.barrier()
        start, seconds = time.perf_counter(), 0.0
        if place == rank_of[stage]:
            send(there)
            courier.receive(back)[1].wait()
            device.synchronize()
            seconds = time.perf_counter() - start
        elif place == rank_of[stage + 1]:
            courier.receive(there)[1].wait()
            send(back)
        return max(gather(seconds))

    crossed = [rank_of[stage] != rank_of[stage + 1] for stage in range(courier.schedule.num_stages - 1)]
    return [min(round_trip(stage) for _ in range(REPEATS)) / 2 if far else 0.0 for stage, far in enumerate(crossed)]


def _forget(part: Part) -> None:
    """Gradients of steps that were only timed, also those that are still being reduced."""
    if part.shards:
        part.shards.complete()
    part.gradients.zero()
    if part.recorder:
        part.recorder.take()  # what was timed belongs to no step

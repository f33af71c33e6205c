"""Measuring before a pipelined run, on the real kernels and links: which slices are fastest, what of
sharding's communication is best left under way, how much slack every boundary needs.

Slices: as in ``tune``, but a candidate is timed over whole steps, so that what counts is the step, not the
stage that happens to be asked. Slack: ``enough_slack`` of what a micro-batch costs every stage in a recorded
step, and of a lone transfer over every boundary.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch.distributed as dist

from plait.core.schedule import Schedule, Transfer, with_edges, with_transfers
from plait.core.schedules import Shape, enough_slack, generate
from plait.core.segment_costs import SegmentCosts
from plait.core.segments import SegmentOp
from plait.core.strategy import ShardOverlap, Strategy
from plait.train.engine.assembly import Part
from plait.train.engine.courier import LaneCourier
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import Device
from plait.train.record.recorder import RecordedSpan, Recorder
from plait.train.tune.slices import ROUNDS, Candidate, candidates, measured_costs, time_interleaved

# What a period may lose to transfers: measured times are no better than this, and a whole micro-batch alive
# is a high price for less.
SLACK_TOLERANCE = 0.02


def choose_pipeline_slices(
    part: Part, batches: Sequence[MicroBatch], recorder: Recorder
) -> tuple[list[Candidate], SegmentCosts]:
    """Time whole steps of ``batches``, this rank's, under every slicing; all candidates and the measured
    costs, the same on every rank.

    ``part`` records into ``recorder``. Adds into the gradients: zero them afterwards.
    """
    spans = _recorded(part.changed(replace(part.strategy, overlap="sync", p1=1, p2=1), None), batches, recorder)
    costs = _mean_over_ranks(measured_costs(spans, len(batches)))
    silent = replace(part, recorder=None)
    tried = _candidates(part, batches)
    runs = [_stepper(silent.changed(strategy, costs), batches) for strategy in tried]
    times = time_interleaved(runs, part.device, rounds=ROUNDS)
    return [Candidate(strategy, seconds / len(batches)) for strategy, seconds in zip(tried, times, strict=True)], costs


def choose_shard_overlap(part: Part, batches: Sequence[MicroBatch]) -> list[Candidate]:
    """Time whole steps of ``batches`` with every overlap of sharding's communication, the optimizer left out;
    the same on every rank.

    Adds into the gradients: zero them afterwards.
    """
    assert part.shards is not None
    shards, silent = part.shards, replace(part, recorder=None)

    def stepper(one: Part) -> Callable[[], object]:
        def step() -> None:
            one.pipeline.ahead()
            one.pipeline.run(batches)
            shards.complete()
            shards.publish()

        return step

    tried = [replace(part.strategy, shard_overlap=overlap) for overlap in get_args(ShardOverlap)]
    times = time_interleaved(
        [stepper(silent.changed(strategy, part.costs)) for strategy in tried], part.device, rounds=ROUNDS
    )
    return [Candidate(strategy, seconds / len(batches)) for strategy, seconds in zip(tried, times, strict=True)]


def choose_slack(part: Part, batches: Sequence[MicroBatch], recorder: Recorder) -> Schedule:
    """slack-1f1b with the slack that ``part``'s stages and links need, transfers included; the same on every
    rank."""
    plan = part.plan
    busy = defaultdict[int, float](float)
    for place, seconds in _gathered((part.groups.place, _busy(_recorded(part, batches, recorder)) / len(batches))):
        busy[place] = max(busy[place], seconds)
    slack = enough_slack(
        [busy[place] for place in range(len(plan.degrees))],
        travel_times(plan.schedule, part.courier, part.groups.place, part.device),
        SLACK_TOLERANCE,
    )
    shape = Shape(ranks=len(plan.degrees), micro_batches=plan.schedule.num_micro_batches, slack=slack)
    return with_transfers(with_edges(generate("slack-1f1b", shape), plan.schedule.edges))


def travel_times(schedule: Schedule, courier: LaneCourier, place: int, device: Device, repeats: int = 5) -> list[float]:
    """Seconds of a lone transfer over the boundary behind every stage until it has arrived, the mean of both
    directions.

    The same on every rank: half of the shortest of ``repeats`` round trips, by the clock of the place that
    begins them, since whatever disturbs a lone transfer makes it longer, and places do not leave a barrier at
    the same moment. Transfers of a running pipeline do not tell: a sender is done when its kernel has the
    data.
    """
    rank_of = schedule.rank_of

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
        return max(_gathered(seconds))

    crossed = [rank_of[stage] != rank_of[stage + 1] for stage in range(schedule.num_stages - 1)]
    return [min(round_trip(stage) for _ in range(repeats)) / 2 if far else 0.0 for stage, far in enumerate(crossed)]


def _candidates(part: Part, batches: Sequence[MicroBatch]) -> list[Strategy]:
    """Slicings that every place allows, with its share of a micro-batch and its tensor-parallel degree."""
    sizes = {len(batch.tokens) for batch in batches}
    allowed = _gathered(
        candidates(
            part.strategy,
            part.models.spec,
            batch=min(sizes),
            sequence=part.sequence,
            sequence_parallel=[part.strategy.sequence_parallel],
            slices=None,
        )
    )
    return [
        one for one in allowed[0] if all(any((one.p1, one.p2) == (o.p1, o.p2) for o in others) for others in allowed)
    ]


def _recorded(part: Part, batches: Sequence[MicroBatch], recorder: Recorder) -> list[RecordedSpan]:
    """What the segments of a step did, after one to warm up."""
    for _ in range(2):
        recorder.take()
        part.pipeline.run(batches)
    return [span for span in recorder.take() if isinstance(span.op, SegmentOp)]


def _busy(spans: Iterable[RecordedSpan]) -> float:
    return sum(span.end - span.start for span in spans if span.kind != "comm")


def _stepper(part: Part, batches: Sequence[MicroBatch]) -> Callable[[], object]:
    return lambda: part.pipeline.run(batches)


def _mean_over_ranks(own: SegmentCosts) -> SegmentCosts:
    """Ranks have different stages, and one order needs the costs of all."""

    def mean(tables: Sequence[dict[str, float]]) -> dict[str, float]:
        keys = sorted({key for table in tables for key in table})
        return {key: statistics.fmean(table[key] for table in tables if key in table) for key in keys}

    every = _gathered(own)
    return SegmentCosts(mean([one.compute for one in every]), mean([one.collective for one in every]))


def _gathered(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

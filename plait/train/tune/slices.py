"""Choosing the slicing before training: a few timed steps of each candidate on the real kernels and the real
link.

A few recorded steps of the plain order measure what every op and collective costs; with these the list
scheduler builds the candidates' orders. Then all candidates run interleaved, so that noise hits all alike,
and the lowest median wins.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from plait.core.errors import JobError
from plait.core.model import ModelSpec
from plait.core.segment_costs import SegmentCosts
from plait.core.segments import SegmentOp
from plait.core.strategy import Strategy
from plait.train.engine.executor import SegmentExecutor
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import Device
from plait.train.record.recorder import RecordedSpan, Recorder

ROUNDS = 3
RECORDED = 5
"""Steps whose costs are measured; orders made from the costs of one, which may have been disturbed, were up
to 3 % longer."""


@dataclass(frozen=True)
class Candidate:
    """One slicing and its median seconds for a micro-batch, the slowest rank's."""

    strategy: Strategy
    seconds: float


class MakeExecutor(Protocol):
    """Builds an executor of a strategy for the model being tuned."""

    def __call__(
        self, strategy: Strategy, *, costs: SegmentCosts | None = None, recorder: Recorder | None = None
    ) -> SegmentExecutor: ...


def choose_slices(
    make: MakeExecutor,
    base: Strategy,
    batch: MicroBatch,
    *,
    sequence_parallel: Sequence[bool],
    slices: tuple[int, int] | None,
    recorder: Recorder,
) -> tuple[list[Candidate], SegmentCosts]:
    """Time the candidates on ``batch``; returns them all and the measured costs, the same on every rank.

    slices: fixed (p1, p2), or None to try several. Adds into the gradients: zero them afterwards.
    """
    plain = make(replace(base, overlap="sync", p1=1, p2=1, sequence_parallel=False), recorder=recorder)
    costs = typical_costs(plain, batch, recorder)
    size, sequence = batch.tokens.shape
    tried = candidates(
        base, plain.model.spec, batch=size, sequence=sequence, sequence_parallel=sequence_parallel, slices=slices
    )
    runs = [make(strategy, costs=costs) for strategy in tried]
    times = time_interleaved([lambda run=run: run.run(batch) for run in runs], plain.device, rounds=ROUNDS)
    return [Candidate(strategy, seconds) for strategy, seconds in zip(tried, times, strict=True)], costs


def candidates(
    base: Strategy,
    model: ModelSpec,
    *,
    batch: int,
    sequence: int,
    sequence_parallel: Sequence[bool],
    slices: tuple[int, int] | None,
) -> list[Strategy]:
    """Slicings worth timing: powers of two of p1 up to 8, p2 in {1, 2}, the allowed sequence-parallel
    settings."""
    grid = [slices] if slices else [(p1, p2) for p1 in (1, 2, 4, 8) for p2 in (1, 2)]
    found: list[Strategy] = []
    for sharded in sequence_parallel:
        for p1, p2 in grid:
            one = replace(base, p1=p1, p2=p2, sequence_parallel=sharded)
            try:
                one.check(model, batch=batch, sequence=sequence)
            except JobError:
                continue
            found.append(one)
    return found or [base]


def typical_costs(plain: SegmentExecutor, batch: MicroBatch, recorder: Recorder) -> SegmentCosts:
    """What ops and collectives take when ``plain``, which records, runs ``batch`` alone: medians of rank 0's
    steps, on every rank."""
    plain.run(batch)  # to warm up
    steps: list[SegmentCosts] = []
    for _ in range(RECORDED):
        recorder.take()
        plain.run(batch)
        steps.append(measured_costs(recorder.take()))

    def median(tables: Sequence[dict[str, float]]) -> dict[str, float]:
        return {key: statistics.median(table[key] for table in tables) for key in tables[0]}

    return agree(SegmentCosts(median([one.compute for one in steps]), median([one.collective for one in steps])))


def measured_costs(spans: Iterable[RecordedSpan], micro_batches: int = 1) -> SegmentCosts:
    """What one micro-batch spends on every kind of op and collective, from recorded spans."""
    compute: dict[str, float] = defaultdict(float)
    collective: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind != "wait" and isinstance(span.op, SegmentOp):
            (collective if span.kind == "comm" else compute)[f"{span.op.site}.{span.op.kind}"] += span.end - span.start
    layers: dict[str, set[int]] = defaultdict(set)
    for span in spans:
        layers[span.op.site].add(span.op.layer)

    def mean(totals: dict[str, float]) -> dict[str, float]:
        return {key: value / micro_batches / len(layers[key.split(".")[0]]) for key, value in sorted(totals.items())}

    return SegmentCosts(mean(compute), mean(collective))


def agree(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def time_interleaved(runs: Sequence[Callable[[], object]], device: Device, *, rounds: int) -> list[float]:
    """Median seconds of each run over ``rounds`` interleaved rounds after one to warm up; the slowest rank's
    time counts."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, taken in zip(runs, times, strict=True):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            run()
            device.synchronize()
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if number:
                taken.append(seconds.item())
    return [statistics.median(taken) for taken in times]


def matrix_rate(device: Device, dtype: torch.dtype, *, size: int = 768, seconds: float = 0.1) -> float:
    """FLOPs per second of plain matrix products on this rank's device, while the other ranks measure theirs:
    the peak that MFU is taken against where the job names none."""
    a, b = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        device.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)

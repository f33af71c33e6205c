"""Timing on the real kernels and the real links: what ops and collectives cost, how long runs take side by
side."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

from plait.core.record.timeline import OpSpan
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.segments import SegmentOp
from plait.train.comm.objects import gather, largest, meet
from plait.train.machine.device import RankDevice
from plait.train.record.recorder import Recorder

RECORDED = 5
"""Steps whose costs are measured; orders made from the costs of one, which may have been disturbed, were up
to 3 % longer."""


def recorded(run: Callable[[], object], recorder: Recorder, times: int) -> list[list[OpSpan]]:
    """The spans of each of so many runs, whole: a device may run far behind the host, and what it has not
    reached is not read."""
    device, found = recorder.device, list[list[OpSpan]]()
    for _ in range(times):
        device.synchronize()
        recorder.take()
        device.anchor(anew=True)
        run()
        device.synchronize()
        found.append(recorder.take())
    return found


def median_costs(steps: Iterable[Iterable[OpSpan]], micro_batches: int = 1) -> SegmentCosts:
    """Medians over recorded steps, the mean over ranks."""
    found = [measured_costs(step, micro_batches) for step in steps]

    def median(tables: Sequence[dict[str, float]]) -> dict[str, float]:
        return {key: statistics.median(table[key] for table in tables) for key in tables[0]}

    return mean_over_ranks(
        SegmentCosts(median([one.compute for one in found]), median([one.collective for one in found]))
    )


def mean_over_ranks(own: SegmentCosts) -> SegmentCosts:
    """Ranks have different stages, and one order needs the costs of all."""

    def mean(tables: Sequence[dict[str, float]]) -> dict[str, float]:
        keys = sorted({key for table in tables for key in table})
        return {key: statistics.fmean(table[key] for table in tables if key in table) for key in keys}

    every = gather([own.compute, own.collective])
    return SegmentCosts(mean([compute for compute, _ in every]), mean([collective for _, collective in every]))


def measured_costs(spans: Iterable[OpSpan], micro_batches: int = 1) -> SegmentCosts:
    """What one micro-batch spends on every kind of op and collective, from recorded spans of segment ops."""
    compute: dict[str, float] = defaultdict(float)
    collective: dict[str, float] = defaultdict(float)
    layers: dict[str, set[int]] = defaultdict(set)
    for span in spans:
        if not isinstance(span.op, SegmentOp):
            continue
        layers[span.op.site].add(span.op.layer)
        if span.kind != "wait":
            table = collective if span.kind == "comm" else compute
            table[f"{span.op.site}.{span.op.kind}"] += span.end - span.start

    def mean(totals: dict[str, float]) -> dict[str, float]:
        return {key: value / micro_batches / len(layers[key.split(".")[0]]) for key, value in sorted(totals.items())}

    return SegmentCosts(mean(compute), mean(collective))


def time_interleaved(runs: Sequence[Callable[[], object]], device: RankDevice, *, rounds: int) -> list[float]:
    """Median seconds of each run over ``rounds`` interleaved rounds after one to warm up; the slowest rank's
    time counts."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, taken in zip(runs, times, strict=True):
            meet()
            start = time.perf_counter()
            run()
            device.synchronize()
            (slowest,) = largest([time.perf_counter() - start])
            if number:
                taken.append(slowest)
    return [statistics.median(taken) for taken in times]


def matrix_rate(device: RankDevice, dtype: torch.dtype, *, size: int | None = None, seconds: float = 0.1) -> float:
    """FLOPs per second of plain matrix products on this rank's device, while the other ranks measure theirs.
    size: of the matrices, square.

    A GPU gets large ones, several at a time: of one that is waited for, most is the way there and back.
    """
    size, queued = (size or 768, 1) if device.timed_by_host else (size or 8192, 20)
    a, b = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(queued):
            torch.mm(a, b)
        device.synchronize()
        times.append((time.perf_counter() - start) / queued)
    return 2 * size**3 / min(times)

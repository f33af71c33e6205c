"""Time ops, collectives and interleaved runs on the real kernels and links.

A profile times on all ranks alike, within a budget. Repetitions follow from numbers that all ranks
share, so that no rank waits for a collective that another has skipped. Where ranks share cores,
computation is timed in processor seconds. By the wall clock a sample shorter than the kernel's time
slice has a core for itself: n ranks that share it would each seem n times as fast.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from plait.core.record.timeline import OpSpan
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.segments import SegmentOp
from plait.train.comm.tree import barrier, gather, largest
from plait.train.machine.device import RankDevice
from plait.train.record.recorder import Recorder

T = TypeVar("T")
RECORDED = 5
"""Steps whose costs are measured. Orders made from the costs of a single step, which may have been
disturbed, were up to 3 % longer."""


def recorded(run: Callable[[], object], recorder: Recorder, times: int) -> list[list[OpSpan]]:
    """Return the spans of each of ``times`` runs. The device is synchronised after each, because
    spans that it has not reached are not read."""
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
    """Return medians over recorded steps, averaged over ranks."""
    found = [measured_costs(step, micro_batches) for step in steps]

    def median(tables: Sequence[dict[str, float]]) -> dict[str, float]:
        return {key: statistics.median(table[key] for table in tables) for key in tables[0]}

    return mean_over_ranks(
        SegmentCosts(median([one.compute for one in found]), median([one.collective for one in found]))
    )


def mean_over_ranks(own: SegmentCosts) -> SegmentCosts:
    """Return the mean of costs over the ranks that have them: ranks have different stages, and one
    order needs the costs of all."""

    def mean(tables: Sequence[dict[str, float]]) -> dict[str, float]:
        keys = sorted({key for table in tables for key in table})
        return {key: statistics.fmean(table[key] for table in tables if key in table) for key in keys}

    every = gather([own.compute, own.collective])
    return SegmentCosts(mean([compute for compute, _ in every]), mean([collective for _, collective in every]))


def measured_costs(spans: Iterable[OpSpan], micro_batches: int = 1) -> SegmentCosts:
    """Return the seconds that one micro-batch spends on every kind of op and collective, from
    recorded spans of segment ops."""
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
    """Return median seconds of each run over ``rounds`` interleaved rounds after one warm-up round;
    the slowest rank's time counts."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, taken in zip(runs, times, strict=True):
            seconds = time_together(run, device)
            if number:
                taken.append(seconds)
    return [statistics.median(taken) for taken in times]


def time_together(run: Callable[[], object], device: RankDevice) -> float:
    """Return the seconds of a run that all ranks begin at once; the slowest rank's."""
    barrier()
    start = time.perf_counter()
    run()
    device.synchronize()
    return largest([time.perf_counter() - start])[0]


def matrix_rate(device: RankDevice, dtype: torch.dtype, *, size: int | None = None, seconds: float = 0.1) -> float:
    """Return FLOP/s of plain matrix products on this rank's device, while the other ranks measure
    theirs. size: of the square matrices.

    On a GPU matrices are large, and several products are queued: if the host waited for each,
    launch latency would dominate.
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


FEWEST, MOST = 3, 15
"""Fewest and most samples."""
LONG_ENOUGH = 2e-3
"""Shortest sample in seconds: shorter runs are repeated within it."""
MOST_RUNS = 100
"""Most runs in a sample."""


class MedianSeconds(NamedTuple):
    """Seconds of one run: the median over samples, and half the interquartile range relative to the
    median."""

    seconds: float
    spread: float

    @staticmethod
    def of(samples: Sequence[float]) -> MedianSeconds:
        """Return median and spread of samples."""
        middle = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (middle,) * 3
        return MedianSeconds(middle, max(0.0, high - low) / 2 / middle)


class Clock:
    """A time budget, and timing within it."""

    def __init__(self, device: RankDevice, deadline: float, crowd: float = 1.0) -> None:
        """Set the budget. deadline: by this process's monotonic clock. crowd: ranks per core, of
        ``Machine``."""
        self.device, self.deadline, self.crowd = device, deadline, crowd

    def left(self) -> float:
        """Return the seconds left, of the rank that has fewest; equal on all ranks."""
        return max(0.0, -largest([time.monotonic() - self.deadline])[0])

    def part(self, share: float) -> Clock:
        """Return a clock for a share of the time left."""
        return self.of(self.left() * share)

    def of(self, seconds: float) -> Clock:
        """Return a clock for ``seconds`` from now."""
        return Clock(self.device, time.monotonic() + seconds, self.crowd)

    def shares(self, items: Sequence[T]) -> Iterator[tuple[T, float]]:
        """Yield each item with its share, in seconds, of the time then left: equal shares for all
        remaining items."""
        for number, item in enumerate(items):
            yield item, self.left() / (len(items) - number)

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run; the slowest rank's."""
        return time_together(run, self.device)

    def sample(self, run: Callable[[], object], budget: float, *, together: bool) -> MedianSeconds:
        """Time ``run``, warm, for about ``budget`` seconds. together: ranks communicate in it, so
        the slowest rank of each sample counts. Otherwise each computes for itself, and the slowest
        rank's median counts."""
        one = self.once(run)
        if one < max(budget / 4, LONG_ENOUGH):  # the first run allocates and connects
            one = self.once(run)
        runs = min(MOST_RUNS, max(1, int(LONG_ENOUGH / one)))
        samples = min(MOST, max(FEWEST, int(budget / (one * runs))))
        own = [self._take(run, runs, computes=not together) / runs for _ in range(samples)]
        if together:
            return MedianSeconds.of(largest(own))
        return MedianSeconds(*largest(MedianSeconds.of(own)))

    def _take(self, run: Callable[[], object], times: int, *, computes: bool = False) -> float:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        with self.work() as worked:
            for _ in range(times):
                run()
            self.device.synchronize()
        return worked[0] if computes and worked else time.perf_counter() - start

    def carried(self, run: Callable[[], object], times: int) -> float:
        """Return the processor seconds that this process's other threads take for one run; of the
        rank that takes most."""
        start = time.process_time() - time.thread_time()
        for _ in range(times):
            run()
        return largest([(time.process_time() - time.thread_time() - start) / times])[0]

    @contextmanager
    def work(self) -> Generator[list[float]]:
        """Context manager: yield a list that receives the seconds of this thread's computation
        while all ranks that share its core compute. The list stays empty if no cores are shared."""
        found, threads = list[float](), torch.get_num_threads()
        if self.crowd == 1:
            yield found
            return
        start = _processor_seconds(threads)
        yield found
        found.append((_processor_seconds(threads) - start) / threads * self.crowd)


def _processor_seconds(threads: int) -> float:
    """Return the processor seconds of the calling thread, or of all threads if several compute."""
    return time.thread_time() if threads == 1 else time.process_time()

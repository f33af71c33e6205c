"""Timing on all ranks alike, within a budget: how often something runs, and whether at all, follows from
numbers that all ranks share, so that none waits for a collective that another has left out.

Where ranks share cores, what computes is timed in processor seconds: by the wall's clock a sample shorter
than the kernel's time slice has a core for itself, and seems as many times as fast as ranks share it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from plait.train.machine.device import RankDevice

FEWEST, MOST = 3, 15
"""Samples."""
LONG_ENOUGH = 2e-3
"""Seconds of a sample: what is shorter runs several times in it."""
MOST_RUNS = 100
"""In a sample."""


class MedianSeconds(NamedTuple):
    """Seconds of one run: the median over samples, and half the distance between quartiles relative to it."""

    seconds: float
    spread: float

    @staticmethod
    def of(samples: Sequence[float]) -> MedianSeconds:
        """What samples say."""
        middle = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (middle,) * 3
        return MedianSeconds(middle, max(0.0, high - low) / 2 / middle)


def slowest(values: Sequence[float]) -> list[float]:
    """Each value's maximum over ranks, the same on all."""
    if not dist.is_initialized():
        return list(values)
    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()


class Clock:
    """Seconds that are left, and samples."""

    def __init__(self, device: RankDevice, deadline: float, crowd: float = 1.0) -> None:
        """deadline: by this process's monotonic clock. crowd: as a ``Machine`` has it."""
        self.device, self.deadline, self.crowd = device, deadline, crowd

    def left(self) -> float:
        """Seconds, of the rank that has fewest; the same on all."""
        return max(0.0, -slowest([time.monotonic() - self.deadline])[0])

    def part(self, share: float) -> Clock:
        """A clock for so much of what is left."""
        return Clock(self.device, time.monotonic() + self.left() * share, self.crowd)

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of one run; the slowest rank's."""
        return slowest([self._take(run, 1)])[0]

    def sample(self, run: Callable[[], object], budget: float, *, together: bool) -> MedianSeconds:
        """Time ``run`` for about ``budget`` seconds, warm. together: the ranks communicate, so that the
        slowest rank of each sample counts; else each computes for itself, and the slowest rank's median
        does."""
        one = self.once(run)
        if one < max(budget / 4, LONG_ENOUGH):  # the first run allocates, and connects
            one = self.once(run)
        runs = min(MOST_RUNS, max(1, int(LONG_ENOUGH / one)))
        samples = min(MOST, max(FEWEST, int(budget / (one * runs))))
        own = [self._take(run, runs, computes=not together) / runs for _ in range(samples)]
        if together:
            return MedianSeconds.of(slowest(own))
        return MedianSeconds(*slowest(MedianSeconds.of(own)))

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
        """Processor seconds that this process's other threads take for one run; of the rank that takes
        most."""
        start = time.process_time() - time.thread_time()
        for _ in range(times):
            run()
        return slowest([(time.process_time() - time.thread_time() - start) / times])[0]

    @contextmanager
    def work(self) -> Generator[list[float]]:
        """Gets the seconds that this thread's computation takes while all ranks that share its core compute;
        nothing where none do."""
        found, threads = list[float](), torch.get_num_threads()
        if self.crowd == 1:
            yield found
            return
        start = _processor_seconds(threads)
        yield found
        found.append((_processor_seconds(threads) - start) / threads * self.crowd)


def _processor_seconds(threads: int) -> float:
    """Of the calling thread, or of all, where others compute with it."""
    return time.thread_time() if threads == 1 else time.process_time()

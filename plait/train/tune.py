"""Choosing the slicing before training: a few timed steps of each candidate on the real kernels and the real link.

A first recorded step of the plain order measures what every op and collective costs; with these the list scheduler builds the
candidates' orders. Then all candidates run interleaved, so that noise hits all alike, and the lowest median wins.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from plait.core.model import ModelSpec
from plait.core.overlap import SegmentCosts
from plait.core.errors import JobError
from plait.core.strategy import Strategy
from plait.train.recorder import RecordedSpan


@dataclass(frozen=True)
class Candidate:
    """One slicing and its median seconds for a micro-batch, the slowest rank's."""

    strategy: Strategy
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"strategy": asdict(self.strategy), "seconds": self.seconds}


def candidates(base: Strategy, model: ModelSpec, *, batch: int, sequence: int, sequence_parallel: Iterable[bool] = (False, True)) -> list[Strategy]:
    """Slicings worth timing: powers of two of p1 up to 8, p2 in {1, 2}, the allowed sequence-parallel settings."""
    found: list[Strategy] = []
    for sp in sequence_parallel:
        for p1 in (1, 2, 4, 8):
            for p2 in (1, 2):
                one = replace(base, p1=p1, p2=p2, sequence_parallel=sp)
                try:
                    one.check(model, batch=batch, sequence=sequence)
                except JobError:
                    continue
                found.append(one)
    return found or [base]


def measured_costs(spans: Iterable[RecordedSpan], micro_batches: int = 1) -> SegmentCosts:
    """What one micro-batch spends on every kind of op and collective, from recorded spans."""
    compute: dict[str, float] = defaultdict(float)
    collective: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind != "wait":
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


def time_interleaved(runs: list[Callable[[], object]], synchronize: Callable[[], None], clock: Callable[[], float], *, rounds: int) -> list[float]:
    """Median seconds of each run over ``rounds`` interleaved rounds after one to warm up; the slowest rank's time counts."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, taken in zip(runs, times, strict=True):
            if dist.is_initialized():
                dist.barrier()
            start = clock()
            run()
            synchronize()
            seconds = torch.tensor(clock() - start, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if number:
                taken.append(seconds.item())
    return [statistics.median(taken) for taken in times]

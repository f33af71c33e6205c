"""Seconds of the slowest rank: what a benchmark keeps of a step that all ranks take."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def slowest(seconds: float) -> float:
    """The most that any rank has measured."""
    spent = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item()


def timed_together(run: Callable[[], object]) -> float:
    """Seconds of ``run`` on the slowest rank, begun by all ranks at once."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return slowest(time.perf_counter() - start)

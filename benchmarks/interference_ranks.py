"""One rank of ``interference.py``: its job's all-to-all, round by round, where one, two, three jobs are."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from ranks import as_rank, slowest


def rounds_of(jobs: Sequence[Sequence[int]], rounds: int, nbytes: int) -> list[list[float]]:
    """Seconds of the first job's all-to-all, by the number of jobs that are there; one round warms up."""
    groups, rank = [dist.new_group(list(ranks)) for ranks in jobs], dist.get_rank()
    own = next(at for at, ranks in enumerate(jobs) if rank in ranks)
    sent = torch.zeros(nbytes // len(jobs[own]) * len(jobs[own]), dtype=torch.uint8)
    come, seconds = torch.empty_like(sent), list[list[float]]()
    for _ in range(rounds + 1):
        taken: list[float] = []
        for there in range(1, len(jobs) + 1):
            dist.barrier()
            begun = time.perf_counter()
            if own < there:
                dist.all_to_all_single(come, sent, group=groups[own])
            taken.append(slowest(time.perf_counter() - begun if own == 0 else 0.0))
        seconds.append(taken)
    return seconds[1:]


def measured(_: int, text: str) -> dict[str, Any]:
    """Of every way in which jobs lie."""
    setup = json.loads(text)
    return {name: rounds_of(jobs, setup["rounds"], setup["bytes"]) for name, jobs in setup["jobs"].items()}


if __name__ == "__main__":
    as_rank(measured)

"""What ranks of benchmarks share: how they begin and end, seconds of the slowest, rounds of variants."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from plait.core.base.env import RankEnv
from plait.train.machine.rank_process import run_and_end
from plait.train.machine.threads import pin_cores

Found = TypeVar("Found")


def as_rank(measured: Callable[..., object], own_core: Callable[..., bool] = lambda *_: False) -> None:
    """Run as a rank of a benchmark: ``measured`` of its number and of what is asked, words of the command;
    rank 0 writes what is found to the file named first. own_core: whether each rank has a core of its own."""

    def main() -> None:
        out, *asked = sys.argv[1:]
        torch.set_num_threads(1)
        rank = RankEnv.read()
        if own_core(*asked):
            pin_cores(*rank.place_among_cores, threads=1)
        dist.init_process_group("gloo")
        found = measured(rank.rank, *asked)
        if rank.rank == 0:
            Path(out).write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()

    run_and_end(main)


def interleaved(
    runs: Mapping[str, Callable[[int], Found]], rounds: int, *, turned: bool = False
) -> dict[str, list[Found]]:
    """What each variant gives, round after round; it is told the number of the round, of which 0 warms up.
    turned: every round begins with another, so that nobody always comes after the same one."""
    found: dict[str, list[Found]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds + 1):
        first = number % len(names) if turned else 0
        for name in names[first:] + names[:first]:
            one = runs[name](number)
            if number:
                found[name].append(one)
    return found


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

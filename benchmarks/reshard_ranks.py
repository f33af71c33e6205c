"""One rank of ``reshard.py``: makes every plan, checks what arrives, times all variants of a case round by
round."""

from __future__ import annotations

import json
import resource
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.core.reshard.plan import ReshardPlan
from plait.plan.reshard import Fabric, plan_reshard
from plait.plan.reshard_unicast import unicast_plan
from plait.train.comm.lanes import Lane
from plait.train.machine.device import RankDevice
from plait.train.machine.rank_process import run_and_end

HEAD_START = 0.02  # seconds from agreeing on a start to the start


def main() -> None:
    """Rank 0 writes what was measured to the file named first."""
    out, given = sys.argv[1:]
    setting = json.loads(given)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lane = Lane(RankDevice(torch.device("cpu")))
    fabric = Fabric(**setting["fabric"] | {"hosts": tuple(setting["fabric"]["hosts"])})
    found = {name: _case(lane, rank, fabric, case, setting["rounds"]) for name, case in setting["cases"].items()}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    lane.close()
    dist.destroy_process_group()


def _case(lane: Lane, rank: int, fabric: Fabric, case: dict[str, Any], rounds: int) -> dict[str, Any]:
    source, destination = TensorLayout.parse(case["source"]), TensorLayout.parse(case["destination"])
    shape = tuple(case["shape"])
    plans = {
        name: _planned(Reshard(source, destination, shape, 4), fabric, how) for name, how in case["variants"].items()
    }
    whole = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    have = whole[source.tile(rank, shape).slices].clone() if rank in source.ranks else None
    want = whole[destination.tile(rank, shape).slices].clone() if rank in destination.ranks else None
    del whole
    got = None if want is None else torch.zeros_like(want)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    cpu: dict[str, list[float]] = {name: [] for name in plans}
    for name, plan in plans.items():
        lane.prepare(plan)
        _timed(lane, plan, have, got)
        if want is not None and got is not None:
            assert torch.equal(got, want), f"{name} brought rank {rank} something else"
            got.zero_()
    for _ in range(rounds):
        for name, plan in plans.items():
            taken, used = _timed(lane, plan, have, got)
            seconds[name].append(taken)
            cpu[name].append(used)
    summary = {
        name: {"predicted": plan.predicted / 1e9, "ways": sorted({s.way for s in plan.steps})}
        for name, plan in plans.items()
    }
    bound = next(iter(plans.values())).lower_bound / 1e9
    return {
        "seconds": seconds,
        "cpu": cpu,
        "bound": bound,
        "units": len(next(iter(plans.values())).steps),
        "plans": summary,
    }


def _planned(reshard: Reshard, fabric: Fabric, how: dict[str, Any]) -> ReshardPlan:
    """By an order and a way of ours, or the published baseline."""
    return (
        unicast_plan(reshard, fabric, way=how["unicast"]) if "unicast" in how else plan_reshard(reshard, fabric, **how)
    )


def _timed(lane: Lane, plan: ReshardPlan, have: Tensor | None, got: Tensor | None) -> tuple[float, float]:
    """Seconds from the common start to the end of the last rank, and CPU seconds of all.

    All hosts of a lab share this machine's clock, so that ranks can agree on a moment to start.
    """
    moment = torch.tensor([time.perf_counter() + HEAD_START], dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    start = moment.item()
    while (left := start - time.perf_counter()) > 0:
        time.sleep(left)
    before = _cpu()
    lane.start(plan, have, got).wait()
    end, used = (
        torch.tensor([time.perf_counter()], dtype=torch.float64),
        torch.tensor([_cpu() - before], dtype=torch.float64),
    )
    dist.all_reduce(end, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return end.item() - start, used.item()


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    run_and_end(main)

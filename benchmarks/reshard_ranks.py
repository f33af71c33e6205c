"""One rank of ``reshard.py``: makes every plan, checks what arrives, times all variants of a case round by
round."""

from __future__ import annotations

import json
import resource
import time
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from ranks import as_rank, interleaved
from torch import Tensor

from benchmarks.baselines.reshard_searches import ORDERS
from benchmarks.baselines.reshard_unicast import unicast_plan
from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.core.reshard.plan import ReshardPlan
from plait.plan.reshard.boundary import Fabric, plan_reshard
from plait.train.comm.lanes import Lane
from plait.train.machine.device import RankDevice

HEAD_START = 0.02  # seconds from agreeing on a start to the start


def measured(rank: int, given: str) -> dict[str, Any]:
    """Of every case."""
    setting, lane = json.loads(given), Lane(RankDevice(torch.device("cpu")))
    fabric = Fabric(**setting["fabric"] | {"hosts": tuple(setting["fabric"]["hosts"])})
    found = {name: _case(lane, rank, fabric, case, setting["rounds"]) for name, case in setting["cases"].items()}
    dist.barrier()
    lane.close()
    return found


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

    def timed(name: str, number: int) -> tuple[float, float]:
        if not number:
            lane.prepare(plans[name])
        found = _timed(lane, plans[name], have, got)
        if not number and want is not None and got is not None:
            assert torch.equal(got, want), f"{name} brought rank {rank} something else"
            got.zero_()
        return found

    times = interleaved({name: partial(timed, name) for name in plans}, rounds)
    summary = {
        name: {"predicted": plan.predicted / 1e9, "ways": sorted({s.way for s in plan.steps})}
        for name, plan in plans.items()
    }
    bound = next(iter(plans.values())).lower_bound / 1e9
    return {
        "seconds": {name: [taken for taken, _ in found] for name, found in times.items()},
        "cpu": {name: [used for _, used in found] for name, found in times.items()},
        "bound": bound,
        "units": len(next(iter(plans.values())).steps),
        "plans": summary,
    }


def _planned(reshard: Reshard, fabric: Fabric, how: dict[str, Any]) -> ReshardPlan:
    """By an order and a way of ours, or the published baseline."""
    if "unicast" in how:
        return unicast_plan(reshard, fabric, way=how["unicast"])
    return plan_reshard(reshard, fabric, search=ORDERS[how["order"]], **how)


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
    as_rank(measured)

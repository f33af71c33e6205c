"""What one rank runs: ``python -m plait.train.worker RUN_FOLDER``. Started by a launcher, under torchrun's
variables."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from plait.core.env import RankEnv
from plait.core.errors import ERROR_MARK, JobError, LaunchError, PlaitError
from plait.core.plan import Plan
from plait.train.machine.device import Device, open_device
from plait.train.machine.rank_process import die_with_parent, run_and_end
from plait.train.machine.threads import take_cores
from plait.train.report import Reporter
from plait.train.session import Session


def main() -> int:
    """Train the run in the folder given; returns the exit status."""
    die_with_parent()
    rank = RankEnv.read()
    try:
        return _run(rank, Path(sys.argv[1]))
    except PlaitError as error:
        print(f"{ERROR_MARK}{error}", file=sys.stderr, flush=True)
        return error.exit_status


def _run(rank: RankEnv, folder: Path) -> int:
    stop = _StopSignal()
    plan = Plan.read(folder / "plan.json")
    job, world = plan.job, plan.layout.world_size
    if job is None:
        raise JobError("is no plan of a job", file=str(folder / "plan.json"))
    if world != rank.world_size:
        raise JobError(f"the job needs {world} ranks, and {rank.world_size} were started", key="strategy")
    torch.set_num_threads(job.run.threads)
    device = open_device(job.run.device, rank.local_rank)
    if device.backend == "gloo":  # beside an accelerator, threads of the driver and of NCCL want the other cores
        take_cores(*rank.place_among_cores, threads=job.run.threads)
    _join_world(rank, device)
    try:
        with Reporter(folder, speaks=rank.rank == 0, steps=job.train.steps) as report:
            return Session(plan, job, folder, rank.rank, device, report).train(stop)
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _join_world(rank: RankEnv, device: Device) -> None:
    """Meet the other ranks; one alone has nobody to meet."""
    if rank.world_size == 1:
        return
    backend = "gloo" if device.backend == "gloo" else f"cpu:gloo,{device.torch_device.type}:{device.backend}"
    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    except dist.DistNetworkError as error:
        raise LaunchError(
            f"rank {rank.rank} cannot use {rank.master_addr}:{rank.master_port} to meet the other ranks "
            f"({_first_line(error)}); if the port is in use, choose another with MASTER_PORT"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


class _StopSignal:
    """Becomes true when the process is asked to stop; the step loop then saves and ends."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, _number: int, _frame: object) -> None:
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked


if __name__ == "__main__":
    run_and_end(main)

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
from plait.core.errors import ERROR_MARK, LaunchError, PlaitError
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.machine.device import Device, open_device
from plait.train.machine.rank_process import die_with_parent, run_and_end
from plait.train.machine.threads import take_cores
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
    session = Session(folder, rank)
    torch.set_num_threads(session.job.run.threads)
    device = open_device(session.job.run.device, rank.local_rank)
    if device.backend == "gloo":  # beside an accelerator, threads of the driver and of NCCL want the other cores
        take_cores(*rank.place_among_cores, threads=session.job.run.threads)
    wire = _join_world(rank, device)
    try:
        return session.train(device, wire, stop)
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _join_world(rank: RankEnv, device: Device) -> Wire:
    """The wire between all ranks; with one rank there is none."""
    if rank.world_size == 1:
        return NullWire()
    backend = "gloo" if device.backend == "gloo" else f"cpu:gloo,{device.torch_device.type}:{device.backend}"
    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    except dist.DistNetworkError as error:
        raise LaunchError(
            f"rank {rank.rank} cannot use {rank.master_addr}:{rank.master_port} to meet the other ranks "
            f"({_first_line(error)}); if the port is in use, choose another with MASTER_PORT"
        ) from None
    return open_wire(device.backend)


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

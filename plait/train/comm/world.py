"""How a rank joins the others: where all meet, on which interface they listen, and how long one waits for
another.

One timeout serves all: the world is opened with ``run.timeout``, and every group and wire takes the world's.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from plait.core.env import RankEnv, stay_on_loopback
from plait.core.errors import LaunchError, RankFailure
from plait.core.settings import RunSection
from plait.train.machine.control import Control
from plait.train.machine.device import Device, open_device
from plait.train.machine.threads import take_cores

MARGIN = 3.0
"""Seconds that ranks wait beyond the timeout, so that the launcher, which sees them all, names the silent one
before those that wait for it fail."""


@contextmanager
def joined(rank: RankEnv, run: RunSection, control: Control, store: Store | None = None) -> Generator[Device]:
    """This rank's device, on cores of its own and one of the world, inside the block.

    store: where the ranks meet, if they have met already. Raises RankFailure where this rank has waited in
    vain for another.
    """
    torch.set_num_threads(run.threads)
    device = open_device(run.device, rank.local_rank)
    if device.backend == "gloo":  # beside an accelerator, threads of the driver and of NCCL want the other cores
        take_cores(*rank.place_among_cores, threads=run.threads)
    if rank.world_size > 1:
        control.doing("meeting the other ranks", patient=True)
        join_world(rank, store or open_store(rank, run.timeout), _backends(device), run.timeout)
    try:
        yield device
    except RuntimeError as error:
        if "Timed out waiting" not in str(error):  # gloo's words
            raise
        problem = f"rank {rank.rank} has waited {run.timeout:g} s (run.timeout) in vain for another rank"
        raise RankFailure(f"{problem} while {control.at}: {error}") from error
    if dist.is_initialized():  # after an error that would wait for ranks which never come
        dist.destroy_process_group()


def _backends(device: Device) -> str:
    """For the host's tensors, and for the device's."""
    return device.backend if device.backend == "gloo" else f"cpu:gloo,{device.torch_device.type}:{device.backend}"


def open_store(rank: RankEnv, timeout: float) -> Store:
    """The small store at which ranks meet: the agent's under torchrun, otherwise rank 0's."""
    where, hosts = f"{rank.master_addr}:{rank.master_port}", rank.rank == 0 and not rank.agent_store
    try:
        options: dict[str, Any] = {"master_listen_fd": _listener(rank)} if hosts else {}
        store = TCPStore(
            rank.master_addr,
            rank.master_port,
            rank.world_size,
            hosts,
            timeout=timedelta(seconds=timeout + MARGIN),
            wait_for_workers=False,
            **options,
        )
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"rank {rank.rank} cannot use {where} to meet the other ranks ({why}); if the port is in use, choose "
            "another with MASTER_PORT"
        ) from None
    return PrefixStore(f"plait/{rank.attempt}", store)  # an agent's store is the same for every attempt


def join_world(rank: RankEnv, store: Store, backend: str, timeout: float) -> None:
    """Become a rank of the world."""
    if rank.local_world_size == rank.world_size:
        stay_on_loopback()
    limit = timedelta(seconds=timeout + MARGIN)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit)


def patience() -> timedelta:
    """How long a rank waits for another."""
    world: Any = dist.distributed_c10d._get_default_group()
    return world._get_backend(torch.device("cpu")).options._timeout


def new_group(ranks: Sequence[int] | None = None, backend: str = "gloo") -> Any:
    """A process group with the world's timeout; called by all ranks, as torch asks for."""
    return dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=patience())


def _listener(rank: RankEnv) -> int | None:
    """A socket that listens on rank 0's address alone (torch's own would on every interface); None where that
    address is no interface of this machine, as behind a router."""
    family, _, _, _, address = socket.getaddrinfo(rank.master_addr, rank.master_port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise

"""Where all ranks meet, on which interface they listen, and how long one waits for another.

One timeout serves all: the world is opened with ``run.timeout``, and every group and wire takes the world's.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from plait.core.env import RankEnv, stay_on_loopback
from plait.core.errors import LaunchError

MARGIN = 3.0
"""Seconds that ranks wait beyond the timeout, so that the launcher, which sees them all, names the silent one
before those that wait for it fail."""


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

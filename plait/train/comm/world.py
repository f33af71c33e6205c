"""Join a rank to the others: the store at which ranks meet, the network interface, the timeout.

One timeout serves all: the world is opened with ``run.timeout``, and every group and wire takes the
world's.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from plait.core.base.cluster_env import granted_gpus
from plait.core.base.env import RankEnv, connect_when_needed, stay_on_loopback
from plait.core.base.errors import JobError, LaunchError, RankFailure
from plait.core.job.settings import RunSection
from plait.train.comm.line_store import LineStore
from plait.train.comm.tree import Tree, group_name
from plait.train.machine.control import Control
from plait.train.machine.device import STAGED, RankDevice
from plait.train.machine.gpu import device_of, gpu_address, gpu_name, own_gpu
from plait.train.machine.threads import pin_cores, pin_near_device

MARGIN = 3.0
"""Seconds that ranks wait beyond the timeout. So the launcher, which sees all ranks, can name the
silent rank before the waiting ranks fail."""


LOOK = timedelta(seconds=60)
"""Duration of one wait on the store, for waits without a timeout."""
TIMEOUT_PHRASES = ("Timed out waiting", "Connect timeout", "wait timeout after")
"""Phrases in error messages of gloo, and of the store, that mean that a rank did not come in
time."""
FEW = 8
"""Thread blocks of NCCL for a communicator that is not urgent. A receive that is posted early
occupies them until its message comes. An H100 runs 132 at once; not measured."""


@contextmanager
def joined(rank: RankEnv, run: RunSection, control: Control, store: Store | None = None) -> Generator[RankDevice]:
    """Context manager: yield the device of this rank, which is on its cores and in the world.
    store: where the ranks meet, if they have met already. Raises RankFailure if this rank has
    waited for another beyond the timeout."""
    torch.set_num_threads(run.threads)
    among = rank.place_among_cores
    number = among[0] if run.device == "shared" else rank.local_rank  # the hosts of a lab are one machine
    gpu = own_gpu(run.device, number, alone=rank.world_size == 1)
    cores = partial(pin_cores, *among, threads=run.threads)
    if gpu is None:  # with an accelerator, threads of the driver and of NCCL need the other cores
        cores()
    elif address := gpu_address(gpu):
        pin_near_device(address)
    if rank.world_size > 1:
        control.set_activity("meeting the other ranks", patient=True)
        if store is None:
            launched = control.launched
            store = LineStore(control, run.timeout + MARGIN) if launched else open_store(rank, run.timeout)
        own = run.device in ("auto", "cuda")
        if own and not each_has_own_gpu(store, rank.world_size, None if gpu is None else gpu_name(gpu)):
            if run.device == "cuda" or granted_gpus():
                fix = 'Start as many ranks on each node as it has GPUs, or use device = "cpu", or "shared" to try it'
                raise JobError("some ranks have no GPU of their own, or share one", key="run.device", fix=fix)
            if gpu is not None:
                gpu = None
                cores()
    device = device_of(gpu, shared=run.device == "shared")
    try:
        if rank.world_size > 1:
            assert store is not None
            join_world(rank, store, backends_for(device), run.timeout)
        yield device
    except RuntimeError as error:
        if not any(words in str(error) for words in TIMEOUT_PHRASES):
            raise
        problem = f"rank {rank.rank} timed out after {run.timeout:g} s (run.timeout) waiting for another rank"
        raise RankFailure(f"{problem} while {control.activity}: {error}") from error
    if dist.is_initialized():  # not after an error: this would wait for ranks that never come
        dist.destroy_process_group()


def each_has_own_gpu(store: Store, world: int, gpu: str | None) -> bool:
    """Return True if every rank has a GPU of its own; equal on all ranks, which call this together.
    gpu: a name of this rank's GPU, unique in the world. A handful of store operations, however many
    ranks there are."""
    if gpu is None or store.add(f"device/{gpu}", 1) > 1:
        store.add("device/without", 1)
    if store.add("device/asked", 1) == world:
        store.set("device/without any", str(store.add("device/without", 0)))
    return store.get("device/without any") == b"0"


def backends_for(device: RankDevice) -> str:
    """Return the world's backends, for host tensors and device tensors. The backend of a shared
    device is registered here and used by single groups: torch takes a world's backend written in
    Python for all kinds of tensors."""
    if device.backend == STAGED:
        from plait.train.comm.staged import register  # imports this module

        register(device)
        return "gloo"
    return device.backend if device.backend == "gloo" else f"cpu:gloo,{device.torch_device.type}:{device.backend}"


def open_store(rank: RankEnv, timeout: float) -> Store:
    """Return the store at which ranks meet: the agent's under torchrun, otherwise rank 0's. Raises
    LaunchError if it cannot be reached."""
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
            f"rank {rank.rank} cannot open or reach the rendezvous store at {where} ({why}); "
            "if the port is in use, choose another with MASTER_PORT"
        ) from None
    return PrefixStore(f"plait/{rank.attempt}", store)  # torchrun's store is shared by all attempts


def join_world(rank: RankEnv, store: Store, backend: str, timeout: float) -> None:
    """Join the world; return when every rank has joined.

    No ``device_id`` is passed: with it, NCCL's point-to-point messages share one communicator and
    stream, and lanes need one per direction. gloo connects two ranks when they first communicate.
    Here the ranks of the tree connect, so that a missing rank is noticed now and not in the midst
    of a step.
    """
    if rank.local_world_size == rank.world_size:
        stay_on_loopback()
    connect_when_needed()
    limit = timedelta(seconds=timeout + MARGIN)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit)
    Tree().barrier()


def world_timeout() -> timedelta:
    """Return the timeout of the default process group, for which a rank waits for another."""
    world: Any = dist.distributed_c10d._get_default_group()
    return world._get_backend(torch.device("cpu")).options._timeout


def new_group(
    ranks: Sequence[int] | None = None, backend: str = "gloo", *, urgent: bool = False, few: bool = False
) -> dist.ProcessGroup:
    """Return a process group with the world's timeout; None: of all ranks. Called by its ranks
    alone. urgent, few: NCCL kernels with high priority, and with few thread blocks.

    ``dist.new_group`` must be called by every rank of the world for every group. With local
    synchronisation it names a group by the number of groups that the rank has, which differs
    between ranks.
    """
    ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    c10d: Any = dist.distributed_c10d
    options = _nccl_options(world_timeout(), urgent=urgent, few=few) if backend == "nccl" else None
    group, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), ranks, dist.Backend(backend), c10d._get_default_store(),
        getattr(c10d, "GroupName", str)(group_name(ranks)), backend_options=options, timeout=world_timeout(),
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def _nccl_options(timeout: timedelta, *, urgent: bool, few: bool) -> Any:
    """Return the options of NCCL; RCCL has the same names."""
    nccl: Any = dist.distributed_c10d.ProcessGroupNCCL  # missing in builds without NCCL
    options = nccl.Options(is_high_priority_stream=urgent)
    options._timeout = timeout  # else torch warns on every rank that it differs from the group's
    if few:
        options.config.max_ctas = FEW
    return options


def run_on_rank_zero(work: Callable[[], object], name: str) -> None:
    """Run ``work`` on rank 0 while the others wait, however long it takes. Called by all ranks.
    name: of the work, unique in a run.

    Preparing a corpus takes hours, which no timeout for lost ranks would allow. If rank 0 fails,
    the launcher ends the other ranks.
    """
    if not dist.is_initialized():
        work()
        return
    store: Store = dist.distributed_c10d._get_default_store()
    key = f"plait/first/{name}"
    if dist.get_rank() == 0:
        work()
        store.set(key, "done")
        return
    while True:
        try:
            store.wait([key], LOOK)
        except dist.DistStoreError as error:
            if "timeout" not in str(error).lower():
                raise
        else:
            return


def _listener(rank: RankEnv) -> int | None:
    """Return a socket that listens on rank 0's address alone (torch's own would listen on every
    interface). None if that address is no interface of this machine, as behind a router."""
    family, _, _, _, address = socket.getaddrinfo(rank.master_addr, rank.master_port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise

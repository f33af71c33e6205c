"""How a rank joins the others: where all meet, on which interface they listen, and how long one waits for
another.

One timeout serves all: the world is opened with ``run.timeout``, and every group and wire takes the world's.
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections import Counter
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
from plait.train.comm.tree import Tree
from plait.train.machine.control import Control
from plait.train.machine.device import STAGED, RankDevice
from plait.train.machine.gpu import device_of, gpu_address, gpu_name, own_gpu
from plait.train.machine.threads import stay_near, take_cores

MARGIN = 3.0
"""Seconds that ranks wait beyond the timeout, so that the launcher, which sees them all, names the silent one
before those that wait for it fail."""


LOOK = timedelta(seconds=60)
"""How long one look at the store lasts for something without a timeout."""
IN_VAIN = ("Timed out waiting", "Connect timeout", "wait timeout after")
"""Words of gloo, and of the store, for a rank that did not come."""
FEW = 8
"""Thread blocks of a communicator that has time: a receive that is posted early keeps them until its message
comes. An H100 runs 132 at once; not measured."""


@contextmanager
def joined(rank: RankEnv, run: RunSection, control: Control, store: Store | None = None) -> Generator[RankDevice]:
    """This rank's device, on cores of its own and one of the world, inside the block.

    store: where the ranks meet, if they have met already. Raises RankFailure where this rank has waited in
    vain for another.
    """
    torch.set_num_threads(run.threads)
    among = rank.place_among_cores
    number = among[0] if run.device == "shared" else rank.local_rank  # a lab's hosts are one machine
    gpu = own_gpu(run.device, number, alone=rank.world_size == 1)
    cores = partial(take_cores, *among, threads=run.threads)
    if gpu is None:  # beside an accelerator, threads of the driver and of NCCL want the other cores
        cores()
    elif address := gpu_address(gpu):
        stay_near(address)
    if rank.world_size > 1:
        control.doing("meeting the other ranks", patient=True)
        if store is None:
            launched = control.launched
            store = LineStore(control, run.timeout + MARGIN) if launched else open_store(rank, run.timeout)
        own = run.device in ("auto", "cuda")
        if own and not all_have_one(store, rank.world_size, None if gpu is None else gpu_name(gpu)):
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
        if not any(words in str(error) for words in IN_VAIN):
            raise
        problem = f"rank {rank.rank} has waited {run.timeout:g} s (run.timeout) in vain for another rank"
        raise RankFailure(f"{problem} while {control.at}: {error}") from error
    if dist.is_initialized():  # after an error that would wait for ranks which never come
        dist.destroy_process_group()


def all_have_one(store: Store, world: int, gpu: str | None) -> bool:
    """Whether every rank has a GPU, and each another; the same on all ranks, which call this together. gpu:
    this rank's, by a name that no other in the world has. A handful of the store's operations, however many
    ranks there are."""
    if gpu is None or store.add(f"device/{gpu}", 1) > 1:
        store.add("device/without", 1)
    if store.add("device/asked", 1) == world:
        store.set("device/without any", str(store.add("device/without", 0)))
    return store.get("device/without any") == b"0"


def backends_for(device: RankDevice) -> str:
    """The world's, for the host's tensors and for the device's. What serves a shared device is made known,
    and opened group by group: torch takes a world of a backend written in Python for all kinds of tensors."""
    if device.backend == STAGED:
        from plait.train.comm.staged import register  # which needs this module

        register(device)
        return "gloo"
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
    """Become a rank of the world; returns when every rank has.

    Without a ``device_id``: with one, NCCL's messages from rank to rank all share one communicator and one
    stream, where lanes need one for each direction. gloo connects two ranks when they first speak: here those
    of the tree over which all ranks agree, so that who has not come is missed here and not in the midst of a
    step.
    """
    if rank.local_world_size == rank.world_size:
        stay_on_loopback()
    connect_when_needed()
    limit = timedelta(seconds=timeout + MARGIN)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit)
    Tree().meet()


def patience() -> timedelta:
    """How long a rank waits for another."""
    world: Any = dist.distributed_c10d._get_default_group()
    return world._get_backend(torch.device("cpu")).options._timeout


_opened: Counter[tuple[int, ...]] = Counter()
"""How many groups this rank has opened with which ranks."""


def group_name(ranks: Sequence[int]) -> str:
    """A new name in the store for a group. Its ranks open the groups that they share in one order, and so
    give it the same name, whatever others any of them opens."""
    ranks = tuple(ranks)
    _opened[ranks] += 1
    digest = hashlib.sha256(" ".join(map(str, ranks)).encode()).hexdigest()[:16]
    return f"plait/{len(ranks)}-{digest}/{_opened[ranks]}"


def new_group(
    ranks: Sequence[int] | None = None, backend: str = "gloo", *, urgent: bool = False, few: bool = False
) -> dist.ProcessGroup:
    """A process group with the world's timeout, all ranks' if none are given. Called by its ranks alone.
    urgent, few: of NCCL's kernels, to go before others, to take few processors.

    ``dist.new_group`` is called by every rank of the world for every group, or, with local synchronisation,
    names a group after how many its rank has, which is not the same on all of its ranks.
    """
    ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    c10d: Any = dist.distributed_c10d
    options = _nccl_options(patience(), urgent=urgent, few=few) if backend == "nccl" else None
    group, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), ranks, dist.Backend(backend), c10d._get_default_store(),
        getattr(c10d, "GroupName", str)(group_name(ranks)), backend_options=options, timeout=patience(),
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def _nccl_options(timeout: timedelta, *, urgent: bool, few: bool) -> Any:
    """What NCCL is asked for; RCCL answers to the same names."""
    nccl: Any = dist.distributed_c10d.ProcessGroupNCCL  # builds without it have no such name
    options = nccl.Options(is_high_priority_stream=urgent)
    options._timeout = timeout  # else torch says in every rank that this and the group's differ
    if few:
        options.config.max_ctas = FEW
    return options


def first_does(work: Callable[[], object], name: str) -> None:
    """Have rank 0 do something while the others wait, however long it takes: a corpus is prepared for hours,
    and no timeout that finds a lost rank would allow that. Called by all ranks; where rank 0 fails, whoever
    started the ranks ends them. name: of what is done, once in a run."""
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
    """A socket that listens on rank 0's address alone (torch's own would on every interface); None where that
    address is no interface of this machine, as behind a router."""
    family, _, _, _, address = socket.getaddrinfo(rank.master_addr, rank.master_port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise

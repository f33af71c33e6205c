"""Collectives of one group behind one small contract, so that they can be plugged, delayed, recorded or left
out.

A wire starts a collective and returns a handle; whoever needs the result waits on the handle. Between the two
nobody may read, write or free the buffers. One total order per group on every rank (the segment list's): gloo
gives wrong sums without a word, and NCCL hangs, when ranks disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from plait.core.base.env import gloo_interface
from plait.core.record.records import sent_bytes
from plait.core.step.segments import Collective
from plait.train.comm.world import group_name, new_group, patience
from plait.train.machine.device import AsyncWork
from plait.train.machine.threads import running, serve_first


class Handle(AsyncWork, Protocol):
    """A collective in flight."""


class Splits(NamedTuple):
    """An exchange of unequal parts. into: how many numbers come from every rank, in order; out: how many go
    to each. total: of all ranks together, the same on each."""

    into: list[int]
    out: list[int]
    total: int


class Wire(Protocol):
    """What the executor needs of a group of ranks. ``source`` and ``result`` are one buffer for an
    all-reduce."""

    size: int
    rank: int

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Handle:
        """Start a sum all-reduce of ``result``; an all-gather, a sum reduce-scatter or an all-to-all along
        dim 0; a rotation, by which every rank gets the ``source`` of the one before it."""
        ...


class Exchanger(Wire, Protocol):
    """A wire that also exchanges unequal parts."""

    def exchange(self, result: Tensor, source: Tensor, splits: Splits) -> Handle:
        """Start to send every rank its part of ``source``, and to receive theirs, both flat."""
        ...


class _Done:
    """Nothing is in flight."""

    def wait(self) -> None:
        pass

    def get_future(self) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(None)
        return future

    def is_completed(self) -> bool:
        return True


class NullWire:
    """No network at all: the shapes of the collectives without their values. Speed of light for measurements,
    and tp = 1."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> _Done:
        """Fill ``result`` from this rank's own data."""
        if kind == "all_gather":
            result.view(self.size, *source.shape).copy_(source.expand(self.size, *source.shape))
        elif kind == "reduce_scatter":
            result.copy_(source.view(self.size, *result.shape)[self.rank])
        elif kind in ("all_to_all", "rotate"):
            result.copy_(source)
        return _Done()

    def exchange(self, result: Tensor, source: Tensor, splits: Splits) -> _Done:
        """What goes to this rank itself, in place of everything."""
        result.copy_(source[: result.numel()])
        return _Done()


_NAMES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""What torch calls them: 2.13 and newer, and before."""


class GroupWire:
    """A torch.distributed process group: NCCL, RCCL, or any other backend."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Handle:
        """Start the collective asynchronously."""
        _require_contiguous(kind, result, source)
        work = self._start(kind, result, source)
        assert work is not None, "this rank is not in the group"
        return work

    def exchange(self, result: Tensor, source: Tensor, splits: Splits) -> Handle:
        """Start it asynchronously."""
        work = dist.all_to_all_single(result, source, splits.into, splits.out, group=self.group, async_op=True)
        assert work is not None, "this rank is not in the group"
        return work

    def _start(self, kind: Collective, result: Tensor, source: Tensor) -> dist.Work | None:
        if kind == "all_reduce":
            return dist.all_reduce(result, group=self.group, async_op=True)
        if kind in ("all_to_all", "rotate"):
            out, into = equal_splits(kind, source, self.rank, self.size)
            return dist.all_to_all_single(result.view(-1), source.view(-1), into, out, group=self.group, async_op=True)
        call = next(getattr(dist, name) for name in _NAMES[kind] if hasattr(dist, name))
        return call(result, source, group=self.group, async_op=True)


class GlooWire:
    """gloo over some or all ranks, with what its torch.distributed wrapper does not offer.

    One worker thread: collectives use the link one after the other in the order in which they start, so that
    the first is there as early as can be; the wrapper's two would halve each other's bandwidth. A
    reduce-scatter that sends each rank its share only: gloo's own is an all-reduce that throws most of its
    result away. An all-gather without a second copy of the result, which gloo's own makes whenever its thread
    comes to it.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        ranks = tuple(ranks or range(dist.get_world_size()))
        self.size, self.rank = len(ranks), ranks.index(dist.get_rank())
        before = running()
        gloo: Any = dist.ProcessGroupGloo  # its Python side is untyped
        interface = gloo_interface()
        options = gloo._Options()
        # All of them speak with each other, in the first step: connect now, whatever other groups do.
        where = gloo.create_device(interface=interface, lazy_init=False) if interface else None
        options._devices = [where or gloo.create_default_device(lazy_init=False)]
        options._threads = 1
        options._timeout = patience()
        store = c10d.PrefixStore(f"{group_name(ranks)}/wire/", dist.distributed_c10d._get_default_store())
        self._gloo = gloo(store, self.rank, self.size, options)
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        serve_first(running() - before)

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Handle:
        """Start the collective asynchronously."""
        _require_contiguous(kind, result, source)
        if kind == "all_reduce":
            return self._gloo.allreduce([result], c10d.AllreduceOptions())  # a sum
        if kind == "all_gather":
            return self._gather(result, source)
        if kind in ("all_to_all", "rotate"):
            return self._exchange(kind, result, source)
        spare = self._spare[source.numel(), source.dtype]
        received = spare.pop() if spare else torch.empty(source.numel(), dtype=source.dtype, device=source.device)
        parts = received.view(self.size, *result.shape)
        return _ScatteredSum(
            self._gloo.alltoall_base(parts, source, [], [], c10d.AllToAllOptions()), parts, result, spare
        )

    def exchange(self, result: Tensor, source: Tensor, splits: Splits) -> Handle:
        """Start it asynchronously."""
        return self._gloo.alltoall_base(result, source, splits.into, splits.out, c10d.AllToAllOptions())

    def _exchange(self, kind: Collective, result: Tensor, source: Tensor) -> Handle:
        out, into = equal_splits(kind, source, self.rank, self.size)
        return self._gloo.alltoall_base(result.view(-1), source.view(-1), into, out, c10d.AllToAllOptions())

    def _gather(self, result: Tensor, source: Tensor) -> Handle:
        """Shares go round, each to where it stays; the worker thread begins with one when the one before has
        come."""
        shares = result.view(self.size, -1)
        if source.data_ptr() != shares[self.rank].data_ptr():
            shares[self.rank].copy_(source.view(-1))
        at = [shares[(self.rank - step) % self.size] for step in range(self.size)]
        return _Several([self._exchange("rotate", came, gone) for gone, came in pairwise(at)])

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Handle:
        """To a rank, by its place in the group."""
        return self._gloo.send([tensor], to, tag)

    def receive(self, tensor: Tensor, of: int, tag: int = 0) -> Handle:
        """From a rank, by its place in the group."""
        return self._gloo.recv([tensor], of, tag)


def _require_contiguous(kind: Collective, result: Tensor, source: Tensor) -> None:
    """NCCL takes nothing else, and gloo moves the memory between, whatever it is."""
    for name, tensor in (("result", result), ("source", source)):
        if not tensor.is_contiguous():
            raise ValueError(f"the {name} of an {kind} has shape {tuple(tensor.shape)} and strides {tensor.stride()}")


def started(wire: Exchanger, kind: Collective | Splits, result: Tensor, source: Tensor) -> Handle:
    """A collective of a wire, or an exchange of unequal parts, in flight."""
    return wire.exchange(result, source, kind) if isinstance(kind, Splits) else wire.start(kind, result, source)


def equal_splits(kind: Collective, source: Tensor, rank: int, size: int) -> tuple[list[int], list[int]]:
    """How many numbers go to every rank, and how many come: of an all-to-all or a rotation."""
    if kind == "all_to_all":
        return [source.numel() // size] * size, [source.numel() // size] * size
    to, of = (rank + 1) % size, (rank - 1) % size
    return [source.numel() * (at == to) for at in range(size)], [source.numel() * (at == of) for at in range(size)]


class _Several:
    """Transfers in flight that end in the order in which they started."""

    def __init__(self, works: Sequence[Handle]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def get_future(self) -> Future[object]:
        return self.works[-1].get_future()

    def is_completed(self) -> bool:
        return self.works[-1].is_completed()


class _ScatteredSum:
    """A reduce-scatter in flight: every rank's share for this one arrives, and is added up by whoever waits;
    its memory is used again."""

    def __init__(self, work: Handle, received: Tensor, result: Tensor, spare: list[Tensor]) -> None:
        self.work, self.received, self.result, self.spare = work, received, result, spare

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received, dim=0, out=self.result)
        self.spare.append(self.received.view(-1))

    def get_future(self) -> Future[object]:
        """Of the transfer, for the recorder."""
        return self.work.get_future()

    def is_completed(self) -> bool:
        """Of the transfer, likewise."""
        return self.work.is_completed()


def open_wire(backend: str, ranks: Sequence[int] | None = None, *, urgent: bool = False) -> Exchanger:
    """The wire over ``ranks`` (all, if not given) for a collective backend (``gloo``, ``nccl``, ``staged``).
    urgent: what computation waits for; on a GPU its kernels go before others.

    Ranks that share several groups open them in one order; who is not among ``ranks`` gets a wire of its own
    that goes nowhere.
    """
    if ranks is not None and (len(ranks) == 1 or dist.get_rank() not in ranks):
        return NullWire()
    return GlooWire(ranks) if backend == "gloo" else GroupWire(new_group(ranks, backend, urgent=urgent))


def wire_bytes(kind: Collective, result: Tensor, source: Tensor, size: int) -> int:
    """Bytes each rank sends for a bandwidth-optimal (ring) collective over ``size`` ranks."""
    return sent_bytes(kind, max(result.numel(), source.numel()) * source.element_size(), size)


def sum_over(wire: Wire, value: Tensor) -> Tensor:
    """``value`` summed over the group, blocking; for the few small reductions outside the segment list."""
    if wire.size > 1 and not isinstance(wire, NullWire):
        wire.start("all_reduce", value, value).wait()
    return value


def empty_like_gathered(source: Tensor, size: int) -> Tensor:
    """An uninitialised buffer for the all-gather of ``source`` along dim 0."""
    return source.new_empty((source.shape[0] * size, *source.shape[1:]))

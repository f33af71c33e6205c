"""Collectives of one group behind one small interface, so that implementations can be exchanged,
delayed, recorded or left out.

A wire starts a collective and returns a handle; the reader of the result waits on the handle.
Between the two nobody may read, write or free the buffers. Every rank of a group must start its
collectives in one order (the instruction list's). If ranks disagree, gloo silently gives wrong sums
and NCCL hangs.
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
from plait.train.comm.tree import group_name
from plait.train.comm.world import new_group, world_timeout
from plait.train.machine.device import AsyncWork
from plait.train.machine.threads import prioritize, running


class Handle(AsyncWork, Protocol):
    """A collective in flight."""


class Splits(NamedTuple):
    """Sizes of an exchange of unequal parts. into: numbers received from every rank, in order. out:
    numbers sent to each. total: of all ranks together, equal on each."""

    into: list[int]
    out: list[int]
    total: int


class Wire(Protocol):
    """A process group as the executor uses it. In an all-reduce ``source`` and ``result`` are one
    buffer."""

    size: int
    rank: int

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Handle:
        """Start a collective: a sum all-reduce of ``result``; an all-gather, a sum reduce-scatter
        or an all-to-all along dim 0; or a rotation, in which every rank receives the ``source`` of
        the previous rank."""
        ...


class Exchanger(Wire, Protocol):
    """A wire that can also exchange unequal parts."""

    def exchange(self, result: Tensor, source: Tensor, splits: Splits) -> Handle:
        """Start to send every rank its part of ``source``, and to receive theirs into ``result``,
        both flat."""
        ...


class _Done:
    """The handle of a collective that is already complete."""

    def wait(self) -> None:
        pass

    def get_future(self) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(None)
        return future

    def is_completed(self) -> bool:
        return True


class NullWire:
    """A wire without a network: the shapes of the collectives without their values. It serves tp =
    1, and measurements of the step time without communication."""

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
        """Fill ``result`` from this rank's own data, with zeros behind them."""
        count = min(result.numel(), source.numel())
        result[:count].copy_(source[:count])
        result[count:] = 0
        return _Done()


_NAMES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""torch's names of the collectives: from 2.13 on, and before."""


class GroupWire:
    """The wire of a torch.distributed process group: NCCL, RCCL, or any other backend."""

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
        """Start the exchange asynchronously."""
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
    """The wire of gloo over some or all ranks, with features that torch.distributed's wrapper
    lacks.

    One worker thread runs collectives one after the other in the order of their start, so that the
    first is complete as early as possible; the wrapper's two threads would halve each other's
    bandwidth. A reduce-scatter sends each rank only its share; gloo's own is an all-reduce that
    discards most of its result. An all-gather makes no second copy of the result, unlike gloo's
    own.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        ranks = tuple(ranks or range(dist.get_world_size()))
        self.size, self.rank = len(ranks), ranks.index(dist.get_rank())
        before = running()
        gloo: Any = dist.ProcessGroupGloo  # its Python side is untyped
        interface = gloo_interface()
        options = gloo._Options()
        # All pairs communicate in the first step: connect now, even if other groups connect when needed.
        where = gloo.create_device(interface=interface, lazy_init=False) if interface else None
        options._devices = [where or gloo.create_default_device(lazy_init=False)]
        options._threads = 1
        options._timeout = world_timeout()
        store = c10d.PrefixStore(f"{group_name(ranks)}/wire/", dist.distributed_c10d._get_default_store())
        self._gloo = gloo(store, self.rank, self.size, options)
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        prioritize(running() - before)

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
        """Start the exchange asynchronously."""
        return self._gloo.alltoall_base(result, source, splits.into, splits.out, c10d.AllToAllOptions())

    def _exchange(self, kind: Collective, result: Tensor, source: Tensor) -> Handle:
        out, into = equal_splits(kind, source, self.rank, self.size)
        return self._gloo.alltoall_base(result.view(-1), source.view(-1), into, out, c10d.AllToAllOptions())

    def _gather(self, result: Tensor, source: Tensor) -> Handle:
        """Run the all-gather as a ring, each share into its final place; the worker thread sends
        one share when the previous has arrived."""
        shares = result.view(self.size, -1)
        if source.data_ptr() != shares[self.rank].data_ptr():
            shares[self.rank].copy_(source.view(-1))
        at = [shares[(self.rank - step) % self.size] for step in range(self.size)]
        return _Several([self._exchange("rotate", came, gone) for gone, came in pairwise(at)])

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Handle:
        """Send to a rank, by its index in the group."""
        return self._gloo.send([tensor], to, tag)

    def receive(self, tensor: Tensor, of: int, tag: int = 0) -> Handle:
        """Receive from a rank, by its index in the group."""
        return self._gloo.recv([tensor], of, tag)


def _require_contiguous(kind: Collective, result: Tensor, source: Tensor) -> None:
    """Raise ValueError for tensors that are not contiguous: NCCL refuses them, and gloo would also
    move the memory between the elements."""
    for name, tensor in (("result", result), ("source", source)):
        if not tensor.is_contiguous():
            raise ValueError(f"the {name} of an {kind} has shape {tuple(tensor.shape)} and strides {tensor.stride()}")


def started(wire: Exchanger, kind: Collective | Splits, result: Tensor, source: Tensor) -> Handle:
    """Start a collective of a wire, or an exchange of unequal parts; return its handle."""
    return wire.exchange(result, source, kind) if isinstance(kind, Splits) else wire.start(kind, result, source)


def equal_splits(kind: Collective, source: Tensor, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the numbers sent to every rank and those received, for an all-to-all or a rotation."""
    if kind == "all_to_all":
        return [source.numel() // size] * size, [source.numel() // size] * size
    to, of = (rank + 1) % size, (rank - 1) % size
    return [source.numel() * (at == to) for at in range(size)], [source.numel() * (at == of) for at in range(size)]


class _Several:
    """Handle of several transfers in flight, which end in the order in which they started."""

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
    """A reduce-scatter in flight: the shares of all ranks arrive, and ``wait`` adds them up; the
    receive buffer is reused."""

    def __init__(self, work: Handle, received: Tensor, result: Tensor, spare: list[Tensor]) -> None:
        self.work, self.received, self.result, self.spare = work, received, result, spare

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received, dim=0, out=self.result)
        self.spare.append(self.received.view(-1))

    def get_future(self) -> Future[object]:
        """Return the transfer's future, for the recorder."""
        return self.work.get_future()

    def is_completed(self) -> bool:
        """Return True if the transfer is complete; the sum may still be due."""
        return self.work.is_completed()


def open_wire(backend: str, ranks: Sequence[int] | None = None, *, urgent: bool = False) -> Exchanger:
    """Return the wire over ``ranks`` (None: all) for a collective backend (``gloo``, ``nccl``,
    ``staged``). urgent: computation waits for its collectives, so on a GPU their kernels have
    priority.

    Ranks that share several groups open them in one order. A rank that is not among ``ranks`` gets
    a wire of its own without a network.
    """
    if ranks is not None and (len(ranks) == 1 or dist.get_rank() not in ranks):
        return NullWire()
    return GlooWire(ranks) if backend == "gloo" else GroupWire(new_group(ranks, backend, urgent=urgent))


def wire_bytes(kind: Collective, result: Tensor, source: Tensor, size: int) -> int:
    """Return the bytes that each rank sends for a bandwidth-optimal (ring) collective over ``size``
    ranks."""
    return sent_bytes(kind, max(result.numel(), source.numel()) * source.element_size(), size)


def sum_over(wire: Wire, value: Tensor) -> Tensor:
    """Sum ``value`` over the group in place and return it; blocking. For the few small reductions
    outside the instruction lists."""
    if wire.size > 1 and not isinstance(wire, NullWire):
        wire.start("all_reduce", value, value).wait()
    return value


def empty_like_gathered(source: Tensor, size: int) -> Tensor:
    """Return an uninitialised buffer for the all-gather of ``source`` along dim 0."""
    return source.new_empty((source.shape[0] * size, *source.shape[1:]))

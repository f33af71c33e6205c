"""A backend of torch.distributed's that moves data with gloo and keeps NCCL's rules: collectives of
a group run on a stream of the group's own, messages of two ranks on one of theirs, after what the
caller's stream had to do; ``wait`` makes the stream wait on which it is called, not the host.

No tensor is kept until somebody waits (torch keeps them for asynchronous collectives until the
first wait, whoever waits): whoever starts a collective keeps its buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from plait.core.step.segments import Collective
from plait.train.comm.staged import PythonGroup
from plait.train.comm.wire import GlooWire, Splits, started
from tests.support.streams.order import Clock, Order

BACKEND = "virtual"


def unwatched() -> Any:
    """What the calling thread does with tensors in there is nobody's business."""
    return torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]


class Call(NamedTuple):
    """What a rank asked a communicator for. communicator: its ranks, which of their groups it is,
    and the two ranks of messages. what: the kind and its size, the same on all of its ranks.
    stream, at: where it runs here; before: what is over when it begins; thread: who asked."""

    communicator: str
    what: str
    stream: int
    at: int
    before: Clock
    thread: int


class Communicators:
    """Those of one device, in the order of their opening."""

    current: Communicators | None = None
    """Of the device that the process works with."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.calls: list[Call] = []
        self.strided: list[str] = []
        self.opened: dict[tuple[int, ...], int] = {}

    def begin(
        self, communicator: str, what: str, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Clock:
        """A kernel of the communicator's; what is over when it has ended."""
        order = self.order
        for tensor in (*reads, *writes):
            if not tensor.is_contiguous():
                self.strided.append(f"{what} of {communicator} on {tuple(tensor.shape)} with {tensor.stride()}")
        order.wait(order.event(), stream)
        before = order.event(stream)
        done = order.submit(f"{what} of {communicator}", reads, writes, stream)
        self.calls.append(Call(communicator, what, stream, done.at, before, threading.get_ident()))
        return order.event(stream)


class VirtualWork:
    """A collective or a message under way. over: what is over when it is."""

    def __init__(self, order: Order, work: Any, over: Clock) -> None:
        self._order, self._work, self.over = order, work, over

    def wait(self) -> bool:
        """The calling thread's stream waits; the host as well, which nobody may rely on."""
        self.land()
        self._order.wait(self.over)
        return True

    def land(self) -> None:
        """Let the data come, so that the CPU computes with it; no stream waits."""
        with unwatched():
            self._work.wait()

    def get_future(self) -> Future[object]:
        """Nobody needs it: marks tell when it ended."""
        raise NotImplementedError


class VirtualGroup(PythonGroup):
    """One group."""

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(BACKEND, ranks, rank, name)
        assert Communicators.current is not None, "no device is watched"
        self.all, self.ranks = Communicators.current, list(ranks)
        self.order = self.all.order
        number = self.all.opened.get(tuple(ranks), 0)
        self.all.opened[tuple(ranks)] = number + 1
        self.label = f"{'-'.join(map(str, ranks))}#{number}"
        self._stream: int | None = None
        self._pairs: dict[int, int] = {}
        with unwatched():
            self._wire = GlooWire(ranks)

    # ---- collectives ----

    def begin(self, kind: Collective | Splits, result: Tensor, source: Tensor) -> VirtualWork:
        if self._stream is None:
            self._stream = self.order.stream(f"NCCL {self.label}")
        size = "unequal parts" if isinstance(kind, Splits) else f"{kind} of {max(result.numel(), source.numel())}"
        what = f"{size} {source.dtype}"  # ranks compare it
        over = self.all.begin(self.label, what, self._stream, [source], [result])
        with unwatched():
            return VirtualWork(self.order, started(self._wire, kind, result, source.contiguous()), over)

    # ---- messages ----

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> VirtualWork:
        return self._message(tensors[0], to, tag, sends=True)

    def recv(self, tensors: list[Tensor], of: int, tag: int = 0) -> VirtualWork:
        return self._message(tensors[0], of, tag, sends=False)

    def _message(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> VirtualWork:
        """All messages of two ranks share a communicator and a stream, whatever their tags."""
        mine = self.rank()
        low, high = sorted((self.ranks[mine], self.ranks[peer]))
        if peer not in self._pairs:
            self._pairs[peer] = self.order.stream(f"NCCL {self.label} {low}~{high}")
        src, dst = (mine, peer) if sends else (peer, mine)
        what = f"message {self.ranks[src]}>{self.ranks[dst]} of {tensor.numel()} {tensor.dtype}"
        reads, writes = ([tensor], []) if sends else ([], [tensor])
        over = self.all.begin(f"{self.label} {low}~{high}", what, self._pairs[peer], reads, writes)
        with unwatched():
            call = self._wire.send if sends else self._wire.receive
            return VirtualWork(self.order, call(tensor, peer, tag), over)


def _create(options: Any, _backend_options: Any) -> VirtualGroup:
    return VirtualGroup(list(options.global_ranks_in_group), options.group_rank, options.group_id)


def register() -> None:
    """Make the backend known to torch.distributed."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])

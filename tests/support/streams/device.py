"""A device with virtual streams behind the interface that a GPU has: the runtime runs on the CPU,
and what it would submit to a GPU is put in order as a GPU would."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from plait.train.comm import staged
from plait.train.machine.device import STAGED, AsyncWork, Fork, Mark, RankDevice, mark_by_future
from tests.support.streams.mode import Host, Methods, Operators
from tests.support.streams.nccl import BACKEND, Communicators, VirtualWork, register, unwatched
from tests.support.streams.order import MAIN, Clock, Order


class Moment:
    """A mark: what is over when it is reached, and the host's time, which the CPU has."""

    def __init__(self, over: Clock) -> None:
        self.over, self.at = over, time.monotonic_ns()


class Forked:
    """The end of a thread's work so far, and what that thread knows."""

    def __init__(self, over: Clock, known: Clock) -> None:
        self.over, self.known = over, known


class VirtualDevice(RankDevice):
    """seed: of what has been reached whenever the host asks without waiting."""

    backend = BACKEND
    timed_by_host = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        register()
        self.order, self.host = Order(), Host()
        self.communicators = Communicators(self.order)
        self._side = self.order.stream("side")
        self._pool = list[int]()
        self._threads = threading.local()
        self._chance = random.Random(seed)
        self.unready: list[str] = []
        """Marks that the host read before it knew them to be reached."""

    @contextmanager
    def watching(self) -> Generator[None]:
        """The calling thread works with this device; the threads that it starts do as well."""
        before, Communicators.current = Communicators.current, self.communicators
        try:
            with self._modes():
                yield
        finally:
            Communicators.current = before

    @contextmanager
    def _modes(self) -> Generator[None]:
        with Methods(self.order, self.host), Operators(self.order, self.host):
            yield

    # ---- the interface ----

    def mark(self) -> Mark:
        self.order.submit("mark")
        return cast("Mark", Moment(self.order.event()))

    def nanoseconds(self, mark: Mark) -> int:
        moment = cast("Any", mark)
        if not self.order.knows(moment.over):
            self.unready.append(f"a mark of {moment.over}")
        return moment.at

    def reached(self, mark: Mark | Fork) -> bool:
        moment = cast("Any", mark)
        if not self.order.knows(moment.over) and self._chance.random() < 0.5:
            return False
        self.order.learn(moment.over)
        return True

    def anchor(self, *, anew: bool = False) -> None:
        self.order.learn(self.order.event(), "anchor")

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        assert isinstance(work, VirtualWork)
        with self.order.on(self._side):
            self.order.wait(work.over)
            mark = self.mark()
        callback(mark, False)

    def fork(self) -> Fork:
        self.order.submit("fork")
        return cast("Fork", Forked(self.order.event(), self.order.known()))

    @contextmanager
    def side_stream(self, after: Fork) -> Generator[None]:
        forked = cast("Forked", after)
        if not hasattr(self._threads, "stream"):
            self._threads.stream = self.order.stream(threading.current_thread().name)
        self.order.learn(forked.known)
        with self.order.on(self._threads.stream), self._modes():
            self.order.wait(forked.over)
            yield

    def compute_on(self, stream: int | None) -> None:
        while stream is not None and len(self._pool) <= stream:
            self._pool.append(self.order.stream(f"compute {len(self._pool)}"))
        self.order.move(MAIN if stream is None else self._pool[stream])

    def join(self, after: Fork) -> None:
        forked = cast("Forked", after)
        self.order.learn(forked.known)
        self.order.wait(forked.over)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_copied(tensor) for tensor in tensors]

    def host_buffer(self, tensor: Tensor) -> Tensor:
        with unwatched():
            found = super().host_buffer(tensor)
        self.host.add(found)
        return found

    def download(self, tensor: Tensor) -> Tensor:
        self.order.submit("download", [tensor])
        self.order.learn(self.order.event(), "download")
        with unwatched():
            copied = tensor.clone()
        self.host.add(copied)
        return copied

    def synchronize(self) -> None:
        self.order.learn(self.order.everything(), "synchronize")

    @property
    def problems(self) -> list[str]:
        """Everything that a GPU would do otherwise one day."""
        strided = [f"NCCL takes contiguous tensors only: {one}" for one in self.communicators.strided]
        unready = [f"the host waits for {one}" for one in self.unready]
        return [*self.order.races, *strided, *unready]

    @property
    def streams(self) -> list[str]:
        """All of them but the default one."""
        return self.order.names[MAIN + 1 :]


class VirtualSharedDevice(VirtualDevice):
    """One that ranks share."""

    backend = STAGED

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        staged.register(self)

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        mark_by_future(self, work, callback)


def _copied(tensor: Tensor) -> Tensor:
    """In the device's memory, which is another. The copy is an operation of the current stream."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

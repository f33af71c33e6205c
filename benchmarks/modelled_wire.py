"""Collectives that take as long as a model of a link says, beside the computation of one device.

Nothing travels: values are those of ``NullWire``, wrong but of the right shapes. On a GPU a collective is a
kernel on a stream of its own that spins, so it takes one multiprocessor and no bandwidth of the memory, where
NCCL takes a few of both. On a CPU it is a thread that sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.futures import Future

from plait.core.step.segments import Collective
from plait.train.comm.wire import NullWire, wire_bytes
from plait.train.machine.device import RankDevice


class Spinning:
    """A collective on a GPU's side stream."""

    def __init__(self, ended: torch.cuda.Event) -> None:
        self.ended = ended

    def wait(self) -> None:
        """What is submitted from now on comes after it; the host goes on."""
        torch.cuda.current_stream().wait_event(self.ended)

    def get_future(self) -> Future[object]:
        """Done at once: whoever asks for the moment marks it on a stream that has waited."""
        future: Future[object] = Future()
        future.set_result(None)
        return future

    def is_completed(self) -> bool:
        """Whether the device has come to its end."""
        return self.ended.query()


class Sleeping:
    """A collective of a thread."""

    def __init__(self) -> None:
        self.future: Future[object] = Future()

    def wait(self) -> None:
        """Until it is over."""
        self.future.wait()

    def get_future(self) -> Future[object]:
        """Done when it is over."""
        return self.future

    def is_completed(self) -> bool:
        """Whether it is."""
        return self.future.done()


class ModelledWire:
    """A group of ``size`` ranks of which this is the first. seconds: of a collective, by bytes that a rank
    sends in it; may be changed between steps. Collectives run one after the other."""

    def __init__(self, device: RankDevice, size: int, seconds: Callable[[int], float]) -> None:
        self.size, self.rank, self.seconds = size, 0, seconds
        self.sent = 0
        self._values = NullWire(size)
        if device.timed_by_host:
            self._thread = ThreadPoolExecutor(1)
        else:
            self._stream, self._rate = torch.cuda.Stream(), _cycles_per_second()
        self._by_host = device.timed_by_host

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Spinning | Sleeping:
        """Start it; ``result`` may be read after ``wait``."""
        nbytes = wire_bytes(kind, result, source, self.size)
        self.sent += nbytes
        seconds = self.seconds(nbytes)
        if self._by_host:
            handle = Sleeping()
            self._thread.submit(self._sleep, handle, kind, result, source, seconds)
            return handle
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._values.start(kind, result, source)
            torch.cuda._sleep(round(seconds * self._rate))
            ended = torch.cuda.Event()
            ended.record()
            return Spinning(ended)

    def _sleep(self, handle: Sleeping, kind: Collective, result: Tensor, source: Tensor, seconds: float) -> None:
        self._values.start(kind, result, source)
        time.sleep(seconds)
        handle.future.set_result(None)


def _cycles_per_second(cycles: int = 20_000_000) -> float:
    """Of a kernel that spins, at the clock that the device has when it works."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)

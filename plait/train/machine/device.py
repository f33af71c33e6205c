"""One small interface to the accelerator: CPU, CUDA and ROCm behind the same few calls.

The CPU form, here, is trivial: a mark is a clock reading. On a GPU (``machine.gpu``) a mark is an event on
the current stream, read only after the step, so that recording never makes the host wait.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.profiler import ProfilerActivity, profile

from plait.core.model.precision import Precision
from plait.train.machine.memory import MemoryMeter


def torch_dtype(precision: Precision) -> torch.dtype:
    """Of parameters and activations."""
    return {"fp32": torch.float32, "bf16-mixed": torch.bfloat16, "fp64": torch.float64}[precision]


STAGED = "staged"
"""The collective backend of ranks that share a GPU (``comm.staged``)."""
Mark = int | torch.cuda.Event
"""A moment in a device's order of work, which ``RankDevice.nanoseconds`` reads: on a CPU a clock reading."""
Fork = torch.cuda.Event | None
"""The end of a thread's work so far; on a CPU there is nothing to wait for."""


class AsyncWork(Protocol):
    """Something asynchronous, as torch.distributed has it."""

    def wait(self) -> object:
        """Return when what it makes may be used by work submitted from now on (the host itself may run ahead
        on a GPU)."""
        ...

    def get_future(self) -> Future[object]:
        """Done when it is over."""
        ...

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        ...


class Graph(Protocol):
    """Work that a device has captured: kernels with their arguments, the same memory every time."""

    def replay(self) -> None:
        """Submit all of it at once, to the calling thread's stream."""
        ...


class Allocated(NamedTuple):
    """Bytes of tensors beyond those that were there before: afterwards, and at most."""

    left: int
    peak: int


class RankDevice:
    """Where tensors live, which collective backend serves them, and how moments on it are marked."""

    backend = "gloo"

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    def description(self) -> str:
        """What a report should call the device."""
        return "cpu"

    @property
    def name(self) -> str:
        """As its maker calls it."""
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.machine()

    @property
    def memory(self) -> int:
        """Bytes; of a CPU, its host's."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def sharing(self, ranks: int) -> int:
        """Among how many of the host's so many ranks this one's memory is shared."""
        return ranks

    @property
    def versions(self) -> dict[str, str]:
        """Of what serves it, beside torch."""
        return {}

    @property
    def tf32(self) -> bool:
        """Whether products of fp32 numbers are rounded to TF32."""
        return False

    timed_by_host = True
    """Whether a mark is a reading of the host's clock."""

    def mark(self) -> Mark:
        """A moment in the device's order of work; ``nanoseconds`` reads it later."""
        return time.monotonic_ns()

    def nanoseconds(self, mark: Mark) -> int:
        """A mark by the host's monotonic clock. On a GPU this waits until the mark is reached, for nothing
        else, and may use it again: a mark is read once."""
        assert isinstance(mark, int)
        return mark

    def reached(self, mark: Mark | Fork) -> bool:
        """Whether the device has come to a mark, or to the end of work that ``fork`` has marked; does not
        wait."""
        return True

    def anchor(self, *, anew: bool = False) -> None:
        """The host has just waited for the device: the moment to compare their clocks for marks to come.
        anew: and none of those before counts any more."""

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        """Call ``callback(mark, failed)`` with the moment at which an asynchronous collective ended, and
        whether it failed, as far as that is known without waiting."""

        mark_by_future(self, work, callback)

    def fork(self) -> Fork:
        """The current end of the calling thread's work, for ``aside`` and ``join``."""

    def aside(self, after: Fork) -> AbstractContextManager[object]:
        """What a background thread submits in here runs beside other work, after the work that ``fork``
        marked."""
        return nullcontext()

    def join(self, after: Fork) -> None:
        """What the calling thread submits from now on runs after the work that ``fork`` marked."""

    def compute_on(self, stream: int | None) -> None:
        """What the calling thread submits from now on runs on a stream of the fixed pool; None: on its own.
        On a CPU there is one."""

    def enter_thread(self) -> None:
        """The first thing that a thread does which will submit work."""

    captures = False
    """Whether ``capture`` works."""

    def pool(self) -> object:
        """Memory for what is captured together: graphs that are always replayed in one order."""

    def capture(self, work: Callable[[], object], pool: object) -> Graph:
        """What the calling thread submits in ``work``, as a graph; nothing of it runs before a replay. What
        it allocates is taken from ``pool`` for good, and stays where it is."""
        raise NotImplementedError

    def release_cached(self) -> None:
        """Give back the memory of tensors that are gone, which the allocator keeps for others. Waits for
        everything that was submitted, so nothing may be under way that waits for this rank."""

    def memory_meter(self) -> MemoryMeter:
        """Measures what tensors take in a step."""
        return MemoryMeter()

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the host's memory where the device computes with them, without waiting for it."""
        return list(tensors)

    def beside(self, tensor: Tensor) -> Tensor:
        """Memory of the host for as much as the tensor has."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def download(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, which waits for what the calling thread has submitted."""
        return tensor.clone()

    def synchronize(self) -> None:
        """Wait until everything submitted has finished."""

    def allocated(self, call: Callable[[], object]) -> Allocated:
        """What torch's allocator gave out while ``call`` ran; on a CPU by the calling thread, and at the
        price of a profile."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            call()
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
        live = peak = 0
        for event in sorted(events, key=lambda each: each.start_ns()):
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
        return Allocated(live, peak)


def mark_by_future(device: RankDevice, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
    """``RankDevice.mark_when_done`` where the thread that ends a collective's future can make the mark."""

    def done(future: Future[object]) -> None:
        callback(device.mark(), _failed(future))

    work.get_future().add_done_callback(done)


def _failed(future: Future[object]) -> bool:
    """Whether a future that is done holds an error."""
    try:
        future.value()
    except Exception:  # noqa: BLE001  (whoever waits gets it)
        return True
    return False

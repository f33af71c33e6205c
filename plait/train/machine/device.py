"""Abstract the accelerator: one small interface for CPU, CUDA and ROCm.

The CPU form, here, is trivial: a mark is a clock reading. On a GPU (``machine.gpu``) a mark is an
event on the current stream. It is read only after the step, so that recording never makes the host
wait.
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
    """Return the dtype of parameters and activations."""
    return {"fp32": torch.float32, "bf16-mixed": torch.bfloat16, "fp64": torch.float64}[precision]


STAGED = "staged"
"""The collective backend of ranks that share a GPU (``comm.staged``)."""
Mark = int | torch.cuda.Event
"""A point in a device's order of work, which ``RankDevice.nanoseconds`` reads; on a CPU a clock
reading."""
Fork = torch.cuda.Event | None
"""The end of the work that a thread has submitted so far; None on a CPU, where there is nothing to
wait for."""


class AsyncWork(Protocol):
    """Asynchronous work, with the interface of torch.distributed's ``Work``."""

    def wait(self) -> object:
        """Return when work submitted from now on may use the result (on a GPU the host itself may
        run ahead)."""
        ...

    def get_future(self) -> Future[object]:
        """Return a future that completes with the work."""
        ...

    def is_completed(self) -> bool:
        """Return True if the work has ended, successfully or not."""
        ...


class Graph(Protocol):
    """A graph captured by a device: kernels with their arguments, the same memory at every
    replay."""

    def replay(self) -> None:
        """Submit the whole graph at once, to the calling thread's stream."""
        ...


class Allocated(NamedTuple):
    """Bytes of tensors beyond those allocated before: afterwards (``left``), and at most
    (``peak``)."""

    left: int
    peak: int


class RankDevice:
    """The device of a rank: where its tensors live, which collective backend serves them, and how
    to mark points in time."""

    backend = "gloo"

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    def description(self) -> str:
        """The device's name in reports."""
        return "cpu"

    @property
    def name(self) -> str:
        """The vendor's name of the device."""
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.machine()

    @property
    def memory(self) -> int:
        """The device's memory in bytes; on a CPU, the host's."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def sharing(self, ranks: int) -> int:
        """Return the number of ranks, of this host's ``ranks``, that share the memory of this
        rank's device."""
        return ranks

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries behind the device, other than torch."""
        return {}

    @property
    def tf32(self) -> bool:
        """True if fp32 products are rounded to TF32."""
        return False

    timed_by_host = True
    """True if a mark is a reading of the host's clock."""

    def mark(self) -> Mark:
        """Return a mark of the current point in the device's order of work; ``nanoseconds`` reads
        it later."""
        return time.monotonic_ns()

    def nanoseconds(self, mark: Mark) -> int:
        """Return a mark's time by the host's monotonic clock, in ns. On a GPU this waits only until
        the device has reached the mark, and may reuse its event: a mark can be read once."""
        assert isinstance(mark, int)
        return mark

    def reached(self, mark: Mark | Fork) -> bool:
        """Return True if the device has reached a mark, or finished the work before a ``fork``.
        Does not wait."""
        return True

    def anchor(self, *, anew: bool = False) -> None:
        """Compare the clocks of host and device, for marks to come; call it when the host has just
        waited for the device. anew: discard earlier anchors."""

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        """Call ``callback(mark, failed)`` when an asynchronous collective ends. failed: True if it
        is known to have failed, as far as that is known without waiting."""

        mark_by_future(self, work, callback)

    def fork(self) -> Fork:
        """Return the current end of the calling thread's work, for ``side_stream`` and ``join``."""

    def side_stream(self, after: Fork) -> AbstractContextManager[object]:
        """Context manager: a background thread's work inside the block runs concurrently with other
        work, and after the work before the ``fork``."""
        return nullcontext()

    def join(self, after: Fork) -> None:
        """Let work that the calling thread submits from now on run after the work before the
        ``fork``."""

    def compute_on(self, stream: int | None) -> None:
        """Submit the calling thread's work from now on to a stream of the fixed pool; None: to its
        default stream. No effect on a CPU."""

    def enter_thread(self) -> None:
        """Prepare a new thread that will submit work; call this first in the thread."""

    captures = False
    """True if ``capture`` works."""

    def pool(self) -> object:
        """Return a memory pool for graphs that are captured together and always replayed in the
        same order."""

    def capture(self, work: Callable[[], object], pool: object) -> Graph:
        """Capture the work that the calling thread submits in ``work`` as a graph; nothing runs
        before a replay. Its allocations come from ``pool``, and stay at their addresses."""
        raise NotImplementedError

    def release_cached(self) -> None:
        """Free the allocator's cached memory. This waits for all submitted work, none of which may
        wait for this rank."""

    def memory_meter(self) -> MemoryMeter:
        """Return a meter of the tensors' memory in a step."""
        return MemoryMeter()

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors from host memory to the device, without waiting for it."""
        return list(tensors)

    def host_buffer(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor of the same shape and dtype in host memory."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def download(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, after waiting for the work that the calling thread has
        submitted."""
        return tensor.clone()

    def synchronize(self) -> None:
        """Wait until all submitted work has finished."""

    def allocated(self, call: Callable[[], object]) -> Allocated:
        """Return the bytes that torch's allocator handed out while ``call`` ran. On a CPU it counts
        the calling thread only, and runs under the profiler."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            call()
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
        live = peak = 0
        for event in sorted(events, key=lambda each: each.start_ns()):
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
        return Allocated(live, peak)


def mark_by_future(device: RankDevice, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
    """Implement ``RankDevice.mark_when_done`` where the thread that completes a collective's future
    can make the mark."""

    def done(future: Future[object]) -> None:
        callback(device.mark(), _failed(future))

    work.get_future().add_done_callback(done)


def _failed(future: Future[object]) -> bool:
    """Return True if a completed future holds an error."""
    try:
        future.value()
    except Exception:  # noqa: BLE001  (raised where the work is waited for)
        return True
    return False

"""One small interface to the accelerator: CPU, CUDA and ROCm behind the same few calls.

Nothing outside this file names ``torch.cuda``. The CPU form is trivial: a mark is a clock reading. On a GPU a
mark is an event on the current stream, read only after the step, so that recording never makes the host wait.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.profiler import ProfilerActivity, profile

from plait.core.env import expand_segments, ready_for_accelerator
from plait.core.errors import JobError
from plait.core.process import process_memory
from plait.core.settings import Precision


def torch_dtype(precision: Precision) -> torch.dtype:
    """Of parameters and activations."""
    return {"fp32": torch.float32, "bf16-mixed": torch.bfloat16, "fp64": torch.float64}[precision]


EVENTS = 4096
"""Events of a GPU that are kept to be used again."""
Mark = int | torch.cuda.Event
"""A moment in a device's order of work, which ``Device.nanoseconds`` reads: on a CPU a clock reading."""
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


class Device:
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

    @property
    def versions(self) -> dict[str, str]:
        """Of what serves it, beside torch."""
        return {}

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

    def anchor(self) -> None:
        """The host has just waited for the device: the moment to compare their clocks for marks to come."""

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        """Call ``callback(mark, failed)`` with the moment at which an asynchronous collective ended, and
        whether it failed, as far as that is known without waiting."""

        def done(future: Future[object]) -> None:
            callback(time.monotonic_ns(), _failed(future))

        work.get_future().add_done_callback(done)

    def fork(self) -> Fork:
        """The current end of the calling thread's work, for ``aside`` and ``join``."""

    def aside(self, after: Fork) -> AbstractContextManager[object]:
        """What a background thread submits in here runs beside other work, after the work that ``fork``
        marked."""
        return nullcontext()

    def join(self, after: Fork) -> None:
        """What the calling thread submits from now on runs after the work that ``fork`` marked."""

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

    def memory_meter(self) -> Callable[[], int]:
        """Tells, from now on, the most bytes that were taken: of a GPU, by tensors; of a CPU, by the process
        beyond what it has now. Whoever asks waits for nothing."""
        before = process_memory()

        def peak() -> int:
            now = process_memory()
            return max(0, now.peak - before.now) if now and before else 0

        return peak

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the host's memory where the device computes with them, without waiting for it."""
        return list(tensors)

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


class CudaDevice(Device):
    """NVIDIA through NCCL, AMD through RCCL (PyTorch's ROCm build answers to the same names)."""

    backend = "nccl"

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        torch.cuda.set_device(torch_device)
        self._side = torch.cuda.Stream(torch_device)
        self._capturing = torch.cuda.Stream(torch_device)
        self._background = threading.local()
        self._read: deque[torch.cuda.Event] = deque(maxlen=EVENTS)  # to be used again
        self._bases: deque[tuple[torch.cuda.Event, int]] = deque(maxlen=2)
        self.anchor()

    @property
    def description(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def name(self) -> str:
        return self.description

    @property
    def memory(self) -> int:
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    @property
    def versions(self) -> dict[str, str]:
        toolkit = {"rocm": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[arg-type]
        return {name: value for name, value in toolkit.items() if value} | {"nccl": nccl}

    timed_by_host = False

    def mark(self) -> Mark:
        try:
            event = self._read.popleft()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: Mark | Fork) -> bool:
        assert isinstance(mark, torch.cuda.Event)
        return mark.query()

    def nanoseconds(self, mark: Mark) -> int:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()
        # Of the last two anchors the older: it lies before all marks of the step that is read. Elapsed
        # times are float32 milliseconds, which are coarse after hours.
        base, at = self._bases[0]
        taken = at + round(base.elapsed_time(mark) * 1e6)
        self._read.append(mark)
        return taken

    def anchor(self) -> None:
        base = torch.cuda.Event(enable_timing=True)
        base.record()
        base.synchronize()
        self._bases.append((base, time.monotonic_ns()))

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        # The side stream waits in the order of the starts, in which collectives of one group end. Of several
        # groups' one that ends early would be marked late.
        with torch.cuda.stream(self._side):
            work.wait()  # makes the side stream wait, not the host
            callback(self.mark(), False)

    def fork(self) -> Fork:
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def aside(self, after: Fork) -> Iterator[None]:
        assert after is not None
        if not hasattr(self._background, "stream"):
            # One for each thread: a thread waiting for its own must not wait for another's.
            self._background.stream = torch.cuda.Stream(self.torch_device)
        stream: torch.cuda.Stream = self._background.stream
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            yield

    def join(self, after: Fork) -> None:
        assert after is not None
        torch.cuda.current_stream(self.torch_device).wait_event(after)

    def enter_thread(self) -> None:
        # A thread begins on the first GPU, and returns there when it leaves a stream of another, which costs
        # that GPU half a gigabyte for a context.
        torch.cuda.set_device(self.torch_device)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # One copy of everything, from pinned memory: one from other memory waits until the stream is empty.
        packed = torch.empty(_packed_bytes(tensors), dtype=torch.uint8, pin_memory=True)
        for piece, tensor in zip(_pieces(packed, tensors), tensors, strict=True):
            piece.copy_(tensor)
        # torch's allocator of pinned memory gives it to nobody else before the copy is done.
        return _pieces(packed.to(self.torch_device, non_blocking=True), tensors)

    captures = True

    def pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], object], pool: object) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capturing), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # only memory was taken
            # Other threads go on meanwhile: those of lanes and shards, and NCCL's own.
            graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def memory_meter(self) -> Callable[[], int]:
        return lambda: torch.cuda.max_memory_allocated(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def allocated(self, call: Callable[[], object]) -> Allocated:
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        call()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        return Allocated(torch.cuda.memory_allocated(self.torch_device) - before, peak - before)


ALIGNED = 16
"""Bytes of which a multiple lies before every packed tensor: what the widest number needs."""


def _packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors)


def _pieces(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Places for tensors like these in one buffer of bytes."""
    starts = accumulate((_packed_bytes([tensor]) for tensor in tensors), initial=0)
    return [
        packed[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for at, tensor in zip(starts, tensors, strict=False)
    ]


def _failed(future: Future[object]) -> bool:
    """Whether a future that is done holds an error."""
    try:
        future.value()
    except Exception:  # noqa: BLE001  (whoever waits gets it)
        return True
    return False


def own_gpu(kind: str, local_rank: int) -> int | None:
    """The GPU that this rank may take, by its number among those that this process sees; None for the CPU.

    kind: as ``run.device``. One GPU that is all a process sees is its own whatever its rank: schedulers show
    each task its own. Whether others see the same one is for all ranks to find out (``comm.world``).
    """
    if kind == "cpu":
        return None
    ready_for_accelerator()
    if torch.version.hip is None:  # ROCm builds do not have it
        expand_segments()
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank < seen or seen == 1:
        return local_rank if local_rank < seen else 0
    if kind == "cuda":
        raise JobError(f"local rank {local_rank} has no GPU of its own ({seen} found)", key="run.device",
                       fix="Start fewer ranks on this node, or use device = \"cpu\"")  # fmt: skip
    return None


def gpu_name(gpu: int) -> str:
    """What tells a GPU from every other in the world."""
    return str(torch.cuda.get_device_properties(gpu).uuid)


def device_of(gpu: int | None) -> Device:
    """The device of a rank that has this GPU, or none."""
    return Device(torch.device("cpu")) if gpu is None else CudaDevice(torch.device("cuda", gpu))


def open_device(kind: str, local_rank: int) -> Device:
    """The device of a rank that need not agree with others: ``cpu``, ``cuda``, or ``auto`` for a GPU where
    there is one."""
    return device_of(own_gpu(kind, local_rank))

"""Implement ``machine.device``'s interface for GPUs, exclusive or shared between ranks, and select
a rank's GPU. No other module calls ``torch.cuda``."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from plait.core.base.cluster_env import granted_gpus
from plait.core.base.env import expand_segments, ready_for_accelerator, tf32_override
from plait.core.base.errors import JobError
from plait.train.machine.device import STAGED, Allocated, AsyncWork, Fork, Graph, Mark, RankDevice, mark_by_future
from plait.train.machine.memory import MemoryMeter, PeakMemory

EVENTS = 4096
"""Number of CUDA events that are kept for reuse."""


class CudaMeter(MemoryMeter):
    """A meter that reads the allocator's counters. The process's memory is what the allocator has
    reserved on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def begin(self, *roots: object) -> None:
        self._peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        torch.cuda.synchronize(self._device)
        self._tensors = torch.cuda.max_memory_allocated(self._device)

    def peaks(self) -> PeakMemory:
        return PeakMemory(self._tensors, max(self._peak, torch.cuda.max_memory_reserved(self._device)))


class CudaDevice(RankDevice):
    """An NVIDIA GPU with NCCL, or an AMD GPU with RCCL (PyTorch's ROCm build uses the same
    names)."""

    backend = "nccl"

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        torch.cuda.set_device(torch_device)
        self._side = torch.cuda.Stream(torch_device)
        self._capturing = torch.cuda.Stream(torch_device)
        self._pool = list[torch.cuda.Stream]()
        self._background = threading.local()
        self._read: deque[torch.cuda.Event] = deque(maxlen=EVENTS)  # for reuse
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

    def sharing(self, ranks: int) -> int:
        return 1

    @property
    def versions(self) -> dict[str, str]:
        toolkit = {"rocm": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
        return {name: value for name, value in toolkit.items() if value} | {"nccl": nccl_version()}

    @property
    def tf32(self) -> bool:
        # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's containers set, or else torch's own setting.
        forced = tf32_override()
        return torch.get_float32_matmul_precision() != "highest" if forced is None else forced

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
        # The older of the last two anchors lies before all marks of the step that is read. Elapsed times are
        # float32 milliseconds, which lose precision after hours.
        base, at = self._bases[0]
        taken = at + round(base.elapsed_time(mark) * 1e6)
        self._read.append(mark)
        return taken

    def anchor(self, *, anew: bool = False) -> None:
        base = torch.cuda.Event(enable_timing=True)
        base.record()
        base.synchronize()
        if anew:
            self._bases.clear()
        self._bases.append((base, time.monotonic_ns()))

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        # The side stream waits in the order of the starts, in which collectives of one group end. With
        # several groups, a collective that ends early may be marked late.
        with torch.cuda.stream(self._side):
            work.wait()  # makes the side stream wait, not the host
            callback(self.mark(), False)

    def fork(self) -> Fork:
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def side_stream(self, after: Fork) -> Iterator[None]:
        assert after is not None
        if not hasattr(self._background, "stream"):
            # One stream for each thread: a thread must not wait for another's work.
            self._background.stream = torch.cuda.Stream(self.torch_device)
        stream: torch.cuda.Stream = self._background.stream
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            yield

    def join(self, after: Fork) -> None:
        assert after is not None
        torch.cuda.current_stream(self.torch_device).wait_event(after)

    def compute_on(self, stream: int | None) -> None:
        if stream is None:
            torch.cuda.set_stream(torch.cuda.default_stream(self.torch_device))
            return
        while len(self._pool) <= stream:
            self._pool.append(torch.cuda.Stream(self.torch_device))
        torch.cuda.set_stream(self._pool[stream])

    def enter_thread(self) -> None:
        # A new thread's device is GPU 0. Leaving a stream of another GPU would make GPU 0 current again, and
        # a context there costs half a gigabyte.
        torch.cuda.set_device(self.torch_device)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # One copy for all tensors, from pinned memory: a copy from pageable memory waits until the stream is
        # empty.
        packed = torch.empty(_packed_bytes(tensors), dtype=torch.uint8, pin_memory=True)
        for piece, tensor in zip(_pieces(packed, tensors), tensors, strict=True):
            piece.copy_(tensor)
        # torch's allocator of pinned memory does not reuse the memory before the copy is done.
        return _pieces(packed.to(self.torch_device, non_blocking=True), tensors)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    captures = True

    def pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], object], pool: object) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capturing), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # it only allocated memory
            # Other threads run meanwhile: those of lanes and shards, and NCCL's own.
            graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def release_cached(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def memory_meter(self) -> MemoryMeter:
        return CudaMeter(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def allocated(self, call: Callable[[], object]) -> Allocated:
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        call()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        return Allocated(torch.cuda.memory_allocated(self.torch_device) - before, peak - before)


class SharedDevice(CudaDevice):
    """A GPU that several ranks share: their tensors travel through host memory
    (``comm.staged``)."""

    backend = STAGED

    def sharing(self, ranks: int) -> int:
        return -(-ranks // torch.cuda.device_count())

    def mark_when_done(self, work: AsyncWork, callback: Callable[[Mark, bool], object]) -> None:
        # ``wait`` would block the host; the future completes on the stream that brings the result.
        mark_by_future(self, work, callback)


ALIGNED = 16
"""Alignment of packed tensors in bytes: that of the widest dtype."""


def _packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors)


def _pieces(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views into a buffer of bytes, one for each tensor, in its shape and dtype."""
    starts = accumulate((_packed_bytes([tensor]) for tensor in tensors), initial=0)
    return [
        packed[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for at, tensor in zip(starts, tensors, strict=False)
    ]


def own_gpu(kind: str, local_rank: int, *, alone: bool = False) -> int | None:
    """Return the index of the GPU that this rank may use, among those visible to this process; None
    for the CPU. alone: this is the only rank of the world.

    kind: as ``run.device``. ``auto`` selects the CPU if there is no GPU for the rank, unless the
    scheduler granted GPUs. With ``shared``, a host's ranks take its GPUs in turn. If a process sees
    exactly one GPU, it takes that GPU, whatever its local rank: schedulers show each task its own
    GPU. Whether other ranks see the same GPU is checked by all ranks together (``comm.world``).
    Raises JobError if a GPU is required and there is none.
    """
    if kind == "cpu":
        return None
    ready_for_accelerator(lazy=alone or kind == "shared")  # no kernel of theirs waits for another rank
    if torch.version.hip is None:  # ROCm builds do not have it
        expand_segments()
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen and kind == "shared":
        return local_rank % seen
    if local_rank < seen or seen == 1:
        return local_rank if local_rank < seen else 0
    if kind == "shared":
        raise JobError("no GPU was found that ranks could share", key="run.device", fix='Use device = "cpu"')
    if gpus := granted_gpus():
        problem = f"{gpus} GPUs of this node were asked for, and local rank {local_rank} finds {seen}"
        fix = 'Install a PyTorch that knows them, or use device = "cpu"'
        raise JobError(problem, key="run.device", fix=fix)
    if kind == "cuda":
        raise JobError(f"local rank {local_rank} has no GPU of its own ({seen} found)", key="run.device",
                       fix="Start fewer ranks on this node, or use device = \"cpu\"")  # fmt: skip
    return None


def gpu_name(gpu: int) -> str:
    """Return the GPU's UUID, which is unique across hosts."""
    return str(torch.cuda.get_device_properties(gpu).uuid)


def gpu_address(gpu: int) -> str:
    """Return a GPU's PCI address, in Linux's format; empty if PyTorch does not know it."""
    one = torch.cuda.get_device_properties(gpu)
    bus, device = getattr(one, "pci_bus_id", None), getattr(one, "pci_device_id", None)
    if bus is None or device is None:
        return ""
    return f"{getattr(one, 'pci_domain_id', 0):04x}:{bus:02x}:{device:02x}.0"


def device_of(gpu: int | None, *, shared: bool = False) -> RankDevice:
    """Return the device of a rank with this GPU; None: the CPU. shared: other ranks use the GPU
    too."""
    if gpu is None:
        return RankDevice(torch.device("cpu"))
    return (SharedDevice if shared else CudaDevice)(torch.device("cuda", gpu))


def nccl_version() -> str:
    """Return the version of PyTorch's NCCL."""
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))  # type: ignore[arg-type]


def visible_devices() -> tuple[list[tuple[str, int]], str, str]:
    """Return (name, bytes) of each GPU that PyTorch can use; NCCL's version (empty without); the
    reason why there is no GPU."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(one) for one in range(number)]
    nccl = nccl_version() if number and torch.distributed.is_nccl_available() else ""
    return [(one.name, one.total_memory) for one in found], nccl, str(said[-1].message) if said else ""

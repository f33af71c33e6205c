"""Devices, as far as they can be tried without a GPU: ``torch.cuda`` is a double where one is
needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from plait.core.base.env import expand_segments, ready_for_accelerator
from plait.core.base.errors import JobError, LaunchError
from plait.train.comm.background import Background
from plait.train.machine import gpu as devices
from plait.train.machine.device import RankDevice
from plait.train.machine.gpu import CudaDevice, device_of, own_gpu

HOUR = 3600 * 10**9


class Cuda:
    """``torch.cuda`` with so many GPUs, and a clock that tests move. now: ns."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus, self.now, self.ran = gpus, 0, 10**18
        self.of_thread = threading.local()

    def is_available(self) -> bool:
        return self.gpus > 0

    def device_count(self) -> int:
        return self.gpus

    def set_device(self, device: torch.device) -> None:
        self.of_thread.device = device

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def current_stream(self, device: torch.device) -> Any:
        return self.Stream(device)

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            pass


class Event:
    """Of the double. Elapsed times are float32 milliseconds, as CUDA's are."""

    cuda: Cuda

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = self.cuda.now

    def synchronize(self) -> None:
        assert self.query(), "the host waits"

    def query(self) -> bool:
        return self.at <= self.cuda.ran

    def elapsed_time(self, other: Event) -> float:
        return torch.tensor((other.at - self.at) / 1e6, dtype=torch.float32).item()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    double = Cuda()
    for name in ("is_available", "device_count", "set_device", "stream", "current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(double, name))
    monkeypatch.setattr(Event, "cuda", double, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(devices.time, "monotonic_ns", lambda: double.now)
    monkeypatch.setattr(devices, "ready_for_accelerator", lambda lazy: None)
    monkeypatch.setattr(devices, "expand_segments", lambda: None)
    return double


def test_segments_expand_unless_the_user_has_set_the_allocator_up() -> None:
    alone: dict[str, str] = {}
    expand_segments(alone)
    assert alone == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {key: "max_split_size_mb:64"}
        expand_segments(chosen)
        assert chosen == {key: "max_split_size_mb:64"}


def test_a_gpu_has_queues_for_every_stream_and_its_kernels_at_the_start() -> None:
    found: dict[str, str] = {}
    ready_for_accelerator(found)
    assert found == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    ready_for_accelerator(lone := dict[str, str](), lazy=True)
    assert lone == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "LAZY"}
    chosen = {"CUDA_DEVICE_MAX_CONNECTIONS": "16", "CUDA_MODULE_LOADING": "LAZY"}
    ready_for_accelerator(kept := dict(chosen))
    assert kept == chosen


@pytest.mark.parametrize("queues", ["1", "7", "33", "many"])
def test_queues_that_bring_groups_to_a_standstill_are_refused(queues: str) -> None:
    with pytest.raises(LaunchError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        ready_for_accelerator({"CUDA_DEVICE_MAX_CONNECTIONS": queues})


def test_without_a_gpu_ranks_use_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_of(own_gpu("auto", 0)).torch_device.type == "cpu"


@pytest.mark.parametrize(
    ("kind", "seen", "local_rank", "gpu"),
    [
        ("auto", 2, 0, 0),
        ("auto", 2, 1, 1),
        ("auto", 1, 3, 0),  # a scheduler shows every task its own
        ("cuda", 1, 3, 0),
        ("auto", 2, 2, None),
        ("auto", 0, 0, None),
        ("cpu", 2, 0, None),
        ("shared", 1, 3, 0),
        ("shared", 2, 3, 1),
    ],
)
def test_which_gpu_a_rank_may_take(cuda: Cuda, kind: str, seen: int, local_rank: int, gpu: int | None) -> None:
    cuda.gpus = seen
    assert own_gpu(kind, local_rank) == gpu


@pytest.mark.parametrize(
    ("kind", "alone", "lazy"), [("cuda", False, False), ("cuda", True, True), ("shared", False, True)]
)
def test_kernels_are_loaded_at_the_start_where_ranks_wait_in_kernels(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, kind: str, alone: bool, lazy: bool
) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(devices, "ready_for_accelerator", lambda **how: asked.append(how))
    cuda.gpus = 1
    own_gpu(kind, 0, alone=alone)
    assert asked == [{"lazy": lazy}]


def test_a_rank_that_was_promised_a_gpu_says_that_it_has_none(cuda: Cuda) -> None:
    cuda.gpus = 2
    with pytest.raises(JobError, match=r"local rank 2 has no GPU of its own \(2 found\)"):
        own_gpu("cuda", 2)
    cuda.gpus = 0
    with pytest.raises(JobError, match="no GPU was found that ranks could share"):
        own_gpu("shared", 0)


@pytest.mark.parametrize(("seen", "local_rank"), [(0, 0), (2, 2)])
def test_a_gpu_that_a_cluster_was_asked_for_is_not_replaced_by_the_cpu(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, seen: int, local_rank: int
) -> None:
    cuda.gpus = seen
    assert own_gpu("auto", local_rank) is None
    monkeypatch.setenv("PLAIT_GPUS", "4")
    with pytest.raises(JobError, match=f"4 GPUs of this node were asked for, and local rank {local_rank} finds {seen}"):
        own_gpu("auto", local_rank)
    assert own_gpu("cpu", local_rank) is None


def test_marks_are_exact_after_hours(cuda: Cuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    cuda.now = 5 * HOUR
    for step in range(3):  # 5 hours from the device's opening, a float32 of milliseconds has steps of 2 ms
        cuda.now = at = 5 * HOUR + step * 2 * 10**9
        device.anchor()
        cuda.now = at + 123_456_789
        mark = device.mark()
        cuda.now = at + 10**9
        device.anchor()
        assert abs(device.nanoseconds(mark) - (at + 123_456_789)) < 1000


def test_the_host_learns_what_is_reached_without_waiting(cuda: Cuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    cuda.now = 100
    mark, fork = device.mark(), device.fork()
    cuda.ran = 99
    assert not device.reached(mark) and not device.reached(fork)
    cuda.ran = 100
    assert device.reached(mark) and device.reached(fork)


def test_threads_begin_on_their_rank_s_gpu(cuda: Cuda) -> None:
    found: list[torch.device] = []
    background = Background(CudaDevice(torch.device("cuda", 3)), "test")
    background.start(lambda: found.append(cuda.of_thread.device)).wait()
    background.close()
    assert found == [torch.device("cuda", 3)]


def test_what_is_uploaded_at_once_is_what_it_was() -> None:
    tensors = [torch.arange(3), torch.tensor([True]), torch.ones(2, 2), torch.empty(0, dtype=torch.int64)]
    packed = torch.zeros(devices._packed_bytes(tensors), dtype=torch.uint8)
    for piece, tensor in zip(devices._pieces(packed, tensors), tensors, strict=True):
        piece.copy_(tensor)
    for piece, tensor in zip(devices._pieces(packed.clone(), tensors), tensors, strict=True):
        assert piece.dtype == tensor.dtype and torch.equal(piece, tensor)
    assert RankDevice(torch.device("cpu")).upload(tensors)[0] is tensors[0]


@pytest.mark.parametrize(
    ("override", "precision", "rounded"),
    [(None, "highest", False), (None, "high", True), ("1", "highest", True), ("0", "high", False), ("", "high", True)],
)
def test_whether_products_are_rounded_to_tf32(
    override: str | None, precision: str, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert object.__new__(CudaDevice).tf32 is rounded and device_of(None).tf32 is False

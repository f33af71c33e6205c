"""Faults that a CPU does not notice: one wait left out each, a strided buffer, memory that is let
go too early. Whoever looks for them must find every one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from plait.core.step.segments import Action
from plait.train.comm import wire
from plait.train.comm.background import Background, BackgroundHandle
from plait.train.comm.flight import DeviceFlight
from plait.train.comm.lanes import Lane
from plait.train.engine.compute_streams import ComputeStreams
from plait.train.engine.courier import Parcel
from plait.train.engine.executor import SegmentExecutor
from plait.train.engine.pipeline import _PipelineStep
from plait.train.engine.segment import ResidualSegment, empty_like_gathered
from plait.train.engine.shards import Shards
from plait.train.engine.sublayers import SublayerSegment
from tests.support.streams.device import Forked, VirtualDevice


@contextmanager
def _without_joining(where: type, method: str) -> Generator[None]:
    """What a method waits for is on the host only."""
    original = getattr(where, method)

    def patched(self: Any, *args: Any, **named: Any) -> Any:
        with mock.patch.object(VirtualDevice, "join", return_value=None):
            return original(self, *args, **named)

    with mock.patch.object(where, method, patched):
        yield


def _collective() -> AbstractContextManager[Any]:
    """A list's collective is never waited for."""
    original = SegmentExecutor._step

    def step(self: SegmentExecutor, action: Any, then: Any) -> Callable[[Any], object]:
        if not (isinstance(action, Action) and action.verb == "wait"):
            return original(self, action, then)

        def land(turn: Any) -> None:
            handle = turn.handles.pop(action.op)
            work: Any = handle.work if isinstance(handle, DeviceFlight) else handle
            work.land()

        return land

    return mock.patch.object(SegmentExecutor, "_step", step)


def _forked() -> AbstractContextManager[Any]:
    """A background thread does not wait for what was submitted before its job."""

    def start(self: Background, job: Callable[[], object]) -> BackgroundHandle:
        handle = BackgroundHandle()
        self._jobs.put((handle, job, Forked({}, {})))  # type: ignore[arg-type]
        return handle

    return mock.patch.object(Background, "start", start)


@contextmanager
def _strided() -> Generator[None]:
    """A slice of what came from another stage is gathered as it lies, and the wire does not
    look."""

    def gather(self: ResidualSegment) -> Any:
        self.g_y_full = empty_like_gathered(self.g_y, self.shared.wire.size)
        return self.g_y_full, self.g_y

    with mock.patch.dict(SublayerSegment.sends, J=gather), mock.patch.object(wire, "_require_contiguous"):
        yield


def _freed() -> AbstractContextManager[Any]:
    """What is being sent is let go at once."""
    return mock.patch.object(_PipelineStep, "_sent", lambda self, *, all_of_them: self.sending.clear())


def _unordered(self: ComputeStreams, lane: int | None, _after: object) -> Any:
    """Streams of slices wait for nobody."""
    return lambda _: self.device.compute_on(lane)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "collective": _collective,
    "forked": _forked,
    "gathered": lambda: _without_joining(Shards, "need"),
    "reduced": lambda: _without_joining(Shards, "_retire"),
    "delivered": lambda: _without_joining(Parcel, "wait"),
    "message": lambda: mock.patch.object(Lane, "_settle", lambda self, posted: posted.work.land()),
    "strided": _strided,
    "freed": _freed,
    "pooled": lambda: mock.patch.object(ComputeStreams, "_begin", _unordered),
}
"""By name; the first six leave a wait out."""

"""What each rank runs in the tests of order: the contract's cases on a device with virtual
streams."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.engine.assembly import RankPart
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.steps import RankStep, StepResult
from plait.train.machine.device import RankDevice
from plait.train.record.recorder import Recorder
from tests.dist import equality, pipelining, recording
from tests.dist.equality import Answer, Case
from tests.support.streams.device import VirtualDevice, VirtualSharedDevice
from tests.support.streams.nccl import Call


class Found(NamedTuple):
    """problems: what a GPU would do otherwise one day. calls: what was asked of communicators.
    result: the case's error. streams: their names; accesses: how many there were; waits: what made
    the host wait in each step."""

    problems: list[str]
    calls: list[Call]
    result: Any
    streams: list[str]
    accesses: int
    waits: list[list[str]]


def observed(rank: int, plant: str, case: Case, want: Answer, *, shared: bool = False) -> Found:
    """A case's error with every module of the suite on a device with virtual streams.

    plant: the name of a fault of ``tests.streams.planted``, or nothing. shared: ranks share the
    device.
    """
    from tests.streams import planted

    device = (VirtualSharedDevice if shared else VirtualDevice)(seed=rank)
    with ExitStack() as stack:
        for module in (equality, pipelining, recording):
            stack.enter_context(mock.patch.object(module, "DEVICE", device))
        stack.enter_context(mock.patch.object(equality, "wire", partial(_wire, device)))
        stack.enter_context(_uploaded(device))
        waits = stack.enter_context(_recorded(device))
        stack.enter_context(device.watching())
        if plant:
            stack.enter_context(planted.FAULTS[plant]())
        result = case.error(rank, want)
    return Found(device.problems, device.communicators.calls, result, device.streams, device.order.accesses, waits)


def observed_sharing(rank: int, plant: str, case: Case, want: Answer) -> Found:
    """The same on one that ranks share."""
    return observed(rank, plant, case, want, shared=True)


def _wire(device: VirtualDevice) -> Wire:
    """The tensor-parallel group of a run, opened once."""
    import torch.distributed as dist

    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return NullWire()
    if not hasattr(device, "wire"):
        device.wire = open_wire(device.backend)  # type: ignore[attr-defined]
    return device.wire  # type: ignore[attr-defined]


@contextmanager
def _recorded(device: VirtualDevice) -> Generator[list[list[str]]]:
    """What is assembled is recorded, and read after every step; what the host waits for in
    these."""
    make, train, waits = pipelining.assemble, pipelining.train_step, list[list[str]]()

    def assembled(plan: Any, rank: int, on: RankDevice, **more: Any) -> Any:
        return make(plan, rank, on, **{"recorder": Recorder(on), **more})

    def trained(step: RankStep, *args: Any, **named: Any) -> StepResult:
        before = len(device.order.waits)
        result = train(step, *args, **named)
        if step.recorder:
            step.recorder.records()
        waits.append(device.order.waits[before:])
        return result

    with mock.patch.object(pipelining, "assemble", assembled), mock.patch.object(pipelining, "train_step", trained):
        yield waits


@contextmanager
def _uploaded(device: VirtualDevice) -> Generator[None]:
    """Batches lie in the host's memory until they are brought to the device."""
    make, take = pipelining.micro_batches, RankPart.own

    def made(*given: Any) -> list[MicroBatch]:
        return _in_host_memory(device, make(*given))

    def owned(part: RankPart, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return _in_host_memory(device, take(part, batches))

    with ExitStack() as stack:
        for module in (equality, pipelining, recording):
            stack.enter_context(mock.patch.object(module, "micro_batches", made))
        stack.enter_context(mock.patch.object(RankPart, "own", owned))
        yield


def _in_host_memory(device: VirtualDevice, batches: list[MicroBatch]) -> list[MicroBatch]:
    for batch in batches:
        for tensor in (batch.tokens, batch.targets, batch.samples, batch.positions):
            if tensor is not None:
                device.host.add(tensor)
    return batches

"""Records of a group's collectives in a rank's ring: when each is submitted, begins and ends.

On a CPU only a gloo thread knows when a collective ends for which its rank does not wait. A call
from there into Python takes the interpreter's lock from training, which cost more than all other
recording. So ends are recorded exactly only in one of ``WATCHED`` steps, and the first time. In
other steps the rank polls between its ops: the end lies between two polls, and is estimated there
from the last exact duration. If the rank waits for the collective, its end is exact. Work per
collective is in ``core.record._ring``: a group's ``Line``, and each collective's ``Flight``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor
from torch.futures import Future

from plait.core.record.ring import RecordKind, call_of, signature_of
from plait.core.record.ring_writer import Flight, Line, Pace
from plait.core.record.timeline import NamedOp
from plait.core.step.segments import Collective
from plait.train.comm.wire import Exchanger, Splits
from plait.train.machine.device import AsyncWork, Mark

if TYPE_CHECKING:
    from plait.train.comm.log import Log

WATCHED = 16
"""One step in ``WATCHED`` records every end of a collective exactly."""


class Carrier(Protocol):
    """Interface of the wires (process groups) whose collectives ``LoggedWire`` records."""

    size: int
    rank: int

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> AsyncWork:
        """Start a collective."""
        ...


class LoggedWire:
    """A wire that records every collective. line: of its group, called ``label``. op: the name of
    its collectives. watched: True if the rank may wait for a collective long after its end; False
    if it waits at once."""

    def __init__(
        self, wire: Carrier, log: Log, line: Line | DeviceLine, label: str, op: int = 0, *, watched: bool = False
    ) -> None:
        self.wire, self.log, self.line, self.label, self.op, self.watched = wire, log, line, label, op, watched
        self.size, self.rank = wire.size, wire.rank
        self.pace = Pace()
        self._signatures: dict[tuple[Collective, torch.dtype, int, int], tuple[int, int, int]] = {}

    def named(self, op: NamedOp, *, watched: bool = True) -> LoggedWire:
        """Return a wire of the same group whose collectives are recorded under the name of
        ``op``."""
        return LoggedWire(self.wire, self.log, self.line, self.label, self.log.name_of(op), watched=watched)

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Flight | DeviceFlight:
        """Start the collective on the wire."""
        log = self.log
        step, name = (log.step, self.op) if self.op else log.within(self.label)
        key = kind, source.dtype, source.numel(), result.numel()
        signed = self._signatures.get(key) or self._sign(key, source.element_size())
        flight = self.line.depart(self.pace, step, name, *signed)
        try:
            work = self.wire.start(kind, result, source)
        except BaseException:
            flight.fail()
            raise
        exactly = self.watched and not (log.host and self.pace.taken and step % WATCHED)
        flight.fly(work, self.watched and not exactly)
        if exactly:
            log.device.mark_when_done(work, flight.land)
        return flight

    def exchange(self, result: Tensor, source: Tensor, splits: Splits) -> Flight | DeviceFlight:
        """Start an exchange of unequal parts. Its signature is of the data of all ranks together,
        because each rank's own part differs."""
        log = self.log
        step, name = (log.step, self.op) if self.op else log.within(self.label)
        dtype, sent = str(source.dtype).removeprefix("torch."), sum(splits.out) - splits.out[self.rank]
        size = sent * source.element_size() * self.size // max(1, self.size - 1)  # records derive sent bytes from it
        signed = size, call_of("all_to_all", dtype), signature_of("all_to_all", dtype, splits.total, splits.total)
        flight = self.line.depart(self.pace, step, name, *signed)
        try:
            work = cast("Exchanger", self.wire).exchange(result, source, splits)
        except BaseException:
            flight.fail()
            raise
        flight.fly(work, False)
        return flight

    def _sign(self, key: tuple[Collective, torch.dtype, int, int], element: int) -> tuple[int, int, int]:
        """Return (bytes, call, signature) of a collective's record, and cache them. key: (kind,
        dtype, numbers sent, numbers received). element: bytes of a number."""
        kind, dtype, sent, received = key
        name = str(dtype).removeprefix("torch.")
        size = max(sent, received) * element
        found = self._signatures[key] = size, call_of(kind, name), signature_of(kind, name, sent, received)
        return found


class DeviceLine:
    """A process group's collectives on a GPU, timed by CUDA events. number: the group's number in
    the ring."""

    def __init__(self, log: Log, number: int) -> None:
        self.log, self.number = log, number
        self._sequence: Iterator[int] = count()

    def depart(self, pace: Pace, step: int, name: int, size: int, call: int, signature: int) -> DeviceFlight:
        """Begin the record of the next collective."""
        number = self.log.ring.begin(
            RecordKind.COLLECTIVE, name, step, size=size, group=self.number, sequence=next(self._sequence), call=call,
            signature=signature,
        )  # fmt: skip
        return DeviceFlight(self, number)


class DeviceFlight:
    """A collective submitted to a device, and its record."""

    __slots__ = ("_begun", "_landed", "_line", "number", "work")

    def __init__(self, line: DeviceLine, number: int) -> None:
        self._line, self.number, self._begun, self._landed = line, number, line.log.device.mark(), False
        self.work: AsyncWork

    def fly(self, work: AsyncWork, looked_for: bool) -> None:
        """Set the work of the started collective."""
        assert not looked_for, "a device is not asked between ops"
        self.work = work

    def land(self, mark: Mark, failed: bool) -> None:
        """Record that the collective ends at the mark."""
        self._landed = True
        self._line.log.marked(self.number, self._begun, mark, self._line.number)

    def fail(self) -> None:
        """Record an error, as far as the host knows of it."""
        self._line.log.ring.end(self.number, failed=True)

    def wait(self) -> None:
        """Wait until work that the calling thread submits from now on may use the result."""
        try:
            self.work.wait()
        except BaseException:
            self.fail()
            raise
        if not self._landed:
            self.land(self._line.log.device.mark(), False)

    def get_future(self) -> Future[object]:
        """Return the future, done when the collective is complete."""
        return self.work.get_future()

    def is_completed(self) -> bool:
        """Return True if the collective has ended, successfully or not."""
        return self.work.is_completed()

"""Collectives of a group as they go into a rank's ring: when each is handed over, begins and ends.

When a collective ends on a CPU that its rank does not wait for, only a thread of gloo's knows. To call from
there into Python takes the interpreter's lock away from training, which cost more than all other recording
together. So that is done in one step of ``WATCHED``, and the first time. In the others the rank looks between
its ops: the end lies between two looks, and within these is taken to be after as long as it took when it was
watched last. Where the rank waits for it, its end is seen at once.

What is done for every collective is in ``core.record._ring``: a group's ``Line``, and each one's ``Flight``.
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
"""One step in so many has every end of a collective as it happens."""


class Carrier(Protocol):
    """What is recorded: a wire."""

    size: int
    rank: int

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> AsyncWork:
        """Start a collective."""
        ...


class LoggedWire:
    """A wire that leaves a record of every collective. line: of its group, which is called ``label``. op: the
    name of its collectives. watched: whoever starts one may wait for it later than it ends; else it is waited
    for at once."""

    def __init__(
        self, wire: Carrier, log: Log, line: Line | DeviceLine, label: str, op: int = 0, *, watched: bool = False
    ) -> None:
        self.wire, self.log, self.line, self.label, self.op, self.watched = wire, log, line, label, op, watched
        self.size, self.rank = wire.size, wire.rank
        self.pace = Pace()
        self._signatures: dict[tuple[Collective, torch.dtype, int, int], tuple[int, int, int]] = {}

    def named(self, op: NamedOp, *, watched: bool = True) -> LoggedWire:
        """The same wire, for an op's collective."""
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
        """Start an exchange of unequal parts, signed with what all ranks exchange together: each rank's own
        part is another."""
        step, name = self.log.within(self.label)
        dtype, sent = str(source.dtype).removeprefix("torch."), sum(splits.out) - splits.out[self.rank]
        size = sent * source.element_size() * self.size // max(1, self.size - 1)  # what records take a share of
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
        """Bytes, call and signature of a record."""
        kind, dtype, sent, received = key
        name = str(dtype).removeprefix("torch.")
        size = max(sent, received) * element
        found = self._signatures[key] = size, call_of(kind, name), signature_of(kind, name, sent, received)
        return found


class DeviceLine:
    """A group's collectives on a device, whose events know when each was under way. number: of the group."""

    def __init__(self, log: Log, number: int) -> None:
        self.log, self.number = log, number
        self._sequence: Iterator[int] = count()

    def depart(self, pace: Pace, step: int, name: int, size: int, call: int, signature: int) -> DeviceFlight:
        """The next one; its record is written."""
        number = self.log.ring.begin(
            RecordKind.COLLECTIVE, name, step, size=size, group=self.number, sequence=next(self._sequence), call=call,
            signature=signature,
        )  # fmt: skip
        return DeviceFlight(self, number)


class DeviceFlight:
    """A collective that a device has been given, and its record."""

    __slots__ = ("_begun", "_landed", "_line", "number", "work")

    def __init__(self, line: DeviceLine, number: int) -> None:
        self._line, self.number, self._begun, self._landed = line, number, line.log.device.mark(), False
        self.work: AsyncWork

    def fly(self, work: AsyncWork, looked_for: bool) -> None:
        """The wire has it."""
        assert not looked_for, "a device is not asked between ops"
        self.work = work

    def land(self, mark: Mark, failed: bool) -> None:
        """It ends where the mark is."""
        self._landed = True
        self._line.log.marked(self.number, self._begun, mark, self._line.number)

    def fail(self) -> None:
        """It ended with an error, as far as the host knows."""
        self._line.log.ring.end(self.number, failed=True)

    def wait(self) -> None:
        """What the calling thread submits from now on may use its result."""
        try:
            self.work.wait()
        except BaseException:
            self.fail()
            raise
        if not self._landed:
            self.land(self._line.log.device.mark(), False)

    def get_future(self) -> Future[object]:
        """Done when it is over."""
        return self.work.get_future()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self.work.is_completed()

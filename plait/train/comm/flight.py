"""Collectives of a group as they go into a rank's ring: when each is handed over, begins and ends.

When a collective ends on a CPU that its rank does not wait for, only a thread of gloo's knows. To call from
there into Python takes the interpreter's lock away from training, which cost more than all other recording
together. So that is done in one step of ``WATCHED``, and the first time. In the others the rank looks between
its ops: the end lies between two looks, and within these is taken to be after as long as it took when it was
watched last. Where the rank waits for it, its end is seen at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from plait.core.ring import NOBODY, Kind, call_of, signature_of
from plait.core.segments import Collective
from plait.core.timeline import NamedOp
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


class Line:
    """A group's collectives in the order in which they start. number: of the group."""

    def __init__(self, number: int, label: str) -> None:
        self.number, self.label = number, label
        self.sequence: Iterator[int] = count()
        self._lock = threading.Lock()
        self._waiting: deque[Flight] = deque()

    def join(self, flight: Flight) -> None:
        """A group serves one collective at a time: one that starts while another travels begins when that
        ends."""
        with self._lock:
            self._waiting.append(flight)
            if self._waiting[0] is flight:
                flight.begin(flight.enqueued)

    def leave(self, flight: Flight, at: int, *, failed: bool) -> None:
        """It is over; said once by the thread that ends it, and perhaps once more by whoever waited."""
        with self._lock:
            if flight not in self._waiting:
                return
            first = self._waiting[0] is flight
            flight.log.ring.end(flight.number, at, failed=failed)
            self._waiting.remove(flight)
            if first and self._waiting:
                self._waiting[0].begin(max(at, self._waiting[0].enqueued))


class LoggedWire:
    """A wire that leaves a record of every collective. op: what it is called. watched: whoever starts it may
    wait for it later than it ends; else it is waited for at once.

    taken: ns that the collective took when its end was last seen as it happened; 0: it never was.
    """

    def __init__(self, wire: Carrier, log: Log, line: Line, op: int = 0, *, watched: bool = False) -> None:
        self.wire, self.log, self.line, self.op, self.watched = wire, log, line, op, watched
        self.size, self.rank = wire.size, wire.rank
        self.taken = 0
        self._host = log.device.timed_by_host
        self._signatures: dict[tuple[Collective, torch.dtype, int, int], tuple[int, int]] = {}

    def named(self, op: NamedOp, *, watched: bool = True) -> LoggedWire:
        """The same wire, for an op's collective."""
        return LoggedWire(self.wire, self.log, self.line, self.log.name_of(op), watched=watched)

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> Flight:
        """Start the collective on the wire."""
        log, line = self.log, self.line
        step, name = (log.step, self.op) if self.op else log.within(line.label)
        key = (kind, source.dtype, source.numel(), result.numel())
        call, signature = self._signatures.get(key) or self._sign(key)
        size = max(key[2], key[3]) * source.element_size()
        at, sequence = time.monotonic_ns(), next(line.sequence)
        number = log.ring.begin(
            Kind.COLLECTIVE, name, step, at, 0, 0, size, line.number, sequence, NOBODY, call, signature
        )  # fmt: skip
        exactly = not (self._host and self.taken and step % WATCHED)
        flight = Flight(self, number, at, watched=self.watched and exactly)
        try:
            flight.take_off(self.wire.start(kind, result, source))
        except BaseException:
            log.ring.end(number, time.monotonic_ns(), failed=True)
            raise
        return flight

    def _sign(self, key: tuple[Collective, torch.dtype, int, int]) -> tuple[int, int]:
        kind, dtype, sent, received = key
        name = str(dtype).removeprefix("torch.")
        found = self._signatures[key] = call_of(kind, name), signature_of(kind, name, sent, received)
        return found


class Flight:
    """A collective under way, and its record. watched: its end is taken as it happens. looked: when it was
    last seen under way, ns."""

    __slots__ = ("_begun", "_host", "_line", "_started", "_watched", "_wire", "_work", "enqueued", "log", "looked",
                 "number")  # fmt: skip

    def __init__(self, wire: LoggedWire, number: int, enqueued: int, *, watched: bool) -> None:
        self.log, self.number, self.enqueued = wire.log, number, enqueued
        self._wire, self._line, self._watched = wire, wire.line, watched
        self._host = self.log.device.timed_by_host
        self._begun: Mark = enqueued if self._host else self.log.device.mark()
        self._started = self.looked = enqueued

    def take_off(self, work: AsyncWork) -> None:
        """The wire has it."""
        self._work = work
        if self._host:
            self._line.join(self)
        if self._watched:
            self.log.device.mark_when_done(work, self._land)
        elif self._host and self._wire.watched:
            self.log.flying.append(self)

    def begin(self, at: int) -> None:
        """It travels."""
        self._started = at
        self.log.ring.start(self.number, at)

    def look(self, at: int) -> None:
        """End it if it is over."""
        if self._work.is_completed():
            self._end_between(at)
        else:
            self.looked = at

    def wait(self) -> None:
        """Return when its result may be used."""
        over = self._host and not self._watched and self._wire.watched and self._work.is_completed()
        try:
            self._work.wait()
        except BaseException:
            at = time.monotonic_ns()
            self._line.leave(self, at, failed=True)
            self.log.ring.end(self.number, at, failed=True)
            self._forget()
            raise
        if self._host:
            at = time.monotonic_ns()
            if over:
                self._end_between(at)
            else:
                self._line.leave(self, at, failed=False)
                self._wire.taken = at - self._started
                self._forget()
        elif not self._watched:
            self._land(self.log.device.mark(), False)

    def get_future(self) -> Future[object]:
        """Done when it is over."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._work.is_completed()

    def _end_between(self, at: int) -> None:
        """It has ended since it was looked for."""
        likely = self._started + self._wire.taken
        self._line.leave(self, min(max(likely, self.looked), at), failed=False)
        self._forget()

    def _forget(self) -> None:
        with suppress(ValueError):  # watched, or another thread has
            self.log.flying.remove(self)

    def _land(self, mark: Mark, failed: bool) -> None:
        if self._host:
            assert isinstance(mark, int)
            self._line.leave(self, mark, failed=failed)
            self._wire.taken = max(1, mark - self._started)
        else:
            self.log.marked(self.number, self._begun, mark, self._line.number)

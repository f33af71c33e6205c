"""What a rank does, and above all whom it waits for, as it goes into its ring (``plait.core.ring``).

On a CPU a record is whole at once: the host's clock times everything. On a GPU it says when the host handed
the work over; when that ran is marked by events, and filled in when the step is over, without stopping the
device.

When a collective ends on a CPU that its rank does not wait for, only a thread of gloo's knows. To call from
there into Python takes the interpreter's lock away from training, which cost more than all other recording
together. So that is done in one step of ``WATCHED``, and the first time. In the others the rank looks between
its ops: the end lies between two looks, and within these is taken to be after as long as it took when it was
watched last. Where the rank waits for it, its end is seen at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from plait.core.ring import NOBODY, Kind, Place, call_of, signature_of
from plait.core.ring_writer import RingWriter
from plait.core.segments import Collective
from plait.core.timeline import NamedOp
from plait.train.machine.device import AsyncWork, Device, Mark

WATCHED = 16
"""One step in so many has every end of a collective as it happens."""


class Carrier(Protocol):
    """What is recorded: a wire."""

    size: int
    rank: int

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> AsyncWork:
        """Start a collective."""
        ...


class _Marked(NamedTuple):
    """A record whose times a GPU's events know. line: of its group; 0 if it does not wait in one."""

    number: int
    start: Mark
    end: Mark
    line: int


class _Inside(threading.local):
    """The step and the name of what a thread does for another."""

    step: int | None = None
    name: str = ""


class Log:
    """Writes a rank's ring. step: that what begins now belongs to, ``NOBODY`` for none."""

    def __init__(self, ring: RingWriter, device: Device) -> None:
        self.ring, self.device, self.step = ring, device, 0
        self.host = device.timed_by_host
        self._inside = _Inside()
        self._starts: dict[int, Mark] = {}
        self._marked: deque[_Marked] = deque(maxlen=ring.header.capacity)
        self.ops: dict[int, NamedOp] = {}
        """By the number of their name."""
        self.flying: list[Flight] = []
        """Collectives whose end is looked for."""

    def name_of(self, op: NamedOp) -> int:
        """The number of an op's name."""
        number = self.ring.name(str(op), Place(op.site, op.layer, op.slice, op.forward))
        self.ops.setdefault(number, op)
        return number

    def look(self) -> None:
        """Take note of collectives that have ended. By any thread: what two see at once counts once."""
        at = time.monotonic_ns()
        for flight in tuple(self.flying):
            flight.look(at)

    # ---- one thing ----

    def enqueue(self, kind: Kind, name: int, *, size: int = 0, step: int | None = None) -> int:
        """Something is handed over to another thread; the number of its record."""
        return self.ring.begin(kind, name, self.step if step is None else step, time.monotonic_ns(), size=size)

    def start(self, number: int) -> None:
        """It is taken up, by the calling thread."""
        if self.host:
            self.ring.start(number, time.monotonic_ns())
        else:
            self._starts[number] = self.device.mark()

    def begin(self, kind: Kind, name: int, *, size: int = 0, step: int | None = None) -> int:
        """The calling thread does something from now on."""
        at = time.monotonic_ns()
        number = self.ring.begin(kind, name, self.step if step is None else step, at, at if self.host else 0, 0, size)
        if not self.host:
            self._starts[number] = self.device.mark()
        return number

    def end(self, number: int) -> None:
        """The calling thread has done it, or on a GPU submitted it."""
        if self.host:
            self.ring.end(number, time.monotonic_ns())
        else:
            self._marked.append(_Marked(number, self._starts.pop(number), self.device.mark(), 0))

    def fail(self, number: int) -> None:
        """It ended with an error."""
        self._starts.pop(number, None)
        self.ring.end(number, time.monotonic_ns(), failed=True)

    @contextmanager
    def during(self, kind: Kind, what: str, *, step: int | None = None) -> Generator[None]:
        """A record of the block, by the host's clock."""
        at = time.monotonic_ns()
        number = self.ring.begin(kind, self.ring.name(what), self.step if step is None else step, at, at)
        try:
            yield
        except BaseException:
            self.fail(number)
            raise
        self.ring.end(number, time.monotonic_ns())

    @contextmanager
    def inside(self, step: int, name: str) -> Generator[None]:
        """What the calling thread communicates in the block is a part of ``name``."""
        self._inside.step, self._inside.name = step, name
        try:
            yield
        finally:
            self._inside.step, self._inside.name = None, ""

    # ---- groups ----

    def over(self, wire: Carrier, ranks: Sequence[int], label: str) -> LoggedWire:
        """A wire that is recorded. Called by all of ``ranks``, which it connects, at the same point."""
        return LoggedWire(wire, self, _Line(self.ring.group(ranks, label), label))

    def messages(self, ranks: Sequence[int], label: str) -> Messages:
        """The messages of a group, opened as a wire."""
        return Messages(self, self.ring.group(ranks, label))

    # ---- inside ----

    def within(self, label: str) -> tuple[int, int]:
        """The step and the name of a group's communication that nobody gave a name."""
        inside = self._inside
        if inside.step is None:
            return self.step, self.ring.name(label)
        return inside.step, self.ring.name(f"{inside.name} {label}")

    def marked(self, number: int, start: Mark, end: Mark, line: int) -> None:
        """A GPU will know when this was."""
        self._marked.append(_Marked(number, start, end, line))

    def moved(self, number: int, start: Mark, end: Mark) -> None:
        """It was under way on another thread, between these marks."""
        if self.host:
            assert isinstance(start, int) and isinstance(end, int)
            self.ring.start(number, start)
            self.ring.end(number, end)
        else:
            self._marked.append(_Marked(number, start, end, 0))

    def resolve(self) -> None:
        """Fill in the times that a GPU's events know by now. What the device is still busy with, as other
        threads may keep it beyond the end of a step, waits for the next time: the host does not."""
        free: dict[int, int] = {}
        busy = set[int]()
        for _ in range(len(self._marked)):  # threads may add to it meanwhile
            one = self._marked.popleft()
            if one.line in busy or not (self.device.reached(one.start) and self.device.reached(one.end)):
                self._marked.append(one)
                busy |= {one.line} - {0}  # a group's stay in their order
                continue
            start, end = self.device.nanoseconds(one.start), self.device.nanoseconds(one.end)
            if one.line:  # a group serves one collective at a time
                start = min(max(start, free.get(one.line, 0)), end)
                free[one.line] = end
            self.ring.start(one.number, start)
            self.ring.end(one.number, end)


class _Line:
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

    def __init__(self, wire: Carrier, log: Log, line: _Line, op: int = 0, *, watched: bool = False) -> None:
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


class Messages:
    """The records of what a group sends from rank to rank. Messages of the group from one rank to one other
    are numbered, and so is what they are parts of, which all ranks hand over in the same order."""

    def __init__(self, log: Log, group: int) -> None:
        self.log, self.group = log, group
        self._sent: Counter[tuple[Kind, int]] = Counter()
        self._moves: Iterator[int] = count()

    def move(self, size: int, job: Callable[[], None]) -> Callable[[], None]:
        """What moves ``size`` bytes of this rank to other ranks, or to this one, recorded; for another
        thread."""
        log = self.log
        step, sequence = log.step, next(self._moves)
        number = log.ring.begin(
            Kind.JOB, log.ring.name("reshard"), step, time.monotonic_ns(),
            size=size, group=self.group, sequence=sequence,
        )  # fmt: skip

        def recorded() -> None:
            log.start(number)
            try:
                with log.inside(step, "reshard"):
                    job()
            except BaseException:
                log.fail(number)
                raise
            log.end(number)

        return recorded

    def post(self, peer: int, *, sends: bool, size: int) -> int:
        """A message is sent to a peer, or awaited from it; the number of its record."""
        log, kind = self.log, Kind.SEND if sends else Kind.RECEIVE
        step, name = log.within("message")
        sequence = self._sent[kind, peer]
        self._sent[kind, peer] += 1
        at = time.monotonic_ns()
        number = log.ring.begin(
            kind, name, step, at, at if log.host else 0, 0, size, self.group, sequence, peer,
            call_of("message", "uint8"), signature_of("message", "uint8", size),
        )  # fmt: skip
        if not log.host:
            log.start(number)
        return number

    def settled(self, number: int) -> None:
        """It has arrived, or has left; on a GPU the calling thread's stream waits for that."""
        self.log.end(number)

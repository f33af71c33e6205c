"""Records of a rank's work, and above all of its waits, written to its ring (``core.record.ring``).

On a CPU a record is complete at once: the host's clock times everything. On a GPU it has the time
at which the host submitted the work. Events mark when the work ran; their times are filled in after
the step, without stopping the device.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, TypeVar

from plait.core.record.ring import UNSET, OpPlace, RecordKind, call_of, signature_of
from plait.core.record.ring_writer import Line, RingWriter
from plait.core.record.timeline import NamedOp
from plait.train.comm.flight import Carrier, DeviceLine, LoggedWire
from plait.train.machine.device import Mark, RankDevice

T = TypeVar("T")
Acts = tuple[tuple[Callable[[T], object], int, int], ...]


class _Marked(NamedTuple):
    """A record whose times are in a GPU's events. line: of its group; 0 if the work does not queue
    in a group."""

    number: int
    start: Mark
    end: Mark
    line: int


class _Inside(threading.local):
    """Thread-local step and name of the job that a background thread runs; name: 0 for none."""

    step: int = UNSET
    name: int = 0


class Log:
    """Log of a rank's work, written to its ring. step: the step of records that begin now,
    ``NOBODY`` for none."""

    def __init__(self, ring: RingWriter, device: RankDevice) -> None:
        self.ring, self.device, self.step = ring, device, 0
        self.host = device.timed_by_host
        self._inside = _Inside()
        self._starts: dict[int, Mark] = {}
        self._marked: deque[_Marked] = deque(maxlen=ring.header.capacity)
        self._free: dict[int, int] = {}  # by line: end of its last collective
        self._resolving = threading.Lock()
        self.ops: dict[int, NamedOp] = {}
        """Ops by the number of their name."""
        self._numbers: dict[NamedOp, int] = {}
        self._parts: dict[tuple[int, str], int] = {}

    def name_of(self, op: NamedOp) -> int:
        """Return the number of an op's name."""
        number = self._numbers.get(op)
        if number is None:
            number = self.ring.name(str(op), OpPlace(op.site, op.layer, op.slice, op.forward))
            self.ops.setdefault(number, op)
            self._numbers[op] = number
        return number

    def look(self) -> None:
        """Poll the collectives in flight, and record the end of each that has ended. Any thread may
        call it; an end that two threads see counts once."""
        if self.host:
            self.ring.look()
        else:
            self.resolve()

    def run(self, acts: Acts[T], of: T) -> None:
        """Call functions one after the other. acts: each with the kind and the name of its record,
        or 0 and 0 for none."""
        if self.host:
            self.ring.run(acts, of, self.step)
        else:
            self._run_on_device(acts, of)

    def _run_on_device(self, acts: Acts[T], of: T) -> None:
        for act, kind, name in acts:
            number = self.begin(RecordKind(kind), name) if kind else 0
            act(of)
            if kind:
                self.end(number)

    # ---- single records ----

    def enqueue(self, kind: RecordKind, name: int, *, size: int = 0, step: int | None = None) -> int:
        """Begin the record of work handed to another thread; return its number."""
        return self.ring.begin(kind, name, self.step if step is None else step, size=size)

    def start(self, number: int) -> None:
        """Record that the calling thread starts the work."""
        if self.host:
            self.ring.start(number)
        else:
            self._starts[number] = self.device.mark()

    def begin(self, kind: RecordKind, name: int) -> int:
        """Begin the record of work on the calling thread; return its number."""
        if self.host:
            return self.ring.enter(kind, name, self.step)
        number = self.ring.begin(kind, name, self.step)
        self._starts[number] = self.device.mark()
        return number

    def end(self, number: int) -> None:
        """Record that the calling thread has done the work, or on a GPU submitted it."""
        if self.host:
            self.ring.end(number)
        else:
            self._marked.append(_Marked(number, self._starts.pop(number), self.device.mark(), 0))

    def fail(self, number: int) -> None:
        """Record that the work ended with an error."""
        self._starts.pop(number, None)
        self.ring.end(number, failed=True)

    @contextmanager
    def during(self, kind: RecordKind, what: str, *, step: int | None = None) -> Generator[None]:
        """Record the block, by the host's clock."""
        number = self.ring.enter(kind, self.ring.name(what), self.step if step is None else step)
        try:
            yield
        except BaseException:
            self.fail(number)
            raise
        self.ring.end(number)

    def recorded_job(
        self, name: int, job: Callable[[], int | None], *, step: int | None = None, size: int = 0, group: int = 0,
        sequence: int = 0,
    ) -> Callable[[], None]:  # fmt: skip
        """Return ``job``, for another thread, with a record that begins now; communication inside
        it is recorded as its part. The job may return the bytes that it has sent; else they are
        ``size``."""
        of = self.step if step is None else step
        number = self.ring.begin(RecordKind.JOB, name, of, size=size, group=group, sequence=sequence)
        inside = self._inside

        def recorded() -> None:
            self.start(number)
            inside.step, inside.name = of, name
            try:
                sent = job()
            except BaseException:
                self.fail(number)
                raise
            finally:
                inside.name = 0
            if sent is not None:
                self.ring.size(number, sent)
            self.end(number)

        return recorded

    # ---- groups ----

    def over(self, wire: Carrier, ranks: Sequence[int], label: str) -> LoggedWire:
        """Return a wire that records its collectives. Called by all of ``ranks``, which it
        connects, at the same point."""
        number = self.ring.group(ranks, label)
        return LoggedWire(wire, self, Line(self.ring, number) if self.host else DeviceLine(self, number), label)

    def messages(self, ranks: Sequence[int], label: str) -> Messages:
        """Return the recorder of messages of a group. Called by all of ``ranks`` at the same
        point."""
        return Messages(self, self.ring.group(ranks, label))

    # ---- inside ----

    def within(self, label: str) -> tuple[int, int]:
        """Return step and name for a group's communication without a name of its own: those of the
        running job, else the current step and ``label``."""
        inside = self._inside
        if not inside.name:
            return self.step, self.ring.name(label)
        number = self._parts.get((inside.name, label))
        if number is None:
            number = self.ring.name(f"{self.ring.names[inside.name].text} {label}")
            self._parts[inside.name, label] = number
        return inside.step, number

    def marked(self, number: int, start: Mark, end: Mark, line: int) -> None:
        """Record that a GPU's events hold the times of this record."""
        self._marked.append(_Marked(number, start, end, line))

    def moved(self, number: int, start: Mark, end: Mark) -> None:
        """Record that the work ran on another thread between these marks."""
        if self.host:
            assert isinstance(start, int) and isinstance(end, int)
            self.ring.start(number, start)
            self.ring.end(number, end)
        else:
            self._marked.append(_Marked(number, start, end, 0))

    def resolve(self) -> None:
        """Fill in the times of GPU events that have been reached. Events that the device has not
        reached wait for the next call, because other threads may keep the device busy beyond a
        step's end; the host does not wait."""
        with self._resolving:
            self._resolve()

    def _resolve(self) -> None:
        free, busy = self._free, set[int]()
        for _ in range(len(self._marked)):  # threads may add to it meanwhile
            one = self._marked.popleft()
            if one.line in busy or not (self.device.reached(one.start) and self.device.reached(one.end)):
                self._marked.append(one)
                busy |= {one.line} - {0}  # records of a group stay in their order
                continue
            start, end = self.device.nanoseconds(one.start), self.device.nanoseconds(one.end)
            if one.line:  # a group serves one collective at a time
                start = min(max(start, free.get(one.line, 0)), end)
                free[one.line] = end
            self.ring.start(one.number, start)
            self.ring.end(one.number, end)


class Messages:
    """Records of the messages that a group's ranks send each other. Messages from one rank to
    another are numbered, and so are the moves that they belong to; all ranks start moves in the
    same order."""

    def __init__(self, log: Log, group: int) -> None:
        self.log, self.group = log, group
        self._sent: Counter[tuple[RecordKind, int]] = Counter()
        self._moves: Iterator[int] = count()

    def move(self, size: int, job: Callable[[], None]) -> Callable[[], None]:
        """Return ``job``, for another thread, with a record; it moves ``size`` bytes of this
        rank."""
        name, sequence = self.log.ring.name("reshard"), next(self._moves)
        return self.log.recorded_job(name, job, size=size, group=self.group, sequence=sequence)

    def post(self, peer: int, *, sends: bool, size: int) -> int:
        """Begin the record of a message sent to a peer, or expected from it; return its number."""
        log, kind = self.log, RecordKind.SEND if sends else RecordKind.RECEIVE
        step, name = log.within("message")
        sequence = self._sent[kind, peer]
        self._sent[kind, peer] += 1
        number = log.ring.begin(
            kind, name, step, size=size, group=self.group, sequence=sequence, peer=peer,
            call=call_of("message", "uint8"), signature=signature_of("message", "uint8", size),
        )  # fmt: skip
        log.start(number)
        return number

    def settled(self, number: int) -> None:
        """Record that the message has arrived, or has left; on a GPU the calling thread's stream
        waits for that."""
        self.log.end(number)

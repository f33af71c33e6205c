"""What a GPU's streams put in order, found out on a CPU.

A stream does what is submitted to it one after the other; what two streams do is in order only
where one waits for an event of the other, or where the host waited for one and submitted to the
other later. Each stream has a vector clock: for every stream, up to which of its operations this
one has waited. Two accesses to the same bytes, one of them a write, must be in order; whatever the
CPU did, by luck, does not count.

Memory comes from a caching allocator, as torch's does: a block belongs to the stream on which it
was allocated, and as soon as nobody holds it the next owner on that stream may write to it, though
other streams are still reading. So allocating is a write by that stream, and freeing one by whoever
comes next.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

Clock = dict[int, int]
"""How many operations of every stream are known to be over; streams that are not there: none."""
MAIN = 0
"""The default stream of every thread."""


class Done(NamedTuple):
    """An operation: the ``at``-th of its stream."""

    stream: int
    at: int
    op: str


@dataclass
class _Stored:
    """A block of memory. owner: the stream that allocated it. last: of every range of bytes, the
    last operation of every stream, reading (False) and writing. kept: streams whose work keeps it
    (record_stream).
    """

    owner: int
    last: dict[tuple[int, int], dict[tuple[int, bool], Done]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


class _Thread(threading.local):
    """stream: to which a thread submits. known: what it knows to be over, having waited for it."""

    def __init__(self) -> None:
        self.stream = MAIN
        self.known: Clock = {}


class Order:
    """One device's streams. races: what is not in order, a sentence each. waits: what made the host
    wait."""

    def __init__(self) -> None:
        self.names = ["main"]
        self.races: dict[str, None] = {}
        self.waits: list[str] = []
        self.accesses = 0
        self._clocks: list[Clock] = [{MAIN: 0}]
        self._stored: dict[int, _Stored] = {}
        self._free: dict[int, list[Done]] = {}  # by stream, who used what was freed there since its last allocation
        self._thread = _Thread()
        self._lock = threading.RLock()

    # ---- streams and events ----

    def stream(self, name: str) -> int:
        """A new one."""
        with self._lock:
            self.names.append(name)
            self._clocks.append({len(self._clocks): 0})
            return len(self._clocks) - 1

    @property
    def current(self) -> int:
        """The calling thread's."""
        return self._thread.stream

    @contextmanager
    def on(self, stream: int) -> Generator[None]:
        """The calling thread submits to ``stream``."""
        before, self._thread.stream = self._thread.stream, stream
        try:
            yield
        finally:
            self._thread.stream = before

    def move(self, stream: int) -> None:
        """The calling thread submits to ``stream`` from now on."""
        self._thread.stream = stream

    def event(self, stream: int | None = None) -> Clock:
        """All that is over once the stream has come to this point."""
        with self._lock:
            found = dict(self._clocks[self.current if stream is None else stream])
            _join(found, self._thread.known)
            return found

    def wait(self, event: Clock, stream: int | None = None) -> None:
        """What is submitted to the stream from now on runs after ``event``."""
        with self._lock:
            _join(self._clocks[self.current if stream is None else stream], event)

    def knows(self, event: Clock) -> bool:
        """Whether the calling thread has waited for it."""
        return all(self._thread.known.get(stream, 0) >= at for stream, at in event.items())

    def learn(self, event: Clock, why: str = "") -> None:
        """The calling thread has waited for it, or was told by one that has. why: what made the
        host wait, if it stood still."""
        with self._lock:
            _join(self._thread.known, event)
            if why:
                self.waits.append(why)

    def known(self) -> Clock:
        """What the calling thread knows to be over, for another that it hands something to."""
        return dict(self._thread.known)

    def everything(self) -> Clock:
        """All that was submitted."""
        with self._lock:
            found: Clock = {}
            for clock in self._clocks:
                _join(found, clock)
            return found

    # ---- operations ----

    def submit(
        self, op: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = (), stream: int | None = None
    ) -> Done:
        """An operation of the stream, the calling thread's if none is given."""
        with self._lock:
            on = self.current if stream is None else stream
            clock = self._clocks[on]
            _join(clock, self._thread.known)
            clock[on] += 1
            done = Done(on, clock[on], op)
            for tensors, write in ((list(reads), False), (list(writes), True)):
                for tensor in tensors:
                    if tensor.numel():
                        self._access(done, clock, tensor, write)
            return done

    def allocated(self, tensor: Tensor) -> None:
        """Memory that the operation submitted next has allocated on the calling thread's stream."""
        with self._lock:
            self._next_owner(self.current)
            self._find(tensor, self.current)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """As torch's: the tensor's memory gets no new owner before what the stream has to do by the
        time when it is freed is done."""
        with self._lock:
            self._find(tensor, MAIN).kept.add(stream)

    def _access(self, done: Done, clock: Clock, tensor: Tensor, write: bool) -> None:
        self.accesses += 1
        last, (low, high) = self._find(tensor, MAIN).last, _range(tensor)
        covered: list[tuple[int, int]] = []
        for (start, stop), found in last.items():
            if start >= high or stop <= low:
                continue
            for (stream, wrote), other in found.items():
                if (write or wrote) and stream != done.stream and clock.get(stream, 0) < other.at:
                    self._race(other, done, wrote=wrote, writes=write)
            if write and low <= start and stop <= high:
                covered.append((start, stop))
        for one in covered:
            del last[one]
        last.setdefault((low, high), {})[done.stream, write] = done

    def _race(self, first: Done, second: Done, *, wrote: bool, writes: bool) -> None:
        pairs = ((first, wrote), (second, writes))
        said = [f"{one.op} on stream {self.names[one.stream]} {'writes' if w else 'reads'}" for one, w in pairs]
        self.races[f"{said[0]} what {said[1]}, and neither waits for the other"] = None

    # ---- memory ----

    def _find(self, tensor: Tensor, owner: int) -> _Stored:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._stored:
            self._stored[key] = _Stored(owner)
            weakref.finalize(storage, self._freed, key).atexit = False
        return self._stored[key]

    def _freed(self, key: int) -> None:
        with self._lock:
            stored = self._stored.pop(key)
            used = [done for found in stored.last.values() for done in found.values()]
            self._free.setdefault(stored.owner, []).extend(
                done for done in used if done.stream not in stored.kept and done.stream != stored.owner
            )

    def _next_owner(self, stream: int) -> None:
        """What is allocated on a stream may take a block that was freed there, and is written to at
        once."""
        known = dict(self._clocks[stream])
        _join(known, self._thread.known)
        for done in self._free.pop(stream, ()):
            if known.get(done.stream, 0) < done.at:
                self.races[
                    f"{done.op} on stream {self.names[done.stream]} uses memory that was allocated on stream "
                    f"{self.names[stream]} and is freed while that does not wait for it: its next owner may write "
                    "to it first"
                ] = None


def _join(clock: Clock, other: Clock) -> None:
    for stream, at in other.items():
        if clock.get(stream, 0) < at:
            clock[stream] = at


def _range(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from its first to its last element."""
    size, low, span = tensor.element_size(), tensor.storage_offset(), tensor.numel()
    if not tensor.is_contiguous():
        span = 1 + sum((count - 1) * apart for count, apart in zip(tensor.shape, tensor.stride(), strict=True))
    return int(low) * size, int(low + span) * size


def key_of(tensor: Tensor) -> int:
    """The same for tensors that share memory."""
    return tensor.untyped_storage()._cdata

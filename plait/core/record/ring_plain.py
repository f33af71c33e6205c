"""A Python version of ``_ring.c``, for systems without a compiler: the same bytes in the same
order. Each record takes two to four times as long (ADR 23).

The words of a record are stored in the same order as in C, but without memory fences. A processor
that reorders stores, unlike an x86, may show a reader an incomplete record.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic_ns as now
from typing import Any

from plait.core.record.ring import BYTES, ENDED, HEADER, RECORD, STARTED, UNSET, RecordKind

WORD = (1 << 32) - 1
MOST_POLLED = 16
"""The most collectives in flight that one ``look`` polls."""
_WORD, _I64 = struct.Struct("<I"), struct.Struct("<q")
_INNER = struct.Struct("<" + RECORD.format[2:-1])
"""The fields of a record without its first and its last word."""
_LAST = RECORD.size - _WORD.size


class Writer:
    """The Python version of ``_ring.Writer``. memory: the bytes of the header and the records.
    capacity: a power of two."""

    def __init__(self, memory: mmap.mmap, capacity: int, /) -> None:
        if capacity < 1 or capacity & (capacity - 1) or len(memory) != HEADER + capacity * RECORD.size:
            raise ValueError("the capacity is not a power of two, or does not fit the memory")
        self._memory, self._capacity, self._numbers = memory, capacity, count(1)
        self.under_way = list[Flight]()
        self.seeing = threading.RLock()  # guards the flights of all lines, and ``under_way``

    @property
    def flying(self) -> list[Flight]:
        """The collectives whose ends are polled, in the order of their starts."""
        return self.under_way[:]

    def begin(
        self, kind: int, name: int, step: int, enqueued: int = 0, /, started: int = 0, ended: int = 0, size: int = 0,
        group: int = 0, sequence: int = 0, peer: int = UNSET, call: int = 0, signature: int = 0,
    ) -> int:  # fmt: skip
        """Write a new record and return its number; some of its times may be filled in later.
        enqueued: ns; 0 means now."""
        number = next(self._numbers)
        offset, word = HEADER + ((number - 1) & (self._capacity - 1)) * RECORD.size, number & WORD
        # First damage the old record's last word, store the new one's last: no reader mixes the records.
        _WORD.pack_into(self._memory, offset + _LAST, word ^ WORD)
        _INNER.pack_into(
            self._memory, offset + _WORD.size, kind, call, group, enqueued or now(), started, ended, size, step,
            sequence & WORD, name, peer, signature,
        )  # fmt: skip
        _WORD.pack_into(self._memory, offset, word)
        _WORD.pack_into(self._memory, offset + _LAST, word)
        return number

    def enter(self, kind: int, name: int, step: int, /, size: int = 0) -> int:
        """Write a new record of an op that is enqueued and starts now; return its number."""
        at = now()
        return self.begin(kind, name, step, at, started=at, size=size)

    def start(self, number: int, at: int = 0, /) -> None:
        """Record the start of a record's op at ``at`` ns; 0 means now. ``start``, ``end`` and
        ``size`` do nothing if the record is overwritten."""
        self._fill(number, STARTED, at or now())

    def end(self, number: int, at: int = 0, /, failed: bool = False) -> None:
        """Record the end of a record's op at ``at`` ns; 0 means now."""
        at = at or now()
        self._fill(number, ENDED, -at if failed else at)

    def size(self, number: int, size: int, /) -> None:
        """Set a record's bytes."""
        self._fill(number, BYTES, size)

    def run(self, acts: tuple[tuple[Callable[[Any], object], int, int], ...], of: Any, step: int, /) -> None:
        """Run some functions one after the other. acts: (function, kind and name of its record);
        kind and name are 0 for a function without a record. Each function with a record is followed
        by ``look``."""
        for act, kind, name in acts:
            number = self.enter(kind, name, step) if kind else 0
            act(of)
            if kind:
                self.end(number)
                self.look()

    def look(self) -> None:
        """Record the ends of collectives that have completed. Other threads may record them at the
        same time."""
        for flight in self.under_way[:MOST_POLLED]:
            flight.look()

    def _fill(self, number: int, field: int, value: int) -> None:
        offset = HEADER + ((number - 1) & (self._capacity - 1)) * RECORD.size
        if number > 0 and _WORD.unpack_from(self._memory, offset)[0] == number & WORD:
            _I64.pack_into(self._memory, offset + field, value)


class Pace:
    """The duration of a collective. taken: ns from start to end when both were last observed; 0 if
    never."""

    def __init__(self) -> None:
        self.taken = 0


class Line:
    """The collectives of a process group, in the order of their starts. A group runs one collective
    at a time, so a collective that is enqueued during another one starts when that ends. number:
    the group's number."""

    def __init__(self, ring: Writer, number: int, /) -> None:
        self.ring, self._number, self._sequence = ring, number, count()
        self.flights = list[Flight]()

    def depart(self, pace: Pace, step: int, name: int, size: int, call: int, signature: int, /) -> Flight:
        """Write the record of the group's next collective and return its flight."""
        with self.ring.seeing:
            at = now()
            started = 0 if self.flights else at
            number = self.ring.begin(
                RecordKind.COLLECTIVE, name, step, at, started=started, size=size, group=self._number,
                sequence=next(self._sequence), call=call, signature=signature,
            )  # fmt: skip
            self.flights.append(Flight(self, pace, number, at, started))
            return self.flights[-1]


class Flight:
    """A collective in flight, and its record. looked: when it was last observed in flight, ns.
    started: 0 as long as earlier collectives of its line run. work: the handle from the
    communication backend."""

    work: Any

    def __init__(self, line: Line, pace: Pace, number: int, enqueued: int, started: int) -> None:
        self.line, self.pace, self.number = line, pace, number
        self.enqueued = self.looked = enqueued
        self.started = started
        self._in_line, self._looked_for = True, False

    def fly(self, work: object, looked_for: bool, /) -> None:
        """Store the backend's handle. looked_for: True if ``Writer.look`` polls for the end;
        otherwise the caller calls ``land``, or waits at once."""
        self.work = work
        with self.line.ring.seeing:
            if looked_for and self._in_line and not self._looked_for:
                self.line.ring.under_way.append(self)
                self._looked_for = True

    def land(self, at: Any, failed: bool, /) -> None:
        """Record the end at ``at`` ns; calls after the first have no effect. The duration goes to
        ``pace`` if the start is known."""
        self._end_before(at)
        began = self.started
        if self._leave(at, failed) and not failed and began:
            self.pace.taken = max(1, at - began)

    def fail(self) -> None:
        """Record that the backend rejected the collective."""
        self._leave(now(), True)

    def wait(self) -> None:
        """Wait until the result may be used. Raises the backend's errors."""
        try:
            over = self._looked_for and self.work.is_completed()
            self.work.wait()
        except BaseException:
            at = now()
            self._leave(at, True)
            self.line.ring.end(self.number, at, failed=True)  # even if its end is recorded already
            raise
        if over:
            self._end_between(now())
        else:
            self.land(now(), False)

    def is_completed(self) -> bool:
        """True if the collective has ended, successfully or not."""
        return self.work.is_completed()

    def get_future(self) -> Any:
        """Return a future that is done when the collective has ended."""
        return self.work.get_future()

    def look(self) -> None:
        """Record the collective's end if it has completed."""
        before = now()
        if not self._looked_for:
            return
        if not self.work.is_completed():
            self.looked = before
        elif self._looked_for:
            self._end_between(now())

    def _begin(self, at: int) -> None:
        self.started = at
        self.line.ring.start(self.number, at)

    def _leave(self, at: int, failed: bool) -> bool:
        """Record the collective's end. Return True for the first call; later calls have no effect.

        If earlier collectives of its line have no recorded end, its start is unknown. It is then
        estimated as its end minus ``pace.taken``, but never before it was enqueued.
        """
        ring, flights = self.line.ring, self.line.flights
        with ring.seeing:
            if not self._in_line:
                return False
            at = max(at, self.started, self.enqueued)  # other threads may have read the clock later
            if not self.started:
                self._begin(max(at - self.pace.taken, self.enqueued) if self.pace.taken else self.enqueued)
            ring.end(self.number, at, failed=failed)
            was_first = flights[0] is self
            flights.remove(self)
            if was_first and flights:  # a group runs one collective at a time
                flights[0]._begin(max(at, flights[0].enqueued))
            if self._looked_for:
                ring.under_way.remove(self)
            self._in_line = self._looked_for = False
            return True

    def _likely_end(self, at: int) -> int:
        """Return the likely end of a collective that completed since the last poll: its start plus
        ``pace.taken``, limited to the time between that poll and ``at``."""
        return min(at, max(self.started + self.pace.taken, self.looked)) if self.started else at

    def _end_between(self, at: int) -> None:
        self._end_before(at)
        self._leave(self._likely_end(at), False)

    def _end_before(self, at: int) -> None:
        """Record the ends of earlier collectives of the line that have completed since the last
        poll.

        A group runs one collective at a time, so these ends also give the start of this collective.
        A collective whose state cannot be queried raises its error when it is waited for.
        """
        while (one := self._first_looked_for()) is not None:
            try:
                if not one.work.is_completed():
                    return
            except Exception:  # noqa: BLE001
                return
            one._leave(one._likely_end(at), False)

    def _first_looked_for(self) -> Flight | None:
        """Return the first collective of the line, if it is another one and its end is polled."""
        with self.line.ring.seeing:
            first = self.line.flights[0] if self._in_line else self
            return first if first is not self and first._looked_for else None

"""What ``_ring.c`` does, in Python, where no compiler has built that: the same bytes in the same order. Each
record takes two to four times as long (ADR 23).

Words of a record are stored one after the other as there, but with no fence between them: a processor that
reorders stores may show a reader a record that is not yet whole, which an x86 does not.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic_ns as now
from typing import Any

from plait.core.record.ring import BYTES, ENDED, HEADER, NOBODY, RECORD, STARTED, RecordKind

WORD = (1 << 32) - 1
SHOWN = 16
"""Collectives under way that a look sees to at once."""
_WORD, _I64 = struct.Struct("<I"), struct.Struct("<q")
_INNER = struct.Struct("<" + RECORD.format[2:-1])
"""A record without its first word and its last."""
_LAST = RECORD.size - _WORD.size


class Writer:
    """As ``_ring.Writer``. memory: the header's bytes and the records'; capacity: a power of two."""

    def __init__(self, memory: mmap.mmap, capacity: int, /) -> None:
        if capacity < 1 or capacity & (capacity - 1) or len(memory) != HEADER + capacity * RECORD.size:
            raise ValueError("the memory is not that of a ring of so many records")
        self._memory, self._capacity, self._numbers = memory, capacity, count(1)
        self.under_way = list[Flight]()
        self.seeing = threading.RLock()  # for what is in a line, and in ``under_way``

    @property
    def flying(self) -> list[Flight]:
        """Collectives whose end is looked for, in the order in which they started."""
        return self.under_way[:]

    def begin(
        self, kind: int, name: int, step: int, enqueued: int = 0, /, started: int = 0, ended: int = 0, size: int = 0,
        group: int = 0, sequence: int = 0, peer: int = NOBODY, call: int = 0, signature: int = 0,
    ) -> int:  # fmt: skip
        """A new record, of which some times may be known only later; its number. enqueued: now, if 0."""
        number = next(self._numbers)
        place, word = HEADER + ((number - 1) & (self._capacity - 1)) * RECORD.size, number & WORD
        # The old record is damaged first, and the new one is whole last: nobody takes one for the other.
        _WORD.pack_into(self._memory, place + _LAST, word ^ WORD)
        _INNER.pack_into(
            self._memory, place + _WORD.size, kind, call, group, enqueued or now(), started, ended, size, step,
            sequence & WORD, name, peer, signature,
        )  # fmt: skip
        _WORD.pack_into(self._memory, place, word)
        _WORD.pack_into(self._memory, place + _LAST, word)
        return number

    def enter(self, kind: int, name: int, step: int, /, size: int = 0) -> int:
        """The same of what is handed over and starts now."""
        at = now()
        return self.begin(kind, name, step, at, started=at, size=size)

    def start(self, number: int, at: int = 0, /) -> None:
        """What a record is about has started; now, if 0. Nothing, as below, if it is overwritten."""
        self._fill(number, STARTED, at or now())

    def end(self, number: int, at: int = 0, /, failed: bool = False) -> None:
        """It has ended; now, if 0."""
        at = at or now()
        self._fill(number, ENDED, -at if failed else at)

    def size(self, number: int, size: int, /) -> None:
        """It has moved so many bytes."""
        self._fill(number, BYTES, size)

    def run(self, acts: tuple[tuple[Callable[[Any], object], int, int], ...], of: Any, step: int, /) -> None:
        """Do some things one after the other. acts: each with the kind and the name of its record, or 0 and 0
        for none. After each that has one, ``look``."""
        for act, kind, name in acts:
            number = self.enter(kind, name, step) if kind else 0
            act(of)
            if kind:
                self.end(number)
                self.look()

    def look(self) -> None:
        """Take note of collectives that have ended. Others may end them meanwhile."""
        for flight in self.under_way[:SHOWN]:
            flight.look()

    def _fill(self, number: int, field: int, value: int) -> None:
        place = HEADER + ((number - 1) & (self._capacity - 1)) * RECORD.size
        if number > 0 and _WORD.unpack_from(self._memory, place)[0] == number & WORD:
            _I64.pack_into(self._memory, place + field, value)


class Pace:
    """How long a collective takes. taken: ns that it took when its end was last seen as it happened; 0: it
    never was."""

    def __init__(self) -> None:
        self.taken = 0


class Line:
    """A group's collectives in the order in which they start: it serves one at a time, so one that starts
    while another travels begins when that ends. number: of the group."""

    def __init__(self, ring: Writer, number: int, /) -> None:
        self.ring, self._number, self._sequence = ring, number, count()
        self.flights = list[Flight]()

    def depart(self, pace: Pace, step: int, name: int, size: int, call: int, signature: int, /) -> Flight:
        """The next one; its record is written."""
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
    """A collective under way, and its record. looked: when it was last seen under way, ns. started: 0 as long
    as others of its line are before it. work: what the wire gave for it."""

    work: Any

    def __init__(self, line: Line, pace: Pace, number: int, enqueued: int, started: int) -> None:
        self.line, self.pace, self.number = line, pace, number
        self.enqueued = self.looked = enqueued
        self.started = started
        self._in_line, self._looked_for = True, False

    def fly(self, work: object, looked_for: bool, /) -> None:
        """The wire has it. looked_for: looks at the ring find its end; else somebody calls ``land``, or
        waits at once."""
        self.work = work
        with self.line.ring.seeing:
            if looked_for and self._in_line and not self._looked_for:
                self.line.ring.under_way.append(self)
                self._looked_for = True

    def land(self, at: Any, failed: bool, /) -> None:
        """It ended at that moment, ns. Said again later, it is not heard. How long it took is known if it was
        seen to begin."""
        self._end_before(at)
        began = self.started
        if self._leave(at, failed) and not failed and began:
            self.pace.taken = max(1, at - began)

    def fail(self) -> None:
        """The wire did not take it."""
        self._leave(now(), True)

    def wait(self) -> None:
        """Return when its result may be used. Raises what the wire raises."""
        try:
            over = self._looked_for and self.work.is_completed()
            self.work.wait()
        except BaseException:
            at = now()
            self._leave(at, True)
            self.line.ring.end(self.number, at, failed=True)  # also if its end was seen before
            raise
        if over:
            self._end_between(now())
        else:
            self.land(now(), False)

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self.work.is_completed()

    def get_future(self) -> Any:
        """Done when it is over."""
        return self.work.get_future()

    def look(self) -> None:
        """Take note of its end, if that has come."""
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
        """It is over: said once; whoever says it later is not heard. Whether it was said now. One that ends
        before others of its line are seen to end began at most as long ago as it took when it was last
        watched; never before it was enqueued."""
        ring, flights = self.line.ring, self.line.flights
        with ring.seeing:
            if not self._in_line:
                return False
            at = max(at, self.started, self.enqueued)  # others may have read the clock since
            if not self.started:
                self._begin(max(at - self.pace.taken, self.enqueued) if self.pace.taken else self.enqueued)
            ring.end(self.number, at, failed=failed)
            was_first = flights[0] is self
            flights.remove(self)
            if was_first and flights:  # a group serves one at a time
                flights[0]._begin(max(at, flights[0].enqueued))
            if self._looked_for:
                ring.under_way.remove(self)
            self._in_line = self._looked_for = False
            return True

    def _likely_end(self, at: int) -> int:
        """When one that has ended since it was looked for did so: after as long as it took when it was last
        watched, as far as that fits."""
        return min(at, max(self.started + self.pace.taken, self.looked)) if self.started else at

    def _end_between(self, at: int) -> None:
        self._end_before(at)
        self._leave(self._likely_end(at), False)

    def _end_before(self, at: int) -> None:
        """A group serves one at a time. So one that is over tells that those before it may be, whose end
        nobody has looked for since; with that, it is known when it began itself. One whose state cannot be
        told says so when it is waited for."""
        while (one := self._first_looked_for()) is not None:
            try:
                if not one.work.is_completed():
                    return
            except Exception:  # noqa: BLE001
                return
            one._leave(one._likely_end(at), False)

    def _first_looked_for(self) -> Flight | None:
        """The first of its line, if that is another one whose end is looked for."""
        with self.line.ring.seeing:
            first = self.line.flights[0] if self._in_line else self
            return first if first is not self and first._looked_for else None

"""The always-on recorder: spans of every op, wait and collective of a step, bounded, read only after the
step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from plait.core.schedule import Op
from plait.core.segments import Action, Collective, SegmentOp
from plait.core.sharding import UnitOp
from plait.core.timeline import OpSpan, SpanKind
from plait.train.comm.wire import Handle, wire_bytes
from plait.train.machine.device import Device, Mark


class _Flight:
    """A collective under way; ``ended`` is set by the device when it is over."""

    __slots__ = ("bytes", "ended", "op", "started")

    def __init__(self, op: SegmentOp, started: Mark, size: int) -> None:
        self.op, self.started, self.bytes = op, started, size
        self.ended: Mark | None = None

    def end(self, mark: Mark) -> None:
        self.ended = mark


class Recorder:
    """Collects marks during a step and resolves them to spans afterwards; a full recorder drops the oldest,
    never blocks."""

    def __init__(self, device: Device, capacity: int = 200_000) -> None:
        self.device = device
        self._marks: deque[tuple[Action, Mark, Mark]] = deque(maxlen=capacity)
        self._flights: deque[_Flight] = deque(maxlen=capacity)
        self._spent: deque[tuple[int, Op | UnitOp, SpanKind, Mark, Mark, int]] = deque(maxlen=capacity)
        self._moves: deque[OpSpan] = deque(maxlen=capacity)
        self._taken, self._paused = 0, False

    def add(self, action: Action, start: Mark, end: Mark) -> None:
        """An op or a wait ran between two marks."""
        self._marks.append((action, start, end))

    def watch(
        self, op: SegmentOp, kind: Collective, result: Tensor, source: Tensor, size: int, started: Mark, work: Handle
    ) -> None:
        """A collective was started; note when it ends."""
        flight = _Flight(op, started, wire_bytes(kind, result, source, size))
        self._flights.append(flight)
        self.device.mark_when_done(work, flight.end)

    def ticket(self, *, later: bool = False) -> int | None:
        """Which step something belongs to that starts now, and may end whenever it does. later: the next one.
        None while paused."""
        return None if self._paused else self._taken + later

    def stood(self, op: Op, start: Mark, end: Mark) -> None:
        """A pipeline stage waited for a transfer between two marks."""
        self.spent(self.ticket(), op, "idle", start, end)

    def spent(self, ticket: int | None, op: Op | UnitOp, kind: SpanKind, start: Mark, end: Mark, size: int = 0) -> None:
        """Something else took the time between two marks, and moved ``size`` bytes. Any thread may say so."""
        if ticket is not None:
            self._spent.append((ticket, op, kind, start, end, size))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What starts meanwhile belongs to no step."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def forget(self) -> None:
        """Everything so far, also what belongs to the next step."""
        for collected in (self._marks, self._flights, self._spent, self._moves):
            collected.clear()

    def moved(self, op: Op, start: float, end: float, size: int) -> None:
        """A transfer was under way, by the host's clock."""
        self._moves.append(OpSpan(op, "transfer", start, end, size))

    def take(self) -> list[OpSpan]:
        """All spans since the last call, in order of their start; collectives are cut where they overlap.
        What a thread of its own is still busy with comes with the step that it belongs to.

        A group serves one collective at a time, so one that starts while another travels begins when that
        ends.
        """
        self.device.synchronize()
        spans = [
            OpSpan(a.op, "wait" if a.verb == "wait" else "compute", self._at(s), self._at(e)) for a, s, e in self._marks
        ]
        spans += self._due()
        spans += self._collectives()
        spans += self._moves
        for collected in (self._marks, self._flights, self._moves):
            collected.clear()
        self._taken += 1
        return sorted(spans, key=lambda span: span.start)

    def _due(self) -> Iterator[OpSpan]:
        """What was spent in this step; the rest stays. Threads may add to it meanwhile."""
        for _ in range(len(self._spent)):
            entry = self._spent.popleft()
            if entry[0] > self._taken:
                self._spent.append(entry)
            else:
                _, op, kind, start, end, size = entry
                yield OpSpan(op, kind, self._at(start), self._at(end), size)

    def _collectives(self) -> Iterator[OpSpan]:
        free = 0.0
        for flight in self._flights:
            if flight.ended is None:
                continue
            end = self._at(flight.ended)
            yield OpSpan(flight.op, "comm", min(max(self._at(flight.started), free), end), end, flight.bytes)
            free = max(free, end)

    def _at(self, mark: Mark) -> float:
        return self.device.seconds(mark)

"""The ranks of a pipeline in virtual time: each works through its list, and waits for what others send.

A computation waits for its transfers. How a transfer starts:

    buffered     when it is sent: the receiver's memory is always there (gloo with a posted receive, or a
                 mailbox)
    rendezvous   when it is sent and its receive is posted (NCCL; gloo without a posted receive)
    blocking     as rendezvous, and sender and receiver stand still until it has arrived (send and recv one
                 call after the other)

What computations and transfers take is a subclass's: ``dry_run`` has given costs, ``pipeline`` a machine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Generic, Literal, NamedTuple, TypeVar

from plait.core.base.errors import ScheduleError
from plait.core.step.clock.phase import Key
from plait.core.step.schedule import Op, Phase, Schedule, Transfer, ends

Transfers = Literal["buffered", "rendezvous", "blocking"]
SCRIPTS = 8
"""Schedules whose lists are kept: finalists that follow each other often have the same."""
_SENT, _POSTED = 1, 2


class Entry(NamedTuple):
    """One op of a rank's list. key: None for a transfer. arrivals: numbers of the transfers from other ranks
    that a computation needs. way: number of the transfer; sends: which end of it this is."""

    op: Op
    key: Key | None
    arrivals: tuple[int, ...]
    way: int = -1
    sends: bool = False


class Way(NamedTuple):
    """A transfer, and the ranks at its ends."""

    transfer: Transfer
    sender: int
    receiver: int


@dataclass(frozen=True)
class Script:
    """A schedule with its transfers numbered. entries: of every rank."""

    ways: Sequence[Way]
    entries: Sequence[Sequence[Entry]]


@lru_cache(maxsize=SCRIPTS)
def script_of(schedule: Schedule) -> Script:
    """The script of a schedule with transfers."""
    numbers: dict[Transfer, int] = {}
    entries = [_entries(schedule, rank, numbers) for rank in range(len(schedule.ranks))]
    rank_of = schedule.rank_of
    return Script([Way(one, rank_of[one.source], rank_of[one.target]) for one in numbers], entries)


def _entries(schedule: Schedule, rank: int, numbers: dict[Transfer, int]) -> list[Entry]:
    """The list of one rank. numbers: of transfers, is added to."""
    ops, order = schedule.ranks[rank], {stage: at for at, stage in enumerate(schedule.stages_of(rank))}
    phases: list[tuple[int, Phase]] = [(order[op.stage], op.work.phase) for op in ops if op.computes]
    last = {phase: at for at, phase in enumerate(phases)}
    turns = enumerate(zip(phases, [*phases[1:], None], strict=True))
    known: dict[Key, Key] = {}  # equal keys are one, so that they are found fast
    entries = list[Entry]()
    for op in ops:
        if op.computes:
            at, (phase, following) = next(turns)
            key = Key(*phase, last[phase] == at, following)
            arrivals = [numbers.setdefault(one, len(numbers)) for one in schedule.arrivals(op)]
            entries.append(Entry(op, known.setdefault(key, key), tuple(arrivals)))
        else:
            number = numbers.setdefault(op.transfer, len(numbers))
            entries.append(Entry(op, None, (), number, op.sends))
    return entries


@dataclass(eq=False)
class RankClock:
    """A rank in its list: at which entry, and at what time."""

    entries: Sequence[Entry]
    clock: float = 0.0
    at: int = 0


R = TypeVar("R", bound=RankClock)


class PipelineClock(ABC, Generic[R]):
    """The walk of all ranks, in the order of time. arrived: when each transfer began to move, and when it was
    there; None before it moves."""

    def __init__(self, script: Script, ranks: Sequence[R], transfers: Transfers) -> None:
        self.ranks, self.ways = ranks, script.ways
        self.arrived: list[tuple[float, float] | None] = [None] * len(self.ways)
        self._announced = bytearray(len(self.ways))
        self._moving = (_SENT, _SENT | _POSTED) if transfers == "buffered" else (_SENT | _POSTED,)
        self._blocking = transfers == "blocking"
        self._blocked: dict[int, int] = {}
        """The rank that stands still until a transfer moves. By transfer."""
        self._queue: list[tuple[float, int]] = []

    @abstractmethod
    def compute(self, rank: R, entry: Entry) -> None:
        """Move a rank's clock on by one of its computations."""

    @abstractmethod
    def move(self, way: int, now: float) -> tuple[float, float]:
        """Begin and end of a transfer that may begin now."""

    def wait(self, rank: R, way: int) -> None:
        """Move a rank's clock on to when a transfer is there, unless it is later already."""
        rank.clock = max(rank.clock, self.there(way)[1])

    def there(self, way: int) -> tuple[float, float]:
        """When a transfer that has moved began, and when it was there."""
        moment = self.arrived[way]
        assert moment
        return moment

    def walk(self) -> None:
        """Let every rank go through its list, always the one whose clock is behind. Raises ScheduleError
        where ranks wait for each other in a circle; the message names it."""
        self._queue = [(rank.clock, number) for number, rank in enumerate(self.ranks)]
        self._queue.sort()
        while self._queue:
            _, number = heappop(self._queue)
            self._advance(number, self.ranks[number])
        if self._blocked:
            raise ScheduleError(self._circle())

    def _advance(self, number: int, rank: R) -> None:
        """Announce transfers and run computations until another rank is behind, or a transfer is missing."""
        entries, arrived, queue, at = rank.entries, self.arrived, self._queue, rank.at
        while at < len(entries):
            entry = entries[at]
            _, key, awaited, way, sends = entry
            if key is None:
                self._announce(way, rank.clock, sends=sends)
                if not self._blocking:
                    at += 1
                    continue
                awaited = (way,)
            for each in awaited:
                if arrived[each] is None:
                    self._blocked[each], rank.at = number, at
                    return
            for each in awaited:
                self.wait(rank, each)
            if key is not None:
                self.compute(rank, entry)
            at += 1
            if queue and queue[0] < (rank.clock, number):
                heappush(queue, (rank.clock, number))
                break
        rank.at = at

    def _announce(self, way: int, now: float, *, sends: bool) -> None:
        """Let a transfer move if this end of it is the last that was missing."""
        self._announced[way] |= _SENT if sends else _POSTED
        if self._announced[way] not in self._moving or self.arrived[way] is not None:
            return
        self.arrived[way] = _, end = self.move(way, now)
        waiting = self._blocked.pop(way, None)
        if waiting is not None:
            heappush(self._queue, (max(end, self.ranks[waiting].clock), waiting))

    def _circle(self) -> str:
        """The ranks that wait, and for which, from the first that stands still around the circle."""
        waits: dict[int, tuple[Op, Op, int]] = {}
        for rank, number in sorted((rank, number) for number, rank in self._blocked.items()):
            way, op = self.ways[number], self.ranks[rank].entries[self.ranks[rank].at].op
            send, receive = ends(way.transfer)
            waits[rank] = (op, receive, way.receiver) if op == send else (op, send, way.sender)
        rank, path = next(iter(waits)), list[int]()
        while rank in waits and rank not in path:
            path.append(rank)
            rank = waits[rank][2]
        circle = path[path.index(rank) :] if rank in path else path
        return "deadlock: " + "; ".join(
            f"rank {one} waits at {waits[one][0]} for {waits[one][1]} of rank {waits[one][2]}" for one in circle
        )

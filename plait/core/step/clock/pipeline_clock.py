"""Simulation of the pp ranks of a pipeline: each runs through its op list and waits for transfers
from others.

A computation waits for its transfers. Start of a transfer:

    buffered     when it is sent: the receiver's memory is always available (gloo with a posted receive, or a
                 mailbox)
    rendezvous   when it is sent and its receive is posted (NCCL; gloo without a posted receive)
    blocking     as rendezvous, and sender and receiver stand still until it has arrived (send and recv one
                 call after the other)

Subclasses define the time of computations and transfers: ``dry_run`` uses specified costs,
``pipeline`` a machine's. A dry run returns when every op would run, which activations are alive
meanwhile, and whether ranks deadlock. Each channel (one rank to one other) carries one transfer at
a time, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import Generic, Literal, NamedTuple, TypeVar

from plait.core.base.errors import ScheduleError
from plait.core.base.pictures import Bar
from plait.core.step.clock.phase import Key
from plait.core.step.schedule import Edge, Op, Phase, Schedule, Transfer, check, ends, with_transfers

Transfers = Literal["buffered", "rendezvous", "blocking"]
SCRIPTS = 8
"""Number of schedules whose scripts are cached; successive finalists often share a schedule."""
_SENT, _POSTED = 1, 2


class Entry(NamedTuple):
    """One op of a rank's list. key: None for a transfer. arrivals: numbers of the transfers from
    other ranks that a computation needs. way: number of the transfer; sends: True for its sending
    end."""

    op: Op
    key: Key | None
    arrivals: tuple[int, ...]
    way: int = -1
    sends: bool = False


class TransferRoute(NamedTuple):
    """A transfer, and the ranks at its ends."""

    transfer: Transfer
    sender: int
    receiver: int


@dataclass(frozen=True)
class Script:
    """A pipeline schedule whose transfers are numbered from 0. ways: the transfers. entries: the
    ops of every rank."""

    ways: Sequence[TransferRoute]
    entries: Sequence[Sequence[Entry]]


@lru_cache(maxsize=SCRIPTS)
def script_of(schedule: Schedule) -> Script:
    """Return the script of a schedule that already lists its transfers."""
    numbers: dict[Transfer, int] = {}
    entries = [_entries(schedule, rank, numbers) for rank in range(len(schedule.ranks))]
    rank_of = schedule.rank_of
    return Script([TransferRoute(one, rank_of[one.source], rank_of[one.target]) for one in numbers], entries)


def _entries(schedule: Schedule, rank: int, numbers: dict[Transfer, int]) -> list[Entry]:
    """Return the entries of one rank's op list. numbers: number of each transfer; new ones are
    added."""
    ops, order = schedule.ranks[rank], {stage: at for at, stage in enumerate(schedule.stages_of(rank))}
    phases: list[tuple[int, Phase]] = [(order[op.stage], op.work.phase) for op in ops if op.computes]
    last = {phase: at for at, phase in enumerate(phases)}
    turns = enumerate(zip(phases, [*phases[1:], None], strict=True))
    known: dict[Key, Key] = {}  # one object per equal key, for fast look-ups
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
    """A rank's position in its list, and its time in seconds."""

    entries: Sequence[Entry]
    clock: float = 0.0
    at: int = 0


R = TypeVar("R", bound=RankClock)


class PipelineClock(ABC, Generic[R]):
    """Simulation of all ranks of a pipeline, in order of time. arrived: (begin, end) in seconds of
    each transfer, by its number; None before it starts."""

    def __init__(self, script: Script, ranks: Sequence[R], transfers: Transfers) -> None:
        self.ranks, self.ways = ranks, script.ways
        self.arrived: list[tuple[float, float] | None] = [None] * len(self.ways)
        self._announced = bytearray(len(self.ways))
        self._moving = (_SENT, _SENT | _POSTED) if transfers == "buffered" else (_SENT | _POSTED,)
        self._blocking = transfers == "blocking"
        self._blocked: dict[int, int] = {}
        """The rank that stands still until a transfer starts, by transfer."""
        self._queue: list[tuple[float, int]] = []

    @abstractmethod
    def compute(self, rank: R, entry: Entry) -> None:
        """Advance a rank's clock by one of its computations."""

    @abstractmethod
    def move(self, way: int, now: float) -> tuple[float, float]:
        """Return (begin, end) in seconds of transfer number ``way`` if it can start at second
        ``now``."""

    def wait(self, rank: R, way: int) -> None:
        """Advance a rank's clock to the arrival of a transfer, unless it is later already."""
        rank.clock = max(rank.clock, self.arrival(way)[1])

    def arrival(self, way: int) -> tuple[float, float]:
        """Return the begin and end of a transfer that has started."""
        moment = self.arrived[way]
        assert moment
        return moment

    def simulate(self) -> None:
        """Run every rank through its list, always the rank whose clock is behind. Raises
        ScheduleError if ranks deadlock; the message names the circle."""
        self._queue = [(rank.clock, number) for number, rank in enumerate(self.ranks)]
        self._queue.sort()
        while self._queue:
            _, number = heappop(self._queue)
            self._advance(number, self.ranks[number])
        if self._blocked:
            raise ScheduleError(self._circle())

    def _advance(self, number: int, rank: R) -> None:
        """Announce transfers and run computations until another rank is behind, or a transfer is
        missing."""
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
        """Record that one end of transfer ``way`` is ready at second ``now``; start the transfer if
        that completes its condition."""
        self._announced[way] |= _SENT if sends else _POSTED
        if self._announced[way] not in self._moving or self.arrived[way] is not None:
            return
        self.arrived[way] = _, end = self.move(way, now)
        waiting = self._blocked.pop(way, None)
        if waiting is not None:
            heappush(self._queue, (max(end, self.ranks[waiting].clock), waiting))

    def _circle(self) -> str:
        """Return a message that names the deadlocked ranks, from the first that stands still around
        the circle."""
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


# ---- specified costs ----


@dataclass(frozen=True)
class PipelineCosts:
    """Seconds of one micro-batch, by stage; a whole backward is both gradients. edges: seconds of
    one transfer over an edge, default 0."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    edges: dict[Edge, float] = field(default_factory=dict[Edge, float])

    @staticmethod
    def uniform(
        num_stages: int,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        transfer: float = 0.0,
    ) -> PipelineCosts:
        """Return the costs of equal stages in a chain."""
        edges = {(i, i + 1): transfer for i in range(num_stages - 1)}
        return PipelineCosts(
            (forward,) * num_stages, (input_gradient,) * num_stages, (weight_gradient,) * num_stages, edges
        )

    def seconds(self, op: Op) -> float:
        """Return the seconds of a computation."""
        at, work = op.stage, op.work
        taken = self.forward[at] if work.forward else 0.0
        taken += self.input_gradient[at] if work.input_gradient else 0.0
        return taken + (self.weight_gradient[at] if work.weight_gradient else 0.0)

    def travel(self, transfer: Transfer) -> float:
        """Return the seconds of a transfer, either direction."""
        a, b = transfer.source, transfer.target
        return self.edges.get((min(a, b), max(a, b)), 0.0)


class TimedOp(NamedTuple):
    """An op with its start and end; a transfer is recorded under its SEND, from start to
    arrival."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class DryRun:
    """A simulated schedule under specified costs. Times in the unit of the costs, from the start of
    the step."""

    schedule: Schedule
    placed: tuple[TimedOp, ...]

    @property
    def makespan(self) -> float:
        """The time at which the last op or transfer ends."""
        return max((p.end for p in self.placed), default=0.0)

    def computations(self, rank: int) -> list[TimedOp]:
        """Return the computations of a rank, in order."""
        return [p for p in self.placed if p.rank == rank and p.op.computes]

    def idle(self) -> list[float]:
        """Return the time without computation between each rank's first and last computation, by
        rank."""

        def waits(own: list[TimedOp]) -> float:
            return own[-1].end - own[0].start - sum(p.end - p.start for p in own) if own else 0.0

        return [waits(self.computations(rank)) for rank in range(len(self.schedule.ranks))]

    def bubble(self) -> float:
        """Return the longest time that any rank is without computation between its first and last
        computation."""
        return max(self.idle(), default=0.0)

    def bars(self) -> list[Bar]:
        """Return the bars of a chart: a row per rank, and a row per channel on which transfers take
        time."""
        bars = [
            Bar(f"rank {p.rank}", p.start, p.end, self._label(p.op), p.op.work.name)
            for p in sorted(self.placed, key=lambda p: p.rank)
            if p.op.computes
        ]
        rank_of = self.schedule.rank_of
        moves = [p for p in self.placed if not p.op.computes and p.end > p.start]
        moves.sort(key=lambda p: (p.rank, rank_of[p.op.peer], p.start))
        return bars + [
            Bar(f"{p.rank} > {rank_of[p.op.peer]}", p.start, p.end, str(p.op.micro_batch), f"transfer {p.op.direction}")
            for p in moves
        ]

    def _label(self, op: Op) -> str:
        """Return an op's label; lower case for all but the first of a rank's stages."""
        first = op.stage < len(self.schedule.ranks)
        return f"{op.kind if first else op.kind.lower()}{op.micro_batch}"


def dry_run(schedule: Schedule, costs: PipelineCosts | None = None, transfers: Transfers = "buffered") -> DryRun:
    """Simulate ``schedule`` (transfers are added if it has none). costs: default: all zero.

    Raises ScheduleError if the schedule is incomplete or out of order, if two ranks list a
    channel's transfers in different orders, or if ranks deadlock; the message names the ops.
    """
    if schedule.computes_only:
        schedule = with_transfers(schedule)
    else:
        check(schedule)
    clock = _DryClock(schedule, costs or PipelineCosts.uniform(schedule.num_stages, 0, 0, 0), transfers)
    clock.simulate()
    return DryRun(schedule, tuple(sorted(clock.placed, key=lambda one: (one.start, one.rank))))


def _check_channels(script: Script) -> None:
    """Raise ScheduleError if a rank lists transfers from another in a different order than they are
    sent."""
    channels: dict[tuple[int, int], tuple[list[TransferRoute], list[TransferRoute]]] = {}
    for entry in (entry for entries in script.entries for entry in entries if not entry.key):
        way = script.ways[entry.way]
        channels.setdefault((way.sender, way.receiver), ([], []))[not entry.sends].append(way)
    for sent, expected in channels.values():
        for one, other in zip(sent, expected, strict=True):
            if one is not other:
                raise ScheduleError(
                    f"rank {one.sender} sends {ends(one.transfer)[0]} where rank {one.receiver} expects "
                    f"{ends(other.transfer)[1]}: the two must list the transfers between them in one order"
                )


class _DryClock(PipelineClock[RankClock]):
    """A pipeline clock with specified costs; every channel carries one transfer at a time."""

    def __init__(self, schedule: Schedule, costs: PipelineCosts, transfers: Transfers) -> None:
        script = script_of(schedule)
        _check_channels(script)
        super().__init__(script, [RankClock(entries) for entries in script.entries], transfers)
        self.rank_of, self.costs, self.placed = schedule.rank_of, costs, list[TimedOp]()
        self.free: dict[tuple[int, int], float] = {}

    def compute(self, rank: RankClock, entry: Entry) -> None:
        start, rank.clock = rank.clock, rank.clock + self.costs.seconds(entry.op)
        self.placed.append(TimedOp(self.rank_of[entry.op.stage], entry.op, start, rank.clock))

    def move(self, way: int, now: float) -> tuple[float, float]:
        transfer, sender, receiver = self.ways[way]
        start = max(now, self.free.get((sender, receiver), 0.0))
        end = self.free[sender, receiver] = start + self.costs.travel(transfer)
        self.placed.append(TimedOp(sender, ends(transfer)[0], start, end))
        return start, end


def peak_activations(schedule: Schedule) -> dict[int, int]:
    """Return the maximum number of micro-batches whose activations are alive at once, from the
    forward to the end of weight gradients, by stage."""
    return {
        stage: _peak([op for ops in schedule.ranks for op in ops if op.stage == stage])
        for stage in range(schedule.num_stages)
    }


def rank_peaks(schedule: Schedule) -> list[int]:
    """Return the maximum number of activations alive at once over all stages of a rank, in
    micro-batches of one stage, by rank."""
    return [_peak(ops) for ops in schedule.ranks]


def _peak(ops: list[Op] | tuple[Op, ...]) -> int:
    alive = peak = 0
    for op in ops:
        if op.computes:
            alive += op.work.forward
            peak = max(peak, alive)
            alive -= op.work.weight_gradient
    return peak

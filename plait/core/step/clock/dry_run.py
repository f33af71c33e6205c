"""Run a schedule without a device: when every op would happen, what is alive meanwhile, and whether ranks
wait in a circle.

Transfers start as ``pipeline_clock`` says; each channel (one rank to one other) carries one at a time, in
order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from plait.core.base.errors import ScheduleError
from plait.core.base.pictures import Bar
from plait.core.step.clock.pipeline_clock import Entry, PipelineClock, RankClock, Script, Way, script_of
from plait.core.step.clock.pipeline_clock import Transfers as Transfers
from plait.core.step.schedule import Edge, Op, Schedule, Transfer, check, ends, with_transfers


@dataclass(frozen=True)
class PipelineCosts:
    """Seconds of one micro-batch, by stage; a whole backward is both gradients. edges: one way over an edge,
    0 where not given."""

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
        """Equal stages in a chain."""
        edges = {(i, i + 1): transfer for i in range(num_stages - 1)}
        return PipelineCosts(
            (forward,) * num_stages, (input_gradient,) * num_stages, (weight_gradient,) * num_stages, edges
        )

    def seconds(self, op: Op) -> float:
        """Seconds of a computation."""
        at, work = op.stage, op.work
        taken = self.forward[at] if work.forward else 0.0
        taken += self.input_gradient[at] if work.input_gradient else 0.0
        return taken + (self.weight_gradient[at] if work.weight_gradient else 0.0)

    def travel(self, transfer: Transfer) -> float:
        """Seconds of a transfer, either direction."""
        a, b = transfer.source, transfer.target
        return self.edges.get((min(a, b), max(a, b)), 0.0)


class TimedOp(NamedTuple):
    """An op and when it runs; a transfer stands under its SEND, from when it moves until it has arrived."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class DryRun:
    """A schedule in time, under given costs. Times in the unit of the costs, from the start of the step."""

    schedule: Schedule
    placed: tuple[TimedOp, ...]

    @property
    def makespan(self) -> float:
        """Time until the last op or transfer ends."""
        return max((p.end for p in self.placed), default=0.0)

    def computations(self, rank: int) -> list[TimedOp]:
        """Computations of a rank, in order."""
        return [p for p in self.placed if p.rank == rank and p.op.computes]

    def idle(self) -> list[float]:
        """Time in which a rank does not compute, between its first and its last computation. By rank."""

        def waits(own: list[TimedOp]) -> float:
            return own[-1].end - own[0].start - sum(p.end - p.start for p in own) if own else 0.0

        return [waits(self.computations(rank)) for rank in range(len(self.schedule.ranks))]

    def bubble(self) -> float:
        """The longest ``idle`` of a rank."""
        return max(self.idle(), default=0.0)

    def bars(self) -> list[Bar]:
        """For a picture: a row a rank; a row for every channel on which transfers take time."""
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
        """Small letters for all but the first of a rank's stages."""
        first = op.stage < len(self.schedule.ranks)
        return f"{op.kind if first else op.kind.lower()}{op.micro_batch}"


def dry_run(schedule: Schedule, costs: PipelineCosts | None = None, transfers: Transfers = "buffered") -> DryRun:
    """Simulate ``schedule`` (transfers are added if it has none). costs: all zero if not given.

    Raises ScheduleError if it is incomplete or out of order, if two ranks list a channel's transfers in
    different orders, or if ranks wait for each other in a circle; the message names the ops.
    """
    if schedule.computes_only:
        schedule = with_transfers(schedule)
    else:
        check(schedule)
    clock = _DryClock(schedule, costs or PipelineCosts.uniform(schedule.num_stages, 0, 0, 0), transfers)
    clock.walk()
    return DryRun(schedule, tuple(sorted(clock.placed, key=lambda one: (one.start, one.rank))))


def _check_channels(script: Script) -> None:
    """Raise ScheduleError where a rank expects transfers of another in another order than they are sent."""
    channels: dict[tuple[int, int], tuple[list[Way], list[Way]]] = {}
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
    """A pipeline's clock with given costs; every channel carries one transfer at a time."""

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
    """The most micro-batches whose activations are alive at once, from the forward until weight gradients are
    done. By stage."""
    return {
        stage: _peak([op for ops in schedule.ranks for op in ops if op.stage == stage])
        for stage in range(schedule.num_stages)
    }


def rank_peaks(schedule: Schedule) -> list[int]:
    """The most activations alive at once over all stages of a rank, in micro-batches of one stage. By
    rank."""
    return [_peak(ops) for ops in schedule.ranks]


def _peak(ops: list[Op] | tuple[Op, ...]) -> int:
    alive = peak = 0
    for op in ops:
        if op.computes:
            alive += op.work.forward
            peak = max(peak, alive)
            alive -= op.work.weight_gradient
    return peak

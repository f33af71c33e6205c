"""Run a schedule without a device: when every op would happen, what is alive meanwhile, and whether ranks
wait in a circle.

Each rank works through its list; a computation waits for its transfers; each channel (one rank to one other)
carries one transfer at a time, in order. How a transfer starts:

    buffered     when it is sent: the receiver's memory is always there (gloo with a posted receive, or a
                 mailbox)
    rendezvous   when it is sent and its receive is posted (NCCL; gloo without a posted receive)
    blocking     as rendezvous, and sender and receiver stand still until it has arrived (send and recv one
                 call after the other)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from plait.core.base.errors import ScheduleError
from plait.core.base.pictures import Bar
from plait.core.step.schedule import Edge, Op, Schedule, Transfer, check, ends, with_transfers

Transfers = Literal["buffered", "rendezvous", "blocking"]


class Costs(Protocol):
    """What ops take; ``PipelineCosts`` is the simplest."""

    def seconds(self, op: Op) -> float:
        """Of a computation."""
        ...

    def travel(self, transfer: Transfer) -> float:
        """Of a transfer."""
        ...


@dataclass(frozen=True)
class PipelineCosts:
    """Seconds of one micro-batch, by stage: F, I and W; a whole backward is I + W. edges: one way over an
    edge, 0 where not given."""

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
        """Of a computation."""
        at, work = op.stage, op.work
        taken = self.forward[at] if work.forward else 0.0
        taken += self.input_gradient[at] if work.input_gradient else 0.0
        return taken + (self.weight_gradient[at] if work.weight_gradient else 0.0)

    def travel(self, transfer: Transfer) -> float:
        """Of a transfer, either direction."""
        a, b = transfer.source, transfer.target
        return self.edges.get((min(a, b), max(a, b)), 0.0)


class TimedOp(NamedTuple):
    """When an op runs; a transfer stands under its SEND, from when it starts to move until it has arrived."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class DryRun:
    """What a schedule does under given costs. Times in the unit of the costs, from the start of the step."""

    schedule: Schedule
    placed: tuple[TimedOp, ...]

    @property
    def makespan(self) -> float:
        """Until the last op or transfer ends."""
        return max((p.end for p in self.placed), default=0.0)

    def computations(self, rank: int) -> list[TimedOp]:
        """Of a rank, in order."""
        return [p for p in self.placed if p.rank == rank and p.op.computes]

    def idle(self) -> list[float]:
        """By rank: time between its first and its last computation in which it does not compute."""

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
            Bar(
                f"{p.rank} > {rank_of[p.op.peer]}",
                p.start,
                p.end,
                str(p.op.micro_batch),
                f"transfer {p.op.transfer.direction}",
            )
            for p in moves
        ]

    def _label(self, op: Op) -> str:
        """Small letters for all but the first of a rank's stages."""
        first = op.stage < len(self.schedule.ranks)
        return f"{op.kind if first else op.kind.lower()}{op.micro_batch}"


def dry_run(schedule: Schedule, costs: Costs | None = None, transfers: Transfers = "buffered") -> DryRun:
    """Simulate ``schedule`` (transfers are added if it has none). costs: all zero if not given.

    Raises ScheduleError if it is incomplete or out of order, if two ranks list a channel's transfers in
    different orders, or if ranks wait for each other in a circle; the message names the ops.
    """
    if schedule.computes_only:
        schedule = with_transfers(schedule)
    else:
        check(schedule)
    return _Machine(schedule, costs or PipelineCosts.uniform(schedule.num_stages, 0, 0, 0), transfers).run()


class _Channel:
    """Transfers from one rank to one other: posted ends that have not met yet."""

    def __init__(self) -> None:
        self.sent: deque[tuple[Transfer, float]] = deque()
        self.posted: deque[tuple[Transfer, float]] = deque()
        self.free = 0.0


class _Machine:
    def __init__(self, schedule: Schedule, costs: Costs, transfers: Transfers) -> None:
        self.schedule, self.costs, self.transfers = schedule, costs, transfers
        self.at = [0] * len(schedule.ranks)
        self.clock = [0.0] * len(schedule.ranks)
        self.arrived: dict[Transfer, float] = {}
        self.announced = set[Op]()
        """SENDs and RECVs whose rank has reached them."""
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.placed: list[TimedOp] = []

    def run(self) -> DryRun:
        waiting = deque(range(len(self.schedule.ranks)))
        idle = 0
        while waiting:
            rank = waiting.popleft()
            moved = self._advance(rank)
            if self.at[rank] < len(self.schedule.ranks[rank]):
                waiting.append(rank)
            idle = 0 if moved else idle + 1
            if waiting and idle > len(waiting):
                raise ScheduleError(self._circle())
        return DryRun(self.schedule, tuple(sorted(self.placed, key=lambda p: (p.start, p.rank))))

    def _advance(self, rank: int) -> bool:
        """Run what the rank can run now; whether that was anything."""
        ops, begun = self.schedule.ranks[rank], self.at[rank]
        before = len(self.announced)
        while self.at[rank] < len(ops) and self._step(rank, ops[self.at[rank]]):
            self.at[rank] += 1
        return self.at[rank] > begun or len(self.announced) > before

    def _step(self, rank: int, op: Op) -> bool:
        """Run ``op`` if nothing that it waits for is missing."""
        if not op.computes:
            self._announce(rank, op)
            if self.transfers != "blocking":
                return True
            end = self.arrived.get(op.transfer)
            self.clock[rank] = max(self.clock[rank], end or 0.0)
            return end is not None
        needs = [self.arrived.get(transfer) for transfer in self.schedule.arrivals(op)]
        if None in needs:
            return False
        start = max(self.clock[rank], *(end for end in needs if end is not None), 0.0)
        self.clock[rank] = start + self.costs.seconds(op)
        self.placed.append(TimedOp(rank, op, start, self.clock[rank]))
        return True

    def _announce(self, rank: int, op: Op) -> None:
        if op in self.announced:
            return
        self.announced.add(op)
        transfer, ranks = op.transfer, self.schedule.rank_of
        key = (ranks[transfer.source], ranks[transfer.target])
        channel = self.channels.setdefault(key, _Channel())
        (channel.sent if op.sends else channel.posted).append((transfer, self.clock[rank]))
        while channel.sent and channel.posted:
            (sent, ready), (expected, open_) = channel.sent.popleft(), channel.posted.popleft()
            if sent != expected:
                raise ScheduleError(
                    f"rank {key[0]} sends {ends(sent)[0]} where rank {key[1]} expects {ends(expected)[1]}: "
                    "the two must list the transfers between them in one order"
                )
            start = max(ready, channel.free, 0.0 if self.transfers == "buffered" else open_)
            channel.free = self.arrived[sent] = start + self.costs.travel(sent)
            self.placed.append(TimedOp(key[0], ends(sent)[0], start, channel.free))

    def _circle(self) -> str:
        """Who waits for whom, from the first stuck rank around the circle."""
        ranks = self.schedule.ranks
        waits: dict[int, tuple[Op, Op, int]] = {}
        for rank, ops in enumerate(ranks):
            if self.at[rank] < len(ops):
                op = ops[self.at[rank]]
                missing = self._missing(op)
                waits[rank] = (op, missing, self.schedule.rank_of[missing.stage])
        rank, path = next(iter(waits)), list[int]()
        while rank in waits and rank not in path:
            path.append(rank)
            rank = waits[rank][2]
        circle = path[path.index(rank) :] if rank in path else path
        return "deadlock: " + "; ".join(
            f"rank {r} waits at {waits[r][0]} for {waits[r][1]} of rank {waits[r][2]}" for r in circle
        )

    def _missing(self, op: Op) -> Op:
        """The op of another rank that ``op`` waits for."""
        transfers = (
            [op.transfer] if not op.computes else [t for t in self.schedule.arrivals(op) if t not in self.arrived]
        )
        send, receive = ends(transfers[0])
        return receive if op == send else send


def peak_activations(schedule: Schedule) -> dict[int, int]:
    """By stage: the most micro-batches whose activations are alive at once, from F until B, or W where the
    backward is split."""
    return {
        stage: _peak([op for ops in schedule.ranks for op in ops if op.stage == stage])
        for stage in range(schedule.num_stages)
    }


def rank_peaks(schedule: Schedule) -> list[int]:
    """By rank: the most activations alive at once over all its stages, in micro-batches of one stage."""
    return [_peak(ops) for ops in schedule.ranks]


def _peak(ops: list[Op] | tuple[Op, ...]) -> int:
    alive = peak = 0
    for op in ops:
        if op.computes:
            alive += op.work.forward
            peak = max(peak, alive)
            alive -= op.work.weight_gradient
    return peak

"""A pipeline schedule as data: what every pp rank computes, sends and receives, in which order.

An op is one action of one stage on one micro-batch. Text form, as in torch.distributed.pipelining:

    2F0        forward of micro-batch 0 on stage 2
    2B0        its whole backward; or, split (Qi 2023, arXiv 2401.10241), ``2I0`` for the gradient of the
               input, ``2W0`` for the gradients of the weights
    0S0        forward and backward in one, if one stage is the whole model
    1SEND_F3   send the output of 1F3 to the next stage; ``1SEND_F3>5`` to stage 5 (a skip connection)
    2RECV_F3   post the receive for it; ``5RECV_F3<1`` from stage 1
    2SEND_B3   send the gradient back to where the input came from; 1RECV_B3 likewise

A *stage* is a range of layers; a *rank* here is a position on the pp axis. It holds one stage, or
several (interleaving, V-shapes). Generators (``core.step.schedules``) return computation only;
``with_transfers`` adds the transfers. Sends and receives never block: a computation waits for its
inputs. Transfers from one rank to another form a *channel*, and run one after the other in the
order in which the sender lists them. The receiver lists them in the same order, so that no backend
can mix them up or deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, cast

from plait.core.base.errors import ScheduleError

OpKind = Literal["F", "B", "I", "W", "S", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
Direction = Literal["F", "B"]
Edge = tuple[int, int]
Phase = Literal["step", "F", "B", "I", "W"]
"""Names of computations in a stage's instruction lists."""


class StageWork(NamedTuple):
    """The work of one kind of computation on its stage: the forward, the gradient of the stage's
    input, the gradients of its weights. name: its description."""

    name: str
    phase: Phase
    forward: bool = False
    input_gradient: bool = False
    weight_gradient: bool = False


WORK: Mapping[str, StageWork] = {
    "S": StageWork("step", "step", True, True, True),
    "F": StageWork("forward", "F", forward=True),
    "B": StageWork("backward", "B", input_gradient=True, weight_gradient=True),
    "I": StageWork("input gradients", "I", input_gradient=True),
    "W": StageWork("weight gradients", "W", weight_gradient=True),
}
"""Work by kind of computation. The kinds not listed here are ends of transfers."""
PHASES: Mapping[Phase, StageWork] = {work.phase: work for work in WORK.values()}
_NEXT: dict[str, int] = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}
_WORD = re.compile(r"(\d+)(F|B|I|W|S|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)(?:([<>])(\d+))?")


class Transfer(NamedTuple):
    """One tensor in transit: the result of stage ``source`` for ``micro_batch``, forward or
    backward, which stage ``target`` needs."""

    source: int
    target: int
    direction: Direction
    micro_batch: int


class Op(NamedTuple):
    """One action. ``peer`` is the stage at the other end of a transfer, -1 for a computation."""

    stage: int
    kind: OpKind
    micro_batch: int
    peer: int = -1

    @property
    def computes(self) -> bool:
        """True if the op is a computation, False if it is an end of a transfer."""
        return self.kind in WORK

    @property
    def work(self) -> StageWork:
        """The work of a computation."""
        return WORK[self.kind]

    @property
    def forward(self) -> bool:
        """True if the op belongs to the forward pass."""
        return self.kind[-1] == "F"

    @property
    def direction(self) -> Direction:
        """Direction of the tensor that the op moves, or computes for other stages."""
        return "F" if self.forward else "B"

    # Properties by which a timeline locates an op: here the stage and the micro-batch.

    @property
    def site(self) -> str:
        """Kind of the span in recordings: ``stage`` for a computation, ``transfer`` for a
        transfer."""
        return "stage" if self.computes else "transfer"

    @property
    def layer(self) -> int:
        """Index of the stage; recordings store it as the layer."""
        return self.stage

    @property
    def slice(self) -> int:
        """Index of the micro-batch; recordings store it as the slice."""
        return self.micro_batch

    @property
    def sends(self) -> bool:
        """True if the op starts a transfer, False if it posts a receive."""
        return self.kind in ("SEND_F", "SEND_B")

    @property
    def transfer(self) -> Transfer:
        """The tensor that a SEND or RECV moves."""
        stage, kind, micro_batch, peer = self
        source, target = (stage, peer) if self.sends else (peer, stage)
        return Transfer(source, target, "F" if kind[-1] == "F" else "B", micro_batch)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.micro_batch}"
        if self.computes or self.peer == self.stage + _NEXT[self.kind]:
            return text
        return f"{text}{'>' if self.sends else '<'}{self.peer}"


def parse_op(word: str) -> Op:
    """Return the op of a text form. Raises ScheduleError if the text is not an op."""
    match = _WORD.fullmatch(word)
    if match:
        stage, micro_batch = int(match[1]), int(match[3])
        kind = cast(OpKind, match[2])
        if kind in WORK:
            if match[4] is None:
                return Op(stage, kind, micro_batch)
        else:
            peer = int(match[5]) if match[5] else stage + _NEXT[kind]
            if match[4] in (None, ">" if kind.startswith("SEND") else "<") and peer >= 0:
                return Op(stage, kind, micro_batch, peer)
    raise ScheduleError(
        f"'{word}' is not a schedule op; examples are 2F0, 2B0, 2I0, 2W0, 1SEND_F3, 2RECV_F3, 0SEND_F3>5 and 5RECV_F3<0"
    )


@dataclass(frozen=True)
class Schedule:
    """Every pp rank's list of ops. edges: (producer, consumer) stages of every tensor that crosses
    stages; default: a chain. trains: False for a forward-only schedule, for evaluation.

    >>> print(Schedule("by hand", 2, ((Op(0, "F", 0), Op(0, "B", 0)), (Op(1, "F", 0), Op(1, "B", 0)))))
    # by hand
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0
    """

    name: str
    num_stages: int
    ranks: tuple[tuple[Op, ...], ...]
    edges: tuple[Edge, ...] = ()
    trains: bool = True

    def __post_init__(self) -> None:
        if not self.edges:
            object.__setattr__(self, "edges", tuple((i, i + 1) for i in range(self.num_stages - 1)))
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < self.num_stages:
                raise ScheduleError(
                    f"edge {producer}>{consumer} must lead from an earlier to a later stage; "
                    f"stages are 0 to {self.num_stages - 1}"
                )

    @property
    def computes_only(self) -> bool:
        """True if the schedule has no transfers yet."""
        return all(op.computes for ops in self.ranks for op in ops)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that holds each stage."""
        return {op.stage: rank for rank, ops in enumerate(self.ranks) for op in ops}

    @cached_property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return 1 + max((op.micro_batch for ops in self.ranks for op in ops), default=-1)

    @cached_property
    def splits(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose backward is split into I and W."""
        return frozenset((op.stage, op.micro_batch) for ops in self.ranks for op in ops if op.kind == "I")

    @cached_property
    def whole(self) -> bool:
        """True if one stage is the whole model, and its forward and backward run as one op."""
        return any(op.kind == "S" for ops in self.ranks for op in ops)

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({op.stage for op in ops})) for ops in self.ranks)

    def first(self, micro_batches: int) -> Schedule:
        """Return the schedule of the first ``micro_batches`` micro-batches alone, in the same
        order.

        Micro-batches do not depend on each other. So the shortened schedule can still run, and
        keeps no more of them alive.
        """
        kept = tuple(tuple(op for op in ops if op.micro_batch < micro_batches) for ops in self.ranks)
        return replace(self, ranks=kept)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        return self._held[rank]

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """Stages that read a stage's output, ascending, by stage."""
        return self._ends(self.edges)

    @cached_property
    def producers(self) -> dict[int, list[int]]:
        """Stages whose outputs a stage reads, ascending, by stage."""
        return self._ends((b, a) for a, b in self.edges)

    def _ends(self, pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
        """Return the second stages of pairs, ascending, by the first."""
        found: dict[int, list[int]] = {stage: [] for stage in range(self.num_stages)}
        for stage, other in sorted(pairs):
            found[stage].append(other)
        return found

    @cached_property
    def _apart(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Producers and consumers on other ranks, by stage."""
        at = self.rank_of.get
        both = self.producers, self.consumers
        first, second = ({s: [one for one in ends if at(one) != at(s)] for s, ends in each.items()} for each in both)
        return first, second

    def backward(self, stage: int, micro_batch: int) -> Op:
        """Return the op that computes the gradient of a stage's input."""
        return Op(stage, "I" if (stage, micro_batch) in self.splits else "B", micro_batch)

    def local_needs(self, op: Op) -> list[Op]:
        """Return the ops of the same rank that must run before computation ``op``."""
        stage, at, here = op.stage, op.micro_batch, self.rank_of[op.stage]
        if op.kind == "F":
            return [Op(p, "F", at) for p in self.producers[stage] if self.rank_of[p] == here]
        if op.kind == "W":
            return [Op(stage, "I", at)]
        if op.kind == "S":
            return []
        return [Op(stage, "F", at), *(self.backward(c, at) for c in self.consumers[stage] if self.rank_of[c] == here)]

    def arrivals(self, op: Op) -> list[Transfer]:
        """Return the transfers that must arrive before computation ``op``."""
        stage, kind, at, _ = op
        producers, consumers = self._apart
        if kind == "F":
            return [Transfer(source, stage, "F", at) for source in producers[stage]]
        return [] if kind == "W" else [Transfer(source, stage, "B", at) for source in consumers[stage]]

    def departures(self, op: Op) -> list[Transfer]:
        """Return the transfers of the result of computation ``op``, the most urgent first."""
        stage, kind, at, _ = op
        producers, consumers = self._apart
        if kind == "F":
            return [Transfer(stage, target, "F", at) for target in consumers[stage]]
        return [] if kind == "W" else [Transfer(stage, target, "B", at) for target in reversed(producers[stage])]

    def __str__(self) -> str:
        chain = self.edges == tuple((i, i + 1) for i in range(self.num_stages - 1))
        head = [f"# {self.name}", *([] if self.trains else ["forward only:"])]
        head += [] if chain else ["edges: " + " ".join(f"{a}>{b}" for a, b in self.edges)]
        return "\n".join([*head, *(f"rank {rank}: {' '.join(map(str, ops))}" for rank, ops in enumerate(self.ranks))])


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, naming the op, unless every rank's list is complete and in an order in
    which it could run alone.

    Every computation must occur once and on one rank, after its dependencies on the same rank. If
    there are any transfers, all must be there: sent after their op, received before their reader.
    Deadlocks between ranks are found by ``core.step.clock.pipeline_clock``.
    """
    stage_ranks: dict[int, int] = {}
    seen = set[Op]()
    for rank, ops in enumerate(schedule.ranks):
        for op in ops:
            if op in seen:
                raise ScheduleError(f"{op} occurs twice")
            if stage_ranks.setdefault(op.stage, rank) != rank:
                raise ScheduleError(
                    f"{op} is listed on rank {rank}, but other ops of stage {op.stage} on rank {stage_ranks[op.stage]}"
                )
            seen.add(op)
    if schedule.whole and schedule.num_stages > 1:
        raise ScheduleError(
            f"S (forward and backward in one op) needs one stage; this schedule has {schedule.num_stages}"
        )
    _check_complete(schedule, seen)
    with_moves = any(not op.computes for op in seen)
    for rank, ops in enumerate(schedule.ranks):
        done = set[Op]()
        for op in ops:
            for need in _needs_in_list(schedule, op, with_moves):
                if need not in done:
                    raise ScheduleError(f"rank {rank} lists {op} before {need}, which it needs")
            done.add(op)


def _check_complete(schedule: Schedule, present: set[Op]) -> None:
    """Raise ScheduleError unless every computation occurs, and every transfer if any does."""
    expected = set[Op]()
    if schedule.num_stages * schedule.num_micro_batches > len(present):  # one is missing, and the search is short
        kind: OpKind = "S" if schedule.whole else "F"
        every = (
            Op(stage, kind, at) for stage in range(schedule.num_stages) for at in range(schedule.num_micro_batches)
        )
        raise ScheduleError(f"{next(op for op in every if op not in present)} never runs")
    for stage in range(schedule.num_stages):
        for at in range(schedule.num_micro_batches):
            if schedule.whole:
                expected.add(Op(stage, "S", at))
                continue
            expected |= {Op(stage, "F", at), *([schedule.backward(stage, at)] if schedule.trains else [])}
            if (stage, at) in schedule.splits:
                expected.add(Op(stage, "W", at))
    for op in sorted(expected - present):
        raise ScheduleError(f"{op} never runs")
    if any(not op.computes for op in present):
        for op in list(expected):
            for transfer in schedule.departures(op):
                expected |= set(ends(transfer))
        for op in sorted(expected - present):
            raise ScheduleError(
                f"{op} is missing: stages {op.transfer.source} and {op.transfer.target} lie on different ranks"
            )
    for op in sorted(present - expected):
        raise ScheduleError(f"{op} does not belong to this schedule: {_why_not(schedule, op)}")


def _why_not(schedule: Schedule, op: Op) -> str:
    if schedule.whole:
        return "S is already forward and backward in one op"
    if op.computes:
        return "its backward is split into I and W" if op.kind == "B" else "the backward is not split: it has no I"
    return f"no tensor crosses ranks from stage {op.transfer.source} to stage {op.transfer.target}"


def _needs_in_list(schedule: Schedule, op: Op, with_moves: bool) -> list[Op]:
    if op.computes:
        return schedule.local_needs(op) + [ends(transfer)[1] for transfer in schedule.arrivals(op) if with_moves]
    stage, at = op.stage, op.micro_batch
    return [Op(stage, "F", at) if op.forward else schedule.backward(stage, at)] if op.sends else []


def ends(transfer: Transfer) -> tuple[Op, Op]:
    """Return the (SEND, RECV) ops of a transfer."""
    source, target, direction, at = transfer
    return Op(source, cast(OpKind, f"SEND_{direction}"), at, target), Op(
        target, cast(OpKind, f"RECV_{direction}"), at, source
    )


def with_edges(schedule: Schedule, edges: Iterable[Edge]) -> Schedule:
    """Return the same computations for a graph with these edges (a chain's and skip connections');
    the schedule must not have transfers yet."""
    return replace(schedule, edges=tuple(sorted(set(edges))))


def with_transfers(schedule: Schedule, ahead: int = 2, *, proven: bool = False) -> Schedule:
    """Return the schedule with every transfer written out: sent right after its op, its receive
    posted ``ahead`` computations before its reader.

    Posting a receive earlier keeps a buffer longer and, on NCCL, a waiting kernel. Posting it later
    delays the transfer if sender and receiver must meet (rendezvous). Two computations are one
    forward and one backward, a whole period of the steady state. A channel's receives stand in the
    sender's order: one that is overtaken is posted with the one that overtook it. proven: True if
    the schedule's generator guarantees complete lists in a legal order, so that no check is needed.
    """
    if not proven:
        check(schedule)
    leaving = [[schedule.departures(op) for op in ops] for ops in schedule.ranks]
    readers = {
        transfer: at for ops in schedule.ranks for at, op in enumerate(ops) for transfer in schedule.arrivals(op)
    }
    channels: dict[tuple[int, int], list[Transfer]] = {}  # from rank to rank, in the sender's order
    for rank, each in enumerate(leaving):
        for transfers in each:
            for transfer in transfers:
                channels.setdefault((rank, schedule.rank_of[transfer.target]), []).append(transfer)
    posts: list[dict[int, list[Op]]] = [{} for _ in schedule.ranks]
    for (_, receiver), transfers in channels.items():
        latest = len(schedule.ranks[receiver])
        for transfer in reversed(transfers):
            latest = min(latest, max(0, readers[transfer] - ahead))
            posts[receiver].setdefault(latest, []).insert(0, ends(transfer)[1])
    ranks: list[tuple[Op, ...]] = []
    for ops, each, posted in zip(schedule.ranks, leaving, posts, strict=True):
        lowered: list[Op] = []
        for at, (op, transfers) in enumerate(zip(ops, each, strict=True)):
            lowered += [*posted.get(at, ()), op, *(ends(transfer)[0] for transfer in transfers)]
        ranks.append(tuple(lowered))
    return replace(schedule, ranks=tuple(ranks))

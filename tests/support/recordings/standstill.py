"""A small simulator of ranks that run random programs over groups, with one planted fault, up to
the moment at which a watchdog looks: what evidence it would find, and what is true.

A job is pp stages x dp replicas x tp ranks; a step is forward and backward of micro-batches with
messages between stages, all-reduces inside tp groups, some of them asynchronous, then one over each
dp group and one over all ranks. A collective is over once all members have begun it, if they live
and their hosts are connected.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from plait.core.record.ring import RingGroup, signature_of
from plait.core.runs.evidence import Call, CallSequence, Evidence

DEADLINE = 10.0
SECOND = 10**9
KEPT = 4
"""Calls of a channel that evidence holds beside those that are open."""


@dataclass(frozen=True)
class Op:
    """What a rank does: ``compute`` for seconds, ``begin`` a call, ``wait`` for one begun (by its
    place in the program), or one of the faults ``die``, ``stop``, ``loop``, ``hold``."""

    do: str
    seconds: float = 0.0
    channel: CallSequence | None = None
    verb: str = ""
    dtype: str = "float32"
    elements: int = 0
    of: int = -1
    status: int = 0


@dataclass
class Job:
    """Programs over groups. hosts: of each rank, by number."""

    pp: int
    dp: int
    tp: int
    per_host: int
    programs: list[list[Op]] = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def host(self, rank: int) -> int:
        return rank // self.per_host

    def at(self, stage: int, replica: int, place: int) -> int:
        return (stage * self.dp + replica) * self.tp + place


def draw_job(draw: random.Random) -> Job:
    """Of 2 to 36 ranks on at least two hosts."""
    while True:
        job = Job(
            draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4])
        )
        if 2 <= job.world <= 36 and job.world > job.per_host:
            break
    layers, micro, steps = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3)
    eager = draw.random() < 0.5
    job.programs = [
        _program(job, stage, replica, place, layers, micro, steps, eager)
        for stage in range(job.pp) for replica in range(job.dp) for place in range(job.tp)
    ]  # fmt: skip
    return job


def group(job: Job, axis: str, stage: int, replica: int, place: int) -> RingGroup:
    ranks = {
        "tp": [job.at(stage, replica, other) for other in range(job.tp)],
        "dp": [job.at(stage, other, place) for other in range(job.dp)],
        "pp": [job.at(other, replica, place) for other in range(job.pp)],
        "world": list(range(job.world)),
    }[axis]
    ordinal = 1 if axis != "world" and len(ranks) == job.world else 0
    return RingGroup(tuple(ranks), ordinal + (axis == "dp" and job.tp == 1 and ordinal), axis)


def _program(
    job: Job, stage: int, replica: int, place: int, layers: int, micro: int, steps: int, eager: bool
) -> list[Op]:
    ops: list[Op] = []
    me = job.at(stage, replica, place)

    def call(axis: str, verb: str, elements: int, *, later: bool = False, peer: int = -1, sends: bool = False) -> int:
        found = group(job, axis, stage, replica, place)
        if len(found.ranks) < 2:
            return -1
        ends = ((me, peer) if sends else (peer, me)) if peer >= 0 else (-1, -1)
        ops.append(Op("begin", channel=CallSequence(found, *ends), verb=verb, elements=elements))
        begun = len(ops) - 1
        if not later:
            ops.append(Op("wait", of=begun))
        return begun

    def message(other: int, *, sends: bool) -> None:
        if 0 <= other < job.pp:
            call("pp", "message", 64, peer=job.at(other, replica, place), sends=sends, later=sends and eager)

    for _ in range(steps):
        pending: list[int] = []
        for onward in (True, False):
            for _ in range(micro):
                message(stage - 1 if onward else stage + 1, sends=False)
                for layer in range(layers):
                    ops.append(Op("compute", 0.01 * (1 + layer)))
                    begun = call("tp", "all_reduce", 128 * (1 + layer), later=eager)
                    if eager and begun >= 0:
                        ops.append(Op("compute", 0.01))
                        ops.append(Op("wait", of=begun))
                message(stage + 1 if onward else stage - 1, sends=True)
        pending.append(call("dp", "reduce_scatter", 1024, later=True))
        ops.append(Op("compute", 0.02))
        ops += [Op("wait", of=begun) for begun in pending if begun >= 0]
        call("world", "all_reduce", 1)
        call("dp", "all_gather", 1024)
    return ops


@dataclass
class Rank:
    """Where a rank is."""

    at: int = 0
    moved: float = 0.0
    calls: list[dict[str, Any]] = field(default_factory=list)
    begun: dict[int, tuple[CallSequence, int]] = field(default_factory=dict)
    thread: str = "works"
    state: str = "runs"
    status: int | None = None
    ended_at: float = 0.0
    error: str = ""


class Standstill:
    """Runs a job until nothing moves any more, or until ``until``."""

    def __init__(self, job: Job, *, cut: tuple[float, set[frozenset[int]]] | None = None, until: float = 1e9) -> None:
        self.job, self.cut, self.until = job, cut, until
        self.ranks = [Rank() for _ in range(job.world)]
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Any]] = []
        self._begun: dict[tuple[CallSequence, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        self._next: dict[tuple[int, CallSequence], int] = defaultdict(int)
        self._over: set[tuple[CallSequence, int]] = set()
        self._blocked: dict[tuple[CallSequence, int], list[int]] = defaultdict(list)
        for rank in range(job.world):
            self._later(0.0, ("go", rank))
        while self._events and self._events[0][0] <= until:
            self.now, _, (what, which) = heapq.heappop(self._events)
            self._go(which) if what == "go" else self._complete(which)

    def _later(self, seconds: float, event: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _go(self, number: int) -> None:
        rank, program = self.ranks[number], self.job.programs[number]
        rank.thread, rank.moved = "works", self.now
        while rank.at < len(program):
            op = program[rank.at]
            if op.do in ("die", "stop", "loop", "hold"):
                rank.state = {"die": "ended", "stop": "stopped"}.get(op.do, "runs")
                rank.thread = "silent" if op.do == "hold" else "works"
                rank.status, rank.ended_at = (op.status if op.do == "die" else None), self.now
                return
            if op.do == "wait":
                key = rank.begun[op.of]
                if key not in self._over:
                    rank.thread = "waits"
                    self._blocked[key].append(number)
                    return
            rank.at += 1
            if op.do == "begin":
                self._begin(number, op)
            if op.do == "compute":
                self._later(op.seconds, ("go", number))
                return
        rank.state, rank.status, rank.thread, rank.ended_at = "ended", 0, "unknown", self.now

    def _begin(self, number: int, op: Op) -> None:
        assert op.channel is not None
        rank, sequence = self.ranks[number], self._next[number, op.channel]
        self._next[number, op.channel] += 1
        key = (op.channel, sequence)
        call: dict[str, Any] = {
            "channel": op.channel, "sequence": sequence, "verb": op.verb, "dtype": op.dtype, "bytes": 4 * op.elements,
            "signature": signature_of(op.verb, op.dtype, op.elements), "enqueued": self.now, "ended": 0.0,
        }  # fmt: skip
        rank.calls.append(call)
        rank.begun[rank.at - 1] = key
        self._begun[key][number] = call
        if len(self._begun[key]) == len(self._members(op.channel)):
            self._later(0.001, ("complete", key))

    @staticmethod
    def _members(channel: CallSequence) -> tuple[int, ...]:
        return channel.group.ranks if channel.source < 0 else (channel.source, channel.target)

    def _complete(self, key: tuple[CallSequence, int]) -> None:
        calls, members = self._begun[key], self._members(key[0])
        if any(self.ranks[rank].state != "runs" and self.ranks[rank].status != 0 for rank in members):
            return
        if len({call["signature"] for call in calls.values()}) > 1:
            return
        if self.cut and self.now >= self.cut[0]:
            hosts = {self.job.host(rank) for rank in members}
            if any(pair <= hosts for pair in self.cut[1]):
                return
        if key[1] and (key[0], key[1] - 1) not in self._over:
            return
        self._over.add(key)
        for call in calls.values():
            call["ended"] = self.now
        for rank in self._blocked.pop(key, ()):
            self._later(0.0, ("go", rank))
        after = (key[0], key[1] + 1)  # which may have waited for this one
        if len(self._begun.get(after, {})) == len(members):
            self._later(0.001, ("complete", after))

    def evidence(self, draw: random.Random, after: float = 1.2) -> list[Evidence]:
        """What a watchdog finds that looks once the deadline is over, or several; each host has a
        clock of its own."""
        now = self.until if self.until < 1e9 else self.now + after * DEADLINE
        zero = {host: draw.uniform(100.0, 1e6) for host in range(self.job.world)}
        return [self._evidence(number, now, zero[self.job.host(number)]) for number in range(self.job.world)]

    def _evidence(self, number: int, now: float, zero: float) -> Evidence:
        rank, seen, kept = self.ranks[number], defaultdict[CallSequence, int](int), []
        for call in reversed(rank.calls):
            if call["ended"]:
                seen[call["channel"]] += 1
            if not call["ended"] or seen[call["channel"]] <= KEPT:
                known = {"enqueued": True, "ended": call["ended"] > 0}
                times: dict[str, Any] = {name: int((call[name] + zero) * SECOND) * known[name]
                         for name in ("enqueued", "ended")}  # fmt: skip
                kept.append(Call(**call | times))
        missed, reached = self._reach(number)
        fields: dict[str, Any] = {"state": rank.state, "thread": rank.thread}
        return Evidence(
            rank=number, host=f"host {self.job.host(number)}", status=rank.status, ended_at=rank.ended_at,
            doing="step 1", at=int((now + zero) * SECOND), calls=tuple(reversed(kept)), error=rank.error,
            missed=missed, reached=reached, moved=int((rank.moved + zero) * SECOND), **fields,
        )  # fmt: skip

    def _reach(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rank, job = self.ranks[number], self.job
        if rank.state != "runs" or rank.thread == "silent":
            return (), ()
        others = [other for other in range(job.world) if job.host(other) != job.host(number)]
        broken = self.cut[1] if self.cut and self.cut[0] <= self.now else set[frozenset[int]]()
        missed = [other for other in others if frozenset((job.host(number), job.host(other))) in broken]
        return tuple(missed), tuple(other for other in others if other not in missed)

    def close_connections(self, draw: random.Random) -> None:
        """Ranks that were in a call with one that died fail, a little later."""
        dead = {number for number, rank in enumerate(self.ranks) if rank.state == "ended" and rank.status}
        for rank in self.ranks:
            open_calls = [call for call in rank.calls if not call["ended"]]
            near = any(dead & set(self._members(call["channel"])) for call in open_calls)
            if rank.state == "runs" and near and draw.random() < 0.5:
                rank.state, rank.status, rank.ended_at = "ended", 1, self.now + draw.uniform(0.05, 1)
                rank.error = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"


def insert(program: list[Op], at: int, op: Op) -> list[Op]:
    """The program with an op more; waits still mean the same calls."""
    moved = [replace(one, of=one.of + (one.of >= at)) if one.do == "wait" else one for one in program]
    return [*moved[:at], op, *moved[at:]]


def without(program: list[Op], at: int) -> list[Op]:
    """The program without the call that begins at a place, and without its wait."""
    gone = sorted({at, *(i for i, one in enumerate(program) if one.do == "wait" and one.of == at)})
    kept = [one for i, one in enumerate(program) if i not in gone]
    return [
        replace(one, of=one.of - sum(i < one.of for i in gone)) if one.do == "wait" else one for one in kept
    ]  # fmt: skip

"""What every rank does to carry out a list of messages, and the proof that it ends.

A rank works through the messages that it sends or receives, in the list's order (``script``); ``check`` runs
all scripts with rendezvous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from plait.core.base.errors import ReshardError
from plait.core.reshard.plan import Message, ReshardPlan

# Messages a rank posts ahead, in each direction: bounds staging memory; enough that a link never waits for a
# rank
WINDOW = 4


def check(plan: ReshardPlan, listed: Sequence[Message], window: int = WINDOW) -> None:
    """Raise ReshardError, naming the message, unless ``listed`` carries out ``plan``.

    Every receiver gets every element of its box once; nobody sends what it has not got earlier in the list;
    and run with rendezvous, ``window`` messages ahead, the list ends.
    """
    got: dict[tuple[int, int], _Ranges] = {}
    for message in listed:
        task = plan.steps[message.step].task
        size = task.box.elements
        if not 0 <= message.start < message.stop <= size:
            raise ReshardError(f"{message} leaves its box of {size} elements.")
        have = got.get((message.step, message.src))
        if message.src not in task.holders and not (have and have.covers(message.start, message.stop)):
            raise ReshardError(f"{message}: rank {message.src} sends what it has not got yet.")
        if message.dst not in task.receivers or not got.setdefault((message.step, message.dst), _Ranges()).add(
            message.start, message.stop
        ):
            raise ReshardError(f"{message}: rank {message.dst} needs no such elements, or has them already.")
    for number, step in enumerate(plan.steps):
        for receiver in step.task.receivers:
            if not got.setdefault((number, receiver), _Ranges()).covers(0, step.task.box.elements):
                raise ReshardError(f"Rank {receiver} does not get all of {step.task.box}, step {number}.")
    waiting = unfinished(listed, window)
    if waiting:
        raise ReshardError(f"Deadlock: {len(waiting)} messages never end, the first is {waiting[0]}.")


class _Ranges:
    """A set of integers as disjoint ranges."""

    def __init__(self) -> None:
        self.stops: dict[int, int] = {}  # start -> stop, neighbours joined
        self.starts: dict[int, int] = {}  # stop -> start

    def covers(self, start: int, stop: int) -> bool:
        return any(a <= start and stop <= b for a, b in self.stops.items())

    def add(self, start: int, stop: int) -> bool:
        """Add a range; False if it overlaps what is there."""
        if any(a < stop and start < b for a, b in self.stops.items()):
            return False
        if start in self.starts:
            start = self.starts.pop(start)
            del self.stops[start]
        if stop in self.stops:
            stop = self.stops.pop(stop)
            del self.starts[stop]
        self.stops[start], self.starts[stop] = stop, start
        return True


class Act(NamedTuple):
    """What a rank does next with message ``number`` of the list: post its receive, post its send, or wait for
    it to end."""

    verb: Literal["receive", "send", "wait"]
    number: int


def script(listed: Sequence[Message], rank: int, window: int = WINDOW, *, in_order: bool = False) -> list[Act]:
    """What ``rank`` does, from first to last.

    Receives are posted in list order, ``window`` of them ahead of those that have ended. Sends are posted in
    list order, each as soon as what it forwards is there and fewer than ``window`` are under way. Otherwise
    the rank waits: for its next receive if that is all that its next send lacks, else for whichever of its
    next receive and its oldest send stands earlier in the list.

    in_order: sends and receives are posted in one order, the list's. Where a receive is a kernel that holds
    up what is posted after it, one that was posted ahead could hold up the send that its own sender waits
    for.
    """
    receives = [number for number, message in enumerate(listed) if message.dst == rank]
    sends = [number for number, message in enumerate(listed) if message.src == rank]
    lacks = _receives_needed(listed, receives, sends)
    acts: list[Act] = []
    sending: deque[int] = deque()
    posted = ended = sent = 0
    while ended < len(receives) or sent < len(sends) or sending:
        ahead = receives[posted : ended + window]
        if in_order and sent < len(sends):
            ahead = [number for number in ahead if number < sends[sent]]
        posted += len(ahead)
        acts += [Act("receive", number) for number in ahead]
        room = sent < len(sends) and len(sending) < window
        if in_order and room and posted < len(receives):
            room = sends[sent] < receives[posted]
        if room and lacks[sent] <= ended:
            sending.append(sends[sent])
            acts.append(Act("send", sends[sent]))
            sent += 1
        elif ended < len(receives) and (room or not sending or receives[ended] < sending[0]):
            acts.append(Act("wait", receives[ended]))
            ended += 1
        else:
            acts.append(Act("wait", sending.popleft()))
    return acts


def _receives_needed(listed: Sequence[Message], receives: list[int], sends: list[int]) -> list[int]:
    """For every send, how many of the rank's receives must have ended before: all up to the last that brings
    a part of it."""
    brought: dict[int, list[tuple[int, int]]] = {}
    for count, number in enumerate(receives, 1):
        brought.setdefault(listed[number].step, []).append((count, number))
    exact = {listed[number][2:]: (count, number) for count, number in enumerate(receives, 1)}
    found: list[int] = []
    for number in sends:
        message = listed[number]
        whole = exact.get(message[2:])
        parts = [whole] if whole else brought.get(message.step, ())
        found.append(max((count for count, at in parts if at < number and _overlap(listed[at], message)), default=0))
    return found


def _overlap(one: Message, other: Message) -> bool:
    return one.start < other.stop and other.start < one.stop


def unfinished(
    listed: Sequence[Message], window: int = WINDOW, scripts: Mapping[int, Sequence[Act]] | None = None
) -> list[Message]:
    """The messages that never end if one ends only when both its sides are posted: none, or there is a
    deadlock.

    scripts: what ranks do, if not what `script` says.
    """
    ranks = {rank for message in listed for rank in message[:2]}
    todo = {
        rank: deque(scripts[rank] if scripts and rank in scripts else script(listed, rank, window)) for rank in ranks
    }
    posted = [0] * len(listed)
    active = ranks
    while active:
        acts = todo[active.pop()]
        while acts and (acts[0].verb != "wait" or posted[acts[0].number] == 2):
            verb, number = acts.popleft()
            if verb != "wait":
                posted[number] += 1
                if posted[number] == 2:
                    active |= {listed[number].src, listed[number].dst}
    return [message for message, sides in zip(listed, posted, strict=True) if sides < 2]

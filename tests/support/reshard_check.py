"""The proof that a list of messages carries out a reshard plan, and ends: all scripts run with
rendezvous."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from plait.core.base.errors import ReshardError
from plait.core.reshard.plan import WINDOW, Act, Message, ReshardPlan, script


def check(plan: ReshardPlan, listed: Sequence[Message], window: int = WINDOW) -> None:
    """Raise ReshardError, naming the message, unless ``listed`` carries out ``plan``.

    Every receiver gets every element of its box once; nobody sends what it has not got earlier in
    the list; and run with rendezvous, ``window`` messages ahead, the list ends.
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


def unfinished(
    listed: Sequence[Message], window: int = WINDOW, scripts: Mapping[int, Sequence[Act]] | None = None
) -> list[Message]:
    """The messages that never end if one ends only when both its sides are posted: none, or there
    is a deadlock.

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

"""What every rank does to carry out a list of messages: it works through those that it sends or receives, in
the list's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from plait.core.reshard.plan import Message

# Messages a rank posts ahead, in each direction: bounds staging memory; enough that a link never waits for a
# rank
WINDOW = 4


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

"""Lists of segment actions in virtual time, on a rank whose processor and stream run
undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plait.core.step.orders.segment_costs import Durations, SegmentCosts
from plait.core.step.orders.streams import TP, CollectiveFlight, Rank
from plait.core.step.segments import Action, SegmentGraph, SegmentOp


class TimedAction(NamedTuple):
    """An action, in seconds from the start of the micro-batch. A collective's own time stands under
    its start; a wait's is what is exposed."""

    action: Action
    start: float
    end: float


def timed(graph: SegmentGraph, actions: Sequence[Action], costs: SegmentCosts, batch: int) -> list[TimedAction]:
    """When each action of a list begins and ends."""
    durations, rank = Durations(graph, costs, batch), Rank((1.0, 1.0))
    flights: dict[SegmentOp, CollectiveFlight] = {}
    placed = list[TimedAction]()
    for action in actions:
        verb, op = action
        start = rank.now
        if verb == "run":
            rank.compute(durations.compute(op))
        elif verb == "start":
            flights[op] = rank.start(TP, durations.collective(op), 0)
        else:
            rank.wait(flights[op])
        placed.append(TimedAction(action, start, rank.now))
    for flight in flights.values():
        rank.wait(flight)
    moved = {Action("start", op): (flight.began or 0.0, flight.ended or 0.0) for op, flight in flights.items()}
    return [TimedAction(one.action, *moved.get(one.action, one[1:])) for one in placed]


def makespan(placed: Sequence[TimedAction]) -> float:
    """Seconds until the last op or collective ends."""
    return max((one.end for one in placed), default=0.0)

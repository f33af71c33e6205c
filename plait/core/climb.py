"""Improving an order of segment ops by moving one at a time (hill climbing).

A list scheduler decides from moment to moment and never looks back. Near the point where communication takes
as long as computation that costs it 3 to 8 % (an exact solver finds orders so much shorter); a few hundred
random moves win half of it back or more. The same orders on every rank: moves come from a fixed seed, their
number from the number of ops.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from plait.core.segment_costs import NumberedOps, SegmentCosts
from plait.core.segments import SegmentGraph

MOVES = 250
VISITS = 60_000
"""Moves times ops at most: an order of thousands of ops is hardly moved, one of hundreds as far as it
goes."""


class Climber:
    """Judges and improves orders of a graph's ops, given as their numbers in ``graph.ops()``.

    costs: an order is worth the sum of its seconds under all of these. held_back: weight gradients that may
    be outstanding at once, unless the order that is improved already has more.
    """

    def __init__(self, graph: SegmentGraph, costs: Sequence[SegmentCosts], batch: int, held_back: int) -> None:
        numbered = NumberedOps(graph)
        self.ops, self._travels, self.held_back = numbered.ops, numbered.travels, held_back
        self._before = [frozenset(source for source, _ in needs) for needs in numbered.needs]
        self._awaits = [[source for source, collective in needs if collective] for needs in numbered.needs]
        self._seconds = [numbered.seconds(each, batch) for each in costs]
        self._outstanding = [0] * len(self.ops)  # how many weight gradients more wait to be run after each op
        for i, op in enumerate(self.ops):
            if op.kind == "W":
                sources = [source for source in self._before[i] if self.ops[source].kind != "W"]
                for source in sources:
                    self._outstanding[source] += 1
                self._outstanding[i] -= len(sources)

    def seconds(self, order: Sequence[int]) -> float:
        """Sum over the costs of when the last op or collective ends; as ``simulate`` has it."""
        return sum(self._end(order, compute, wire) for compute, wire in self._seconds)

    def _end(self, order: Sequence[int], compute: list[float], wire: list[float]) -> float:
        arrived, now, link = [0.0] * len(compute), 0.0, 0.0
        for i in order:
            for source in self._awaits[i]:
                if arrived[source] > now:  # max() would take a third of the time that orders take to be found
                    now = arrived[source]
            now += compute[i]
            if self._travels[i]:
                link = arrived[i] = (now if now > link else link) + wire[i]
        return max(now, link)

    def improve(self, order: Sequence[int]) -> list[int]:
        """The order after up to ``MOVES`` moves of one op to another legal place, those kept that do not make
        it longer."""
        best, draw = list(order), random.Random(0)
        seconds, bound = self.seconds(best), self._bound()
        held_back = max(self.held_back, self._most_outstanding(best))
        for _ in range(min(MOVES, VISITS // max(1, len(best)))):
            if seconds <= bound * 1.001:
                break
            moved = self._move(best, draw)
            if (taken := self.seconds(moved)) <= seconds and self._most_outstanding(moved) <= held_back:
                best, seconds = moved, taken
        return best

    def _bound(self) -> float:
        """No order takes less: all of the computation, or all of the communication."""
        return sum(max(sum(compute), sum(wire)) for compute, wire in self._seconds)

    def _move(self, order: list[int], draw: random.Random) -> list[int]:
        """Some op at some other place between what it needs and what needs it."""
        place = low = high = draw.randrange(len(order))
        op = order[place]
        while low > 0 and order[low - 1] not in self._before[op]:
            low -= 1
        while high < len(order) - 1 and op not in self._before[order[high + 1]]:
            high += 1
        moved = order[:place] + order[place + 1 :]
        moved.insert(draw.randint(low, high), op)
        return moved

    def _most_outstanding(self, order: Sequence[int]) -> int:
        now = most = 0
        for i in order:
            now += self._outstanding[i]
            most = max(most, now)
        return most

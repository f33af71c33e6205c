"""Improving an order of segment ops by moving one at a time (hill climbing).

A list scheduler decides from moment to moment and never looks back. Near the point where communication takes
as long as computation that costs it 3 to 8 % (an exact solver finds orders so much shorter); a few hundred
random moves win half of it back or more. In an order of thousands of ops a move is made in every layer at
once (``repeats``). The same orders on every rank: moves come from a fixed seed, their number from the number
of ops.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf

from plait.core.segment_costs import NumberedOps, SegmentCosts

MOVES = 250
VISITS = 60_000
"""Moves times ops at most: an order of thousands of ops is hardly moved, one of hundreds as far as it
goes."""


class Judge:
    """What an order of a graph's ops, given as their numbers, is worth.

    costs: an order is worth the sum of its seconds under all of these. held_back: weight gradients that may
    be outstanding at once.
    """

    def __init__(self, numbered: NumberedOps, costs: Sequence[SegmentCosts], batch: int, held_back: int) -> None:
        self.numbered, self.held_back, ops = numbered, held_back, numbered.ops
        self.awaits = [[source for source, collective in needs if collective] for needs in numbered.needs]
        self.costs = [numbered.seconds(each, batch) for each in costs]
        self.outstanding = [0] * len(ops)  # how many weight gradients more wait to be run after each op
        for i, weight in enumerate(numbered.weight):
            if weight:
                sources = [source for source, _ in numbered.needs[i] if not numbered.weight[source]]
                for source in sources:
                    self.outstanding[source] += 1
                self.outstanding[i] -= len(sources)

    @cached_property
    def bound(self) -> float:
        """No order is worth less: all of the computation, or all of the communication."""
        return sum(max(sum(compute), sum(wire)) for compute, wire in self.costs)

    @property
    def enough(self) -> float:
        """An order that is worth no more than this is not improved."""
        return self.bound * 1.001

    def seconds(self, order: Sequence[int], limit: float = inf) -> float:
        """Sum over the costs of when the last op or collective ends; as ``simulate`` has it. Infinite as soon
        as it is known to be above the limit."""
        found = 0.0
        for cost, rest in zip(self.costs, self._rests, strict=True):
            found += max(self.run(order, *cost, [0.0] * len(order)))
            if found + rest > limit:
                return inf
        return found

    @cached_property
    def _rests(self) -> list[float]:
        """What the costs after each take at least, less what rounding may do."""
        least = [max(sum(compute), sum(wire)) * (1 - 1e-9) for compute, wire in self.costs]
        return [sum(least[at + 1 :]) for at in range(len(least))]

    def run(
        self,
        order: Sequence[int],
        compute: list[float],
        wire: list[float],
        arrived: list[float],
        now: float = 0.0,
        link: float = 0.0,
    ) -> tuple[float, float]:
        """When the processor and the link are done with some ops, from when they were before. arrived: when
        each op's collective ended, is kept up to date."""
        awaits, travels = self.awaits, self.numbered.travels
        for i in order:
            for source in awaits[i]:
                if arrived[source] > now:  # max() would take a third of the time that orders take to be found
                    now = arrived[source]
            now += compute[i]
            if travels[i]:
                link = arrived[i] = (now if now > link else link) + wire[i]
        return now, link

    def most_outstanding(self, order: Sequence[int]) -> int:
        """Weight gradients whose operands are there, at most."""
        outstanding = self.outstanding
        return max(accumulate([outstanding[i] for i in order], initial=0))

    def improve(self, order: Sequence[int]) -> list[int]:
        """The order after up to ``MOVES`` moves. It has no more weight gradients outstanding than it had, or
        than may be."""
        held_back = max(self.held_back, self.most_outstanding(order))

        def worth(moved: Sequence[int], limit: float) -> float:
            seconds = self.seconds(moved, limit)
            return seconds if seconds <= limit and self.most_outstanding(moved) <= held_back else inf

        before = [frozenset(source for source, _ in needs) for needs in self.numbered.needs]
        return climb(order, before, worth, min(MOVES, VISITS // max(1, len(order))), self.enough)


def climb(
    order: Sequence[int],
    before: Sequence[Collection[int]],
    worth: Callable[[Sequence[int], float], float],
    moves: int,
    enough: float,
) -> list[int]:
    """The order after so many moves of one op to another legal place, those kept that do not make it worse.

    before: by op, what must stand before it. worth: of an order, less is better; what is above the limit that
    it is given need not be exact. enough: no more moves once the order is worth this.
    """
    best, draw = list(order), random.Random(0)
    value = worth(best, inf)
    for _ in range(moves):
        if value <= enough:
            break
        moved = _move(best, before, draw)
        if (taken := worth(moved, value)) <= value:
            best, value = moved, taken
    return best


def _move(order: list[int], before: Sequence[Collection[int]], draw: random.Random) -> list[int]:
    """Some op at some other place between what it needs and what needs it."""
    place = low = high = draw.randrange(len(order))
    op = order[place]
    while low > 0 and order[low - 1] not in before[op]:
        low -= 1
    while high < len(order) - 1 and op not in before[order[high + 1]]:
        high += 1
    moved = order[:place] + order[place + 1 :]
    moved.insert(draw.randint(low, high), op)
    return moved

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

from plait.core.step.clock.streams import ListClock
from plait.core.step.seconds.segment_costs import NumberedOps, SegmentCosts

MOVES = 250
VISITS = 60_000
"""Moves times ops at most: an order of thousands of ops is hardly moved, one of hundreds as far as it
goes."""
STRIDE = 16
"""Ops of an order after each of which is known when it had come so far."""
NOISE = 1e-9
"""The same numbers added in another order differ by a smaller share."""


class Judge:
    """The worth of orders of a graph's ops, given as their numbers.

    costs: an order is worth the sum of its seconds under all of these. held_back: weight gradients that may
    be outstanding at once.
    """

    def __init__(self, numbered: NumberedOps, costs: Sequence[SegmentCosts], batch: int, held_back: int) -> None:
        self.numbered, self.held_back, ops = numbered, held_back, numbered.ops
        self.clocks = [ListClock(numbered, *numbered.seconds(each, batch)) for each in costs]
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
        return sum(clock.bound for clock in self.clocks)

    @property
    def enough(self) -> float:
        """An order that is worth no more than this is not improved."""
        return self.bound * 1.001

    @cached_property
    def least(self) -> float:
        """No order is worth less than about this: as ``bound``, with what can run at no moment sooner."""
        return sum(max(sum(each.wire), _soonest(self.numbered, each)) for each in self.clocks)

    def as_good_as_any(self, order: Sequence[int]) -> bool:
        """Whether no order is worth less, but for noise."""
        seconds = self.seconds(order)
        return seconds <= self.bound * (1 + NOISE) or seconds <= self.least * (1 + NOISE)

    def seconds(self, order: Sequence[int], limit: float = inf) -> float:
        """Sum over the costs of when the last op or collective ends. Infinite as soon as it is known to be
        above the limit."""
        found = 0.0
        for clock, rest in zip(self.clocks, self.rests, strict=True):
            found += max(clock.run(order, [0.0] * len(order)))
            if found + rest > limit:
                return inf
        return found

    @cached_property
    def rests(self) -> list[float]:
        """Least seconds of the costs after each, less what rounding may do."""
        least = [clock.bound * (1 - 1e-9) for clock in self.clocks]
        return [sum(least[at + 1 :]) for at in range(len(least))]

    def most_outstanding(self, order: Sequence[int]) -> int:
        """Weight gradients whose operands are there, at most."""
        outstanding = self.outstanding
        return max(accumulate([outstanding[i] for i in order], initial=0))

    def improve(self, order: Sequence[int]) -> list[int]:
        """The order after up to ``MOVES`` moves. It has no more weight gradients outstanding than it had, or
        than may be."""
        before = [frozenset(source for source, _ in needs) for needs in self.numbered.needs]
        clock = _MovedClock(self, order, max(self.held_back, self.most_outstanding(order)))
        return climb(order, before, clock.worth, min(MOVES, VISITS // max(1, len(order))), self.enough)


def _soonest(numbered: NumberedOps, clock: ListClock) -> float:
    """Lower bound on the end of an order: longest head, all work between, longest tail (Carlier 1982). The
    head of an op is the time of its longest chain of needs, its tail that of what needs it."""
    compute, wire = clock.compute, clock.wire
    begins, follows = [0.0] * len(compute), [0.0] * len(compute)
    for i, sources in enumerate(numbered.needs):
        begins[i] = max([begins[j] + compute[j] + wire[j] * late for j, late in sources], default=0.0)
    for i in reversed(range(len(compute))):
        after = [wire[i] * late + compute[j] + follows[j] for j, late in numbered.feeds[i]]
        follows[i] = max([wire[i] * numbered.travels[i], *after])
    first, last = (_fullest(moments, compute) for moments in (begins, follows))
    between = [compute[i] for i in range(len(compute)) if begins[i] >= first[1] and follows[i] >= last[1]]
    return max(first[0], last[0], first[1] + sum(between) + last[1] if between else 0.0)


def _fullest(moments: Sequence[float], compute: Sequence[float]) -> tuple[float, float]:
    """The most that a moment and the computation on its other side take together, and that moment."""
    found, behind = (0.0, 0.0), 0.0
    for moment, seconds in sorted(zip(moments, compute, strict=True), reverse=True):
        behind += seconds
        found = max(found, (moment + behind, moment))
    return found


_Marks = list[tuple[float, float]]
"""Moments at which the processor and the link are done with the first 0, 1, 2 ... strides of an order."""


class _MovedClock:
    """The worth of an order that differs by a move from one that is known.

    Only what the move changes is timed, up to where the rest can be told: begun at the same moments it ends
    as before, begun later it ends as much later at least. No move is worth another number than if all of it
    was timed.
    """

    def __init__(self, judge: Judge, order: Sequence[int], held_back: int) -> None:
        self.judge, self.held_back, self.order = judge, held_back, order
        self.strides = -(-len(order) // STRIDE)
        self.marks: list[_Marks] = [[(0.0, 0.0)] for _ in judge.clocks]
        self.arrived = [[0.0] * len(order) for _ in judge.clocks]

    def worth(self, moved: Sequence[int], limit: float, changed: range) -> float:
        """The worth, for ``climb``: an order that is worth no more than the limit is known from then on."""
        judge, until = self.judge, changed.stop // STRIDE + 1
        marks = [each[: changed.start // STRIDE + 1] for each in self.marks]
        arrived = [each.copy() for each in self.arrived]
        same = False
        if until < self.strides and limit < inf:
            gaps = list[tuple[float, float]]()
            for at, clock in enumerate(judge.clocks):
                _run(clock, moved, until, marks[at], arrived[at])
                gaps.append(self._gap(at, until, (moved[changed.start], moved[changed.stop]), marks[at], arrived[at]))
            same = all(least == most == 0.0 for least, most in gaps)
            if min(gaps)[0] >= 0.0 and sum(least for least, _ in gaps) > NOISE * limit:
                return inf
        found = limit
        if not same:
            found = 0.0
            for at, (clock, rest) in enumerate(zip(judge.clocks, judge.rests, strict=True)):
                _run(clock, moved, self.strides, marks[at], arrived[at])
                found += max(marks[at][-1])
                if found + rest > limit:
                    return inf
        if judge.most_outstanding(moved) > self.held_back:
            return inf
        self.marks = [each + known[len(each) :] for each, known in zip(marks, self.marks, strict=True)]
        self.order, self.arrived = moved, arrived
        return found

    def _gap(
        self, at: int, until: int, ends: tuple[int, int], marks: _Marks, arrived: list[float]
    ) -> tuple[float, float]:
        """Delays, the least and the largest, of everything that the rest of an order may wait for. ends:
        first and last position that changed; the moved op stands at one of them."""
        (now, link), (then, tied), before = marks[until], self.marks[at][until], self.arrived[at]
        gaps = [now - then, max(link, now) - max(tied, then)]
        travels, order, place = self.judge.numbered.travels, self.order, until * STRIDE
        late = True
        while late and place:
            place -= 1
            i = order[place]
            if travels[i]:  # on the link one after the other: those before have arrived, too
                late = arrived[i] > now or before[i] > then or i in ends
                gaps.append(max(arrived[i], now) - max(before[i], then))
        gaps += [max(arrived[i], now) - max(before[i], then) for i in ends if travels[i]]
        return min(gaps), max(gaps)


def _run(clock: ListClock, order: Sequence[int], until: int, marks: _Marks, arrived: list[float]) -> None:
    """Go on to the end of a stride."""
    for at in range(len(marks) - 1, until):
        marks.append(clock.run(order[at * STRIDE : (at + 1) * STRIDE], arrived, *marks[at]))


def climb(
    order: Sequence[int],
    before: Sequence[Collection[int]],
    worth: Callable[[Sequence[int], float, range], float],
    moves: int,
    enough: float,
) -> list[int]:
    """The order after so many moves of one op to another legal place, those kept that do not make it worse.

    before: by op, what must stand before it. worth: of an order, less is better; it is given a limit, above
    which the number need not be exact, and the places, from start to stop, in which the order differs from
    the last one that was worth no more than its limit. enough: no more moves once the order is worth this.
    """
    best, draw = list(order), random.Random(0)
    value = worth(best, inf, range(len(best) - 1))
    for _ in range(moves):
        if value <= enough:
            break
        moved, changed = _move(best, before, draw)
        if changed and (taken := worth(moved, value, changed)) <= value:
            best, value = moved, taken
    return best


def _move(order: list[int], before: Sequence[Collection[int]], draw: random.Random) -> tuple[list[int], range]:
    """Move some op to some other place between what it needs and what needs it; the order, and from where to
    where it changed."""
    place = low = high = draw.randrange(len(order))
    op = order[place]
    while low > 0 and order[low - 1] not in before[op]:
        low -= 1
    while high < len(order) - 1 and op not in before[order[high + 1]]:
        high += 1
    moved = order[:place] + order[place + 1 :]
    moved.insert(target := draw.randint(low, high), op)
    return moved, range(min(place, target), max(place, target))

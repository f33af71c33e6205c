"""Improvement of an order of segment ops by moving one op at a time (hill climbing).

A list scheduler decides from moment to moment and never revises. If communication takes about as
long as computation, that costs 3 to 8 % (an exact solver finds orders so much shorter). A few
hundred random moves win back half of that or more. In an order of thousands of ops a move is made
in every layer at once (``improve_words``). Every rank finds the same order: moves come from a fixed
seed, and their number depends only on the number of ops.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import NamedTuple

from plait.core.step.orders.segment_costs import NumberedOps, SegmentCosts
from plait.core.step.orders.streams import ListClock

MOVES = 250
VISITS = 60_000
"""Upper bound on moves times ops: an order of thousands of ops gets few moves, an order of hundreds
gets all of them."""
STRIDE = 16
"""Number of ops of an order between two recorded moments, from which timing can be resumed."""
NOISE = 1e-9
"""Relative bound on the rounding error of sums whose terms are added in another order."""


class OrderEvaluator:
    """Evaluation of orders of a graph's ops, given as op numbers.

    costs: an order's value is the sum of its seconds under all of these costs. held_back: weight
    gradients that may be outstanding at once.
    """

    def __init__(self, numbered: NumberedOps, costs: Sequence[SegmentCosts], batch: int, held_back: int) -> None:
        self.numbered, self.held_back, ops = numbered, held_back, numbered.ops
        self.clocks = [ListClock(numbered, *numbered.seconds(each, batch)) for each in costs]
        self.outstanding = [0] * len(ops)  # change in outstanding weight gradients by each op
        for i, weight in enumerate(numbered.weight):
            if weight:
                sources = [source for source, _ in numbered.needs[i] if not numbered.weight[source]]
                for source in sources:
                    self.outstanding[source] += 1
                self.outstanding[i] -= len(sources)

    @cached_property
    def bound(self) -> float:
        """Lower bound on an order's seconds: all of the computation, or all of the
        communication."""
        return sum(clock.bound for clock in self.clocks)

    @property
    def enough(self) -> float:
        """Seconds at or below which an order is not improved."""
        return self.bound * 1.001

    @cached_property
    def least(self) -> float:
        """Tighter lower bound on an order's seconds, up to rounding: as ``bound``, with the
        earliest starts and latest ends that needs allow."""
        return sum(max(sum(each.wire), _soonest(self.numbered, each)) for each in self.clocks)

    def as_good_as_any(self, order: Sequence[int]) -> bool:
        """True if no order is shorter, up to rounding."""
        seconds = self.seconds(order)
        return seconds <= self.bound * (1 + NOISE) or seconds <= self.least * (1 + NOISE)

    def seconds(self, order: Sequence[int], limit: float = inf) -> float:
        """Return the sum over the costs of the moment at which the last op or collective ends.
        Infinite as soon as the sum is known to exceed ``limit``."""
        found = 0.0
        for clock, rest in zip(self.clocks, self.rests, strict=True):
            found += max(clock.run(order, [0.0] * len(order)))
            if found + rest > limit:
                return inf
        return found

    @cached_property
    def rests(self) -> list[float]:
        """For each cost, a lower bound in seconds on the sum of an order's times under all later
        costs, reduced by possible rounding errors."""
        least = [clock.bound * (1 - 1e-9) for clock in self.clocks]
        return [sum(least[at + 1 :]) for at in range(len(least))]

    def most_outstanding(self, order: Sequence[int]) -> int:
        """Return the maximum number of weight gradients whose operands are in memory."""
        outstanding = self.outstanding
        return max(accumulate([outstanding[i] for i in order], initial=0))

    def improve(self, order: Sequence[int]) -> list[int]:
        """Return the order after up to ``MOVES`` hill-climbing moves of one op each; it is never
        slower. It has no more outstanding weight gradients than before, or than ``held_back``
        allows."""
        before = [frozenset(source for source, _ in needs) for needs in self.numbered.needs]
        clock = _MovedClock(self, order, max(self.held_back, self.most_outstanding(order)))
        return climb(order, before, clock.worth, min(MOVES, VISITS // max(1, len(order))), self.enough)


def _soonest(numbered: NumberedOps, clock: ListClock) -> float:
    """Return a lower bound in seconds on the end of any order: longest head, all work between,
    longest tail (Carlier 1982). An op's head is the time of its longest chain of needs; its tail is
    the longest chain of ops that need it."""
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
    """Return (maximum over moments of the moment plus the computation that starts at or after it,
    that moment), in seconds."""
    found, behind = (0.0, 0.0), 0.0
    for moment, seconds in sorted(zip(moments, compute, strict=True), reverse=True):
        behind += seconds
        found = max(found, (moment + behind, moment))
    return found


_Marks = list[tuple[float, float]]
"""Moments at which the processor and the link are done with the first 0, 1, 2 ... strides of an
order."""


class _MovedClock:
    """Evaluation of an order that differs by a move from a known order.

    Only the ops that the move affects are timed, up to where the end can be predicted: ops that
    begin at the same moments end as before; ops that begin later end later by at least as much. The
    values equal those of a full timing.
    """

    def __init__(self, judge: OrderEvaluator, order: Sequence[int], held_back: int) -> None:
        self.judge, self.held_back, self.order = judge, held_back, order
        self.strides = -(-len(order) // STRIDE)
        self.marks: list[_Marks] = [[(0.0, 0.0)] for _ in judge.clocks]
        self.arrived = [[0.0] * len(order) for _ in judge.clocks]

    def worth(self, moved: Sequence[int], limit: float, changed: range) -> float:
        """Return the seconds of an order in which one op has moved, for ``climb``. changed:
        positions that differ from the known order. An order no slower than ``limit`` becomes the
        new known order."""
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
        """Return the least and the largest delay of all events that the remaining ops may wait for.
        ends: first and last position that changed; the moved op is at one of them."""
        (now, link), (then, tied), before = marks[until], self.marks[at][until], self.arrived[at]
        gaps = [now - then, max(link, now) - max(tied, then)]
        travels, order, position = self.judge.numbered.travels, self.order, until * STRIDE
        late = True
        while late and position:
            position -= 1
            i = order[position]
            if travels[i]:  # the link carries one collective at a time: earlier ones have arrived too
                late = arrived[i] > now or before[i] > then or i in ends
                gaps.append(max(arrived[i], now) - max(before[i], then))
        gaps += [max(arrived[i], now) - max(before[i], then) for i in ends if travels[i]]
        return min(gaps), max(gaps)


def _run(clock: ListClock, order: Sequence[int], until: int, marks: _Marks, arrived: list[float]) -> None:
    """Continue the timing of an order to the end of stride ``until``; append to ``marks``, and
    update ``arrived``."""
    for at in range(len(marks) - 1, until):
        marks.append(clock.run(order[at * STRIDE : (at + 1) * STRIDE], arrived, *marks[at]))


def climb(
    order: Sequence[int],
    before: Sequence[Collection[int]],
    worth: Callable[[Sequence[int], float, range], float],
    moves: int,
    enough: float,
) -> list[int]:
    """Return the order after ``moves`` random moves of one op to another legal position; moves that
    make it worse are undone.

    before: by op, the ops that must precede it. worth: value of an order, less is better. It
    receives a limit, above which the value need not be exact. It also receives the range of
    positions that differ from the last order within its limit. enough: value at which moves stop.
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
    """Move a random op to another position between its needs and its consumers; return the order
    and the range of changed positions."""
    position = low = high = draw.randrange(len(order))
    op = order[position]
    while low > 0 and order[low - 1] not in before[op]:
        low -= 1
    while high < len(order) - 1 and op not in before[order[high + 1]]:
        high += 1
    moved = order[:position] + order[position + 1 :]
    moved.insert(target := draw.randint(low, high), op)
    return moved, range(min(position, target), max(position, target))


# ---- repeated parts of lists ----


WORD_MOVES = 200
"""Maximum number of hill-climbing moves in a word, a sequence of ops that an order repeats for each
layer."""
ALL_VISITS = 300_000
"""Budget for improving words (repeated sequences of ops), in ops timed; words that cover most ops
come first."""
TIMES, TIMED = 6, 4
"""TIMES: repetitions that make a sequence of ops a word. TIMED: repetitions that are timed."""
LAGS, PERIODS = 4, 8
"""Candidate periods: distances to the next ops of the same sort, up to the 4th; the 8 most common
are tried."""


class Run(NamedTuple):
    """A range of an order in which a word of ``period`` ops is repeated ``times`` times, from
    position ``start``."""

    start: int
    period: int
    times: int


def runs(sorts: Sequence[int]) -> list[Run]:
    """Return the ranges in which a sequence of op sorts (ops without their layer) repeats itself,
    from left to right, without overlap. Short words are found first, so that two repetitions are
    not taken for one word."""
    found, free = list[Run](), [(0, len(sorts))]
    for period in _periods(sorts):
        inside = [run for low, high in free for run in _repeated(sorts, period, low, high)]
        found += inside
        ends = sorted((run.start, run.start + run.period * run.times) for run in found)
        free = list(zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(sorts)], strict=True))
    return sorted(found)


def _periods(sorts: Sequence[int]) -> list[int]:
    positions: dict[int, list[int]] = defaultdict(list)
    for position, sort in enumerate(sorts):
        positions[sort].append(position)
    distances: Counter[int] = Counter()
    for each in positions.values():
        for lag in range(1, LAGS + 1):
            distances.update(b - a for a, b in zip(each, each[lag:], strict=False))
    return sorted(period for period, _ in distances.most_common(PERIODS))


def _repeated(sorts: Sequence[int], period: int, low: int, high: int) -> Iterator[Run]:
    """Yield the runs of period ``period`` between positions ``low`` and ``high``."""
    start = low
    for position in range(low, high - period + 1):
        if position == high - period or sorts[position] != sorts[position + period]:
            if (times := (position - start) // period + 1) >= TIMES:
                yield Run(start, period, times)
            start = position + 1


def improve_words(judge: OrderEvaluator, order: Sequence[int]) -> list[int]:
    """Return the order after hill-climbing moves in each of its words, the sequences of ops that
    repeat for each layer. It is not longer, and has no more outstanding weight gradients than
    before or than allowed."""
    best, seconds, left = list(order), judge.seconds(order), ALL_VISITS
    held_back = max(judge.held_back, judge.most_outstanding(order))
    for half in (False, True):  # the second pass shifts words by half, so that ops can cross the first pass's borders
        found = runs([judge.numbered.sorts[i] for i in best])
        for run in sorted(found, key=lambda run: -run.period * run.times):
            if seconds <= judge.enough or left <= 0:
                return best
            moved = _improved(judge, best, run, half, held_back)
            if judge.most_outstanding(moved) <= held_back and (taken := judge.seconds(moved)) < seconds:
                best, seconds = moved, taken
            left -= VISITS + 4 * len(best)  # moves, and evaluations of the whole order before and after
    return best


def _improved(judge: OrderEvaluator, order: list[int], run: Run, half: bool, held_back: int) -> list[int]:
    """Return the order with one word's ops moved, in each of its repetitions."""
    width = run.period * max(1, min(2, run.times // TIMES))
    start = run.start + half * (run.period // 2)
    words = [order[at : at + width] for at in range(start, run.start + run.period * run.times - width + 1, width)]
    first = (len(words) - TIMED) // 2
    timed, head = words[first : first + TIMED], order[: start + first * width]
    outstanding = sum(judge.outstanding[i] for i in head)
    entries = [(clock, arrived := [0.0] * len(order), clock.run(head, arrived)) for clock in judge.clocks]

    def worth(positions: Sequence[int], limit: float, _: range) -> float:
        row = [word[position] for word in timed for position in positions]
        seconds = sum(max(clock.run(row, arrived, *entry)) for clock, arrived, entry in entries)
        return seconds if seconds <= limit and outstanding + judge.most_outstanding(row) <= held_back else inf

    positions = climb(range(width), _needs(judge, words), worth, min(WORD_MOVES, VISITS // (TIMED * width)), 0.0)
    moved = [word[position] for word in words for position in positions]
    return order[:start] + moved + order[start + len(moved) :]


def _needs(judge: OrderEvaluator, words: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return, by position in a word, the positions that must precede it in any of the words."""
    before: list[set[int]] = [set() for _ in words[0]]
    for word in words:
        positions = {op: position for position, op in enumerate(word)}
        for op, position in positions.items():
            before[position].update(positions[source] for source, _ in judge.numbered.needs[op] if source in positions)
    return before

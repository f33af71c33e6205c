"""Improving an order of many layers: what is moved in one layer is moved in all.

A list scheduler falls into step after a few layers: from then on the order is a *word* of ops that is
repeated, each time a layer (or two) further. Slices may drift apart meanwhile; then there is a word for the
time in which the first ones go forward, one for when they come back beside others, and so on. Words are found
as they stand in the order, so nothing is assumed of the model's layers; where they differ, words end.

A word is improved by moving single ops inside of it (``climb``), timed over a few of its repetitions. What
has run after each repetition stays what it was, so the rest of the order remains legal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from plait.core.step.orders.climb import Judge, climb

MOVES, VISITS = 200, 60_000
"""Moves in a word at most; moves times ops."""
ALL_VISITS = 300_000
"""Words are improved, those first that most ops are in, until ops have been looked at so often."""
TIMES, TIMED = 6, 4
"""A word is something that is repeated so often; so many of its repetitions are timed."""
LAGS, PERIODS = 4, 8
"""Periods are looked for among the distances to the next ops of the same sort, up to the 4th; the 8 most
common of them."""


class Run(NamedTuple):
    """A place in an order where a word of ``period`` ops stands ``times`` times in a row."""

    start: int
    period: int
    times: int


def runs(sorts: Sequence[int]) -> list[Run]:
    """Places where words are repeated in a row of sorts of ops, from left to right, without overlap. Short
    words come first, so that two repetitions are not taken for one word."""
    found, free = list[Run](), [(0, len(sorts))]
    for period in _periods(sorts):
        inside = [run for low, high in free for run in _repeated(sorts, period, low, high)]
        found += inside
        ends = sorted((run.start, run.start + run.period * run.times) for run in found)
        free = list(zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(sorts)], strict=True))
    return sorted(found)


def _periods(sorts: Sequence[int]) -> list[int]:
    places: dict[int, list[int]] = defaultdict(list)
    for place, sort in enumerate(sorts):
        places[sort].append(place)
    distances: Counter[int] = Counter()
    for each in places.values():
        for lag in range(1, LAGS + 1):
            distances.update(b - a for a, b in zip(each, each[lag:], strict=False))
    return sorted(period for period, _ in distances.most_common(PERIODS))


def _repeated(sorts: Sequence[int], period: int, low: int, high: int) -> Iterator[Run]:
    """The runs of one period between two places."""
    start = low
    for place in range(low, high - period + 1):
        if place == high - period or sorts[place] != sorts[place + period]:
            if (times := (place - start) // period + 1) >= TIMES:
                yield Run(start, period, times)
            start = place + 1


def improve_words(judge: Judge, order: Sequence[int]) -> list[int]:
    """The order after moves in each of its words; not longer, nor with more weight gradients outstanding than
    it had or than may be."""
    best, seconds, left = list(order), judge.seconds(order), ALL_VISITS
    held_back = max(judge.held_back, judge.most_outstanding(order))
    for half in (False, True):  # the second time words begin at another op, so that ops cross where they met
        found = runs([judge.numbered.sorts[i] for i in best])
        for run in sorted(found, key=lambda run: -run.period * run.times):
            if seconds <= judge.enough or left <= 0:
                return best
            moved = _improved(judge, best, run, half, held_back)
            if judge.most_outstanding(moved) <= held_back and (taken := judge.seconds(moved)) < seconds:
                best, seconds = moved, taken
            left -= VISITS + 4 * len(best)  # beside moves an order is walked through, before and after
    return best


def _improved(judge: Judge, order: list[int], run: Run, half: bool, held_back: int) -> list[int]:
    """The order with one word moved, in each of its repetitions."""
    width = run.period * max(1, min(2, run.times // TIMES))
    start = run.start + half * (run.period // 2)
    words = [order[at : at + width] for at in range(start, run.start + run.period * run.times - width + 1, width)]
    first = (len(words) - TIMED) // 2
    timed, head = words[first : first + TIMED], order[: start + first * width]
    outstanding = sum(judge.outstanding[i] for i in head)
    entries = [(clock, arrived := [0.0] * len(order), clock.run(head, arrived)) for clock in judge.clocks]

    def worth(places: Sequence[int], limit: float, _: range) -> float:
        row = [word[place] for word in timed for place in places]
        seconds = sum(max(clock.run(row, arrived, *entry)) for clock, arrived, entry in entries)
        return seconds if seconds <= limit and outstanding + judge.most_outstanding(row) <= held_back else inf

    places = climb(range(width), _needs(judge, words), worth, min(MOVES, VISITS // (TIMED * width)), 0.0)
    moved = [word[place] for word in words for place in places]
    return order[:start] + moved + order[start + len(moved) :]


def _needs(judge: Judge, words: Sequence[Sequence[int]]) -> list[set[int]]:
    """The places that must come before in any of the words. By place in a word."""
    before: list[set[int]] = [set() for _ in words[0]]
    for word in words:
        places = {op: place for place, op in enumerate(word)}
        for op, place in places.items():
            before[place].update(places[source] for source, _ in judge.numbered.needs[op] if source in places)
    return before

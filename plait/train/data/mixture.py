"""Mixtures: which source the sequence of each number comes from, and how many of each source came before.

Shares are exact at every number: after n sequences a source of weight w has given more than n w / W - 1 and
fewer than n w / W + 1 of them, W the sum of all weights. The order is that of earliest deadlines: item j of
a source may stand from place floor(j W / w) on and must stand before place ceil((j + 1) W / w), and of the
items that may stand the one with the earliest deadline does. With shares that add up to one, every item then
meets its deadline (Baruah, Cohen, Plaxton, Varvel: Proportionate Progress, Algorithmica 15, 1996, of which
this is the case of one processor).

The order repeats after W places, so W is kept small: weights are taken as fractions, and as parts of
``MOST`` where that would not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from plait.core.job.data_settings import LEAST_SHARE

MOST = round(1 / LEAST_SHARE)
"""Places after which an order repeats, at most."""
_BLOCK = 1 << 14


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of ``weights``, without a common factor, of a sum up to ``MOST``:
    exactly where decimal weights have such, else to one part in ``MOST``. None is 0.

    >>> whole_weights([0.7, 0.2, 0.1]), whole_weights([3, 1.5]), whole_weights([1e-9, 1])
    ((7, 2, 1), (2, 1), (1, 1048575))
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(one.denominator for one in exact))
    found = [int(one * scale) for one in exact]
    if sum(found) // gcd(*found) > MOST:
        total = sum(exact)
        found = [max(1, int(one / total * MOST)) for one in exact]
        found[found.index(max(found))] += MOST - sum(found)
    return tuple(one // gcd(*found) for one in found)


class Order:
    """An endless order of sources by whole weights; computed as far as it is asked for, and kept.

    >>> Order((3, 1)).sources(0, 8).tolist()
    [0, 0, 0, 1, 0, 0, 0, 1]
    >>> Order((3, 1)).before(6).tolist()
    [5, 1]
    """

    def __init__(self, weights: Sequence[int]) -> None:
        assert weights and min(weights) > 0, f"weights {weights}"
        self.weights, self.period = tuple(weights), sum(weights)
        self._sources = np.empty(0, np.int32)
        self._counts = [0] * len(weights)
        self._blocks = [np.zeros(len(weights), np.int64)]
        """Items of each source before every ``_BLOCK`` places."""

    def sources(self, start: int, count: int) -> np.ndarray:
        """The source of each of the places ``start .. start + count``: int32 [count]."""
        places = np.arange(start, start + count, dtype=np.int64) % self.period
        self._extend(int(places.max()) + 1 if count else 0)
        return self._sources[places]

    def before(self, place: int) -> np.ndarray:
        """How many items of each source stand before a place: int64 [sources]."""
        rounds, rest = divmod(place, self.period)
        self._extend(rest)
        block = rest // _BLOCK
        here = np.bincount(self._sources[block * _BLOCK : rest], minlength=len(self.weights))
        return np.array(self.weights, np.int64) * rounds + self._blocks[block] + here

    def _extend(self, places: int) -> None:
        """Compute the order up to so many places, in blocks."""
        weights, whole, counts = self.weights, self.period, self._counts
        while len(self._sources) < min(places, whole):
            begin = len(self._sources)
            found = np.empty(min(_BLOCK, whole - begin), np.int32)
            for place in range(begin, begin + len(found)):
                best, choice = 0, -1
                for source, weight in enumerate(weights):
                    if counts[source] * whole < (place + 1) * weight:
                        deadline = -(-(counts[source] + 1) * whole // weight)
                        if choice < 0 or deadline < best:
                            best, choice = deadline, source
                counts[choice] += 1
                found[place - begin] = choice
            self._sources = np.concatenate([self._sources, found])
            self._blocks.append(np.array(counts, np.int64))


class Mixture:
    """An order whose weights changed at certain places, as when sources were added.

    phases: (place from which it holds, weights of all sources, 0 for one that is not there yet).

    >>> mixture = Mixture([(0, (1, 0)), (4, (1, 1))])
    >>> [array.tolist() for array in mixture.items(2, 6)]
    [[0, 0, 0, 1, 0, 1], [2, 3, 4, 0, 5, 1]]
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]]) -> None:
        assert phases and phases[0][0] == 0, f"phases {phases}"
        self.phases = [(start, tuple(weights)) for start, weights in phases]
        self._present = [np.flatnonzero(weights) for _, weights in self.phases]
        self._orders = [Order([weights[at] for at in there]) for (_, weights), there in
                        zip(self.phases, self._present, strict=True)]  # fmt: skip
        self._given = [np.zeros(len(self.phases[0][1]), np.int64)]
        """Items of each source before each phase."""
        for number in range(1, len(self.phases)):
            self._given.append(self._before(number - 1, self.phases[number][0]))

    def before(self, place: int) -> np.ndarray:
        """How many items of each source stand before a place: int64 [sources]."""
        return self._before(self._phase(place), place)

    def items(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the places ``start .. start + count``: the source of each, and which of that source's items it
        is; int64 [count] each."""
        sources, items = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while done < count:
            place, number = start + done, self._phase(start + done)
            last = self.phases[number + 1][0] if number + 1 < len(self.phases) else start + count
            here = slice(done, min(count, done + last - place))
            first = self.phases[number][0]
            chosen = self._present[number][self._orders[number].sources(place - first, here.stop - done)]
            sources[here] = chosen
            for source, given in enumerate(self._before(number, place).tolist()):
                mine = chosen == source
                items[here][mine] = given + np.arange(mine.sum())
            done = here.stop
        return sources, items

    def _phase(self, place: int) -> int:
        return max(number for number, (start, _) in enumerate(self.phases) if start <= place)

    def _before(self, number: int, place: int) -> np.ndarray:
        found = self._given[number].copy()
        found[self._present[number]] += self._orders[number].before(place - self.phases[number][0])
        return found

"""Placements within given spreads by simulated annealing (Kirkpatrick et al., Science 220, 1983): for small
matrices of which a solver says nothing in its time.

All room is a list of slots, of which the first are the matrix and the others lie idle. A move exchanges two
slots; what is made small is by how many minipods rows and columns exceed what they may touch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp

from plait.place.problem import Cells

MOVES, TRIES = 100_000, 4
"""Moves of a try: 0.3 s of a core or less. Each try begins anew."""
HOT, COLD = 1.0, 0.15
"""Temperatures. A move by which one minipod more is touched is taken in 37, then in 0.1 % of cases."""


def annealed(free: Sequence[int], shape: tuple[int, int], spreads: tuple[int, int]) -> Cells | None:
    """The minipod of every cell, column by column, such that no row and no column touches more than
    ``spreads`` say; None if none was found. Equal arguments get equal answers.

    >>> annealed([3, 3], (2, 3), (1, 2))
    (0, 1, 0, 1, 0, 1)
    """
    for seed in range(TRIES):
        made = _Slots(free, shape, spreads)
        if made.cooled(random.Random(seed)):
            return tuple(made.slots[: shape[0] * shape[1]])
    return None


class _Slots:
    def __init__(self, free: Sequence[int], shape: tuple[int, int], spreads: tuple[int, int]) -> None:
        self.rows, self.most = shape[0], spreads
        self.cells = shape[0] * shape[1]
        largest = sorted(range(len(free)), key=lambda pod: -free[pod])
        self.slots = [pod for pod in largest for _ in range(free[pod])]
        self.held = [[[0] * len(free) for _ in range(lines)] for lines in shape]
        """Of each row, and of each column, how many cells it has in each minipod."""
        for at in range(self.cells):
            for lines, line in zip(self.held, self._lines(at), strict=True):
                lines[line][self.slots[at]] += 1
        self.touched = [[sum(map(bool, line)) for line in lines] for lines in self.held]
        self.excess = sum(
            max(0, one - most) for lines, most in zip(self.touched, spreads, strict=True) for one in lines
        )

    def cooled(self, chance: random.Random) -> bool:
        """Whether nothing exceeds its spread in the end."""
        fall, temperature = (COLD / HOT) ** (1 / MOVES), HOT
        for _ in range(MOVES):
            if not self.excess:
                return True
            temperature *= fall
            one, other = int(chance.random() * self.cells), int(chance.random() * len(self.slots))
            if self.slots[one] == self.slots[other]:
                continue
            worse = self._exchange(one, other)
            if worse > 0 and chance.random() >= exp(-worse / temperature):
                self._exchange(one, other)
        return not self.excess

    def _lines(self, at: int) -> tuple[int, int]:
        """The row and the column of a cell."""
        column, row = divmod(at, self.rows)
        return row, column

    def _exchange(self, one: int, other: int) -> int:
        """By how much the excess grows."""
        slots, before = self.slots, self.excess
        slots[one], slots[other] = slots[other], slots[one]
        for at, left, taken in ((one, slots[other], slots[one]), (other, slots[one], slots[other])):
            if at < self.cells:
                for which, line in enumerate(self._lines(at)):
                    self._moved(which, line, left, taken)
        return self.excess - before

    def _moved(self, which: int, line: int, left: int, taken: int) -> None:
        """One of a line's cells has left a minipod for another."""
        held, touched, most = self.held[which][line], self.touched[which], self.most[which]
        before = touched[line]
        held[left] -= 1
        held[taken] += 1
        after = touched[line] = before - (not held[left]) + (held[taken] == 1)
        self.excess += max(0, after - most) - max(0, before - most)

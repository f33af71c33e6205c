"""Lower bounds on the score of a placement (eq. 2 of Arnold, arXiv 2509.15940) that need no
solver.

A minipod with n cells touches rho rows and gamma columns with rho * gamma >= n. Summed over
minipods by Cauchy-Schwarz, r * c >= kappa = (sum of sqrt n)^2 / (rows * columns), where r and c are
the largest spreads of a row and of a column. The sum is smallest when the largest minipods are
filled first. So the spread of rows times that of columns is never below kappa: the trade-off
between DP and PP in one line. If one spread is 1, the other has an exact value: whole rows (or
columns) packed into the fewest minipods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, sqrt
from typing import Any

from plait.place.solve.problem import Problem

EPSILON = 1e-9


def fewest_minipods(free: Sequence[int], groups: int, size: int) -> int | None:
    """Return the minimum number of minipods that hold ``groups`` whole groups of ``size`` cells;
    None if they cannot. free: free cells of every minipod."""
    found = 0
    for count in sorted((cells // size for cells in free), reverse=True):
        if groups <= 0 or count == 0:
            break
        groups -= count
        found += 1
    return found if groups <= 0 else None


def fewest_of_each(free: Sequence[int], groups: int, size: int) -> int:
    """Return a lower bound on the number of minipods that the most spread of ``groups`` groups of
    ``size`` cells touches. free: free cells of every minipod.

    >>> fewest_of_each([5, 5, 4, 4, 4], 2, 10), fewest_of_each([6, 6, 6, 6], 2, 10)
    (3, 2)
    """
    rooms = sorted(Counter(free).items(), reverse=True)
    for spread in range(1, len(free)):
        smallest = [0, *(room for room, _ in rooms if spread * room < size)]
        if all(most_groups(rooms, size, spread, small) > groups - EPSILON for small in smallest):
            return spread
    return max(1, len(free))


def most_groups(rooms: Iterable[tuple[int, int]], size: int, spread: int, small: int) -> float:
    """Return an upper bound on the number of groups of ``size`` cells, each in at most ``spread``
    minipods. rooms: (cells of a minipod, number of such minipods). small: parts of a group with at
    most this many cells do not count.

    A group has at least ``whole`` cells in the only part that counts. Or it has several such parts,
    with at least size - spread * small cells beyond ``small`` each. So a group's parts weigh at
    least 1 in total, if a part weighs 1 from ``whole`` cells on, and below that its share of these
    cells, or a half.
    """
    whole = size - (spread - 1) * small
    by_share = by_half = 0.0
    for room, count in rooms:
        if room > small:
            full, rest = divmod(room, whole)
            by_share += count * (full + max(0.0, (rest - small) / (whole - small)))
            by_half += count * max(full + rest // (small + 1) / 2, room // (small + 1) / 2)
    return min(by_share, by_half)


def kappa(free: Sequence[int], rows: int, columns: int, cells: int) -> float:
    """Return the lower bound on the largest spread of rows times that of columns, for ``cells``
    cells to be placed. free: free cells of every minipod."""
    total, rest = 0.0, cells
    for count in sorted(free, reverse=True):
        taken = min(count, rest)
        total += sqrt(taken)
        rest -= taken
        if not rest:
            break
    return total * total / (rows * columns)


def frontier(problem: Problem) -> list[tuple[int, int]]:
    """Return (spread of PP groups, lower bound on the spread of DP groups) in minipods, for
    increasing spreads of PP groups, without pairs that another pair beats in both."""
    free = _room(problem)
    rows, columns, cells = len(problem.rows), len(problem.heights), problem.num_cells
    least = kappa(free, rows, columns, cells)
    whole_rows = fewest_minipods(free, rows, columns) if problem.shape else 1
    whole_columns = fewest_minipods(free, columns, rows) if problem.shape else 1
    of_row = fewest_of_each(free, rows, columns) if problem.shape else 1
    of_column = fewest_of_each(free, columns, rows) if problem.shape else 1
    found: list[tuple[int, int]] = []
    for spread in range(of_row, min(columns, len(free)) + 1):
        other = max(of_column, ceil(least / spread - EPSILON))
        if spread == 1:
            if whole_rows is None:
                continue
            other = max(other, whole_rows)
        if other == 1 and (whole_columns is None or spread < whole_columns):
            other = 2
        if not found or other < found[-1][1]:
            found.append((spread, other))
    return found


def lower_bound(problem: Problem) -> float:
    """Return a lower bound on the score of every placement of the problem."""
    return min(problem.score(rows, columns) for rows, columns in frontier(problem))


class Relaxation:
    """A bound in whole rows and columns on the spreads that are possible. Can minipods hold all
    cells if they touch at most ``rows * r`` rows and ``columns * c`` columns in total? A minipod
    that touches rho rows and gamma columns holds min(room, rho * gamma) cells.

    This is a knapsack with two budgets. If their product is small, dynamic programming over the
    minipods solves it for every pair of budgets. Otherwise by Lagrange multipliers: given prices of
    a touched row and column, each minipod takes what gains most. Prices times budgets plus all
    gains is an upper bound on the cells held."""

    def __init__(self, problem: Problem) -> None:
        import numpy as np

        self.rows, self.columns, self.cells = len(problem.rows), len(problem.heights), problem.num_cells
        rooms, counts = np.unique([room for room in _room(problem) if room], return_counts=True)
        gamma = np.arange(1, self.columns + 1)[None, :]
        rho = np.minimum(self.rows, np.stack([rooms[:, None] // gamma, -(-rooms[:, None] // gamma)], axis=-1))
        self.rho = rho.reshape(len(rooms), -1)
        self.gamma = np.repeat(gamma, 2, axis=1)
        self.held = np.minimum(rooms[:, None], self.rho * self.gamma)
        self.counts = counts
        self.typical = sqrt(float((rooms * counts).sum()) / int(counts.sum()))
        self.excluded: list[tuple[int, int]] = []
        self.open: list[tuple[int, int]] = []
        pods = int(counts.sum())
        budgets = self.rows * min(self.columns, pods) + 1, self.columns * min(self.rows, pods) + 1
        small = budgets[0] * budgets[1] * pods * self.rho.shape[1] <= MOST_ADDED
        self.most_held = self._knapsack(budgets) if small else None

    def excludes(self, row_spread: int, column_spread: int) -> bool:
        """True if no placement has PP groups on at most ``row_spread`` minipods and DP groups on at
        most ``column_spread``."""
        if self.most_held is not None:
            return bool(self.most_held[self.rows * row_spread, self.columns * column_spread] < self.cells)
        if any(row_spread <= r and column_spread <= c for r, c in self.excluded):
            return True
        if any(row_spread >= r and column_spread >= c for r, c in self.open):
            return False
        excluded = self._held_less(row_spread, column_spread)
        (self.excluded if excluded else self.open).append((row_spread, column_spread))
        return excluded

    def _held_less(self, row_spread: int, column_spread: int) -> bool:
        """True if some prices prove that not all cells can be held."""
        row_budget, column_budget = self.rows * row_spread, self.columns * column_spread
        shape = sqrt(row_budget / column_budget)

        def held_at_most(scale: float, skew: float) -> float:
            row_price, column_price = scale * self.typical / (shape * skew), scale * self.typical * shape * skew
            gain = (self.held - row_price * self.rho - column_price * self.gamma).max(axis=1).clip(0)
            return row_price * row_budget + column_price * column_budget + float((gain * self.counts).sum())

        tried = dict[tuple[float, float], float]()
        for at in product(SCALES, SKEWS):
            tried[at] = held_at_most(*at)
            if tried[at] < self.cells - 1e-6:
                return True
        best = min(tried, key=tried.__getitem__)
        most, step = tried[best], FIRST_STEP
        while step > LAST_STEP and most < CLOSE * self.cells:
            around = [(best[0] * up, best[1] * aside) for up, aside in product((1 / step, 1.0, step), repeat=2)]
            found = min((held_at_most(*at), at) for at in around)
            if found[0] < self.cells - 1e-6:
                return True
            if found[0] < most:
                most, best = found
            else:
                step = step**0.5
        return False

    def _knapsack(self, budgets: tuple[int, int]) -> Any:
        """Return the maximum number of cells held, for every number of rows and of columns touched
        in total up to ``budgets``: an array."""
        import numpy as np

        most = np.zeros(budgets, int)
        for rhos, held, count in zip(self.rho.tolist(), self.held.tolist(), self.counts.tolist(), strict=True):
            ways = dict(zip(zip(rhos, self.gamma[0].tolist(), strict=True), held, strict=True))
            for _ in range(count):
                before = most.copy()
                for (rho, gamma), cells in ways.items():
                    if cells and rho < budgets[0] and gamma < budgets[1]:
                        after = most[rho:, gamma:]
                        np.maximum(after, before[: budgets[0] - rho, : budgets[1] - gamma] + cells, out=after)
        return most


MOST_ADDED = 30_000_000
"""Maximum number of additions of a knapsack, which take some tens of milliseconds."""

SCALES = (0.5, 0.45, 0.55, 0.4, 0.6, 0.35, 0.65, 0.3, 0.7, 0.25, 0.8, 0.2, 0.9, 0.15, 1.0)
FIRST_STEP, LAST_STEP, CLOSE = 1.1, 1.002, 1.1
"""Factors between prices tried around the best one, from the first to the last. They are tried only
while the upper bound is below ``CLOSE`` times the cells."""
SKEWS = (1.0, 0.95, 1.05, 0.9, 1.1, 0.85, 1.18, 1.25, 0.8)
"""Prices that are tried: half of a typical side first, which is best if sides need not be whole
numbers."""


def _room(problem: Problem) -> list[int]:
    """Return the maximum number of cells of each minipod, over all its pools, including nodes of
    other jobs if these may be preempted."""
    room = [0] * len(problem.minipods)
    for pool, minipod in zip(problem.pools, problem.minipod_of, strict=True):
        held = 0 if problem.price is None else len(pool.held)
        room[minipod] += max(0, pool.free + held - problem.spares.per_minipod) // problem.nodes_per_cell
    return room

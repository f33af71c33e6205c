"""Whether small matrices can be placed within given spreads: depth-first over rows, each state met once.

Rows are alike and so are columns, so that a state is what minipods have left and, as a sorted list, the sets
of minipods that columns touch already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import product

EFFORT = 20_000
"""Rows tried before it gives up; some tens of milliseconds."""
MOST_PATTERNS = 1024
"""Ways to place one row: above them it does not begin."""


class SearchOutcome(Enum):
    """FOUND: there is one. NONE: there is none. OPEN: it took too long."""

    FOUND = 1
    NONE = 2
    OPEN = 3


def search(
    free: Sequence[int], rows: int, columns: int, row_spread: int, column_spread: int, effort: int = EFFORT
) -> tuple[SearchOutcome, tuple[int, ...] | None]:
    """The minipod of every cell, column by column, such that no row and no column is spread further.

    >>> search([3, 3], 2, 3, 1, 2)
    (<SearchOutcome.FOUND: 1>, (0, 1, 0, 1, 0, 1))
    """
    if rows < columns:  # the fewer columns, the fewer patterns
        verdict, found = search(free, columns, rows, column_spread, row_spread, effort)
        return verdict, found and tuple(
            found[row * columns + column] for column in range(columns) for row in range(rows)
        )
    useful = [pod for pod in range(len(free)) if free[pod]]
    if len(useful) ** columns > MOST_PATTERNS:
        return SearchOutcome.OPEN, None
    looked = _PlacementSearch([free[pod] for pod in useful], rows, columns, row_spread, column_spread, effort)
    found = looked.below(0, tuple(looked.free), (0,) * columns)
    if not found:
        return (SearchOutcome.OPEN if looked.effort < 0 else SearchOutcome.NONE), None
    return SearchOutcome.FOUND, tuple(useful[row[column]] for column in range(columns) for row in looked.placed)


class _PlacementSearch:
    def __init__(
        self, free: list[int], rows: int, columns: int, row_spread: int, column_spread: int, effort: int
    ) -> None:
        self.free, self.rows, self.column_spread, self.effort = free, rows, column_spread, effort
        every = product(range(len(free)), repeat=columns)
        self.patterns = sorted((one for one in every if len(set(one)) <= row_spread), key=lambda one: len(set(one)))
        self.failed = set[tuple[int, tuple[int, ...], tuple[int, ...]]]()
        self.placed: list[tuple[int, ...]] = []

    def below(self, row: int, left: tuple[int, ...], masks: tuple[int, ...]) -> bool:
        """Whether the rows from ``row`` on can be placed; ``placed`` has all of them then."""
        if row == self.rows:
            return True
        rest = (self.rows - row) * len(masks)
        state = (row, tuple(min(cells, rest) for cells in left), tuple(sorted(masks)))
        if state in self.failed:
            return False
        for pattern, after, touched in self._steps(row, left, masks):
            self.placed.append(pattern)
            if self.below(row + 1, after, touched):
                return True
            self.placed.pop()
            if self.effort < 0:
                return False
        self.failed.add(state)
        return False

    def _steps(
        self, row: int, left: tuple[int, ...], masks: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        for pattern in self.patterns:
            self.effort -= 1
            if self.effort < 0:
                return
            after = list(left)
            for pod in pattern:
                after[pod] -= 1
            if min(after) < 0:
                continue
            touched = tuple(mask | 1 << pod for mask, pod in zip(masks, pattern, strict=True))
            if all(self._open(mask, after, self.rows - row - 1) for mask in touched):
                yield pattern, tuple(after), touched

    def _open(self, mask: int, left: Sequence[int], rows: int) -> bool:
        """Whether a column can still be filled."""
        size = mask.bit_count()
        if size < self.column_spread:
            return True
        return size == self.column_spread and sum(left[pod] for pod in range(len(left)) if mask >> pod & 1) >= rows

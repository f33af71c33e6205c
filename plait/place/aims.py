"""Bands that are aimed at two spreads: for matrices that no solver can take.

Columns are cut into bands, each with at most ``column_spread`` minipods, as in ``bands``. What a row may
touch beyond one minipod of every band is slack. It is spent where minipods do not fit: a row is cut where a
minipod ends, and the last rows of a band, which its minipods do not hold, are split: left and right half have
minipods of their own there. Rows are alike, so that each band does this to those rows that touch fewest yet.

On 256 x 16 and minipods of 98, ten for a row and five for a column: eight bands of two columns would need six
minipods each. Four hold 196 rows of both columns; one for each column holds the other 60. These 60 rows are
others in every band, so that no row meets more than two of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from plait.core.parallel.strategy import slice_sizes
from plait.place.bands import Run
from plait.place.problem import Cells

EFFORT = 1_000_000
"""Minipods that are given out, in all tries together: two seconds at most, where all are missed."""
HALVED = 2
"""So often the columns of a band are halved."""
MANY = 1 << 30
WAYS = ((0, False), (1, False), (2, False), (MANY, False), (MANY, True), (1, True), (2, True))
"""How minipods of a band are chosen: how many are the largest, the others being as small as they can be; and
whether the band is as wide as these allow, or bands are equal."""


class Aimed(NamedTuple):
    """Cells that have the spreads, in so many bands: of columns; exchanged: of rows."""

    cells: Cells
    count: int
    exchanged: bool


class BandPart(NamedTuple):
    """Neighbouring columns. runs: minipods of rows, from the top. halves: the left and the right columns of
    the last ``split`` rows. extra: minipods that rows touch beyond one each, in sum."""

    width: int
    runs: tuple[Run, ...]
    split: int = 0
    halves: tuple[BandPart, ...] = ()
    extra: int = 0


class Aims:
    """Tries with one matrix, until the effort is spent."""

    def __init__(self, free: Sequence[int], rows: int, columns: int, effort: int = EFFORT) -> None:
        self.free, self.rows, self.columns, self.effort = free, rows, columns, effort

    def at(self, row_spread: int, column_spread: int) -> Aimed | None:
        """The first try that has both spreads; None if none has, or no effort is left."""
        for exchanged in (False, True):
            rows, columns = (self.columns, self.rows) if exchanged else (self.rows, self.columns)
            across, down = (column_spread, row_spread) if exchanged else (row_spread, column_spread)
            for count, (largest, widest) in product(_counts(across, columns), WAYS):
                if self.effort <= 0:
                    return None
                tried = _Aim(self.free, rows, columns, down, largest)
                parts = tried.parts(count, (across - count) * rows, widest=widest)
                self.effort -= tried.given
                grid = _laid(parts, rows, across) if parts else None
                if parts and grid:
                    turned = zip(*grid, strict=True) if exchanged else grid
                    return Aimed(tuple(pod for column in turned for pod in column), len(parts), exchanged)
        return None


def _counts(across: int, columns: int) -> list[int]:
    """Of bands: as many as a row may touch, one or two less, or the fewest of some width."""
    most = min(across, columns)
    fewest = {-(-columns // width) for width in range(1, columns + 1)}
    nearly = range(max(1, most - 2), most + 1)
    return sorted({*nearly, *(one for one in fewest if most // 2 <= one <= most)}, reverse=True)


class _Aim:
    """rooms: what is left of minipods, by size, with their numbers. down: how many a column may touch. given:
    how often one was given out."""

    def __init__(self, free: Sequence[int], rows: int, columns: int, down: int, largest: int) -> None:
        self.rooms = sorted((cells, pod) for pod, cells in enumerate(free) if cells)
        self.rows, self.columns, self.down = rows, columns, down
        self.largest, self.given = min(largest, down), 0

    def parts(self, count: int, slack: int, *, widest: bool) -> list[BandPart] | None:
        """``count`` bands or less; None where minipods come to an end too soon."""
        found, left = list[BandPart](), self.columns
        for band in range(count):
            width = self._widest(left) if widest else -(-left // (count - band))
            part = self._part(width, self.rows, self.down, slack // (count - band)) if width else None
            if part is None:
                return None
            found.append(part)
            left, slack = left - width, slack - part.extra
            if not left:
                return found
        return None

    def _widest(self, most: int) -> int:
        """How many columns the largest minipods hold in whole rows; 0 if none."""
        largest = [room for room, _ in self.rooms[-self.down :]]
        return bisect_right(range(1, most + 1), -self.rows, key=lambda width: -sum(room // width for room in largest))

    def _part(self, width: int, rows: int, budget: int, slack: int, halved: int = 0) -> BandPart | None:
        """In at most ``budget`` minipods a column: of whole rows, else as few rows split as can be."""
        before = list(self.rooms)
        runs, left, cuts = self._runs(width, rows, budget, budget, slack)
        if not left:
            return BandPart(width, runs, extra=cuts)
        for whole in range(budget - 1, -1, -1) if width > 1 and halved < HALVED else ():
            self.rooms = list(before)
            runs, left, cuts = self._runs(width, rows, whole, whole + 1, slack)
            if left + cuts > slack:
                break
            halves, extra = list[BandPart](), left + cuts
            for half in slice_sizes(width, 2):
                part = self._part(half, left, budget - whole, slack - extra, halved + 1)
                if part is None:
                    break
                halves.append(part)
                extra += part.extra
            else:
                return BandPart(width, runs, left, tuple(halves), extra)
        self.rooms = before
        return None

    def _runs(self, width: int, rows: int, slots: int, shares: int, slack: int) -> tuple[tuple[Run, ...], int, int]:
        """At most ``slots`` minipods from the top, rows that they leave, and how many rows they cut. shares:
        among how many the rows would be shared."""
        need, at, cuts, runs = rows * width, 0, 0, list[Run]()
        for slot in range(slots):
            if not need or not self.rooms:
                break
            room, pod = self.rooms.pop(self._next(slot, shares, need, width if cuts >= slack else 1))
            self.given += 1
            taken = min(room, need)
            over = (at + taken) % width
            if taken < need and over:
                if cuts < slack and slot < slots - 1:
                    cuts += 1
                else:
                    taken -= over
            if taken <= 0:
                insort(self.rooms, (room, pod))
                break
            runs.append((pod, taken))
            at, need = at + taken, need - taken
            if room > taken:
                insort(self.rooms, (room - taken, pod))
        if at % width:  # it ended in the midst of a row
            return (), rows, 0
        return tuple(runs), need // width, cuts

    def _next(self, slot: int, shares: int, need: int, unit: int) -> int:
        """Where in ``rooms`` the minipod is that comes next: the largest, or the smallest with its share."""
        last = len(self.rooms) - 1
        if slot < self.largest and slot < shares - 1:
            return last
        share = -(-need // (shares - slot))
        return min(bisect_left(self.rooms, (-(-share // unit) * unit, -1)), last)


def _laid(parts: Sequence[BandPart], rows: int, most: int) -> list[list[int]] | None:
    """The minipod of every cell, by column; None if some row touches more than ``most``."""
    load = [0] * rows
    grid = [[0] * rows for part in parts for _ in range(part.width)]
    first = 0
    for part in parts:
        _lay(part, first, range(rows), load, grid)
        first += part.width
    return grid if max(load) <= most else None


def _lay(part: BandPart, first: int, rows: Sequence[int], load: list[int], grid: list[list[int]]) -> None:
    """Rows that touch fewest are split, and of the others those are cut. load: what each touches."""
    ordered = sorted(rows, key=load.__getitem__)
    at = first
    for half in part.halves:
        _lay(half, at, ordered[: part.split], load, grid)
        at += half.width
    own = [pod for pod, cells in part.runs for _ in range(cells)]
    pieces = [own[at : at + part.width] for at in range(0, len(own), part.width)]
    pieces.sort(key=lambda piece: -len(set(piece)))
    for row, piece in zip(ordered[part.split :], pieces, strict=True):
        load[row] += len(set(piece))
        for column, pod in enumerate(piece, first):
            grid[column][row] = pod

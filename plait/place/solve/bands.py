"""Constructions for a matrix of equal columns: no solver, well under a millisecond each.

``bands`` with one band keeps rows whole; with ``cut`` it is a chain of rows over the largest
minipods. These two attain the optimum of the paper's program for identical units. More bands go
beyond that program: the columns are cut into r bands, each with minipods of its own. Then a row
spreads over r minipods and a column over those of one band. r = 1 keeps PP groups whole, r =
columns DP groups; values in between are the trade-off that eq. 2 asks for. With rows and columns
exchanged, the same construction gives bands of rows. Cells are numbered column by column, as node
ranks are: cell (row i, column j) is j * rows + i.

Aimed bands (``TargetedBands``) aim at two given spreads, for matrices too large for a solver.
Columns are cut into bands, each with at most ``column_spread`` minipods, as in ``bands``. The
minipods that a row may touch beyond one per band are slack. Slack is spent where minipods do not
fit. A row is cut where a minipod ends. The last rows of a band, which its minipods cannot hold, are
split: there, the left and right half have minipods of their own. Rows are interchangeable, so each
band does this to the rows that touch the fewest minipods so far.

On 256 x 16 and minipods of 98, ten for a row and five for a column: eight bands of two columns
would need six minipods each. Four hold 196 rows of both columns; one for each column holds the
other 60. Every band splits a different set of 60 rows, so no row is split in more than two bands.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import product
from typing import NamedTuple

from plait.core.parallel.strategy import slice_sizes
from plait.place.solve.problem import Cells

Run = tuple[int, int]
"""(minipod, number of consecutive cells on it)."""


class Banding(NamedTuple):
    """A construction of a placement in bands of columns. rows: PP groups. widths: columns (DP
    groups) of every band. runs: for each band, the minipods of its cells, row by row. exchanged:
    rows and columns have changed roles; ``rows`` is then the number of columns of the matrix."""

    rows: int
    widths: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    exchanged: bool = False

    def spreads(self) -> tuple[int, int]:
        """Return upper bounds on the number of minipods of the most spread PP group and DP
        group."""
        down = max(len({pod for pod, _ in own}) for own in self.runs)
        cuts = Counter[int]()
        for width, own in zip(self.widths, self.runs, strict=True):
            at = 0
            for _, cells in own:
                at += cells
                if at % width:
                    cuts[at // width] += 1
        across = len(self.widths) + max(cuts.values(), default=0)
        return (down, across) if self.exchanged else (across, down)

    def cells(self) -> list[int]:
        """Return the index of the minipod of every cell, column by column."""
        found: list[int] = []
        for width, own in zip(self.widths, self.runs, strict=True):
            sequence = [pod for pod, cells in own for _ in range(cells)]
            for column in range(width):
                found += sequence[column::width]
        if not self.exchanged:
            return found
        return [pod for row in range(self.rows) for pod in found[row :: self.rows]]


def bands(
    free: Sequence[int], rows: int, columns: int, count: int, *, tight: bool = False, cut: bool = False
) -> Banding | None:
    """Return columns in ``count`` bands; None if minipods with ``free`` cells lack room for that.

    The minipod with the most free cells serves the band with the greatest need, with whole rows
    only; with ``cut``, with all its cells, so that rows are cut where a minipod ends. tight: finish
    a band with the smallest minipod that can.

    >>> found = bands([3, 3], 2, 3, 1)
    >>> found.spreads(), found.cells()
    ((1, 2), [0, 1, 0, 1, 0, 1])
    """
    widths = slice_sizes(columns, count)
    need = [rows * width for width in widths]
    runs: list[list[Run]] = [[] for _ in widths]
    heap = [(-cells, pod) for pod, cells in enumerate(free) if cells]
    heapify(heap)
    while heap and any(need):
        room, pod = -heap[0][0], heap[0][1]
        open_bands = [at for at in range(count) if need[at] and (cut or widths[at] <= room)]
        if not open_bands:
            break
        band = max(open_bands, key=lambda at: need[at])
        width = 1 if cut else widths[band]
        taken = min(need[band], room // width * width)
        if tight and taken == need[band]:
            room, pod = min((-item[0], item[1]) for item in heap if -item[0] >= taken)
            heap.remove((-room, pod))
            heapify(heap)
        else:
            heappop(heap)
        runs[band].append((pod, taken))
        need[band] -= taken
        if room > taken:
            heappush(heap, (taken - room, pod))
    if any(need):
        return None
    # Alternate between top and bottom, so that cuts hit different rows.
    return Banding(rows, widths, tuple(tuple(own[::-1] if at % 2 else own) for at, own in enumerate(runs)))


class Offer(NamedTuple):
    """A construction before it is built. rows, columns: lower bounds on the spreads of PP groups
    and DP groups. bands: their number. exchanged: bands of rows instead of columns. tight, cut:
    as in ``bands``."""

    rows: int
    columns: int
    bands: int
    exchanged: bool
    tight: bool
    cut: bool

    def made(self, free: Sequence[int], rows: int, columns: int) -> Banding | None:
        """Return the construction; None if there are too few nodes. free: free cells of every
        minipod. rows, columns: of the matrix."""
        if not self.exchanged:
            return bands(free, rows, columns, self.bands, tight=self.tight, cut=self.cut)
        found = bands(free, columns, rows, self.bands, tight=self.tight, cut=self.cut)
        return found and found._replace(exchanged=True)


def offers(pods: int, rows: int, columns: int, *, by_rows: bool = True, by_columns: bool = True) -> Iterator[Offer]:
    """Yield all constructions for ``pods`` minipods and a matrix of ``rows`` PP groups and
    ``columns`` DP groups. by_rows: bands of columns, which keep PP groups together; by_columns:
    bands of rows."""
    for exchanged, wanted, most in ((False, by_rows, columns), (True, by_columns, rows)):
        for count in range(1, min(most, pods) + 1) if wanted else ():
            spreads = (1, count) if exchanged else (count, 1)
            yield Offer(*spreads, count, exchanged, tight=False, cut=False)
            yield Offer(*spreads, count, exchanged, tight=True, cut=False)
            yield Offer(*spreads, count, exchanged, tight=False, cut=True)


EFFORT = 1_000_000
"""Maximum number of times that ``TargetedBands`` assigns a minipod in all tries together: two
seconds at most, if every try fails."""
HALVED = 2
"""Maximum number of times that the columns of a band are halved."""
MANY = 1 << 30
WAYS = ((0, False), (1, False), (2, False), (MANY, False), (MANY, True), (1, True), (2, True))
"""Ways to choose a band's minipods: (number of largest minipods, while the others are as small as
possible; True for bands as wide as these minipods allow, False for equal bands)."""


class TargetedPlacement(NamedTuple):
    """A placement within two requested spreads. cells: the minipod of every cell. bands: their
    number. exchanged: the bands are of rows instead of columns."""

    cells: Cells
    bands: int
    exchanged: bool


class BandPart(NamedTuple):
    """Neighbouring columns of a band. runs: minipods of rows, from the top. halves: the left and
    the right columns of the last ``split`` rows. extra: minipods that rows touch beyond one each,
    in total."""

    width: int
    runs: tuple[Run, ...]
    split: int = 0
    halves: tuple[BandPart, ...] = ()
    extra: int = 0


class TargetedBands:
    """Constructions of placements for one matrix that aim at two given spreads; they share one
    limit of effort (``EFFORT``)."""

    def __init__(self, free: Sequence[int], rows: int, columns: int, effort: int = EFFORT) -> None:
        self.free, self.rows, self.columns, self.effort = free, rows, columns, effort

    def at(self, row_spread: int, column_spread: int) -> TargetedPlacement | None:
        """Return the first construction whose PP groups touch at most ``row_spread`` minipods and
        DP groups at most ``column_spread``; None if none does, or no effort is left."""
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
                    return TargetedPlacement(tuple(pod for column in turned for pod in column), len(parts), exchanged)
        return None


def _counts(across: int, columns: int) -> list[int]:
    """Return numbers of bands to try: as many as a row may touch minipods (``across``), one or two
    fewer, and the smallest numbers for some width."""
    most = min(across, columns)
    fewest = {-(-columns // width) for width in range(1, columns + 1)}
    nearly = range(max(1, most - 2), most + 1)
    return sorted({*nearly, *(one for one in fewest if most // 2 <= one <= most)}, reverse=True)


class _Aim:
    """One try of ``TargetedBands``. rooms: (free cells, minipod), sorted by size. down: maximum
    number of minipods that a column may touch. given: number of times that a minipod was assigned.
    """

    def __init__(self, free: Sequence[int], rows: int, columns: int, down: int, largest: int) -> None:
        self.rooms = sorted((cells, pod) for pod, cells in enumerate(free) if cells)
        self.rows, self.columns, self.down = rows, columns, down
        self.largest, self.given = min(largest, down), 0

    def parts(self, count: int, slack: int, *, widest: bool) -> list[BandPart] | None:
        """Return at most ``count`` bands for all columns; None if the minipods do not suffice.
        slack: minipods that rows may touch beyond one for each band, in total."""
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
        """Return the number of columns, at most ``most``, whose rows the largest minipods hold
        whole; 0 if none."""
        largest = [room for room, _ in self.rooms[-self.down :]]
        return bisect_right(range(1, most + 1), -self.rows, key=lambda width: -sum(room // width for room in largest))

    def _part(self, width: int, rows: int, budget: int, slack: int, halved: int = 0) -> BandPart | None:
        """Return a band with at most ``budget`` minipods per column: of whole rows, or with as few
        split rows as possible. None if that is impossible."""
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
        """Return (runs of at most ``slots`` minipods from the top, number of rows left over, number
        of rows cut). shares: number of minipods among which the rows would be shared."""
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
        if at % width:  # the last run ended within a row
            return (), rows, 0
        return tuple(runs), need // width, cuts

    def _next(self, slot: int, shares: int, need: int, multiple: int) -> int:
        """Return the index in ``rooms`` of the next minipod: the largest, or the smallest that
        holds its share."""
        last = len(self.rooms) - 1
        if slot < self.largest and slot < shares - 1:
            return last
        share = -(-need // (shares - slot))
        return min(bisect_left(self.rooms, (-(-share // multiple) * multiple, -1)), last)


def _laid(parts: Sequence[BandPart], rows: int, most: int) -> list[list[int]] | None:
    """Return the minipod of every cell, column by column; None if some PP group (row) touches more
    than ``most`` minipods. rows: number of PP groups."""
    load = [0] * rows
    grid = [[0] * rows for part in parts for _ in range(part.width)]
    first = 0
    for part in parts:
        _lay(part, first, range(rows), load, grid)
        first += part.width
    return grid if max(load) <= most else None


def _lay(part: BandPart, first: int, rows: Sequence[int], load: list[int], grid: list[list[int]]) -> None:
    """Assign a part's minipods to cells: split the rows that touch the fewest minipods, and cut the
    next ones. load: minipods that each row touches."""
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

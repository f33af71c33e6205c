"""Constructions for a matrix of equal columns: no solver, well under a millisecond each.

``bands`` with one band keeps rows whole; with ``cut`` it is a chain of rows over the largest minipods. These
two attain the optimum of the paper's program for identical units.
More bands go on where that program stops: the columns are cut into r bands, each with minipods of its own, so
that a row spreads over r minipods and a column over those of one band. r = 1 keeps PP groups whole, r =
columns DP groups; what lies between is the trade that eq. 2 asks for. The same with rows and columns
exchanged gives bands of rows.

Cells are numbered column by column, as node ranks are: cell (row i, column j) is j * rows + i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from plait.core.parallel.strategy import slice_sizes

Run = tuple[int, int]
"""A minipod, and how many cells in a row it has."""


class Banding(NamedTuple):
    """widths: columns of every band. runs: who has the cells of a band, row by row. exchanged: rows and
    columns have changed roles; ``rows`` is then the number of columns of the matrix."""

    rows: int
    widths: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    exchanged: bool = False

    def spreads(self) -> tuple[int, int]:
        """Of rows and of columns, at most."""
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
        """The minipod of every cell."""
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
    """Columns in ``count`` bands; None where nodes do not suffice in that form.

    The minipod with most left serves the band that needs most, with whole rows of it; ``cut``: with all it
    has, so that rows are cut where a minipod ends. tight: what ends a band is the smallest that can.

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
    # In turn from the top and from the bottom, so that cuts meet different rows.
    return Banding(rows, widths, tuple(tuple(own[::-1] if at % 2 else own) for at, own in enumerate(runs)))


class Offer(NamedTuple):
    """A construction, before it is made: what its spreads are at least."""

    rows: int
    columns: int
    count: int
    exchanged: bool
    tight: bool
    cut: bool

    def made(self, free: Sequence[int], rows: int, columns: int) -> Banding | None:
        """None where nodes do not suffice."""
        if not self.exchanged:
            return bands(free, rows, columns, self.count, tight=self.tight, cut=self.cut)
        found = bands(free, columns, rows, self.count, tight=self.tight, cut=self.cut)
        return found and found._replace(exchanged=True)


def offers(pods: int, rows: int, columns: int, *, by_rows: bool = True, by_columns: bool = True) -> Iterator[Offer]:
    """All constructions for so many minipods. by_rows: bands of columns; by_columns: bands of rows."""
    for exchanged, wanted, most in ((False, by_rows, columns), (True, by_columns, rows)):
        for count in range(1, min(most, pods) + 1) if wanted else ():
            spreads = (1, count) if exchanged else (count, 1)
            yield Offer(*spreads, count, exchanged, tight=False, cut=False)
            yield Offer(*spreads, count, exchanged, tight=True, cut=False)
            yield Offer(*spreads, count, exchanged, tight=False, cut=True)

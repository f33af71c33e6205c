"""Bars and curves over time, and bars drawn as text.

Schedules, transfers and timelines are passed to renderers as ``Bar`` and ``PlotCurve``:
``plait.api.pictures`` makes SVG and PNG of the same bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import NamedTuple

LEAST = 20
"""The smallest width of drawn bars, in characters."""


class Bar(NamedTuple):
    """A bar that occupies a row from ``start`` to ``end`` (seconds, or any one unit). kind: the key
    of its colour."""

    row: str
    start: float
    end: float
    label: str
    kind: str


class PlotCurve(NamedTuple):
    """A quantity over time: (seconds, value), in order."""

    name: str
    points: Sequence[tuple[float, float]]


class CellRun(NamedTuple):
    """A run of characters of one kind in a drawn row; kind: key of their colour, ``""`` for empty
    space."""

    text: str
    kind: str


def drawn_rows(bars: Sequence[Bar], width: int = 100) -> list[tuple[str, list[CellRun]]]:
    """Return every row's name and its runs of characters, in order of appearance. Each row is
    ``width`` characters long and covers the time that all bars span.

    A label that does not fit is cut to its number. A bar shorter than a character shares a
    character with its neighbours; the last of them is drawn.
    """
    first, last = min((bar.start for bar in bars), default=0.0), max((bar.end for bar in bars), default=0.0)
    scale = width / (last - first) if last > first else 0.0
    rows: dict[str, list[Bar]] = {}
    for bar in bars:
        rows.setdefault(bar.row, []).append(bar)
    drawn: list[tuple[str, list[CellRun]]] = []
    for name, own in rows.items():
        cells, kinds = [" "] * width, [""] * width
        for bar in own:
            begin = min(width - 1, round((bar.start - first) * scale))
            end = min(width, max(begin + 1, round((bar.end - first) * scale)))
            text = next((text for text in (bar.label, bar.label.lstrip(ascii_letters)) if len(text) <= end - begin), "")
            cells[begin:end] = text.ljust(end - begin, "─" if text else "▪")
            kinds[begin:end] = [bar.kind] * (end - begin)
        drawn.append((name, _runs(cells, kinds)))
    return drawn


class Drawing(NamedTuple):
    """Bars drawn as text: one line a row, names aligned.

    >>> bars = [Bar("stage 0", 0, 2, "F0", "F"), Bar("stage 1", 2, 5, "F0", "F")]
    >>> print(*Drawing(bars).lines(30), sep="\\n")
    stage 0 |F0──────            |
    stage 1 |        F0──────────|
    """

    bars: Sequence[Bar]

    def rows(self, width: int) -> list[tuple[str, list[CellRun]]]:
        """Return the start of every line and its runs of characters. A line has ``width``
        characters, or more if the bars would get less than ``LEAST``."""
        longest = max((len(bar.row) for bar in self.bars), default=0)
        rows = drawn_rows(self.bars, max(LEAST, width - longest - 3))
        return [(f"{name:<{longest}} |", pieces) for name, pieces in rows]

    def lines(self, width: int) -> list[str]:
        """Return all lines of the drawing, of ``width`` characters."""
        return [f"{start}{''.join(piece.text for piece in pieces)}|" for start, pieces in self.rows(width)]


def _runs(cells: list[str], kinds: list[str]) -> list[CellRun]:
    pieces: list[CellRun] = []
    for cell, kind in zip(cells, kinds, strict=True):
        if pieces and pieces[-1].kind == kind:
            pieces[-1] = CellRun(pieces[-1].text + cell, kind)
        else:
            pieces.append(CellRun(cell, kind))
    return pieces

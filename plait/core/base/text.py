"""Text for people, fitted to a width: paragraphs, tables, and the progress line of a run.

Input and output are plain text: there is no markup, and escape sequences of terminals are spelled
out. A width of None means a file or a pipe: lines are as long as their contents. Answers hold their
tables as values, from which text, JSON and HTML are made.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from plait.core.base.pictures import Drawing

_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?(%|x)?|")
_WORD = re.compile(r"""'[^'\n]*'(?=[\s.,;:)]|$)|"[^"\n]*"(?=[\s.,;:)]|$)|\S""")
_QUOTED = re.compile(r"""(?<![\w\\])(?:'[^']*+'|"(?:[^"\\]|\\.)*+")(?!\w)""")
_UNBROKEN = re.compile(r"\S++")
LONGEST_QUOTED, LONGEST_MESSAGE = 300, 6000
"""The most characters of a value that a message quotes, and of the whole message: a value from a
file may have millions."""
_SHORTEST_BAR, _LONGEST_BAR = 8, 40
_GAP = "  "
HANGING = "  "
"""Indent of all lines but the first of a paragraph in an answer."""


def printable(text: str, kept: str = "\n") -> str:
    """Return ``text`` with all characters that could control a terminal as escapes, except the
    characters ``kept``.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    >>> printable("a\\tb\\r", kept="\\n\\t") == "a\\tb" + r"\\r"
    True
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else ascii(one)[1:-1] for one in text)


def shortened(text: str, most: int) -> str:
    """Return a text in at most ``most`` characters; of a longer text, its beginning and end.

    >>> shortened("from here to there", 11), shortened("nearby", 11)
    ('from h...re', 'nearby')
    """
    end = (most - 3) // 3
    return text if len(text) <= most else f"{text[: most - 3 - end]}...{text[-end:]}"


def brief(text: str) -> str:
    """Return a message with every quoted value cut to ``LONGEST_QUOTED`` characters, and every run
    of characters without spaces to twice as many.

    >>> len(brief(f"'{'x ' * 5000}' is no number, as in '3'")) < LONGEST_QUOTED + 40
    True
    """
    text = _QUOTED.sub(lambda found: shortened(found[0], LONGEST_QUOTED), text)
    text = _UNBROKEN.sub(lambda found: shortened(found[0], 2 * LONGEST_QUOTED), text)
    return shortened(text, LONGEST_MESSAGE)


def paragraph(text: str, width: int | None, indent: str = "") -> str:
    """Return ``text`` in lines of ``width``, broken only between words; a quoted text counts as one
    word.

    indent: the indent of every line but the first.

    >>> print(paragraph("the folder 'my runs' cannot be written", 18))
    the folder
    'my runs' cannot
    be written
    """
    text = printable(text)
    if width is None:
        return text
    lines: list[str] = []
    for word in _words(text):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(indent + word if lines else word)
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned right.

    Columns that do not fit into ``width`` continue on further lines of every row: no text is cut
    off.

    >>> print(*table(["what", "ms"], [["compute", "12.5"], ["wait", "3.0"]], 80), sep="\\n")
    what       ms
    ─────────────
    compute  12.5
    wait      3.0
    """
    cells = [[printable(cell).replace("\n", " ") for cell in row] for row in (header, *rows)]
    columns = [list(column) for column in zip(*cells, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    to_right = [all(_NUMBER.fullmatch(cell) for cell in column[1:]) for column in columns]
    groups = _groups(widths, width)
    indent = " " * min(widths[0] + len(_GAP), 6)

    def lines(row: Sequence[str]) -> list[str]:
        shown = [
            cell.rjust(size) if right else cell.ljust(size)
            for cell, size, right in zip(row, widths, to_right, strict=True)
        ]
        return [
            (indent if number else "") + _GAP.join(shown[position] for position in group).rstrip()
            for number, group in enumerate(groups)
        ]

    found = [lines(row) for row in cells]
    longest = max(len(line) for row in found for line in row)
    return [
        *found[0],
        "─" * (longest if width is None else min(longest, width)),
        *(ln for row in found[1:] for ln in row),
    ]


class Column(NamedTuple):
    """A column of a table.

    head: its name for people. form: a format specification (``.1%``), or a function from a value to
    text. key: its name for programs; by default the head. none: the text of an unknown value
    (None).

    >>> Column("gap", ".1%").text(0.25), Column("gap", ".1%").text(None)
    ('25.0%', '-')
    """

    head: str
    form: str | Callable[[Any], str] = ""
    key: str = ""
    none: str = "-"

    def text(self, value: Any) -> str:
        """Return a value as text for people."""
        if value is None:
            return self.none
        return self.form(value) if callable(self.form) else format(value, self.form)


@dataclass(frozen=True)
class Table:
    """Rows of values under a header; a heading if it has only a title. A header entry that is a
    text is a column without a form.

    >>> steps = Table("Steps", (Column("kind", key="what"), Column("ms", ".1f")), [("compute", 12.5)])
    >>> steps.records()
    [{'what': 'compute', 'ms': 12.5}]
    >>> print(steps.html())
    <table><caption>Steps</caption><tr><th>kind<th>ms<tr><td>compute<td>12.5</table>
    """

    title: str
    header: Sequence[Column | str] = ()
    rows: Sequence[Sequence[Any]] = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        """The header as columns."""
        return tuple(Column(one) if isinstance(one, str) else one for one in self.header)

    def cells(self) -> list[list[str]]:
        """Return the rows as texts."""
        columns = self.columns
        return [[column.text(value) for column, value in zip(columns, row, strict=True)] for row in self.rows]

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as dicts from column keys to values, for programs."""
        keys = [column.key or column.head for column in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]

    def lines(self, width: int | None) -> list[str]:
        """Return the table's lines without its title; no lines for a heading."""
        return table([column.head for column in self.columns], self.cells(), width) if self.header else []

    def html(self) -> str:
        """Return the table as HTML, for a notebook."""
        if not self.header:
            return f"<h4>{escape(self.title)}</h4>"
        heads = "".join(f"<th>{escape(column.head)}" for column in self.columns)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in self.cells())
        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{title}<tr>{heads}{rows}</table>"


Part = Table | Drawing | str
"""A part of an answer: a table, bars over time, a paragraph, or an empty line."""
WIDTH = 80
"""The width of a drawing in characters, if the terminal's width is unknown."""


class Shown(ABC):
    """An answer that formats itself: as text for a terminal, HTML for a notebook, JSON for
    programs."""

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """Return the answer's tables, drawings and paragraphs, in order."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values for JSON."""

    def text(self, width: int | None = None) -> str:
        """Return all parts as lines of ``width``."""
        lines: list[str] = []
        for part in self.parts():
            if isinstance(part, str):
                lines.append(paragraph(part, width, HANGING))
            elif isinstance(part, Drawing):
                lines += part.lines(width or WIDTH)
            else:
                lines += [paragraph(part.title, width)] if part.title else []
                lines += part.lines(width)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return "".join(_html(part) for part in self.parts() if part)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("..." if cycle else self.text(WIDTH))  # IPython in a terminal


def _html(part: Part) -> str:
    if isinstance(part, Table):
        return part.html()
    if isinstance(part, Drawing):
        return f"<pre>{escape(chr(10).join(part.lines(WIDTH)))}</pre>"
    return f"<p>{escape(part)}</p>"


def progress_line(done: int, total: int, loss: str, left: float | None, more: Sequence[str], width: int) -> str:
    """Return a progress line of ``width``: step, bar, loss and time left. more: further texts, most
    important first, added as far as they fit. left: seconds left; None if unknown.

    >>> progress_line(30, 120, "loss 2.5", 75, ["9 tokens/s", "a long remark that finds no room"], 60)
    'step  30/120  ━━━──────────  loss 2.5  9 tokens/s  1:15 left'
    """
    step = f"step {done:>{len(str(total))}}/{total}"
    remaining = f"{'-:--' if left is None else duration(left)} left"
    fixed = [step, loss, remaining]
    while len(fixed) > 1 and len(_GAP.join(fixed)) > width:
        fixed.remove(loss if loss in fixed else remaining)
    room = width - len(_GAP.join(fixed)) - len(_GAP)
    if len(fixed) < 3 or room < _SHORTEST_BAR:
        return _GAP.join(fixed)[:width]
    shown: list[str] = []
    for part in more:
        if room - len(_GAP) - len(part) < _SHORTEST_BAR:
            break
        shown.append(part)
        room -= len(_GAP) + len(part)
    length = min(room, _LONGEST_BAR)
    full = length * done // total if total else length
    return _GAP.join([step, "━" * full + "─" * (length - full), loss, *shown, remaining])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if the number is not 1.

    >>> counted(1, "node"), counted(1200, "node")
    ('1 node', '1,200 nodes')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Return a duration as on a clock.

    >>> duration(75), duration(4000), duration(400_000)
    ('1:15', '1:06:40', '4 d 15 h')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_bytes(size: int) -> str:
    """Return a number of bytes as text for people, with a binary unit.

    >>> in_bytes(3 << 29)
    '1.5 GiB'
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    at = min(max(0, (size.bit_length() - 1) // 10), len(units) - 1)
    scaled = size / (1 << 10 * at)
    return f"{size} B" if at == 0 else f"{scaled:.4g} {units[at]}" if scaled < 1e6 else f"{scaled:.1e} {units[at]}"


def in_seconds(seconds: float) -> str:
    """Return a number of seconds as text for people, with a unit.

    >>> in_seconds(0.0123)
    '12.3 ms'
    """
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds:.1e} s" if seconds else "0 s"


def seconds_text(seconds: float, signed: bool = False) -> str:
    """Return a measured time as text, to a tenth of a millisecond. signed: if True, positive times
    get a plus sign.

    >>> seconds_text(0.0123), seconds_text(-2.5, signed=True), seconds_text(250e-6)
    ('12.3 ms', '-2.50 s', '250 µs')
    """
    sign = "+" if signed and seconds >= 0 else ""
    size = abs(seconds)
    if size >= 100:
        return f"{sign}{seconds:,.0f} s"
    if size >= 1:
        return f"{sign}{seconds:.2f} s"
    return f"{sign}{seconds * 1e3:.1f} ms" if size >= 1e-3 else f"{sign}{seconds * 1e6:.0f} µs"


def _words(text: str) -> list[str]:
    """Return the text split at spaces; a quoted text with spaces is one word."""
    words: list[str] = []
    position = 0
    while found := _WORD.search(text, position):
        end = re.compile(r"\s|$").search(text, found.end())
        assert end
        words.append(text[found.start() : end.start()])
        position = end.start()
    return words


def _groups(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Return the indices of the columns that fit on each line of a table row. width: of the
    terminal in characters; None: all on one line."""
    groups: list[list[int]] = [[]]
    taken = 0
    for position, size in enumerate(widths):
        indent = min(widths[0] + len(_GAP), 6) if len(groups) > 1 else 0
        if groups[-1] and width is not None and indent + taken + size > width:
            groups.append([])
            taken = 0
        groups[-1].append(position)
        taken += size + len(_GAP)
    return groups

"""Text for people, fitted to a width: paragraphs, tables, the line that shows a run's progress.

Plain text in and out: nothing is read as markup, and no terminal's escape sequences come out. A width of
None is a file or a pipe: lines are as long as what they hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?(%|x)?|")
_WORD = re.compile(r"""'[^'\n]*'(?=[\s.,;:)]|$)|"[^"\n]*"(?=[\s.,;:)]|$)|\S""")
_SHORTEST_BAR, _LONGEST_BAR = 8, 40
_GAP = "  "


def printable(text: str, kept: str = "\n") -> str:
    """``text`` with everything that could steer a terminal spelled out, but for the characters ``kept``.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    >>> printable("a\\tb\\r", kept="\\n\\t") == "a\\tb" + r"\\r"
    True
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else ascii(one)[1:-1] for one in text)


def paragraph(text: str, width: int | None, indent: str = "") -> str:
    """``text`` in lines of ``width``, broken only between words; a quoted text counts as one.

    indent: before every line but the first.

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
    """The lines of a table; columns of numbers are aligned at their right.

    Columns that do not fit beside the others are continued on further lines of every row: nothing is cut off.

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
            (indent if number else "") + _GAP.join(shown[place] for place in group).rstrip()
            for number, group in enumerate(groups)
        ]

    found = [lines(row) for row in cells]
    longest = max(len(line) for row in found for line in row)
    return [
        *found[0],
        "─" * (longest if width is None else min(longest, width)),
        *(ln for row in found[1:] for ln in row),
    ]


def progress_line(done: int, total: int, loss: str, left: float | None, more: Sequence[str], width: int) -> str:
    """Step, bar, loss and time left, and of ``more``, most important first, what else fits into ``width``.

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
    """A number of things.

    >>> counted(1, "node"), counted(1200, "node")
    ('1 node', '1,200 nodes')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """A time to wait, as on a clock.

    >>> duration(75), duration(4000), duration(400_000)
    ('1:15', '1:06:40', '4 d 15 h')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_bytes(size: int) -> str:
    """Bytes as people read them.

    >>> in_bytes(3 << 29)
    '1.5 GiB'
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    at = min(max(0, (size.bit_length() - 1) // 10), len(units) - 1)
    scaled = size / (1 << 10 * at)
    return f"{size} B" if at == 0 else f"{scaled:.4g} {units[at]}" if scaled < 1e6 else f"{scaled:.1e} {units[at]}"


def in_seconds(seconds: float) -> str:
    """Seconds as people read them.

    >>> in_seconds(0.0123)
    '12.3 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds:.1e} s" if seconds else "0 s"


def _words(text: str) -> list[str]:
    """Words and quoted texts, each with what follows it up to the next space."""
    words: list[str] = []
    place = 0
    while found := _WORD.search(text, place):
        end = re.compile(r"\s|$").search(text, found.end())
        assert end
        words.append(text[found.start() : end.start()])
        place = end.start()
    return words


def _groups(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Which columns share a line."""
    groups: list[list[int]] = [[]]
    taken = 0
    for place, size in enumerate(widths):
        indent = min(widths[0] + len(_GAP), 6) if len(groups) > 1 else 0
        if groups[-1] and width is not None and indent + taken + size > width:
            groups.append([])
            taken = 0
        groups[-1].append(place)
        taken += size + len(_GAP)
    return groups

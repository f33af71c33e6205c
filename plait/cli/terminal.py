"""What the command line prints: plain text, fitted to a terminal, whole in a file or a pipe.

Nothing that is printed is read as markup, whoever wrote it. Colours are the only escape sequences, and only
on a terminal that takes them and unless NO_COLOR is set.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

import typer

from plait.core.base import text as plain
from plait.core.base.env import no_colour, terminal_width
from plait.core.base.passed_over import PassedOver
from plait.core.base.process import open_standard_streams

WIDEST_TEXT = 100
"""Columns of running text: longer lines are hard to read."""
_kept: ContextVar[list[str] | None] = ContextVar("kept", default=None)
"""Where lines of this thread go that are not to be printed."""


def prepare() -> None:
    """Let nothing that is printed fail for a character that the output cannot show, or because there is no
    output."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def captured() -> Iterator[list[str]]:
    """Lines that this thread would print meanwhile, as they would stand in a file."""
    lines: list[str] = []
    token = _kept.set(lines)
    try:
        yield lines
    finally:
        _kept.reset(token)


def drawing_width() -> int:
    """Columns for a drawing, which needs some width in a file too."""
    return terminal_width(sys.stdout) or 80


def fitted(message: str, stream: TextIO | None = None, indent: str = "") -> str:
    """Running text in lines that fit; one line in a file or a pipe. Paths are never broken."""
    columns = None if _kept.get() is not None else terminal_width(stream or sys.stdout)
    return plain.paragraph(message, columns and min(columns, WIDEST_TEXT), indent)


def say(line: str) -> None:
    """One line, as long as it is."""
    _print(plain.printable(line))


def text(message: str, *, indent: str = "") -> None:
    """Running text. indent: before every line but the first."""
    _print(fitted(message, indent=indent))


def passed_over(over: PassedOver) -> None:
    """What a reader did not take, on standard error: standard output may be a file for another program."""
    for line in over.lines():
        note(line)


def remarked(notes: Sequence[str], over: PassedOver) -> None:
    """What there is to say of a file that was read, on standard error."""
    for line in notes:
        aside(f"note: {line}")
    passed_over(over)


def aside(message: str) -> None:
    """Running text on standard error."""
    typer.echo(fitted(message, sys.stderr), err=True)


def note(line: str) -> None:
    """What people should know, on standard error; nothing of an empty line."""
    if line:
        typer.echo(plain.printable(f"note: {line}", kept=""), err=True)


def title(line: str) -> None:
    """What comes below is about this."""
    _print(coloured(fitted(line), bold=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; what does not fit beside the rest stands on further lines of every row."""
    for line in plain.table(header, rows, None if _kept.get() is not None else terminal_width(sys.stdout)):
        _print(line)


def _print(line: str) -> None:
    kept = _kept.get()
    if kept is None:
        typer.echo(line)
    else:
        kept.append(line)


def coloured(words: str, front: str | None = None, back: str | None = None, *, bold: bool | None = None) -> str:
    """``words`` in colours, where there are any."""
    if _kept.get() is not None or no_colour() or not sys.stdout.isatty() or not (front or back or bold):
        return words
    return typer.style(words, fg=front, bg=back, bold=bold)

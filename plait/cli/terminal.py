"""What the command line prints: plain text, fitted to a terminal, whole in a file or a pipe.

Nothing that is printed is read as markup, whoever wrote it. Colours are the only escape sequences, and only
on a terminal that takes them and unless NO_COLOR is set.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TextIO

import typer

from plait.core import text as plain
from plait.core.env import no_colour, terminal_width

WIDEST_TEXT = 100
"""Columns of running text: longer lines are hard to read."""


def prepare() -> None:
    """Let nothing that is printed fail for a character that the output cannot show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drawing_width() -> int:
    """Columns for a drawing, which needs some width in a file too."""
    return terminal_width(sys.stdout) or 80


def fitted(message: str, stream: TextIO | None = None, indent: str = "") -> str:
    """Running text in lines that fit; one line in a file or a pipe. Paths are never broken."""
    columns = terminal_width(stream or sys.stdout)
    return plain.paragraph(message, columns and min(columns, WIDEST_TEXT), indent)


def say(line: str) -> None:
    """One line, as long as it is."""
    typer.echo(plain.printable(line))


def text(message: str, *, indent: str = "") -> None:
    """Running text. indent: before every line but the first."""
    typer.echo(fitted(message, indent=indent))


def title(line: str) -> None:
    """What comes below is about this."""
    typer.echo(coloured(fitted(line), bold=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; what does not fit beside the rest stands on further lines of every row."""
    for line in plain.table(header, rows, terminal_width(sys.stdout)):
        typer.echo(line)


def coloured(words: str, front: str | None = None, back: str | None = None, *, bold: bool | None = None) -> str:
    """``words`` in colours, where there are any."""
    if no_colour() or not sys.stdout.isatty() or not (front or back or bold):
        return words
    return typer.style(words, fg=front, bg=back, bold=bold)

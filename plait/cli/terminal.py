"""Printing of the command line: plain text, fitted to a terminal, whole in a file or a pipe.

Nothing that is printed is read as markup, whoever wrote it. Colours are the only escape sequences, and only
on a terminal that takes them and unless NO_COLOR is set.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import typer

from plait.core.base import text as plain
from plait.core.base.env import no_colour, terminal_width
from plait.core.base.passed_over import PassedOver
from plait.core.base.pictures import Drawing
from plait.core.base.process import open_standard_streams

COLOURS = {
    "forward": ("black", "bright_blue"),
    "backward": ("black", "bright_green"),
    "input gradient": ("black", "bright_cyan"),
    "weight gradient": ("black", "bright_yellow"),
    "transfer F": ("black", "white"),
    "transfer B": ("white", "bright_black"),
}
"""Letters and ground of bars, by kind."""
WIDEST_TEXT = 100
"""Columns of running text: longer lines are hard to read."""


def prepare() -> None:
    """Let nothing that is printed fail for a character that the output cannot show, or because there is no
    output."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def fitted(message: str, stream: TextIO | None = None, indent: str = "") -> str:
    """Running text in lines that fit; one line in a file or a pipe. Paths are never broken."""
    columns = terminal_width(stream or sys.stdout)
    return plain.paragraph(message, columns and min(columns, WIDEST_TEXT), indent)


def answer(found: plain.Shown, *, as_json: bool, **more: Any) -> None:
    """Print an answer: its tables and paragraphs, or one line of JSON. more: further values of the JSON."""
    if as_json:
        say(json.dumps(found.to_dict() | more))
    else:
        show(found.parts())


def show(parts: Iterable[plain.Part]) -> None:
    """Print tables, bars and paragraphs. What of a table does not fit beside the rest stands on further lines
    of every row."""
    for part in parts:
        if isinstance(part, str):
            text(part, indent=plain.HANGING)
            continue
        if isinstance(part, Drawing):
            for start, pieces in part.rows(terminal_width(sys.stdout) or plain.WIDTH):
                drawn = (coloured(piece.text, *COLOURS.get(piece.kind, (None, None))) for piece in pieces)
                typer.echo(f"{start}{''.join(drawn)}|")
            continue
        if part.title:
            typer.echo(coloured(fitted(part.title), bold=True))
        for line in part.lines(terminal_width(sys.stdout)):
            typer.echo(line)


def say(line: str) -> None:
    """Print one line, as long as it is."""
    typer.echo(plain.printable(line))


def text(message: str, *, indent: str = "") -> None:
    """Print running text. indent: before every line but the first."""
    typer.echo(fitted(message, indent=indent))


def passed_over(over: PassedOver) -> None:
    """Print on standard error what a reader did not take: standard output may be a file for another
    program."""
    for line in over.lines():
        note(line)


def remarked(notes: Sequence[str], over: PassedOver) -> None:
    """Print remarks on a file that was read on standard error."""
    for line in notes:
        aside(f"note: {line}")
    passed_over(over)


def aside(message: str) -> None:
    """Print running text on standard error."""
    typer.echo(fitted(message, sys.stderr), err=True)


def note(line: str) -> None:
    """Print a remark on standard error; nothing of an empty line."""
    if line:
        typer.echo(plain.printable(f"note: {line}", kept=""), err=True)


def coloured(words: str, front: str | None = None, back: str | None = None, *, bold: bool | None = None) -> str:
    """``words`` in colours, where there are any."""
    if no_colour() or not sys.stdout.isatty() or not (front or back or bold):
        return words
    return typer.style(words, fg=front, bg=back, bold=bold)

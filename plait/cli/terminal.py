"""Output of the command line: plain text, wrapped for a terminal, unwrapped in a file or a pipe.

Printed text is never interpreted as markup, whatever its source. Colours are the only escape
sequences; they appear only on a terminal that supports them, unless NO_COLOR is set.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import typer

from plait.core.base import text as plain
from plait.core.base.env import no_colour, terminal_width
from plait.core.base.ignored_input import IgnoredInput
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
"""Text and background colours of bars, by kind."""
WIDEST_TEXT = 100
"""The largest width of running text, in columns: longer lines are hard to read."""


JSON_VERSION = 3
"""The version of what ``--json`` prints, of all commands. It rises if a key is renamed, removed or
changes its meaning."""


def prepare() -> None:
    """Configure the output so that printing never fails because of a character that it cannot show,
    or because there is no output."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def fitted(message: str, stream: TextIO | None = None, indent: str = "") -> str:
    """Return running text, wrapped to the terminal; unwrapped for a file or a pipe. Paths are never
    broken."""
    columns = terminal_width(stream or sys.stdout)
    return plain.paragraph(message, columns and min(columns, WIDEST_TEXT), indent)


def answer(result: plain.Shown, *, as_json: bool, **more: Any) -> None:
    """Print an answer: its tables and paragraphs, or one line of JSON. more: further values of the
    JSON."""
    if as_json:
        print_json(result.to_dict() | more)
    else:
        show(result.parts())


def print_json(values: Mapping[str, Any]) -> None:
    """Print one line of JSON, with the version of all answers."""
    say(json.dumps({"version": JSON_VERSION} | {key: one for key, one in values.items() if key != "version"}))


def show(parts: Iterable[plain.Part]) -> None:
    """Print tables, bars and paragraphs. Columns that do not fit into the width continue on further
    lines of every row."""
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
    """Print one line, unwrapped."""
    typer.echo(plain.printable(line))


def text(message: str, *, indent: str = "") -> None:
    """Print running text. indent: before every line but the first."""
    typer.echo(fitted(message, indent=indent))


def passed_over(over: IgnoredInput) -> None:
    """Print on standard error the input that a reader ignored: standard output may be a file for
    another program."""
    for line in over.lines():
        note(line)


def remarked(notes: Sequence[str], over: IgnoredInput) -> None:
    """Print on standard error the remarks on a file that was read."""
    for line in notes:
        aside(f"note: {line}")
    passed_over(over)


def aside(message: str) -> None:
    """Print running text on standard error."""
    typer.echo(fitted(message, sys.stderr), err=True)


def note(line: str) -> None:
    """Print a remark on standard error; nothing for an empty line."""
    if line:
        typer.echo(plain.printable(f"note: {line}", kept=""), err=True)


def coloured(words: str, front: str | None = None, back: str | None = None, *, bold: bool | None = None) -> str:
    """Return ``words`` in colours if the terminal shows colours."""
    if no_colour() or not sys.stdout.isatty() or not (front or back or bold):
        return words
    return typer.style(words, fg=front, bg=back, bold=bold)

"""Output of the command line: plain text, wrapped for a terminal, unwrapped in a file or a pipe.

Printed text is never interpreted as markup, whatever its source. Colours are the only escape
sequences; they appear only on a terminal that supports them, unless NO_COLOR is set.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TextIO, get_type_hints

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


class Settings:
    """The base of a dataclass whose fields are no options: the user writes them after the command
    as ``KEY=VALUE``. The last text in a field's ``Annotated`` is its help."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command for a function whose parameters may be dataclasses. Their fields
    become options; fields of ``Settings`` become ``KEY=VALUE`` words after the arguments."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = list[Parameter]()
    for name, own in signature(command).parameters.items():
        if name not in groups:
            parameters.append(own.replace(annotation=hints[name]))
        elif not _is_settings(groups[name]):
            parameters += _fields(groups[name])
    parameters += [_words(group) for group in groups.values() if _is_settings(group)]  # after other arguments

    @wraps(command)
    def run(**values: Any) -> None:
        made = {name: _made(group, values) for name, group in groups.items()}
        command(**made, **values)

    parameters = [own.replace(kind=Parameter.KEYWORD_ONLY) for own in parameters]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {own.name: own.annotation for own in parameters}
    return run


def _is_settings(group: Any) -> bool:
    return issubclass(group, Settings)


def _words(group: Any) -> Parameter:
    """Return one argument for all settings of a group; its help names each setting with its
    default."""
    hints, said = get_type_hints(group, include_extras=True), list[str]()
    for field in fields(group):
        default = "..." if field.default is MISSING else _shown(field.default)
        said.append(f"{field.name}={default}: {hints[field.name].__metadata__[-1]}")
    argument = typer.Argument(metavar="[KEY=VALUE]...", help=" ".join(said), show_default=False)
    return Parameter("words", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, argument])


def _shown(default: Any) -> str:
    return "" if default in (None, ()) else f"{default}"


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def _made(group: Any, values: dict[str, Any]) -> Any:
    """Return a group made from its values, and remove them from ``values``."""
    if not _is_settings(group):
        return group(**{field.name: values.pop(field.name) for field in fields(group)})
    from plait.core.base.codec.data import read_settings

    words = values.pop("words") or []
    for name, value in values.items():
        if isinstance(value, Path) and "=" in str(value) and not value.exists():  # not a file but the first setting
            words, values[name] = [str(value), *words], None
    return read_settings(group, words)

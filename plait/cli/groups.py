"""Options, and settings in ``KEY=VALUE``, that travel together as one frozen dataclass: a command takes it as
one parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


class Settings:
    """Base of a dataclass whose fields are no options: they are said behind the command as ``KEY=VALUE``. The
    last text in a field's ``Annotated`` is its help."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer of a function whose parameters may be dataclasses: their fields are options,
    those of ``Settings`` words behind its arguments."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = list[Parameter]()
    for name, own in signature(command).parameters.items():
        if name not in groups:
            parameters.append(own.replace(annotation=hints[name]))
        elif not _is_settings(groups[name]):
            parameters += _fields(groups[name])
    parameters += [_words(group) for group in groups.values() if _is_settings(group)]  # behind other arguments

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
    """One argument for all settings of a group; its help names each with its default."""
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
    """A group of its values, which are taken out of all values."""
    if not _is_settings(group):
        return group(**{field.name: values.pop(field.name) for field in fields(group)})
    from plait.core.base.codec.words import read_settings

    words = values.pop("words") or []
    for name, value in values.items():
        if isinstance(value, Path) and "=" in str(value) and not value.exists():  # no file, but the first setting
            words, values[name] = [str(value), *words], None
    return read_settings(group, words)

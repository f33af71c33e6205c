"""Options that travel together, as one frozen dataclass: a command takes it as one parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer of a function whose parameters may be dataclasses: their fields are
    options."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = list[Parameter]()
    for name, own in signature(command).parameters.items():
        parameters += _fields(groups[name]) if name in groups else [own.replace(annotation=hints[name])]

    @wraps(command)
    def run(**values: Any) -> None:
        made = {name: _made(group, values) for name, group in groups.items()}
        command(**made, **values)

    parameters = [own.replace(kind=Parameter.KEYWORD_ONLY) for own in parameters]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {own.name: own.annotation for own in parameters}
    return run


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
    return group(**{field.name: values.pop(field.name) for field in fields(group)})

"""Texts of a job that become lines of what a terminal, a shell or a cluster manager reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unicodedata import category

from pydantic import ValidationInfo

from plait.core.base.errors import JobError


def one_line(text: str, key: str) -> None:
    """Raise JobError, naming the key, for a text that a terminal, or a shell, would not take as one line.

    >>> one_line("a\\nb", "run.name")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    plait.core.base.errors.JobError: run.name: 'a\\nb' holds a line break, or another ...
    """
    if any(category(letter) in ("Cc", "Zl", "Zp") for letter in text):
        problem = f"{text[:80]!r} holds a line break, or another character that controls a terminal"
        raise JobError(problem, key=key, fix="Leave it out")


def one_line_each(section: str) -> Callable[[Any, ValidationInfo], Any]:
    """A validator of all texts of a section that become lines of a file. Tabs are blanks."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        for one in cast("tuple[Any, ...]", value) if type(value) is tuple else (value,):
            if isinstance(one, str):
                one_line(one.replace("\t", " "), f"{section}.{info.field_name}")
        return value  # pyright: ignore[reportUnknownVariableType]

    return checked

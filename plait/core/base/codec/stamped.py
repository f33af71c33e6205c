"""Files that carry their version and a hash of their content: plans and profiles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

from plait.core.base.codec.data import Section, decode
from plait.core.base.codec.json_text import DOCUMENT, MOST_VALUES, parse_table
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within, reason_of, replacing
from plait.core.base.numbers import shown


class Stamped(Protocol):
    """What such a file holds."""

    def to_dict(self) -> dict[str, Any]:
        """The part that is hashed."""
        ...


Content = TypeVar("Content", bound=Stamped)


def digest(values: Any) -> str:
    """sha256 over plain values, 64 hex digits, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """One kind of file. noun: what users call it. broken: what is wrong with one that is no JSON. fix: what
    to do with one that cannot be used; edited: with one that does not match its hash. most: values in one."""

    noun: str
    version: int
    broken: str
    fix: str | None = None
    edited: str
    most: int = MOST_VALUES

    def on(self, found: str) -> dict[str, Any]:
        """What stands before content whose hash was found."""
        return {"version": self.version, "hash": found}

    def text(self, path: Path) -> str:
        """A file's. Raises JobError where it cannot be read."""
        try:
            return contents_within(path, DOCUMENT).decode()
        except (OSError, ValueError) as error:
            raise JobError(f"cannot be read as a {self.noun}: {reason_of(error)}", file=str(path)) from None

    def opened(self, text: str, file: str, make: Callable[[dict[str, Any]], Content]) -> Content:
        """What ``make`` makes of the text of ``file``. Raises JobError, naming the file, for a text that is
        none, of another version, or edited by hand, and where ``make`` does. What is hashed is what stands
        there: of an older Plait's file, without keys that came later."""
        try:
            values = parse_table(text, most=self.most, unique=True)
        except ValueError as error:
            raise JobError(f"{self.broken}: {error}", file=file, fix=self.fix) from None
        version, stamped = values.pop("version", None), values.pop("hash", None)
        if version != self.version:
            problem = f"{shown(version)} is not a {self.noun} version this Plait reads"
            fix = ". ".join(part for part in (f"It reads version {self.version}", self.fix) if part)
            raise JobError(problem, file=file, key="version", fix=fix)
        written = dict(values)
        try:
            content = make(values)
        except JobError as error:
            raise error.in_file(file) from None
        if stamped != digest({key: written[key] for key in content.to_dict() if key in written}):
            problem = f"does not match the content: the {self.noun} was edited or damaged"
            raise JobError(problem, file=file, key="hash", fix=self.edited)
        return content


class StampedSection(Section):
    """The whole of a file that carries a stamp: one that was measured."""

    STAMP: ClassVar[Stamp]

    @property
    def hash(self) -> str:
        """sha256 over the content, 64 hex digits."""
        return digest(self.to_dict())

    def check(self) -> None:
        """Raise JobError for values that are fine alone and wrong together."""

    def to_dict(self) -> dict[str, Any]:
        """The content as plain values, for JSON; ``from_dict`` reads them back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Checked content from plain values. Raises JobError naming the key."""
        try:
            found = decode(cls, values)
        except JobError as error:
            fix = cls.STAMP.fix if error.problem == "is missing" else error.fix
            raise JobError(error.problem, key=error.key, fix=fix) from None
        found.check()
        return found

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({**self.STAMP.on(self.hash), **self.to_dict()}, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the new one."""
        with replacing(path) as partial:
            partial.write_text(self.to_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises JobError for a file that is none, of another version, or edited by hand."""
        return cls.from_json(cls.STAMP.text(path), str(path))

    @classmethod
    def from_json(cls, text: str, file: str) -> Self:
        """The content of the text of ``file``, with the errors of ``read``."""
        return cls.STAMP.opened(text, file, cls.from_dict)

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
    """The content of a stamped file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the part that is hashed, as plain values."""
        ...


Content = TypeVar("Content", bound=Stamped)


def digest(values: Any) -> str:
    """Return the sha256 of plain values as 64 hex digits, independent of the order of their
    keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """A kind of stamped file. noun: its name for users. broken: the message for a file that is no
    JSON. fix: the advice for an unusable file; edited: the advice for a file that does not match
    its hash. most: the most values of a file."""

    noun: str
    version: int
    broken: str
    fix: str | None = None
    edited: str
    most: int = MOST_VALUES

    def on(self, content_hash: str) -> dict[str, Any]:
        """Return the keys that precede content with the hash ``content_hash``."""
        return {"version": self.version, "hash": content_hash}

    def text(self, path: Path) -> str:
        """Return a file's text. Raises JobError if it cannot be read."""
        try:
            return contents_within(path, DOCUMENT).decode()
        except (OSError, ValueError) as error:
            raise JobError(f"cannot be read as a {self.noun}: {reason_of(error)}", file=str(path),
                           fix="Check the path") from None  # fmt: skip

    def opened(self, text: str, file: str, make: Callable[[dict[str, Any]], Content]) -> Content:
        """Return the content that ``make`` makes of the text of ``file``.

        Raises JobError, naming the file, for a text of another kind or version, or edited by hand,
        and for errors of ``make``. The hash covers only the keys in the file, so files of an older
        Plait lack newer keys and still match.
        """
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
    """The whole content of a stamped file; used for measurements."""

    STAMP: ClassVar[Stamp]

    @property
    def hash(self) -> str:
        """The sha256 of the content, 64 hex digits."""
        return digest(self.to_dict())

    def check(self) -> None:
        """Raise JobError for values that are valid alone but not together."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content as plain values, for JSON; ``from_dict`` reads them back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the validated content from plain values. Raises JobError naming the key."""
        try:
            found = decode(cls, values)
        except JobError as error:
            fix = cls.STAMP.fix if error.problem == "is missing" else error.fix
            raise JobError(error.problem, key=error.key, fix=fix) from None
        found.check()
        return found

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({**self.STAMP.on(self.hash), **self.to_dict()}, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the file atomically: a reader sees the old file or the new one."""
        with replacing(path) as partial:
            partial.write_text(self.to_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the content of a file. Raises JobError for a file of another kind or version, or
        edited by hand."""
        return cls.from_json(cls.STAMP.text(path), str(path))

    @classmethod
    def from_json(cls, text: str, file: str) -> Self:
        """Return the content from the text of ``file``, with the errors of ``read``."""
        return cls.STAMP.opened(text, file, cls.from_dict)

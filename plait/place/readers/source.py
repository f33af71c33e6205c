"""What a reader is given and what it gives back."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from plait.core.errors import JobError
from plait.core.topology import Hardware, State, Topology

LARGEST = 512 << 20
"""Bytes of a file. Ten thousand nodes with everything that Kubernetes knows of them are 100 to 200 MB."""

GZIP = b"\x1f\x8b"
"""How such a file begins, whatever it is called."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """name: which of several topologies of a file. levels: node labels, the outermost first."""

    name: str = ""
    levels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """topology: None where a source tells of states alone. partial: nodes that have no state in it may have
    any. notes: what a person should know of the reading."""

    topology: Topology | None = None
    states: Mapping[str, State] = field(default_factory=dict[str, State])
    hardware: Mapping[str, Hardware] = field(default_factory=dict[str, Hardware])
    partial: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """where: the file, for messages. text: all of it."""

    where: str
    text: str

    @staticmethod
    def read(path: str) -> Source:
        """A file, also one that gzip has packed, or standard input for ``-``. Raises JobError for what is no
        text, or too much of it."""
        where = "standard input" if path == "-" else path
        try:
            if path == "-":
                data = sys.stdin.buffer.read(LARGEST + 1)
            else:
                with Path(path).open("rb") as file:
                    data = file.read(LARGEST + 1)
        except OSError as error:
            raise JobError(f"cannot be read: {error.strerror or error}", file=where) from None
        if data[:2] == GZIP:
            data = _unpacked(data, where)
        if len(data) > LARGEST:
            raise JobError(f"more than {LARGEST >> 20} MiB", file=where)
        try:
            return Source(where, data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise JobError(f"byte {error.start} is not UTF-8, so this is no text", file=where) from None

    @cached_property
    def start(self) -> str:
        """Its first characters, without white space before them."""
        return self.text[:4096].lstrip()[:1]

    @cached_property
    def json(self) -> Any:
        """Its JSON value. Raises JobError naming the line where it breaks off."""
        try:
            return json.loads(self.text)
        except json.JSONDecodeError as error:
            problem = f"not valid JSON: {error.msg} (character {error.colno})"
            raise JobError(problem, key=f"line {error.lineno}") from None
        except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
            problem = "nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON: {error}"
            raise JobError(problem) from None

    @property
    def is_json(self) -> bool:
        """Whether it begins as JSON does."""
        return self.start in ("{", "[")


def _unpacked(data: bytes, where: str) -> bytes:
    try:
        with gzip.open(BytesIO(data)) as file:
            return file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise JobError(f"cannot be unpacked: {error}", file=where) from None

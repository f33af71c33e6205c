"""What a reader is given and what it gives back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from json import JSONDecodeError
from typing import Any

from plait.core.base.codec.json_text import parse_json, unpacked
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within, kind_of
from plait.core.base.passed_over import PassedOver
from plait.core.topology.switches import Hardware, NodeState, Topology

LARGEST = 256 << 20
"""Bytes of a file, unpacked. Ten thousand nodes with all that Kubernetes knows of them are 100 to 200 MB."""
MOST_VALUES = 5_000_000
"""Values of a JSON file."""
LARGEST_TEXT, LONGEST_LINE, MOST_LINES = 32 << 20, 1 << 20, 500_000
"""Characters of a file that is no JSON, and of a line of it; and lines."""
NO_WRITER, SILENCE = 5.0, 60.0
"""Seconds that a pipe may have no writer, and that its writer may be silent."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """name: which of several topologies of a file. levels: node labels, the outermost first. tolerated: keys
    of taints that keep no job of the user's away."""

    name: str = ""
    levels: tuple[str, ...] = ()
    tolerated: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Found:
    """topology: None where a source tells of states alone. partial: nodes that have no state in it may have
    any. notes: what a person should know of the reading. over: what was not taken."""

    topology: Topology | None = None
    states: Mapping[str, NodeState] = field(default_factory=dict[str, NodeState])
    hardware: Mapping[str, Hardware] = field(default_factory=dict[str, Hardware])
    partial: bool = False
    notes: tuple[str, ...] = ()
    over: PassedOver = field(default_factory=PassedOver)


@dataclass(frozen=True)
class Source:
    """where: the file, for messages. text: all of it."""

    where: str
    text: str

    @staticmethod
    def read(path: str) -> Source:
        """A file, also one that gzip, bzip2 or xz has packed; a pipe; or standard input for ``-``. Raises
        JobError for what is no text, or too much of it."""
        where = "standard input" if path == "-" else path
        try:
            if path == "-":
                data = sys.stdin.buffer.read(LARGEST + 1)
            else:
                data = _from_pipe(path) if kind_of(path) == "pipe" else contents_within(path, LARGEST)
        except (OSError, ValueError) as error:
            raise JobError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=where) from None
        if len(data) > LARGEST:
            raise JobError(f"more than {LARGEST >> 20} MiB", file=where)
        try:
            data = unpacked(data, LARGEST)
        except ValueError as error:
            raise JobError(f"cannot be unpacked: {error}", file=where) from None
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise JobError(f"byte {error.start} is not UTF-8, so this is no text", file=where) from None
        return Source(where, text).checked()

    def checked(self) -> Source:
        """Itself. Raises JobError for more text than any cluster needs."""
        if not self.is_json:
            if len(self.text) > LARGEST_TEXT:
                raise JobError(f"more than {LARGEST_TEXT >> 20} MiB of text", file=self.where)
            if sum(map(self.text.count, _LINE_ENDS)) > MOST_LINES:
                raise JobError(f"more than {MOST_LINES} lines", file=self.where)
            if max(map(len, self.text.split("\n"))) > LONGEST_LINE:
                raise JobError(f"a line of more than {LONGEST_LINE} characters", file=self.where)
        return self

    @cached_property
    def start(self) -> str:
        """Its first characters, without white space before them."""
        return self.text[:4096].lstrip()[:1]

    @cached_property
    def json(self) -> Any:
        """Its JSON value. Raises JobError naming the line where it breaks off."""
        try:
            return parse_json(self.text, most=MOST_VALUES)
        except ValueError as error:
            line = f"line {error.lineno}" if isinstance(error, JSONDecodeError) else None
            what = f"{error.msg} (character {error.colno})" if isinstance(error, JSONDecodeError) else error
            raise JobError(f"not valid JSON: {what}", key=line) from None

    @property
    def is_json(self) -> bool:
        """Whether it begins as JSON does."""
        return self.start in ("{", "[")


def _from_pipe(path: str) -> bytes:
    """What is written into a pipe, until its writer closes it. Raises OSError where nobody writes."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = bytearray()
    waits = {"nobody has opened this pipe to write": NO_WRITER, "whoever opened this pipe writes nothing": SILENCE}
    begun = time.monotonic()
    try:
        while len(found) <= LARGEST:
            try:
                part = os.read(pipe, 1 << 20)
                why = "nobody has opened this pipe to write"
            except BlockingIOError:
                part, why = b"", "whoever opened this pipe writes nothing"
            if part:
                found += part
                begun = time.monotonic()
            elif found and why.startswith("nobody"):  # it was closed
                break
            elif time.monotonic() - begun > waits[why]:
                raise OSError(f"{why}, for {waits[why]:.0f} s")
            else:
                time.sleep(0.02)
    finally:
        os.close(pipe)
    return bytes(found)

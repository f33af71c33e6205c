"""JSON and packed files, read within limits: a file of others may be deep, huge, or tiny and packed.

One reader for all of Plait's side files and for files of other programs. What cannot be read is a ValueError
with one sentence; who calls names the file and what to do.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import math
import zlib
from collections import Counter
from dataclasses import dataclass
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn, cast

from plait.core.base.files import contents_within, kind_of
from plait.core.base.uncollected import uncollected

SIDE_FILE = 16 << 20
"""Bytes of a file that is kept beside a run or a checkpoint."""
DOCUMENT = 256 << 20
"""Bytes, unpacked, of a file of another program: a trace, a table of nodes."""
MOST_VALUES = 4_000_000
"""Values in a JSON document: each takes some 100 bytes in memory, however few it takes in the file."""
_CHUNK = 1 << 20
_PACKED: dict[bytes, ModuleType] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\x00": lzma}
"""How a stream begins, and what reads it."""


def unpacked(data: bytes, limit: int = DOCUMENT) -> bytes:
    """The bytes themselves, or what gzip, bzip2 or xz has packed in them, at most ``limit`` of them.

    Raises ValueError for more, and for a stream that is damaged or cut off.

    >>> unpacked(gzip.compress(b"rank 0"))
    b'rank 0'
    >>> unpacked(gzip.compress(bytes(1000)), limit=100)
    Traceback (most recent call last):
    ValueError: its gzip stream holds more than 100 bytes, the most that is read
    """
    found = next((one for mark, one in _PACKED.items() if data.startswith(mark)), None)
    if found is None:
        return data
    whole = bytearray()
    try:
        with found.open(BytesIO(data)) as stream:
            while len(whole) <= limit and (part := stream.read(_CHUNK)):
                whole += part
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"its {found.__name__} stream is damaged: {error}") from None
    if len(whole) > limit:
        raise ValueError(f"its {found.__name__} stream holds more than {limit} bytes, the most that is read")
    return bytes(whole)


def read_unpacked(path: str | Path, limit: int = DOCUMENT) -> bytes:
    """A regular file's bytes, unpacked. Raises OSError where it cannot be read, ValueError as ``unpacked``
    does."""
    return unpacked(contents_within(path, limit), limit)


@dataclass(frozen=True, kw_only=True)
class Most:
    """What a stream may hold: bytes, bytes of a line, and lines."""

    size: int = DOCUMENT
    line: int = 1 << 20
    lines: int = 4_000_000


def open_unpacked(path: str | Path, most: Most) -> BinaryIO:
    """A regular file of text as a stream of what it holds, unpacked. Raises OSError where it cannot be
    opened.

    Reading raises ValueError for more than ``most``, and for a stream that is damaged or cut off.
    """
    if (kind := kind_of(path)) not in ("file", ""):
        raise OSError(errno.EINVAL, f"It is a {kind}, no regular file", str(path))
    raw = Path(path).open("rb")  # noqa: SIM115, who reads the stream closes it
    start = raw.read(max(map(len, _PACKED)))
    raw.seek(0)
    found = next((one for mark, one in _PACKED.items() if start.startswith(mark)), None)
    stream = found.open(raw) if found else raw
    return cast("BinaryIO", BufferedReader(_Within(stream, raw, most), _CHUNK))


class _Within(RawIOBase):
    """A stream of text that fails where it holds more than it may."""

    def __init__(self, stream: Any, raw: BinaryIO, most: Most) -> None:
        self.stream, self.raw, self.most = stream, raw, most
        self.size = self.line = self.lines = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """So much of the stream as there is room for."""
        try:
            part = self.stream.read(len(buffer))
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            raise ValueError(f"it is damaged: {error}") from None
        buffer[: len(part)] = part
        self.size += len(part)
        self.lines += part.count(b"\n")
        ends = part.rfind(b"\n")
        self.line = self.line + len(part) if ends < 0 else len(part) - ends - 1
        if self.size > self.most.size:
            raise ValueError(f"it holds more than {self.most.size} bytes, the most that is read")
        if self.lines > self.most.lines:
            raise ValueError(f"it holds more than {self.most.lines} lines, the most that is read")
        if self.line > self.most.line:
            raise ValueError(f"it has a line of more than {self.most.line} bytes")
        return len(part)

    def close(self) -> None:
        self.stream.close()
        self.raw.close()
        super().close()


def parse_json(text: str | bytes, *, most: int = MOST_VALUES, unique: bool = False) -> Any:
    """The document. Raises ValueError, and nothing else, for what is no JSON, for Infinity, NaN and
    1e999, for more than ``most`` values, for one that is nested too deeply and, where keys must be
    ``unique``, for a table with two equal ones.

    >>> parse_json('{"step": 1}')
    {'step': 1}
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    >>> parse_json('{"seconds": Infinity}')
    Traceback (most recent call last):
    ValueError: Infinity is no number of JSON
    >>> parse_json('{"a": 1, "a": 2}', unique=True)
    Traceback (most recent call last):
    ValueError: the key 'a' stands twice
    """
    commas, brackets, braces = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    values = sum(text.count(cast("Any", mark)) for mark in (commas, brackets, braces))
    if values > most:
        raise ValueError(f"it may hold {values} values; at most {most} are read")
    try:
        with uncollected():
            hook = _once if unique else None
            return json.loads(text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_table(text: str | bytes, *, most: int = MOST_VALUES, unique: bool = False) -> dict[str, Any]:
    """As ``parse_json``, of a document that is a table.

    >>> parse_table("null")
    Traceback (most recent call last):
    ValueError: it is null, no table of keys and values
    """
    found = parse_json(text, most=most, unique=unique)
    if not isinstance(found, dict):
        raise ValueError(f"it is {_kind(found)}, no table of keys and values")
    return cast("dict[str, Any]", found)


def read_json(path: str | Path, limit: int = SIDE_FILE) -> Any:
    """The JSON document in a regular file of at most ``limit`` bytes.

    Raises OSError where it cannot be read, ValueError as ``parse_json`` does.
    """
    return parse_json(contents_within(path, limit))


def read_table(path: str | Path, limit: int = SIDE_FILE, *, unique: bool = False) -> dict[str, Any]:
    """As ``read_json``, of a document that is a table; ``unique`` as for ``parse_json``."""
    return parse_table(contents_within(path, limit), unique=unique)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    """A broken number. 1e999 is one of JSON, and infinity in memory, which no reader expects."""
    value = float(digits)
    if value in (math.inf, -math.inf):
        raise ValueError(f"{digits[:60]} is too large")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of these keys and values, of which none may be said twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:60]!r} stands twice")
    return table


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names[type(value)]

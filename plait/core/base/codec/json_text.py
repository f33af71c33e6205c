"""JSON and compressed files, read within limits: an untrusted file may be deeply nested, huge, or
small but unpack to a huge one.

This is the reader of all of Plait's side files and of other programs' files. An unreadable file
raises ValueError with one sentence; the caller adds the name of the file and the advice.
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
from typing import Any, BinaryIO, NoReturn, TypeGuard, cast

from plait.core.base.files import contents_within, kind_of
from plait.core.base.process import uncollected

SIDE_FILE = 16 << 20
"""The most bytes of a file that is kept next to a run or a checkpoint."""
DOCUMENT = 256 << 20
"""The most bytes, unpacked, of another program's file: a trace, a table of nodes."""
MOST_VALUES = 4_000_000
"""The most values of a JSON document: each takes some 100 bytes in memory, however few in the
file."""
_CHUNK = 1 << 20
_PACKED: dict[bytes, ModuleType] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\x00": lzma}
"""The first bytes of a compressed stream, and the module that reads it."""


def unpacked(data: bytes, limit: int = DOCUMENT) -> bytes:
    """Return ``data``, decompressed if it is a gzip, bzip2 or xz stream; at most ``limit`` bytes.

    Raises ValueError if a compressed stream holds more, is damaged or is cut off.

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
    """Return the bytes of a regular file, decompressed. Raises OSError if it cannot be read,
    ValueError as ``unpacked`` does."""
    return unpacked(contents_within(path, limit), limit)


@dataclass(frozen=True, kw_only=True)
class Most:
    """The limits of a stream: bytes in total, bytes of a line, and lines."""

    size: int = DOCUMENT
    line: int = 1 << 20
    lines: int = 4_000_000


def open_unpacked(path: str | Path, most: Most) -> BinaryIO:
    """Open a regular text file as a decompressed stream. Raises OSError if it cannot be opened.

    Reading raises ValueError if the stream exceeds ``most``, is damaged or is cut off.
    """
    if (kind := kind_of(path)) not in ("file", ""):
        raise OSError(errno.EINVAL, f"It is a {kind}, no regular file", str(path))
    raw = Path(path).open("rb")  # noqa: SIM115, the caller closes the stream
    start = raw.read(max(map(len, _PACKED)))
    raw.seek(0)
    found = next((one for mark, one in _PACKED.items() if start.startswith(mark)), None)
    stream = found.open(raw) if found else raw
    return cast("BinaryIO", BufferedReader(_Within(stream, raw, most), _CHUNK))


class _Within(RawIOBase):
    """A stream of text that fails if it exceeds its limits."""

    def __init__(self, stream: Any, raw: BinaryIO, most: Most) -> None:
        self.stream, self.raw, self.most = stream, raw, most
        self.size = self.line = self.lines = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
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
    """Return the value of a JSON document.

    Raises only ValueError: for invalid JSON, for Infinity, NaN and 1e999, for more than ``most``
    values, and for a document that is nested too deeply. With ``unique``, equal keys in one table
    raise it, too.

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
    ValueError: the key 'a' occurs twice
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
    """Return the value of a JSON document that is a table, with the errors of ``parse_json``.

    >>> parse_table("null")
    Traceback (most recent call last):
    ValueError: it is null, no table of keys and values
    """
    found = parse_json(text, most=most, unique=unique)
    if not is_table(found):
        raise ValueError(f"it is {_kind(found)}, no table of keys and values")
    return found


def is_table(value: object) -> TypeGuard[dict[str, Any]]:
    """Return True if a value of a JSON or TOML document is a table of keys and values."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return True if a value of a JSON or TOML document is a list."""
    return isinstance(value, list)


def read_json(path: str | Path, limit: int = SIDE_FILE) -> Any:
    """Return the value of the JSON document in a regular file of at most ``limit`` bytes.

    Raises OSError if it cannot be read, ValueError as ``parse_json`` does.
    """
    return parse_json(contents_within(path, limit))


def read_table(path: str | Path, limit: int = SIDE_FILE, *, unique: bool = False) -> dict[str, Any]:
    """Return the table of a JSON file, with the limits and errors of ``read_json``; ``unique`` as
    for ``parse_json``."""
    return parse_table(contents_within(path, limit), unique=unique)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    """Return the float of a JSON number. Raises ValueError for a number such as 1e999, which would
    be infinity."""
    value = float(digits)
    if value in (math.inf, -math.inf):
        raise ValueError(f"{digits[:60]} is too large")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of keys and values. Raises ValueError if a key occurs twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return table


def _kind(value: Any) -> str:
    """Return JSON's name for a value's type, such as ``a list`` or ``null``."""
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names[type(value)]

"""Read rows of files that hold several documents: JSON lines, JSON, CSV, TSV, Parquet, Arrow.

``rows(file, kind)`` yields every row as in the file: a table of values (the columns of a file, the
keys of an object), or a plain string, if a line of JSON is a string. ``plait.train.data.documents``
turns rows into documents, with ``data.text_key``.

| format | read with | a row |
|---|---|---|
| JSON lines | ``json`` | a line that is not blank |
| JSON | ``json`` | an element of the list, or one of several consecutive values |
| CSV, TSV | ``csv`` (quotes, line ends in fields) | a line under the header |
| Parquet | ``pyarrow.parquet`` | a row |
| Arrow (file or stream, as Hugging Face datasets save) | ``pyarrow.ipc`` | a row |

Bytes that are not UTF-8 become U+FFFD and are counted in ``Row.bad``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.train.data import kinds, tables
from plait.train.data.kinds import Decoder, FileKind, decoded, opened
from plait.train.data.sources import SourceFile, damaged
from plait.train.data.tables import LARGEST_ROW, Unfit

BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row. where: its line or number in the file, from 1. bad: the number of its bytes that
    were not UTF-8."""

    where: str
    values: dict[str, Any] | str
    bad: int = 0


def rows(file: SourceFile, kind: FileKind, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file in order. columns: the columns to read of a Parquet or Arrow table;
    None: all.

    Raises DataError naming the file, the row and the problem.
    """
    if kind.format in (kinds.PARQUET, kinds.ARROW, kinds.ARROW_STREAM):
        yield from _table_rows(file, kind, columns)
        return
    with opened(file.path, kind.compression) as stream:
        try:
            yield from _READERS[kind.format](stream)
        except _Wrong as wrong:
            raise DataError(f"{file.path}: {wrong}; correct it, or take the file out") from None


class _Wrong(Exception):
    """A problem of a row, with its position; becomes a DataError that names the file."""


def _json_lines(stream: IO[bytes]) -> Iterator[Row]:
    number = 0
    while line := stream.readline(LARGEST_ROW + 1):
        number += 1
        if len(line) > LARGEST_ROW:
            raise _Wrong(f"line {number} is longer than {LARGEST_ROW:,} bytes")
        line = line.removeprefix(b"\xef\xbb\xbf")  # on any line, since files may have been concatenated
        if line.isspace():
            continue
        text, bad = decoded(line)
        try:
            values = json.loads(text)
        except ValueError as error:
            raise _Wrong(f"line {number} is not JSON ({error}): {shown(text[:60])}") from None
        except RecursionError:
            raise _Wrong(f"line {number} is nested too deeply") from None
        yield Row(f"line {number}", _checked(values, f"line {number}"), bad)


def _json_values(stream: IO[bytes]) -> Iterator[Row]:
    """Yield the elements of a list, or consecutive values; at most one is held in memory."""
    text, number = _Ahead(stream), 0
    listed = text.skip() == "["
    if listed:
        text.take(1)
    while (first := text.skip()) and not (listed and first == "]"):
        number += 1
        if listed and number > 1:
            if first != ",":
                raise _Wrong(f"after value {number - 1} of the list stands {shown(first)}, no comma")
            text.take(1)
            text.skip()
        yield Row(f"value {number}", _checked(text.value(number), f"value {number}"), text.bad())
    if listed:
        if not first:
            raise _Wrong(f"the list is cut off after value {number}")
        text.take(1)
        if text.skip():
            raise _Wrong("something stands behind the list")


class _Ahead:
    """A buffer of a JSON stream's text, consumed from the beginning."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._decoder, self._text, self._at = stream, Decoder(), "", 0
        self._ended, self._reported = False, 0
        self._json = json.JSONDecoder()

    def skip(self) -> str:
        """Skip blanks; return the next character, empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, count: int) -> None:
        """Consume ``count`` characters."""
        self._at += count

    def value(self, number: int) -> Any:
        """Consume and return the JSON value that begins here. Raises _Wrong."""
        size = BLOCK
        while True:
            try:
                found, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                raise _Wrong(f"value {number} is nested too deeply") from None
            except ValueError as error:
                if not self._more(size):
                    raise _Wrong(f"value {number} is not JSON ({error})") from None
                size *= 2  # so that parsing a long value again and again stays linear in its length
                if len(self._text) - self._at > LARGEST_ROW:
                    raise _Wrong(
                        f"value {number} is longer than {LARGEST_ROW:,} characters, or not JSON ({error})"
                    ) from None
                continue
            self._at = end
            return found

    def bad(self) -> int:
        """Return the number of bytes that were not UTF-8 since the last call."""
        new, self._reported = self._decoder.bad - self._reported, self._decoder.bad
        return new

    def _more(self, size: int = BLOCK) -> bool:
        if self._ended:
            return False
        block = self._stream.read(size)
        self._ended = not block
        self._text = self._text[self._at :] + self._decoder.feed(block, final=self._ended)
        self._at = 0
        return bool(self._text)


def _separated(delimiter: str) -> Callable[[IO[bytes]], Iterator[Row]]:
    def read(stream: IO[bytes]) -> Iterator[Row]:
        csv.field_size_limit(LARGEST_ROW)
        decoder, lines = Decoder(), list[str]()
        reader = csv.reader(_lines(stream, decoder, lines), delimiter=delimiter, strict=True)
        counted = 0
        names: list[str] = []
        try:
            for fields in reader:
                where = _where(reader.line_num, lines)
                lines.clear()
                if not names:
                    names = fields
                    if twice := [name for name in names if names.count(name) > 1]:
                        raise _Wrong(f"the header has {shown(twice[0])} twice")
                elif fields:  # no blank line
                    if len(fields) != len(names):
                        raise _Wrong(f"{where}: {len(fields)} fields, and the header has {len(names)}")
                    bad, counted = decoder.bad - counted, decoder.bad
                    yield Row(where, dict(zip(names, fields, strict=True)), bad)
        except csv.Error as error:
            if "new-line character" in str(error):
                raise _Wrong("a line ends with CR alone; write line ends anew") from None
            raise _Wrong(
                f"{_where(reader.line_num, lines)}: {error}: a field that begins with a quote ends with one before a "
                "separator or line end; double quotes that belong to its text"
            ) from None

    return read


def _where(last: int, lines: Sequence[str]) -> str:
    """Return the position of a row that ends in line ``last``."""
    return f"line {last}" if len(lines) < 2 else f"lines {last - len(lines) + 1} to {last}"


def _lines(stream: IO[bytes], decoder: Decoder, kept: list[str]) -> Iterator[str]:
    """Yield lines with their ends, CRLF or LF unchanged, as ``csv`` expects them. kept: a list that
    gets the lines, too."""
    while line := stream.readline(LARGEST_ROW + 1):
        if len(line) > LARGEST_ROW:
            raise _Wrong(f"a line is longer than {LARGEST_ROW:,} bytes")
        kept.append(decoder.feed(line))
        yield kept[-1]
    if rest := decoder.feed(b"", final=True):
        yield rest


_READERS: dict[str, Callable[[IO[bytes]], Iterator[Row]]] = {
    kinds.JSON_LINES: _json_lines, kinds.JSON: _json_values, kinds.CSV: _separated(","), kinds.TSV: _separated("\t"),
}  # fmt: skip


def _checked(values: Any, where: str) -> dict[str, Any] | str:
    if isinstance(values, dict | str):
        return cast("dict[str, Any] | str", values)
    raise _Wrong(f"{where} is {shown(values)}, neither an object nor a text")


# ---- tables ----


def _table_rows(file: SourceFile, kind: FileKind, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow as pa

    number = 0
    try:
        for values, bad in tables.table(file.path, kind.format, columns):
            number += 1
            yield Row(f"row {number}", values, bad)
    except Unfit as error:
        raise DataError(f"{file.path}: is {kind.format}, and behind row {number} {error}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(file.path, kind.format, error, f", behind row {number}") from None

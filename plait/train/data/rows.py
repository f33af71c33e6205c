"""Rows of files that hold several documents: JSON lines, JSON, CSV, TSV, Parquet, Arrow.

``rows(file, kind)`` gives every row as it stands in the file: a table of values (the columns of a file, the
keys of an object), or a text alone, where a line of JSON is a string. What becomes a document of it is the
matter of ``plait.train.data.documents``, which takes ``data.text_key``.

| format | read with | a row |
|---|---|---|
| JSON lines | ``json`` | a line that is not blank |
| JSON | ``json`` | an element of the list, or one of the values that stand one after another |
| CSV, TSV | ``csv`` (quotes, line ends in fields) | a line under the header |
| Parquet | ``pyarrow.parquet`` | a row |
| Arrow (file or stream, as Hugging Face datasets save) | ``pyarrow.ipc`` | a row |

Bytes that are no UTF-8 read U+FFFD and are counted in ``Row.bad``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.train.data import kinds, tables
from plait.train.data.compressed import opened
from plait.train.data.kinds import FileKind
from plait.train.data.sources import SourceFile
from plait.train.data.tables import LARGEST_ROW, Unfit
from plait.train.data.utf8 import Decoder, not_utf8

BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row. where: its line or number in the file, from 1. bad: bytes of it that were no UTF-8."""

    where: str
    values: dict[str, Any] | str
    bad: int = 0


def rows(file: SourceFile, kind: FileKind, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a file in their order. columns: which of a Parquet or Arrow table are read; None: all.

    Raises DataError naming file, row and what is wrong with it.
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
    """What is wrong with a row, and where."""


def _json_lines(stream: IO[bytes]) -> Iterator[Row]:
    number = 0
    while line := stream.readline(LARGEST_ROW + 1):
        number += 1
        if len(line) > LARGEST_ROW:
            raise _Wrong(f"line {number} is longer than {LARGEST_ROW:,} bytes")
        line = line.removeprefix(b"\xef\xbb\xbf")  # also where files were put one behind the other
        if line.isspace():
            continue
        bad = not_utf8(line)
        try:
            values = json.loads(line.decode(errors="replace"))
        except ValueError as error:
            raise _Wrong(f"line {number} is not JSON ({error}): {shown(line[:60].decode(errors='replace'))}") from None
        except RecursionError:
            raise _Wrong(f"line {number} is nested too deeply") from None
        yield Row(f"line {number}", _checked(values, f"line {number}"), bad)


def _json_values(stream: IO[bytes]) -> Iterator[Row]:
    """Elements of a list, or values one after another; no more is held than one of them."""
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
    """Text of a stream, of which the beginning is taken."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._decoder, self._text, self._at = stream, Decoder(), "", 0
        self._ended, self._told = False, 0
        self._json = json.JSONDecoder()

    def skip(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, count: int) -> None:
        """Pass over so many characters."""
        self._at += count

    def value(self, number: int) -> Any:
        """The value that begins here."""
        size = BLOCK
        while True:
            try:
                found, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                raise _Wrong(f"value {number} is nested too deeply") from None
            except ValueError as error:
                if not self._more(size):
                    raise _Wrong(f"value {number} is not JSON ({error})") from None
                size *= 2  # so that reading a long value again costs twice its length at most
                if len(self._text) - self._at > LARGEST_ROW:
                    raise _Wrong(
                        f"value {number} is longer than {LARGEST_ROW:,} characters, or not JSON ({error})"
                    ) from None
                continue
            self._at = end
            return found

    def bad(self) -> int:
        """Bytes that were no UTF-8, since this was asked last."""
        new, self._told = self._decoder.bad - self._told, self._decoder.bad
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
        told = 0
        names: list[str] | None = None
        try:
            for fields in reader:
                where = _where(reader.line_num, lines)
                lines.clear()
                if names is None:
                    names = _header(fields)
                    continue
                if not fields:  # a blank line
                    continue
                if len(fields) != len(names):
                    raise _Wrong(f"{where}: {len(fields)} fields, and the header has {len(names)}")
                bad, told = decoder.bad - told, decoder.bad
                yield Row(where, dict(zip(names, fields, strict=True)), bad)
        except csv.Error as error:
            problem = "a line ends with CR alone; write line ends anew" if "new-line character" in str(error) else error
            last, opens = reader.line_num, _open_quote("".join(lines), delimiter)
            if opens is None:
                raise _Wrong(f"line {last}: {problem}") from None
            raise _Wrong(
                f"line {last - len(lines) + 1 + opens}: a field begins with a quote that is not closed before a "
                f"separator or line end (line {last}: {problem}); double quotes that belong to a quoted text"
            ) from None

    return read


def _where(last: int, lines: Sequence[str]) -> str:
    """Where a row stands that ends in line ``last``."""
    return f"line {last}" if len(lines) < 2 else f"lines {last - len(lines) + 1} to {last}"


def _open_quote(text: str, delimiter: str) -> int | None:
    """Line ends before the first quote that begins a field and is closed nowhere, or before other letters."""
    field = re.compile(rf'(?:"[^"]*(?:""[^"]*)*"(?=[{delimiter}\r\n]|$)|(?!")[^{delimiter}\n]*)[{delimiter}\n]?')
    at = 0
    while (found := field.match(text, at)) and found.end() > at:
        at = found.end()
    return text.count("\n", 0, at) if text.startswith('"', at) else None


def _header(fields: list[str]) -> list[str]:
    """The names of columns. Raises _Wrong for a name that comes twice."""
    twice = next((name for name in fields if fields.count(name) > 1), None)
    if twice is not None:
        raise _Wrong(f"the header has {shown(twice)} twice")
    return fields


def _lines(stream: IO[bytes], decoder: Decoder, kept: list[str]) -> Iterator[str]:
    """Lines with their ends, as ``csv`` wants them: CRLF and LF as they stand in the file. kept: gets them,
    too."""
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
        problem = " ".join(str(error).split())[:200]
        raise DataError(
            f"{file.path}: is {kind.format} that is damaged or cut off, behind row {number} ({problem}); fetch it "
            "again or remove it"
        ) from None

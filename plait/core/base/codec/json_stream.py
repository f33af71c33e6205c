"""JSON documents of any length, read a member at a time: other programs' traces may have hundreds
of megabytes.

Profilers write some invalid JSON. The reader accepts the following and counts each in a
``IgnoredInput``:

- ``NaN``, ``Infinity``, ``inf``, ``-nan`` and the like, as null: unknown numbers;
- a backslash that begins no escape, as itself; bytes that are no UTF-8, as ``\xff``; raw control
characters;
- an element of a long array that is still invalid: it is left out.

All other deviations raise ValueError with one sentence: the document is no JSON object (nor an
array, if an array is allowed), is cut off or nested too deeply. So does a document that unpacks to
more bytes than its size allows.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping
from json import scanner
from pathlib import Path
from typing import Any, BinaryIO

from plait.core.base.codec.json_text import Most, open_unpacked
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.process import uncollected

LONGEST = 1 << 20
"""The most characters of an element of a long array."""
HEADER = 4 << 20
"""The most characters of any other value."""
MOST_KEYS = 10_000
"""The most keys of the top-level object."""
AHEAD, CHUNK = 1 << 14, 1 << 16
"""The characters that the buffer holds at the start of a value, and the characters per read. A
parse error costs time proportional to the buffer."""
LEAST_UNPACKED, TIMES = 64 << 20, 64
"""The limits of a decompressed file: this many bytes, or this many times its packed size, whichever
is more. Traces shrink to a tenth or a twentieth."""

_NO_NUMBER = re.compile(r"[+-]?\b(?:inf(?:inity)?|nan)\b(?:\(\w*\))?", re.IGNORECASE)
_NO_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]|[^"\[\]{}]+', re.DOTALL)
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_BLANK = re.compile(r"[ \t\n\r]*")


Take = Callable[[Any], object]


def read_stream(path: str | Path, long: Mapping[str, Take], over: IgnoredInput, bare: str = "") -> dict[str, Any]:
    """Return the members of the JSON object in a regular file, compressed (gzip, bzip2, xz) or not.

    long: callbacks by key; each gets the elements of that key's long array, one at a time, and the
    returned value of that key is the number of elements. bare: the key of ``long`` to use if the
    document is an array instead of an object. over: counts ignored input. Raises OSError if the
    file cannot be read, ValueError if it is no such document.
    """
    most = max(LEAST_UNPACKED, TIMES * Path(path).stat().st_size)
    with open_unpacked(path, Most(size=most, line=most, lines=most)) as stream, uncollected():
        return _Reader(stream, over).members(long, bare)


class _Reader:
    """Reader of a JSON document from a stream, with a buffer of its text. at: index in the buffer
    of the next character to read."""

    def __init__(self, stream: BinaryIO, over: IgnoredInput) -> None:
        self.stream, self.over = stream, over
        self.text, self.at, self.ended = "", 0, False
        self.decoder = getincrementaldecoder("utf-8")("backslashreplace")
        decoder = json.JSONDecoder(parse_constant=self._no_number, strict=False)
        self.scan: Any = scanner.make_scanner(decoder)  # type: ignore[attr-defined]

    def members(self, long: Mapping[str, Take], bare: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._next() == "\ufeff":
            self.at += 1
        if bare and self._next() == "[":
            self.at += 1
            found[bare] = self._elements(long[bare])
            return self._ended(found)
        self._take("{", "it is no JSON object")
        while self._next() != "}":
            if len(found) >= MOST_KEYS:
                raise ValueError(f"it has more than {MOST_KEYS} keys")
            key = self._value(HEADER)
            if not isinstance(key, str):
                raise ValueError("a key in it is no text")
            self._take(":", f"no value follows its key {key[:60]!r}")
            if key in long and self._next() == "[":
                self.at += 1
                found[key] = self._elements(long[key])
            else:
                found[key] = self._header(key)
            if self._next() != ",":
                break
            self.at += 1
        self._take("}", "it is cut off, or no JSON")
        return self._ended(found)

    def _ended(self, members: dict[str, Any]) -> dict[str, Any]:
        if self._next():
            raise ValueError("it has data after the end of its JSON")
        return members

    def _header(self, key: str) -> Any:
        try:
            return self._value(HEADER)
        except _NoElementError:
            raise ValueError(f"the value of its key {key[:60]!r} is no JSON") from None

    def _elements(self, take: Take) -> int:
        """Pass the elements of an array to ``take`` and return their number."""
        count = 0
        while self._next() != "]":
            try:
                take(self._value(LONGEST))
                count += 1
            except _NoElementError:
                self.over.note("elements that are no JSON")
            count += self._plain(take)
            if self._next() != ",":
                break
            self.at += 1
        self._take("]", "it is cut off, or no JSON")
        return count

    def _plain(self, take: Take) -> int:
        """Pass further elements to ``take`` as long as they are strict JSON and fully in the
        buffer; return their number. This is the fast path for millions of elements."""
        text, at, count, scan, comma = self.text, self.at, 0, self.scan, _COMMA.match
        most = len(text) - AHEAD
        while at < most and (found := comma(text, at)):
            try:
                value, end = scan(text, found.end())
            except (ValueError, StopIteration, RecursionError):
                break
            at = self.at = end
            count += 1
            take(value)
        return count

    def _next(self) -> str:
        """Return the next character that is not blank; empty at the end."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._fill(CHUNK)

    def _take(self, mark: str, problem: str) -> None:
        if self._next() != mark:
            raise ValueError(problem)
        self.at += 1

    def _fill(self, wanted: int) -> None:
        """Read until the buffer holds ``wanted`` characters from ``at`` on, or all that are
        left."""
        parts, there = [self.text[self.at :]], len(self.text) - self.at
        while there < wanted and not self.ended:
            data = self.stream.read(max(CHUNK, wanted - there))
            self.ended = not data
            text = self.decoder.decode(data, final=self.ended)
            parts.append(text)
            there += len(text)
        self.text, self.at = "".join(parts), 0

    def _value(self, most: int) -> Any:
        """Return the next value, of at most ``most`` characters."""
        self._next()
        if len(self.text) - self.at < AHEAD and not self.ended:
            self._fill(AHEAD + CHUNK)
        while True:
            try:
                value, end = self.scan(self.text, self.at)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            except (ValueError, StopIteration):
                if (end := self._end()) is not None:
                    return self._mended(end)
            else:
                if end < len(self.text) or self.ended:  # a number may go on
                    self.at = end
                    return value
            there = len(self.text) - self.at
            if self.ended or there > most:
                raise ValueError("it is cut off, or no JSON" if self.ended else
                                 f"a value in it has more than {most} characters")  # fmt: skip
            self._fill(min(16 * there, most + CHUNK))

    def _mended(self, end: int) -> Any:
        """Return the value up to ``end``, which is not strict JSON, and count its deviations."""
        said, self.at = self.text[self.at : end], end
        parts = [self._escaped(one) if one[0] == '"' else self._without(one) for one in _TOKEN.findall(said)]
        try:
            return json.loads("".join(parts), parse_constant=self._no_number, strict=False)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except ValueError as error:
            raise _NoElementError(str(error)) from None

    def _end(self) -> int | None:
        """Return the end of the value at ``at``, found by its brackets; None if the end is not in
        the buffer yet."""
        depth = 0
        for token in _TOKEN.finditer(self.text, self.at):
            mark = token[0]
            depth += (mark in "[{") - (mark in "]}") if len(mark) == 1 else 0
            if depth < 0:
                return token.start()
            if depth == 0:
                if mark in ("]", "}") or mark[0] == '"':
                    return token.end()
                end = token.start() + len(mark.partition(",")[0])
                return end if end < len(self.text) or self.ended else None
        return None

    def _no_number(self, word: str) -> None:
        self.over.note("numbers that JSON does not have, taken as unknown", word)

    def _without(self, text: str) -> str:
        """Return text between strings and brackets, with null in place of NaN and infinities."""
        for word in _NO_NUMBER.findall(text):
            self._no_number(word)
        return _NO_NUMBER.sub("null", text)

    def _escaped(self, text: str) -> str:
        """Return a string in which every backslash that begins no escape is doubled."""
        found = _NO_ESCAPE.sub(lambda one: one[0] if one[1] else "\\\\", text)
        if found != text:
            self.over.note("strings with a backslash or bytes that JSON does not have, taken as they stand")
        return found


class _NoElementError(ValueError):
    """An element's text is no JSON, but the elements after it may be."""

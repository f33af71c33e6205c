"""Pickles of plain data, read without Python's ``pickle``: nothing is imported and nothing is called.

| what                                                              | is                                     |
|-------------------------------------------------------------------|----------------------------------------|
| dicts with keys of text, lists, text, numbers, true, false, None, | known, of protocols 2 to 5             |
| values that stand in several places                               |                                        |
| tuples                                                            | known, read as lists                   |
| NaN, Infinity; bytes of a text that are no UTF-8                  | read as None and as ``\\xff``, counted |
| classes, functions, calls, states of objects, sets, bytes, other  | refused                                |
| instructions; what holds itself; what is cut off, goes on after   |                                        |
| its end, is deep, or has more values, characters or bytes than    |                                        |
| is read                                                           |                                        |

A pickle is a program for a machine with a stack. A few bytes of it can make a value that stands in itself a
billion times: so values count as often as they stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from struct import unpack_from
from typing import Any, NoReturn, cast

from plait.core.base.codec.json_stream import HEADER, LONGEST, Take
from plait.core.base.codec.json_text import MOST_VALUES, read_unpacked, uncollected
from plait.core.base.passed_over import PassedOver

MARKS = tuple(bytes([0x80, version]) for version in range(2, 6))
"""How a pickle begins."""
SIZE = 64 << 20
"""Bytes, unpacked."""
SPREAD = 128 << 20
"""Characters that all values take where every one is written out wherever it stands."""
DEEPEST = 100
"""Values within each other."""
NO_TEXT = 1 << 20
"""Bytes of all texts that are no UTF-8: they take long."""
LONGEST_NUMBER = 16
"""Bytes of a whole number."""
_PLAIN = 8
"""Characters of a number and the like, or of brackets and blanks, about."""
_MARK = object()
_CONSTANTS: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False}
_NUMBERS = {b"J": ("<i", 4), b"K": ("<B", 1), b"M": ("<H", 2), b"G": (">d", 8)}
_TEXTS = {b"X": ("<I", 4), b"\x8c": ("<B", 1), b"\x8d": ("<Q", 8)}
_PUTS = {b"q": ("<B", 1), b"r": ("<I", 4)}
_GETS = {b"h": ("<B", 1), b"j": ("<I", 4)}
_OBJECTS = {
    b"c": "GLOBAL", b"R": "REDUCE", b"i": "INST", b"o": "OBJ", b"b": "BUILD", b"P": "PERSID", b"Q": "BINPERSID",
    b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"\x93": "STACK_GLOBAL", b"\x82": "EXT1", b"\x83": "EXT2",
    b"\x84": "EXT4",
}  # fmt: skip
"""Instructions by which a pickle imports and calls."""


def read_plain(path: str | Path, long: Mapping[str, Take], over: PassedOver) -> dict[str, Any]:
    """Members of the dict in a regular file, packed (gzip, bzip2, xz) or not: as
    ``core.base.codec.json_stream.read_stream`` of JSON.

    Raises OSError where the file cannot be read, ValueError for what is no such pickle.
    """
    whole, sizes = parse_plain(read_unpacked(path, SIZE), over)
    if not isinstance(whole, dict):
        raise ValueError("it is a pickle of something else than a dict")
    found: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", whole).items():
        if key in long and isinstance(value, list):
            for one in cast("list[Any]", value):
                if sizes.of(one) > LONGEST:
                    raise ValueError(f"an element of its {key[:60]!r} has more than {LONGEST} characters")
                long[key](one)
            found[key] = len(cast("list[Any]", value))
        elif sizes.of(value) > HEADER:
            raise ValueError(f"the value of its key {key[:60]!r} has more than {HEADER} characters")
        else:
            found[key] = value
    return found


@uncollected()
def parse_plain(data: bytes, over: PassedOver) -> tuple[Any, PickleSizes]:
    """The value that a pickle makes of plain data, and the sizes of all in it. over: takes what was passed
    over.

    Raises ValueError, and nothing else, for every other pickle.

    >>> parse_plain(bytes([0x80, 2]) + b"]q\\0(K\\1K\\2e.", PassedOver())[0]
    [1, 2]
    >>> parse_plain(bytes([0x80, 2]) + b"cos\\nsystem\\n", PassedOver())
    Traceback (most recent call last):
    ValueError: it holds a class, function or call (GLOBAL at byte 2), which is not run: plain data is read
    """
    try:
        value = _PickleMachine(data, over).run()
    except IndexError:
        raise ValueError("it is a damaged pickle: it takes a value that is not there") from None
    sizes = PickleSizes()
    if sizes.of(value) > SPREAD:
        raise ValueError(f"its values take more than {SPREAD} characters where they are written out")
    return value, sizes


class _PickleMachine:
    """Runs the instructions that make plain data. stack: values, and the marks that begin a list of them;
    memo: values that may come again, by number."""

    def __init__(self, data: bytes, over: PassedOver) -> None:
        self.data, self.over, self.at = data, over, 0
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.no_text = 0
        push = self.stack.append
        does: dict[bytes, Callable[[], object]] = {
            b"(": lambda: push(_MARK), b"]": lambda: push([]), b"}": lambda: push({}), b")": lambda: push([]),
            b"a": lambda: self._extend(self._last(1)), b"e": lambda: self._extend(self._since_mark()),
            b"s": lambda: self._set(self._last(2)), b"u": lambda: self._set(self._since_mark()),
            b"t": lambda: push(self._since_mark()), b"\x85": lambda: push(self._last(1)),
            b"\x86": lambda: push(self._last(2)), b"\x87": lambda: push(self._last(3)),
            b"\x80": self._protocol, b"\x8a": self._long, b"\x94": lambda: self._put(len(self.memo)),
            b"\x95": lambda: self._number("<Q", 8),
            **{code: partial(push, value) for code, value in _CONSTANTS.items()},
            **{code: partial(self._plain_number, *how) for code, how in _NUMBERS.items()},
            **{code: partial(self._text, *how) for code, how in _TEXTS.items()},
            **{code: partial(self._put_as, *how) for code, how in _PUTS.items()},
            **{code: partial(self._get, *how) for code, how in _GETS.items()},
        }  # fmt: skip
        self.does = {code[0]: act for code, act in does.items()}

    def run(self) -> Any:
        """The value that is left at the end."""
        data, does = self.data, self.does
        for _ in range(MOST_VALUES):
            if self.at >= len(data):
                raise ValueError("it is a pickle that is cut off")
            code = data[self.at]
            self.at += 1
            if code == ord("."):
                break
            act = does.get(code)
            if act is None:
                self._refuse(code)
            act()
        else:
            raise ValueError(f"it has more than {MOST_VALUES} instructions, the most that are read")
        if self.at < len(data):
            raise ValueError("something follows the end of its pickle")
        (value,) = self._last(1)
        if self.stack:
            raise ValueError("it is a damaged pickle: values are left at its end")
        return value

    def _refuse(self, code: int) -> NoReturn:
        where, name = f"at byte {self.at - 1}", _OBJECTS.get(bytes([code]))
        if name is None:
            raise ValueError(f"its instruction {code:#04x} {where} is none that makes plain data")
        raise ValueError(f"it holds a class, function or call ({name} {where}), which is not run: plain data is read")

    # ---- what stands after an instruction ----

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError("it is a pickle that is cut off")
        self.at += count
        return self.data[self.at - count : self.at]

    def _number(self, how: str, size: int) -> Any:
        if size > len(self.data) - self.at:
            raise ValueError("it is a pickle that is cut off")
        self.at += size
        return unpack_from(how, self.data, self.at - size)[0]

    def _protocol(self) -> None:
        if (version := self._number("<B", 1)) not in range(2, 6):
            raise ValueError(f"it is a pickle of protocol {version}; read are 2 to 5")

    # ---- values ----

    def _plain_number(self, how: str, size: int) -> None:
        value = self._number(how, size)
        if isinstance(value, float) and not math.isfinite(value):
            self.over.note("numbers that are not finite, taken as unknown", str(value))
            value = None
        self.stack.append(value)

    def _long(self) -> None:
        if (size := self._number("<B", 1)) > LONGEST_NUMBER:
            raise ValueError(f"it has a number of {size} bytes; read are at most {LONGEST_NUMBER}")
        self.stack.append(int.from_bytes(self._bytes(size), "little", signed=True))

    def _text(self, how: str, size: int) -> None:
        found = self._bytes(self._number(how, size))
        try:
            self.stack.append(found.decode())
        except UnicodeDecodeError:
            self.no_text += len(found)
            if self.no_text > NO_TEXT:
                raise ValueError(f"it has more than {NO_TEXT} bytes of text that is no UTF-8") from None
            self.over.note("texts with bytes that are no UTF-8, taken as they stand")
            self.stack.append(found.decode(errors="backslashreplace"))

    # ---- values that come again ----

    def _put(self, number: int) -> None:
        value = self.stack[-1]
        if number > len(self.memo) or value is _MARK:
            raise ValueError("it is a damaged pickle: a value is kept under a number that is not the next")
        self.memo[number : number + 1] = [value]

    def _put_as(self, how: str, size: int) -> None:
        self._put(self._number(how, size))

    def _get(self, how: str, size: int) -> None:
        self.stack.append(self.memo[self._number(how, size)])

    # ---- lists and dicts ----

    def _last(self, count: int) -> list[Any]:
        """So many values off the stack."""
        found = self.stack[-count:]
        if len(found) < count or any(one is _MARK for one in found):
            raise IndexError
        del self.stack[-count:]
        return found

    def _since_mark(self) -> list[Any]:
        """All values since the last mark, off the stack."""
        found: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            found.append(value)
        found.reverse()
        return found

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it is a damaged pickle: values are added to what is no list")
        cast("list[Any]", self.stack[-1]).extend(values)

    def _set(self, values: list[Any]) -> None:
        table, keys = self.stack[-1], values[::2]
        if not isinstance(table, dict) or len(values) % 2:
            raise ValueError("it is a damaged pickle: keys are set in what is no dict")
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key in it is no text")
        cast("dict[str, Any]", table).update(zip(keys, values[1::2], strict=True))


class PickleSizes:
    """Characters that values take where all in them is written out; every list and dict is looked at once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int]] = {}  # of a list or dict, by its id: characters, depth
        self.open: set[int] = set()

    def of(self, value: Any) -> int:
        """Raises ValueError for what holds itself, or more values within each other than ``DEEPEST``."""
        if not _holds(value):
            return _characters(value)
        way = [] if id(value) in self.known else [self._opened(value)]
        while way:
            one, rest = way[-1]
            inner = next(rest, None)
            if inner is None:
                self._close(one)
                way.pop()
            elif id(inner) in self.open:
                raise ValueError("a value in it holds itself")
            elif id(inner) not in self.known:
                way.append(self._opened(inner))
                if len(way) > DEEPEST:
                    raise ValueError("it is nested too deeply")
        return self.known[id(value)][0]

    def _opened(self, value: Any) -> tuple[Any, Iterator[Any]]:
        self.open.add(id(value))
        return value, filter(_holds, _inside(value))

    def _close(self, value: Any) -> None:
        size, depth, key = _PLAIN, 0, id(value)
        for one in _inside(value):
            more, below = self.known[id(one)] if _holds(one) else (_characters(one), 0)
            size, depth = size + more, max(depth, below)
        size += sum(map(len, cast("dict[str, Any]", value))) if type(value) is dict else 0
        if depth >= DEEPEST:
            raise ValueError("it is nested too deeply")
        self.known[key] = min(size, SPREAD + 1), depth + 1
        self.open.discard(key)


def _holds(value: Any) -> bool:
    return type(value) in (list, dict) and bool(value)


def _inside(value: Any) -> Iterator[Any]:
    return iter(cast("dict[str, Any]", value).values()) if type(value) is dict else iter(value)


def _characters(value: Any) -> int:
    return _PLAIN + len(value) if isinstance(value, str) else _PLAIN

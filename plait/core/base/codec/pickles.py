"""Pickles as values, not as programs: names and calls are kept as data; no code is imported or run.

``read`` returns the objects of a pickle as ``PickledObject``: the name that would be called, its
arguments and its state. The standard library's ``pickletools`` decodes the instructions and
executes none of them. ``read_plain`` accepts only plain data: dicts with text keys, lists, tuples
(as lists), text, numbers, true, false, None.

>>> import decimal, pickle
>>> read(pickle.dumps(decimal.Decimal("1.5")))
PickledObject(of=Named(module='decimal', name='Decimal'), args=('1.5',), state=None)
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, cast

from plait.core.base.codec.json_stream import HEADER, LONGEST, Take
from plait.core.base.codec.json_text import MOST_VALUES, read_unpacked
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.process import uncollected

MARKS = tuple(bytes([0x80, version]) for version in range(2, 6))
"""The possible first bytes of a pickle."""
SIZE = 64 << 20
"""The most bytes of plain data, unpacked."""
LARGEST_WRITTEN = 128 << 20
"""The most characters of plain data when every shared value is written out at each use: a few bytes
of a pickle can repeat a value a billion times."""
DEEPEST = 100
"""The deepest nesting of plain values."""
_ABOUT = 8
"""Approximate number of characters of a number, or of brackets and blanks, in plain data written
out."""


class Named(NamedTuple):
    """A name that a pickle would import."""

    module: str
    name: str


@dataclass(eq=False)
class PickledObject:
    """An object that a pickle would make: ``of(*args)``, with ``state`` set afterwards. Compared
    and hashed by identity."""

    of: Any
    args: Any = ()
    state: Any = None


class Elsewhere(NamedTuple):
    """A reference to an object outside of the pickle (a persistent id)."""

    what: Any


@dataclass(eq=False)
class Pairs:
    """A dict as pairs whose keys are not hashed or compared: keys of a hostile file may take
    forever to hash."""

    items: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def named(self) -> dict[str, Any]:
        """Return the pairs whose keys are text, as a dict."""
        return {key: value for key, value in self.items if isinstance(key, str)}


# ---- reading ----

_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES"}
_CODES = {one.code.encode("latin-1"): one for one in pickletools.opcodes}
_TEXTS: Mapping[str, Callable[[Any], bytes]] = {
    "SHORT_BINUNICODE": pickletools.read_bytes1, "BINUNICODE": pickletools.read_bytes4,
    "BINUNICODE8": pickletools.read_bytes8,
}  # fmt: skip
"""The instructions for texts: a length, then that many bytes."""


def read(data: bytes, *, errors: str = "strict") -> Any:
    """Return the value of a pickle. errors: the handling of texts that are no UTF-8, as in
    ``bytes.decode``.

    Raises ValueError for a pickle that is damaged, has bytes after its end, or has instructions
    that state dicts of tensors do not need.
    """
    stream, machine = BytesIO(data), _Machine()
    try:
        for _ in range(MOST_VALUES):
            code = _CODES.get(stream.read(1))
            if code is None:
                raise ValueError(f"it is no pickle, or cut off at byte {stream.tell()}")
            if code.name == "STOP":
                break
            if text := _TEXTS.get(code.name):
                machine.stack.append(text(stream).decode(errors=errors))
            elif act := machine.acts.get(code.name):
                act(code.arg.reader(stream) if code.arg else None)
            else:
                raise ValueError(f"the instruction {code.name} is not supported")
        else:
            raise ValueError(f"it has more than {MOST_VALUES} instructions, the most that are read")
        (whole,) = machine.stack
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is no whole pickle ({error})") from None
    if stream.read(1):
        raise ValueError("it has data after the end of its pickle")
    return whole


class _Machine:
    """The interpreter of a pickle's instructions. stack: values. marks: stack heights at the marks.
    memo: memoized values, by index. acts: actions by the names of instructions."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        push, last, above = self.stack.append, self._last, self._above_mark
        self.acts: dict[str, Callable[[Any], object]] = {
            "PROTO": lambda _: None, "FRAME": lambda _: None,
            **dict.fromkeys(_VALUES, push),
            "NONE": lambda _: push(None), "NEWTRUE": lambda _: push(True), "NEWFALSE": lambda _: push(False),
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "EMPTY_LIST": lambda _: push([]), "EMPTY_DICT": lambda _: push(Pairs()), "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE": lambda _: push(tuple(above())), "TUPLE1": lambda _: push(tuple(last(1))),
            "TUPLE2": lambda _: push(tuple(last(2))), "TUPLE3": lambda _: push(tuple(last(3))),
            "APPEND": lambda _: self._extend(last(1)), "APPENDS": lambda _: self._extend(above()),
            "SETITEM": lambda _: self._set(last(2)), "SETITEMS": lambda _: self._set(above()),
            "GLOBAL": lambda text: push(Named(*text.split(" ", 1))),
            "STACK_GLOBAL": lambda _: push(Named(*(assert_kind(one, str) for one in last(2)))),
            "REDUCE": self._make, "NEWOBJ": self._make, "BUILD": self._build,
            "BINPERSID": lambda _: push(Elsewhere(*last(1))),
            **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), self._keep),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda number: push(self.memo[number])),
        }  # fmt: skip

    def _extend(self, values: list[Any]) -> None:
        assert_kind(self._top(), list).extend(values)

    def _set(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise IndexError("a key without a value")
        assert_kind(self._top(), Pairs).items.extend(zip(values[::2], values[1::2], strict=False))

    def _make(self, _: Any) -> None:
        of, args = self._last(2)
        self.stack.append(PickledObject(of, assert_kind(args, tuple)))

    def _build(self, _: Any) -> None:
        (state,) = self._last(1)
        assert_kind(self._top(), PickledObject).state = state

    def _keep(self, number: Any) -> None:
        self.memo[len(self.memo) if number is None else number] = self._top()

    def _last(self, count: int) -> list[Any]:
        """Pop ``count`` values off the stack, none from below the last mark."""
        at = len(self.stack) - count
        if at < (self.marks[-1] if self.marks else 0):
            raise IndexError("stack underflow: an instruction takes a missing value")
        found = self.stack[at:]
        del self.stack[at:]
        return found

    def _top(self) -> Any:
        (value,) = self._last(1)
        self.stack.append(value)
        return value

    def _above_mark(self) -> list[Any]:
        return self._last(len(self.stack) - self.marks.pop())


def assert_kind(value: Any, kind: type) -> Any:
    """Return the value. Raises TypeError if it is not of type ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


# ---- plain data ----


class _Plain(NamedTuple):
    """A plain value. characters: its length with all shared values written out. depth: its
    nesting."""

    value: Any
    characters: int
    depth: int = 0


class _PlainData:
    """Conversion of a pickle's values to plain data. A list or dict is converted once, however
    often it is used. made: results by the ``id`` of the source value and of the result."""

    def __init__(self, over: IgnoredInput) -> None:
        self.over = over
        self.made: dict[int, _Plain] = {}
        self.open: set[int] = set()

    def of(self, value: Any, level: int = 0) -> _Plain:
        """Return a value as plain data. Raises ValueError if it is none, contains itself or is too
        deep."""
        if isinstance(value, str):
            return _Plain(self._text(value), _ABOUT + len(value))
        if value is None or isinstance(value, int):
            return _Plain(value, _ABOUT)
        if isinstance(value, float):
            if not math.isfinite(value):
                self.over.note("numbers that are not finite, taken as unknown", str(value))
            return _Plain(value if math.isfinite(value) else None, _ABOUT)
        if not isinstance(value, Pairs) and type(value) not in (list, tuple):
            raise ValueError(
                f"it holds a class, function or call ({_name(value)}), which is not run: plain data is read"
            )
        if id(value) in self.open:
            raise ValueError("it contains a value that contains itself")
        if level < DEEPEST and id(value) not in self.made:
            self.open.add(id(value))
            self.made[id(value)] = found = self._container(value, level + 1)
            self.made[id(found.value)] = found
            self.open.discard(id(value))
        if level >= DEEPEST or level + self.made[id(value)].depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        return self.made[id(value)]

    def size_of(self, plain: Any) -> int:
        """Return the characters of a value that ``of`` has returned."""
        made = self.made.get(id(plain))
        return made.characters if made else _ABOUT + (len(plain) if isinstance(plain, str) else 0)

    def _container(self, value: Any, level: int) -> _Plain:
        pairs = value.items if isinstance(value, Pairs) else [("", one) for one in value]
        keys = [key for key, _ in pairs]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key in it is no text")
        inside = [self.of(one, level) for _, one in pairs]
        values = [one.value for one in inside]
        size = _ABOUT + sum(map(len, keys)) + sum(one.characters for one in inside)
        depth = 1 + max((one.depth for one in inside), default=0)
        made = dict(zip(map(self._text, keys), values, strict=True)) if isinstance(value, Pairs) else values
        return _Plain(made, size, depth)

    def _text(self, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            self.over.note("texts with bytes that are no UTF-8, taken as they stand")
            return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
        return text


def _name(value: Any) -> str:
    """Return the name that a pickle would have imported, or the type of a value."""
    while isinstance(value, PickledObject):
        value = value.of
    return ".".join(value)[:100] if isinstance(value, Named) else type(value).__name__


@uncollected()
def read_plain(path: str | Path, long: Mapping[str, Take], over: IgnoredInput) -> dict[str, Any]:
    """Return the members of the dict in a regular file, compressed (gzip, bzip2, xz) or not, as
    ``json_stream.read_stream`` does for JSON. over: counts ignored input.

    Raises OSError if the file cannot be read, ValueError if it is no pickle of plain data.
    """
    data = _PlainData(over)
    whole, size, _ = data.of(read(read_unpacked(path, SIZE), errors="surrogateescape"))
    if not isinstance(whole, dict):
        raise ValueError("the pickled object is not a dict")
    if size > LARGEST_WRITTEN:
        raise ValueError(f"its values would take more than {LARGEST_WRITTEN} characters when written out")
    found: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", whole).items():
        takes = key in long and isinstance(value, list)
        elements = cast("list[Any]", value if takes else [value])
        for one in elements:
            if data.size_of(one) > (LONGEST if takes else HEADER):
                what, most = (f"an element of its {key[:60]!r}", LONGEST) if takes else (f"its {key[:60]!r}", HEADER)
                raise ValueError(f"{what} has more than {most} characters")
            if takes:
                long[key](one)
        found[key] = len(elements) if takes else value
    return found

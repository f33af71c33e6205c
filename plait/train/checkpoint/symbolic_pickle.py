"""Pickles as values, not as programs: names stay names, calls stay calls, and nothing is imported or run.

``read`` keeps what a pickle would make as ``PickledObject``: which name would have been called, with what,
and the state it would have been given. ``write`` makes a pickle of such values. Instructions are decoded by
the standard library's ``pickletools``, which executes none of them.

>>> text = write({"shape": PickledObject(Named("torch", "Size"), ((2, 3),))})
>>> read(text)
Pairs(items=[('shape', PickledObject(of=Named(module='torch', name='Size'), args=((2, 3),), state=None))])
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Named(NamedTuple):
    """What a pickle would import."""

    module: str
    name: str


@dataclass(eq=False)
class PickledObject:
    """What a pickle would make: ``of(*args)``, given ``state``. As a key it is only itself."""

    of: Any
    args: Any = ()
    state: Any = None


class Elsewhere(NamedTuple):
    """What a pickle says lies outside of it (a persistent id)."""

    what: Any


@dataclass(eq=False)
class Pairs:
    """A dict whose keys nobody has compared: those of a hostile file may take for ever to hash."""

    items: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def named(self) -> dict[str, Any]:
        """Those whose keys are text."""
        return {key: value for key, value in self.items if isinstance(key, str)}


_MARK = object()
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
           "SHORT_BINBYTES", "BINBYTES"}  # fmt: skip
_IGNORED = {"PROTO", "FRAME", "STOP"}


def read(data: bytes) -> Any:
    """The value of a pickle. Raises ValueError for one that is damaged, or has instructions that no state of
    tensors needs."""
    stack, memo = list[Any](), dict[int, Any]()
    acts: dict[str, Callable[[Any], None]] = _acts(stack, memo)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _VALUES:
                stack.append(argument)
            elif opcode.name in _CONSTANTS:
                stack.append(_CONSTANTS[opcode.name])
            elif opcode.name not in _IGNORED:
                if opcode.name not in acts:
                    raise ValueError(f"the instruction {opcode.name} is none of those that are read")
                acts[opcode.name](argument)
        (whole,) = stack
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is no whole pickle ({error})") from None
    return whole


def _acts(stack: list[Any], memo: dict[int, Any]) -> dict[str, Callable[[Any], None]]:
    """What instructions do to the stack."""

    def above_mark() -> list[Any]:
        at = max(number for number, one in enumerate(stack) if one is _MARK)
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def tuple_of(count: int) -> Callable[[Any], None]:
        def act(_: Any) -> None:
            found = tuple(stack[-count:])
            del stack[-count:]
            stack.append(found)

        return act

    def fill(found: list[Any]) -> None:
        assert_kind(stack[-1], Pairs).items.extend(zip(found[::2], found[1::2], strict=True))

    def pair(_: Any) -> None:
        value, key = stack.pop(), stack.pop()
        fill([key, value])

    def make(_: Any) -> None:
        args, of = stack.pop(), stack.pop()
        stack.append(PickledObject(of, assert_kind(args, tuple)))

    def build(_: Any) -> None:
        state = stack.pop()
        assert_kind(stack[-1], PickledObject).state = state

    def name(_: Any) -> None:
        last, first = stack.pop(), stack.pop()
        stack.append(Named(assert_kind(first, str), assert_kind(last, str)))

    def append(found: list[Any]) -> None:
        assert_kind(stack[-1], list).extend(found)

    def put(number: Any) -> None:
        memo[len(memo) if number is None else number] = stack[-1]

    return {
        "MARK": lambda _: stack.append(_MARK),
        "EMPTY_TUPLE": lambda _: stack.append(()),
        "EMPTY_LIST": lambda _: stack.append([]),
        "EMPTY_DICT": lambda _: stack.append(Pairs()),
        "TUPLE": lambda _: stack.append(tuple(above_mark())),
        "TUPLE1": tuple_of(1), "TUPLE2": tuple_of(2), "TUPLE3": tuple_of(3),
        "APPEND": lambda _: append([stack.pop()]),
        "APPENDS": lambda _: append(above_mark()),
        "SETITEM": pair,
        "SETITEMS": lambda _: fill(above_mark()),
        "GLOBAL": lambda text: stack.append(Named(*text.split(" ", 1))),
        "STACK_GLOBAL": name,
        "REDUCE": make, "NEWOBJ": make, "BUILD": build,
        "BINPERSID": lambda _: stack.append(Elsewhere(stack.pop())),
        "MEMOIZE": put, "BINPUT": put, "LONG_BINPUT": put,
        "BINGET": lambda number: stack.append(memo[number]),
        "LONG_BINGET": lambda number: stack.append(memo[number]),
    }  # fmt: skip


def assert_kind(value: Any, kind: type) -> Any:
    """The value. Raises TypeError if it is of another kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


# ---- writing ----


def write(value: Any) -> bytes:
    """A pickle of protocol 2 of plain values and ``PickledObject``. A state that is a tuple or a dict is
    given as such."""
    return b"\x80\x02" + _written(value) + b"."


def _written(value: Any) -> bytes:
    match value:
        case None | True | False:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            if -(1 << 31) <= value < 1 << 31:
                return b"J" + struct.pack("<i", value)
            whole = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(whole)]) + whole
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case Named():
            return f"c{value.module}\n{value.name}\n".encode()
        case PickledObject():
            made = _written(value.of) + _written(value.args) + (b"\x81" if value.state is not None else b"R")
            return made if value.state is None else made + _written(value.state) + b"b"
        case tuple():
            return b"(" + b"".join(map(_written, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_written, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_written(key) + _written(one) for key, one in value.items()) + b"u"
        case Pairs():
            return b"}(" + b"".join(_written(key) + _written(one) for key, one in value.items) + b"u"
        case _:
            raise TypeError(f"{type(value).__name__} is not written")

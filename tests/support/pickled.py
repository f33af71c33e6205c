"""Pickles written as a reader of values takes them, without the classes that they name."""

from __future__ import annotations

import struct
from typing import Any, cast

from plait.core.base.codec.pickles import Named, Pairs, PickledObject


def write(value: Any) -> bytes:
    """A pickle of protocol 2 of plain values and ``PickledObject``. A state that is a tuple or a
    dict is given as such."""
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
            return b"(" + b"".join(map(_written, cast("tuple[Any, ...]", value))) + b"t"
        case list():
            return b"](" + b"".join(map(_written, cast("list[Any]", value))) + b"e"
        case dict():
            return _written(Pairs([*cast("dict[Any, Any]", value).items()]))
        case Pairs():
            return b"}(" + b"".join(_written(key) + _written(one) for key, one in value.items) + b"u"
        case _:
            raise TypeError(f"{type(value).__name__} is not written")

"""Whether values that were read from a file are what a dataclass says of its fields: files may be damaged, or
somebody else's."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from plait.core.base.numbers import shown


@cache
def _hints(kind: type) -> dict[str, Any]:
    known = get_type_hints(kind)
    names: Iterable[str] = [one.name for one in fields(kind)] if is_dataclass(kind) else cast("Any", kind)._fields
    return {name: known[name] for name in names}


def checked(kind: type, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values, if each is of the type that its field has in ``kind``, a dataclass or a named tuple; lists
    count as tuples. Raises TypeError for one that is not, and ValueError for a number that is not finite."""
    for name, value in values.items():
        if (hint := _hints(kind).get(name)) and not _is(value, hint):
            raise TypeError(f"{name} = {shown(value)} is no {hint}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is not finite")
    return values


def _is(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        values: list[Any] = list(cast("Any", value))
        wanted = inner[:1] * len(values) if inner[1:] == (...,) else inner
        return len(wanted) == len(values) and all(map(_is, values, wanted))
    if origin is list:
        return isinstance(value, list) and all(_is(one, inner[0]) for one in cast("list[Any]", value))
    if origin is dict:
        pairs = cast("dict[Any, Any]", value).items() if isinstance(value, dict) else None
        return pairs is not None and all(_is(key, inner[0]) and _is(one, inner[1]) for key, one in pairs)
    if hint is float:
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return whole or isinstance(value, float)
    if hint in (int, str, bool):
        return type(value) is hint
    return isinstance(value, hint) if isinstance(hint, type) else True

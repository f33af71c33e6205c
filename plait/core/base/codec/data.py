"""Conversion of plain values, as in JSON and TOML, to dataclasses, named tuples and pydantic
models.

Conversion is strict: a text is no number, a number is no boolean, and all numbers must be finite.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator, core_schema

from plait.core.base.codec.toml_text import COMMAND_LINE, override, read_toml, show
from plait.core.base.errors import JobError, nearest
from plait.core.base.numbers import LARGEST
from plait.core.base.numbers import Count as Count
from plait.core.base.numbers import Nanoseconds as Nanoseconds
from plait.core.base.numbers import Natural as Natural
from plait.core.base.numbers import NotNegative as NotNegative
from plait.core.base.numbers import Positive as Positive
from plait.core.base.numbers import Whole as Whole

T = TypeVar("T")
PART = 1000
"""The number of a table's keys that are validated at once."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_listed)]
"""A list of texts; a single text is accepted as a list of one."""


class Section(BaseModel):
    """A table of a file that people write. Its fields are the allowed keys; unknown keys are
    errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def decode(kind: type[T], values: Any, at: str = "", *, ignore_unknown: bool = False) -> T:
    """Return ``values`` as a ``kind``: a Section, a dataclass, a named tuple, and nested ones.

    Lists become tuples, tables become dataclasses; a whole number stays an int where a float is
    allowed. ignore_unknown: True if unknown keys are ignored. at: the key of the values, for
    messages. Raises JobError naming the first wrong key, its value and what is allowed; errors of a
    dataclass's constructor pass.
    """
    try:
        return _validator(kind, ignore_unknown).validate_python([values])[0]
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # Every branch of a union reports errors; the user meant the branch that got furthest.
    first = max((e for e in errors if e["loc"][:3] == errors[0]["loc"][:3]), key=lambda e: len(e["loc"]))
    raise _explained(_misspelt(errors) or first, kind, values, at)


def check_limits(record: Any, at: str) -> None:
    """Raise JobError if a number of a record, which code has made, is outside its type's limits.
    at: the record's key."""
    for name, (kind, limits) in _limited(cast("type[Any]", type(record))).items():
        value = getattr(record, name)
        if not all(_HOLDS[type(limit)](value, _bound(limit)) for limit in limits):
            raise _not_allowed(value, f"{at}.{name}", allowed(kind))


@cache
def _limited(kind: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return (type, limits) of each field that has limits, by the field's name."""
    found = {name: (one, getattr(one, "__metadata__", ())) for name, (one, _) in _fields(kind).items()}
    limits = {name: (one, tuple(each for each in said if type(each) in _SIGNS)) for name, (one, said) in found.items()}
    return {name: (one, each) for name, (one, each) in limits.items() if each}


# ---- pydantic's validators ----


@cache
def _validator(kind: type[Any], ignore_unknown: bool) -> SchemaValidator:
    """Return the validator of a list of ``kind``: a type with its own configuration accepts none
    directly."""
    config = ConfigDict(extra="ignore" if ignore_unknown else "forbid", allow_inf_nan=False)
    return SchemaValidator(_exact(TypeAdapter(cast("Any", list).__class_getitem__(kind), config=config).core_schema))


def _exact(schema: Any) -> Any:
    """Return the schema without conversion of values. Of a list, only the first error is reported,
    of a table the errors of ``PART`` keys: each error takes kilobytes. Sections configure this
    themselves."""
    if isinstance(schema, list | tuple):
        return type(cast("list[Any]", schema))(map(_exact, cast("list[Any]", schema)))
    if not isinstance(schema, dict) or cast("Any", schema).get("type") == "model":
        return cast("Any", schema)
    made = {key: _exact(value) for key, value in cast("dict[str, Any]", schema).items()}
    match made.get("type"):
        case "int" | "str" | "bool":
            return made | {"strict": True}
        case "float":  # 1 stays 1, not 1.0: hashes of files depend on it
            strict = cast("Any", made | {"strict": True, "allow_inf_nan": False})
            return core_schema.no_info_wrap_validator_function(_as_it_is, strict)
        case "list" | "tuple":
            return made | {"fail_fast": True}
        case "dict" | "dataclass" | "named-tuple":
            whole, ref = _in_parts if made["type"] == "dict" else _few_keys, made.pop("ref", None)
            return core_schema.no_info_wrap_validator_function(whole, cast("Any", made), ref=ref)
        case _:
            return made


def _in_parts(value: Any, check: Callable[[Any], Any]) -> Any:
    """Return the value of a table after ``check`` has validated its keys, ``PART`` of them at a
    time."""
    if not isinstance(value, dict) or len(cast("dict[Any, Any]", value)) <= PART:
        return check(value)
    found, items = dict[Any, Any](), iter(cast("dict[Any, Any]", value).items())
    while part := dict(islice(items, PART)):
        found.update(check(part))
    return found


def _few_keys(value: Any, check: Callable[[Any], Any]) -> Any:
    """Return ``check(value)`` for a table with fixed keys. Of a table with very many keys only
    ``PART`` are validated, enough for an error."""
    if not isinstance(value, dict) or len(cast("dict[Any, Any]", value)) <= PART:
        return check(value)
    return check(dict(islice(cast("dict[Any, Any]", value).items(), PART)))


def _as_it_is(value: Any, check: Callable[[Any], Any]) -> Any:
    check(value)
    return value


# ---- messages of errors ----


class _Place(NamedTuple):
    """The location of a wrong value. path: its keys. known: the keys that its table may have. kind,
    limits: the type and limits of the value; None if unknown."""

    path: str
    known: tuple[str, ...]
    kind: Any
    limits: tuple[Any, ...] = ()


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _misspelt(errors: Sequence[ErrorDetails]) -> ErrorDetails | None:
    """Return the error of an unknown key that resembles a missing key of the same table."""
    missing = {error["loc"] for error in errors if error["type"].startswith("missing")}
    for error in errors:
        *table, key = error["loc"]
        there = [str(one[-1]) for one in missing if list(one[:-1]) == table]
        if error["type"] in _UNKNOWN and nearest(str(key), there):
            return error
    return None


def _explained(first: ErrorDetails, kind: type[Any], values: Any, at: str) -> JobError:
    location = first["loc"][1:]
    if "[key]" in location:
        location = location[: location.index("[key]") - 1]
    place = _place(location, kind, values)
    key, known = f"{at}.{place.path}".strip("."), place.known
    if first["type"] in _UNKNOWN:
        return JobError(f"unknown key{nearest(str(first['loc'][-1]), known)}", key=key,
                        fix=f"Known here: {', '.join(sorted(known))}")  # fmt: skip
    if first["type"].startswith("missing"):
        return JobError("is missing", key=key, fix=f"Write [{key}] and the keys below it"
                        if _is_table(place.kind) else f"Give {allowed(place.kind, place.limits)}")  # fmt: skip
    value = show(first.get("input"))
    if "[key]" in first["loc"]:
        kinds = get_args(place.kind)[0] if place.kind else str
        return JobError(f"unknown key {value}", key=key, fix=f"Known here: {allowed(kinds)}")
    if place.kind is None or _is_table(place.kind):
        return JobError(f"{value} is not a table", key=key, fix=f"Write [{key}] and the keys below it")
    wide = [f"{word} {bound}" for word, name in (("at least", "ge"), ("at most", "le"))
            if (bound := first.get("ctx", {}).get(name)) is not None and abs(bound) >= LARGEST]  # fmt: skip
    return _not_allowed(first.get("input"), key, ", ".join([allowed(place.kind, place.limits), *wide]))


def _not_allowed(value: Any, key: str, expected: str) -> JobError:
    """Return the error for a wrong value. expected: the allowed values in words."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return JobError(f"{show(value)} is not {'allowed' if finite else 'finite'}", key=key, fix=f"Allowed: {expected}")


def _place(location: tuple[int | str, ...], kind: type[Any], values: Any) -> _Place:
    """Return the location in the values for one of pydantic's locations, which also name branches
    of unions.

    A table in a list is named by its name, if it has one, else by its index; a plain value in a
    list by the list's key.
    """
    path, here, tables = "", _Place("", (), kind), _records(kind)
    at: Any = values
    for part in location:
        known = {name: one for table in tables for name, one in _fields(table).items()}
        inside: Any = at[part] if _has(at, part) else None
        if isinstance(part, int):
            if not _has(at, part):
                continue
            path += _named(inside) or f"[{part}]"
            here = here._replace(path=path)
        elif part in known:
            path += f".{part}"
            here = _Place(path, tuple(known), *known[part])
            tables = _records(here.kind)
        elif _has(at, part):
            path += f".{part}"
            inner = get_args(here.kind)[1:] if get_origin(here.kind) in (dict, Mapping) else ()
            unknown = part == location[-1] and bool(tables) and not _is_table(here.kind)
            narrow = (inner[0], ()) if inner else (None if unknown else here.kind, here.limits)
            here = _Place(path, tuple(known), *narrow)
        else:
            continue  # a branch of a union
        at = inside
    return here._replace(path=re.sub(r"(\[\d+\])+$", "", here.path).lstrip("."))


def _named(table: Any) -> str:
    name: Any = cast("dict[str, Any]", table).get("name") if isinstance(table, dict) else None
    return f".{name}" if isinstance(name, str) and name else ""


def _has(values: Any, part: int | str) -> bool:
    if isinstance(part, int):
        return isinstance(values, list | tuple) and part < len(cast("list[Any]", values))
    return isinstance(values, Mapping) and part in values


def _fields(kind: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return (type, limits) of each field of a table type, by key."""
    if issubclass(kind, BaseModel):
        shown = {name: one for name, one in kind.model_fields.items() if not one.exclude}
        return {name: (one.annotation, tuple(one.metadata)) for name, one in shown.items()}
    names = kind.__dataclass_fields__ if is_dataclass(kind) else kind._fields
    hints = get_type_hints(kind, include_extras=True)
    return {name: (hints[name], ()) for name in names}


def _records(annotation: Any) -> list[Any]:
    """Return the table types (sections, dataclasses, named tuples) that occur within a type."""
    if _is_record(annotation):
        return [annotation]
    return [one for part in get_args(annotation) for one in _records(part)]


def _is_record(annotation: Any) -> bool:
    if not inspect.isclass(annotation) or get_origin(annotation):
        return False
    return issubclass(annotation, BaseModel) or is_dataclass(annotation) or hasattr(annotation, "_fields")


def _is_table(annotation: Any) -> bool:
    parts = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) in (Union, UnionType) and len(parts) == 1:
        return _is_table(parts[0])
    return _is_record(annotation) or get_origin(annotation) in (dict, Mapping)


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a table",
}
_SIGNS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
_HOLDS: dict[Any, Callable[[float, float], bool]] = {Ge: operator.ge, Gt: operator.gt, Le: operator.le, Lt: operator.lt}


class Example(str):
    """An example of a text, which error messages show instead of its pattern."""

    __slots__ = ()


class ExtraValue(str):
    """A word that is allowed in addition to a type's values, as by a validator."""

    __slots__ = ()


OrAuto = Annotated[T, ExtraValue("auto")]
"""A value that the planner may choose: ``auto`` is removed before values are validated."""


def allowed(annotation: Any, limits: list[Any] | tuple[Any, ...] = (), *, within: bool = False) -> str:
    """Return the values that a type allows, in words. Bounds of ``LARGEST`` and more are left out.
    within: True for a table in a table, whose keys are not listed.

    >>> allowed(int, [Ge(1)])
    'a whole number of at least 1'
    >>> allowed(float, [Gt(0)])
    'a number above 0'
    >>> allowed(Literal["auto"] | bool), allowed(Literal[0, 1])
    ('"auto" or true or false', '0 or 1')
    >>> allowed(Annotated[str, Example("2/minipod")])
    'a text such as 2/minipod'
    >>> allowed(Annotated[Literal["sync"], ExtraValue("off")])
    '"sync" or "off"'
    """
    if also := [limit for limit in limits if isinstance(limit, ExtraValue)]:
        rest = [limit for limit in limits if not isinstance(limit, ExtraValue)]
        return " or ".join([allowed(annotation, rest, within=within), *(show(str(word)) for word in also)])
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(allowed(part, within=within) for part in inner if part is not NoneType)
    if origin is dict:
        return "a table"
    if origin is Literal:
        return " or ".join(show(value) for value in inner)
    if hasattr(annotation, "__metadata__"):  # Annotated
        nested = [getattr(m, "metadata", [m]) for m in inner[1:]]
        return allowed(inner[0], [limit for group in nested for limit in group], within=within)
    if origin in (tuple, list):
        count = "" if origin is list or inner[-1] is Ellipsis else f" of {len(inner)}"
        return f"a list{count}, each {allowed(inner[0], within=within)}"
    if _is_record(annotation) and within:
        return "a table"
    if _is_record(annotation):
        keys = ", ".join(f"{name} = {allowed(*one, within=True)}" for name, one in _fields(annotation).items())
        return f"{{ {keys} }}"
    if examples := [limit for limit in limits if isinstance(limit, Example)]:
        return f"a text such as {examples[0]}"
    if patterns := [pattern for limit in limits if (pattern := getattr(limit, "pattern", None))]:
        return f"a text that matches {patterns[0]}"
    known = [limit for limit in limits if type(limit) in _SIGNS and abs(_bound(limit)) < LARGEST]
    words = " and ".join(f"{_SIGNS[type(limit)]} {_bound(limit):g}" for limit in known)
    name = _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))
    return f"{name} {'of ' if words.startswith('at') else ''}{words}".rstrip()


def _bound(limit: Any) -> float:
    return next(getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name))


def read_settings(kind: type[T], words: Sequence[str], file: Path | None = None, *, paths: Sequence[str] = ()) -> T:
    """Return a dataclass of settings from a file and ``key=value`` words. A list of texts may be
    given one text per word.

    paths: names of settings that are paths, or lists of paths; relative paths in the file start at
    its folder. Raises JobError naming the file or the command line, the key, the value and what is
    allowed.

    >>> from dataclasses import make_dataclass
    >>> read_settings(make_dataclass("Size", [("nodes", int, 1), ("name", str, "")]), ["nodes=3", "name=7"])
    Size(nodes=3, name='7')
    """
    values = read_toml(file) if file else {}
    for name in paths:
        if file and name in values:
            values[name] = _from(file.parent, values[name])
    hints = get_type_hints(kind)
    lists = {name for name, hint in hints.items() if get_args(hint)[:1] == (str,) and get_origin(hint) is tuple}
    values, typed = override(values, _joined(words, lists), lambda key: hints.get(key) in (str, str | None))
    try:
        return decode(kind, values)
    except JobError as error:
        key = (error.key or "").partition(".")[0].partition("[")[0]
        raise error.in_file(str(file) if file and key not in typed else COMMAND_LINE) from None


def _joined(words: Sequence[str], lists: Set[str]) -> list[str]:
    """Return the words, with all words of one list of texts joined: ``file=a file=b`` names two
    files."""
    found, texts = list[str](), dict[str, list[str]]()
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key.strip() in lists and not text.strip().startswith("["):
            texts.setdefault(key.strip(), []).append(text.strip())
        else:
            found.append(word)
    return [*found, *(f"{key}={json.dumps(each)}" for key, each in texts.items())]


def _from(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_from(folder, one) for one in cast("list[Any]", value)]
    return str(folder / value) if isinstance(value, str) else value

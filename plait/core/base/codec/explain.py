"""What pydantic found wrong, in Plait's words: the key, the value, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from plait.core.base.codec.toml_text import show
from plait.core.base.errors import JobError, nearest
from plait.core.base.numbers import LARGEST

_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a table",
}
_SIGNS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


def explain(error: ValidationError, root: type[BaseModel], values: Mapping[str, Any] | None = None) -> JobError:
    """The first problem, as an error that says what is allowed where it happened. values: what was read, for
    the names of tables in lists."""
    errors = error.errors(include_url=False)
    # Every branch of a union complains; the one that got furthest is the one that the user meant.
    first = max((e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]), key=lambda e: len(e["loc"]))
    path, known, field = _walk(first["loc"], root)
    key = ".".join(_with_names(path, first["loc"], values or {}))
    if first["type"] == "extra_forbidden":
        return JobError(
            f"unknown key{nearest(path[-1], known)}", key=key, fix=f"Known here: {', '.join(sorted(known))}"
        )
    if first["type"] == "missing" and field is not None:
        needed = f"Write [{key}] and the keys below it" if _is_table(field) else None
        return JobError("is missing", key=key, fix=needed or f"Give {allowed(field.annotation, field.metadata)}")
    if "[key]" in first["loc"]:
        kinds = get_args(field.annotation)[0] if field else str
        return JobError(f"unknown key {show(first.get('input'))}", key=key, fix=f"Known here: {allowed(kinds)}")
    value = show(first.get("input"))
    if field is None or _is_table(field):
        return JobError(f"{value} is not a table", key=key, fix=f"Write [{key}] and the keys below it")
    wide = [f"{word} {bound}" for word, name in (("at least", "ge"), ("at most", "le"))
            if (bound := first.get("ctx", {}).get(name)) is not None and abs(bound) >= LARGEST]  # fmt: skip
    told = ", ".join([allowed(field.annotation, field.metadata), *wide])
    return JobError(f"{value} is not allowed", key=key, fix=f"Allowed: {told}")


def _walk(location: tuple[int | str, ...], root: type[BaseModel]) -> tuple[list[str], list[str], FieldInfo | None]:
    """The keys of a location, what is known where the last one stands, and its field.

    pydantic's locations also name branches of unions and places in a list; those are no keys that a user
    wrote.
    """
    path: list[str] = []
    tables: list[type[BaseModel]] = [root]
    field: FieldInfo | None = None
    known: list[str] = []
    for part in location:
        fields = {name: f for table in tables for name, f in table.model_fields.items()}
        if part in fields:
            field = fields[str(part)]
            known, tables = _writable(fields), _sections(field.annotation)
            path.append(str(part))
        elif part == location[-1] and tables and isinstance(part, str) and not _is_branch(part, tables):
            known, field = _writable(fields), None
            path.append(part)
    return path, known, field


def _writable(fields: Mapping[str, FieldInfo]) -> list[str]:
    """The keys that a file may have."""
    return [name for name, field in fields.items() if not field.exclude]


def _with_names(path: list[str], location: tuple[int | str, ...], values: Mapping[str, Any]) -> list[str]:
    """The keys, with the name of the table where the first key is a list of tables; its number where it has
    none."""
    tables = values.get(str(location[0]))
    at = location[1] if len(location) > 1 else None
    if not isinstance(tables, list) or not isinstance(at, int):
        return path
    table: Any = cast("list[Any]", tables)[at]
    name = cast("dict[str, Any]", table).get("name") if isinstance(table, dict) else None
    return [path[0], name if isinstance(name, str) and name else f"{at + 1}", *path[1:]]


def _is_branch(part: str, tables: list[type[BaseModel]]) -> bool:
    return "[" in part or part in {table.__name__ for table in tables} or part in ("str", "int", "float", "bool")


def _sections(annotation: Any) -> list[type[BaseModel]]:
    return [part for part in (annotation, *get_args(annotation)) if _is_section(part)]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_table(field: FieldInfo) -> bool:
    return _is_section(field.annotation) or get_origin(field.annotation) is dict


def allowed(annotation: Any, limits: list[Any] | tuple[Any, ...] = ()) -> str:
    """What a type takes, in words. Bounds that nobody means to reach are left out.

    >>> allowed(int, [Ge(1)])
    'a whole number of at least 1'
    >>> allowed(float, [Gt(0)])
    'a number above 0'
    >>> allowed(Literal["auto"] | bool)
    '"auto" or true or false'
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(allowed(part) for part in inner if part is not NoneType)
    if origin is dict:
        return "a table"
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if hasattr(annotation, "__metadata__"):  # Annotated
        nested = [getattr(m, "metadata", [m]) for m in inner[1:]]
        return allowed(inner[0], [limit for group in nested for limit in group])
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f" of {len(inner)}"
        return f"a list{count}, each {allowed(inner[0])}"
    if _is_section(annotation):
        return (
            "{ "
            + ", ".join(f"{name} = {allowed(f.annotation, f.metadata)}" for name, f in annotation.model_fields.items())
            + " }"
        )
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        return "{ " + ", ".join(f"{name} = {allowed(kind)}" for name, kind in hints.items()) + " }"
    if patterns := [pattern for limit in limits if (pattern := getattr(limit, "pattern", None))]:
        return f"a text that matches {patterns[0]}"
    known = [limit for limit in limits if type(limit) in _SIGNS and abs(_bound(limit)) < LARGEST]
    words = " and ".join(f"{_SIGNS[type(limit)]} {_bound(limit):g}" for limit in known)
    name = _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))
    return f"{name} {'of ' if words.startswith('at') else ''}{words}".rstrip()


def _bound(limit: Any) -> float:
    return next(getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name))

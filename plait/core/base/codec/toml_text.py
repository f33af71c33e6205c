"""TOML text: reading with errors that name file and line, ``key=value`` overrides, and writing."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from plait.core.base.errors import LONGEST_KEY, JobError
from plait.core.base.files import contents_within
from plait.core.base.numbers import shown

COMMAND_LINE = "command line"
LARGEST = 1 << 20
"""The most bytes of a TOML file that is read: people write such files, and reading takes seconds
for each MiB."""
READABLE = 128
"""The most bits of a number that a message shows in full."""
LONGEST_SHOWN = 400
"""The most characters of a value in a message."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_OVERRIDE = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=(.*)", re.DOTALL)

MOST_PARTS = 50
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_ENDLESS_KEY = re.compile(rf"(?<![\w\\-])(?:{_PART}){{{MOST_PARTS}}}")
"""The pattern of a key of more than ``MOST_PARTS`` parts. Possessive quantifiers keep the search
linear in the text."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises RecursionError for a text that is nested too deeply.

    Raises ValueError for invalid TOML and for a key of more than ``MOST_PARTS`` parts: the time to
    read a key is quadratic in its length.

    >>> parse_toml("a.b = 1")
    {'a': {'b': 1}}
    >>> parse_toml("a." * 100 + "a = 1")
    Traceback (most recent call last):
    ValueError: a key of more than 50 parts (at line 1)
    """
    if found := _ENDLESS_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key of more than {MOST_PARTS} parts (at line {line})")
    return tomllib.loads(text)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises JobError naming the file and, for a syntax error,
    the line."""
    text = ""
    try:
        data = contents_within(path, LARGEST)
    except FileNotFoundError:
        raise JobError(
            "no such file", file=str(path), fix="Check the path; specs/jobs of a checkout has examples"
        ) from None
    except OSError as error:
        fix = "Name a regular file that may be read"
        raise JobError(f"cannot be read: {error.strerror}", file=str(path), fix=fix) from None
    except ValueError as error:
        raise JobError(str(error), file=str(path), fix="Shorten the file") from None
    try:
        text = data.decode("utf-8-sig") + "\n"  # without the newline, errors in the last line are "at end of document"
        return parse_toml(text)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8, so this is no TOML file"
        fix = "Name a text file (TOML), such as a job" if b"\0" in data else "Write it anew as UTF-8"
        raise JobError(problem, file=str(path), fix=fix) from None
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits
        problem = "nested too deeply" if isinstance(error, RecursionError) else f"not valid TOML: {error}"
        raise JobError(problem, file=str(path), key=_key_at(text, str(error)), fix=_cure(problem)) from None


def _key_at(text: str, problem: str) -> str | None:
    """Return the full key on the line that an error of ``tomllib`` names; None if it names no line
    or no key is there.

    >>> _key_at("[train]\\nsteps = 3\\nsteps = 4", "Cannot overwrite a value (at line 3, column 10)")
    'train.steps'
    """
    at = re.search(r"at line (\d+)", problem)
    lines = text.splitlines()[: int(at[1])] if at else []
    table, key = "", None
    for line in lines:
        if header := re.match(r"\s*\[\[?\s*([^\[\]]+?)\s*\]", line):
            table, key = header[1], header[1]
        elif found := re.match(r"\s*([A-Za-z0-9_.-]+)\s*=", line):
            key = f"{table}.{found[1]}".removeprefix(".")
        elif line.strip() and not line.lstrip().startswith("#"):
            key = key if line is not lines[-1] else None
    return key if key and len(key) <= LONGEST_KEY else None


def _cure(problem: str) -> str:
    """Return the advice for an error of ``tomllib``."""
    if "overwrite" in problem or "twice" in problem or "Cannot mutate" in problem:
        return "Define each name once"
    if "parts" in problem:
        return "Write tables, as in [train]"
    if "deeply" in problem or "end of document" in problem:
        return "Close what is opened, a bracket or a quote"
    if "Invalid value" in problem:
        return 'Text needs quotes, as in name = "value"'
    return "Correct it: a line is [table], or key = value"


def override(
    values: Mapping[str, Any], settings: Iterable[str], is_text: Callable[[str], bool]
) -> tuple[dict[str, Any], set[str]]:
    """Return ``values`` with every ``key.sub=value`` setting applied, and the keys that were set.

    A value is parsed as TOML; text that is no TOML is taken as is, and so is the value of a key
    that ``is_text``.

    >>> override({"train": {"steps": 5}}, ["train.steps=7", "run.name=first try"], lambda key: False)[0]
    {'train': {'steps': 7}, 'run': {'name': 'first try'}}
    """
    result: dict[str, Any] = {
        key: dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else value for key, value in values.items()
    }
    keys: set[str] = set()
    for setting in settings:
        match = _OVERRIDE.fullmatch(setting)
        if any("\ud800" <= letter <= "\udfff" for letter in setting):  # undecodable bytes
            raise JobError(f"{setting!r} is not UTF-8", file=COMMAND_LINE, fix="Correct it, or rename the file")
        if not match:
            raise JobError(
                f"'{setting}' is not a setting", file=COMMAND_LINE, fix="Write section.key=value, as in train.steps=100"
            )
        key, text = match[1], match[2].strip()
        value = _value(text)
        *sections, last = key.split(".")
        table = result
        for section in sections:
            inner: object = table.get(section, {})
            inner = dict[str, Any]() if inner == "auto" else inner  # an explicit value replaces ``auto``
            if not isinstance(inner, dict):
                problem = f"'{section}' is a value and has no key '{last}'"
                raise JobError(problem, file=COMMAND_LINE, key=key, fix=f"Set {section} itself")
            table[section] = table = dict(cast("dict[str, Any]", inner))
        table[last] = text if is_text(key) and not isinstance(value, str) else value
        keys.add(key)
    return result, keys


def _value(text: str) -> Any:
    """Return ``text`` as one TOML value, or unchanged if it is none."""
    try:
        parsed = parse_toml(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def to_toml(values: Mapping[str, Any]) -> str:
    """Return plain values (texts, numbers, booleans, lists, tables) as TOML; ``tomllib`` reads the
    same values back.

    >>> print(to_toml({"steps": 2, "run": {"name": "a"}}), end="")
    steps = 2
    <BLANKLINE>
    [run]
    name = "a"
    """
    blocks = [_block({key: value for key, value in values.items() if not isinstance(value, dict)})]
    blocks += [
        f"[{_key(key)}]\n" + _block(cast("dict[str, Any]", value))
        for key, value in values.items()
        if isinstance(value, dict)
    ]
    return "\n".join(block for block in blocks if block)


def _block(values: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_literal(value)}\n" for key, value in values.items() if value is not None)


def show(value: Any) -> str:
    """Return a value in the user's notation, for messages."""
    if isinstance(value, int) and value.bit_length() > READABLE:
        return shown(value)
    try:
        told = _literal(value)
        return told if len(told) <= LONGEST_SHOWN else f"{told[: LONGEST_SHOWN - 3]}..."
    except TypeError:  # a date: valid in TOML, not used in Plait
        return str(value)
    except ValueError:  # it contains a number of thousands of digits
        return shown(value)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)  # inf and nan are the same in Python and TOML
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return "{" + ", ".join(f"{_key(key)} = {_literal(inner)}" for key, inner in table.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_literal(inner) for inner in cast("Sequence[Any]", value)) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(value: str) -> str:
    # JSON's escapes are TOML's, except that TOML wants DEL escaped and knows no surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)

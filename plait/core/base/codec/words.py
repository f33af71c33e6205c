"""Settings that a file holds, or ``KEY=VALUE`` words of a command line, which count more."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from plait.core.base.codec.data import decode
from plait.core.base.codec.toml_text import COMMAND_LINE, override, read_toml
from plait.core.base.errors import JobError

T = TypeVar("T")


def read_settings(kind: type[T], words: Sequence[str], file: Path | None = None, *, paths: Sequence[str] = ()) -> T:
    """A dataclass of settings. A list of texts may be said word by word.

    paths: names of settings that are paths, or lists of them; those in the file are meant from its folder.
    Raises JobError naming file or command line, key, value and what is allowed.

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
    """The words, those of a list of texts as one: ``file=a file=b`` names two files."""
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

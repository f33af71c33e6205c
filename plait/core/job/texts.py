"""Texts in a job: paths, which are relative to the job file's folder; files that must exist; texts
of one line; counts of tokens."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unicodedata import category

from pydantic import ValidationInfo

from plait.core.base.errors import JobError
from plait.core.base.files import check_path
from plait.core.job.data_settings import BYTES, STDLIB

PATH_SETTINGS = (
    ("model", "huggingface"),
    ("data", "text"),
    ("data", "sources"),
    ("data", "eval"),
    ("data", "tokenizer"),
    ("data", "chat_template"),
    ("train", "init_from"),
    ("cluster", "file"),
    ("cluster", "profile"),
    ("kubernetes", "pod"),
    ("place", "affinity"),
    ("place", "network"),
    ("place", "topology"),
    ("place", "rank_table"),
    ("place", "states"),
)
"""Settings that are paths, or lists of paths."""
WORDS = {"data.text": (STDLIB,), "data.sources": (STDLIB,), "data.eval": (STDLIB,),
         "data.tokenizer": (BYTES,), "place.affinity": ("auto",), "place.network": ("",), "place.topology": ("",),
         "place.rank_table": ("",),
         "place.states": ("-",)}  # fmt: skip
"""Values of these settings that are not paths."""
PREDICTION_FILES = ("cluster.file", "cluster.profile", "place.affinity", "place.network", "place.rank_table")
"""Files that predictions read, always or only where ranks are placed."""
QUERY_PREFIXES = ("slurm:", "kubernetes:")
"""Prefixes of [place] values that are not files: Plait queries Slurm or Kubernetes for the states
of nodes."""


def resolve_paths(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return ``values`` with relative paths made absolute from ``base``; values of a wrong type
    stay as they are. Raises JobError for a text that cannot be a path."""

    def locate(text: Any, key: str) -> Any:
        if not isinstance(text, str) or text in WORDS.get(key, ()):
            return text
        if (key == "place.states" and text.startswith(QUERY_PREFIXES)) or (key == "place.topology" and ":" in text):
            return text
        check_path(text, key)
        if "://" in text:  # an address, which fsspec opens
            return text
        return os.path.abspath(os.path.join(base, os.path.expanduser(text)))

    def locate_all(value: Any, key: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [locate_all(one, key) for one in cast("Sequence[Any]", value)]
        if isinstance(value, dict) and "path" in value:  # a source of data
            table = cast("dict[str, Any]", value)
            return table | {"path": locate_all(table["path"], key)}
        return locate(value, key)

    result = dict(values)
    for section, key in PATH_SETTINGS:
        table = result.get(section)
        if isinstance(table, dict) and key in table:
            value = cast("dict[str, Any]", table)[key]
            result[section] = table | {key: locate_all(value, f"{section}.{key}")}
    return result


def check_exists(values: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise JobError, naming the key, for a file of the job that does not exist. values: plain
    values of a job. A reader's own error would not name the key, and a file that is not read would
    be overlooked."""
    for key in keys:
        section, _, name = key.partition(".")
        path = values.get(section, {}).get(name)
        if path and path not in WORDS.get(key, ()) and not os.path.exists(path):
            fix = "Check the path, or leave the key out"
            raise JobError(f"there is no file '{path}'", key=key, fix=fix)


def check_single_line(text: str, key: str) -> None:
    """Raise JobError, naming the key, for a text that a terminal, or a shell, would not take as one
    line.

    >>> check_single_line("a\\nb", "run.name")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    plait.core.base.errors.JobError: run.name: 'a\\nb' holds a line break, or another ...
    """
    if any(category(letter) in ("Cc", "Zl", "Zp") for letter in text):
        problem = f"{text[:80]!r} holds a line break, or another character that controls a terminal"
        raise JobError(problem, key=key, fix="Leave it out")


def single_line_validator(section: str) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator that raises JobError for texts of a section with more than one line. Tabs
    count as blanks."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        for one in cast("tuple[Any, ...]", value) if type(value) is tuple else (value,):
            if isinstance(one, str):
                check_single_line(one.replace("\t", " "), f"{section}.{info.field_name}")
        return value  # pyright: ignore[reportUnknownVariableType]

    return checked


KEY = "plan.tokens"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Suffixes of counts; a billion is 10**9."""
MOST = 1e18
"""Most tokens of a count; a larger number is a slip."""
_AMOUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d+)?)\s*([KMBT]?)", re.IGNORECASE)


def tokens_of(value: float | str, key: str = KEY) -> int:
    """Return the number of tokens in ``plan.tokens`` or another key; 0 if the key is not set.
    Raises JobError for a value that is not a count.

    >>> tokens_of("15T"), tokens_of("1.4 b"), tokens_of(3e11), tokens_of("300_000")
    (15000000000000, 1400000000, 300000000000, 300000)
    """
    match = _AMOUNT.fullmatch(str(value).strip())
    count = float(match[1].replace("_", "").replace(",", "")) * UNITS[match[2].upper()] if match else math.nan
    if not 0 <= count <= MOST or count != int(count):
        shown = f"'{value}'" if isinstance(value, str) else f"{value:g}"
        fix = f'Write a whole number of at most {MOST:g}, as in 15e12 or "15T" (K, M, B, T)'
        raise JobError(f"{shown} is no count of tokens", key=key, fix=fix)
    return int(count)


def in_tokens(count: float) -> str:
    """Return a count of tokens as people read it.

    >>> in_tokens(15e12), in_tokens(61_234_567_890), in_tokens(999.6), in_tokens(999_999)
    ('15T', '61.2B', '1K', '1M')
    """
    for unit, size in UNITS.items():
        if float(f"{count / size:.3g}") < 1000 or unit == "T":
            scaled = count / size
            return f"{scaled:.3g}{unit}" if scaled < 999.5 else f"{scaled:,.0f}{unit}"
    raise AssertionError

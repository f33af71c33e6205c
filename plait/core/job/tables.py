"""Settings that stand without their table, such as ``steps=10`` or ``cluster=h100``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from plait.core.base.codec.toml_text import show
from plait.core.base.errors import JobError
from plait.core.job.framework_names import key_of

MEANT = {"model": "preset", "cluster": "preset", "data": "text", "run": "name", "slurm": "partition"}
"""The key that a table's name alone probably means, by table."""
ALIKE = 0.7
"""The least similarity of a name to the setting that is suggested."""
STRATEGY = "Write strategy=auto to have all of it searched, or its keys, such as strategy.tp=2"


def check_tables(values: Mapping[str, Any], tables: Collection[str], typed: Collection[str]) -> None:
    """Raise JobError for a plain value outside of tables, naming the setting that was probably
    meant.

    values: a job's plain values. tables: its tables. typed: keys from the command line.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) or (key == "strategy" and value == "auto"):
            continue
        if key in tables:
            name = MEANT.get(key) if isinstance(value, str) else None
            other = STRATEGY if key == "strategy" else f"Write {key}.KEY=VALUE; plait job {key} lists its keys"
            fix = _written([f"{key}.{name}"], value, key in typed) if name else other
            fix = fix if name or key in typed else f"Write [{key}] and the keys below it"
            raise JobError(f"{show(value)} is not a table", key=key, fix=fix)
        if key_of(key) is None and (names := settings_named(key) or _nearest(key)):
            problem = "stands without its table" if names[0].endswith(f".{key}") else f"is not a setting; {names[0]} is"
            raise JobError(problem, key=key, fix=_written(names, value, key in typed))


def settings_named(name: str) -> list[str]:
    """Return the settings ``TABLE.name``; for a table's own name, the setting that it probably
    means."""
    return [f"{name}.{MEANT[name]}"] if name in MEANT else [one for one in _settings() if one.endswith(f".{name}")]


def _nearest(name: str) -> list[str]:
    """Return the setting whose name is closest, if any is."""
    last = {one.partition(".")[2]: one for one in _settings()}
    return [last[key] for key in get_close_matches(name, last, n=1, cutoff=ALIKE)]


def _settings() -> list[str]:
    from plait.core.job.reference import reference  # a module that imports this one

    return [one.name for table in reference() for one in table.keys if one.name.count(".") == 1]


def _written(names: list[str], value: Any, typed: bool) -> str:
    """Return how to write a value of one of the settings, on the command line or in a file."""
    text = value if isinstance(value, str) and value.isprintable() and " " not in value else show(value)
    if typed:
        return f"Write {' or '.join(f'{name}={text}' for name in names)}"
    each = (name.split(".") for name in names)
    return f"Write {' or '.join(f'{key} = {show(value)} below [{table}]' for table, key in each)}"

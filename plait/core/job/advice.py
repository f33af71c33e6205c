"""Advice that is tried before it is given: each change that an error suggests is applied, and left
out if the changed job is refused again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.job.tables import settings_named

MOST_TRIED = 40
"""Most changes that are tried, a few milliseconds each."""


def changed(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values of a job with some keys set, or removed if the new value is None.

    >>> changed({"train": {"steps": 3, "seed": 1}}, {"train.steps": 4, "train.seed": None})
    {'train': {'steps': 4}}
    """
    result = dict(values)
    for key, value in change.items():
        *tables, last = key.split(".")
        table = result
        for name in tables:
            inner = table.get(name)
            table[name] = table = dict(cast("dict[str, Any]", inner)) if isinstance(inner, dict) else {}
        table.pop(last, None)
        if value is not None:
            table[last] = value
    return result


def with_valid_changes(
    error: JobError, values: Mapping[str, Any], refusal: Callable[[dict[str, Any]], JobError | None]
) -> JobError:
    """Return the error with only those of its changes that make the job valid; if there are none,
    those after which its own key is valid. values: plain values of the job. refusal: returns the
    error in changed values, or None. An unknown key that another table has gets its full name."""
    if error.problem == "unknown key" and (names := settings_named(str(error.key).rpartition(".")[2])):
        return JobError(error.problem, file=error.file, key=error.key, fix=f"Write {' or '.join(names)}")
    if not error.changes:
        return error
    right, elsewhere = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for change in error.changes[:MOST_TRIED]:
        found = refusal(changed(values, change))
        if found is None:
            right.append(change)
        elif not overlapping_keys(found.key, error.key):
            elsewhere.append(change)
    return JobError(error.problem, file=error.file, key=error.key, changes=right or elsewhere)


def overlapping_keys(first: str | None, second: str | None) -> bool:
    """Return True if two keys are equal, or one is a part of the other.

    >>> overlapping_keys("strategy.shard", "strategy.shard.params")
    True
    >>> overlapping_keys("strategy.pp", "strategy.tp")
    False
    """
    if first is None or second is None:
        return first == second
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")

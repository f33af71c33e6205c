"""Advice is tried before it is given: what a refusal says to change is changed, and what is refused again is
left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from plait.core.base.errors import JobError

MOST_TRIED = 40
"""Changes, a few milliseconds each."""


def changed(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a job with some keys set, or left out where the new value is None.

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


def tried(error: JobError, values: Mapping[str, Any], refusal: Callable[[dict[str, Any]], JobError | None]) -> JobError:
    """The same error with those of its changes after which nothing is refused; if there are none, those after
    which its own place is not. values: of the job. refusal: what is wrong with others."""
    if not error.changes:
        return error
    right, elsewhere = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for change in error.changes[:MOST_TRIED]:
        found = refusal(changed(values, change))
        if found is None:
            right.append(change)
        elif not same_place(found.key, error.key):
            elsewhere.append(change)
    return JobError(error.problem, file=error.file, key=error.key, changes=right or elsewhere)


def same_place(one: str | None, other: str | None) -> bool:
    """Whether two keys are one, or a part of the other.

    >>> same_place("strategy.shard", "strategy.shard.params"), same_place("strategy.pp", "strategy.tp")
    (True, False)
    """
    if one is None or other is None:
        return one == other
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")

"""Plain values of a job before they are checked: steps from a budget of tokens, and keys left to
the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plait.core.base.codec.data import decode
from plait.core.base.errors import JobError
from plait.core.job.rampup import BatchSizes, RampupSection
from plait.core.job.settings import PLANNABLE, DataSection, TrainSection
from plait.core.job.texts import tokens_of

TIMED_SETTINGS = ("strategy.slices", "strategy.sequence_parallel")
"""Settings whose ``auto`` is timed, not predicted, unless the planner chooses other settings
too."""
MICRO = "train.micro_batch_size"
PLANNED = (MICRO, *(f"strategy.{key}" for key in PLANNABLE))
"""Settings that the planner can choose."""


def with_steps_of_tokens(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the number of steps that ``train.tokens`` need, if that key is set.
    Raises JobError if ``train.steps`` is set too."""
    tables: list[Any] = [values.get(name, {}) for name in ("train", "data")]
    if not all(isinstance(table, dict) for table in tables) or not tables[0].get("tokens"):
        return values
    train, data = tables
    if "steps" in train:
        changes: list[dict[str, Any]] = [{"train.steps": None}, {"train.tokens": None}]
        raise JobError(f"{train['steps']} conflicts with train.tokens", key="train.steps", changes=changes)
    said: Any = train["tokens"]
    batch: Any = train.get("global_batch_size", TrainSection().global_batch_size)
    rampup = _rampup(train.get("rampup_batch_size"))
    sequence: Any = data.get("sequence_length", DataSection().sequence_length)
    if isinstance(said, bool | dict | list) or not all(isinstance(one, int) and one > 0 for one in (batch, sequence)):
        return values  # a wrong type, which the section's own check refuses
    sequences = -(-tokens_of(said, "train.tokens") // sequence)
    return {**values, "train": {**train, "steps": max(1, BatchSizes.of(batch, rampup).steps_for(sequences))}}


def _rampup(value: object) -> RampupSection | None:
    """Return the batch ramp-up, or None if it is missing or invalid; an invalid one is refused
    later."""
    try:
        return None if value is None else decode(RampupSection, value)
    except JobError:
        return None


def with_open_strategy(values: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Return ``values``, with ``auto`` for every key of ``[strategy]`` if that table is missing and
    ``settings`` set one of its keys: keys that are not set stay the planner's."""
    if "strategy" in values or not any(one.lstrip().startswith("strategy.") for one in settings):
        return dict(values)
    return {**values, "strategy": dict.fromkeys(PLANNABLE, "auto")}


def with_open_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with each ``auto`` that the planner replaces taken out of its table and
    listed under ``open``. Raises JobError if ``values`` already has ``open``."""
    if "open" in values:
        raise JobError("unknown key", key="open", fix="Write auto for what the planner is to choose")
    if values.get("strategy") == "auto":
        values = {key: value for key, value in values.items() if key != "strategy"}
    tables = {"strategy": values.get("strategy", {}), "train": values.get("train", {})}
    if not all(isinstance(table, dict) for table in tables.values()):
        return values
    found = list[str]()
    for key in PLANNED:
        section, _, name = key.partition(".")
        table = tables[section]
        unsaid = "strategy" not in values and name not in table
        if unsaid or table.get(name, "auto" if name == "slices" else None) == "auto":
            found.append(key)
    if set(found) <= set(TIMED_SETTINGS):
        return values
    if "micro_batch_size" not in tables["train"] and MICRO not in found:
        found.insert(0, MICRO)
    for key in set(found) - set(TIMED_SETTINGS):
        section, _, name = key.partition(".")
        tables[section] = {other: value for other, value in tables[section].items() if other != name}
    if MICRO in found:  # other keys are checked against the largest that may be chosen
        tables["train"] = {**tables["train"], "micro_batch_size": 0}
    return {**values, **tables, "open": found}

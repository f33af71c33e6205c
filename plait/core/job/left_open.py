"""Plain values of a job before they are checked: steps of a budget in tokens, what is left to the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plait.core.base.codec.data import decode
from plait.core.base.errors import JobError
from plait.core.job.amounts import tokens_of
from plait.core.job.rampup import BatchSizes, RampupSection
from plait.core.job.settings import PLANNABLE, DataSection, TrainSection

TIMED = ("strategy.slices", "strategy.sequence_parallel")
"""Settings whose ``auto`` is timed, not predicted, unless others are open too."""
MICRO = "train.micro_batch_size"
PLANNED = (MICRO, *(f"strategy.{key}" for key in PLANNABLE))
"""Settings that the planner can choose."""


def budgeted(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with the steps that ``train.tokens`` are, if it is given. Raises JobError where both are."""
    tables: list[Any] = [values.get(name, {}) for name in ("train", "data")]
    if not all(isinstance(table, dict) for table in tables) or not tables[0].get("tokens"):
        return values
    train, data = tables
    if "steps" in train:
        changes: list[dict[str, Any]] = [{"train.steps": None}, {"train.tokens": None}]
        raise JobError(f"{train['steps']} stands beside train.tokens", key="train.steps", changes=changes)
    said: Any = train["tokens"]
    batch: Any = train.get("global_batch_size", TrainSection().global_batch_size)
    rampup = _rampup(train.get("rampup_batch_size"))
    sequence: Any = data.get("sequence_length", DataSection().sequence_length)
    if isinstance(said, bool | dict | list) or not all(isinstance(one, int) and one > 0 for one in (batch, sequence)):
        return values  # of a type that is refused where it stands
    sequences = -(-tokens_of(said, "train.tokens") // sequence)
    return {**values, "train": {**train, "steps": max(1, BatchSizes.of(batch, rampup).steps_for(sequences))}}


def _rampup(said: object) -> RampupSection | None:
    """A ramp of the batch; none where it is not there, or is refused where it stands."""
    try:
        return None if said is None else decode(RampupSection, said)
    except JobError:
        return None


def spelled_out(values: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """``values`` with the ``[strategy]`` that they leave out, where ``settings`` name a key of it: the keys
    that are not named stay the planner's."""
    if "strategy" in values or not any(one.lstrip().startswith("strategy.") for one in settings):
        return dict(values)
    return {**values, "strategy": dict.fromkeys(PLANNABLE, "auto")}


def opened(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with every ``auto`` that is the planner's taken out of its table and listed under
    ``open``."""
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
    if set(found) <= set(TIMED):
        return values
    if "micro_batch_size" not in tables["train"] and MICRO not in found:
        found.insert(0, MICRO)
    for key in set(found) - set(TIMED):
        section, _, name = key.partition(".")
        tables[section] = {other: value for other, value in tables[section].items() if other != name}
    if MICRO in found:  # what else the job says is held against the largest that may be chosen
        tables["train"] = {**tables["train"], "micro_batch_size": 0}
    return {**values, **tables, "open": found}

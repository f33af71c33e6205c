"""Keys of a job file as earlier versions and other frameworks call them, and as they are called now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.job import peers
from plait.core.model.families import MODEL_TYPES
from plait.core.model.huggingface import without_a_key

KEYS = {
    "data.sequence": "data.sequence_length",
    "train.batch": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "train.dtype": "train.precision",
    "train.clip_norm": "train.clip_grad",
    "train.eps": "train.adam_eps",
    "train.betas": "train.adam_betas",
    "strategy.sp": "strategy.cp",
    "strategy.sp_kind": "strategy.cp_comm_type",
    "strategy.cp_kind": "strategy.cp_comm_type",
    "strategy.interleave": "strategy.virtual_stages",
    "strategy.slices.p1": "strategy.slices.batch",
    "strategy.slices.p2": "strategy.slices.columns",
    "strategy.p1": "strategy.slices.batch",
    "strategy.p2": "strategy.slices.columns",
    "slurm.grace": "slurm.signal_time",
    "kubernetes.restarts": "kubernetes.max_restarts",
    "kubernetes.spares": "kubernetes.spare_nodes",
    "kubernetes.queue": "kubernetes.kueue_queue",
    "kubernetes.topology": "kubernetes.kueue_topology",
    "kubernetes.stage_topology": "kubernetes.kueue_stage_topology",
}
"""Of a job file, by tables and name."""
VALUES = {
    ("strategy.overlap", "none"): "no-communication",
    ("strategy.overlap.tp", "none"): "no-communication",
    **peers.VALUES,
}
"""Of a job file, by key and value as earlier versions or others have it."""
QUANTITIES = {"p1": "batch_slices", "p2": "column_slices"}
"""Of a strategy, that constraints name."""
HINTS = {
    "train.micro_batch": "It counts the sequences of one data-parallel replica, no longer of all of them",
    "train.dtype": '"bf16" is "bf16-mixed" now: weights are kept in fp32 as well',
    "train.precision=bf16-mixed": 'Write "bf16-mixed": weights, gradients and moments are kept in fp32 as well',
    "strategy.overlap": 'It trains a wrong model, to measure with. Write "off" for communication that nothing hides',
}
"""What else is to be known of a key that was renamed, or of a value."""


def refuse_old_keys(values: Mapping[str, Any]) -> None:
    """Raise JobError for a key or a value of a job file that an earlier version knew, with what it is called
    now.

    >>> refuse_old_keys({"train": {"eps": 1e-8}})
    Traceback (most recent call last):
    plait.core.base.errors.JobError: train.eps: is called train.adam_eps now. Write adam_eps.
    """
    for old, new in KEYS.items():
        if _at(values, old) is not None:
            raise JobError(f"is called {new} now", key=old, fix=HINTS.get(old, f"Write {new.partition('.')[2]}"))
    for other, own in peers.written(values):
        fix = peers.advice(own, other.rpartition(".")[0])
        raise JobError(f"is called {own} here", key=other, fix=f"{fix}{_as_a_config(values, other)}")
    _refuse_config_keys(values)
    for (key, old), new in VALUES.items():
        if _at(values, key) == old:
            wrong = new == "no-communication"
            fix = HINTS["strategy.overlap"] if wrong else HINTS.get(f"{key}={new}", f'Write "{new}"')
            raise JobError(f'"{old}" is called "{new}" {"now" if wrong else "here"}', key=key, fix=fix)


def _refuse_config_keys(values: Mapping[str, Any]) -> None:
    """Raise JobError for a key of config.json in [model] that has no counterpart there."""
    model = values.get("model")
    for name in cast("Mapping[str, Any]", model) if isinstance(model, Mapping) else ():
        if why := without_a_key(name):
            key = f"model.{name}"
            raise JobError(f"is a key of config.json that {why}", key=key,
                           fix=f"Leave it out{_as_a_config(values, key)}")  # fmt: skip


def _as_a_config(values: Mapping[str, Any], key: str) -> str:
    """How a whole config.json is taken, for whoever writes a key of one into [model]."""
    section, _, name = key.rpartition(".")
    own = peers.key_of(name)
    theirs = without_a_key(name) or (own and name in peers.PEERS[own].transformers.split())
    if section != "model" or not theirs or own == "model.experts" or _at(values, "model.huggingface") is not None:
        return ""
    return f'. A whole config.json ({", ".join(MODEL_TYPES)}) is read with huggingface = "FOLDER"'


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a job that an earlier version wrote, with names as they are now.

    >>> renamed({"train": {"eps": 1e-8}, "strategy": {"cp_kind": "ring", "slices": "auto"}})
    {'train': {'adam_eps': 1e-08}, 'strategy': {'slices': 'auto', 'cp_comm_type': 'ring'}}
    """
    found = _copied(values)
    for old, new in KEYS.items():
        table, _, name = old.rpartition(".")
        if _at(found, old) is not None:
            _put(found, new, _at(found, table).pop(name))
    for (key, old), new in VALUES.items():
        if _at(found, key) == old:
            _put(found, key, new)
    return found


def _copied(values: Any) -> Any:
    """Tables within tables, each another object."""
    if not isinstance(values, Mapping):
        return values
    return {key: _copied(value) for key, value in cast("Mapping[str, Any]", values).items()}


def _at(values: Any, key: str) -> Any:
    """What stands at a key with dots; None where nothing does."""
    for part in key.split("."):
        if not isinstance(values, Mapping):
            return None
        values = cast("Mapping[str, Any]", values).get(part)
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[name] = value

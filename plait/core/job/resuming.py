"""Effects of settings that changed when a run goes on: a row for every key of [train] and
[strategy]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from plait.core.base.numbers import shown

Effect = Literal["at once", "noted", "another shape", "refused"]
"""Effect of a changed setting. ``at once``: no number of a step changes. ``noted``: later steps
compute other numbers from the same state; a log line and the run's history note it. ``another
shape``: the run is planned anew, and goes on with the same numbers but for rounding. ``refused``:
an error, with the key and both values."""

TRAIN_EFFECTS: Mapping[str, Effect] = {
    "steps": "at once",
    "tokens": "at once",
    "global_batch_size": "noted",
    "rampup_batch_size": "noted",
    "micro_batch_size": "noted",
    "learning_rate": "noted",
    "min_learning_rate": "noted",
    "warmup_steps": "noted",
    "lr_decay_style": "noted",
    "lr_decay_steps": "noted",
    "lr_wsd_decay_steps": "noted",
    "optimizer": "refused",
    "optimizer_dtype": "refused",
    "muon": "noted",
    "sgd": "noted",
    "weight_decay": "noted",
    "weight_decay_of": "noted",
    "adam_betas": "noted",
    "adam_eps": "noted",
    "clip_grad": "noted",
    "precision": "refused",
    "on_nan": "at once",
    "seed": "refused",
    "eval_every": "at once",
    "eval_batches": "at once",
    "checkpoint_every": "at once",
    "keep_checkpoints": "at once",
    "keep_every": "at once",
    "keep_best": "at once",
    "log_every": "at once",
    "init_from": "refused",
}
"""Effects of changed keys of [train]. A batch of another size begins with the sequence after the
last that was trained on. So does a batch of another ramp-up, whose sizes are counted from the first
step of the run."""
DATA_EFFECTS: Mapping[str, Effect] = {"sources": "noted", "eval": "at once"}
"""Effects of changed keys of [data]. Its other keys decide what a position in the data means, and
are refused. Sources may be added and weights changed: every source goes on at its position."""
STRATEGY_EFFECT: Effect = "another shape"
"""Effect of any changed key of [strategy]."""
SECTION_EFFECTS: Mapping[str, Effect] = {"model": "refused"}
"""Effects of tables whose keys are all alike. Tables that are not listed are about where a run is,
not what it computes."""


def effect_of(key: str) -> Effect:
    """Return the effect of a change of ``section.key``, or of a key within that.

    >>> [effect_of(key) for key in ("train.muon.momentum", "model.hidden", "strategy.tp", "run.name")]
    ['noted', 'refused', 'another shape', 'at once']
    """
    section, _, name = key.partition(".")
    if section == "train":
        return TRAIN_EFFECTS[name.partition(".")[0]]
    if section == "data":
        return DATA_EFFECTS.get(name.partition(".")[0], "refused")
    return STRATEGY_EFFECT if section == "strategy" else SECTION_EFFECTS.get(section, "at once")


def flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables, each with its dotted key."""
    for name, value in table.items():
        key, inner = f"{prefix}.{name}", dict[str, Any]()
        if isinstance(value, Mapping):
            inner = dict(cast("Mapping[str, Any]", value))
        if inner and not any("." in one for one in inner):
            yield from flatten(inner, key)
        else:
            yield key, value


@dataclass(frozen=True)
class Change:
    """A setting that differs from before. allowed: True if a run may go on with the change.

    >>> str(Change("train.clip_grad", 1.0, 0.5, True))
    'train.clip_grad was 1.0 and is 0.5'
    """

    key: str
    before: Any
    now: Any
    allowed: bool

    def __str__(self) -> str:
        if tables := _tables(self.before, self.now):
            return f"{self.key}: {', '.join(tables)}"
        return f"{self.key} {_was(self.before, self.now)}"


def _was(before: Any, now: Any) -> str:
    told = ("not set" if value is None else shown(value) for value in (before, now))
    return "was {} and is {}".format(*told)


def _tables(before: Any, now: Any) -> list[str]:
    """Return the differences between two lists of tables with paths, such as sources of data; empty
    for other values.

    >>> _tables([{"path": "/a", "weight": 1.0}], [{"path": "/b"}, {"path": "/a", "weight": 2.0}])
    ["'/b' was added", "weight of '/a' was 1.0 and is 2.0"]
    """
    old, new = (_by_path([] if value is None else value) for value in (before, now))
    if old is None or new is None or not (old or new):
        return []
    found = [f"{shown(path)} was added" for path in new if path not in old]
    found += [f"{shown(path)} was removed" for path in old if path not in new]
    for path in new:
        was, is_ = old.get(path, new[path]), new[path]
        keys = [key for key in {**was, **is_} if was.get(key) != is_.get(key)]
        found += [f"{key} of {shown(path)} {_was(was.get(key), is_.get(key))}" for key in keys]
    return found or ["another order"] * (before != now)


def _by_path(value: Any) -> dict[str, dict[str, Any]] | None:
    """Return tables by their paths; None if ``value`` is not a list of tables with paths."""
    if not isinstance(value, list):
        return None
    tables = cast("list[Any]", value)
    if not all(isinstance(one, dict) and "path" in one for one in tables):
        return None
    return {str(one["path"]): one for one in tables}

"""Keys of a job file of earlier versions, and what they are called now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from plait.core.base.errors import JobError

KEYS = {
    "data.sequence": "data.sequence_length",
    "train.batch": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "train.dtype": "train.precision",
    "strategy.sp": "strategy.cp",
    "strategy.sp_kind": "strategy.cp_kind",
    "strategy.interleave": "strategy.virtual_stages",
}
"""Of a job file, by section and name."""
HINTS = {
    "train.micro_batch": "It counts the sequences of one data-parallel replica, no longer of all of them",
    "train.dtype": '"bf16" is "bf16-mixed" now: weights are kept in fp32 as well',
}
"""What else is to be known of a key that was renamed."""


def refuse_old_keys(values: Mapping[str, Any]) -> None:
    """Raise JobError for a key of a job file that an earlier version knew, with the name it has now."""
    for old, new in KEYS.items():
        section, _, key = old.partition(".")
        table = values.get(section)
        if isinstance(table, dict) and key in cast("dict[str, Any]", table):
            raise JobError(f"is called {new} now", key=old, fix=HINTS.get(old, f"Write {new.partition('.')[2]}"))

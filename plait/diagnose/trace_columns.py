"""What readers of other tools' recordings share: their columns, axes of groups, sizes of dtypes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import polars as pl

from plait.diagnose.tables import MOST_RANKS

NS = 1e9
FOREIGN = {
    "step": pl.Int64, "rank": pl.Int32, "kind": pl.String, "name": pl.String, "seq": pl.Int64, "site": pl.String,
    "start": pl.Float64, "end": pl.Float64, "bytes": pl.Int64, "axis": pl.String, "group": pl.String,
}  # fmt: skip
"""What readers of other formats make. seq: -1 where the format does not count.
bytes: 0 where the format does not tell. group: members, or ``source>target`` of a transfer."""
AXES = (
    ("tp", r"tensor|(^|[^a-z])tp"), ("cp", r"context|(^|[^a-z])cp($|[^a-z])"), ("pp", r"pipeline|(^|[^a-z])pp"),
    ("dp", r"data|fsdp|shard|replicate|(^|[^a-z])dp|default_pg"),
)  # fmt: skip
LABELS = 1000
"""Texts of which is kept what they say: every event of a trace has one of few."""
LATEST = 4e9
"""Seconds from 1970, in 2096: nanoseconds between two such times are still whole numbers of 64 bits."""
SIZES = (
    (16, "complexdouble|complex128"), (8, "double|long|complexfloat|complex64|float64|int64"),
    (1, "float8|e4m3|e5m2|byte|char|bool|int8"), (2, "half|bfloat16|short|float16|int16"), (4, "float|int"),
)  # fmt: skip


class ForeignSpans(NamedTuple):
    """Spans of a file, of one rank: columns ``FOREIGN``, times in seconds from ``since``, ns since 1970."""

    spans: pl.DataFrame
    since: int


@lru_cache(LABELS)
def axis_of(label: str) -> str:
    """The axis of a process group by its description: ``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_dp_shard``.

    >>> axis_of("mesh_dp_shard"), axis_of("TENSOR_MODEL_PARALLEL_GROUP"), axis_of("undefined")
    ('dp', 'tp', 'other')
    """
    return next((axis for axis, words in AXES if re.search(words, label.lower())), "other")


@lru_cache(LABELS)
def bytes_of_dtype(name: str) -> int:
    """Bytes of an element of torch's dtype; 0 for one that is not known.

    >>> [bytes_of_dtype(name) for name in ("BFloat16", "Float", "Long", "Float8_e4m3fn", "Quantum")]
    [2, 4, 8, 1, 0]
    """
    return next((size for size, words in SIZES if re.search(words, name.lower())), 0)


def members_of(ranks: Any, *, in_order: bool = False) -> str | None:
    """``0,4,8`` of a list of ranks, or of its text; None where it is cut off, none, or has ranks that no job
    has. in_order: as they stand, not sorted.

    >>> members_of("[4, 0]"), members_of([1, 2]), members_of("[0, 1, ...]")
    ('0,4', '1,2', None)
    """
    return _members(",".join(map(str, ranks)) if isinstance(ranks, list) else str(ranks), in_order)


@lru_cache(LABELS)
def _members(text: str, in_order: bool) -> str | None:
    inside = text.strip().strip("[]")
    if not re.fullmatch(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", inside):
        return None
    found = [int(rank) for rank in inside.split(",")]
    if max(found) >= MOST_RANKS or len(set(found)) < len(found):
        return None
    return ",".join(map(str, found if in_order else sorted(found)))

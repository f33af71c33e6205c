"""Code shared by the readers of other tools' recordings: columns, axes of process groups, sizes of
dtypes, and the rank of a recording. The rank comes from the file's content, or from its name.

Only unambiguous file names give a rank: ``rank-3``, ``rank3``, and ``_3`` right before the
extension unless it is a process id. Host addresses (``rank_10.12.0.7_3``) and names of
TensorBoard's handler (``HOST_PID.TIME.pt.trace.json``) give none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from plait.core.base.codec.json_text import is_list
from plait.core.base.errors import DataError
from plait.core.base.numbers import MOST_RANKS, shown

NS = 1e9
FOREIGN = {
    "step": pl.Int64, "rank": pl.Int32, "kind": pl.String, "name": pl.String, "seq": pl.Int64, "site": pl.String,
    "start": pl.Float64, "end": pl.Float64, "bytes": pl.Int64, "axis": pl.String, "group": pl.String,
}  # fmt: skip
"""Columns and types of the spans that readers of other formats return. seq: sequence number, -1 if
the format has none. bytes: 0 if the format has no sizes. group: member ranks, or ``source>target``
for a transfer."""
AXES = (
    ("tp", r"tensor|(^|[^a-z])tp"), ("cp", r"context|(^|[^a-z])cp($|[^a-z])"), ("pp", r"pipeline|(^|[^a-z])pp"),
    ("dp", r"data|fsdp|shard|replicate|(^|[^a-z])dp|default_pg"),
)  # fmt: skip
LABELS = 1000
"""Size of the caches of parsed texts; a trace's many events share few texts."""
LATEST = 4e9
"""Seconds from 1970, in 2096: nanoseconds between two such times are still whole numbers of 64
bits."""
SIZES = (
    (16, "complexdouble|complex128"), (8, "double|long|complexfloat|complex64|float64|int64"),
    (1, "float8|e4m3|e5m2|byte|char|bool|int8"), (2, "half|bfloat16|short|float16|int16"), (4, "float|int"),
)  # fmt: skip

LOW = 1024
"""Upper limit (or eight times the number of files) for a number at a name's end to count as a
rank."""
_ADDRESS = re.compile(
    r"(?<![0-9])(\d{1,3}([.-])\d{1,3}\2\d{1,3}\2\d{1,3}|[0-9a-f]{0,4}(:[0-9a-f]{0,4}){2,7})(?=_)", re.IGNORECASE
)
_WORD = re.compile(r"(?<![a-z])(?<!local[-_.])rank[-_.=]?(\d{1,9})(?!\d)", re.IGNORECASE)
_NO_RANK = re.compile(r"\.\d{9,}(\.pt)?\.trace\.json|local[-_.]?rank|kineto_activities|pid[-_.]?\d", re.IGNORECASE)
_PROCESS = re.compile(r"(.+_\d+)\.\d{9,}(?:\.pt)?\.trace\.json", re.IGNORECASE)
_LAST = re.compile(r"_(\d{1,9})(\.pt)?(\.trace)?(\.json)?(\.(gz|bz2|xz))?$", re.IGNORECASE)


class ForeignSpans(NamedTuple):
    """Spans of one rank's file: columns ``FOREIGN``, times in seconds after ``since`` (nanoseconds
    since 1970)."""

    spans: pl.DataFrame
    since: int


@lru_cache(LABELS)
def axis_of(label: str) -> str:
    """Return the axis of a process group by its description: ``TENSOR_MODEL_PARALLEL_GROUP``,
    ``mesh_dp_shard``.

    >>> axis_of("mesh_dp_shard"), axis_of("TENSOR_MODEL_PARALLEL_GROUP"), axis_of("undefined")
    ('dp', 'tp', 'other')
    """
    return next((axis for axis, words in AXES if re.search(words, label.lower())), "other")


@lru_cache(LABELS)
def bytes_of_dtype(name: str) -> int:
    """Return the bytes per element of a torch dtype; 0 if the dtype is unknown.

    >>> [bytes_of_dtype(name) for name in ("BFloat16", "Float", "Long", "Float8_e4m3fn", "Quantum")]
    [2, 4, 8, 1, 0]
    """
    return next((size for size, words in SIZES if re.search(words, name.lower())), 0)


def members_of(ranks: Any) -> tuple[int, ...] | None:
    """Return the ranks of a list or of its text, in order. None if the list is cut off, is no list,
    repeats a rank, or has a rank of ``MOST_RANKS`` or more.

    >>> members_of("[4, 0]"), members_of([1, 2]), members_of("[0, 1, ...]")
    ((4, 0), (1, 2), None)
    """
    return _members(",".join(map(str, ranks)) if is_list(ranks) else str(ranks))


@lru_cache(LABELS)
def _members(text: str) -> tuple[int, ...] | None:
    inside = text.strip().strip("[]")
    if not re.fullmatch(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", inside):
        return None
    found = tuple(int(rank) for rank in inside.split(","))
    return found if max(found) < MOST_RANKS and len(set(found)) == len(found) else None


def rank_in(name: str, low: int = LOW) -> int | None:
    """Return the rank in a file's name; None if the name has none.

    >>> [rank_in(name) for name in ("rank-00003.json.gz", "rank3_trace.json", "nccl_trace_7", "trace.json")]
    [3, 3, 7, None]
    >>> [rank_in(name) for name in ("a_2348.171800000012345.pt.trace.json", "local_rank_3.json", "t_2024061")]
    [None, None, None]
    """
    name = _ADDRESS.sub("host", name)
    if found := _WORD.search(name):
        return int(found[1])
    found = None if _NO_RANK.search(name) else _LAST.search(name)
    return int(found[1]) if found and int(found[1]) < low else None


def process_in(name: str) -> str | None:
    """Return the host and process id in a name of TensorBoard's handler; None for other names.

    >>> process_in("gpu-a_2348.171800000012345.pt.trace.json"), process_in("rank0.json")
    ('gpu-a_2348', None)
    """
    found = _PROCESS.match(name)
    return found[1] if found else None


def rank_by_path(path: Path, low: int = LOW) -> int | None:
    """Return the rank in a file's name, else in its folder's name: ``rank0/trace.json``; else
    None."""
    told = rank_in(path.name, low)
    if told is None and (found := _WORD.search(path.parent.name)):
        return int(found[1])
    return told


def can_be_rank(value: Any, members: Collection[int] = ()) -> bool:
    """True if ``value`` is a whole number of a possible rank, and one of ``members`` unless these
    are empty."""
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_RANKS
    return whole and (not members or value in members)


def checked_rank(value: Any) -> int:
    """Return a rank read from a file. Raises DataError if the value is no rank."""
    if not can_be_rank(value):
        raise DataError(f"its rank {shown(value)} is not a whole number from 0 to {MOST_RANKS - 1:,}")
    return value


def assign_ranks(unknown: Sequence[Path], files: Mapping[int, Path]) -> dict[Path, int]:
    """Return free ranks for the files of unknown rank, in natural order of their names. files:
    files by rank."""
    free = (rank for rank in range(len(unknown) + len(files)) if rank not in files)
    return dict(zip(sorted(unknown, key=_natural), free, strict=False))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return the key of a natural sort: numbers in a name compare as numbers."""
    parts = re.split(r"(\d{1,18})", path.name)
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]

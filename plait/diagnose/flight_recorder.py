"""Dumps of PyTorch's flight recorder, in their JSON form, as spans: collectives without what was computed
between them.

``torch._C._distributed_c10d._dump_nccl_trace_json`` writes this form. The pickled form is refused: whoever
loads a pickle runs what somebody else wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from plait.core.errors import DataError
from plait.diagnose.foreign import FOREIGN, LATEST, NS, axis_of, members_of, number, rank_of


def is_dump(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object is such a dump."""
    return isinstance(content.get("entries"), list) and "version" in content


def dump_spans(content: Mapping[str, Any], rank: int | None) -> tuple[pl.DataFrame, int]:
    """Columns ``FOREIGN``, and how many operations were left out because they had not ended. Raises DataError
    for a dump of no known rank, or without any that ended."""
    rank = rank_of(content.get("rank"), rank, "it does not say whose it is")
    groups = _groups(content.get("pg_config"))
    rows: list[tuple[Any, ...]] = []
    entries = [one for one in content["entries"] if isinstance(one, dict)]
    for one in entries:
        start = _number(one, "time_discovered_started_ns", "time_created_ns")
        end = _number(one, "time_discovered_completed_ns")
        length = one.get("duration_ms")
        if end is None and start is not None and isinstance(length, int | float):
            end = start + number(length, "duration_ms", LATEST * 1e3) * 1e6
        if start is None or end is None or end < start:
            continue
        name, label = _group_of(one)
        what = str(one.get("profiling_name") or "collective")
        crosses = bool(one.get("is_p2p"))
        sequence = _number(one, "p2p_seq_id" if crosses else "collective_seq_id")
        group = groups.get(name) or label or name or "all"
        rows.append(
            (0, rank, "transfer" if crosses else "comm", what, -1 if sequence is None else int(sequence), what,
             start / NS, end / NS, _bytes(one), "pp" if crosses else axis_of(label), group)
        )  # fmt: skip
    if not rows:
        raise DataError(f"none of its {len(entries)} operations has ended")
    return pl.DataFrame(rows, schema=FOREIGN, orient="row"), len(entries) - len(rows)


def _groups(config: Any) -> dict[str, str]:
    """Members of groups by their names."""
    if not isinstance(config, dict):
        return {}
    found = [one for one in config.values() if isinstance(one, dict)]
    return {str(one.get("name")): members_of(one.get("ranks")) or "" for one in found}


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Name and description."""
    told = entry.get("process_group")
    if isinstance(told, list) and told:
        return str(told[0]), str(told[-1])
    return str(told or ""), str(told or "")


def _number(entry: Mapping[str, Any], *keys: str) -> float | None:
    """The first of some keys that has one. Raises DataError for one out of range."""
    for key in keys:
        value = entry.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return float(number(value, key, LATEST * NS))
    return None


def _bytes(entry: Mapping[str, Any]) -> int:
    """Of what goes in."""
    sizes, types = entry.get("input_sizes"), entry.get("input_dtypes")
    if not isinstance(sizes, list):
        return 0
    total = 0
    for index, shape in enumerate(sizes):
        if not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
            continue
        kind = str(types[index]) if isinstance(types, list) and index < len(types) else ""
        numel = 1
        for n in shape:
            numel *= n
        total += numel * (8 if "Long" in kind or "Double" in kind else 2 if "Half" in kind or "BFloat" in kind else 4)
    return number(total, "the size in input_sizes", 2**53)

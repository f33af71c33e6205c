"""Roll-ups: counts and durations per rank, step and kind of op, small enough to keep for all steps
of a run. Totals are roll-ups summed over steps, for quick reading.

``timeline/rollup/block=B/ranks-F-L-step-S.parquet`` holds up to ``BLOCK`` steps, from step S on, of
ranks F to L of a host. Its columns are step, rank, kind, site, direction, n, sum_ns, min_ns,
max_ns. A file of the same name under ``timeline/totals`` holds sums over these steps: rank, kind,
site, direction, steps (number of steps with such ops), n, sum_ns, min_ns, max_ns. DuckDB, Polars
and pandas read each folder as one table. Earlier versions wrote ``rank-R-step-S.parquet``, one file
per rank, and no totals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import parse_table
from plait.core.record.columns import Coded, metadata_of, write_columns

VERSION = "1"
BLOCK = 1000
"""The steps of a block."""
FOLDER = "rollup"
TOTALS = "totals"
RINGS = "plait.rings"
"""The key in a file's metadata for its source rings, as JSON: from rank to the ring's token and
last step."""
STEPS = "plait.steps"
"""The key in the metadata of a totals file for its first and last step."""
PROCESSOR = "processor"
"""Kind of a row with the CPU time of the training thread in a step, in ns."""
STEP = "step"
"""Kind of a row with the duration of a step, in ns."""
HOST, BETWEEN = "host", "between ops"
"""The kind and the site of the time between the ``OPS`` of a step, from the first op to the last,
without ``FILLS``."""
OPS, FILLS = ("compute", "wait", "idle"), ("data", "optimizer")
COMMUNICATION, EXPOSED = "communication", "exposed"
"""Kinds of a step's communication time, written even if it is zero, and of its exposed part per
axis (the site). ``core.record.exposure`` defines both."""
STEP_SUMS = (STEP, PROCESSOR, COMMUNICATION, EXPOSED)
"""The kinds that are neither ops nor time between ops."""
_TEXTS = ("kind", "site", "direction")
COLUMNS = ("step", "rank", *_TEXTS, "n", "sum_ns", "min_ns", "max_ns")
TOTAL_COLUMNS = ("rank", *_TEXTS, "steps", "n", "sum_ns", "min_ns", "max_ns")


@dataclass(frozen=True, kw_only=True)
class RollupSource:
    """The source of a roll-up. began: wall-clock time in ns when the ranks started; if a step was
    repeated, the later start counts. rings: from rank to the token and the last step of its
    ring."""

    plan: str
    began: int
    rings: Mapping[int, tuple[int, int]]


def rollup_file(timeline: Path, ranks: range, step: int) -> Path:
    """Return the path of the roll-up of a host's ranks from ``step`` on, up to the end of its
    block."""
    name = f"ranks-{ranks.start:05d}-{ranks.stop - 1:05d}-step-{step:08d}.parquet"
    return timeline / FOLDER / f"block={step // BLOCK}" / name


def totals_file(rollup: Path) -> Path:
    """Return the path of the totals of a roll-up."""
    return rollup.parents[2] / TOTALS / rollup.parent.name / rollup.name


def write_rollup(path: Path, columns: Mapping[str, Any], source: RollupSource) -> None:
    """Write a roll-up and its totals. columns: ``COLUMNS``, as ``Records.rolled_up`` returns them;
    for several ranks, their ``joined`` columns. Raises OSError."""
    stamp = {"plait.plan": source.plan, "plait.began": str(source.began)}
    rings = {RINGS: json.dumps({str(rank): ring for rank, ring in source.rings.items()})}
    _write(path, COLUMNS, columns, {"plait.rollup.version": VERSION, **stamp, **rings})
    steps = {STEPS: f"{columns['step'].min()} {columns['step'].max()}"}
    _write(totals_file(path), TOTAL_COLUMNS, totals_of(columns), {"plait.totals.version": VERSION, **stamp, **steps})


def _write(path: Path, names: Sequence[str], columns: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    kinds = {name: "string" if name in _TEXTS else "int64" for name in names}
    write_columns(path, {name: (kind, columns[name]) for name, kind in kinds.items()}, metadata)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows of several roll-ups, concatenated."""
    import numpy as np

    return {
        name: _merge_coded([part[name] for part in parts])
        if name in _TEXTS
        else np.concatenate([p[name] for p in parts])
        for name in COLUMNS
    }


def _merge_coded(columns: Sequence[Coded]) -> Coded:
    import numpy as np

    texts = list(dict.fromkeys(text for column in columns for text in column.texts))
    at = {text: code for code, text in enumerate(texts)}
    codes = [np.array([at[text] for text in column.texts], np.int32)[column.codes] for column in columns]
    return Coded(texts, np.concatenate(codes))


def totals_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of a roll-up over all of its steps, as ``TOTAL_COLUMNS``."""
    import numpy as np

    key = columns["rank"].astype(np.int64)
    for name in _TEXTS:
        key = key * max(1, len(columns[name].texts)) + columns[name].codes
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=key[order[:1]] - 1))
    rows = order[first]
    folds = {"n": np.add, "sum_ns": np.add, "min_ns": np.minimum, "max_ns": np.maximum}
    return {
        "rank": columns["rank"][rows],
        **{name: Coded(columns[name].texts, columns[name].codes[rows]) for name in _TEXTS},
        "steps": np.diff(first, append=len(order)),
        **{name: fold.reduceat(columns[name][order], first) for name, fold in folds.items()},
    }


def last_steps_of_rings(timeline: Path, ranks: range) -> dict[tuple[int, int], int]:
    """Return the last step in roll-ups by (rank, token of its ring), read from all files that
    contain any of ``ranks``."""
    found: dict[tuple[int, int], int] = {}
    for path in _files_with(timeline, ranks):
        try:
            rings = parse_table(metadata_of(path).get(RINGS, "{}"))
            for rank, (token, last) in rings.items():
                key = int(rank), int(token)
                found[key] = max(found.get(key, -1), int(last))
        except (ValueError, TypeError, AttributeError):  # a file of another program
            continue
    return found


def _files_with(timeline: Path, ranks: range) -> Iterator[Path]:
    for path in (timeline / FOLDER).glob("block=*/ranks-*-step-*.parquet"):
        first, last = path.stem.split("-")[1:3]
        if first.isdigit() and last.isdigit() and int(first) < ranks.stop and int(last) >= ranks.start:
            yield path

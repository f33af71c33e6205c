"""Roll-ups: how often and how long ranks did each kind of thing in every step, small enough to be kept of all
steps of a run; and totals, which are roll-ups added up over steps, small enough to be read at a glance.

``timeline/rollup/block=B/ranks-F-L-step-S.parquet`` holds up to ``BLOCK`` steps of the ranks F to L of a
host, from step S on, with the columns step, rank, kind, site, direction, n, sum_ns, min_ns, max_ns. A file of
that name under ``timeline/totals`` says the same of all these steps together: rank, kind, site, direction,
steps (in how many the rank did it), n, sum_ns, min_ns, max_ns. DuckDB, Polars and pandas read each folder as
one table. Earlier versions wrote ``rank-R-step-S.parquet``, a file for each rank, and no totals.
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
"""Steps of a block."""
FOLDER = "rollup"
TOTALS = "totals"
RINGS = "plait.rings"
"""In a file's metadata: the rings that it was made of, as JSON: by rank, the ring's token and the last step
of it."""
STEPS = "plait.steps"
"""In a file of totals: its first and its last step."""
PROCESSOR = "processor"
"""A kind: not how long a step took, but how much of a processor the thread that trains had in it."""
STEP = "step"
"""A kind: how long a step took."""
HOST, BETWEEN = "host", "between ops"
"""Kind and site: what passed between the ``OPS`` of a step, from the first to the last, without ``FILLS``."""
OPS, FILLS = ("compute", "wait", "idle"), ("data", "optimizer")
COMMUNICATION, EXPOSED = "communication", "exposed"
"""Kinds: seconds of a step in which anything was communicated or waited for, also where there are none, and
what of them is exposed, by axis (its site), as ``core.record.exposure`` defines both."""
STEP_SUMS = (STEP, PROCESSOR, COMMUNICATION, EXPOSED)
"""Kinds that are no ops and no time between them."""
_TEXTS = ("kind", "site", "direction")
COLUMNS = ("step", "rank", *_TEXTS, "n", "sum_ns", "min_ns", "max_ns")
TOTAL_COLUMNS = ("rank", *_TEXTS, "steps", "n", "sum_ns", "min_ns", "max_ns")


@dataclass(frozen=True, kw_only=True)
class RollupSource:
    """Where sums come from. began: when the ranks started, ns of the wall clock: of a step that was done
    twice, the later start counts. rings: by rank, the token of its ring, and the last step of it."""

    plan: str
    began: int
    rings: Mapping[int, tuple[int, int]]


def rollup_file(timeline: Path, ranks: range, step: int) -> Path:
    """Where what a host's ranks do from ``step`` on is written, up to the end of its block."""
    name = f"ranks-{ranks.start:05d}-{ranks.stop - 1:05d}-step-{step:08d}.parquet"
    return timeline / FOLDER / f"block={step // BLOCK}" / name


def totals_file(rollup: Path) -> Path:
    """Where the totals of a roll-up are."""
    return rollup.parents[2] / TOTALS / rollup.parent.name / rollup.name


def write_rollup(path: Path, columns: Mapping[str, Any], source: RollupSource) -> None:
    """A roll-up and its totals. columns: ``COLUMNS``, as ``Records.rolled_up`` makes them; of several ranks
    ``joined``. Raises OSError."""
    stamp = {"plait.plan": source.plan, "plait.began": str(source.began)}
    rings = {RINGS: json.dumps({str(rank): ring for rank, ring in source.rings.items()})}
    _write(path, COLUMNS, columns, {"plait.rollup.version": VERSION, **stamp, **rings})
    steps = {STEPS: f"{columns['step'].min()} {columns['step'].max()}"}
    _write(totals_file(path), TOTAL_COLUMNS, totals_of(columns), {"plait.totals.version": VERSION, **stamp, **steps})


def _write(path: Path, names: Sequence[str], columns: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    kinds = {name: "string" if name in _TEXTS else "int64" for name in names}
    write_columns(path, {name: (kind, columns[name]) for name, kind in kinds.items()}, metadata)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of several roll-ups, one after the other."""
    import numpy as np

    return {
        name: _one_code([part[name] for part in parts]) if name in _TEXTS else np.concatenate([p[name] for p in parts])
        for name in COLUMNS
    }


def _one_code(columns: Sequence[Coded]) -> Coded:
    import numpy as np

    texts = list(dict.fromkeys(text for column in columns for text in column.texts))
    at = {text: code for code, text in enumerate(texts)}
    codes = [np.array([at[text] for text in column.texts], np.int32)[column.codes] for column in columns]
    return Coded(texts, np.concatenate(codes))


def totals_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A roll-up over all of its steps: ``TOTAL_COLUMNS``."""
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
    """By rank and token of its ring, the last step that is in roll-ups: of files that have any of these
    ranks."""
    found: dict[tuple[int, int], int] = {}
    for path in _files_with(timeline, ranks):
        try:
            rings = parse_table(metadata_of(path).get(RINGS, "{}"))
            for rank, (token, last) in rings.items():
                key = int(rank), int(token)
                found[key] = max(found.get(key, -1), int(last))
        except (ValueError, TypeError, AttributeError):  # of somebody else
            continue
    return found


def _files_with(timeline: Path, ranks: range) -> Iterator[Path]:
    for path in (timeline / FOLDER).glob("block=*/ranks-*-step-*.parquet"):
        first, last = path.stem.split("-")[1:3]
        if first.isdigit() and last.isdigit() and int(first) < ranks.stop and int(last) >= ranks.start:
            yield path

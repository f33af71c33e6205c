"""Roll-ups: how often and how long a rank did each kind of thing in every step, small enough to be kept of
all steps of a run.

``timeline/rollup/block=B/rank-R-step-S.parquet`` holds up to ``BLOCK`` steps of a rank, from step S on, with
the columns step, rank, kind, site, direction, n, sum_ns, min_ns, max_ns. DuckDB, Polars and pandas read the
folder as one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.columns import write_columns

if TYPE_CHECKING:
    import numpy as np

VERSION = "1"
BLOCK = 1000
"""Steps of a block."""
FOLDER = "rollup"
RING = "plait.ring"
"""In a file's metadata: the token of the ring that it was made of."""
LAST = "plait.last"
"""And the last step in it."""
_TEXTS = ("kind", "site", "direction")
COLUMNS = ("step", "rank", *_TEXTS, "n", "sum_ns", "min_ns", "max_ns")


def rollup_file(timeline: Path, rank: int, step: int) -> Path:
    """Where what a rank does from ``step`` on is written, up to the end of its block."""
    return timeline / FOLDER / f"block={step // BLOCK}" / f"rank-{rank:05d}-step-{step:08d}.parquet"


def write_rollup(path: Path, columns: Mapping[str, np.ndarray], plan_hash: str, began: int, token: int) -> None:
    """columns: ``COLUMNS``, as ``Records.rolled_up`` makes them. began: when the rank started, ns of the wall
    clock: of a step that was done twice, the later start counts. token: of its ring. Raises OSError."""
    metadata = {
        "plait.rollup.version": VERSION, "plait.plan": plan_hash, "plait.began": str(began), RING: str(token),
        LAST: str(columns["step"].max()),
    }  # fmt: skip
    kinds = {name: "string" if name in _TEXTS else "int64" for name in COLUMNS}
    write_columns(path, {name: (kind, columns[name]) for name, kind in kinds.items()}, metadata)

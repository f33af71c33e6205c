"""Roll-ups: how often and how long a rank did each kind of thing in every step, small enough to be kept of
all steps of a run.

``timeline/rollup/block=B/rank-R-step-S.parquet`` holds up to ``BLOCK`` steps of a rank, from step S on, with
the columns step, rank, kind, site, direction, n, sum_ns, min_ns, max_ns. DuckDB and pandas read the folder as
one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.columns import read_columns, write_columns
from plait.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np

VERSION = "1"
BLOCK = 1000
"""Steps of a block."""
FOLDER = "rollup"
_TEXTS = ("kind", "site", "direction")
COLUMNS = ("step", "rank", *_TEXTS, "n", "sum_ns", "min_ns", "max_ns")


def rollup_file(timeline: Path, rank: int, step: int) -> Path:
    """Where what a rank does from ``step`` on is written, up to the end of its block."""
    return timeline / FOLDER / f"block={step // BLOCK}" / f"rank-{rank:05d}-step-{step:08d}.parquet"


def write_rollup(path: Path, columns: Mapping[str, np.ndarray], plan_hash: str, began: int) -> None:
    """columns: ``COLUMNS``, as ``Records.rolled_up`` makes them. began: when the rank started, ns of the wall
    clock: of a step that was done twice, the later start counts. Raises OSError."""
    metadata = {"plait.rollup.version": VERSION, "plait.plan": plan_hash, "plait.began": str(began)}
    kinds = {name: "string" if name in _TEXTS else "int64" for name in COLUMNS}
    write_columns(path, {name: (kind, columns[name]) for name, kind in kinds.items()}, metadata)


def read_rollups(timeline: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """All roll-ups of a run, by rank and step, and in words which files were left out."""
    import numpy as np

    found: list[tuple[int, dict[str, list[Any]]]] = []
    problems: list[str] = []
    for path in sorted((timeline / FOLDER).glob("block=*/*.parquet")):
        try:
            columns, metadata = read_columns(path, "plait.rollup.version")
            if metadata["plait.rollup.version"] != VERSION or any(name not in columns for name in COLUMNS):
                raise DataError(f"{path} is a roll-up of another version; this Plait reads version {VERSION}")
            found.append((int(metadata.get("plait.began", "0")), columns))
        except DataError as error:
            problems.append(str(error))
    found.sort(key=lambda one: one[0])
    owner: dict[tuple[int, int], int] = {}
    for began, columns in found:
        owner |= dict.fromkeys(zip(columns["rank"], columns["step"], strict=True), began)
    kept = {
        name: np.array(
            [
                value
                for began, columns in found
                for value, *key in zip(columns[name], columns["rank"], columns["step"], strict=True)
                if owner[key[0], key[1]] == began
            ],
            dtype=str if name in _TEXTS else np.int64,
        )
        for name in COLUMNS
    }
    order = np.lexsort((kept["step"], kept["rank"]))
    return {name: values[order] for name, values in kept.items()}, problems

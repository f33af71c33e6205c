"""Where a rank stands, in words."""

from __future__ import annotations

import polars as pl

WORDS = {"pp": "stage", "dp": "dp", "cp": "cp", "tp": "tp", "host": "host"}
"""What people call the axes."""


def place_of(grid: pl.DataFrame | None, rank: int) -> str:
    """``rank 5 (stage 0, dp 1) on host7``: the coordinates on which ranks differ, and the host where it is
    known. grid: of a recording; None where nobody knows."""
    if grid is None or (rows := grid.filter(pl.col("rank") == rank)).is_empty():
        return f"rank {rank}"
    at = rows.row(0, named=True)
    words = ", ".join(f"{WORDS[a]} {at[a]}" for a in ("pp", "dp", "cp", "tp") if grid[a].n_unique() > 1)
    host = f" on {at['host']}" if at["host"] else ""
    return f"rank {rank}" + (f" ({words})" if words else "") + host

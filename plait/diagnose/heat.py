"""Ranks x code segments, or ranks x steps, as a matrix of seconds: the heat map.

After MegaScale's (Jiang et al., NSDI 2024, arXiv 2402.15627, section 5.1), which compares ranks by eye. Here
every rank also has its *excess* over its equals, as the verdicts have it (``peers``), so that stages with
more to compute do not look slow; and rows that do not fit on a screen are pooled so that the one rank that
stands out stays visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.core.record.rollup import STEP_SUMS
from plait.diagnose.peers import expected
from plait.diagnose.recording import OWN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

Statistic = Literal["mean", "median", "p90", "largest", "least", "spread", "sum", "mean of an op"]
STATISTICS: dict[Statistic, pl.Expr] = {
    "mean": pl.col("seconds").mean(),
    "median": pl.col("seconds").median(),
    "p90": pl.col("seconds").quantile(0.9),
    "largest": pl.col("seconds").max(),
    "least": pl.col("seconds").min(),
    "spread": pl.col("seconds").std().fill_null(0.0),
    "sum": pl.col("seconds").sum(),
    "mean of an op": pl.col("seconds").sum() / pl.col("n").sum().clip(1),
}
"""Over the steps in which a rank did the thing. spread: standard deviation."""
AXES = ("pp", "dp", "cp", "tp")
KINDS = (*OWN, "optimizer", "checkpoint", "evaluation", "wait", "idle", "comm", "transfer")
"""In the order of columns: what a rank does itself, then what it waits for, then what runs beside."""
ALL_OWN = "own work"
"""The segment that is all of ``OWN`` together."""


class HeatColumn(NamedTuple):
    """A column: what is done, on what, in which direction."""

    kind: str
    site: str
    direction: str = ""

    @property
    def own(self) -> bool:
        """Whether it is the rank's own work, so that the rank can be slow at it."""
        return self.kind in OWN or self.kind == ALL_OWN

    def __str__(self) -> str:
        words = (self.kind if self.kind != "compute" else "", self.site if self.site != self.kind else "")
        return " ".join(word for word in (*words, self.direction) if word) or self.kind


@dataclass(frozen=True, eq=False, kw_only=True)
class Heat:
    """rows: ranks, in the order wanted. columns: segments, or steps. seconds, excess: (rows, columns), NaN
    where a rank did no such thing; excess: beyond what its equals have, NaN where it has none."""

    ranks: Ints
    columns: tuple[HeatColumn, ...] | tuple[int, ...]
    seconds: Floats
    excess: Floats


class Pooled(NamedTuple):
    """A part of a heat map that fits on a screen. first, size: the row where it begins, and rows in each of
    its cells. rank: whose value a cell shows: of its rows, the one whose excess is the largest."""

    first: int
    size: int
    rank: Ints
    seconds: Floats
    excess: Floats


def orders(grid: pl.DataFrame) -> list[tuple[str, ...]]:
    """Of axes by which ranks may be sorted, outermost first: those on which ranks differ; hosts if known."""
    axes = [axis for axis in AXES if grid[axis].n_unique() > 1] or ["dp"]
    known = grid["host"].null_count() == 0 and grid["host"].n_unique() > 1
    return [*permutations(axes), *([("host",)] if known else [])]


def ranks_in(grid: pl.DataFrame, order: Sequence[str]) -> Ints:
    """All ranks, sorted by axes (``pp``, ``dp``, ``cp``, ``tp``, ``host``), then by number."""
    named = [name for name in order if name in grid.columns]
    return grid.sort([*named, "rank"])["rank"].to_numpy().astype(np.int64)


def by_segment(
    rollup: pl.DataFrame, statistic: Statistic = "mean", steps: tuple[int, int] | None = None
) -> pl.DataFrame:
    """(rank, kind, site, direction, seconds): a statistic over steps, from the first to the last, counted
    from 0. Small, whatever the number of steps."""
    rows = rollup if steps is None else rollup.filter(pl.col("step").is_between(*steps))
    return rows.group_by("rank", "kind", "site", "direction").agg(seconds=STATISTICS[statistic])


def heat_of_segments(found: pl.DataFrame, grid: pl.DataFrame, order: Sequence[str] = AXES) -> Heat:
    """found: as ``by_segment`` makes it. Columns: own work before waiting, the longest first."""
    # Sums of whole steps are no segments.
    found = found.filter(~pl.col("kind").cast(pl.String).is_in(STEP_SUMS))
    keys = ["kind", "site", "direction"]
    columns = (
        found.group_by(keys).agg(pl.col("seconds").sum())
        .with_columns(pl.col(key).cast(pl.String).alias(f"{key}_text") for key in keys)
    )  # fmt: skip
    place = pl.col("kind_text").replace_strict({k: n for n, k in enumerate(KINDS)}, default=len(KINDS))
    columns = columns.with_columns(place=place).sort("place", -pl.col("seconds"), *(f"{k}_text" for k in keys))
    columns = columns.with_row_index("column")
    segments = tuple(HeatColumn(*row) for row in columns.select(f"{key}_text" for key in keys).iter_rows())
    cells = found.join(columns.select(*keys, "column"), on=keys)
    return _heat(cells, segments, grid, order)


def heat_of_steps(
    rollup: pl.DataFrame, grid: pl.DataFrame, order: Sequence[str] = AXES, segment: HeatColumn | None = None
) -> Heat:
    """Seconds of every rank in every step: of one segment, or of all own work."""
    if segment is None or segment.kind == ALL_OWN:
        rows = rollup.filter(pl.col("kind").cast(pl.String).is_in(OWN))
    else:
        same = (pl.col(name).cast(pl.String) == getattr(segment, name) for name in ("kind", "site", "direction"))
        rows = rollup.filter(*same)
    cells = rows.group_by("rank", "step").agg(pl.col("seconds").sum())
    numbers = cells["step"].unique().sort()
    index = pl.DataFrame({"step": numbers}).with_row_index("column")
    return _heat(cells.join(index, on="step"), tuple(numbers.to_list()), grid, order)


def _heat(cells: pl.DataFrame, columns: tuple, grid: pl.DataFrame, order: Sequence[str]) -> Heat:  # pyright: ignore[reportMissingTypeArgument]
    ranks = ranks_in(grid, order)
    places = grid.select(pl.col("rank").cast(pl.Int64), "pp", "cp")
    row = pl.DataFrame({"rank": ranks}).with_row_index("row")
    known = cells.cast({"rank": pl.Int64}).join(places, on="rank").join(row, on="rank")
    value = pl.col("seconds")
    known = known.with_columns(excess=value - expected(places, value, ["column", "pp", "cp"]))
    seconds, excess = (np.full((ranks.size, len(columns)), np.nan) for _ in range(2))
    at = known["row"].to_numpy(), known["column"].to_numpy()
    seconds[at] = known["seconds"].to_numpy()
    excess[at] = known["excess"].cast(pl.Float64).to_numpy()
    return Heat(ranks=ranks, columns=columns, seconds=seconds, excess=excess)


def pooled(heat: Heat, most: int = 512, window: tuple[int, int] | None = None) -> Pooled:
    """Rows from ``window[0]`` up to ``window[1]``, in at most ``most`` cells one below the other. A cell of
    several ranks shows the one that is the furthest above its equals, or, if none is above, below."""
    first, last = window or (0, heat.ranks.size)
    first, last = max(0, min(first, heat.ranks.size - 1)), min(heat.ranks.size, max(last, first + 1))
    size = -(-(last - first) // most)
    bins = -(-(last - first) // size)
    pad = ((0, bins * size - (last - first)), (0, 0))
    excess, seconds = (
        np.pad(part[first:last], pad, constant_values=np.nan).reshape(bins, size, -1)
        for part in (heat.excess, heat.seconds)
    )
    ranks = np.pad(heat.ranks[first:last], pad[0], mode="edge").reshape(bins, size)
    rising = np.where(np.isfinite(excess), excess, -np.inf)
    chosen = rising.argmax(axis=1)
    none = ~np.isfinite(rising.max(axis=1))  # nobody has equals: the longest
    chosen = np.where(none, np.where(np.isfinite(seconds), seconds, -np.inf).argmax(axis=1), chosen)
    take = chosen[:, None, :]
    return Pooled(
        first, size, np.take_along_axis(ranks, chosen, axis=1),
        np.take_along_axis(seconds, take, axis=1)[:, 0, :], np.take_along_axis(excess, take, axis=1)[:, 0, :],
    )  # fmt: skip

"""Compute heat maps of ranks x code segments or ranks x steps in seconds, and the state of every
rank.

The heat map follows MegaScale (Jiang et al., NSDI 2024, arXiv 2402.15627, section 5.1), which
compares ranks by eye. Here every rank also has its *excess* over its peers, as in the verdicts
(``peers``), so that stages with more computation do not look slow. Rows that do not fit on a screen
are pooled so that an outlier rank stays visible.

The state of a rank on the tp x dp x pp grid: which ranks it waits for, whether it has ended, is
slow, or is at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.core.record.rollup import STEP_SUMS
from plait.core.runs.evidence import Evidence, Verdict
from plait.diagnose.measured.recording import OWN
from plait.diagnose.verdicts.peers import expected
from plait.diagnose.verdicts.stragglers import Straggler
from plait.diagnose.verdicts.waits import Waits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

State = Literal["named", "crashed", "stopped", "silent", "slow", "works", "waits", "ended", "runs", "unknown"]
STATES: dict[State, str] = {
    "named": "the cause: named by the verdict",
    "crashed": "ended with an error or by a signal",
    "stopped": "its process is stopped",
    "silent": "does not answer",
    "slow": "a straggler",
    "works": "does something else than communicate",
    "waits": "waits for other ranks",
    "ended": "has ended, without an error of its own",
    "runs": "runs",
    "unknown": "nothing is known of it",
}
"""States of a rank in order of importance, with their meanings."""
EDGES = 4000
"""The largest number of lines, each from a waiting rank to the rank that it waits for, that are
drawn."""


class RankState(NamedTuple):
    """The state of a rank. doing: its current activity. error: its last error message. where:
    innermost frame of its stack. waits_for: ranks."""

    rank: int
    state: State
    host: str = ""
    doing: str = ""
    error: str = ""
    where: str = ""
    waits_for: tuple[int, ...] = ()


def rank_states(
    grid: pl.DataFrame,
    *,
    hang: tuple[Verdict, Sequence[Evidence]] | None = None,
    stragglers: Iterable[Straggler] = (),
    errors: Mapping[int, str] | None = None,
    live: bool = True,
) -> list[RankState]:
    """Return the state of every rank of the grid, in order of rank. hang: the verdict on a hang and
    its evidence. errors: further last error messages, by rank. live: True if the run is still
    running."""
    slow = {rank: one.what for one in stragglers for rank in one.ranks}
    said = errors or {}
    hosts = dict(grid.select("rank", "host").iter_rows())
    ranks = grid["rank"].sort().to_list()
    if hang is None:
        return [
            RankState(
                rank, "crashed" if rank in said else "slow" if rank in slow else "runs" if live else "ended",
                hosts[rank] or "",
                slow.get(rank, ""), said.get(rank, ""),
            )
            for rank in ranks
        ]  # fmt: skip
    verdict, evidence = hang
    known = {one.rank: one for one in evidence}
    waits = _waits(verdict, evidence, max(ranks, default=-1) + 1)
    found: list[RankState] = []
    for rank in ranks:
        one = known.get(rank, Evidence(rank=rank, recorded=False))
        state = "named" if verdict.certain and rank in verdict.ranks else _state(one)
        if state in ("runs", "waits") and rank in slow:
            state = "slow"
        found.append(
            RankState(
                rank, state, one.host or hosts[rank] or "", one.doing or _calling(one), one.error or said.get(rank, ""),
                one.stack[-1] if one.stack else "", waits.get(rank, ()),
            )
        )  # fmt: skip
    return found


def _state(one: Evidence) -> State:
    if one.state == "ended":
        return "ended" if one.status in (0, None) and not one.error else "crashed"
    if one.state == "stopped":
        return "stopped"
    if one.thread in ("waits", "works", "silent"):
        return one.thread
    return "runs" if one.state == "runs" else "unknown"


def _calling(one: Evidence) -> str:
    """Return the rank's oldest open call, begun and not ended, as text; empty if there is none."""
    return next((str(call) for call in one.calls if not call.over), "")


def _waits(verdict: Verdict, evidence: Sequence[Evidence], world: int) -> dict[int, tuple[int, ...]]:
    """Return the ranks that each rank waits for, from its calls, or else from the verdict's
    chain."""
    found: dict[int, set[int]] = {}
    graph = Waits(evidence, world)
    for at, missing in graph.missing.items():
        for rank in graph.at[at]:
            found.setdefault(rank, set()).update(missing)
    for link in verdict.chain:
        for rank in link.ranks:
            if not found.get(rank):
                found[rank] = set(link.on)
    return {rank: tuple(sorted(on - {rank})) for rank, on in found.items() if on - {rank}}


def edges(states: Sequence[RankState], most: int = EDGES) -> list[tuple[int, int]]:
    """Return pairs (waiting rank, awaited rank), at most ``most``; those of the most awaited ranks
    come first."""
    pairs = [(one.rank, on) for one in states for on in one.waits_for]
    if len(pairs) <= most:
        return pairs
    waited: dict[int, int] = {}
    for _, on in pairs:
        waited[on] = waited.get(on, 0) + 1
    return sorted(pairs, key=lambda pair: (-waited[pair[1]], pair))[:most]


Statistic = Literal["mean", "median", "p90", "largest", "least", "spread", "sum", "mean of an op"]
STATISTICS: dict[Statistic, pl.Expr] = {
    "mean": pl.mean("seconds"),
    "median": pl.median("seconds"),
    "p90": pl.col("seconds").quantile(0.9),
    "largest": pl.max("seconds"),
    "least": pl.min("seconds"),
    "spread": pl.col("seconds").std().fill_null(0.0),
    "sum": pl.sum("seconds"),
    "mean of an op": pl.sum("seconds") / pl.sum("n").clip(1),
}
"""Statistics over the steps in which a rank ran the segment. spread: standard deviation."""
AXES = ("pp", "dp", "cp", "tp")
COLUMN_KINDS = (*OWN, "optimizer", "checkpoint", "evaluation", "wait", "idle", "comm", "transfer")
"""Kinds in the order of columns: the rank's own work, then waits, then concurrent communication."""
ALL_OWN = "own work"
"""Name of the column that comprises all kinds of a rank's own work (``OWN``)."""


class HeatColumn(NamedTuple):
    """A column of the heat map: kind of op, site (sublayer or end of the model) and direction."""

    kind: str
    site: str
    direction: str = ""

    @property
    def own(self) -> bool:
        """True for the rank's own work, at which the rank can be slow."""
        return self.kind in OWN or self.kind == ALL_OWN

    def __str__(self) -> str:
        words = (self.kind if self.kind != "compute" else "", self.site if self.site != self.kind else "")
        return " ".join(word for word in (*words, self.direction) if word) or self.kind


@dataclass(frozen=True, eq=False, kw_only=True)
class Heat:
    """A heat map. ranks: of the rows, in the requested order. columns: segments, or steps. seconds,
    excess: arrays (rows, columns). seconds: NaN if a rank lacks the column. excess: seconds beyond
    the peers' median; NaN without peers."""

    ranks: Ints
    columns: tuple[HeatColumn, ...] | tuple[int, ...]
    seconds: Floats
    excess: Floats


class Pooled(NamedTuple):
    """A part of a heat map that fits on a screen. first: its first row. size: rows per cell. rank:
    the rank whose value a cell shows, the one with the largest excess in the cell's rows."""

    first: int
    size: int
    rank: Ints
    seconds: Floats
    excess: Floats


def orders(grid: pl.DataFrame) -> list[tuple[str, ...]]:
    """Return the sort orders of ranks, as axes from the outermost: all permutations of the axes on
    which ranks differ; also by host, if hosts are known."""
    axes = [axis for axis in AXES if grid[axis].n_unique() > 1] or ["dp"]
    known = grid["host"].null_count() == 0 and grid["host"].n_unique() > 1
    return [*permutations(axes), *([("host",)] if known else [])]


def ranks_in(grid: pl.DataFrame, order: Sequence[str]) -> Ints:
    """Return all ranks, sorted by axes (``pp``, ``dp``, ``cp``, ``tp``, ``host``), then by
    number."""
    named = [name for name in order if name in grid.columns]
    return grid.sort([*named, "rank"])["rank"].to_numpy().astype(np.int64)


def by_segment(
    rollup: pl.DataFrame, statistic: Statistic = "mean", steps: tuple[int, int] | None = None
) -> pl.DataFrame:
    """Return the table (rank, kind, site, direction, seconds): a statistic over the steps from
    ``steps[0]`` to ``steps[1]``, both included, counted from 0; None: all. The table's size does
    not depend on the number of steps."""
    rows = rollup if steps is None else rollup.filter(pl.col("step").is_between(*steps))
    return rows.group_by("rank", "kind", "site", "direction").agg(seconds=STATISTICS[statistic])


def heat_of_segments(sums: pl.DataFrame, grid: pl.DataFrame, order: Sequence[str] = AXES) -> Heat:
    """Return the heat map of ranks x segments. sums: a result of ``by_segment``. Columns: own work
    before waiting, the longest first."""
    # Sums of whole steps are no segments.
    sums = sums.filter(~pl.col("kind").cast(pl.String).is_in(STEP_SUMS))
    keys = ["kind", "site", "direction"]
    columns = (
        sums.group_by(keys).agg(pl.sum("seconds"))
        .with_columns(pl.col(key).cast(pl.String).alias(f"{key}_text") for key in keys)
    )  # fmt: skip
    position = pl.col("kind_text").replace_strict({k: n for n, k in enumerate(COLUMN_KINDS)}, default=len(COLUMN_KINDS))
    columns = columns.with_columns(position=position).sort("position", -pl.col("seconds"), *(f"{k}_text" for k in keys))
    columns = columns.with_row_index("column")
    segments = tuple(HeatColumn(*row) for row in columns.select(f"{key}_text" for key in keys).iter_rows())
    cells = sums.join(columns.select(*keys, "column"), on=keys)
    return _heat(cells, segments, grid, order)


def heat_of_steps(
    rollup: pl.DataFrame, grid: pl.DataFrame, order: Sequence[str] = AXES, segment: HeatColumn | None = None
) -> Heat:
    """Return the heat map of ranks x steps, for one segment; None: for all own work."""
    if segment is None or segment.kind == ALL_OWN:
        rows = rollup.filter(pl.col("kind").cast(pl.String).is_in(OWN))
    else:
        same = (pl.col(name).cast(pl.String) == getattr(segment, name) for name in ("kind", "site", "direction"))
        rows = rollup.filter(*same)
    cells = rows.group_by("rank", "step").agg(pl.sum("seconds"))
    numbers = cells["step"].unique().sort()
    index = pl.DataFrame({"step": numbers}).with_row_index("column")
    return _heat(cells.join(index, on="step"), tuple(numbers.to_list()), grid, order)


def _heat(
    cells: pl.DataFrame, columns: tuple[HeatColumn, ...] | tuple[int, ...], grid: pl.DataFrame, order: Sequence[str]
) -> Heat:
    ranks = ranks_in(grid, order)
    grid_axes = grid.select(pl.col("rank").cast(pl.Int64), "pp", "cp")
    row = pl.DataFrame({"rank": ranks}).with_row_index("row")
    known = cells.cast({"rank": pl.Int64}).join(grid_axes, on="rank").join(row, on="rank")
    value = pl.col("seconds")
    known = known.with_columns(excess=value - expected(grid_axes, value, ["column", "pp", "cp"]))
    seconds, excess = (np.full((ranks.size, len(columns)), np.nan) for _ in range(2))
    at = known["row"].to_numpy(), known["column"].to_numpy()
    seconds[at] = known["seconds"].to_numpy()
    excess[at] = known["excess"].cast(pl.Float64).to_numpy()
    return Heat(ranks=ranks, columns=columns, seconds=seconds, excess=excess)


def pooled(heat: Heat, most: int = 512, window: tuple[int, int] | None = None) -> Pooled:
    """Return rows ``window[0]`` up to ``window[1]``, pooled into at most ``most`` cells per column.
    A cell of several ranks shows the one furthest above its peers, or, if none is above, the least
    below."""
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
    chosen: NDArray[np.intp] = rising.argmax(axis=1)
    none = ~np.isfinite(rising.max(axis=1))  # no rank has peers: take the longest
    chosen = np.where(none, np.where(np.isfinite(seconds), seconds, -np.inf).argmax(axis=1), chosen)
    take = chosen[:, None, :]
    return Pooled(
        first, size, np.take_along_axis(ranks, chosen, axis=1),
        np.take_along_axis(seconds, take, axis=1)[:, 0, :], np.take_along_axis(excess, take, axis=1)[:, 0, :],
    )  # fmt: skip

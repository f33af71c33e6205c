"""Spans of some ranks in a window of time, as bars of a timeline: one by one, or, where they are too many to
be told apart on a screen, neighbours of a lane together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import polars as pl

MOST = 3000
"""Bars that a browser draws at once without delay."""
LANES = ("processor", "tp", "cp", "dp", "pp", "other")
Group = Literal["rank", "tp", "cp", "dp", "pp", "host"]


class SpanWindow(NamedTuple):
    """bars: (rank, lane, kind, name, seq, step, start, end, count, busy), in order of ranks and lanes; count:
    spans in it; busy: seconds of them. begin, end: seconds. single: whether every bar is one span."""

    bars: pl.DataFrame
    begin: float
    end: float
    single: bool


def window(
    spans: pl.DataFrame, ranks: Sequence[int], steps: tuple[int, int], *,
    between: tuple[float, float] | None = None, most: int = MOST,
) -> SpanWindow | None:  # fmt: skip
    """between: seconds; without it, all of the steps, which are counted from 0. None if there is nothing.

    Spans longer than a part of the window (there are ``most`` of them over all lanes) stay alone. What is
    shorter is put together with its neighbours of the same kind in the same part.
    """
    own = spans.filter(pl.col("rank").is_in(list(ranks)), pl.col("step").is_between(*steps))
    if own.is_empty():
        return None
    begin, end = between or (float(own["start"].min()), float(own["end"].max()))  # type: ignore[arg-type]
    own = own.filter(pl.col("end") >= begin, pl.col("start") <= end)
    keep = ["rank", "lane", "kind", "name", "seq", "step", "start", "end"]
    single = own.height <= most
    bars = own.select(*keep, count=pl.lit(1, pl.Int64), busy=pl.col("end") - pl.col("start"))
    if not single and end > begin:
        lanes = max(1, own.select("rank", "lane").n_unique())
        part = (end - begin) / max(8, most // lanes)
        long = bars.filter(pl.col("busy") >= part)
        short = bars.filter(pl.col("busy") < part).sort("start")
        at = ((pl.col("start") - begin) / part).floor().cast(pl.Int64)
        merged = short.group_by("rank", "lane", at.alias("part"), "kind", maintain_order=True).agg(
            pl.col("name").first(), pl.col("seq").first(), pl.col("step").first(), pl.col("start").min(),
            pl.col("end").max(), pl.col("count").sum(), pl.col("busy").sum(),
        )  # fmt: skip
        # Of kinds that share a part of a lane, the longest stands for all: a pixel has one colour.
        merged = merged.sort("busy", descending=True).unique(
            ["rank", "lane", "part"], keep="first", maintain_order=True
        )
        bars = pl.concat([long, merged.select(bars.columns)])
    order = pl.col("rank").replace_strict({rank: n for n, rank in enumerate(ranks)}, default=len(ranks))
    place = pl.col("lane").replace_strict({lane: n for n, lane in enumerate(LANES)}, default=len(LANES))
    return SpanWindow(bars.sort(order, place, "start"), begin, end, single)


def together(grid: pl.DataFrame, rank: int, group: Group, most: int = 32) -> list[int]:
    """The ranks of a rank's tp, cp, dp group, of its pipeline (``pp``), or of its host; at most ``most``, the
    nearest to it."""
    at = grid.filter(pl.col("rank") == rank)
    if at.is_empty():
        return []
    place = at.row(0, named=True)
    same = [axis for axis in ("pp", "dp", "cp", "tp") if axis != group] if group != "host" else ["host"]
    if group == "rank" or (group == "host" and place["host"] is None):
        return [rank]
    others = grid.filter(*(pl.col(axis) == place[axis] for axis in same))["rank"].sort().to_list()
    if len(others) <= most:
        return others
    middle = others.index(rank)
    first = max(0, min(middle - most // 2, len(others) - most))
    return others[first : first + most]


def shifted(spans: pl.DataFrame, offsets: dict[int, float]) -> pl.DataFrame:
    """With times of ranks moved by so many seconds."""
    if not any(offsets.values()):
        return spans
    by = pl.col("rank").replace_strict(offsets, default=0.0, return_dtype=pl.Float64)
    return spans.with_columns(start=pl.col("start") + by, end=pl.col("end") + by)

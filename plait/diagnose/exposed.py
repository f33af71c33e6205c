"""Exposed communication of spans in columns, as ``core.record.exposure`` defines it."""

from __future__ import annotations

import polars as pl

from plait.core.record.exposure import AXES, BUSY, ROLES, Exposure, exposures, gaps
from plait.core.record.rollup import FILLS, OPS

LANE = ("step", "rank")


def exposed(spans: pl.DataFrame, *, by_axis: bool = False) -> pl.DataFrame:
    """Rows (step, rank, total, exposed), seconds, of every step of a rank, in order; by_axis: (step, rank,
    axis, total, exposed) of every axis that has communication, for spans with a column ``axis``."""
    lanes, own = _lanes(spans)
    known = {axis: number for number, axis in enumerate(AXES)}
    found = exposures(
        own["of"].to_numpy(),
        own["kind"].cast(pl.String).replace_strict(ROLES, default=BUSY, return_dtype=pl.Int64).to_numpy(),
        own["axis"].cast(pl.String).replace_strict(known, default=len(AXES) - 1, return_dtype=pl.Int64).to_numpy()
        if by_axis else None,
        own["start"].to_numpy(), own["end"].to_numpy(),
    )  # fmt: skip
    names = AXES[: found.shape[1]] if by_axis else ("",)
    tables = [
        lanes.select(*LANE, axis=pl.lit(axis), total=pl.Series(values[:, 0]), exposed=pl.Series(values[:, 1]))
        for axis, values in zip(names, found.swapaxes(0, 1), strict=True)
    ]
    rows = pl.concat(tables)
    return rows.filter(pl.col("total") > 0) if by_axis else rows.drop("axis")


def between(spans: pl.DataFrame) -> pl.DataFrame:
    """Rows (step, rank, n, seconds): gaps between the ops of every step of a rank that has any."""
    kind = pl.col("kind").cast(pl.String)
    lanes, own = _lanes(spans.filter(kind.is_in([*OPS, *FILLS])))
    ops = own.select(kind.is_in(OPS)).to_series().to_numpy()
    count, seconds = gaps(own["of"].to_numpy(), own["start"].to_numpy(), own["end"].to_numpy(), ops)
    found = lanes.with_columns(n=pl.Series(count, dtype=pl.Int64), seconds=pl.Series(seconds, dtype=pl.Float64))
    return found.filter(pl.col("of").is_in(own["of"].to_numpy()[ops])).drop("of")


def added_up(rows: pl.DataFrame, lanes: int = 1) -> Exposure:
    """All rows of ``exposed``, over so many steps of a rank."""
    return Exposure(*(float(rows[name].sum()) / max(1, lanes) for name in Exposure._fields))


def _lanes(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Steps of ranks, in order; and spans with the number of theirs (``of``)."""
    lanes = spans.select(LANE).unique().sort(LANE).with_row_index("of").cast({"of": pl.Int64})
    return lanes, spans.join(lanes, on=LANE, maintain_order="left")

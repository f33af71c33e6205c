"""The recording of a run as column tables: the input of every diagnosis, whichever tool recorded
it.

Three tables, so that each query reads only what it needs. The *roll-up* holds seconds per rank,
step and kind of op. *Meetings* have a row for every rank that took part in a collective or a
transfer. *Spans* are the single ops of some steps. Long runs of many ranks have only the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from plait.core.record.exposure import AXES, BUSY, ROLES, Exposure, exposures, gaps
from plait.core.record.records import axis_of
from plait.core.record.rollup import BETWEEN, COMMUNICATION, EXPOSED, FILLS, HOST, OPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from plait.core.parallel.layout import Layout
    from plait.core.parallel.sharding import Sharding

GRID = {"rank": pl.Int32, "pp": pl.Int32, "dp": pl.Int32, "cp": pl.Int32, "tp": pl.Int32, "host": pl.String}
SPANS = {
    "step": pl.Int64, "rank": pl.Int32, "kind": pl.String, "name": pl.String, "seq": pl.Int64, "site": pl.String,
    "layer": pl.Int64, "slice": pl.Int64, "direction": pl.String, "start": pl.Float64, "end": pl.Float64,
    "bytes": pl.Int64, "axis": pl.String, "group": pl.String, "lane": pl.String, "meeting": pl.UInt64,
}  # fmt: skip
ROLLUP = {
    "step": pl.Int64, "rank": pl.Int32, "kind": pl.Categorical, "axis": pl.Categorical, "site": pl.Categorical,
    "direction": pl.Categorical, "n": pl.Int64, "seconds": pl.Float64,
}  # fmt: skip
MEETINGS = {
    "step": pl.Int64, "rank": pl.Int32, "axis": pl.String, "site": pl.String, "direction": pl.String,
    "bytes": pl.Int64, "group": pl.String, "meeting": pl.UInt64, "start": pl.Float64, "end": pl.Float64,
}  # fmt: skip
OWN = ("compute", "data", "host")
"""Kinds of a rank's own work, at which the rank can be slow. host: the time between ops."""
PROCESSOR = ("compute", "wait", "idle", "data", "optimizer", "checkpoint", "evaluation", "host")
AFTER = ("checkpoint", "evaluation")
"""Kinds of ops that follow a step and do not count in the step's length."""
RANK_STEP = ("step", "rank")
WORDS = {"pp": "stage", "dp": "dp", "cp": "cp", "tp": "tp", "host": "host"}
"""Words for the axes in output for people."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording:
    """The tables of one run. grid: coordinates and host of every rank (null: host unknown).
    seconds: length of every step, by step.

    clocks_agree: True if times of different ranks can be compared. complete: True if all waiting
    was recorded, so that the time between ops is the host's own work. blocking: True if ranks
    communicate inside their program instead of concurrently, so that every span is on one lane.
    sampled: older steps whose spans are kept.
    """

    grid: pl.DataFrame
    rollup: pl.DataFrame
    meetings: pl.DataFrame
    spans: pl.DataFrame
    seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    clocks_agree: bool = True
    complete: bool = True
    blocking: bool = False
    sampled: frozenset[int] = frozenset()

    @cached_property
    def steps(self) -> list[int]:
        """The recorded steps, in order."""
        return self.rollup["step"].unique().sort().to_list()

    @cached_property
    def met(self) -> pl.DataFrame:
        """A table with a row for every meeting: a collective, or a transfer between stages.

        last: the rank that came last. lateness: seconds from the group's first start to the start
        of ``last``. transfer: seconds from that start to the first end. If clocks disagree, both
        follow from the ends, which are the same moment for all members: the last to arrive is in
        the meeting for the shortest time. waited: summed seconds of all members that arrived before
        the last. `_arrived` refines transfers between stages."""
        length = pl.col("end") - pl.col("start")
        came = pl.col("start") if self.clocks_agree else -length
        transfer = (pl.min("end") - pl.max("start")) if self.clocks_agree else length.min()
        equal = [pl.col(name).first() for name in ("step", "axis", "site", "direction", "group")]
        found = self.meetings.group_by("meeting").agg(
            *equal,
            members=pl.len(),
            lateness=came.max() - came.min(),
            last=pl.col("rank").get(came.arg_max()),
            transfer=transfer.clip(0),
            waited=(came.max() - came).sum(),
            bytes=pl.max("bytes"),
            start=pl.max("start"),
        )
        found = found.filter((pl.col("members") > 1) | (pl.col("axis") == "pp"))
        return (self._arrived(found) if self.clocks_agree else found).drop("start")

    def _arrived(self, met: pl.DataFrame) -> pl.DataFrame:
        """Return ``met`` with transfers between stages that last until the receiver has them. For
        the sender, a send is over once all bytes are in a buffer.

        A transfer arrives when the receiver's wait ends, if the receiver already waited when the
        transfer began. Otherwise the arrival is unknown and the duration null, unless all receivers
        of such transfers came late. The duration is also null if the tensor arrived before this
        send: another replica may have sent it."""
        waits = (
            self.spans.filter(pl.col("meeting").is_not_null() & (pl.col("kind") == "idle"))
            .group_by("meeting")
            .agg(since=pl.max("start"), until=pl.max("end"))
        )
        took = pl.col("until") - pl.col("start")
        told = ((pl.col("since") <= pl.col("start")) & (took > 0)).fill_null(value=False)
        return (
            met.join(waits, on="meeting", how="left", maintain_order="left")
            .with_columns(told=told)
            .with_columns(
                transfer=pl.when("told")
                .then(pl.max_horizontal("transfer", took))
                .when(~pl.col("told").any().over("axis", "site", "direction"))
                .then("transfer")
            )
            .drop("since", "until", "told")
        )

    def chosen(self, ranks: Sequence[int], steps: Sequence[int]) -> pl.DataFrame:
        """Return the spans of ``ranks`` in ``steps``."""
        return self.spans.filter(pl.col("rank").is_in(list(ranks)), pl.col("step").is_in(list(steps)))

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that recorded anything."""
        return self.rollup["rank"].n_unique()


def grid_of(layout: Layout, hosts: Sequence[str | None] = ()) -> pl.DataFrame:
    """Return the table (rank, pp, dp, cp, tp, host) of every rank of a layout. hosts: by rank, as
    far as they are known."""
    parts: list[NDArray[np.int64]] = []
    for pp_rank, mesh in enumerate(layout.meshes):
        at = np.arange(len(mesh.ranks))
        rest, tp = np.divmod(at, mesh.tp)
        dp, cp = np.divmod(rest, mesh.cp)
        parts.append(np.stack([at + mesh.first, np.full_like(at, pp_rank), dp, cp, tp]))
    columns = dict(zip(list(GRID)[:5], np.hstack(parts), strict=True))
    known = pl.Series("host", [*hosts, *[None] * (layout.world_size - len(hosts))], dtype=pl.String)
    return pl.DataFrame(columns).with_columns(known).cast(GRID)  # type: ignore[arg-type]


def unknown_grid(ranks: Sequence[int], hosts: Mapping[int, str] | None = None) -> pl.DataFrame:
    """Return the table of coordinates for ranks whose coordinates are unknown: all in one dp group,
    so that they are peers."""
    of = hosts or {}
    zero = [0] * len(ranks)
    columns = {"rank": list(ranks), "pp": zero, "dp": list(ranks), "cp": zero, "tp": zero}
    return pl.DataFrame({**columns, "host": [of.get(rank) for rank in ranks]}, schema=GRID)


def with_axes(
    spans: pl.DataFrame, grid: pl.DataFrame, shardings: Sequence[Sharding] = (), stages: Mapping[int, int] | None = None
) -> pl.DataFrame:
    """Return Plait's own spans with axis, group, lane and meeting, derived from the spans' names.

    group: the lowest rank of the process group, as text; for a transfer, the sender and the
    receiver. shardings: of every pp rank; an all-gather of parameters stays within ``params``
    replicas. stages: the pp rank of every stage.
    """
    # Millions of spans have few distinct names.
    names = spans.select("kind", "name").unique()
    axes = names.with_columns(axis=pl.Series([axis_of(*one) for one in names.iter_rows()], dtype=pl.String))
    lowest = pl.min("rank")
    cp = pl.max("cp").over("pp") + 1
    replica = pl.col("dp") * cp + pl.col("cp")
    factor = pl.col("pp").replace_strict({i: one.params for i, one in enumerate(shardings)}, default=1)
    gathers = pl.when(factor > 1).then(replica // factor).otherwise(0)
    groups = grid.with_columns(
        tp_group=lowest.over("pp", "dp", "cp"),
        cp_group=lowest.over("pp", "dp", "tp"),
        dp_group=lowest.over("pp", "tp"),
        gather_group=lowest.over("pp", "tp", gathers),
    ).select("rank", "pp", "dp", "cp", "tp", "tp_group", "cp_group", "dp_group", "gather_group")
    found = spans.join(axes, on=["kind", "name"], how="left", maintain_order="left")
    found = found.join(groups, on="rank", how="left")
    found = _crossings(found, grid, stages or {})
    group = (
        pl.when(pl.col("axis") == "tp")
        .then(pl.col("tp_group").cast(pl.String))
        .when(pl.col("axis") == "cp")
        .then(pl.col("cp_group").cast(pl.String))
        .when(pl.col("name").str.starts_with("gather "))
        .then(pl.col("gather_group").cast(pl.String))
        .when(pl.col("axis") == "dp")
        .then(pl.col("dp_group").cast(pl.String))
        .when(pl.col("crossing").is_not_null())
        .then("ends")
    )
    met = pl.when(pl.col("kind") == "comm").then(_meeting()).otherwise("crossing")
    return (
        found.with_columns(group=group, lane=_lane())
        .with_columns(meeting=met)
        .select([pl.col(name).cast(kind) for name, kind in SPANS.items()])
    )


def _crossings(spans: pl.DataFrame, grid: pl.DataFrame, stages: Mapping[int, int]) -> pl.DataFrame:
    """Return spans with ``crossing``, a value that is equal for a transfer and for the receiver's
    wait for it, and ``ends``, the sender and the receiver. Both ends have the same coordinates if
    all pp ranks have the same degrees; otherwise the ranks of the ends are unknown."""
    shape = grid.group_by("pp").agg(pl.max("dp"), pl.max("tp"), pl.max("cp"))
    uniform = shape.drop("pp").n_unique() == 1
    word = r"^(\d+)(SEND|RECV)_([FB])(\d+)(?:[<>](\d+))?$"
    stage, peer = (pl.col("name").str.extract(word, n).cast(pl.Int64) for n in (1, 5))
    ahead = pl.when((pl.col("name").str.extract(word, 3) == "F") == (pl.col("name").str.extract(word, 2) == "SEND"))
    other = peer.fill_null(stage + ahead.then(1).otherwise(-1))
    sends = pl.col("name").str.extract(word, 2) == "SEND"
    spans = spans.with_columns(
        source=pl.when(sends).then(stage).otherwise(other), target=pl.when(sends).then(other).otherwise(stage)
    )
    pp_rank_of = pl.DataFrame({"stage": list(stages), "pp": list(stages.values())}, schema_overrides={"pp": pl.Int32})
    for end in ("source", "target"):
        known = pp_rank_of.rename({"stage": end, "pp": f"{end}_pp"}).cast({end: pl.Int64})
        spans = spans.join(known, on=end, how="left", maintain_order="left")
    where = [pl.col(name) if uniform else pl.lit(0).alias(name) for name in ("dp", "cp", "tp")]
    key = pl.struct("step", "source", "target", pl.col("name").str.extract(word, 3).alias("way"), "slice", *where)
    if uniform:
        ranks = grid.select(pl.col("rank").alias("at"), "pp", "dp", "cp", "tp")
        for end in ("source", "target"):
            spans = spans.join(
                ranks.rename({"at": f"{end}_rank", "pp": f"{end}_pp"}), on=[f"{end}_pp", "dp", "cp", "tp"],
                how="left", maintain_order="left",
            )  # fmt: skip
        ends = pl.format("{}>{}", "source_rank", "target_rank")
    else:
        ends = pl.format("stage {}>{}", "source_pp", "target_pp")
    crosses = pl.col("source").is_not_null()
    return spans.with_columns(crossing=pl.when(crosses).then(key.hash()), ends=pl.when(crosses).then(ends))


def with_meetings(spans: pl.DataFrame) -> pl.DataFrame:
    """Return spans with lane and meeting added; they need axis and group. A meeting's value is
    equal for collectives with the same name and occurrence in one group, and for both ends of a
    transfer with group ``from>to``."""
    ends = (pl.col("kind") == "transfer") & pl.col("group").str.contains(r"^\d+>\d+$")
    crossing = pl.struct("axis", "group", "seq", crosses=pl.lit(value=True)).hash()
    met = pl.when(pl.col("kind") == "comm").then(_meeting()).when(ends).then(crossing)
    return spans.with_columns(lane=_lane(), meeting=met)


def _lane() -> pl.Expr:
    return pl.when(pl.col("kind").is_in(PROCESSOR)).then(pl.lit("processor")).otherwise(pl.col("axis"))


def _meeting() -> pl.Expr:
    return pl.struct("step", "axis", "group", "name", "seq").hash()


def rollup_of(spans: pl.DataFrame, *, complete: bool = True) -> pl.DataFrame:
    """Return seconds and count of ops per rank, step and kind. complete: add the sums of whole
    steps, exposed communication and the time between ops (``core.record.rollup``)."""
    if spans.is_empty():
        return pl.DataFrame(schema=ROLLUP)
    keys = ["step", "rank", "kind", "axis", "site", "direction"]
    ops = spans.group_by(keys).agg(n=pl.len().cast(pl.Int64), seconds=(pl.col("end") - pl.col("start")).clip(0).sum())
    return pl.concat([ops, *_step_sums(spans)] if complete else [ops]).select(list(ROLLUP))


def _step_sums(spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield tables with the sums of whole steps (length, exposed communication, time between ops),
    in the columns of ``rollup_of``."""
    one, none = pl.lit(1, pl.Int64), pl.lit("")
    host = between(spans)
    communication, still = exposed(spans), exposed(spans, by_axis=True).filter(pl.col("exposed") > 0)
    for table in (
        host.with_columns(kind=pl.lit(HOST), axis=none, site=pl.lit(BETWEEN)),
        communication.with_columns(kind=pl.lit(COMMUNICATION), axis=none, site=none, n=one, seconds="total"),
        still.with_columns(kind=pl.lit(EXPOSED), site="axis", n=one, seconds="exposed"),
    ):
        yield table.with_columns(direction=none).select(*RANK_STEP, "kind", "axis", "site", "direction", "n", "seconds")


def meetings_of(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of collectives and transfers: who took part, and when each rank arrived and
    left."""
    return spans.filter(pl.col("meeting").is_not_null() & (pl.col("kind") != "idle")).select(list(MEETINGS))


def seconds_of(spans: pl.DataFrame) -> dict[int, float]:
    """Return the length of every step in seconds, by step, on the rank that took longest. A rank's
    step lasts from its data loading (or else its first span) to its last span, without kinds in
    ``AFTER``."""
    if spans.is_empty():
        return {}
    begun = pl.col("start").filter(kind="data").min()
    own = (
        spans.filter(~pl.col("kind").is_in(AFTER))
        .group_by("step", "rank")
        .agg(length=pl.max("end") - pl.coalesce(begun, pl.min("start")))
    )
    found = own.group_by("step").agg(pl.max("length")).sort("step")
    return dict(zip(found["step"].to_list(), found["length"].to_list(), strict=True))


def exposed(spans: pl.DataFrame, *, by_axis: bool = False) -> pl.DataFrame:
    """Return the table (step, rank, total, exposed) of communication in seconds, in order. by_axis:
    (step, rank, axis, total, exposed) for every axis with communication; the spans need a column
    ``axis``."""
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
        lanes.select(*RANK_STEP, axis=pl.lit(axis), total=pl.Series(values[:, 0]), exposed=pl.Series(values[:, 1]))
        for axis, values in zip(names, found.swapaxes(0, 1), strict=True)
    ]
    rows = pl.concat(tables)
    return rows.filter(pl.col("total") > 0) if by_axis else rows.drop("axis")


def between(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the table (step, rank, n, seconds): number and seconds of the gaps between ops, for
    every rank's step that has any."""
    kind = pl.col("kind").cast(pl.String)
    lanes, own = _lanes(spans.filter(kind.is_in([*OPS, *FILLS])))
    ops = own.select(kind.is_in(OPS)).to_series().to_numpy()
    count, seconds = gaps(own["of"].to_numpy(), own["start"].to_numpy(), own["end"].to_numpy(), ops)
    found = lanes.with_columns(n=pl.Series(count, dtype=pl.Int64), seconds=pl.Series(seconds, dtype=pl.Float64))
    return found.filter(pl.col("of").is_in(own["of"].to_numpy()[ops])).drop("of")


def sum_exposure(rows: pl.DataFrame, lanes: int = 1) -> Exposure:
    """Return total and exposed seconds of communication in a mean rank-step: the sums over the
    table of ``exposed`` divided by ``lanes``, the number of rank-steps."""
    return Exposure(*(float(rows[name].sum()) / max(1, lanes) for name in Exposure._fields))


def _lanes(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return (the (rank, step) pairs in order, the spans with the index of their pair in a column
    ``of``)."""
    lanes = spans.select(RANK_STEP).unique().sort(RANK_STEP).with_row_index("of").cast({"of": pl.Int64})
    return lanes, spans.join(lanes, on=RANK_STEP, maintain_order="left")


def rank_phrase(grid: pl.DataFrame | None, rank: int) -> str:
    """Return a phrase with a rank's coordinates and host, as in ``rank 5 (stage 0, dp 1) on
    host7``; without the host if it is unknown. grid: coordinates of ranks; None if they are
    unknown."""
    if grid is None or (rows := grid.filter(rank=rank)).is_empty():
        return f"rank {rank}"
    where, host = coordinates(grid, rank), rows["host"][0]
    return f"rank {rank}" + (f" ({where})" if where else "") + (f" on {host}" if host else "")


def coordinates(grid: pl.DataFrame, rank: int) -> str:
    """Return a rank's coordinates as text, as in ``stage 0, dp 1``, on the axes on which ranks
    differ. grid: coordinates of all ranks."""
    at = grid.row(by_predicate=pl.col("rank") == rank, named=True)
    return ", ".join(f"{WORDS[axis]} {at[axis]}" for axis in ("pp", "dp", "cp", "tp") if grid[axis].n_unique() > 1)

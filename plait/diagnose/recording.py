"""What was recorded of a run, in columns, wherever it came from: what all of the diagnosis computes on.

Three tables, so that each question reads only what it needs. The *roll-up* has seconds per rank, step and
kind of op; *meetings* have a row for every rank that took part in a collective or a transfer; *spans* are the
ops one by one, of some steps. Long runs of many ranks have the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from plait.core.base.passed_over import PassedOver
from plait.core.record.records import axis_of
from plait.core.record.rollup import BETWEEN, COMMUNICATION, EXPOSED, HOST
from plait.diagnose.exposed import LANE, between, exposed

if TYPE_CHECKING:
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
"""Kinds of what a rank does by itself, so that it can be slow at it. host: between ops."""
PROCESSOR = ("compute", "wait", "idle", "data", "optimizer", "checkpoint", "evaluation", "host")
AFTER = ("checkpoint", "evaluation")
"""Kinds of what comes after a step, and does not count in its length."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording:
    """grid: where every rank stands, and on which host (null: not known). seconds: of steps, by step.

    clocks_agree: whether times of different ranks can be compared. complete: whether all waiting was
    recorded, so that what lies between ops is the host's own work. blocking: whether ranks communicate in the
    middle of their program, so that everything is one lane. sampled: older steps whose spans are kept. notes:
    what was left out, for people; passed_over: for programs.
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
    notes: tuple[str, ...] = ()
    passed_over: PassedOver = field(default_factory=PassedOver)

    @cached_property
    def steps(self) -> list[int]:
        """That anything is known of."""
        return self.rollup["step"].unique().sort().to_list()

    @cached_property
    def met(self) -> pl.DataFrame:
        """A row for every meeting: when it could begin, how long the transfer took, who came last and how
        much later than the first.

        lateness: start minus first start of the group. transfer: end minus last start. Where clocks do not
        agree, by the ends, which are the same moment for all: the last to come is in it for the shortest
        time. waited: seconds of all who came before the last. Of transfers between stages see `_arrived`.
        """
        length = pl.col("end") - pl.col("start")
        came = pl.col("start") if self.clocks_agree else -length
        transfer = (pl.col("end").min() - pl.col("start").max()) if self.clocks_agree else length.min()
        equal = [pl.col(name).first() for name in ("step", "axis", "site", "direction", "group")]
        found = self.meetings.group_by("meeting").agg(
            *equal,
            members=pl.len(),
            lateness=came.max() - came.min(),
            last=pl.col("rank").get(came.arg_max()),
            transfer=transfer.clip(0),
            waited=(came.max() - came).sum(),
            bytes=pl.col("bytes").max(),
            start=pl.col("start").max(),
        )
        found = found.filter((pl.col("members") > 1) | (pl.col("axis") == "pp"))
        return (self._arrived(found) if self.clocks_agree else found).drop("start")

    def _arrived(self, met: pl.DataFrame) -> pl.DataFrame:
        """``met``, with transfers that last until the receiver has them: for its sender a send is over once
        everything lies in a buffer.

        The end of a receiver's wait is the moment, if it waited already when the transfer began. The arrival
        of other transfers is unknown and their duration null, unless all their receivers came late. It is
        also null for a transfer that arrived before it was sent: another replica may have sent the tensor.
        """
        waits = (
            self.spans.filter(pl.col("meeting").is_not_null() & (pl.col("kind") == "idle"))
            .group_by("meeting")
            .agg(since=pl.col("start").max(), until=pl.col("end").max())
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
        """Spans of these ranks and steps."""
        return self.spans.filter(pl.col("rank").is_in(list(ranks)), pl.col("step").is_in(list(steps)))

    @cached_property
    def ranks(self) -> int:
        """That recorded anything."""
        return self.rollup["rank"].n_unique()


def grid_of(layout: Layout, hosts: Sequence[str | None] = ()) -> pl.DataFrame:
    """Coordinates of every rank of a layout. hosts: by rank, as far as they are known."""
    parts: list[np.ndarray] = []
    for place, mesh in enumerate(layout.meshes):
        at = np.arange(len(mesh.ranks))
        rest, tp = np.divmod(at, mesh.tp)
        dp, cp = np.divmod(rest, mesh.cp)
        parts.append(np.stack([at + mesh.first, np.full_like(at, place), dp, cp, tp]))
    columns = dict(zip(list(GRID)[:5], np.concatenate(parts, axis=1), strict=True))
    known = pl.Series("host", [*hosts, *[None] * (layout.world_size - len(hosts))], dtype=pl.String)
    return pl.DataFrame(columns).with_columns(known).cast(GRID)  # type: ignore[arg-type]


def unknown_grid(ranks: Sequence[int], hosts: Mapping[int, str] | None = None) -> pl.DataFrame:
    """Of ranks of which nobody says where they stand: all alike."""
    of = hosts or {}
    zero = [0] * len(ranks)
    columns = {"rank": list(ranks), "pp": zero, "dp": list(ranks), "cp": zero, "tp": zero}
    return pl.DataFrame({**columns, "host": [of.get(rank) for rank in ranks]}, schema=GRID)


def with_axes(
    spans: pl.DataFrame, grid: pl.DataFrame, shardings: Sequence[Sharding] = (), stages: Mapping[int, int] | None = None
) -> pl.DataFrame:
    """Plait's own spans with axis, group, lane and meeting. Their names say what they are.

    group: the lowest rank of those who take part, as text; of a transfer, of those who send and those who
    receive. shardings: of every place of the pipeline: gathers of parameters stay within so many replicas.
    stages: place of every stage.
    """
    # Of millions of spans there are few names.
    names = spans.select("kind", "name").unique()
    axes = names.with_columns(axis=pl.Series([axis_of(*one) for one in names.iter_rows()], dtype=pl.String))
    lowest = pl.col("rank").min()
    cp = pl.col("cp").max().over("pp") + 1
    replica = pl.col("dp") * cp + pl.col("cp")
    factor = pl.col("pp").replace_strict({i: one.params for i, one in enumerate(shardings)}, default=1)
    gathers = pl.when(factor > 1).then(replica // factor).otherwise(0)
    places = grid.with_columns(
        tp_group=lowest.over("pp", "dp", "cp"),
        cp_group=lowest.over("pp", "dp", "tp"),
        dp_group=lowest.over("pp", "tp"),
        gather_group=lowest.over("pp", "tp", gathers),
    ).select("rank", "pp", "dp", "cp", "tp", "tp_group", "cp_group", "dp_group", "gather_group")
    found = spans.join(axes, on=["kind", "name"], how="left", maintain_order="left")
    found = found.join(places, on="rank", how="left")
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
    """With ``crossing``, equal for a transfer and for the receiver's wait for it, and ``ends``, between whom
    it goes. The coordinates of both are equal where all places have the same degrees, else unknown."""
    shape = grid.group_by("pp").agg(pl.col("dp").max(), pl.col("tp").max(), pl.col("cp").max())
    uniform = shape.drop("pp").n_unique() == 1
    word = r"^(\d+)(SEND|RECV)_([FB])(\d+)(?:[<>](\d+))?$"
    stage, peer = (pl.col("name").str.extract(word, n).cast(pl.Int64) for n in (1, 5))
    ahead = pl.when((pl.col("name").str.extract(word, 3) == "F") == (pl.col("name").str.extract(word, 2) == "SEND"))
    other = peer.fill_null(stage + ahead.then(1).otherwise(-1))
    sends = pl.col("name").str.extract(word, 2) == "SEND"
    spans = spans.with_columns(
        source=pl.when(sends).then(stage).otherwise(other), target=pl.when(sends).then(other).otherwise(stage)
    )
    places = pl.DataFrame({"stage": list(stages), "place": list(stages.values())}, schema_overrides={"place": pl.Int32})
    for end in ("source", "target"):
        known = places.rename({"stage": end, "place": f"{end}_place"}).cast({end: pl.Int64})
        spans = spans.join(known, on=end, how="left", maintain_order="left")
    where = [pl.col(name) if uniform else pl.lit(0).alias(name) for name in ("dp", "cp", "tp")]
    key = pl.struct("step", "source", "target", pl.col("name").str.extract(word, 3).alias("way"), "slice", *where)
    if uniform:
        ranks = grid.select(pl.col("rank").alias("at"), pl.col("pp").alias("place"), "dp", "cp", "tp")
        for end in ("source", "target"):
            spans = spans.join(
                ranks.rename({"at": f"{end}_rank", "place": f"{end}_place"}), on=[f"{end}_place", "dp", "cp", "tp"],
                how="left", maintain_order="left",
            )  # fmt: skip
        ends = pl.format("{}>{}", "source_rank", "target_rank")
    else:
        ends = pl.format("place {}>{}", "source_place", "target_place")
    crosses = pl.col("source").is_not_null()
    return spans.with_columns(crossing=pl.when(crosses).then(key.hash()), ends=pl.when(crosses).then(ends))


def meet(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans that have axis and group, with lane, and with equal meetings for what ran together: collectives
    of equal name and occurrence in one group, and the two ends of a transfer whose group is ``from>to``."""
    ends = (pl.col("kind") == "transfer") & pl.col("group").str.contains(r"^\d+>\d+$")
    crossing = pl.struct("axis", "group", "seq", crosses=pl.lit(value=True)).hash()
    met = pl.when(pl.col("kind") == "comm").then(_meeting()).when(ends).then(crossing)
    return spans.with_columns(lane=_lane(), meeting=met)


def _lane() -> pl.Expr:
    return pl.when(pl.col("kind").is_in(PROCESSOR)).then(pl.lit("processor")).otherwise(pl.col("axis"))


def _meeting() -> pl.Expr:
    return pl.struct("step", "axis", "group", "name", "seq").hash()


def rollup_of(spans: pl.DataFrame, *, complete: bool = True) -> pl.DataFrame:
    """Seconds of every rank, step and kind of op. complete: also what of its communication is exposed, and
    what passed between its ops: a roll-up's rows of whole steps (``core.record.rollup``)."""
    if spans.is_empty():
        return pl.DataFrame(schema=ROLLUP)
    keys = ["step", "rank", "kind", "axis", "site", "direction"]
    ops = spans.group_by(keys).agg(n=pl.len().cast(pl.Int64), seconds=(pl.col("end") - pl.col("start")).clip(0).sum())
    return pl.concat([ops, *_step_sums(spans)] if complete else [ops]).select(list(ROLLUP))


def _step_sums(spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The rows of whole steps, in the columns of ``rollup_of``."""
    one, none = pl.lit(1, pl.Int64), pl.lit("")
    host = between(spans)
    communication, still = exposed(spans), exposed(spans, by_axis=True).filter(pl.col("exposed") > 0)
    for table in (
        host.with_columns(kind=pl.lit(HOST), axis=none, site=pl.lit(BETWEEN)),
        communication.with_columns(kind=pl.lit(COMMUNICATION), axis=none, site=none, n=one, seconds="total"),
        still.with_columns(kind=pl.lit(EXPOSED), site="axis", n=one, seconds="exposed"),
    ):
        yield table.with_columns(direction=none).select(*LANE, "kind", "axis", "site", "direction", "n", "seconds")


def meetings_of(spans: pl.DataFrame) -> pl.DataFrame:
    """Who met whom in collectives and transfers, and when each came and left."""
    return spans.filter(pl.col("meeting").is_not_null() & (pl.col("kind") != "idle")).select(list(MEETINGS))


def seconds_of(spans: pl.DataFrame) -> dict[int, float]:
    """Of every step: of the rank that took the longest from its data, or else its first span, to its last,
    without what comes after it."""
    if spans.is_empty():
        return {}
    begun = pl.col("start").filter(pl.col("kind") == "data").min()
    own = (
        spans.filter(~pl.col("kind").is_in(AFTER))
        .group_by("step", "rank")
        .agg(length=pl.col("end").max() - pl.coalesce(begun, pl.col("start").min()))
    )
    found = own.group_by("step").agg(pl.col("length").max()).sort("step")
    return dict(zip(found["step"].to_list(), found["length"].to_list(), strict=True))

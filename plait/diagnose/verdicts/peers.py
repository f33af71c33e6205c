"""Compare peers: ranks of one stage at the same op, and links of one axis with the same bytes.

The time that a rank spends in a collective is never compared: waiting ranks are long there, and the
rank that they wait for is short. Compared are a rank's own work (computation, and the host's time
between ops), and transfers after all ranks have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from plait.core.record.rollup import PROCESSOR
from plait.diagnose.measured.recording import OWN, Recording

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

UNDISTURBED = 0.1
"""Share of a step's ops that remain undisturbed even if ranks share processors."""
FEW = 16
"""The largest number of peers for which a rank is compared with the median of the other ranks,
without itself."""
OWN_PROCESSOR = 0.7
"""Least share of its own work during which a rank has a processor, if it shares none."""
BLOCK = 10
"""Number of steps that are compared at once, so that memory does not grow with the run."""


@dataclass(frozen=True, eq=False)
class PeerComparison:
    """Peers compared with each other. peers: ranks, or names of groups. steps: columns. deviation:
    (peers, steps), excess over the others relative to their time; NaN without peers. excess: the
    same in seconds. computing: the part of ``excess`` that is computation."""

    peers: list[int] | list[str]
    steps: list[int]
    deviation: Floats
    excess: Floats
    computing: Floats

    def pair_ids(self, grid: pl.DataFrame) -> NDArray[np.int64]:
        """Return a number for every peer (rank), equal for two ranks that are alone in their stage:
        their deviations have opposite signs."""
        own = pl.DataFrame({"rank": self.peers}, schema_overrides={"rank": grid.schema["rank"]})
        stage = pl.struct("pp", "cp").rank("dense")
        known = own.join(grid, on="rank", how="left", maintain_order="left").with_columns(stage=stage)
        number = pl.when(pl.len().over("stage") == 2).then(-pl.col("stage").cast(pl.Int64)).otherwise("rank")
        return known.select(number).to_series().to_numpy()


class Lateness(NamedTuple):
    """Excess of a rank's own work over its peers' in the median step: share, as a fraction of
    theirs, and in seconds. since: first step of the excess; None: all steps."""

    rank: int
    share: float
    seconds: float
    since: int | None = None


def lateness(work: PeerComparison) -> list[Lateness]:
    """Return the lateness of all ranks that have peers, the latest first, over all steps but a
    run's first."""
    steps = [at for at, step in enumerate(work.steps) if step > 0] or list(range(len(work.steps)))
    known = np.flatnonzero(np.isfinite(work.deviation[:, steps]).any(axis=1))
    share, seconds = (
        np.nanmedian(of[known][:, steps], axis=1) if known.size else np.zeros(0) for of in (work.deviation, work.excess)
    )
    order = np.argsort(-share, kind="stable")
    return [Lateness(int(work.peers[known[at]]), float(share[at]), float(seconds[at])) for at in order]


def expected(stages: pl.DataFrame, value: pl.Expr, cell: list[str]) -> pl.Expr:
    """Return an expression for the time expected of each value, from its peers in the columns
    ``cell``: for few peers the median of the others, for many that of all. stages: (rank, pp, cp).
    """
    many = (stages.group_by("pp", "cp").len()["len"] > FEW).any()
    return (peer_median if many else leave_one_out_median)(value, cell)


def peer_median(value: pl.Expr, cell: list[str]) -> pl.Expr:
    """Return an expression for the median of each value's peers, which are equal in the columns
    ``cell``; for two peers the other value; null without peers."""
    peers, both = pl.len().over(cell), value.sum().over(cell)
    return pl.when(peers > 2).then(value.median().over(cell)).when(peers == 2).then(both - value)


def leave_one_out_median(value: pl.Expr, cell: list[str]) -> pl.Expr:
    """Return an expression for the median of each value's peers without the value itself, so that a
    slow rank does not contribute to it. Up to three peers count as in ``peer_median``: their median
    would mix a healthy and the slow rank."""
    peers, position = pl.len().cast(pl.Int64), value.rank("ordinal").cast(pl.Int64) - 1
    low, high = (peers - 2) // 2, (peers - 1) // 2
    ordered = value.sort()

    def at(index: pl.Expr) -> pl.Expr:
        """Return the other values' element at ``index``."""
        return (
            pl.when((position <= index).over(cell))
            .then(ordered.get(index + 1, null_on_oob=True).over(cell))
            .otherwise(ordered.get(index, null_on_oob=True).over(cell))
        )

    return pl.when(pl.len().over(cell) > 3).then((at(low) + at(high)) / 2).otherwise(peer_median(value, cell))


def own_work(recording: Recording) -> PeerComparison:
    """Return the comparison of every rank's own work (computation, data loading, the host's time
    between ops) with the ranks of its stage."""
    own = recording.rollup.filter(pl.col("kind").is_in(OWN if recording.complete else ["compute"]))
    return _work(recording, _without_exchanges(own, recording), ["kind", "site", "direction"])


def processor_work(recording: Recording) -> PeerComparison:
    """Return the comparison of every rank's processor time per step with the ranks of its stage.
    Sharing a processor does not make a rank slow by this measure, and the others' load on it does
    not matter."""
    own = recording.rollup.filter(kind=PROCESSOR)
    return _work(recording, own.with_columns(kind=pl.lit("compute")), ["kind"])


def crowded(recording: Recording) -> bool:
    """True if ranks share processors: the median rank has a processor for less than
    ``OWN_PROCESSOR`` of its own work."""
    kinds = pl.col("kind").is_in([*OWN, PROCESSOR])
    found = (
        recording.rollup.filter(kinds)
        .group_by("rank")
        .agg(
            had=pl.col("seconds").filter(kind=PROCESSOR).sum(),
            own=pl.col("seconds").filter(pl.col("kind") != PROCESSOR).sum(),
        )
    )
    share = found.filter(pl.col("had") > 0, pl.col("own") > 0).select(pl.col("had") / pl.col("own")).to_series()
    return len(share) > 0 and float(share.median()) < OWN_PROCESSOR  # type: ignore[arg-type]


def typical_work(recording: Recording) -> PeerComparison:
    """Return the comparison of own work in the least disturbed ops. If a processor is preempted now
    and then, sums of a step vary more between steps than between a slow rank and its peers; medians
    do so too on a crowded host. A slow processor is slow at every op.

    Each op's time is divided by the median time of the same op over all peers and steps. A rank's
    step counts as the 10 % quantile of these ratios, weighted by the op's median time.
    """
    op = ["pp", "cp", "kind", "site", "direction", "name"]
    stages = recording.grid.select("rank", "pp", "cp")
    ops = _without_exchanges(recording.spans.filter(kind="compute"), recording)
    length = pl.col("end") - pl.col("start")
    each = (
        ops.join(stages, on="rank")
        .with_columns(length=length, usual=length.median().over(op))
        .filter(pl.col("usual") > 0)
        .select("step", "rank", "pp", "cp", "usual", times=pl.col("length") / pl.col("usual"))
        .sort("step", "rank", "times")
    )
    of = ["step", "rank"]
    reached = pl.col("usual").cum_sum().over(of) >= pl.sum("usual").over(of) * UNDISTURBED
    whole = each.group_by(*of, "pp", "cp").agg(pl.sum("usual")).group_by("pp", "cp").agg(pl.median("usual"))
    typical = each.filter(reached).group_by(of).agg(pl.col("times", "pp", "cp").first()).join(whole, on=["pp", "cp"])
    seconds = typical.select("step", "rank", kind=pl.lit("compute"), seconds=pl.col("times") * pl.col("usual"))
    return _work(recording, seconds, ["kind"])


def _without_exchanges(ops: pl.DataFrame, recording: Recording) -> pl.DataFrame:
    """Return the ops without attention if ranks use context parallelism, since attention then
    exchanges keys and values within the op."""
    if recording.grid["cp"].n_unique() == 1:
        return ops
    return ops.filter(~pl.col("site").cast(pl.String).is_in(["attn", "block"]))


def _work(recording: Recording, rollup: pl.DataFrame, equal: list[str]) -> PeerComparison:
    """Return the comparison of ranks' seconds in ``rollup`` with those of their stage, op by op.
    equal: columns in which ops are equal."""
    stages = recording.grid.select("rank", "pp", "cp")
    cell = ["step", "pp", "cp", *equal]
    steps = rollup["step"].unique().sort().to_list()
    usually = expected(stages, pl.col("seconds"), cell)
    parts = [
        rollup.filter(pl.col("step").is_between(some[0], some[-1]))
        .join(stages, on="rank")
        .with_columns(usual=usually)
        .filter(pl.col("usual").is_not_null())
        .with_columns(excess=pl.col("seconds") - pl.col("usual"))
        .group_by("step", "rank")
        .agg(
            usual=pl.sum("usual"),
            excess=pl.sum("excess"),
            computing=pl.col("excess").filter(kind="compute").sum(),
        )
        for some in (steps[at : at + BLOCK] for at in range(0, len(steps), BLOCK))
    ]
    found = pl.concat(parts) if parts else pl.DataFrame(schema={"step": pl.Int64, "rank": pl.Int32})
    return _matrices(found, "rank", steps)


def transfers(recording: Recording) -> PeerComparison:
    """Return the comparison of every group's transfer time, after all ranks have arrived, with
    groups that move as many bytes.

    The faster transfers of a step count and, if hosts are known, the fastest group between the same
    hosts: a slow link slows all of them, a busy processor only some. Groups are compared with the
    faster groups between as many hosts, since the links of one host may be half of all links.
    """
    met = recording.met.with_columns(peer=pl.format("{} {}", "axis", "group"))
    cell = ["step", "axis", "site", "direction", "bytes"]
    if hosts_known(recording):
        cell.append("hosts")
        met = met.join(hosts_of_groups(recording), on="peer", how="left")
    path = [*cell, "path"] if hosts_known(recording) else [*cell, "group"]
    groups = (
        met.group_by([*path, "group"] if hosts_known(recording) else path)
        .agg(seconds=pl.col("transfer").quantile(0.25, "lower"), n=pl.len())
        .with_columns(pl.min("seconds").over(path))
        .filter(pl.col("seconds").is_not_null())
    )
    common = peer_median(pl.col("seconds"), cell)
    if hosts_known(recording):
        common = pl.when(pl.len().over(cell) > 1).then(pl.col("seconds").quantile(0.25, "lower").over(cell))
    found = (
        groups.with_columns(usual=common)
        .filter(pl.col("usual").is_not_null())
        .with_columns(excess=(pl.col("seconds") - pl.col("usual")) * pl.col("n"), usual=pl.col("usual") * pl.col("n"))
        .with_columns(peer=pl.format("{} {}", "axis", "group"))
        .group_by("step", "peer")
        .agg(pl.sum("usual"), pl.sum("excess"), computing=pl.lit(0.0))
    )
    return _matrices(found, "peer", recording.steps)


def hosts_known(recording: Recording) -> bool:
    """True if every rank's host is known and there are several hosts."""
    return recording.grid["host"].null_count() == 0 and recording.grid["host"].n_unique() > 1


def members_of(recording: Recording) -> pl.DataFrame:
    """Return the table (peer, rank): the ranks of every group. For a transfer that only one end
    recorded, both ends follow from the group's name."""
    named = recording.meetings.select("rank", peer=pl.format("{} {}", "axis", "group")).unique()
    ends = named.filter(pl.col("peer").str.contains(r"^pp \d+>\d+$"))
    other = ends.select(rank=pl.col("peer").str.extract(r">(\d+)$").cast(named.schema["rank"]), peer="peer")
    return pl.concat([named, other]).unique()


def hosts_of_groups(recording: Recording) -> pl.DataFrame:
    """Return the table (peer, hosts, path): the number and the names of each group's hosts."""
    both = members_of(recording).join(recording.grid.select("rank", "host"), on="rank")
    return both.group_by("peer").agg(hosts=pl.n_unique("host"), path=pl.col("host").unique().sort().str.join(" "))


def _matrices(found: pl.DataFrame, column_name: str, steps: list[int]) -> PeerComparison:
    peers = found[column_name].unique().sort().to_list() if found.height else []
    empty = np.full((len(peers), len(steps)), np.nan)
    deviation, excess, computing = empty, empty.copy(), empty.copy()
    if found.height:
        row = np.searchsorted(np.array(peers), found[column_name].to_numpy())
        column = np.searchsorted(np.array(steps), found["step"].to_numpy())
        base = found["usual"].to_numpy()
        excess[row, column] = found["excess"].to_numpy()
        computing[row, column] = found["computing"].to_numpy()
        deviation[row, column] = found["excess"].to_numpy() / np.where(base > 0, base, np.inf)
    return PeerComparison(peers, steps, deviation, excess, computing)

"""Comparing what should be equal: ranks of one stage at the same op, links of one axis with the same bytes.

Never by how long a rank was in a collective: there those who wait are long, and who they wait for is short.
Own work is compared (computation, and what the host does between ops), and transfers once all have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from plait.core.record.rollup import PROCESSOR
from plait.diagnose.recording import OWN, Recording

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

UNDISTURBED = 0.1
"""Share of a step's ops that nothing has disturbed, even where ranks share processors."""
FEW = 16
"""Equals up to which one counts in their median."""
OWN_PROCESSOR = 0.7
"""Share of its own work for which a rank has a processor, if it has one to itself."""
BLOCK = 10
"""Steps that are compared at once, so that memory does not grow with the run."""


@dataclass(frozen=True, eq=False)
class PeerComparison:
    """units: ranks, or names of groups. steps: columns. deviation: (units, steps), how much longer each took
    than its equals, as a share of what they take; NaN where there is nobody to compare. excess: the same in
    seconds. computing: the part of ``excess`` that is computation."""

    units: list[int] | list[str]
    steps: list[int]
    deviation: Floats
    excess: Floats
    computing: Floats

    def twins(self, grid: pl.DataFrame) -> NDArray[np.int64]:
        """Of every rank a number, the same for two that are alone in their stage, so that one's deviation is
        the other's, turned round."""
        own = pl.DataFrame({"rank": self.units}, schema_overrides={"rank": grid.schema["rank"]})
        stage = pl.struct("pp", "cp").rank("dense")
        known = own.join(grid, on="rank", how="left", maintain_order="left").with_columns(stage=stage)
        number = pl.when(pl.len().over("stage") == 2).then(-pl.col("stage").cast(pl.Int64)).otherwise("rank")
        return known.select(number).to_series().to_numpy()


class Lateness(NamedTuple):
    """Own work of a rank beyond its equals' in a step: as a share of theirs, and in seconds; medians over
    steps. since: the step from which on, where that is not all of them."""

    rank: int
    share: float
    seconds: float
    since: int | None = None


def lateness(work: PeerComparison) -> list[Lateness]:
    """All ranks that have equals, the latest first, over all steps but a run's first."""
    steps = [at for at, step in enumerate(work.steps) if step > 0] or list(range(len(work.steps)))
    known = np.flatnonzero(np.isfinite(work.deviation[:, steps]).any(axis=1))
    share, seconds = (
        np.nanmedian(of[known][:, steps], axis=1) if known.size else np.zeros(0) for of in (work.deviation, work.excess)
    )
    order = np.argsort(-share, kind="stable")
    return [Lateness(int(work.units[known[at]]), float(share[at]), float(seconds[at])) for at in order]


def expected(places: pl.DataFrame, value: pl.Expr, cell: list[str]) -> pl.Expr:
    """What the equals of each value have, by how many equals there are. places: (rank, pp, cp)."""
    many = (places.group_by("pp", "cp").len()["len"] > FEW).any()
    return (usual if many else usual_of_others)(value, cell)


def usual(value: pl.Expr, cell: list[str]) -> pl.Expr:
    """Of each value what its equals have: the median, of two the other one; null for who is alone."""
    peers, both = pl.len().over(cell), value.sum().over(cell)
    return pl.when(peers > 2).then(value.median().over(cell)).when(peers == 2).then(both - value)


def usual_of_others(value: pl.Expr, cell: list[str]) -> pl.Expr:
    """As ``usual``, where equals are few: the median of the others, which one that is slow has no part in. Of
    three it would be that of a healthy one and of the slow one."""
    peers, place = pl.len().cast(pl.Int64), value.rank("ordinal").cast(pl.Int64) - 1
    low, high = (peers - 2) // 2, (peers - 1) // 2
    ordered = value.sort()

    def at(index: pl.Expr) -> pl.Expr:
        """The value of that place among the others."""
        return (
            pl.when((place <= index).over(cell))
            .then(ordered.get(index + 1, null_on_oob=True).over(cell))
            .otherwise(ordered.get(index, null_on_oob=True).over(cell))
        )

    return pl.when(pl.len().over(cell) > 3).then((at(low) + at(high)) / 2).otherwise(usual(value, cell))


def own_work(recording: Recording) -> PeerComparison:
    """Of every rank all that it does by itself, against the ranks of its stage."""
    own = recording.rollup.filter(pl.col("kind").is_in(OWN if recording.complete else ["compute"]))
    return _work(recording, _without_exchanges(own, recording), ["kind", "site", "direction"])


def processor_work(recording: Recording) -> PeerComparison:
    """Of every rank how much of a processor its steps need: who shares a processor with others is not slow by
    this measure, and how much others take makes no difference to it."""
    own = recording.rollup.filter(pl.col("kind") == PROCESSOR)
    return _work(recording, own.with_columns(kind=pl.lit("compute")), ["kind"])


def crowded(recording: Recording) -> bool:
    """Whether ranks share processors, as those of a lab do: of what a rank does by itself, by the clock, the
    median one has a processor for less than ``OWN_PROCESSOR``."""
    kinds = pl.col("kind").is_in([*OWN, PROCESSOR])
    found = (
        recording.rollup.filter(kinds)
        .group_by("rank")
        .agg(
            had=pl.col("seconds").filter(pl.col("kind") == PROCESSOR).sum(),
            own=pl.col("seconds").filter(pl.col("kind") != PROCESSOR).sum(),
        )
    )
    share = found.filter(pl.col("had") > 0, pl.col("own") > 0).select(pl.col("had") / pl.col("own")).to_series()
    return len(share) > 0 and float(share.median()) < OWN_PROCESSOR  # type: ignore[arg-type]


def typical_work(recording: Recording) -> PeerComparison:
    """The same by the ops that were disturbed least: where a processor is taken away now and then, sums of a
    step differ more from step to step than a slow rank does from others, and medians too if it is crowded. A
    slow processor is slow at all of them.

    Of every op, how many times as long it took as the same op of any equal in any step; of a rank's step the
    tenth of these that is least, each counted by how long the op usually is.
    """
    op = ["pp", "cp", "kind", "site", "direction", "name"]
    places = recording.grid.select("rank", "pp", "cp")
    ops = _without_exchanges(recording.spans.filter(pl.col("kind") == "compute"), recording)
    length = pl.col("end") - pl.col("start")
    each = (
        ops.join(places, on="rank")
        .with_columns(length=length, usual=length.median().over(op))
        .filter(pl.col("usual") > 0)
        .select("step", "rank", "pp", "cp", "usual", times=pl.col("length") / pl.col("usual"))
        .sort("step", "rank", "times")
    )
    of = ["step", "rank"]
    reached = pl.col("usual").cum_sum().over(of) >= pl.col("usual").sum().over(of) * UNDISTURBED
    whole = each.group_by(*of, "pp", "cp").agg(pl.col("usual").sum()).group_by("pp", "cp").agg(pl.col("usual").median())
    typical = each.filter(reached).group_by(of).agg(pl.col("times", "pp", "cp").first()).join(whole, on=["pp", "cp"])
    seconds = typical.select("step", "rank", kind=pl.lit("compute"), seconds=pl.col("times") * pl.col("usual"))
    return _work(recording, seconds, ["kind"])


def _without_exchanges(ops: pl.DataFrame, recording: Recording) -> pl.DataFrame:
    """Where ranks share sequences, attention exchanges keys and values within the op."""
    if recording.grid["cp"].n_unique() == 1:
        return ops
    return ops.filter(~pl.col("site").cast(pl.String).is_in(["attn", "block"]))


def _work(recording: Recording, rollup: pl.DataFrame, equal: list[str]) -> PeerComparison:
    """Seconds of ranks' ops against those of their stage that are ``equal``."""
    places = recording.grid.select("rank", "pp", "cp")
    cell = ["step", "pp", "cp", *equal]
    steps = rollup["step"].unique().sort().to_list()
    usually = expected(places, pl.col("seconds"), cell)
    parts = [
        rollup.filter(pl.col("step").is_between(some[0], some[-1]))
        .join(places, on="rank")
        .with_columns(usual=usually)
        .filter(pl.col("usual").is_not_null())
        .with_columns(excess=pl.col("seconds") - pl.col("usual"))
        .group_by("step", "rank")
        .agg(
            usual=pl.col("usual").sum(),
            excess=pl.col("excess").sum(),
            computing=pl.col("excess").filter(pl.col("kind") == "compute").sum(),
        )
        for some in (steps[at : at + BLOCK] for at in range(0, len(steps), BLOCK))
    ]
    found = pl.concat(parts) if parts else pl.DataFrame(schema={"step": pl.Int64, "rank": pl.Int32})
    return _matrices(found, "rank", steps)


def transfers(recording: Recording) -> PeerComparison:
    """Of every group what its transfers take once all have come, against the groups that move as much.

    Of a step's transfers the faster ones count, and where hosts are known, of groups between the same hosts
    the fastest: a slow link slows all of them, and a busy processor some. Compared are groups between as
    many hosts, with the faster of them: the links of one host may be half of all.
    """
    met = recording.met.with_columns(unit=pl.format("{} {}", "axis", "group"))
    cell = ["step", "axis", "site", "direction", "bytes"]
    if hosts_known(recording):
        cell.append("hosts")
        met = met.join(hosts_of_groups(recording), on="unit", how="left")
    path = [*cell, "path"] if hosts_known(recording) else [*cell, "group"]
    groups = (
        met.group_by([*path, "group"] if hosts_known(recording) else path)
        .agg(seconds=pl.col("transfer").quantile(0.25, "lower"), n=pl.len())
        .with_columns(pl.col("seconds").min().over(path))
        .filter(pl.col("seconds").is_not_null())
    )
    common = usual(pl.col("seconds"), cell)
    if hosts_known(recording):
        common = pl.when(pl.len().over(cell) > 1).then(pl.col("seconds").quantile(0.25, "lower").over(cell))
    found = (
        groups.with_columns(usual=common)
        .filter(pl.col("usual").is_not_null())
        .with_columns(excess=(pl.col("seconds") - pl.col("usual")) * pl.col("n"), usual=pl.col("usual") * pl.col("n"))
        .with_columns(unit=pl.format("{} {}", "axis", "group"))
        .group_by("step", "unit")
        .agg(pl.col("usual").sum(), pl.col("excess").sum(), computing=pl.lit(0.0))
    )
    return _matrices(found, "unit", recording.steps)


def hosts_known(recording: Recording) -> bool:
    """Whether every rank's host is, and there are several."""
    return recording.grid["host"].null_count() == 0 and recording.grid["host"].n_unique() > 1


def members_of(recording: Recording) -> pl.DataFrame:
    """(unit, rank): ranks of every group; of a transfer that one side recorded, both ends, which its name
    tells."""
    named = recording.meetings.select("rank", unit=pl.format("{} {}", "axis", "group")).unique()
    ends = named.filter(pl.col("unit").str.contains(r"^pp \d+>\d+$"))
    other = ends.select(rank=pl.col("unit").str.extract(r">(\d+)$").cast(named.schema["rank"]), unit="unit")
    return pl.concat([named, other]).unique()


def hosts_of_groups(recording: Recording) -> pl.DataFrame:
    """(unit, hosts, path): how many hosts a group is on, and which."""
    both = members_of(recording).join(recording.grid.select("rank", "host"), on="rank")
    return both.group_by("unit").agg(hosts=pl.col("host").n_unique(), path=pl.col("host").unique().sort().str.join(" "))


def _matrices(found: pl.DataFrame, unit: str, steps: list[int]) -> PeerComparison:
    units = found[unit].unique().sort().to_list() if found.height else []
    empty = np.full((len(units), len(steps)), np.nan)
    deviation, excess, computing = empty, empty.copy(), empty.copy()
    if found.height:
        row = np.searchsorted(np.array(units), found[unit].to_numpy())
        column = np.searchsorted(np.array(steps), found["step"].to_numpy())
        base = found["usual"].to_numpy()
        excess[row, column] = found["excess"].to_numpy()
        computing[row, column] = found["computing"].to_numpy()
        deviation[row, column] = found["excess"].to_numpy() / np.where(base > 0, base, np.inf)
    return PeerComparison(units, steps, deviation, excess, computing)

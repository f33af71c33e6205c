"""Ranks that come late to what others wait for although they compute no longer: their hosts are slow.

Recordings of others tell nothing between the ops of a rank, so a late host is seen by its arrivals alone. A
rank is late by what its start is behind the first one's and by what it is in the collective for a shorter
time than the others; the smaller of both counts, so that clocks that differ are no lateness.
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p
from typing import NamedTuple

import polars as pl

from plait.diagnose.recording import Recording

LEAST = 0.05
"""Share of a step from which on lateness is told."""
OFTEN, CHANCE = 0.75, 0.02
"""Share of steps in which it must be the same rank, and how likely that may be by chance: of two ranks one is
always the last."""
FEWEST = 3
"""Steps, or meetings where there are no steps."""
LEAST_SECONDS = 1e-3
"""Where there are no steps."""


class Late(NamedTuple):
    """seconds: of a step, or of a meeting where there are no steps, by which the rank is behind. recurs:
    share of these in which it is the last. computing: seconds of a step that it computes longer than the
    others' median."""

    rank: int
    axis: str
    seconds: float
    recurs: float
    computing: float
    in_steps: bool


def late_of(recording: Recording, *, in_steps: bool) -> Late | None:
    """The rank that is late most often; None where none is, or another each time. in_steps: whether the
    recording tells steps."""
    per = ["step"] if in_steps else ["meeting"]
    rows = recording.meetings.filter(pl.col("axis") != "pp").with_columns(length=pl.col("end") - pl.col("start"))
    members = rows.with_columns(
        behind=pl.min_horizontal(
            pl.col("start") - pl.col("start").min().over("meeting"),
            pl.col("length").max().over("meeting") - pl.col("length"),
        ),
        members=pl.len().over("meeting"),
    ).filter(pl.col("members") > 1)
    last = members.filter(pl.col("behind") == pl.col("behind").max().over("meeting"), pl.col("behind") > 0)
    late = last.group_by(*per, "rank").agg(pl.col("behind").sum(), pl.col("axis").mode().sort().first())
    of = members[per[0]].n_unique()
    if of < FEWEST or late.is_empty():
        return None
    least = pl.lit(LEAST_SECONDS)
    if in_steps:
        lengths = pl.DataFrame({"step": list(recording.seconds), "step_seconds": list(recording.seconds.values())})
        late = late.join(lengths.cast({"step": pl.Int64}), on="step", how="inner")
        least = LEAST * pl.col("step_seconds")
    most = late.filter(pl.col("behind") == pl.col("behind").max().over(per), pl.col("behind") >= least)
    found = most.group_by("rank").agg(
        n=pl.len(), seconds=pl.col("behind").median(), axis=pl.col("axis").mode().sort().first()
    )
    if found.is_empty():
        return None
    rank, n, seconds, axis = found.sort("n", "rank", descending=[True, False]).row(0)
    if n < max(FEWEST, OFTEN * of) or _by_chance(n, of, 1 / int(members["members"].max() or 1)) > CHANCE:  # type: ignore[arg-type]
        return None
    return Late(int(rank), str(axis), float(seconds), n / of, _computes_longer(recording, int(rank)), in_steps)


def _by_chance(times: int, of: int, share: float) -> float:
    """How likely it is that a rank is the last so often or more, if each is as likely to be."""
    ways = (lgamma(of + 1) - lgamma(n + 1) - lgamma(of - n + 1) for n in range(times, of + 1))
    return sum(exp(way + n * log(share) + (of - n) * log1p(-share)) for n, way in enumerate(ways, times))


def _computes_longer(recording: Recording, rank: int) -> float:
    """Seconds of a step, against the median of the others."""
    own = (
        recording.rollup.filter(pl.col("kind").cast(pl.String) == "compute")
        .group_by("step", "rank")
        .agg(pl.col("seconds").sum())
    )
    mine = own.filter(pl.col("rank") == rank)["seconds"].median()
    others = own.filter(pl.col("rank") != rank)["seconds"].median()
    return float(mine or 0.0) - float(others or 0.0)  # type: ignore[arg-type]

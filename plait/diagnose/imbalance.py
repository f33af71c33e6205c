"""Why steps are longer than they need be though no rank is slow: stages and micro-batches that are not equal.

Of the jobs that straggle, most do for these two (Lin et al., OSDI 2025: 39 % a heavy last stage, 21 % uneven
sequences, 2 % a bad worker), so they are told before anybody looks for a machine.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from plait.diagnose.recording import Recording

HEAVY = 1.1
"""Times the mean of the others, from which on a stage is heavy."""
UNEVEN = 0.1
"""Spread of micro-batches' computation, against their mean, from which on they are uneven."""
ALIKE = 0.8
"""Correlation of forward and backward from which on it is the micro-batches."""


class StageImbalance(NamedTuple):
    """Seconds that each stage's ranks compute in a step, mean; the heaviest against the mean of the
    others."""

    seconds: tuple[float, ...]
    heaviest: int
    ratio: float


class BatchImbalance(NamedTuple):
    """spread: standard deviation of a stage's computation over micro-batches of one rank's step, against the
    mean. alike: correlation of micro-batches' forward and backward, near 1 where their lengths differ and not
    the machine's speed. turns: share of steps in which the slowest rank was not the one that was so most
    often: near 1 where it is another one in every step. longer: by how much a step's slowest rank computes
    longer than the mean of its stage."""

    spread: float
    alike: float
    turns: float
    longer: float


def stages_of(recording: Recording) -> StageImbalance | None:
    """None where there is one stage only."""
    own = _computing(recording).group_by("pp").agg(pl.col("seconds").mean()).sort("pp")
    seconds = own["seconds"].to_list()
    if len(seconds) < 2:
        return None
    heaviest = max(range(len(seconds)), key=lambda stage: seconds[stage])
    others = [value for stage, value in enumerate(seconds) if stage != heaviest]
    mean = sum(others) / len(others)
    return StageImbalance(tuple(seconds), heaviest, seconds[heaviest] / mean if mean > 0 else 1.0)


def batches_of(recording: Recording) -> BatchImbalance | None:
    """None without spans of several micro-batches, or with nobody to compare."""
    ops = recording.spans.filter(pl.col("kind") == "compute", pl.col("slice") >= 0, pl.col("step") > 0)
    length = pl.col("end") - pl.col("start")
    of = ["step", "rank", "direction"]
    each = ops.group_by(*of, "layer", "slice").agg(length.sum().alias("seconds"))
    mean, spread = pl.col("seconds").mean().over(*of, "layer"), pl.col("seconds").std().over(*of, "layer")
    each = each.with_columns(relative=pl.col("seconds") / mean, spread=spread / mean)
    forward, backward = (each.filter(pl.col("direction") == way) for way in ("forward", "backward"))
    both = forward.join(backward, on=["step", "rank", "layer", "slice"])
    own = _computing(recording)
    longer = pl.col("seconds") / pl.col("seconds").mean().over("step", "pp") - 1
    own = own.filter(pl.len().over("step", "pp") > 1).with_columns(longer=longer)
    if both.height < 3 or own.is_empty():
        return None
    slowest = own.sort("longer", descending=True).group_by("step").first()
    most = int(slowest["rank"].value_counts(sort=True)["count"][0])
    alike = both.select(pl.corr("relative", "relative_right")).item()
    varies, by = each["spread"].median(), slowest["longer"].median()
    known = 0.0 if alike != alike else float(alike)  # NaN where they do not differ
    return BatchImbalance(float(varies or 0.0), known, 1 - most / slowest.height, float(by))  # type: ignore[arg-type]


def _computing(recording: Recording) -> pl.DataFrame:
    """(step, rank, pp, seconds) of computation, without a run's first step."""
    rollup = recording.rollup.filter(pl.col("kind") == "compute", pl.col("step") > 0)
    own = rollup.group_by("step", "rank").agg(pl.col("seconds").sum())
    return own.join(recording.grid.select("rank", "pp"), on="rank")

"""Find why steps are longer than necessary although no rank is slow: imbalanced stages or
micro-batches, late ranks, a slow network.

Imbalance explains most straggling jobs (Lin et al., OSDI 2025: 39 % a heavy last stage, 21 % uneven
sequences, 2 % a bad worker), so it is reported before any machine is suspected.

Imported recordings show nothing between a rank's ops, so only arrivals reveal a late host. A rank's
lateness is the smaller of two values, so that clock differences do not count: its start behind the
first start, and how much shorter it is in the collective than the others.

A slow network that all ranks share has no comparable group, so no host can be named. The transfers'
time, once all ranks have arrived, is compared with the planned links and with other steps of the
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, lgamma, log, log1p
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.measured.recording import Recording
from plait.diagnose.verdicts.outliers import FEWEST, RECURS, WINDOW
from plait.diagnose.verdicts.peers import hosts_known, hosts_of_groups
from plait.diagnose.verdicts.stragglers import Straggler, error_of_median

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

HEAVY = 1.1
"""Multiple of the other stages' mean computation from which on a stage is heavy."""
UNEVEN = 0.1
"""Relative spread of the micro-batches' computation from which on they are uneven."""
ALIKE = 0.8
"""Correlation of forward and backward times from which on the micro-batches explain the spread."""
LEAST = 0.05
"""Least lateness to be reported, as a share of a step."""
OFTEN, CHANCE = 0.75, 0.02
"""OFTEN: least share of steps in which the same rank is last. CHANCE: largest probability of that
by chance, since one of two ranks is always last."""
FEWEST_STEPS = 3
"""Least number of steps for a finding, or of meetings in a recording without steps."""
LEAST_SECONDS = 1e-3
"""Least lateness in seconds in a recording without steps."""


class StageImbalance(NamedTuple):
    """Mean seconds of computation per rank and step, by stage. ratio: the heaviest stage over the
    mean of the other stages."""

    seconds: tuple[float, ...]
    heaviest: int
    ratio: float


class BatchImbalance(NamedTuple):
    """The imbalance of micro-batches. spread: standard deviation of a stage's computation over the
    micro-batches of one rank's step, relative to the mean. alike: correlation of the micro-batches'
    forward and backward times; near 1 if their lengths differ rather than the machine's speed.

    turns: share of steps in which the slowest rank is not the most frequent slowest rank; near 1 if
    it changes every step. longer: relative excess of a step's slowest rank over its stage's mean
    computation.
    """

    spread: float
    alike: float
    turns: float
    longer: float


def stages_of(recording: Recording) -> StageImbalance | None:
    """Return mean seconds of computation by pp rank, and their imbalance; None with one pp rank."""
    own = _computing(recording).group_by("pp").agg(pl.mean("seconds")).sort("pp")
    seconds = own["seconds"].to_list()
    if len(seconds) < 2:
        return None
    heaviest = max(range(len(seconds)), key=lambda stage: seconds[stage])
    others = [value for stage, value in enumerate(seconds) if stage != heaviest]
    mean = sum(others) / len(others)
    return StageImbalance(tuple(seconds), heaviest, seconds[heaviest] / mean if mean > 0 else 1.0)


def batches_of(recording: Recording) -> BatchImbalance | None:
    """Return the imbalance of micro-batches; None without spans of several micro-batches, or
    without ranks to compare."""
    ops = recording.spans.filter(pl.col("kind") == "compute", pl.col("slice") >= 0, pl.col("step") > 0)
    length = pl.col("end") - pl.col("start")
    of = ["step", "rank", "direction"]
    each = ops.group_by(*of, "layer", "slice").agg(seconds=length.sum())
    mean, spread = pl.mean("seconds").over(*of, "layer"), pl.col("seconds").std().over(*of, "layer")
    each = each.with_columns(relative=pl.col("seconds") / mean, spread=spread / mean)
    forward, backward = (each.filter(direction=way) for way in ("forward", "backward"))
    both = forward.join(backward, on=["step", "rank", "layer", "slice"])
    own = _computing(recording)
    longer = pl.col("seconds") / pl.mean("seconds").over("step", "pp") - 1
    own = own.filter(pl.len().over("step", "pp") > 1).with_columns(longer=longer)
    if both.height < 3 or own.is_empty():
        return None
    slowest = own.sort("longer", descending=True).group_by("step").first()
    most = int(slowest["rank"].value_counts(sort=True)["count"][0])
    alike = both.select(pl.corr("relative", "relative_right")).item()
    varies, by = each["spread"].median(), slowest["longer"].median()
    known = 0.0 if alike != alike else float(alike)  # NaN if they do not vary
    return BatchImbalance(float(varies or 0.0), known, 1 - most / slowest.height, float(by))  # type: ignore[arg-type]


def _computing(recording: Recording) -> pl.DataFrame:
    """Return the table (step, rank, pp, seconds) of computation, without a run's first step."""
    rollup = recording.rollup.filter(pl.col("step") > 0, kind="compute")
    own = rollup.group_by("step", "rank").agg(pl.sum("seconds"))
    return own.join(recording.grid.select("rank", "pp"), on="rank")


class Late(NamedTuple):
    """A rank that arrives late at collectives. axis: of these collectives. seconds: lateness per
    step, or per meeting in a recording without steps. recurs: share of steps or meetings in which
    the rank is last. computing: excess of its computation over the other ranks' median, in seconds
    per step. in_steps: True if the recording has steps."""

    rank: int
    axis: str
    seconds: float
    recurs: float
    computing: float
    in_steps: bool


def late_of(recording: Recording, *, in_steps: bool) -> Late | None:
    """Return the rank that is late most often; None if no rank is late, or a different one each
    time. in_steps: True if the recording has steps."""
    per = ["step"] if in_steps else ["meeting"]
    rows = recording.meetings.filter(pl.col("axis") != "pp").with_columns(length=pl.col("end") - pl.col("start"))
    members = rows.with_columns(
        behind=pl.min_horizontal(
            pl.col("start") - pl.min("start").over("meeting"),
            pl.max("length").over("meeting") - pl.col("length"),
        ),
        members=pl.len().over("meeting"),
    ).filter(pl.col("members") > 1)
    last = members.filter(pl.col("behind") == pl.max("behind").over("meeting"), pl.col("behind") > 0)
    late = last.group_by(*per, "rank").agg(pl.sum("behind"), pl.col("axis").mode().sort().first())
    of = members[per[0]].n_unique()
    if of < FEWEST_STEPS or late.is_empty():
        return None
    least = pl.lit(LEAST_SECONDS)
    if in_steps:
        lengths = pl.DataFrame({"step": list(recording.seconds), "step_seconds": list(recording.seconds.values())})
        late = late.join(lengths.cast({"step": pl.Int64}), on="step", how="inner")
        least = LEAST * pl.col("step_seconds")
    most = late.filter(pl.col("behind") == pl.max("behind").over(per), pl.col("behind") >= least)
    found = most.group_by("rank").agg(
        n=pl.len(), seconds=pl.median("behind"), axis=pl.col("axis").mode().sort().first()
    )
    if found.is_empty():
        return None
    rank, n, seconds, axis = found.sort("n", "rank", descending=[True, False]).row(0)
    if n < max(FEWEST_STEPS, OFTEN * of) or _by_chance(n, of, 1 / int(members["members"].max() or 1)) > CHANCE:  # type: ignore[arg-type]
        return None
    return Late(int(rank), str(axis), float(seconds), n / of, _computes_longer(recording, int(rank)), in_steps)


def _by_chance(times: int, of: int, share: float) -> float:
    """Return the probability that a rank is last at least ``times`` of ``of`` times, if each time
    has the probability ``share``."""
    ways = (lgamma(of + 1) - lgamma(n + 1) - lgamma(of - n + 1) for n in range(times, of + 1))
    return sum(exp(way + n * log(share) + (of - n) * log1p(-share)) for n, way in enumerate(ways, times))


def _computes_longer(recording: Recording, rank: int) -> float:
    """Return the rank's seconds of computation per step beyond the median of the other ranks."""
    own = (
        recording.rollup.filter(pl.col("kind").cast(pl.String) == "compute")
        .group_by("step", "rank")
        .agg(pl.sum("seconds"))
    )
    mine = own.filter(rank=rank)["seconds"].median()
    others = own.filter(pl.col("rank") != rank)["seconds"].median()
    return float(mine or 0.0) - float(others or 0.0)  # type: ignore[arg-type]


TIMES = {"plan": 2.0, "other steps": 1.5}
"""Least ratio of slow transfers to what they are compared with, the plan or other steps: no library
reaches a link's full rate."""
COST = 0.1
"""Least cost of a slow network as a share of the step."""
ALLOWED = 2e-3
"""Seconds that every transfer may take besides the time of its bytes."""
CLEAR = 6.0
"""Least number of standard errors of a change within a run."""


class SlowNetwork(NamedTuple):
    """A slow network. axis: of the transfers between ``hosts``. since, until: steps. against: the
    reference. seconds: of a step in which transfers are under way after all ranks have arrived.
    usual: the planned seconds, or those of other steps. times: ratio to ``usual``, corrected for
    longer computation in the same steps."""

    axis: str
    hosts: tuple[str, ...]
    since: int
    until: int
    against: Literal["plan", "other steps"]
    seconds: float
    usual: float
    times: float

    @property
    def excess(self) -> float:
        """Seconds of a step that transfers take beyond the usual."""
        return self.seconds - self.usual


class _Transfers(NamedTuple):
    """Seconds of an axis by step: of its transfers, of the planned transfers, of computation, and
    of the whole step."""

    axis: str
    steps: list[int]
    seconds: Floats
    planned: Floats
    work: Floats
    length: Floats


def slow_network(
    recording: Recording, rate: float | None = None, named: Sequence[Straggler] = ()
) -> SlowNetwork | None:
    """Return the network that costs most; None if no network is slow, or if ranks are not known to
    be on several hosts.

    rate: planned bytes per second of a rank across its host's link; None if unplanned. named:
    stragglers; slow transfers that a straggler's own slowness explains are not reported.
    """
    if not hosts_known(recording):
        return None
    paths = hosts_of_groups(recording).filter(pl.col("hosts") > 1)
    met = recording.met.filter(pl.col("transfer").is_not_null()).with_columns(peer=pl.format("{} {}", "axis", "group"))
    met = met.join(paths, on="peer")
    found: list[SlowNetwork] = []
    for one in _by_axis(recording, met, rate):
        hosts = tuple(sorted({*met.filter(axis=one.axis)["path"].str.split(" ").explode().to_list()}))
        found += [slow for slow in (_beyond_plan(one, hosts), _beyond_other_steps(one, hosts)) if slow]
    found = [one for one in found if not any(_is_for(one, slow) for slow in named)]
    return max(found, key=lambda one: one.excess, default=None)


def _by_axis(recording: Recording, met: pl.DataFrame, rate: float | None) -> list[_Transfers]:
    """Return the transfers of each axis, in steps in which all are known. Of equal transfers the
    faster ones count, in the fastest group."""
    cell = ["axis", "step", "site", "direction", "bytes"]
    each = (
        met.group_by(*cell, "group").agg(seconds=pl.col("transfer").quantile(0.25, "lower"), n=pl.len())
        .group_by(cell).agg(pl.min("seconds"), pl.max("n"))
        .with_columns(planned=pl.col("n") * (pl.col("bytes") / rate + ALLOWED) if rate else pl.lit(0.0))
        .group_by("axis", "step")
        .agg(seconds=(pl.col("seconds") * pl.col("n")).sum(), planned=pl.sum("planned"), cells=pl.len())
        .filter(pl.col("cells") == pl.col("cells").mode().max().over("axis"), pl.col("step") > 0)
    )  # fmt: skip
    computes = recording.rollup.filter(pl.col("kind").cast(pl.String) == "compute").group_by("step", "rank").agg(
        pl.sum("seconds")
    )  # fmt: skip
    work = computes.group_by("step").agg(work=pl.mean("seconds"))
    lengths = pl.DataFrame({"step": list(recording.seconds), "length": list(recording.seconds.values())})
    each = each.join(work, on="step").join(lengths.cast({"step": pl.Int64}), on="step").sort("step")
    return [
        _Transfers(str(axis), own["step"].to_list(), *(own[name].to_numpy() for name in _Transfers._fields[2:]))
        for (axis,), own in each.partition_by("axis", as_dict=True).items()
        if own.height >= FEWEST
    ]


def _beyond_plan(one: _Transfers, hosts: tuple[str, ...]) -> SlowNetwork | None:
    """Return the slow network if the transfers of all steps take longer than planned (``TIMES``),
    else None."""
    seconds, planned = float(np.median(one.seconds)), float(np.median(one.planned))
    if not planned > 0 or seconds < TIMES["plan"] * planned or seconds - planned < COST * float(np.median(one.length)):
        return None
    if float((one.seconds >= TIMES["plan"] * one.planned).mean()) < RECURS:
        return None
    return SlowNetwork(one.axis, hosts, one.steps[0], one.steps[-1], "plan", seconds, planned, seconds / planned)


def _beyond_other_steps(one: _Transfers, hosts: tuple[str, ...]) -> SlowNetwork | None:
    """Return the slow network if a stretch of steps has much longer transfers than the steps before
    and after, else None."""
    logs = np.log(np.maximum(one.seconds, 1e-9))
    size = min(WINDOW, max(FEWEST, len(logs) // 3))
    if len(logs) < 2 * FEWEST:
        return None
    levels = np.median(np.lib.stride_tricks.sliding_window_view(logs, size), axis=1)
    half = float(levels.max() - levels.min()) / 2
    first, last = _longest(np.clip(logs - levels.min() - half, -half, half))
    within = np.zeros(len(logs), bool)
    within[first : last + 1] = True
    if min(within.sum(), (~within).sum()) < FEWEST:
        return None
    grew = float(np.median(logs[within]) - np.median(logs[~within]))
    error = float(np.hypot(error_of_median(logs[within]), error_of_median(logs[~within])))
    often = float((logs[within] >= np.median(logs[~within]) + np.log(TIMES["other steps"]) / 2).mean())
    works = float(np.median(one.work[within]) / max(1e-9, np.median(one.work[~within])))
    seconds, usual = float(np.median(one.seconds[within])), float(np.median(one.seconds[~within]))
    times = seconds / max(1e-9, usual * max(1.0, works))
    costs = seconds - usual >= COST * float(np.median(one.length[within]))
    if times < TIMES["other steps"] or grew < CLEAR * error or often < RECURS or not costs:
        return None
    return SlowNetwork(one.axis, hosts, one.steps[first], one.steps[last], "other steps", seconds, usual, times)


def _is_for(one: SlowNetwork, slow: Straggler) -> bool:
    """True if a straggler explains the slow transfers: a rank moves its bytes as slowly as it
    works."""
    at_once = slow.since <= one.until and one.since <= slow.until
    return at_once and one.times < TIMES[one.against] * (1 + slow.effect)


def _longest(above: Floats) -> tuple[int, int]:
    """Return the first and the last index of the stretch of ``above`` with the largest sum
    (Kadane)."""
    sums = np.concatenate([[0.0], np.cumsum(above)])
    least = np.minimum.accumulate(sums)
    last = int(np.argmax(sums[1:] - least[:-1]))
    return int(np.argmin(sums[: last + 1])), last

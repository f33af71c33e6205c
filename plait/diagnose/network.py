"""A network that is slow for all who share it: where no group has others like it, no host can be told apart.

What transfers take once all have come is held against the links that the plan was made for, and against other
steps of the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.outliers import FEWEST, RECURS, WINDOW
from plait.diagnose.peers import hosts_known, hosts_of_groups
from plait.diagnose.recording import Recording
from plait.diagnose.stragglers import Straggler, error_of_median

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

TIMES = {"plan": 2.0, "other steps": 1.5}
"""By how much longer transfers must take: no library reaches all of a link's rate."""
COST = 0.1
"""Share of a step that it must cost."""
ALLOWED = 2e-3
"""Seconds of every transfer beside those of its bytes."""
CLEAR = 6.0
"""Standard errors that a change within a run must be worth."""


class SlowNetwork(NamedTuple):
    """axis: whose transfers between ``hosts``. since, until: steps. against: what they are held against.
    seconds: of a step, in which transfers are under way once all have come; usual: what was planned, or what
    other steps took; times: as long as ``usual``, without what computation in the same steps is longer."""

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
        """Seconds of a step beyond the usual."""
        return self.seconds - self.usual


class _Transfers(NamedTuple):
    """Of an axis by step, seconds: of its transfers, of the plan's, of computation, of the whole step."""

    axis: str
    steps: list[int]
    seconds: Floats
    planned: Floats
    work: Floats
    length: Floats


def slow_network(
    recording: Recording, rate: float | None = None, named: Sequence[Straggler] = ()
) -> SlowNetwork | None:
    """The network that costs most; None where none does, or where ranks are not known to be on several hosts.

    rate: bytes per second that the plan counts on for a rank across its host's link; None if it does not.
    named: who is slow; transfers that are longer by no more than they are longer for their sake.
    """
    if not hosts_known(recording):
        return None
    paths = hosts_of_groups(recording).filter(pl.col("hosts") > 1)
    met = recording.met.filter(pl.col("transfer").is_not_null()).with_columns(unit=pl.format("{} {}", "axis", "group"))
    met = met.join(paths, on="unit")
    found: list[SlowNetwork] = []
    for one in _by_axis(recording, met, rate):
        hosts = tuple(sorted({*met.filter(axis=one.axis)["path"].str.split(" ").explode().to_list()}))
        found += [slow for slow in (_beyond_plan(one, hosts), _beyond_other_steps(one, hosts)) if slow]
    found = [one for one in found if not any(_is_for(one, slow) for slow in named)]
    return max(found, key=lambda one: one.excess, default=None)


def _by_axis(recording: Recording, met: pl.DataFrame, rate: float | None) -> list[_Transfers]:
    """Of steps in which an axis' transfers are all known: of equal ones the faster, in the fastest group."""
    cell = ["axis", "step", "site", "direction", "bytes"]
    each = (
        met.group_by(*cell, "group").agg(seconds=pl.col("transfer").quantile(0.25, "lower"), n=pl.len())
        .group_by(cell).agg(pl.col("seconds").min(), pl.col("n").max())
        .with_columns(planned=pl.col("n") * (pl.col("bytes") / rate + ALLOWED) if rate else pl.lit(0.0))
        .group_by("axis", "step")
        .agg(seconds=(pl.col("seconds") * pl.col("n")).sum(), planned=pl.col("planned").sum(), cells=pl.len())
        .filter(pl.col("cells") == pl.col("cells").mode().max().over("axis"), pl.col("step") > 0)
    )  # fmt: skip
    computes = recording.rollup.filter(pl.col("kind").cast(pl.String) == "compute").group_by("step", "rank").agg(
        pl.col("seconds").sum()
    )  # fmt: skip
    work = computes.group_by("step").agg(work=pl.col("seconds").mean())
    lengths = pl.DataFrame({"step": list(recording.seconds), "length": list(recording.seconds.values())})
    each = each.join(work, on="step").join(lengths.cast({"step": pl.Int64}), on="step").sort("step")
    return [
        _Transfers(str(axis), own["step"].to_list(), *(own[name].to_numpy() for name in _Transfers._fields[2:]))
        for (axis,), own in each.partition_by("axis", as_dict=True).items()
        if own.height >= FEWEST
    ]


def _beyond_plan(one: _Transfers, hosts: tuple[str, ...]) -> SlowNetwork | None:
    """Held against the plan, over all steps."""
    seconds, planned = float(np.median(one.seconds)), float(np.median(one.planned))
    if not planned > 0 or seconds < TIMES["plan"] * planned or seconds - planned < COST * float(np.median(one.length)):
        return None
    if float((one.seconds >= TIMES["plan"] * one.planned).mean()) < RECURS:
        return None
    return SlowNetwork(one.axis, hosts, one.steps[0], one.steps[-1], "plan", seconds, planned, seconds / planned)


def _beyond_other_steps(one: _Transfers, hosts: tuple[str, ...]) -> SlowNetwork | None:
    """Held against the steps before and after those in which transfers take longest."""
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
    """True where a rank that moves its bytes as slowly as it works is reason enough."""
    at_once = slow.since <= one.until and one.since <= slow.until
    return at_once and one.times < TIMES[one.against] * (1 + slow.effect)


def _longest(above: Floats) -> tuple[int, int]:
    """First and last place of the stretch whose sum is the largest (Kadane)."""
    sums = np.concatenate([[0.0], np.cumsum(above)])
    least = np.minimum.accumulate(sums)
    last = int(np.argmax(sums[1:] - least[:-1]))
    return int(np.argmin(sums[: last + 1])), last

"""What stragglers cost: the recorded steps again, with some ops as long as those of the others.

The measures are those of the what-if analysis (Lin et al., OSDI 2025, arXiv 2505.05713). S: a step as it was,
over one in which every computation takes the mean of its type and every transfer the median. S_w of a worker:
the smaller one of what its data-parallel rank and its stage alone make of the ideal step. M_W, M_S: the share
of what is lost that comes back if the worst 3 % of workers (at least one), or the last stage, were ideal. It
is above 1 where the others' own ideal is longer than what they took (published: up to 1.219).

The ideal step can be longer than the recorded one, and S below 1: by the published definition a transfer
takes the median, and a median is above the mean where most transfers are late and a few are quick. Nothing is
lost to a rank or stage then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.recording import AFTER, Recording
from plait.diagnose.replay import TOLERANCE, graph_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from plait.diagnose.replay import EventGraph

    Floats = NDArray[np.float64]

SPANS = 400_000
"""That are replayed at most, the last ones: the memory of a replay is some hundred bytes for each."""
SCENARIOS = 64
"""Data-parallel ranks and stages of which S_w is found; of more, the worst is taken from own work alone."""
WORST = 0.03
"""Share of workers that M_W is about."""


class Worker(NamedTuple):
    """Ranks at one place of the pipeline and of one data-parallel rank. slowdown: S_w."""

    pp: int
    dp: int
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Seconds of a step, mean of ``steps`` steps: recorded, replayed as recorded, and ideal. worst: workers
    by S_w, the worst first. m_w, m_s: None where nothing is lost, or where there is one worker, one stage.
    few: of how many workers m_w is.
    costs: of each group of ranks that was asked for, seconds by which a step would be shorter if they were as
    the others."""

    steps: int
    recorded: float
    replayed: float
    ideal: float
    worst: tuple[Worker, ...]
    m_w: float | None
    few: int
    m_s: float | None
    costs: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        """S."""
        return self.replayed / self.ideal if self.ideal > 0 else 1.0


def what_if(recording: Recording, suspects: Sequence[Sequence[int]] = (), since: int | None = None) -> WhatIf | None:
    """suspects: groups of ranks whose cost is wanted. since: a step before which they were as the others.
    None where no spans were kept."""
    spans = _last(recording.spans, since)
    if spans.is_empty() or not spans["kind"].is_in(["compute"]).any():
        return None
    if recording.blocking:
        spans = spans.filter(pl.col("kind").is_in(["compute"]) | pl.col("meeting").is_not_null())
    waits = pl.col("kind").is_in(["wait", "idle"])
    spans = spans.join(recording.grid.select("rank", "pp", "dp"), on="rank", maintain_order="left")
    graph = graph_of(
        spans.with_columns(waits=waits),
        clocks_agree=recording.clocks_agree,
        tolerance=TOLERANCE if recording.blocking else 0.0,
    )
    return _Replays(recording, spans, graph).answer(suspects)


def _last(spans: pl.DataFrame, since: int | None) -> pl.DataFrame:
    """Of as many of the last steps as can be replayed, without the first of a run, which is like no other,
    and without what comes after a step."""
    spans = spans.filter(~pl.col("kind").is_in(AFTER))
    counts = spans.group_by("step").len().sort("step", descending=True)
    counts = counts.filter((pl.col("step") > 0) & (pl.col("step") >= (since or 0)))
    steps = counts.filter(pl.col("len").cum_sum() <= max(SPANS, int(counts["len"].max() or 0)))["step"]  # type: ignore[arg-type]
    return spans.filter(pl.col("step").is_in(steps.to_list()))


class _Replays:
    """One graph and several durations for it."""

    def __init__(self, recording: Recording, spans: pl.DataFrame, graph: EventGraph) -> None:
        self.recording, self.spans, self.graph = recording, spans, graph
        self.seen = graph.seconds + (0.0 if recording.blocking else graph.lead)
        self.computes = self._of_events(pl.col("kind") == "compute").astype(bool)
        self.pp, self.dp = self._of_events(pl.col("pp")), self._of_events(pl.col("dp"))
        self.ideal = self._ideal()

    def answer(self, suspects: Sequence[Sequence[int]]) -> WhatIf:
        """All that is asked."""
        replayed, ideal = self._mean(self.seen), self._mean(self.ideal)
        worst = self._workers(ideal)
        lost = replayed - ideal
        fixed = worst[: math.ceil(WORST * len(worst))]
        of_worst = np.zeros(len(self.seen), bool)
        for worker in fixed:
            of_worst |= (self.pp == worker.pp) & (self.dp == worker.dp)
        last = self.pp == self.pp.max()
        m_w, m_s = (
            (replayed - self._mean(np.where(some & self.computes, self.ideal, self.seen))) / lost if lost > 0 else None
            for some in (of_worst, last)
        )
        costs = tuple(replayed - self._mean(self._as_the_others(ranks)) for ranks in suspects)
        seen = self.spans.group_by("step").agg(seconds=pl.col("end").max() - pl.col("start").min())
        lengths: Mapping[int, float] = dict(seen.iter_rows()) | (
            {} if self.recording.clocks_agree else dict(self.recording.seconds)
        )
        recorded = float(np.mean([lengths[step] for step in self.graph.steps.tolist()]))
        return WhatIf(
            steps=len(self.graph.steps), recorded=recorded, replayed=replayed, ideal=ideal, worst=worst,
            m_w=m_w if len(worst) > 1 else None, few=len(fixed), m_s=m_s if self.pp.max() > 0 else None, costs=costs,
        )  # fmt: skip

    def _mean(self, seconds: Floats) -> float:
        return float(self.graph.replay(seconds, gaps=not self.recording.blocking).mean())

    def _ideal(self) -> Floats:
        """Every computation as long as the mean of its type, over all ranks and stages; every transfer as
        the median. What passes before an op stays."""
        kind, site = self._of_events(pl.struct("kind", "axis", "site", "direction").rank("dense")), self.graph.seconds
        types, of_type = np.unique(kind, return_inverse=True)
        found = site.copy()
        waits = self._of_events(pl.col("kind").is_in(["wait", "idle"])).astype(bool)
        for number in range(len(types)):
            own = (of_type == number) & ~waits
            if own.any():
                found[own] = site[own].mean() if self.computes[own][0] else np.median(site[own])
        return found + (0.0 if self.recording.blocking else self.graph.lead)

    def _workers(self, ideal: float) -> tuple[Worker, ...]:
        """By S_w: what remains of the slowdown if all but one data-parallel rank, or stage, were ideal."""
        replicas, stages = np.unique(self.dp), np.unique(self.pp)
        if len(replicas) + len(stages) > SCENARIOS or ideal <= 0:
            return ()
        alone = [
            {int(at): self._mean(np.where((of == at) & self.computes, self.seen, self.ideal)) / ideal for at in some}
            for of, some in ((self.dp, replicas), (self.pp, stages))
        ]
        found = [Worker(pp, dp, min(alone[0][dp], alone[1][pp])) for pp in alone[1] for dp in alone[0]]
        own = {(pp, dp): self._own(pp, dp) for pp, dp, _ in found}
        return tuple(sorted(found, key=lambda one: (-one.slowdown, -own[one.pp, one.dp])))

    def _own(self, pp: int, dp: int) -> float:
        return float(self.seen[(self.pp == pp) & (self.dp == dp) & self.computes].sum())

    def _as_the_others(self, ranks: Sequence[int]) -> Floats:
        """Own work of ``ranks`` as long as the others' of their stage at the same op: the median of what is
        not theirs."""
        keys = ["kind", "site", "direction", "pp"]
        lead = pl.Series("lead", self._of_ops(self.graph.lead))
        own = pl.Series("own", self._of_ops(self.graph.seconds))
        ops = self.spans.select("rank", *keys).with_columns(lead, own).with_row_index("row")
        others = ops.filter(~pl.col("rank").is_in(list(ranks))).group_by(keys)
        usual = others.agg(pl.col("own").mean().alias("usual_own"), pl.col("lead").mean().alias("usual_lead"))
        mine = ops.filter(pl.col("rank").is_in(list(ranks)) & pl.col("kind").is_in(["compute", "data", "host"]))
        totals = mine.group_by("rank", *keys).agg(
            pl.col("own").mean().alias("mean_own"), pl.col("lead").mean().alias("mean_lead")
        )
        mine = mine.join(usual, on=keys).join(totals, on=["rank", *keys])
        found = self.seen.copy()
        scaled = mine["own"] * (mine["usual_own"] / mine["mean_own"]).clip(upper_bound=1.0).fill_nan(1.0)
        gap = mine["lead"] * (mine["usual_lead"] / mine["mean_lead"]).clip(upper_bound=1.0).fill_nan(1.0)
        total = scaled if self.recording.blocking else scaled + gap
        found[self.graph.event[mine["row"].to_numpy()]] = total.to_numpy()
        return found

    def _of_ops(self, of_events: Floats) -> Floats:
        return of_events[self.graph.event]

    def _of_events(self, what: pl.Expr) -> NDArray[np.int64]:
        """A number of every event: of the last of its ops, where they differ."""
        found = np.zeros(len(self.graph.seconds), np.int64)
        found[self.graph.event] = self.spans.select(what.cast(pl.Int64)).to_series().to_numpy()
        return found

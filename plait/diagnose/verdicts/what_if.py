"""Compute the cost of stragglers: replay the recorded steps with some ops as long as those of other
ranks.

The measures are those of the what-if analysis (Lin et al., OSDI 2025, arXiv 2505.05713). S: the
recorded step over the ideal step, in which every computation takes the mean of its type and every
transfer the median. S_w of a worker: the smaller slowdown of the ideal step caused by its
data-parallel rank or its stage alone. M_W, M_S: the share of the loss that is recovered if the
worst 3 % of workers (at least one), or the last stage, were ideal; above 1 if the other workers'
ideal is longer than their recording (published: up to 1.219).

S may be below 1: by the published definition a transfer takes the median, which exceeds the mean if
most transfers are late and a few are quick. Then no loss is attributed to a rank or stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.measured.recording import AFTER, Recording
from plait.diagnose.verdicts.replay import TOLERANCE, graph_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from plait.diagnose.verdicts.replay import EventGraph

    Floats = NDArray[np.float64]

SPANS = 400_000
"""The largest number of spans that are replayed, the last ones: a replay takes some hundred bytes
of memory for each."""
SCENARIOS = 64
"""The largest number of data-parallel ranks and stages for which the slowdown S_w of a worker is
computed; with more, no workers are ranked."""
WORST = 0.03
"""Share of workers that are the worst ones in M_W."""


class Worker(NamedTuple):
    """The ranks of one pipeline stage and one data-parallel rank. slowdown: S_w."""

    pp: int
    dp: int
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Seconds of a step, mean over ``steps`` steps: recorded, replayed as recorded, and ideal.
    worst: workers by S_w, the worst first. m_w, m_s: M_W and M_S; None if nothing is lost, or with
    one worker, one stage. few: number of workers in M_W.

    costs: for each requested group of ranks, the seconds by which a step would be shorter if they
    were like their peers.
    """

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
        """The slowdown S of the replayed over the ideal step."""
        return self.replayed / self.ideal if self.ideal > 0 else 1.0


def what_if(recording: Recording, suspects: Sequence[Sequence[int]] = (), since: int | None = None) -> WhatIf | None:
    """Return the cost of stragglers; None if no spans were kept. suspects: groups of ranks whose
    cost is computed. since: first step at which they were slow."""
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
    """Return the spans of as many last steps as can be replayed (``SPANS``), from step ``since``
    on. A run's first step, which is atypical, and kinds that follow a step are left out."""
    spans = spans.filter(~pl.col("kind").is_in(AFTER))
    counts = spans.group_by("step").len().sort("step", descending=True)
    counts = counts.filter((pl.col("step") > 0) & (pl.col("step") >= (since or 0)))
    steps = counts.filter(pl.col("len").cum_sum() <= max(SPANS, int(counts["len"].max() or 0)))["step"]  # type: ignore[arg-type]
    return spans.filter(pl.col("step").is_in(steps.to_list()))


class _Replays:
    """Replays of the recorded steps with several sets of durations."""

    def __init__(self, recording: Recording, spans: pl.DataFrame, graph: EventGraph) -> None:
        self.recording, self.spans, self.graph = recording, spans, graph
        self.lead = graph.lead * (not recording.blocking)
        self.seen = graph.seconds + self.lead
        self.computes = self._of_events(pl.col("kind") == "compute").astype(bool)
        self.pp, self.dp = self._of_events(pl.col("pp")), self._of_events(pl.col("dp"))
        self.ideal = self._ideal()

    def answer(self, suspects: Sequence[Sequence[int]]) -> WhatIf:
        """Return all measures and the cost of each group of suspects."""
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
        costs = tuple(replayed - self._mean(self._as_peers(ranks)) for ranks in suspects)
        seen = self.spans.group_by("step").agg(seconds=pl.max("end") - pl.min("start"))
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
        """Return ideal durations of events in seconds: every computation takes the mean of its
        type, over all ranks and stages, and every transfer the median. The time before an op stays.
        """
        kind, site = self._of_events(pl.struct("kind", "axis", "site", "direction").rank("dense")), self.graph.seconds
        types, of_type = np.unique(kind, return_inverse=True)
        found = site.copy()
        waits = self._of_events(pl.col("kind").is_in(["wait", "idle"])).astype(bool)
        for number in range(len(types)):
            own = (of_type == number) & ~waits
            if own.any():
                found[own] = site[own].mean() if self.computes[own][0] else np.median(site[own])
        return found + self.lead

    def _workers(self, ideal: float) -> tuple[Worker, ...]:
        """Return the workers by their slowdown S_w, the worst first: what remains of the ideal
        step's slowdown if all but one data-parallel rank, or stage, were ideal."""
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

    def _as_peers(self, ranks: Sequence[int]) -> Floats:
        """Return durations of events in seconds in which the own work of ``ranks`` takes as long as
        that of the other ranks of their stage at the same op: scaled to the mean of the others,
        never longer."""
        keys = ["kind", "site", "direction", "pp"]
        lead = pl.Series("lead", self._of_ops(self.lead))
        own = pl.Series("own", self._of_ops(self.graph.seconds))
        ops = self.spans.select("rank", *keys).with_columns(lead, own).with_row_index("row")
        others = ops.filter(~pl.col("rank").is_in(list(ranks))).group_by(keys)
        usual = others.agg(usual_own=pl.mean("own"), usual_lead=pl.mean("lead"))
        mine = ops.filter(pl.col("rank").is_in(list(ranks)) & pl.col("kind").is_in(["compute", "data", "host"]))
        totals = mine.group_by("rank", *keys).agg(mean_own=pl.mean("own"), mean_lead=pl.mean("lead"))
        mine = mine.join(usual, on=keys).join(totals, on=["rank", *keys])
        found = self.seen.copy()
        scaled = mine["own"] * (mine["usual_own"] / mine["mean_own"]).clip(upper_bound=1.0).fill_nan(1.0)
        gap = mine["lead"] * (mine["usual_lead"] / mine["mean_lead"]).clip(upper_bound=1.0).fill_nan(1.0)
        found[self.graph.event[mine["row"].to_numpy()]] = (scaled + gap).to_numpy()
        return found

    def _of_ops(self, of_events: Floats) -> Floats:
        return of_events[self.graph.event]

    def _of_events(self, what: pl.Expr) -> NDArray[np.int64]:
        """Return the value of ``what`` for every event; the last op's if its ops differ."""
        found = np.zeros(len(self.graph.seconds), np.int64)
        found[self.graph.event] = self.spans.select(what.cast(pl.Int64)).to_series().to_numpy()
        return found

"""Summary of a replay: its numbers, for tables and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from plait.place.queue.replay import ReplayOutcome
from plait.place.queue.reservation import KeptZone, Planned
from plait.place.queue.workload import JobTrace

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Seconds that jobs waited for their first start."""

    jobs: int
    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, waited: Floats) -> Delay:
        """Return the statistics of these waiting times; all 0 without jobs."""
        if not len(waited):
            return cls(jobs=0, mean=0.0, p50=0.0, p95=0.0)
        p50, p95 = np.quantile(waited, (0.5, 0.95)).tolist()
        return cls(jobs=len(waited), mean=float(waited.mean()), p50=p50, p95=p95)


@dataclass(frozen=True, kw_only=True)
class PlannedSummary:
    """Result of one planned job. delay: seconds from planned arrival to start. announced, before,
    at: share of its nodes that other jobs held when it was announced, just before the planned
    arrival, and just after; None if nothing is reserved. moved: its nodes exchanged in the
    meantime. Other fields as in ``KeptZone``."""

    nodes: int
    delay: float | None
    announced: float | None
    before: float | None
    at: float | None
    moved: int
    admitted: int
    late: int
    held: int
    lent: int
    pp_spread: int | None
    dp_spread: int | None

    @classmethod
    def of(cls, planned: Planned, kept: KeptZone) -> PlannedSummary:
        """Return the summary of a planned job. kept: its result in the replay."""
        return cls(
            nodes=planned.nodes,
            delay=None if kept.start is None else kept.start - planned.arrival,
            announced=kept.announced,
            before=kept.before,
            at=kept.at,
            moved=kept.moved,
            admitted=kept.admitted,
            late=kept.late,
            held=kept.held,
            lent=kept.lent,
            pp_spread=kept.pp_spread,
            dp_spread=kept.dp_spread,
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Results of one policy.

    delay: of all jobs that arrived during the replay; notice: of those that arrived between an
    announcement and the planned arrival. allocation: mean share of nodes in use, gpu_allocation: of
    GPUs, while jobs arrive. idle_node_hours, idle_gpu_hours: from the first announcement (without
    one, the start) until the last arrival. admitted: jobs let into a zone; late: those of them that
    were predicted to have ended but were still running; late_share: their share. held: jobs in a
    zone that were not admitted and had to leave, or to be waited for. preempted: jobs stopped;
    lost_gpu_hours: work that they repeat. planned: result of each planned job.
    """

    policy: str
    delay: Delay
    notice: Delay
    allocation: float
    gpu_allocation: float
    idle_node_hours: float
    idle_gpu_hours: float
    admitted: int
    late: int
    late_share: float
    held: int
    preempted: int
    lost_gpu_hours: float
    planned: tuple[PlannedSummary, ...] = ()

    @property
    def retention_before(self) -> float | None:
        """The largest share of a planned job's nodes that other jobs held just before it
        arrived."""
        return self._most("before")

    @property
    def retention_at(self) -> float | None:
        """The largest share of a planned job's nodes that other jobs held just after it arrived."""
        return self._most("at")

    @property
    def planned_delay(self) -> float | None:
        """The longest delay of a planned job in seconds."""
        return self._most("delay")

    def _most(self, name: str) -> float | None:
        return max((value for one in self.planned if (value := getattr(one, name)) is not None), default=None)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        worst = ("planned_delay", "retention_before", "retention_at")
        return asdict(self) | {name: getattr(self, name) for name in worst}


def summary(outcome: ReplayOutcome, jobs: JobTrace, planned: Sequence[Planned], nodes: int, gpus: int) -> Summary:
    """Return the summary of one outcome. nodes, gpus: of the cluster."""
    arrived = jobs.submit >= 0
    waited = np.maximum(0.0, outcome.started - jobs.submit)
    notice = np.zeros(len(jobs), bool)
    for one in planned:
        notice |= arrived & (jobs.submit >= one.announced) & (jobs.submit < one.arrival)
    start = min((one.announced for one in planned), default=0.0)
    idle_nodes, idle_gpus = outcome.series.idle(start, jobs.window)
    all_nodes, all_gpus = outcome.series.idle(0.0, jobs.window)
    admitted, flexible, late, held = (
        sum(getattr(one, name) for one in outcome.planned) for name in ("admitted", "flexible", "late", "held")
    )
    return Summary(
        policy=outcome.policy,
        delay=Delay.of(waited[arrived]),
        notice=Delay.of(waited[notice]),
        allocation=1 - all_nodes / jobs.window / nodes,
        gpu_allocation=1 - all_gpus / jobs.window / gpus,
        idle_node_hours=idle_nodes / 3600,
        idle_gpu_hours=idle_gpus / 3600,
        admitted=admitted,
        late=late,
        late_share=late / max(1, admitted - flexible),
        held=held,
        preempted=int((outcome.restarts > 0).sum()),
        lost_gpu_hours=outcome.lost / 3600,
        planned=tuple(map(PlannedSummary.of, planned, outcome.planned)),
    )

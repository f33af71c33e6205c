"""What a replay comes to, in numbers for people and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from plait.place.replay import Outcome, Planned
from plait.place.workload import Workload

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
        """No jobs wait no time."""
        if not len(waited):
            return cls(jobs=0, mean=0.0, p50=0.0, p95=0.0)
        p50, p95 = np.quantile(waited, (0.5, 0.95)).tolist()
        return cls(jobs=len(waited), mean=float(waited.mean()), p50=p50, p95=p95)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of one policy. delay: of all jobs that arrived during the replay; notice: of those that arrived
    between the announcement and the planned arrival. allocation: mean share of nodes in use,
    gpu_allocation: of GPUs, while jobs arrive. idle_node_hours, idle_gpu_hours: from the announcement
    (without one, the start) until the last arrival. planned_delay: seconds from planned arrival to start.
    retention_before and retention_at: share of the reserved nodes that others held just before and after
    the planned arrival; None where nothing is reserved. admitted, late, late_share: jobs let into the zone,
    and those of them that were predicted out and still there; held: jobs from before the announcement that
    had to go, or to be waited for; preempted: jobs stopped, lost_gpu_hours: work that they do again."""

    policy: str
    delay: Delay
    notice: Delay
    allocation: float
    gpu_allocation: float
    idle_node_hours: float
    idle_gpu_hours: float
    planned_delay: float | None
    retention_announced: float | None
    retention_before: float | None
    retention_at: float | None
    admitted: int
    late: int
    late_share: float
    held: int
    preempted: int
    lost_gpu_hours: float

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def summary(outcome: Outcome, jobs: Workload, planned: Planned | None, nodes: int, gpus: int) -> Summary:
    """Numbers of one outcome. nodes, gpus: of the cluster."""
    arrived = jobs.submit >= 0
    waited = np.maximum(0.0, outcome.started - jobs.submit)
    notice = np.zeros(len(jobs), bool)
    start = 0.0
    if planned:
        start = planned.arrival - planned.notice
        notice = arrived & (jobs.submit >= start) & (jobs.submit < planned.arrival)
    idle_nodes, idle_gpus = outcome.series.idle(start, jobs.window)
    all_nodes, all_gpus = outcome.series.idle(0.0, jobs.window)
    return Summary(
        policy=outcome.policy,
        delay=Delay.of(waited[arrived]),
        notice=Delay.of(waited[notice]),
        allocation=1 - all_nodes / jobs.window / nodes,
        gpu_allocation=1 - all_gpus / jobs.window / gpus,
        idle_node_hours=idle_nodes / 3600,
        idle_gpu_hours=idle_gpus / 3600,
        planned_delay=None if not planned or outcome.planned_start is None else outcome.planned_start - planned.arrival,
        retention_announced=outcome.announced,
        retention_before=outcome.before,
        retention_at=outcome.at,
        admitted=outcome.admitted,
        late=outcome.late,
        late_share=outcome.late / max(1, outcome.admitted - outcome.flexible),
        held=outcome.held,
        preempted=int((outcome.restarts > 0).sum()),
        lost_gpu_hours=outcome.lost / 3600,
    )

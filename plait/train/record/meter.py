"""A step in numbers: speed, MFU, how much of the communication was hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.core.job.plan import Plan
from plait.core.record.records import Records


@dataclass(frozen=True)
class Meter:
    """tokens: of a step, over all ranks. work: FLOPs of a step on one rank. peak: FLOPs per second of its
    device."""

    tokens: int
    work: float
    peak: float

    @staticmethod
    def of(plan: Plan, batch: int, peak: float) -> Meter:
        """For steps of ``batch`` sequences."""
        sequence = plan.workload.sequence
        work = plan.model.step_flops(sequence, batch) / plan.layout.world_size
        return Meter(batch * sequence, work, peak)

    def metrics(self, seconds: float, records: Records) -> dict[str, Any]:
        """Numbers of a step that took so long. communication_seconds, exposed_seconds, hidden (a share): of
        this rank, by ``core.record.exposure``. idle: share of the step in which this rank's stages waited for
        others."""
        communication, idle = records.exposure(), records.idle()
        return {
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "mfu": self.work / seconds / self.peak,
            "communication_seconds": communication.total,
            "exposed_seconds": communication.exposed,
            "hidden": communication.fraction,
            **({"idle": idle / seconds} if idle is not None else {}),
        }

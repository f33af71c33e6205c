"""A strategy as it is predicted, and what the planner answers with several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.plan.freeing import Freed
from plait.plan.memory_report import MemoryReport
from plait.plan.reasons import chosen, schedule_of
from plait.plan.respected import Respected


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One strategy. seconds: of a step, with the 10th and 90th percentile of what it may be. parts: where the
    step goes, in seconds: computation, and what of every axis is exposed. closed_form: seconds that level 1
    said; None where the places of the pipeline differ, of which it knows nothing. mfu: as
    ``core.cluster.mfu`` defines it; mfu_full: with all of attention's scores, which may exceed 1. None where
    no peak of the device is known."""

    job: Job
    point: Mapping[str, int]
    seconds: float
    low: float
    high: float
    closed_form: float | None
    parts: Mapping[str, float]
    memory: MemoryReport
    tokens_per_second: float
    mfu: float | None
    mfu_full: float | None

    @property
    def most_memory(self) -> int:
        """Bytes of the fullest rank."""
        return self.memory.fullest.total

    @property
    def schedule(self) -> str:
        """Its name, or its file's."""
        return schedule_of(self.job, self.point)

    @property
    def readable(self) -> dict[str, str]:
        """What is chosen, in the words of a job file."""
        return chosen(self.job, self.point)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {key: value for key, value in self.__dict__.items() if key not in ("job", "memory")} | {
            "strategy": self.job.to_dict()["strategy"],
            "micro_batch_size": self.job.train.micro_batch_size,
            "memory": [
                asdict(each.place.memory) | {"overhead": each.overhead, "total": each.total}
                for each in self.memory.places
            ],
            **self.memory.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """candidates: the fastest first; where the safest is asked for, this and then the fastest. why: sentences
    about the first. frees: what would free memory of it. searched: points of the space. framework: which is
    to run it, and its version; empty for Plait. constraints: of a strategy that was not searched for, whether
    it meets them; those that a search found meet all."""

    model: ModelSpec
    cluster: Cluster
    ranks: int
    candidates: Sequence[Candidate]
    why: Sequence[str]
    searched: int
    framework: str = ""
    frees: Sequence[Freed] = ()
    constraints: Sequence[Respected] = ()

    @property
    def best(self) -> Candidate:
        """The first."""
        return self.candidates[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {
            "cluster": self.cluster.name,
            "ranks": self.ranks,
            "searched": self.searched,
            "why": list(self.why),
            "memory_margin": asdict(self.best.memory.margin),
            "would_free_memory": [one.to_dict() for one in self.frees],
            "candidates": [one.to_dict() for one in self.candidates],
        }
        asked = {"constraints": [one.to_dict() for one in self.constraints]} if self.constraints else {}
        return values | ({"framework": self.framework} if self.framework else {}) | asked

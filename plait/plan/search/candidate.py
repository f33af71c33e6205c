"""A strategy with its prediction, and the planner's answer with several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.plan.explain.memory_report import MemoryReport
from plait.plan.explain.moves import MemorySaving
from plait.plan.explain.reasons import ConstraintCheck, chosen, schedule_of


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One strategy with its prediction.

    point: the strategy as integers, by column of ``StrategyTable``. seconds: of a step; low, high:
    their 10th and 90th percentile. parts: seconds of a step by part: computation, and exposed
    communication of every axis. closed_form: seconds by formulas alone; None if pp ranks differ,
    which the formulas do not cover. mfu: as defined in ``core.cluster.mfu``; mfu_full: with all
    attention scores, which may exceed 1. Both are None if the device's peak is unknown."""

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
        """Bytes of memory on the fullest rank."""
        return self.memory.fullest.total

    @property
    def schedule(self) -> str:
        """Name of the schedule, or of its file."""
        return schedule_of(self.job, self.point)

    @property
    def readable(self) -> dict[str, str]:
        """The strategy's settings by name, in the words of a job file; without settings that have
        no effect."""
        return chosen(self.job, self.point)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {key: value for key, value in self.__dict__.items() if key not in ("job", "memory")} | {
            "strategy": self.job.to_dict()["strategy"],
            "micro_batch_size": self.job.train.micro_batch_size,
            "memory": [
                asdict(each.estimate.memory) | {"overhead": each.overhead, "total": each.total}
                for each in self.memory.pp_ranks
            ],
            **self.memory.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The planner's answer. candidates: the fastest first; if the safest plan is requested, that
    one first. why: sentences about the first. frees: changes that would free memory of it.
    searched: number of strategies in the space. framework: name and version of the framework that
    runs the job; empty for Plait. constraints: for a strategy that was not searched for, whether it
    meets them; search results meet all."""

    model: ModelSpec
    cluster: Cluster
    ranks: int
    candidates: Sequence[Candidate]
    why: Sequence[str]
    searched: int
    framework: str = ""
    frees: Sequence[MemorySaving] = ()
    constraints: Sequence[ConstraintCheck] = ()

    @property
    def best(self) -> Candidate:
        """The first candidate: the fastest, or the safest if the job asks for that."""
        return self.candidates[0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        margin = asdict(self.best.memory.margin)
        values = {
            "cluster": self.cluster.name,
            "ranks": self.ranks,
            "searched": self.searched,
            "why": list(self.why),
            "memory_margin": {"sure": margin.pop("confidence"), **margin},
            "would_free_memory": [one.to_dict() for one in self.frees],
            "candidates": [one.to_dict() for one in self.candidates],
        }
        asked = {"constraints": [asdict(one) for one in self.constraints]} if self.constraints else {}
        return values | ({"framework": self.framework} if self.framework else {}) | asked

"""What the planner answers: the best strategies of a job on a cluster, each with what it is predicted to take,
and why the first is the first.

Finalists of the closed form are simulated, through the very schedule and segment lists that would run; their
memory is the exact walk's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from plait.core.cluster import Cluster
from plait.core.errors import InfeasiblePlan, PlaitError
from plait.core.job import Job
from plait.core.model import ModelSpec
from plait.core.plan import Plan
from plait.plan.asking import asked_of, job_at, point_of
from plait.plan.band import band
from plait.plan.closed_form import step_seconds
from plait.plan.estimate import Work
from plait.plan.make import make_plan
from plait.plan.memory_report import MemoryReport, memory_report
from plait.plan.points import OVERLAPS, SHARD_OVERLAPS, Points
from plait.plan.search import search
from plait.plan.simulate import Simulated, simulate_plan

SIMULATED = 6
"""Finalists of the closed form that are simulated, beyond those that are shown."""


PARTS = {
    "compute": "computation",
    "tp": "exposed tensor-parallel communication",
    "cp": "exposed context-parallel communication",
    "dp": "exposed data-parallel communication",
    "pp": "exposed transfers between stages",
    "optimizer": "the optimizer",
    "idle": "waiting for other places",
}
"""Where a step goes, in words."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One strategy. seconds: of a step, with the 10th and 90th percentile of what it may be. parts: where the
    step goes, in seconds: computation, and what of every axis is exposed. closed_form: what level 1 said."""

    job: Job
    point: Mapping[str, int]
    seconds: float
    low: float
    high: float
    closed_form: float
    parts: Mapping[str, float]
    memory: MemoryReport
    tokens_per_second: float
    mfu: float
    mfu_causal: float

    @property
    def most_memory(self) -> int:
        """Bytes of the fullest rank."""
        return self.memory.fullest.total

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {key: value for key, value in self.__dict__.items() if key not in ("job", "memory")}
        return values | {
            "strategy": self.job.to_dict()["strategy"],
            "micro_batch_size": self.job.train.micro_batch_size,
            "memory": [
                asdict(each.place.memory) | {"overhead": each.overhead, "total": each.total}
                for each in self.memory.places
            ],
            "usable_memory": self.memory.usable,
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """candidates: the fastest first. why: sentences about the first. searched: points of the space."""

    model: ModelSpec
    cluster: Cluster
    ranks: int
    candidates: Sequence[Candidate]
    why: Sequence[str]
    searched: int

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "cluster": self.cluster.name,
            "ranks": self.ranks,
            "searched": self.searched,
            "why": list(self.why),
            "candidates": [one.to_dict() for one in self.candidates],
        }


@dataclass(frozen=True)
class Planner:
    """Predicts strategies of one job on one cluster. vocab: of the job's tokenizer."""

    job: Job
    cluster: Cluster
    vocab: int

    @property
    def model(self) -> ModelSpec:
        """Of the job."""
        return self.job.model_spec(self.vocab)

    def answer(self, *, searched: bool = True) -> Answer:
        """The best strategies; without a search, the job's own. Raises JobError for what cannot be searched,
        InfeasiblePlan where nothing fits."""
        if not searched:
            own = self.predict(self.job)
            return self._told([own], searched=1)
        asked = asked_of(self.job, self.model, self.cluster)
        shown = self.job.plan.top
        ranked = search(asked, self.cluster, self.job.train.precision, keep=shown + SIMULATED, most=self.job.plan.points)
        found, refused = list[Candidate](), ""
        for at in range(min(len(ranked.points), shown + SIMULATED)):
            try:
                one = self.predict(job_at(self.job, ranked.points.row(at)))
                found += [one] if one.memory.fits else []
            except PlaitError as error:  # a rule that columns do not know
                refused = str(error)
        found.sort(key=lambda one: one.seconds)
        if not found:
            raise InfeasiblePlan(f"None of the {len(ranked.points)} best strategies can be planned: {refused}")
        return self._told(found[:shown], searched=ranked.searched)

    def _told(self, found: Sequence[Candidate], *, searched: int) -> Answer:
        return Answer(
            model=self.model,
            cluster=self.cluster,
            ranks=found[0].job.world_size,
            candidates=found,
            why=self.why(found),
            searched=searched,
        )

    def predict(self, job: Job) -> Candidate:
        """A job that leaves nothing open."""
        point = point_of(job)
        sequence, precision = job.data.sequence_length, job.train.precision
        closed = step_seconds(self.model, Points.of([point]), self.cluster, sequence=sequence, precision=precision)
        simulated = self.simulated(job)
        low, high = band(np.array([simulated.seconds]), Points.of([point]), self.cluster)
        tokens = job.train.global_batch_size * sequence / simulated.seconds
        full, causal = step_flops(self.model, sequence, job.train.global_batch_size)
        peak = self.cluster.device.peak[precision].value * job.world_size * simulated.seconds
        return Candidate(
            job=job,
            point=point,
            seconds=simulated.seconds,
            low=float(low[0]),
            high=float(high[0]),
            closed_form=float(closed.total[0]),
            parts=simulated.exposed,
            memory=memory_report(Work.of(job, self.vocab, gpu=self.cluster.device.kind == "cuda"), self.cluster),
            tokens_per_second=tokens,
            mfu=full / peak,
            mfu_causal=causal / peak,
        )

    def plan(self, job: Job) -> Plan:
        """What ranks would obey."""
        return make_plan(job, self.cluster.hosts, vocab=self.vocab)

    def simulated(self, job: Job) -> Simulated:
        """A step of a job that leaves nothing open."""
        return simulate_plan(make_plan(job, self.cluster.hosts, vocab=self.vocab, draft=True), self.cluster)

    def why(self, found: Sequence[Candidate]) -> list[str]:
        """What limits the best, what the runner-up loses, what every overlap gains."""
        best = found[0]
        lines = [_limits(best)]
        if len(found) > 1:
            lines.append(_loses(best, found[1]))
        for name, off in _without(best.point).items():
            try:
                slower = self.simulated(job_at(self.job, off)).seconds
            except PlaitError:
                continue
            lines.append(f"{name} gains {slower / best.seconds - 1:.1%}: a step without it would take {words(slower)}.")
        return lines


def _limits(best: Candidate) -> str:
    parts = sorted(best.parts.items(), key=lambda part: -part[1])
    most, seconds = parts[0]
    others = ", ".join(
        f"{name} {value / best.seconds:.0%}" for name, value in parts[1:4] if value > 0.005 * best.seconds
    )
    return f"A step is {most} for {seconds / best.seconds:.0%} of its time{f'; {others}' if others else ''}."


def _loses(best: Candidate, second: Candidate) -> str:
    """Where the runner-up spends more."""
    names = {**best.parts, **second.parts}
    more = {name: second.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in names}
    most = max(more, key=lambda name: more[name])
    differs = differences(best.point, second.point)
    return (
        f"The runner-up ({differs}) takes {second.seconds / best.seconds - 1:.1%} longer, "
        f"{words(max(0.0, more[most]))} of it in {PARTS[most]}."
    )


def differences(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    """What ``other`` has otherwise."""
    changed = [f"{key}={value}" for key, value in readable(other).items() if readable(one).get(key) != value]
    return " ".join(changed) or "the same strategy"


def readable(point: Mapping[str, int]) -> dict[str, str]:
    """A point in the words of a job."""
    from plait.plan.points import RECOMPUTES, SCHEDULES

    names = {"schedule": SCHEDULES, "recompute": RECOMPUTES, "overlap": OVERLAPS, "shard_overlap": SHARD_OVERLAPS}
    found = {key: names[key][value] if key in names else str(value) for key, value in point.items()}
    if point["pp"] == 1:
        found = {key: value for key, value in found.items() if key not in ("schedule", "virtual")}
    return found


def _without(point: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Points that differ by one overlap being off."""
    found = dict[str, dict[str, int]]()
    base = dict(point)
    if point["tp"] > 1 and point["overlap"] != OVERLAPS.index("sync"):
        found["Hiding tensor parallelism's communication"] = base | {
            "overlap": OVERLAPS.index("sync"),
            "p1": 1,
            "p2": 1,
        }
    if point["dp"] * point["cp"] > 1 and point["shard_overlap"] != SHARD_OVERLAPS.index("none"):
        found["Hiding data parallelism's"] = base | {"shard_overlap": SHARD_OVERLAPS.index("none")}
    return found


def step_flops(model: ModelSpec, sequence: int, batch: int) -> tuple[int, int]:
    """FLOPs of a step: all scores counted, and only those of the causal half."""
    full = model.step_flops(sequence, batch)
    query = model.num_heads * model.head_size
    lengths = [sequence >> model.level(layer) for layer in range(model.num_layers)]
    return full, full - batch * sum(6 * length * length * query for length in lengths)


def words(seconds: float) -> str:
    """Seconds as people read them.

    >>> words(0.0123)
    '12.3 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.1e} s" if seconds else "0 s"

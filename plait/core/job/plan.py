"""Plan: everything a run obeys, complete, in one versioned JSON file with a content hash.

``plait.plan.make`` makes it from a job and a cluster, before any rank starts. What it leaves open, because
only timed steps can tell, stands in ``choices``; ``refine`` (``core.job.refine``) closes it once. The hash
stands in the file; ``key``, of what ranks do in a step, is stamped on checkpoints and timelines. The runtime
never amends a plan: where it cannot do what the plan says, it stops.

The lists of segment ops that ranks run are not in the file. They are a function of what is (``segment_lists``
of model, strategy, stage and costs); at start ranks compare the hashes of the lists that they made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from plait.core.base.codec.data import Natural, decode
from plait.core.base.codec.stamped import Stamp, digest
from plait.core.base.errors import JobError, PlaitError
from plait.core.base.files import replacing
from plait.core.cluster.hardware import Hosts
from plait.core.job.chosen import By as By
from plait.core.job.chosen import chosen_by as chosen_by
from plait.core.job.chosen import told_by as told_by
from plait.core.job.chosen import told_left_out as told_left_out
from plait.core.job.renamed import renamed
from plait.core.job.settings import Seed
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.plan import ReshardPlan, Written
from plait.core.step.schedule import Edge
from plait.core.step.schedules import parse_schedule
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.stages import split_layers
from plait.core.step.step import Step, Workload

STAMP = Stamp(
    noun="plan",
    version=4,
    broken="cannot be read as a plan",
    edited="Change the job file instead and plan again",
)
Reshards = Mapping[Edge, Mapping[str, ReshardPlan]]
"""By (source stage, target stage), both directions: the plan of each tensor that crosses, by its name."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What timed steps are to choose. strategies: candidates that differ in slices and sequence parallelism.
    shard_overlap: which of sharding's communication overlaps computation. slack: slack-1f1b's, of every
    boundary. compile, cuda_graphs: whether to."""

    strategies: tuple[Strategy, ...] = ()
    shard_overlap: bool = False
    slack: bool = False
    compile: bool = False
    cuda_graphs: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is to be chosen."""
        return bool(self.strategies) or self.shard_overlap or self.slack or self.compile or self.cuda_graphs


@dataclass(frozen=True, kw_only=True)
class Plan(Step):
    """What every rank does: a step, and what a run needs beside it. job: None for a plan that was made
    without a job file.

    schedule: with transfers. reshards: how tensors [S, B, H] of a micro-batch go from stage to stage, by
    whether the residual stream is sequence-parallel; empty on one place. seed: of initial weights and
    dropout. origin: ``intent`` of the plan that this one was refined from. notes: for people (how slices were
    chosen, on what device), chosen: who chose which key, hosts: what it was planned to run on, None where
    nobody knows their links; none of these is part of the hash.
    """

    job: Job | None = None
    reshards: Mapping[bool, Reshards] = field(default_factory=dict[bool, Reshards])
    seed: int = 0
    choices: Choices = field(default_factory=Choices)
    origin: str = ""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    chosen: Mapping[str, By] = field(default_factory=dict[str, By])
    hosts: Hosts | None = None

    def __post_init__(self) -> None:
        places, shape = (
            len(self.layout.degrees),
            f"{len(self.schedule.ranks)} places, {self.schedule.num_stages} stages",
        )
        if len(self.shardings) != places:
            raise JobError(f"{len(self.shardings)} for {places} meshes", key="shardings", fix="Give one to each")
        if places != len(self.schedule.ranks) or len(self.stages) != self.schedule.num_stages:
            raise JobError(f"a schedule of {shape} with {places} meshes and {len(self.stages)} ranges of layers")
        for mesh, sharding in zip(self.layout.meshes, self.shardings, strict=True):
            sharding.check(mesh.replicas)

    # ---- identity ----

    @cached_property
    def hash(self) -> str:
        """sha256 over the content, 64 hex digits: stands in the plan's file."""
        return digest(self.to_dict())

    @cached_property
    def key(self) -> str:
        """sha256 over what ranks do in a step, and where. Records and checkpoints are stamped with it: jobs
        that differ in how long they run, what they log or how fast they learn have the same."""
        return digest({key: value for key, value in self.to_dict().items() if key not in ("job", "origin")})

    @cached_property
    def intent(self) -> str:
        """sha256 over what decides how steps are computed, before anything was measured: equal plans of a job
        that differs only in how long it runs, or in names."""
        values = self.to_dict() | {"job": self.job.fingerprint if self.job else None}
        return self.origin or digest({key: value for key, value in values.items() if key != "origin"})

    def continued(self, file: Path) -> Plan:
        """The plan with which a run goes on whose folder has ``file``: the one that an earlier start has
        refined, if it was made with the same intent; else this one, and the run goes on in another shape.
        Raises JobError for a plan that cannot be read or belongs to another job."""
        old = self.of_the_same_job(file)
        return (
            replace(old, job=self.job, chosen=self.chosen, hosts=self.hosts)
            if old and old.intent == self.intent
            else self
        )

    def of_the_same_job(self, file: Path) -> Plan | None:
        """The plan in ``file``, if there is one. Raises JobError as ``read`` does, and for another job's."""
        if not file.is_file():
            return None
        try:
            old = Plan.read(file)
        except JobError as error:
            fix = "Remove this file to have the run planned anew; its checkpoints stay"
            raise JobError(error.problem, file=error.file, key=error.key, fix=fix) from None
        if problem := _another(old.job, self.job):
            fix = "Give this run another name with run.name=NAME, or remove the folder"
            raise JobError(f"holds a run of another job: {problem}", file=str(file.parent), fix=fix)
        return old

    # ---- the file ----

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the old plan or the new one."""
        with replacing(path) as partial:
            partial.write_text(self.to_json())

    def to_json(self) -> str:
        """The file's text."""
        place = self.job.to_dict().get("place") if self.job else None
        beside = {"notes": dict(self.notes), "chosen": dict(self.chosen)} | ({"place": place} if place else {})
        beside |= {"hosts": asdict(self.hosts)} if self.hosts else {}
        return json.dumps({**STAMP.on(self.hash), **self.to_dict(), **beside}) + "\n"

    @staticmethod
    def read(path: Path) -> Plan:
        """Raises JobError for a file that is no plan, of another version, or edited by hand."""
        return Plan.from_json(STAMP.text(path), str(path))

    @staticmethod
    def from_json(text: str, file: str) -> Plan:
        """A plan from the text of ``file``, with the errors of ``read``."""
        return STAMP.opened(text, file, Plan.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """The content as plain values, for JSON; ``from_dict`` reads them back."""
        return {
            "job": self.job.planned if self.job else None,
            "model": self.model.to_dict(),
            "workload": self.workload.to_dict(),
            "strategy": self.strategy.to_dict(),
            "layout": asdict(self.layout),
            "shardings": [asdict(sharding) for sharding in self.shardings],
            "stage_layers": [stage.num_layers for stage in self.stages],
            "schedule": str(self.schedule),
            "reshards": {str(parallel).lower(): _pack(plans) for parallel, plans in sorted(self.reshards.items())},
            "costs": asdict(self.costs) if self.costs else None,
            "seed": self.seed,
            "choices": asdict(self.choices),
            "origin": self.origin,
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Plan:
        """A plan from plain values, which anybody may have written, as ``to_dict`` makes them. Raises
        JobError naming the key."""
        file = decode(_File, values)
        if (layers := sum(file.stage_layers)) != file.model.num_layers:
            raise JobError(f"{layers} layers, and the model has {file.model.num_layers}", key="stage_layers")
        try:
            return Plan(
                job=_job(file.job | ({"place": file.place} if file.place else {})) if file.job else None,
                stages=split_layers(layers, len(file.stage_layers), file.stage_layers),
                schedule=parse_schedule(file.schedule),
                reshards={key == "true": plans.read() for key, plans in file.reshards.items()},
                **{name: getattr(file, name) for name in _AS_WRITTEN},
            )
        except JobError:
            raise
        except (LookupError, ValueError, PlaitError) as error:
            raise JobError(f"is not a complete plan: {error}") from None


@dataclass(frozen=True)
class _WrittenBoundaries:
    """Resharding plans, each once, and the number of every edge's, by what crosses it."""

    plans: tuple[Written, ...]
    edges: dict[str, dict[str, Natural]]

    def read(self) -> Reshards:
        """By edge. Raises LookupError or ValueError for an edge that is none."""
        plans = [one.read() for one in self.plans]
        found: dict[Edge, dict[str, ReshardPlan]] = {}
        for key, named in self.edges.items():
            a, _, b = key.partition(">")
            found[int(a), int(b)] = {name: plans[number] for name, number in named.items()}
        return found


@dataclass(frozen=True)
class _File:
    """What stands in the file, beside version and hash."""

    job: dict[str, Any] | None
    model: ModelSpec
    workload: Workload
    strategy: Strategy
    layout: Layout
    shardings: tuple[Sharding, ...]
    stage_layers: tuple[int, ...]
    schedule: str
    reshards: dict[Literal["false", "true"], _WrittenBoundaries]
    costs: SegmentCosts | None
    seed: Seed
    choices: Choices
    origin: str
    notes: dict[str, str]
    chosen: dict[str, By] = field(default_factory=dict[str, By])
    place: dict[str, Any] = field(default_factory=dict[str, Any])
    """The job's [place]."""
    hosts: Hosts | None = None


_AS_WRITTEN = ("model", "workload", "strategy", "layout", "shardings", "costs", "seed", "choices", "origin", "notes",
               "chosen", "hosts")  # fmt: skip
"""What a plan and its file have alike."""


CHANGED = "changed"
"""The note that says which settings a run goes on with are others than at the start before."""
NAMED = 3
"""Settings that are named when a folder holds a run of another job."""


def _another(old: Job | None, new: Job | None) -> str:
    """In what two jobs differ that a run cannot change on its way; empty if in nothing."""
    if old is None or new is None:
        return "" if old is new else "one of the two was planned without a job file"
    wrong = [str(one) for one in new.changes(old) if not one.allowed]
    more = [f"{len(wrong) - NAMED} more settings differ"] if len(wrong) > NAMED else []
    return "; ".join([*wrong[:NAMED], *more])


def _job(values: dict[str, Any]) -> Job:
    try:
        return Job.from_dict(renamed(values))
    except JobError as error:
        key = f"job.{error.key}" if error.key else "job"
        raise JobError(error.problem, file=error.file, key=key, fix=error.fix) from None


def _pack(reshards: Reshards) -> dict[str, Any]:
    """Boundaries between equal meshes share their plans, so each plan is written once: by number."""
    numbers: dict[str, int] = {}
    plans: list[dict[str, Any]] = []
    edges: dict[str, dict[str, int]] = {}
    for (a, b), named in sorted(reshards.items()):
        for name, plan in named.items():
            if plan.key not in numbers:
                numbers[plan.key] = len(plans)
                plans.append(plan.to_dict())
            edges.setdefault(f"{a}>{b}", {})[name] = numbers[plan.key]
    return {"plans": plans, "edges": edges}

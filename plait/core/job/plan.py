"""Plan: everything that a run obeys, in one versioned JSON file with a content hash.

``plait.plan.make`` makes it from a job and a cluster, before any rank starts. Decisions that need
timed steps stay open in ``choices``; ``refine`` (``core.job.refine``) closes them once. The hash is
in the file; ``key``, a hash of what ranks do in a step, is stamped on checkpoints and timelines.
The runtime never changes a plan: where it cannot do what the plan says, it stops.

The instruction lists of segment ops are not in the file. They are a function of its content
(``orders.overlap`` of model, strategy, stage and costs); at start ranks compare the hashes of their
lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from plait.core.base.codec.data import Natural, decode
from plait.core.base.codec.stamped import Stamp, digest
from plait.core.base.errors import JobError, PlaitError
from plait.core.base.files import replacing
from plait.core.cluster.hardware import Hosts
from plait.core.job.data_settings import DataSection
from plait.core.job.open_keys import MICRO
from plait.core.job.settings import PLANNABLE, RunSection, Seed, StrategySection
from plait.core.job.spec import Job
from plait.core.job.train_settings import TrainSection
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.plan import ReshardPlan, Written
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.schedule import Edge
from plait.core.step.schedules import parse_schedule
from plait.core.step.stages import split_layers
from plait.core.step.step import Step, Workload

STAMP = Stamp(
    noun="plan",
    version=4,
    broken="cannot be read as a plan",
    fix="Name a JOB.plan.json that this Plait made; plait plan JOB.toml makes one",
    edited="Change the job file instead and plan again",
)
Reshards = Mapping[Edge, Mapping[str, ReshardPlan]]
"""Resharding plans by (source stage, target stage), both directions, and then by the name of the
tensor that crosses."""


Origin = Literal["given", "searched", "timed", "default"]
"""Origin of a setting. ``given``: the job sets it. ``searched``: the planner chose it. ``timed``:
timed steps before training choose it. ``default``: the job has the table and leaves the key out."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Decisions that timed steps are to make. strategies: candidates that differ in slices and
    sequence parallelism. shard_overlap: which communication of sharded data parallelism overlaps
    computation. slack: the slack of slack-1f1b at every boundary between stages. compile,
    cuda_graphs: whether to use them."""

    strategies: tuple[Strategy, ...] = ()
    shard_overlap: bool = False
    slack: bool = False
    compile: bool = False
    cuda_graphs: bool = False

    @property
    def any(self) -> bool:
        """True if any decision is open."""
        return bool(self.strategies) or self.shard_overlap or self.slack or self.compile or self.cuda_graphs


class RunSettings(NamedTuple):
    """Tables of the job that ranks use, as they were when the plan was made."""

    train: TrainSection
    data: DataSection
    run: RunSection
    micro_batch: int
    devices: str | None
    """Path of the cluster's file, which describes devices."""

    @classmethod
    def of(cls, job: Job) -> RunSettings:
        """Return the tables of a job."""
        return cls(job.train, job.data, job.run, job.micro_batch, job.cluster.file)


@dataclass(frozen=True, kw_only=True)
class Plan(Step):
    """Work of every rank: a step, and what a run needs besides. job: None for a plan that was made
    without a job file. settings: tables of this job, read once; ranks read these and not the job.

    schedule: with transfers. reshards: how tensors [S, B, H] of a micro-batch are resharded from
    stage to stage, by whether the residual stream is sequence-parallel; empty for a single pipeline
    rank. seed: of initial weights and dropout. origin: ``intent`` of the plan from which this one
    was refined. notes: for people (how slices were chosen, on what device). chosen: origin of each
    key. hosts: hosts that it was planned for, None if their links are unknown. notes, chosen and
    hosts are not part of the hash.
    """

    job: Job | None = None
    reshards: Mapping[bool, Reshards] = field(default_factory=dict[bool, Reshards])
    seed: int = 0
    choices: Choices = field(default_factory=Choices)
    origin: str = ""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    chosen: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    hosts: Hosts | None = None
    settings: RunSettings | None = field(init=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.job:
            object.__setattr__(self, "settings", RunSettings.of(self.job))
        pp, shape = (
            len(self.layout.degrees),
            f"{len(self.schedule.ranks)} pipeline ranks, {self.schedule.num_stages} stages",
        )
        if len(self.shardings) != pp:
            raise JobError(f"{len(self.shardings)} for {pp} pipeline ranks", key="shardings", fix="Give one to each")
        if pp != len(self.schedule.ranks) or len(self.stages) != self.schedule.num_stages:
            raise JobError(f"a schedule of {shape} with {pp} meshes and {len(self.stages)} ranges of layers")
        for mesh, sharding in zip(self.layout.meshes, self.shardings, strict=True):
            sharding.check(mesh.replicas)

    # ---- identity ----

    @cached_property
    def hash(self) -> str:
        """sha256 over the content, 64 hex digits, as written in the plan's file."""
        return digest(self.to_dict())

    @cached_property
    def key(self) -> str:
        """sha256 over what ranks do in a step, and where. Records and checkpoints are stamped with
        it. Jobs that differ only in run length, logging or learning rates have the same key."""
        return digest(self._steps())

    @cached_property
    def intent(self) -> str:
        """sha256 over what decides how steps are computed, before any measurement. Plans of jobs
        that differ only in run length or names have the same intent."""
        values = self.to_dict() | {"job": self.job.fingerprint if self.job else None}
        return self.origin or digest({key: value for key, value in values.items() if key != "origin"})

    def continued(self, file: Path) -> Plan:
        """Return the plan with which a run goes on. file: the plan in the run's folder. If an
        earlier start has refined it with the same intent, the run goes on with it; else with this
        plan, in another shape. Raises JobError for a plan that cannot be read or belongs to another
        job."""
        old = self.of_the_same_job(file)
        return (
            replace(old, job=self.job, chosen=self.chosen, hosts=self.hosts)
            if old and old.intent == self.intent
            else self
        )

    def of_the_same_job(self, file: Path) -> Plan | None:
        """Return the plan in ``file``, or None if there is no such file. Raises JobError as
        ``read`` does, and for a plan of another job."""
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
        """Return the file's text."""
        place = self.job.to_dict().get("place") if self.job else None
        beside = {"notes": dict(self.notes), "chosen": dict(self.chosen)} | ({"place": place} if place else {})
        beside |= {"hosts": asdict(self.hosts)} if self.hosts else {}
        return json.dumps({**STAMP.on(self.hash), **self.to_dict(), **beside}) + "\n"

    @staticmethod
    def read(path: Path) -> Plan:
        """Return the plan in a file. Raises JobError for a file that is not a plan, has another
        version, or was edited by hand."""
        return Plan.from_json(STAMP.text(path), str(path))

    @staticmethod
    def from_json(text: str, file: str) -> Plan:
        """Return the plan in the text of ``file``. Raises JobError as ``read`` does."""
        return STAMP.opened(text, file, Plan.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the content as plain values for JSON; ``from_dict`` reads them back."""
        return {"job": self.job.planned if self.job else None, **self._steps(), "origin": self.origin}

    def _steps(self) -> dict[str, Any]:
        """Return the part of the content that determines what ranks do in a step, and where."""
        return {
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
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Plan:
        """Return the plan in plain values, which may come from anywhere, in the form of
        ``to_dict``. Raises JobError naming the key."""
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
    """Resharding plans, each written once, and for every edge and tensor the number of its plan."""

    plans: tuple[Written, ...]
    edges: dict[str, dict[str, Natural]]

    def read(self) -> Reshards:
        """Return the resharding plans by edge. Raises LookupError or ValueError for an edge that is
        not valid."""
        plans = [one.read() for one in self.plans]
        found: dict[Edge, dict[str, ReshardPlan]] = {}
        for key, named in self.edges.items():
            a, _, b = key.partition(">")
            found[int(a), int(b)] = {name: plans[number] for name, number in named.items()}
        return found


@dataclass(frozen=True)
class _File:
    """Content of a plan's file, besides version and hash."""

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
    chosen: dict[str, Origin] = field(default_factory=dict[str, Origin])
    place: dict[str, Any] = field(default_factory=dict[str, Any])
    """The job's [place]."""
    hosts: Hosts | None = None


_AS_WRITTEN = ("model", "workload", "strategy", "layout", "shardings", "costs", "seed", "choices", "origin", "notes",
               "chosen", "hosts")  # fmt: skip
"""Fields that a plan and its file have in common."""


CHANGED = "changed"
"""Key of the note that lists the settings that changed since the run's previous start."""
MOST_NAMED = 3
"""Most settings that are named when a folder holds a run of another job."""


def _another(old: Job | None, new: Job | None) -> str:
    """Return the differences between two jobs that a run cannot adopt when it goes on; empty if
    there are none."""
    if old is None or new is None:
        return "" if old is new else "one of the two was planned without a job file"
    wrong = [str(one) for one in new.changes(old) if not one.allowed]
    more = [f"{len(wrong) - MOST_NAMED} more settings differ"] if len(wrong) > MOST_NAMED else []
    return "; ".join([*wrong[:MOST_NAMED], *more])


def _job(values: dict[str, Any]) -> Job:
    try:
        return Job.from_dict(values)
    except JobError as error:
        key = f"job.{error.key}" if error.key else "job"
        raise JobError(error.problem, file=error.file, key=key, fix=error.fix) from None


def _pack(reshards: Reshards) -> dict[str, Any]:
    """Return plain values in which each plan is written once and has a number: boundaries between
    equal meshes share their plans."""
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


# ---- origins of settings ----


def setting_origins(job: Job) -> dict[str, Origin]:
    """Return the origin of every key, with ``[strategy]`` before keys of other tables.

    >>> job = Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"tp": 4, "pp": "auto"}})
    >>> by = setting_origins(job)
    >>> by["strategy.tp"], by["strategy.pp"], by["strategy.dp"], by["train.micro_batch_size"]
    ('given', 'searched', 'default', 'searched')
    """
    found: dict[str, Origin] = {}
    keys = [*((f"strategy.{key}", job.strategy, key) for key in StrategySection.model_fields)]
    for key, section, name in (*keys, (MICRO, job.train, MICRO.partition(".")[2])):
        if key in job.open:
            found[key] = "searched"
        elif getattr(section, name) == "auto" or (name == "slack" and job.measures_slack):
            found[key] = "timed"
        else:
            found[key] = "given" if name in section.model_fields_set else "default"
    return found


def format_origins(chosen: Mapping[str, Origin]) -> str:
    """Return a sentence that lists keys by origin.

    >>> format_origins({"strategy.tp": "given", "strategy.dp": "default", "strategy.pp": "default"})
    'strategy: given tp; default dp, pp'
    """
    by: dict[str, list[str]] = {}
    for key, who in chosen.items():
        by.setdefault(who, []).append(key.removeprefix("strategy."))
    order = ("given", "searched", "timed", "default")
    return "strategy: " + "; ".join(f"{who} {', '.join(by[who])}" for who in order if who in by)


def format_defaults(job: Job) -> str:
    """Return a sentence on keys of ``[strategy]`` that the planner could choose and that the job
    leaves at their defaults; empty if there are none.

    >>> format_defaults(Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"compile": True}}))[:50]
    '[strategy] leaves out tp, dp, pp, schedule, virtua'
    """
    found = setting_origins(job)
    keys = [key for key in PLANNABLE if found[f"strategy.{key}"] == "default"]
    if not keys:
        return ""
    return (
        f"[strategy] leaves out {', '.join(keys)}: each has its default and is not searched; auto leaves it to the "
        "planner"
    )

"""What a job takes of every rank, before any rank starts: memory by kind, and what a step sends by axis.

Ranks of one place of the pipeline are alike but for shares of a micro-batch that dp does not divide: the
largest is taken. So the work grows with places and layers, never with ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from plait.core.job.communication import Volume
from plait.core.job.plan import Plan, Workload
from plait.core.job.spec import Job
from plait.core.model.experts import refuse_experts
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding, Unit
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedule import Edge, Schedule, with_edges, with_transfers
from plait.core.step.segments import Phase
from plait.core.step.stages import Stage, crossing_bytes, crossings, split_layers
from plait.core.step.tied import Tie, tie_of
from plait.plan.activations import Activations
from plait.plan.make import job_schedule, job_workload
from plait.plan.pipeline_memory import Peak, PlaceWalk, stage_activations
from plait.plan.segment_sizes import MASTER
from plait.plan.sharding import step_bytes, unit_sizes
from plait.plan.states import position_tables, reduction_buffers, states
from plait.plan.traffic import micro_batch_bytes, replicated_numbers


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. buffers: of gathered units and open gradients, rotary tables, what gloo's reductions
    keep. activations: the most at any moment of a step; when that is, and how many micro-batches are alive
    then."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    when: str
    alive: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class Place:
    """One place of the pipeline, by the rank with the largest share. ranks: first and last. layers: of every
    stage that it holds, by the stage's number. share: sequences of a micro-batch. sent: bytes of a step, by
    axis: ``tp`` and, at most, ``rows`` of embeddings; ``ulysses`` and ``ring``; what sharding sends
    (``params``, ``grads``, ``optim``, ``replicas``, ``secondary``); ``pp``, what is handed to other stages;
    ``copies``, gradients of what tensor-parallel ranks hold alike; ``tied``, the gradient of tied
    embeddings."""

    index: int
    ranks: tuple[int, int]
    dp: int
    cp: int
    tp: int
    layers: dict[int, int]
    share: int
    memory: Memory
    sent: dict[str, int]

    @property
    def count(self) -> int:
        """How many ranks it has."""
        return self.dp * self.cp * self.tp


@dataclass(frozen=True)
class Estimate:
    """Of a whole job. parameters: of the model. hidden: by axis, what its communication is hidden behind."""

    parameters: int
    schedule: str
    micro_batches: int
    virtual_stages: int
    places: tuple[Place, ...]
    hidden: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def world_size(self) -> int:
        """Ranks of all places."""
        return sum(place.count for place in self.places)

    @property
    def most(self) -> Place:
        """The place whose ranks need the most memory, the first if equal."""
        return max(self.places, key=lambda place: place.memory.total)

    @property
    def bytes(self) -> int:
        """Of all ranks together."""
        return sum(place.count * place.memory.total for place in self.places)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {"world_size": self.world_size, **asdict(self)}
        for values, place in zip(found["places"], self.places, strict=True):
            values["memory"]["total"] = place.memory.total
        return found


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step as a job or its plan has it: what ranks hold and do. schedule: computations alone or with
    transfers. gpu: norms are fused, and reductions keep nothing."""

    model: ModelSpec
    strategy: Strategy
    layout: Layout
    shardings: Sequence[Sharding]
    stages: Sequence[Stage]
    schedule: Schedule
    workload: Workload
    gpu: bool = False

    @staticmethod
    def of(job: Job, vocab: int, *, gpu: bool = False) -> PlannedStep:
        """Of a job, whose tokenizer has so many tokens. gpu: whether ranks have one each."""
        model, layout = job.model_spec(vocab), job.layout
        schedule = job_schedule(job, layout)
        return PlannedStep(
            model=model,
            strategy=job.base_strategy,
            layout=layout,
            shardings=[job.sharding(mesh.replicas) for mesh in layout.meshes],
            stages=split_layers(model.num_layers, schedule.num_stages, job.strategy.stage_layers),
            schedule=schedule,
            workload=job_workload(job),
            gpu=gpu,
        )

    @staticmethod
    def of_plan(plan: Plan, *, gpu: bool = False) -> PlannedStep:
        """Of a plan as it stands."""
        return PlannedStep(
            model=plan.model, strategy=plan.strategy, layout=plan.layout, shardings=plan.shardings,
            stages=plan.stages, schedule=plan.schedule, workload=plan.workload, gpu=gpu,
        )  # fmt: skip

    @property
    def master(self) -> int:
        """Bytes of a number of a gradient."""
        return max(MASTER, self.workload.itemsize)

    @cached_property
    def edges(self) -> dict[Edge, tuple[tuple[str, int], ...]]:
        """What crosses from stage to stage: names, and how often its sequence has been halved."""
        return {edge: tuple(found) for edge, found in crossings(self.model, self.stages).items()}

    @cached_property
    def listed(self) -> Schedule:
        """The schedule with its transfers."""
        schedule = self.schedule
        if all(op.computes for ops in schedule.ranks for op in ops):
            return with_transfers(with_edges(schedule, self.edges))
        return schedule


def estimate(step: PlannedStep, *, traffic: bool = True) -> Estimate:
    """Of every place. traffic: whether to count what it sends, which takes as long as its memory. Raises
    JobError for a model with experts, which no list has."""
    refuse_experts(step.model, "walked")
    return Estimate(
        parameters=step.model.num_parameters,
        schedule=step.schedule.name,
        micro_batches=step.workload.num_micro_batches,
        virtual_stages=len(step.stages) // len(step.layout.degrees),
        places=tuple(_place(step, index, traffic=traffic) for index in range(len(step.layout.degrees))),
        hidden=hidden_behind(step),
    )


class Walked(NamedTuple):
    """What walking a place found. staging: what gloo's reduce-scatters keep from step to step."""

    peak: Peak
    staging: int


def walked_places(step: PlannedStep) -> tuple[Walked, ...]:
    """Activations of every place, which no sharding changes."""
    return tuple(_one(step, index).walked(index) for index in range(len(step.layout.degrees)))


def place_memory(step: PlannedStep, index: int, walked: Walked) -> Memory:
    """Bytes of a rank of a place that has been walked."""
    return _one(step, index).memory(walked)


def place_walk(step: PlannedStep, index: int) -> PlaceWalk:
    """A place's activations before a step, to be walked op by op."""
    return _one(step, index).walk(index)


def place_volume(step: PlannedStep, index: int) -> Volume:
    """What a rank of a place holds and sends in a step, along dp and along pp. Raises JobError for a model
    with experts, whose volumes are not counted."""
    refuse_experts(step.model, "counted")
    one = _one(step, index)
    sent = one.sent(index)
    return Volume(
        weights=sum(one.units.values()) * step.workload.itemsize,
        dp=sum(sent.get(axis, 0) for axis in ("params", "grads", "optim", "replicas", "secondary")),
        pp=sent.get("pp", 0),
    )


def _one(step: PlannedStep, index: int) -> _OnePlace:
    mesh = step.layout.meshes[index]
    stages = [step.stages[at] for at in step.schedule.stages_of(index)]
    strategy, share = replace(step.strategy, tp=mesh.tp), -(-step.workload.micro_batch // mesh.dp)
    return _OnePlace(step, mesh.first, strategy, stages, step.shardings[index], mesh.replicas, share)


def _place(step: PlannedStep, index: int, *, traffic: bool) -> Place:
    mesh, one = step.layout.meshes[index], _one(step, index)
    return Place(
        index=index, ranks=(mesh.ranks[0], mesh.ranks[-1]), dp=mesh.dp, cp=mesh.cp, tp=mesh.tp,
        layers={stage.index: stage.num_layers for stage in one.stages}, share=one.share,
        memory=one.memory(one.walked(index)), sent=one.sent(index) if traffic else {},
    )  # fmt: skip


@dataclass(frozen=True)
class _OnePlace:
    """first: of its ranks. strategy: with this place's tp. replicas: ranks that hold the same weights."""

    step: PlannedStep
    first: int
    strategy: Strategy
    stages: Sequence[Stage]
    sharding: Sharding
    replicas: int
    share: int

    @cached_property
    def units(self) -> dict[Unit, int]:
        """Numbers in every unit."""
        found: dict[Unit, int] = {}
        for stage in self.stages:
            found |= unit_sizes(self.step.model, self.strategy, stage, self.sharding)
        return found

    @cached_property
    def tie(self) -> Tie:
        """Of its first rank, whose share of tied embeddings is the largest."""
        step = self.step
        return tie_of(
            self.first, model=step.model, layout=step.layout, shardings=step.shardings, schedule=step.schedule
        )

    @cached_property
    def copies(self) -> int:
        """Bytes of gradients that several tensor-parallel ranks hold, side by side."""
        numbers = sum(replicated_numbers(self.step.model, self.strategy, stage) for stage in self.stages)
        return -(-numbers // self.sharding.optim) * self.step.master if self.strategy.tp > 1 else 0

    def tile(self, edge: Edge) -> int:
        """Bytes of what crosses an edge, of one micro-batch."""
        step, cut, loads = self.step, self.strategy.cp, self.step.workload
        cut *= self.strategy.tp if self.strategy.sequence_parallel else 1
        levels = [level for _, level in step.edges[edge]]
        return crossing_bytes(
            loads.sequence, self.share, step.model.hidden, cut=cut, itemsize=loads.itemsize, levels=levels
        )

    def sizes(self, phases: tuple[Phase, ...]) -> dict[int, Activations]:
        """Of a micro-batch, by stage."""
        step = self.step
        return {
            stage.index: stage_activations(
                step.model, self.strategy, _alike(step.model, stage), batch=self.share, sequence=step.workload.sequence,
                itemsize=step.workload.itemsize, phases=phases, gpu=step.gpu,
            )
            for stage in self.stages
        }  # fmt: skip

    def walk(self, index: int) -> PlaceWalk:
        """Before a step."""
        schedule, known = self.step.listed, {stage.index for stage in self.stages}
        kinds = {op.kind for op in schedule.ranks[index]}
        phases: tuple[Phase, ...] = ("step",) if "S" in kinds else ("F", "I", "W") if "I" in kinds else ("F", "B")
        tiles = {edge: self.tile(edge) for edge in schedule.edges if known.intersection(edge)}
        return PlaceWalk(schedule, self.sizes(phases), tiles)

    def walked(self, index: int) -> Walked:
        """After a step."""
        walk = self.walk(index)
        peak = walk.run(self.step.listed.ranks[index])
        return Walked(peak, max(size.staging for size in walk.sizes.values()))

    def memory(self, walked: Walked) -> Memory:
        """Of one rank."""
        step, peak = self.step, walked.peak
        ends = [(self.copies * 2, "sum of tensor-parallel copies")]
        if self.tie.numbers:
            ends.append((self.tie.numbers * step.master, "sum of tied embeddings"))
        for size, when in ends:
            if size > peak.bytes:
                peak = Peak(size, when, 0)
        lasting = states(self.units, self.sharding, itemsize=step.workload.itemsize)
        buffers = lasting.buffers + len(self.stages) * position_tables(
            step.model, self.strategy, sequence=step.workload.sequence, itemsize=step.workload.itemsize
        )
        if not step.gpu:
            buffers += reduction_buffers(self.units, self.sharding, itemsize=step.workload.itemsize)
            buffers += walked.staging
        return Memory(
            lasting.parameters, lasting.gradients, lasting.optimizer, buffers, peak.bytes, peak.when, peak.alive
        )

    def sent(self, index: int) -> dict[str, int]:
        """Bytes of a step, by axis; only what is sent at all."""
        step, found = self.step, Counter[str]()
        for stage in self.stages:
            each = micro_batch_bytes(
                step.model, self.strategy, stage, batch=self.share, sequence=step.workload.sequence,
                itemsize=step.workload.itemsize, loss_itemsize=step.master,
            )  # fmt: skip
            found.update({axis: count * step.workload.num_micro_batches for axis, count in each.items()})
        if self.replicas > 1:
            one_stage = any(stage.embeds and stage.heads for stage in self.stages)
            found.update(
                step_bytes(
                    self.units,
                    self.sharding,
                    self.replicas,
                    micro_batches=step.workload.num_micro_batches,
                    itemsize=step.workload.itemsize,
                    gradient_itemsize=step.master,
                    tied=bool(step.model.tied_embeddings) and one_stage,
                )
            )
        sends = Counter((op.stage, op.peer) for op in step.listed.ranks[index] if op.sends)
        found["pp"] = sum(count * self.tile((min(edge), max(edge))) for edge, count in sends.items())
        tp, ties = self.strategy.tp, len(self.tie.ranks)
        found["copies"] = 2 * self.copies * (tp - 1) // tp
        found["tied"] = 2 * self.tie.numbers * step.master * (ties - 1) // ties
        return {axis: count for axis, count in found.items() if count}


def _alike(model: ModelSpec, stage: Stage) -> Stage:
    """A stage of the same size as ``stage``, and the same for all that are as large: layers are equal unless
    they work at different lengths."""
    if model.levels:
        return stage
    first = 0 if stage.embeds else 1
    return Stage(first, 3 - stage.embeds - stage.heads, first, stage.num_layers)


def hidden_behind(step: PlannedStep) -> dict[str, str]:
    """By axis, what its communication is hidden behind, as the strategy has it."""
    strategy, found = step.strategy, dict[str, str]()
    if any(mesh.tp > 1 for mesh in step.layout.meshes):
        found["tp"] = {
            "domino": "other slices, weight gradients" if strategy.p1 > 1 else "backward: weight gradients",
            "async": "backward: weight gradients of the sublayer",
            "sync": "nothing",
            "none": "left out",
        }[strategy.overlap]
        found["rows"] = "other slices" if strategy.overlap == "domino" and strategy.p1 > 1 else "nothing"
    if strategy.cp > strategy.ring:
        found["ulysses"] = _SHARED[strategy.overlap]
    if strategy.ring > 1:
        blocks = "" if strategy.overlap in ("sync", "none") else "attention to the block before, "
        found["ring"] = (blocks + _SHARED[strategy.overlap]).removesuffix(", nothing")
    if any(mesh.replicas > 1 for mesh in step.layout.meshes):
        found["dp"] = {
            "both": "forward and backward",
            "forward": "forward",
            "backward": "backward",
            "none": "nothing",
        }[strategy.shard_overlap]
    if len(step.layout.degrees) > 1:
        found["pp"] = _SLACK.get(step.schedule.name, "what the schedule leaves between send and use")
    return found


_SHARED = {"domino": "other slices, weight gradients", "async": "nothing", "sync": "nothing", "none": "left out"}
_SLACK = {
    "gpipe": "the micro-batches after it",
    "1f1b": "nothing in the steady state",
    "zb-h1": "nothing in the steady state",
    "eager-1f1b": "one forward or backward each way",
    "zb-h2": "one forward or backward each way",
    "slack-1f1b": "as much computation as each boundary needs",
}

"""What a job takes of every rank, before any rank starts: memory by kind, and what a step sends by axis.

Ranks of one place of the pipeline are alike but for shares of a micro-batch that dp does not divide: the
largest is taken. So the work grows with places and layers, never with ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from plait.core.communication import Volume
from plait.core.experts import refuse_experts
from plait.core.job import Job
from plait.core.layout import Layout
from plait.core.model import ModelSpec
from plait.core.plan import Plan, Workload
from plait.core.schedule import Edge, Schedule, with_edges, with_transfers
from plait.core.segments import Phase
from plait.core.sharding import Sharding, Unit
from plait.core.stages import Stage, crossings, split_layers
from plait.core.strategy import Strategy
from plait.plan.make import job_schedule, job_workload
from plait.plan.memory import MASTER, Activations, position_tables, reduction_buffers, states
from plait.plan.sharding import step_bytes, unit_sizes
from plait.plan.step_memory import Peak, PlaceWalk, stage_activations
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
class Work:
    """What an estimate needs of a job or its plan. schedule: computations alone or with transfers. gpu: norms
    are fused, and reductions keep nothing."""

    model: ModelSpec
    strategy: Strategy
    layout: Layout
    shardings: Sequence[Sharding]
    stages: Sequence[Stage]
    schedule: Schedule
    workload: Workload
    gpu: bool = False

    @staticmethod
    def of(job: Job, vocab: int, *, gpu: bool = False) -> Work:
        """Of a job, whose tokenizer has so many tokens. gpu: whether ranks have one each."""
        model, layout = job.model_spec(vocab), job.layout
        schedule = job_schedule(job, layout)
        return Work(
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
    def of_plan(plan: Plan, *, gpu: bool = False) -> Work:
        """Of a plan as it stands."""
        return Work(
            model=plan.model,
            strategy=plan.strategy,
            layout=plan.layout,
            shardings=plan.shardings,
            stages=plan.stages,
            schedule=plan.schedule,
            workload=plan.workload,
            gpu=gpu,
        )

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


def estimate(work: Work) -> Estimate:
    """Of every place. Raises JobError for a model with experts, which no list has."""
    refuse_experts(work.model, "walked")
    return Estimate(
        parameters=work.model.num_parameters,
        schedule=work.schedule.name,
        micro_batches=work.workload.num_micro_batches,
        virtual_stages=len(work.stages) // len(work.layout.degrees),
        places=tuple(_place(work, index) for index in range(len(work.layout.degrees))),
        hidden=hidden_behind(work),
    )


def place_walk(work: Work, index: int) -> PlaceWalk:
    """A place's activations before a step, to be walked op by op."""
    return _one(work, index).walk(index)


def place_volume(work: Work, index: int) -> Volume:
    """What a rank of a place holds and sends in a step, along dp and along pp. Raises JobError for a model
    with experts, whose volumes are not counted."""
    refuse_experts(work.model, "counted")
    one = _one(work, index)
    sent = one.sent(index)
    return Volume(
        weights=sum(one.units.values()) * work.workload.itemsize,
        dp=sum(sent.get(axis, 0) for axis in ("params", "grads", "optim", "replicas", "secondary")),
        pp=sent.get("pp", 0),
    )


def _one(work: Work, index: int) -> _OnePlace:
    mesh = work.layout.meshes[index]
    stages = [work.stages[at] for at in work.schedule.stages_of(index)]
    strategy, share = replace(work.strategy, tp=mesh.tp), -(-work.workload.micro_batch // mesh.dp)
    return _OnePlace(work, strategy, stages, work.shardings[index], mesh.replicas, share)


def _place(work: Work, index: int) -> Place:
    mesh, one = work.layout.meshes[index], _one(work, index)
    return Place(
        index=index,
        ranks=(mesh.ranks[0], mesh.ranks[-1]),
        dp=mesh.dp,
        cp=mesh.cp,
        tp=mesh.tp,
        layers={stage.index: stage.num_layers for stage in one.stages},
        share=one.share,
        memory=one.memory(index),
        sent=one.sent(index),
    )


@dataclass(frozen=True)
class _OnePlace:
    """strategy: with this place's tp. replicas: ranks that hold the same weights."""

    work: Work
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
            found |= unit_sizes(self.work.model, self.strategy, stage, self.sharding)
        return found

    @cached_property
    def ties(self) -> int:
        """Ranks that sum the gradient of tied embeddings; 0 where this place has none to sum."""
        work = self.work
        apart = work.model.tied_embeddings and len(work.stages) > 1
        if not apart or not any(stage.embeds or stage.heads for stage in self.stages):
            return 0
        ends = {work.schedule.rank_of[0], work.schedule.rank_of[len(work.stages) - 1]}
        return sum(len(work.layout.meshes[place].ranks) for place in ends)

    @cached_property
    def copies(self) -> int:
        """Bytes of gradients that several tensor-parallel ranks hold, side by side."""
        numbers = sum(replicated_numbers(self.work.model, self.strategy, stage) for stage in self.stages)
        return -(-numbers // self.sharding.optim) * self.work.master if self.strategy.tp > 1 else 0

    def tile(self, edge: Edge) -> int:
        """Bytes of what crosses an edge, of one micro-batch."""
        work, cut, loads = self.work, self.strategy.cp, self.work.workload
        cut *= self.strategy.tp if self.strategy.sequence_parallel else 1
        levels = [level for _, level in work.edges[edge]]
        return sum(
            (loads.sequence >> level) // cut * self.share * work.model.hidden * loads.itemsize for level in levels
        )

    def sizes(self, phases: tuple[Phase, ...]) -> dict[int, Activations]:
        """Of a micro-batch, by stage."""
        work = self.work
        return {
            stage.index: stage_activations(
                work.model, self.strategy, _alike(work.model, stage), batch=self.share, sequence=work.workload.sequence,
                itemsize=work.workload.itemsize, phases=phases, fused_norm=work.gpu,
            )
            for stage in self.stages
        }  # fmt: skip

    def walk(self, index: int) -> PlaceWalk:
        """Before a step."""
        schedule, known = self.work.listed, {stage.index for stage in self.stages}
        kinds = {op.kind for op in schedule.ranks[index]}
        phases: tuple[Phase, ...] = ("step",) if "S" in kinds else ("F", "I", "W") if "I" in kinds else ("F", "B")
        tiles = {edge: self.tile(edge) for edge in schedule.edges if known.intersection(edge)}
        return PlaceWalk(schedule, self.sizes(phases), tiles)

    def memory(self, index: int) -> Memory:
        """Of one rank."""
        work, walk = self.work, self.walk(index)
        peak, sizes = walk.run(work.listed.ranks[index]), walk.sizes
        ends = [(self.copies * 2, "sum of tensor-parallel copies")]
        if self.ties:
            ends.append((work.model.vocab * work.model.hidden * work.master, "sum of tied embeddings"))
        for size, when in ends:
            if size > peak.bytes:
                peak = Peak(size, when, 0)
        lasting = states(self.units, self.sharding, itemsize=work.workload.itemsize)
        buffers = lasting.buffers + len(self.stages) * position_tables(
            work.model, self.strategy, sequence=work.workload.sequence, itemsize=work.workload.itemsize
        )
        if not work.gpu:
            buffers += reduction_buffers(self.units, self.sharding, itemsize=work.workload.itemsize)
            buffers += max(size.staging for size in sizes.values())
        return Memory(
            lasting.parameters, lasting.gradients, lasting.optimizer, buffers, peak.bytes, peak.when, peak.alive
        )

    def sent(self, index: int) -> dict[str, int]:
        """Bytes of a step, by axis; only what is sent at all."""
        work, found = self.work, Counter[str]()
        for stage in self.stages:
            each = micro_batch_bytes(
                work.model, self.strategy, stage, batch=self.share, sequence=work.workload.sequence,
                itemsize=work.workload.itemsize, loss_itemsize=work.master,
            )  # fmt: skip
            found.update({axis: count * work.workload.num_micro_batches for axis, count in each.items()})
        if self.replicas > 1:
            one_stage = any(stage.embeds and stage.heads for stage in self.stages)
            found.update(
                step_bytes(
                    self.units,
                    self.sharding,
                    self.replicas,
                    micro_batches=work.workload.num_micro_batches,
                    itemsize=work.workload.itemsize,
                    gradient_itemsize=work.master,
                    tied=bool(work.model.tied_embeddings) and one_stage,
                )
            )
        sends = Counter((op.stage, op.peer) for op in work.listed.ranks[index] if op.sends)
        found["pp"] = sum(count * self.tile((min(edge), max(edge))) for edge, count in sends.items())
        tp, ties = self.strategy.tp, self.ties
        found["copies"] = 2 * self.copies * (tp - 1) // tp
        found["tied"] = 2 * work.model.vocab * work.model.hidden * work.master * (ties - 1) // ties if ties else 0
        return {axis: count for axis, count in found.items() if count}


def _alike(model: ModelSpec, stage: Stage) -> Stage:
    """A stage of the same size as ``stage``, and the same for all that are as large: layers are equal unless
    they work at different lengths."""
    if model.levels:
        return stage
    first = 0 if stage.embeds else 1
    return Stage(first, 3 - stage.embeds - stage.heads, first, stage.num_layers)


def hidden_behind(work: Work) -> dict[str, str]:
    """By axis, what its communication is hidden behind, as the strategy has it."""
    strategy, found = work.strategy, dict[str, str]()
    if any(mesh.tp > 1 for mesh in work.layout.meshes):
        found["tp"] = {
            "domino": "other slices, weight gradients" if strategy.p1 > 1 else "backward: weight gradients",
            "async": "backward: weight gradients of the sublayer",
            "sync": "nothing",
            "none": "left out",
        }[strategy.overlap]
        found["rows"] = "other slices" if strategy.overlap == "domino" and strategy.p1 > 1 else "nothing"
    if strategy.cp > strategy.ring:
        found["ulysses"] = "nothing"
    if strategy.ring > 1:
        found["ring"] = "attention to the block before"
    if any(mesh.replicas > 1 for mesh in work.layout.meshes):
        found["dp"] = {
            "both": "forward and backward",
            "forward": "forward",
            "backward": "backward",
            "none": "nothing",
        }[strategy.shard_overlap]
    if len(work.layout.degrees) > 1:
        found["pp"] = _SLACK.get(work.schedule.name, "what the schedule leaves between send and use")
    return found


_SLACK = {
    "gpipe": "the micro-batches after it",
    "1f1b": "nothing in the steady state",
    "zb-h1": "nothing in the steady state",
    "eager-1f1b": "one forward or backward each way",
    "zb-h2": "one forward or backward each way",
    "slack-1f1b": "as much computation as each boundary needs",
}

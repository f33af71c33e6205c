"""What a job takes of every rank, before any rank starts: memory by kind, and what a step sends by axis.

Ranks of one place of the pipeline are alike but for shares of a micro-batch that dp does not divide: the
largest is taken. So the work grows with places and layers, never with ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from plait.core.model.experts import refuse_experts
from plait.core.model.spec import ModelSpec
from plait.core.parallel.matrices import buffer_numbers
from plait.core.parallel.strategy import SLICED
from plait.core.step.memory.activations import Activations, WalkedBatch
from plait.core.step.memory.pipeline_memory import Peak, PlaceWalk, stage_activations
from plait.core.step.memory.states import WORKSPACE, position_tables, reduction_buffers, rounding_buffers, states
from plait.core.step.seconds.muon_time import muon_bytes
from plait.core.step.segments import Phase
from plait.core.step.stages import Stage
from plait.core.step.step import Place, Step
from plait.core.step.traffic import micro_batch_bytes
from plait.core.step.unit_traffic import step_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. buffers: of gathered units and open gradients, rotary tables, what libraries keep
    (cuBLAS' workspaces, gloo's reductions). activations: the most at any moment of a step; when that is, and
    how many micro-batches are alive then."""

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
class PlaceEstimate:
    """One place of the pipeline, by the rank with the largest share. ranks: first and last. layers: of every
    stage that it holds, by the stage's number. share: sequences of a micro-batch. sent: bytes of a step, by
    axis: ``tp`` and, at most, ``rows`` of embeddings; ``ulysses`` and ``ring``; what sharding sends
    (``params``, ``grads``, ``optim``, ``replicas``, ``secondary``); ``pp``, what is handed to other stages;
    ``copies``, gradients of what tensor-parallel ranks hold alike; ``tied``, the gradient of tied
    embeddings; ``matrices``, what Muon orthogonalises, of the mean rank."""

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
    places: tuple[PlaceEstimate, ...]
    hidden: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def world_size(self) -> int:
        """Ranks of all places."""
        return sum(place.count for place in self.places)

    @property
    def most(self) -> PlaceEstimate:
        """The place whose ranks need the most memory, the first if equal."""
        return max(self.places, key=lambda place: place.memory.total)

    @property
    def bytes(self) -> int:
        """Of all ranks together."""
        return sum(place.count * place.memory.total for place in self.places)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found: dict[str, Any] = {"world_size": self.world_size, **asdict(self)}
        for values, place in zip(found["places"], self.places, strict=True):
            values["memory"]["total"] = place.memory.total
        return found


def estimate(step: Step, *, gpu: bool = False, traffic: bool = True) -> Estimate:
    """Memory and traffic of every place. gpu: ranks have a GPU each: norms are fused, and reductions keep
    nothing. traffic: whether to count what it sends, which takes as long as its memory. Raises JobError for a
    model with experts, which no list has."""
    refuse_experts(step.model, "walked")
    places = [MemoryOfPlace(step, index, gpu) for index in range(len(step.layout.degrees))]
    return Estimate(
        parameters=step.model.num_parameters,
        schedule=step.schedule.name,
        micro_batches=step.workload.num_micro_batches,
        virtual_stages=len(step.stages) // len(step.layout.degrees),
        places=tuple(_place(each, traffic=traffic) for each in places),
        hidden=hidden_behind(step),
    )


class Walked(NamedTuple):
    """What walking a place found. staging: what gloo's reduce-scatters keep from step to step."""

    peak: Peak
    staging: int


def _place(one: MemoryOfPlace, *, traffic: bool) -> PlaceEstimate:
    place = one.place
    mesh = place.mesh
    return PlaceEstimate(
        index=place.index, ranks=(mesh.ranks[0], mesh.ranks[-1]), dp=mesh.dp, cp=mesh.cp, tp=mesh.tp,
        layers={stage.index: stage.num_layers for stage in place.stages}, share=place.share,
        memory=one.memory(one.walked()), sent=one.sent() if traffic else {},
    )  # fmt: skip


@dataclass(frozen=True)
class MemoryOfPlace:
    """Memory and traffic of the rank with the largest share of a place. gpu: whether ranks have one each."""

    step: Step
    index: int
    gpu: bool = False

    @cached_property
    def place(self) -> Place:
        """Its stages and units."""
        return Place(self.step, self.index)

    def _sizes(self, phases: tuple[Phase, ...]) -> dict[int, Activations]:
        """Activations of a micro-batch, by stage."""
        step, place, work = self.step, self.place, self.step.workload
        micro = WalkedBatch(
            batch=place.share, sequence=work.sequence, itemsize=work.itemsize, phases=phases, gpu=self.gpu
        )
        return {
            stage.index: stage_activations(step.model, place.strategy, _alike(step.model, stage), micro)
            for stage in place.stages
        }

    def walk(self) -> PlaceWalk:
        """Activations before a step, to be walked op by op."""
        step, place = self.step, self.place
        schedule, known = step.listed, {stage.index for stage in place.stages}
        split = any(stage in known for stage, _ in schedule.splits)
        phases: tuple[Phase, ...] = ("step",) if schedule.whole else ("F", "I", "W") if split else ("F", "B")
        tiles = {edge: place.crossing_bytes(edge) for edge in schedule.edges if known.intersection(edge)}
        return PlaceWalk(schedule, self._sizes(phases), tiles)

    def walked(self) -> Walked:
        """Activations after a step, which no sharding changes."""
        walk = self.walk()
        peak = walk.run(self.step.listed.ranks[self.index])
        return Walked(peak, max(size.staging for size in walk.sizes.values()))

    def memory(self, walked: Walked) -> Memory:
        """Bytes of one rank, whose activations have been walked."""
        work, place, peak = self.step.workload, self.place, walked.peak
        ends = [(place.copies * 2, "sum of tensor-parallel copies")]
        if place.tie.numbers:
            ends.append((place.tie.numbers * work.master, "sum of tied embeddings"))
        for size, when in ends:
            if size > peak.bytes:
                peak = Peak(size, when, 0)
        lasting = states(
            place.unit_sizes, place.sharding, itemsize=work.itemsize, optimizer=work.optimizer, moment=work.moment
        )
        buffers = lasting.buffers + len(place.stages) * position_tables(
            self.step.model, place.strategy, sequence=work.sequence, itemsize=work.itemsize
        )
        if work.reduced != work.master:
            buffers += rounding_buffers(place.unit_sizes, place.sharding, place.mesh.replicas) * work.reduced
        if work.optimizer == "muon":
            shared = place.mesh.replicas // place.sharding.optim
            buffers += buffer_numbers(self.step.model.largest_matrix, shared) * work.matrix_itemsize
        if self.gpu:
            buffers += WORKSPACE * (2 if place.strategy.cuda_graphs else 1)
        else:
            buffers += reduction_buffers(place.unit_sizes, place.sharding, itemsize=work.reduced) + walked.staging
        return Memory(
            lasting.parameters, lasting.gradients, lasting.optimizer, buffers, peak.bytes, peak.when, peak.alive
        )

    def sent(self) -> dict[str, int]:
        """Bytes of a step, by axis; only what is sent at all."""
        step, place, work, found = self.step, self.place, self.step.workload, Counter[str]()
        for at in range(len(place.stages)):
            each = micro_batch_bytes(place.traffic(at, place.share))
            found.update({axis: count * work.num_micro_batches for axis, count in each.items()})
        tied = bool(step.model.tied_embeddings) and any(stage.embeds and stage.heads for stage in place.stages)
        found.update(step_bytes(place.units, micro_batches=work.num_micro_batches, tied=tied))
        sends = Counter((op.stage, op.peer) for op in step.listed.ranks[self.index] if op.sends)
        found["pp"] = sum(count * place.crossing_bytes(edge) for edge, count in sends.items())
        tp, ties = place.strategy.tp, len(place.tie.ranks)
        found["copies"] = 2 * place.copies * (tp - 1) // tp
        found["matrices"] = muon_bytes(place)
        found["tied"] = 2 * place.tie.numbers * work.master * (ties - 1) // ties
        return {axis: count for axis, count in found.items() if count}


def _alike(model: ModelSpec, stage: Stage) -> Stage:
    """A stage of the same size as ``stage``, and the same for all that are as large: layers are equal unless
    they work at different lengths."""
    if model.levels:
        return stage
    first = 0 if stage.embeds else 1
    return Stage(first, 3 - stage.embeds - stage.heads, first, stage.num_layers)


def hidden_behind(step: Step) -> dict[str, str]:
    """By axis, what its communication is hidden behind, as the strategy has it."""
    strategy, found = step.strategy, dict[str, str]()
    if any(mesh.tp > 1 for mesh in step.layout.meshes):
        found["tp"] = {
            **dict.fromkeys(SLICED, _SHARED["domino"] if strategy.p1 > 1 else "backward: weight gradients"),
            "async": "backward: weight gradients of the sublayer",
            "sync": "nothing",
            "no-communication": "left out",
        }[strategy.overlap]
        found["rows"] = "other slices" if strategy.overlap in SLICED and strategy.p1 > 1 else "nothing"
    if strategy.cp > strategy.ring:
        found["ulysses"] = _SHARED[strategy.overlap]
    if strategy.ring > 1:
        blocks = "" if strategy.overlap in ("sync", "no-communication") else "attention to the block before, "
        found["ring"] = (blocks + _SHARED[strategy.overlap]).removesuffix(", nothing")
    if any(mesh.replicas > 1 for mesh in step.layout.meshes):
        found["dp"] = {
            "both": "forward and backward",
            "forward": "forward",
            "backward": "backward",
            "none": "nothing",
        }[strategy.shard_overlap]
    if step.workload.optimizer == "muon":
        found["matrices"] = "products of other matrices, AdamW"
    if len(step.layout.degrees) > 1:
        found["pp"] = _SLACK.get(step.schedule.name, "what the schedule leaves between send and use")
    return found


_SHARED = {
    "domino": "other slices, weight gradients",
    "fixed": "nothing",
    "async": "nothing",
    "sync": "nothing",
    "no-communication": "left out",
}
_SLACK = {
    "gpipe": "the micro-batches after it",
    "1f1b": "nothing in the steady state",
    "zb-h1": "nothing in the steady state",
    "eager-1f1b": "one forward or backward each way",
    "zb-h2": "one forward or backward each way",
    "slack-1f1b": "as much computation as each boundary needs",
}

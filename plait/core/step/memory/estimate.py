"""Resources of a job on every rank, before any rank starts: memory by kind, and bytes sent per step
by axis.

Ranks of one pp rank are equal, except for shares of a micro-batch that dp does not divide: the
largest share counts. So the work grows with pp ranks and layers, never with the world size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import EXPERTS, OptimizerName, Sharding, buffer_numel
from plait.core.parallel.strategy import SLICED, Overlap, Recompute, ShardOverlap, Strategy
from plait.core.step.columns.points import (
    NAMES,
    OVERLAPS,
    RECOMPUTES,
    SHARD_OVERLAPS,
    Ints,
    StrategyTable,
    distinct,
    groups,
)
from plait.core.step.memory.activations import Activations, TracedBatch
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.memory.pipeline_memory import Peak, PipelineMemoryTrace, stage_activations
from plait.core.step.memory.states import WORKSPACE, HeldStates, States, position_tables, states_of_pp_rank, unit_counts
from plait.core.step.schedules import generate, planned_shape
from plait.core.step.seconds.sharding_costs import muon_bytes
from plait.core.step.segments import Phase
from plait.core.step.stages import Stage
from plait.core.step.step import PipelineRank, Step, Workload
from plait.core.step.traffic import micro_batch_bytes, step_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. buffers: gathered units and gradients not yet reduced, rotary tables,
    memory of libraries (cuBLAS' workspaces, gloo's reductions). activations: the peak within a
    step; when: name of the op of the peak; alive: micro-batches alive at the peak."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    when: str
    alive: int

    @property
    def total(self) -> int:
        """Bytes of one rank, added up over all kinds of memory."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class PipelineRankEstimate:
    """Estimate for one pp rank, for its rank with the largest share.

    ranks: first and last. layers: of every stage on the pp rank, by stage number. share: sequences
    of a micro-batch. sent: bytes sent per step, by axis. ``tp``; ``rows`` of embeddings, an upper
    bound; ``ulysses`` and ``ring``; traffic of sharding (``params``, ``grads``, ``optim``,
    ``replicas``, ``secondary``); ``pp``, activations and gradients sent to other stages;
    ``copies``, gradients of parameters replicated over tensor-parallel ranks; ``tied``, the
    gradient of tied embeddings; ``matrices``, those that Muon orthogonalises, mean over ranks.
    """

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
        """Number of ranks on the pp rank."""
        return self.dp * self.cp * self.tp


@dataclass(frozen=True)
class Estimate:
    """Estimate of a whole job. parameters: of the model. places: its pp ranks; the name is a key of
    ``--json``. hidden: by axis, the computation that hides its communication."""

    parameters: int
    schedule: str
    micro_batches: int
    virtual_stages: int
    places: tuple[PipelineRankEstimate, ...]
    hidden: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def world_size(self) -> int:
        """Number of ranks on all pp ranks together."""
        return sum(each.count for each in self.places)

    @property
    def most(self) -> PipelineRankEstimate:
        """The pp rank whose ranks need the most memory; the first one if equal."""
        return max(self.places, key=lambda each: each.memory.total)

    @property
    def bytes(self) -> int:
        """Bytes of all ranks together."""
        return sum(each.count * each.memory.total for each in self.places)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        found: dict[str, Any] = {"world_size": self.world_size, **asdict(self)}
        for values, each in zip(found["places"], self.places, strict=True):
            values["memory"]["total"] = each.memory.total
        return found


def estimate(step: Step, *, gpu: bool = False, traffic: bool = True) -> Estimate:
    """Return the memory and traffic of every pp rank.

    gpu: True if each rank has a GPU: norms are fused, and reductions keep nothing. traffic: True to
    count bytes sent, too, which takes as long as the memory.
    """
    memories = [PipelineRankMemory(step, index, gpu) for index in range(len(step.layout.degrees))]
    return Estimate(
        parameters=step.model.num_parameters,
        schedule=step.schedule.name,
        micro_batches=step.workload.num_micro_batches,
        virtual_stages=len(step.stages) // len(step.layout.degrees),
        places=tuple(_estimate_of(each, traffic=traffic) for each in memories),
        hidden=hidden_behind(step),
    )


class TraceResult(NamedTuple):
    """Result of tracing a pp rank. staging: bytes that gloo's reduce-scatters keep from step to
    step."""

    peak: Peak
    staging: int


def _estimate_of(rank_memory: PipelineRankMemory, *, traffic: bool) -> PipelineRankEstimate:
    pipeline_rank = rank_memory.pipeline_rank
    mesh = pipeline_rank.mesh
    return PipelineRankEstimate(
        index=pipeline_rank.index, ranks=(mesh.ranks[0], mesh.ranks[-1]), dp=mesh.dp, cp=mesh.cp, tp=mesh.tp,
        layers={stage.index: stage.num_layers for stage in pipeline_rank.stages}, share=pipeline_rank.share,
        memory=rank_memory.memory(rank_memory.walked()), sent=rank_memory.sent() if traffic else {},
    )  # fmt: skip


@dataclass(frozen=True)
class PipelineRankMemory:
    """Memory and traffic of the rank with the largest share on a pp rank. gpu: True if each rank
    has a GPU."""

    step: Step
    index: int
    gpu: bool = False

    @cached_property
    def pipeline_rank(self) -> PipelineRank:
        """The pp rank's stages and units."""
        return PipelineRank(self.step, self.index)

    def _sizes(self, phases: tuple[Phase, ...]) -> dict[int, Activations]:
        """Return the activations of a micro-batch, by stage."""
        step, pipeline_rank, work = self.step, self.pipeline_rank, self.step.workload
        micro = TracedBatch(
            batch=pipeline_rank.share, sequence=work.sequence, itemsize=work.itemsize, phases=phases, gpu=self.gpu
        )
        return {
            stage.index: stage_activations(step.model, pipeline_rank.strategy, _alike(step.model, stage), micro)
            for stage in pipeline_rank.stages
        }

    def walk(self) -> PipelineMemoryTrace:
        """Return a memory trace of the pp rank before its first op."""
        step, pipeline_rank = self.step, self.pipeline_rank
        schedule, known = step.schedule_with_transfers, {stage.index for stage in pipeline_rank.stages}
        split = any(stage in known for stage, _ in schedule.splits)
        phases: tuple[Phase, ...] = ("step",) if schedule.whole else ("F", "I", "W") if split else ("F", "B")
        tiles = {edge: pipeline_rank.crossing_bytes(edge) for edge in schedule.edges if known.intersection(edge)}
        return PipelineMemoryTrace(schedule, self._sizes(phases), tiles)

    def walked(self) -> TraceResult:
        """Return the peak of a step's activations, which sharding does not change."""
        walk = self.walk()
        peak = walk.run(self.step.schedule_with_transfers.ranks[self.index])
        return TraceResult(peak, max(size.staging for size in walk.sizes.values()))

    def memory(self, walked: TraceResult) -> Memory:
        """Return the bytes of one rank, given its traced activations."""
        work, pipeline_rank, peak = self.step.workload, self.pipeline_rank, walked.peak
        ends = [(pipeline_rank.replicated_gradient_bytes * 2, "sum of tensor-parallel copies")]
        if pipeline_rank.tie.numbers:
            ends.append((pipeline_rank.tie.numbers * work.master, "sum of tied embeddings"))
        for size, when in ends:
            if size > peak.bytes:
                peak = Peak(size, when, 0)
        captured = WORKSPACE if self.gpu and pipeline_rank.strategy.cuda_graphs else 0
        lasting = states_of_pp_rank(
            self._held, pipeline_rank.sharding, itemsize=work.itemsize,
            options=MemoryOptions(
                gpu=self.gpu, optimizer=work.optimizer, moment_bytes=work.moment, fixed_bytes=captured,
                reduced_bytes=work.reduced if work.reduced != work.master and pipeline_rank.mesh.replicas > 1 else None,
            ),
        )  # fmt: skip
        if self._routed.units:
            own = states_of_pp_rank(
                self._routed, pipeline_rank.expert_sharding, itemsize=work.itemsize,
                options=MemoryOptions(gpu=self.gpu, optimizer=work.optimizer, moment_bytes=work.moment),
            )  # fmt: skip
            lasting = States(*(a + b for a, b in zip(astuple(lasting), astuple(own), strict=True)))
        buffers = lasting.buffers + walked.staging * (not self.gpu)
        if work.optimizer == "muon":
            shared = pipeline_rank.mesh.replicas // pipeline_rank.sharding.optim
            buffers += buffer_numel(self.step.model.largest_matrix, shared) * work.matrix_itemsize
        return Memory(
            lasting.parameters, lasting.gradients, lasting.optimizer, buffers, peak.bytes, peak.when, peak.alive
        )

    @property
    def _held(self) -> HeldStates:
        """Units with their padding, and rotary tables."""
        step, pipeline_rank = self.step, self.pipeline_rank
        tables = position_tables(
            step.model, pipeline_rank.strategy, sequence=step.workload.sequence, itemsize=step.workload.itemsize
        )
        units = {unit: numel for unit, numel in pipeline_rank.unit_sizes.items() if unit[0] != EXPERTS}
        return HeldStates(unit_counts(units), tables=len(pipeline_rank.stages) * tables)

    @property
    def _routed(self) -> HeldStates:
        """Units of routed experts, with their padding."""
        units = {unit: numel for unit, numel in self.pipeline_rank.unit_sizes.items() if unit[0] == EXPERTS}
        return HeldStates(unit_counts(units), bare=True)

    def sent(self) -> dict[str, int]:
        """Return the bytes sent per step, by axis, without zeros."""
        step, pipeline_rank, work, found = self.step, self.pipeline_rank, self.step.workload, Counter[str]()
        for at in range(len(pipeline_rank.stages)):
            each = micro_batch_bytes(pipeline_rank.traffic(at, pipeline_rank.share))
            found.update({axis: count * work.num_micro_batches for axis, count in each.items()})
        tied = bool(step.model.tied_embeddings) and any(stage.embeds and stage.heads for stage in pipeline_rank.stages)
        found.update(step_bytes(pipeline_rank.units, micro_batches=work.num_micro_batches, tied=tied))
        sends = Counter((op.stage, op.peer) for op in step.schedule_with_transfers.ranks[self.index] if op.sends)
        found["pp"] = sum(count * pipeline_rank.crossing_bytes(edge) for edge, count in sends.items())
        tp, ties = pipeline_rank.strategy.tp, len(pipeline_rank.tie.ranks)
        found["copies"] = 2 * pipeline_rank.replicated_gradient_bytes * (tp - 1) // tp
        found["matrices"] = muon_bytes(pipeline_rank)
        found["tied"] = 2 * pipeline_rank.tie.numbers * work.master * (ties - 1) // ties
        return {axis: count for axis, count in found.items() if count}


def _alike(model: ModelSpec, stage: Stage) -> Stage:
    """Return a canonical stage that stands for every stage with the same memory. Layers count as
    equal unless they differ in sequence length or experts."""
    if not model.uniform_layers:
        return stage
    first = 0 if stage.embeds else 1
    return Stage(first, 3 - stage.embeds - stage.heads, first, stage.num_layers)


def hidden_behind(step: Step) -> dict[str, str]:
    """Return, by axis, a description of the computation behind which the strategy hides
    communication."""
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
    if strategy.ep > 1:
        slices = "other slices, " if strategy.p1 > 1 else ""
        hides = strategy.overlap == "domino" and not strategy.awaits_experts
        found["ep"] = f"{slices}weight gradients" if hides else "nothing"
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


# ---- memory traces of strategies ----


ALIKE: Mapping[str, int] = {
    "dp": 1, "params": 1, "grads": 1, "optim": 1, "secondary": 0, "shard_overlap": 0
}  # fmt: skip
"""Columns of a strategy on which a memory trace does not depend, with the value that each has in
the trace."""


class WalkedWork(NamedTuple):
    """Properties that all strategies of a job share. sequence: tokens."""

    sequence: int
    precision: Precision


def traced_peaks(
    model: ModelSpec, points: StrategyTable, work: WalkedWork, *, gpu: bool
) -> Iterator[tuple[Ints, tuple[int, ...]]]:
    """Yield (indices of strategies with the same memory trace, peak bytes of activations on each pp
    rank)."""
    _, kind_of = distinct([column for name, column in points.columns().items() if name not in ALIKE])
    for which in groups(kind_of):
        yield which, _walked(model, tuple({**points.row(int(which[0])), **ALIKE}.items()), work, gpu)


@lru_cache(maxsize=1 << 14)
def _walked(model: ModelSpec, row: tuple[tuple[str, int], ...], work: WalkedWork, gpu: bool) -> tuple[int, ...]:
    """Return the peak bytes on each pp rank. Cached: a search repeats the same arguments, in
    blocks, in a finer space, for more ranks."""
    step = step_of(model, dict(row), **work._asdict())
    return tuple(PipelineRankMemory(step, index, gpu).walked().peak.bytes for index in range(len(step.layout.degrees)))


def step_of(
    model: ModelSpec,
    point: Mapping[str, int],
    *,
    sequence: int,
    precision: Precision,
    optimizer: OptimizerName = "adamw",
) -> Step:
    """Return the step of a strategy from the space (``StrategyTable.row``), for a memory trace.
    Raises ScheduleError or JobError if the strategy is not valid."""
    name, pp = NAMES[point["schedule"]], point["pp"]
    shape = planned_shape(name, pp, point["num_micro"], point["virtual"])
    limit = point["recompute_layers"]
    strategy = Strategy(
        tp=point["tp"], overlap=cast("Overlap", OVERLAPS[point["overlap"]]), p1=point["p1"], p2=point["p2"],
        sequence_parallel=bool(point["sequence_parallel"]), cp=point["cp"], ring=point["ring"],
        recompute=cast("Recompute", RECOMPUTES[point["recompute"]]), recompute_layers=limit if limit >= 0 else None,
        shard_overlap=cast("ShardOverlap", SHARD_OVERLAPS[point["shard_overlap"]]),
    )  # fmt: skip
    strategy.check(model, batch=point["micro"], sequence=sequence)
    sharding = Sharding(
        params=point["params"], grads=point["grads"], optim=point["optim"], secondary=point["secondary"]
    )
    sharding.check(point["dp"] * point["cp"])
    workload = Workload(
        micro_batch=point["micro"] * point["dp"],
        num_micro_batches=point["num_micro"],
        sequence=sequence,
        precision=precision,
        optimizer=optimizer,
    )
    layout = Layout.of(pp=pp, dp=point["dp"], cp=point["cp"], tp=point["tp"])
    return Step.of(model, workload, strategy, layout, generate(name, shape), shardings=[sharding] * pp)

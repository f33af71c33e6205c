"""Step: one training step of a job: the model, the work, how both are cut, and the schedule.

The planner predicts a step's seconds, its memory and its traffic. A plan
(``plait.core.job.plan``) is a step and what a run needs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from plait.core.model.precision import ITEMSIZE, Precision, SmallType, master_size, size_in
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout, Mesh, SequenceCut
from plait.core.parallel.optimizers import OptimizerName
from plait.core.parallel.sharding import Sharding, Unit
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.schedule import Edge, Schedule, with_edges, with_transfers
from plait.core.step.seconds.segment_costs import SegmentCosts, segment_costs
from plait.core.step.segments import Phase, SegmentGraph
from plait.core.step.stages import Crossing, Stage, Tie, crossing_bytes, crossings, split_layers, tie_of
from plait.core.step.traffic import SegmentTraffic, replicated_numbers
from plait.core.step.unit_traffic import UnitTraffic, unit_sizes, unit_traffic

LATER = ("matrix_steps", "reduce_dtype", "optimizer_dtype")
"""Fields of a workload that plans had not from the beginning: all had their defaults."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step computes. micro_batch: sequences of one micro-batch, over all data-parallel replicas.
    sequence: tokens of each. matrix_itemsize: bytes of a number of a matrix that Muon orthogonalises;
    matrix_steps: its iterations.
    reduce_dtype: what gradients are summed over ranks in; optimizer_dtype: what moments are kept in."""

    micro_batch: int
    num_micro_batches: int
    sequence: int
    precision: Precision = "fp32"
    optimizer: OptimizerName = "adamw"
    matrix_itemsize: int = 2
    matrix_steps: int = 5
    reduce_dtype: SmallType = "master"
    optimizer_dtype: SmallType = "master"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what came later only where it says something, so that keys of plans stay."""
        return {
            key: value for key, value in asdict(self).items() if key not in LATER or value != getattr(Workload, key)
        }

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter or activation."""
        return ITEMSIZE[self.precision]

    @property
    def master(self) -> int:
        """Bytes of a number of a gradient."""
        return master_size(self.itemsize)

    @property
    def reduced(self) -> int:
        """Bytes of a number of a gradient on its way."""
        return size_in(self.reduce_dtype, self.itemsize)

    @property
    def moment(self) -> int:
        """Bytes of a number that an optimizer remembers."""
        return size_in(self.optimizer_dtype, self.itemsize)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step.

    strategy: of every place of the pipeline; its ``tp`` is the first place's, ``strategy_of`` has each
    place's. shardings: of every place, over its dp x cp ranks. schedule: computations alone, or with
    transfers. costs: seconds from which orders of segment ops are made; None: from shapes.
    """

    model: ModelSpec
    workload: Workload
    strategy: Strategy
    layout: Layout
    shardings: tuple[Sharding, ...]
    stages: tuple[Stage, ...]
    schedule: Schedule
    costs: SegmentCosts | None = None

    @staticmethod
    def of(
        model: ModelSpec, workload: Workload, strategy: Strategy, layout: Layout, schedule: Schedule,
        *, stage_layers: Sequence[int] = (), shardings: Sequence[Sharding] = (),
    ) -> Step:  # fmt: skip
        """A step whose layers are shared out among the schedule's stages. stage_layers: layers of each stage;
        empty: as equal as can be. shardings: empty: none. Raises JobError where layers do not fit."""
        return Step(
            model=model,
            workload=workload,
            strategy=replace(strategy, tp=layout.degrees[0][1]),
            layout=layout,
            shardings=tuple(shardings) or (Sharding(),) * len(layout.degrees),
            stages=split_layers(model.num_layers, schedule.num_stages, stage_layers),
            schedule=schedule,
        )

    @property
    def sequence_cut(self) -> SequenceCut:
        """How context-parallel ranks share sequences."""
        return SequenceCut(cp=self.strategy.cp, ring=self.strategy.ring)

    @cached_property
    def crossings(self) -> dict[Edge, tuple[Crossing, ...]]:
        """By edge of the schedule: the tensors that cross it (residual stream ``h``, skip connections)."""
        return crossings(self.model, self.stages)

    @cached_property
    def names(self) -> dict[Edge, tuple[str, ...]]:
        """By edge of the schedule: names of the tensors that cross it."""
        return {edge: tuple(one.name for one in found) for edge, found in self.crossings.items()}

    @cached_property
    def listed(self) -> Schedule:
        """The schedule with its transfers."""
        if self.schedule.computes_only:
            return with_transfers(with_edges(self.schedule, self.crossings))
        return self.schedule

    def strategy_of(self, place: int) -> Strategy:
        """The strategy with a place's own tensor-parallel degree."""
        return replace(self.strategy, tp=self.layout.degrees[place][1])

    def stages_of(self, place: int) -> list[Stage]:
        """The stages that a place holds."""
        return [self.stages[at] for at in self.schedule.stages_of(place)]

    def largest_share(self, place: int) -> int:
        """Sequences of a micro-batch that a replica of a place computes, at most: what orders are made for,
        so that replicas with fewer run the same lists."""
        return slice_sizes(self.workload.micro_batch, self.layout.degrees[place][0])[0]

    def rows_of(self, rank: int, batch: int) -> slice:
        """Which sequences of a micro-batch of ``batch`` a rank computes: its data-parallel share."""
        mesh = self.layout.mesh_of(rank)
        sizes, at = slice_sizes(batch, mesh.dp), mesh.coordinates(rank)["dp"]
        return slice(sum(sizes[:at]), sum(sizes[: at + 1]))

    def crossing_bytes(self, place: int, edge: Edge, share: int) -> int:
        """Bytes of what one micro-batch hands over an edge that a rank of a place has. share: sequences of
        the micro-batch that it computes."""
        work, mesh = self.workload, self.layout.meshes[place]
        cut = mesh.cp * (mesh.tp if self.strategy.sequence_parallel else 1)
        levels = [0]  # the residual stream alone
        if self.model.levels:
            levels = [one.level for one in self.crossings[min(edge), max(edge)]]
        return crossing_bytes(work.sequence, share, self.model.hidden, cut=cut, itemsize=work.itemsize, levels=levels)

    def order_costs(self, place: int) -> SegmentCosts:
        """Seconds from which the lists of a place are made."""
        if self.costs:
            return self.costs
        share, sequence = self.largest_share(place), self.workload.sequence
        return segment_costs(self.model, self.strategy_of(place), batch=share, sequence=sequence)

    def tie(self, rank: int) -> Tie:
        """With whom a rank sums the gradient of tied embeddings, and what of it."""
        return tie_of(rank, model=self.model, layout=self.layout, shardings=self.shardings, schedule=self.schedule)


@dataclass(frozen=True)
class Place:
    """One place of a step's pipeline."""

    step: Step
    index: int

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        return self.step.layout.meshes[self.index]

    @cached_property
    def share(self) -> int:
        """Sequences of a micro-batch of the rank that has most."""
        return self.step.largest_share(self.index)

    def crossing_bytes(self, edge: Edge) -> int:
        """Bytes of what one micro-batch hands over an edge, of the rank that has most."""
        return self.step.crossing_bytes(self.index, edge, self.share)

    @cached_property
    def tie(self) -> Tie:
        """Of its first rank, whose share of tied embeddings is the largest."""
        return self.step.tie(self.mesh.first)

    @cached_property
    def unit_sizes(self) -> dict[Unit, int]:
        """Numbers in every unit of all stages."""
        found: dict[Unit, int] = {}
        for stage in self.held:
            found |= stage
        return found

    @cached_property
    def strategy(self) -> Strategy:
        """With the place's own tp."""
        return self.step.strategy_of(self.index)

    @cached_property
    def sharding(self) -> Sharding:
        """Over its replicas."""
        return self.step.shardings[self.index]

    @cached_property
    def stages(self) -> list[Stage]:
        """That it holds."""
        return self.step.stages_of(self.index)

    @cached_property
    def order(self) -> dict[int, int]:
        """By number of a stage: which of the place's it is."""
        return {stage.index: at for at, stage in enumerate(self.stages)}

    @cached_property
    def units(self) -> list[UnitTraffic]:
        """Empty where nobody else holds the same weights."""
        mesh, work = self.mesh, self.step.workload
        if mesh.replicas == 1:
            return []
        return unit_traffic(
            self.unit_sizes, self.sharding, mesh.replicas, itemsize=work.itemsize, gradient_itemsize=work.reduced
        )

    @cached_property
    def held(self) -> list[dict[Unit, int]]:
        """Numbers in every unit, stage by stage."""
        return [unit_sizes(self.step.model, self.strategy, stage, self.sharding) for stage in self.stages]

    @cached_property
    def numbers(self) -> int:
        """That a rank's optimizer owns."""
        return sum(sum(stage.values()) for stage in self.held) // self.sharding.optim

    @cached_property
    def copies(self) -> int:
        """Bytes of gradients that several tensor-parallel ranks hold."""
        numbers = sum(replicated_numbers(self.step.model, self.strategy, stage) for stage in self.stages)
        return -(-numbers // self.sharding.optim) * self.step.workload.master

    @cached_property
    def phases(self) -> list[tuple[int, Phase]]:
        """Of every stage: which of the place's it is, and what the schedule asks of it."""
        found = {(op.stage, op.kind): op for op in self.step.schedule.ranks[self.index] if op.computes}
        return [(self.order[op.stage], op.work.phase) for op in found.values()]

    @cached_property
    def kind(self) -> object:
        """Equal for places that do the same."""
        step, mesh = self.step, self.mesh
        stages = [
            stage if step.model.levels else (stage.embeds, stage.heads, stage.num_layers) for stage in self.stages
        ]
        return (*stages, mesh.dp, mesh.tp, mesh.cp, self.sharding, tuple(self.phases))

    def graph(self, at: int) -> SegmentGraph:
        """Of one of its stages."""
        return SegmentGraph.of(self.step.model, self.strategy, self.stages[at])

    def traffic(self, at: int, share: int) -> SegmentTraffic:
        """What the collectives of a stage move where a rank has ``share`` sequences of a micro-batch."""
        step = self.step
        return SegmentTraffic(
            model=step.model, strategy=self.strategy, graph=self.graph(at),
            shares=slice_sizes(share, self.strategy.p1), sequence=step.workload.sequence // self.strategy.cp,
            itemsize=step.workload.itemsize, loss_itemsize=step.workload.master,
        )  # fmt: skip

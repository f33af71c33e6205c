"""Step: one training step of a job: the model, the workload, how both are parallelised, and the
pipeline schedule.

The planner predicts a step's seconds, memory and traffic. A plan (``plait.core.job.plan``) is a
step plus everything else that a run needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from plait.core.model.precision import ITEMSIZE, Precision, SmallType, master_size, size_in
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import ContextSplit, ExpertMesh, Layout, Mesh
from plait.core.parallel.sharding import EXPERTS, OptimizerName, Sharding, Unit
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.step.orders.segment_costs import SegmentCosts, segment_costs
from plait.core.step.schedule import Edge, Schedule, with_edges, with_transfers
from plait.core.step.segments import Phase, SegmentGraph
from plait.core.step.stages import Crossing, Stage, TiedGradient, crossing_bytes, crossings, split_layers, tie_of
from plait.core.step.traffic import SegmentTraffic, UnitTraffic, replicated_numbers, unit_sizes, unit_traffic

LATER_FIELDS = ("matrix_steps", "reduce_dtype", "optimizer_dtype")
"""Fields of a workload that the first plans did not have; all had their defaults."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one step. micro_batch: sequences of one micro-batch, over all data-parallel
    replicas. sequence: tokens per sequence. matrix_itemsize: bytes per number of a matrix that Muon
    orthogonalises; matrix_steps: its iterations. reduce_dtype: type in which gradients are summed
    over ranks; optimizer_dtype: type of the optimizer's moments."""

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
        """Return plain values. Fields of ``LATER_FIELDS`` are left out at their defaults, so that
        keys of older plans stay the same."""
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in LATER_FIELDS or value != getattr(Workload, key)
        }

    @property
    def itemsize(self) -> int:
        """Bytes of one number of a parameter or activation in compute precision."""
        return ITEMSIZE[self.precision]

    @property
    def master(self) -> int:
        """Bytes of one number of an accumulated gradient."""
        return master_size(self.itemsize)

    @property
    def reduced(self) -> int:
        """Bytes of one number of a gradient during its reduction."""
        return size_in(self.reduce_dtype, self.itemsize)

    @property
    def moment(self) -> int:
        """Bytes of one number of the optimizer's state."""
        return size_in(self.optimizer_dtype, self.itemsize)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step.

    strategy: the strategy of all pp ranks; its ``tp`` is the first pp rank's, and ``strategy_of``
    returns each one's. shardings: the sharding of every pp rank, over its dp x cp replicas.
    schedule: computations alone, or with transfers. costs: op seconds from which instruction lists
    are ordered; None: estimated from shapes.
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
        """Return a step whose layers are divided among the schedule's stages. stage_layers: layers
        of each stage; empty: as evenly as possible. shardings: empty: no sharding. Raises JobError
        if the layers do not fit."""
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
    def sequence_cut(self) -> ContextSplit:
        """How context-parallel ranks share sequences."""
        return ContextSplit(cp=self.strategy.cp, ring=self.strategy.ring)

    @cached_property
    def crossings(self) -> dict[Edge, tuple[Crossing, ...]]:
        """Tensors that cross each edge of the schedule (residual stream ``h``, skip
        connections)."""
        return crossings(self.model, self.stages)

    @cached_property
    def names(self) -> dict[Edge, tuple[str, ...]]:
        """Names of the tensors that cross each edge of the schedule."""
        return {edge: tuple(one.name for one in found) for edge, found in self.crossings.items()}

    @cached_property
    def schedule_with_transfers(self) -> Schedule:
        """The schedule with every SEND and RECV of its transfers."""
        if self.schedule.computes_only:
            return with_transfers(with_edges(self.schedule, self.crossings))
        return self.schedule

    def strategy_of(self, pp_rank: int) -> Strategy:
        """Return the strategy with a pp rank's own tensor-parallel degree."""
        return replace(self.strategy, tp=self.layout.degrees[pp_rank][1])

    def stages_of(self, pp_rank: int) -> list[Stage]:
        """Return the stages that a pp rank holds."""
        return [self.stages[at] for at in self.schedule.stages_of(pp_rank)]

    def largest_share(self, pp_rank: int) -> int:
        """Return the most sequences of a micro-batch that any replica of a pp rank computes.
        Instruction lists are ordered for this number; replicas with fewer sequences run the same
        lists."""
        return slice_sizes(self.workload.micro_batch, self.layout.degrees[pp_rank][0])[0]

    def rows_of(self, rank: int, batch: int) -> slice:
        """Return the slice of a micro-batch of ``batch`` sequences that a rank computes: its
        data-parallel share."""
        mesh = self.layout.mesh_of(rank)
        sizes, at = slice_sizes(batch, mesh.dp), mesh.coordinates(rank)["dp"]
        return slice(sum(sizes[:at]), sum(sizes[: at + 1]))

    def crossing_bytes(self, pp_rank: int, edge: Edge, share: int) -> int:
        """Return the bytes that a rank of a pp rank holds of one micro-batch's tensors on an edge.
        share: sequences of the micro-batch that the rank computes."""
        work, mesh = self.workload, self.layout.meshes[pp_rank]
        cut = mesh.cp * (mesh.tp if self.strategy.sequence_parallel else 1)
        levels = [0]  # the residual stream alone
        if self.model.levels:
            levels = [one.level for one in self.crossings[min(edge), max(edge)]]
        return crossing_bytes(work.sequence, share, self.model.hidden, cut=cut, itemsize=work.itemsize, levels=levels)

    def order_costs(self, pp_rank: int) -> SegmentCosts:
        """Return the op seconds from which the instruction lists of a pp rank are ordered."""
        if self.costs:
            return self.costs
        share, sequence = self.largest_share(pp_rank), self.workload.sequence
        return segment_costs(self.model, self.strategy_of(pp_rank), batch=share, sequence=sequence)

    def tie(self, rank: int) -> TiedGradient:
        """Return which ranks a rank sums the tied embeddings' gradient with, and which range."""
        return tie_of(rank, model=self.model, layout=self.layout, shardings=self.shardings, schedule=self.schedule)


@dataclass(frozen=True)
class PipelineRank:
    """One pp rank of a step: a position in the pipeline, with all the ranks (dp x cp x tp)
    there."""

    step: Step
    index: int

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks at this position."""
        return self.step.layout.meshes[self.index]

    @cached_property
    def share(self) -> int:
        """Sequences of a micro-batch on the rank that has most."""
        return self.step.largest_share(self.index)

    def crossing_bytes(self, edge: Edge) -> int:
        """Return the bytes of one micro-batch's tensors on an edge, for the rank that has most
        sequences."""
        return self.step.crossing_bytes(self.index, edge, self.share)

    @cached_property
    def tie(self) -> TiedGradient:
        """The first rank's part in summing tied embeddings; it is the largest."""
        return self.step.tie(self.mesh.first)

    @cached_property
    def unit_sizes(self) -> dict[Unit, int]:
        """Count of parameters in every sharded unit of all stages of this pp rank, padding
        included."""
        found: dict[Unit, int] = {}
        for stage in self.held:
            found |= stage
        return found

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy with this pp rank's own tp."""
        return self.step.strategy_of(self.index)

    @cached_property
    def sharding(self) -> Sharding:
        """The sharding over this pp rank's replicas."""
        return self.step.shardings[self.index]

    @cached_property
    def expert_mesh(self) -> ExpertMesh:
        """The ranks of this pp rank as routed experts see them."""
        return ExpertMesh(self.mesh, self.strategy.ep, self.strategy.whole_experts)

    @cached_property
    def expert_sharding(self) -> Sharding:
        """The sharding of routed experts over the ranks that hold the same ones."""
        return self.sharding.of_experts(self.strategy.ep, self.mesh.tp if self.strategy.whole_experts else 1)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages that this pp rank holds."""
        return self.step.stages_of(self.index)

    @cached_property
    def stage_index(self) -> dict[int, int]:
        """Index among this pp rank's stages, by stage number."""
        return {stage.index: at for at, stage in enumerate(self.stages)}

    @cached_property
    def units(self) -> list[UnitTraffic]:
        """Traffic of every sharded unit; empty if no other rank holds the same weights."""
        work, found = self.step.workload, list[UnitTraffic]()
        for routed, sharding, ranks in (
            (False, self.sharding, self.mesh.replicas),
            (True, self.expert_sharding, self.expert_mesh.replicas),
        ):
            units = {unit: numel for unit, numel in self.unit_sizes.items() if (unit[0] == EXPERTS) == routed}
            if ranks > 1:
                found += unit_traffic(units, sharding, ranks, itemsize=work.itemsize, gradient_itemsize=work.reduced)
        return found

    @cached_property
    def held(self) -> list[dict[Unit, int]]:
        """Count of parameters in every sharded unit, stage by stage, padding included."""
        return [unit_sizes(self.step.model, self.strategy, stage, self.sharding) for stage in self.stages]

    @cached_property
    def numbers(self) -> int:
        """Number of parameters that one rank's optimizer updates, padding included."""
        return sum(
            numel // (self.expert_sharding if kind == EXPERTS else self.sharding).optim
            for stage in self.held
            for (kind, _), numel in stage.items()
        )

    @cached_property
    def replicated_gradient_bytes(self) -> int:
        """Bytes of gradients that several tensor-parallel ranks hold."""
        numbers = sum(replicated_numbers(self.step.model, self.strategy, stage) for stage in self.stages)
        return -(-numbers // self.sharding.optim) * self.step.workload.master

    @cached_property
    def phases(self) -> list[tuple[int, Phase]]:
        """(index among this pp rank's stages, phase) of every phase in the schedule."""
        found = {(op.stage, op.kind): op for op in self.step.schedule.ranks[self.index] if op.computes}
        return [(self.stage_index[op.stage], op.work.phase) for op in found.values()]

    @cached_property
    def kind(self) -> object:
        """A key that is equal for pp ranks that do the same work."""
        step, mesh = self.step, self.mesh
        stages = [
            (stage.embeds, stage.heads, stage.num_layers) if step.model.uniform_layers else stage
            for stage in self.stages
        ]
        return (*stages, mesh.dp, mesh.tp, mesh.cp, self.sharding, tuple(self.phases))

    def graph(self, at: int) -> SegmentGraph:
        """Return the segment graph of the stage with index ``at`` here."""
        return SegmentGraph.of(self.step.model, self.strategy, self.stages[at])

    def traffic(self, at: int, share: int) -> SegmentTraffic:
        """Return the traffic of a stage's collectives on a rank with ``share`` sequences of a
        micro-batch."""
        step = self.step
        return SegmentTraffic(
            model=step.model, strategy=self.strategy, graph=self.graph(at),
            shares=slice_sizes(share, self.strategy.p1), sequence=step.workload.sequence // self.strategy.cp,
            itemsize=step.workload.itemsize, loss_itemsize=step.workload.master,
        )  # fmt: skip

"""Assemble one rank's part of a plan: models of its stages, gradients, process groups and lanes,
the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from plait.core.job.plan import Plan
from plait.core.parallel.sharding import sharing
from plait.core.step.orders.overlap import Load
from plait.core.step.schedule import WORK, Schedule
from plait.core.step.schedules import forward_only
from plait.core.step.segments import Phase
from plait.train.engine.courier import LaneCourier, Lanes
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups, open_groups
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.muon import MatrixGroup, Member
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.engine.shards import Shards
from plait.train.engine.steps import RankStep
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.model.transformer import ModelCut, StageModels, Transformer
from plait.train.record.recorder import Recorder


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a job. eval_batches: micro-batches of an evaluation."""

    plan: Plan
    rank: int
    models: StageModels
    gradients: Gradients
    groups: Groups
    lanes: Lanes
    device: RankDevice
    recorder: Recorder | None
    shards: Shards | None
    eval_batches: int = 0

    @property
    def matrices(self) -> MatrixGroup:
        """The group of ranks that share the matrices that an optimizer needs whole."""
        mesh, groups = self.groups.mesh, self.groups
        ranks = sharing(mesh, groups.sharding, self.rank) if self.plan.workload.optimizer == "muon" else (self.rank,)
        members = tuple(Member(mesh.coordinates(rank)["tp"], mesh.replica(rank)) for rank in ranks)
        return MatrixGroup(members, groups.sharding, groups.matrices, self.device, self.recorder)

    @cached_property
    def courier(self) -> LaneCourier:
        """The courier of activations and gradients between stages."""
        plan = self.plan
        return LaneCourier(plan.schedule, plan.reshards[plan.strategy.sequence_parallel], self.lanes)

    @cached_property
    def pipeline(self) -> PipelineExecutor:
        """The executor of the plan's pipeline schedule on this rank."""
        return self._interpreter(self.plan.schedule)

    @property
    def step(self) -> RankStep:
        """The parts of a training step."""
        return RankStep(self._run, self.groups, self.shards, self.plan.strategy.sequence_parallel, self.recorder)

    def _run(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run a step of ``len(batches)`` micro-batches: fewer than the plan's while the batch ramps
        up."""
        return self._of_fewer(len(batches)).run(batches)

    def _of_fewer(self, count: int) -> PipelineExecutor:
        whole, known = self.pipeline, self._shorter
        if count == whole.schedule.num_micro_batches:
            return whole
        if count not in known:
            known.clear()  # the batch only grows, so shorter schedules are not needed again
            known[count] = whole.under(whole.schedule.first(count))
        return known[count]

    @cached_property
    def _shorter(self) -> dict[int, PipelineExecutor]:
        return {}

    @cached_property
    def evaluator(self) -> PipelineExecutor | None:
        """The executor of an evaluation's pipeline, forward passes only; None if there are no
        evaluation batches."""
        return self._interpreter(forward_only(self.plan.schedule, self.eval_batches)) if self.eval_batches else None

    def rows(self, size: int) -> slice:
        """Return this rank's sequences of a micro-batch of ``size`` sequences: its data-parallel
        share."""
        return self.plan.rows_of(self.rank, size)

    def cut(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the batches with only this rank's tokens of each sequence."""
        at = self.positions
        if at is None:
            return list(batches)
        return [
            replace(
                b,
                tokens=b.tokens[:, at],
                targets=b.targets[:, at],
                positions=at,
                weights=None if b.weights is None else b.weights[:, at],
            )
            for b in batches
        ]

    def own(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's part of whole micro-batches: its tokens of its sequences."""
        return self.cut([one.of(self.rows(len(one.tokens))) for one in batches])

    @cached_property
    def positions(self) -> Tensor | None:
        """The positions of the tokens of every sequence that this rank computes; None for all."""
        cut = self.plan.sequence_cut
        if cut.cp == 1:
            return None
        runs = cut.tokens(self.plan.workload.sequence, self.groups.mesh.coordinates(self.rank)["cp"])
        return torch.cat([torch.arange(run.start, run.stop) for run in runs])

    def under(self, plan: Plan) -> RankPart:
        """Return the same part under another plan for the same stages and meshes: other slices,
        another order. Weights, gradients and process groups are shared."""
        return replace(self, plan=plan)

    def _interpreter(self, schedule: Schedule) -> PipelineExecutor:
        plan, pp_rank, recorder = self.plan, self.groups.pp_rank, self.recorder if schedule.trains else None
        load = Load(plan.largest_share(pp_rank), plan.workload.sequence, plan.costs)
        executors = {
            model.stage.index: make_executor(
                model,
                plan.strategy_of(pp_rank),
                self.groups.tp,
                load,
                RankContext(self.device, recorder, plan.seed),
                gradients=self.gradients if schedule.trains else None,
                phases=_phases(schedule, model.stage.index),
                shards=self.shards,
            )
            for model in self.models.stages
        }
        return PipelineExecutor(schedule, plan.names, pp_rank, executors, self.courier)


def assemble(
    plan: Plan, rank: int, device: RankDevice, *, recorder: Recorder | None = None, eval_batches: int = 0
) -> RankPart:
    """Return this rank's part of a plan. Called by all ranks at the same point, with the same
    plan."""
    groups = open_groups(plan, rank, device, recorder)
    models = StageModels(
        [
            Transformer(
                plan.model,
                plan.strategy_of(groups.pp_rank),
                ModelCut(
                    tp_rank=groups.tp_rank,
                    stage=plan.stages[stage],
                    sharding=groups.sharding,
                    sequence=groups.sequence,
                    shard_rank=groups.replica,
                    experts=groups.experts,
                    expert_sharding=groups.expert_sharding,
                    expert_rank=groups.expert_rank,
                ),
                seed=plan.seed,
                dtype=torch_dtype(plan.workload.precision),
                device=device.torch_device,
            )
            for stage in plan.schedule.stages_of(groups.pp_rank)
        ]
    )
    gradients = Gradients(models)
    gradients.expert_factor = groups.expert_factor
    return RankPart(
        plan=plan,
        rank=rank,
        models=models,
        gradients=gradients,
        groups=groups,
        lanes=Lanes(plan, rank, device, recorder),
        device=device,
        recorder=recorder,
        shards=Shards(models, gradients, groups.wires, device, recorder, plan.workload.reduce_dtype)
        if groups.mesh.replicas > 1 or groups.expert_mesh.replicas > 1
        else None,
        eval_batches=eval_batches,
    )


def _phases(schedule: Schedule, stage: int) -> Sequence[Phase]:
    kinds = {op.kind for ops in schedule.ranks for op in ops if op.stage == stage}
    return [work.phase for kind, work in WORK.items() if kind in kinds]

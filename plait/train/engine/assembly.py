"""One rank's part of a planned pipeline, put together: models of its stages, their gradients, its wires, the
interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.errors import ScheduleError
from plait.core.model import ModelSpec
from plait.core.pipeline_plan import PipelinePlan
from plait.core.schedule import Schedule, forward_only
from plait.core.segment_costs import SegmentCosts
from plait.core.segments import Phase
from plait.core.strategy import Strategy, slice_sizes
from plait.train.engine.courier import LaneCourier
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups, open_groups
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.pipeline import Pipeline
from plait.train.engine.shards import Shards
from plait.train.engine.steps import make_executor
from plait.train.machine.device import Device
from plait.train.model.transformer import Stages, Transformer
from plait.train.record.recorder import Recorder


@dataclass(frozen=True)
class Part:
    """What one rank has of a pipelined job. largest_share: the most sequences of a micro-batch that a replica
    of its place has, from which orders are made, so that all replicas have the same. eval_batches:
    micro-batches of an evaluation."""

    plan: PipelinePlan
    rank: int
    strategy: Strategy
    models: Stages
    gradients: Gradients
    groups: Groups
    courier: LaneCourier
    device: Device
    largest_share: int
    sequence: int
    seed: int
    costs: SegmentCosts | None
    recorder: Recorder | None
    eval_batches: int
    shards: Shards | None

    @cached_property
    def pipeline(self) -> Pipeline:
        """The interpreter of the plan's schedule."""
        return self._interpreter(self.plan.schedule)

    @cached_property
    def evaluator(self) -> Pipeline | None:
        """The interpreter of an evaluation, forwards only."""
        return self._interpreter(forward_only(self.plan.schedule, self.eval_batches)) if self.eval_batches else None

    def own(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This rank's sequences of each micro-batch, its data-parallel share, and of each of them its
        tokens."""
        positions = self.positions
        found: list[MicroBatch] = []
        for batch in batches:
            r = self.plan.rows_of(self.rank, len(batch.tokens))
            tokens, targets = (t[r] if positions is None else t[r][:, positions] for t in (batch.tokens, batch.targets))
            found.append(replace(batch, tokens=tokens, targets=targets, samples=batch.samples[r], positions=positions))
        return found

    @cached_property
    def positions(self) -> Tensor | None:
        """Which tokens of every sequence this rank computes, None for all."""
        if self.plan.sequence.cp == 1:
            return None
        runs = self.plan.sequence.tokens(self.sequence, self.groups.mesh.coordinates(self.rank)["cp"])
        return torch.cat([torch.arange(run.start, run.stop) for run in runs])

    def changed(self, strategy: Strategy, costs: SegmentCosts | None, schedule: Schedule | None = None) -> Part:
        """The same part with other slices, or in another order of the same stages; it shares weights,
        gradients and wires."""
        plan = replace(self.plan, schedule=schedule) if schedule else self.plan
        return replace(self, plan=plan, strategy=replace(strategy, tp=self.strategy.tp), costs=costs)

    def _interpreter(self, schedule: Schedule) -> Pipeline:
        recorder = self.recorder if schedule.trains else None
        executors = {
            model.stage.index: make_executor(
                model,
                self.strategy,
                self.groups.tp,
                gradients=self.gradients if schedule.trains else None,
                device=self.device,
                batch=self.largest_share,
                sequence=self.sequence,
                costs=self.costs,
                recorder=recorder,
                seed=self.seed,
                phases=_phases(schedule, model.stage.index),
                shards=self.shards,
            )
            for model in self.models.stages
        }
        return Pipeline(schedule, self.plan.names, self.groups.place, executors, self.courier, recorder, self.shards)


def assemble(
    spec: ModelSpec,
    strategy: Strategy,
    plan: PipelinePlan,
    rank: int,
    device: Device,
    *,
    micro_batch: int,
    sequence: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    costs: SegmentCosts | None = None,
    recorder: Recorder | None = None,
    eval_batches: int = 0,
) -> Part:
    """Called by all ranks at the same point. strategy: its ``tp`` is the plan's. eval_batches: micro-batches
    of an evaluation.

    Raises ScheduleError naming the ranks that have another plan.
    """
    _agree_on(plan)
    place = plan.place_of(rank)
    dp, tp = plan.degrees[place]
    tied = bool(spec.tied_embeddings) and len(plan.stages) > 1
    groups = open_groups(
        plan.meshes,
        rank,
        device.backend,
        last=plan.schedule.rank_of[len(plan.stages) - 1],
        tied=tied,
        shardings=plan.shardings,
        sequence=plan.sequence,
    )
    strategy = replace(strategy, tp=tp)
    to = device.torch_device
    models = Stages(
        [
            Transformer(
                spec,
                strategy,
                tp_rank=groups.tp_rank,
                stage=plan.stages[s],
                seed=seed,
                dtype=dtype,
                device=to,
                sharding=groups.sharding,
                sequence=groups.sequence,
                shard_rank=groups.replica,
            )
            for s in plan.schedule.stages_of(place)
        ]
    )
    gradients = Gradients(models)
    return Part(
        plan=plan,
        rank=rank,
        strategy=strategy,
        models=models,
        gradients=gradients,
        groups=groups,
        courier=LaneCourier(plan.schedule, plan.reshards, groups, device, dtype),
        device=device,
        largest_share=slice_sizes(micro_batch, dp)[0],
        sequence=sequence,
        seed=seed,
        costs=costs,
        recorder=recorder,
        eval_batches=eval_batches,
        shards=Shards(models, gradients, groups.shards, device, recorder) if groups.mesh.replicas > 1 else None,
    )


def _agree_on(plan: PipelinePlan) -> None:
    """Ranks that obey different plans wait for each other, or add up what does not belong together."""
    if not dist.is_initialized():
        return
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, plan.hash)
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    if others:
        raise ScheduleError(
            f"ranks {others} have another pipeline plan than rank 0: every node needs the same pipeline.json and plait"
        )


def _phases(schedule: Schedule, stage: int) -> Sequence[Phase]:
    kinds = {op.kind for ops in schedule.ranks for op in ops if op.stage == stage}
    return [phase for phase in ("F", "B", "I", "W") if phase in kinds]

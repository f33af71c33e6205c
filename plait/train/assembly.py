"""One rank's part of a planned pipeline, put together: models of its stages, their gradients, its wires, the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.core.model import ModelSpec
from plait.core.overlap import SegmentCosts
from plait.core.pipeline_plan import PipelinePlan
from plait.core.segments import Phase
from plait.core.strategy import Strategy, slice_sizes
from plait.train.courier import LaneCourier
from plait.train.device import Device
from plait.train.executor import MicroBatch
from plait.train.gradients import Gradients
from plait.train.groups import Groups, open_groups
from plait.train.model import Stages, Transformer
from plait.train.pipeline import Pipeline
from plait.train.recorder import Recorder
from plait.train.steps import make_executor


@dataclass(frozen=True)
class Part:
    """What one rank has of a pipelined job."""

    plan: PipelinePlan
    rank: int
    strategy: Strategy
    models: Stages
    gradients: Gradients
    groups: Groups
    pipeline: Pipeline
    courier: LaneCourier

    def rows(self, tokens: Tensor, targets: Tensor, samples: Tensor, size: int, scale: float, step: int) -> list[MicroBatch]:
        """This rank's share of a batch [B, S] in micro-batches of ``size`` sequences over all dp."""
        parts = zip(tokens.split(size), targets.split(size), samples.split(size), strict=True)
        own = [self.plan.rows_of(self.rank, len(t)) for t in tokens.split(size)]
        return [MicroBatch(t[r], y[r], s[r], scale, step) for r, (t, y, s) in zip(own, parts, strict=True)]


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
) -> Part:
    """Called by all ranks at the same point. strategy: its ``tp`` is taken from the plan's mesh."""
    place = plan.place_of(rank)
    dp, tp = plan.degrees[place]
    stages = plan.schedule.stages_of(place)
    tied = bool(spec.tied_embeddings) and len(plan.stages) > 1
    groups = open_groups(plan.meshes, rank, device.backend, last=plan.schedule.rank_of[len(plan.stages) - 1], tied=tied)
    share = slice_sizes(micro_batch, dp)[groups.dp_rank]
    strategy = replace(strategy, tp=tp)
    to = device.torch_device
    models = {
        s: Transformer(spec, strategy, tp_rank=groups.tp_rank, stage=plan.stages[s], seed=seed, dtype=dtype, device=to) for s in stages
    }
    held = Stages(list(models.values()))
    gradients = Gradients(held)
    executors = {
        s: make_executor(
            model,
            strategy,
            groups.tp,
            gradients=gradients,
            device=device,
            batch=share,
            sequence=sequence,
            costs=costs,
            recorder=recorder,
            seed=seed,
            phases=_phases(plan, s),
        )
        for s, model in models.items()
    }
    courier = LaneCourier(plan.schedule, plan.reshards, groups, device, dtype)
    pipeline = Pipeline(plan.schedule, place, executors, courier)
    return Part(plan, rank, strategy, held, gradients, groups, pipeline, courier)


def _phases(plan: PipelinePlan, stage: int) -> Sequence[Phase]:
    kinds = {op.kind for ops in plan.schedule.ranks for op in ops if op.stage == stage}
    return [phase for phase in ("F", "B", "I", "W") if phase in kinds]

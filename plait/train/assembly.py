"""One rank's part of a planned pipeline, put together: models of its stages, their gradients, its wires, the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from plait.core.errors import ScheduleError
from plait.core.model import ModelSpec
from plait.core.overlap import SegmentCosts
from plait.core.pipeline_plan import PipelinePlan
from plait.core.schedule import Schedule, forward_only
from plait.core.segments import Phase
from plait.core.strategy import Strategy, slice_sizes
from plait.train.courier import LaneCourier
from plait.train.device import Device
from plait.train.executor import MicroBatch, SegmentExecutor
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
    evaluator: Pipeline | None

    def own(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This rank's sequences of each micro-batch: its data-parallel share."""
        rows = [self.plan.rows_of(self.rank, len(batch.tokens)) for batch in batches]
        return [
            replace(batch, tokens=batch.tokens[r], targets=batch.targets[r], samples=batch.samples[r])
            for r, batch in zip(rows, batches, strict=True)
        ]


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
    """Called by all ranks at the same point. strategy: its ``tp`` is the plan's. eval_batches: micro-batches of an evaluation.

    Raises ScheduleError naming the ranks that have another plan.
    """
    _agree_on(plan)
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

    def executors(schedule: Schedule) -> dict[int, SegmentExecutor]:
        return {
            s: make_executor(
                model,
                strategy,
                groups.tp,
                gradients=gradients if schedule.trains else None,
                device=device,
                batch=share,
                sequence=sequence,
                costs=costs,
                recorder=recorder if schedule.trains else None,
                seed=seed,
                phases=_phases(schedule, s),
            )
            for s, model in models.items()
        }

    courier = LaneCourier(plan.schedule, plan.reshards, groups, device, dtype)
    pipeline = Pipeline(plan.schedule, plan.names, place, executors(plan.schedule), courier, recorder)
    evaluator = None
    if eval_batches:
        forward = forward_only(plan.schedule, eval_batches)
        evaluator = Pipeline(forward, plan.names, place, executors(forward), courier)
    return Part(plan, rank, strategy, held, gradients, groups, pipeline, courier, evaluator)


def _agree_on(plan: PipelinePlan) -> None:
    """Ranks that obey different plans wait for each other, or add up what does not belong together."""
    if not dist.is_initialized():
        return
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, plan.hash)
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    if others:
        raise ScheduleError(f"ranks {others} have another pipeline plan than rank 0: every node needs the same pipeline.json and plait")


def _phases(schedule: Schedule, stage: int) -> Sequence[Phase]:
    kinds = {op.kind for ops in schedule.ranks for op in ops if op.stage == stage}
    return [phase for phase in ("F", "B", "I", "W") if phase in kinds]

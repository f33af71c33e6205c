"""Planning a pipeline: its schedule with transfers, proven free of deadlock, and how every boundary is
resharded."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.dry_run import dry_run
from plait.core.errors import JobError
from plait.core.layout import Mesh, SequenceCut, meshes
from plait.core.model import ModelSpec
from plait.core.pipeline_plan import WHOLE_SEQUENCE, PipelinePlan
from plait.core.reshard import TensorLayout
from plait.core.reshard_plan import ReshardPlan
from plait.core.schedule import Edge, Schedule, with_edges, with_transfers
from plait.core.sharding import Sharding
from plait.core.stages import crossings, split_layers
from plait.plan.reshard import Fabric, make_plan


def plan_pipeline(
    model: ModelSpec,
    schedule: Schedule,
    degrees: Sequence[tuple[int, int]],
    fabric: Fabric,
    *,
    micro_batch: int,
    num_micro_batches: int,
    sequence: int,
    itemsize: int,
    sequence_parallel: bool = False,
    stage_layers: Sequence[int] = (),
    shardings: Sequence[Sharding] = (),
    sequence_cut: SequenceCut = WHOLE_SEQUENCE,
) -> PipelinePlan:
    """The plan of a ``schedule``, with transfers or without, on meshes of (dp, tp) ``degrees``; micro_batch:
    sequences, over all dp.

    Raises JobError where places, layers or micro-batches do not fit, ScheduleError if the schedule cannot
    run.
    """
    if len(schedule.ranks) != len(degrees):
        raise JobError(
            f"{schedule.name} is for {len(schedule.ranks)} places, the job has {len(degrees)}", key="strategy.schedule"
        )
    if schedule.num_micro_batches != num_micro_batches:
        raise JobError(
            f"{schedule.name} is for {schedule.num_micro_batches} micro-batches, a step has {num_micro_batches}",
            key="strategy.schedule",
            fix="Change train.global_batch_size or train.micro_batch_size",
        )
    for dp, _ in degrees:
        if dp > micro_batch:
            raise JobError(
                f"dp = {dp} shares a micro-batch of {micro_batch} sequences",
                key="strategy.dp",
                fix=f"Use dp <= {micro_batch}",
            )
    stages = split_layers(model.num_layers, schedule.num_stages, stage_layers)
    tensors = crossings(model, stages)
    if all(op.computes for ops in schedule.ranks for op in ops):
        schedule = with_transfers(with_edges(schedule, tensors))
    elif set(schedule.edges) != set(tensors):
        wanted = " ".join(f"{a}>{b}" for a, b in tensors)
        raise JobError(f"{schedule.name} has other edges than the model, which has {wanted}", key="strategy.schedule")
    dry_run(schedule, transfers="rendezvous")
    places = meshes(degrees, sequence_cut.cp)
    reshards: dict[Edge, dict[str, ReshardPlan]] = {}
    known: dict[tuple[TensorLayout, TensorLayout, int], ReshardPlan] = {}
    lying = [_layout(places[schedule.rank_of[stage]], sequence_parallel) for stage in range(schedule.num_stages)]
    for source, target in (*schedule.edges, *((b, a) for a, b in schedule.edges)):
        if schedule.rank_of[source] != schedule.rank_of[target]:
            for name, level in tensors[min(source, target), max(source, target)]:
                key = lying[source], lying[target], level
                if key not in known:
                    known[key] = make_plan(
                        lying[source], lying[target], (sequence >> level, micro_batch, model.hidden), itemsize, fabric
                    )
                reshards.setdefault((source, target), {})[name] = known[key]
    names = {edge: tuple(name for name, _ in found) for edge, found in tensors.items()}
    return PipelinePlan(schedule, tuple(degrees), stages, names, reshards, tuple(shardings), sequence_cut)


def _layout(mesh: Mesh, sequence_parallel: bool) -> TensorLayout:
    """[S, B, H] on a mesh (dp, cp, tp): B over dp, S over cp, and over tp where shards of it are what ranks
    hold between layers.

    Which tokens stand where in S is the same at every place, so a boundary need not know it.
    """
    return TensorLayout(
        (mesh.dp, mesh.cp, mesh.tp), tuple(mesh.ranks), ((1, 2) if sequence_parallel else (1,), (0,), ())
    )

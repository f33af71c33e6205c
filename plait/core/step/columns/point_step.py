"""A point of the strategy space as a step that can be walked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Overlap, Recompute, ShardOverlap, Strategy
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS
from plait.core.step.schedules import Shape, generate, own_chunks
from plait.core.step.step import Step, Workload


def step_of(model: ModelSpec, point: Mapping[str, int], *, sequence: int, precision: Precision) -> Step:
    """A point of the strategy space (``Points.row``), to be walked. Raises ScheduleError or JobError where it
    cannot be."""
    name, pp = SCHEDULES[point["schedule"]], point["pp"]
    chunks = point["virtual"] if name == "interleaved" else own_chunks(name)
    slack = (2,) * (pp - 1) if name == "slack-1f1b" else ()
    shape = Shape(ranks=pp, micro_batches=point["num_micro"], chunks=chunks, slack=slack)
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
    )
    layout = Layout.of(pp=pp, dp=point["dp"], cp=point["cp"], tp=point["tp"])
    return Step.of(model, workload, strategy, layout, generate(name, shape), shardings=[sharding] * pp)

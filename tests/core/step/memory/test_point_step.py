"""A point of the strategy space as a step that can be walked, and what of it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, StrategyTable
from plait.core.step.memory.estimate import step_of
from plait.core.step.step import Step

GPT = ModelSpec(family="gpt", num_layers=8, hidden=32, num_heads=8, vocab=48, max_sequence=64)


def step(sequence: int = 32, **row: int) -> Step:
    return step_of(GPT, StrategyTable.of([row]).row(0), sequence=sequence, precision="bf16-mixed")


def test_all_that_a_point_says() -> None:
    found = step(
        pp=2, dp=4, cp=4, ring=2, tp=2, micro=3, num_micro=6, schedule=SCHEDULES.index("interleaved"),
        virtual=2, recompute=RECOMPUTES.index("full"), recompute_layers=1, sequence_parallel=1, params=4, grads=4,
        optim=8, secondary=2, overlap=OVERLAPS.index("async"), shard_overlap=SHARD_OVERLAPS.index("forward"), p1=1,
        p2=1,
    )  # fmt: skip
    assert found.strategy == Strategy(
        tp=2, cp=4, ring=2, overlap="async", sequence_parallel=True, recompute="full", recompute_layers=1,
        shard_overlap="forward",
    )  # fmt: skip
    assert found.layout == Layout.of(pp=2, dp=4, cp=4, tp=2)
    assert found.shardings == (Sharding(params=4, grads=4, optim=8, secondary=2),) * 2
    assert [stage.num_layers for stage in found.stages] == [2] * 4
    assert (found.schedule.name, len(found.schedule.ranks)) == ("interleaved", 2)
    work = found.workload
    assert (work.micro_batch, work.num_micro_batches, work.sequence, work.precision) == (12, 6, 32, "bf16-mixed")


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 4), ("zb-v", 8), ("slack-1f1b", 4), ("zb-h1", 4), ("gpipe", 4)])
def test_stages_follow_from_the_schedule(name: str, stages: int) -> None:
    found = step(pp=4, num_micro=8, schedule=SCHEDULES.index(name), virtual=2)
    assert (found.schedule.num_stages, len(found.stages)) == (stages, stages)
    assert found.strategy.recompute_layers is None


def test_no_layer_may_be_recomputed() -> None:
    assert step(recompute=RECOMPUTES.index("full"), recompute_layers=0).strategy.recompute_layers == 0
    assert (step(p1=2, p2=4, micro=2, tp=2).strategy.p1, step(p1=2, p2=4, micro=2, tp=2).strategy.p2) == (2, 4)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"tp": 3}, "strategy.tp"),
        ({"dp": 4, "optim": 3}, "strategy.shard.optim"),
        ({"dp": 2, "cp": 2, "optim": 4, "grads": 4, "params": 3}, "strategy.shard.params"),
        ({"p1": 4, "micro": 2, "tp": 2}, "strategy.slices.batch"),
    ],
)
def test_what_cannot_be_is_refused(row: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError) as refused:
        step(**row)
    assert refused.value.key == key
    assert step(dp=2, cp=2, optim=4).shardings == (Sharding(optim=4),)

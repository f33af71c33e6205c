"""Planning pipelines: what crosses is planned both ways, the file reads back equal, misfits are
named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE, Hosts
from plait.core.job.plan import Choices, Plan
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.layouts import Reshard
from plait.core.step.schedule import Schedule, with_transfers
from plait.core.step.schedules import Shape, generate, parse_schedule
from plait.core.step.step import Step, Workload
from plait.plan.make import assemble_plan, make_plan
from plait.plan.reshard.boundary import plan_reshard
from plait.plan.reshard.cost import Fabric

U = ModelSpec(family="utransformer", num_layers=5, levels=2, hidden=8, num_heads=2, vocab=9, max_sequence=16)
DEGREES = ((2, 1), (1, 2), (1, 1))


def planned(schedule: Schedule | None = None, **changes: Any) -> Plan:
    given: dict[str, Any] = {"micro_batch": 4, "num_micro_batches": 3, "sequence": 16} | changes
    degrees, layers = given.pop("degrees", DEGREES), given.pop("stage_layers", ())
    schedule = schedule or generate("eager-1f1b", Shape(ranks=3, micro_batches=3))
    step = Step.of(U, Workload(**given), Strategy(), Layout(degrees), schedule, stage_layers=layers)
    return assemble_plan(step, Hosts(ranks_per_host=2, rate=1e9))


def test_every_tensor_is_planned_both_ways_with_its_own_shape() -> None:
    plan = planned(stage_layers=(2, 1, 2))
    assert plan.names == {(0, 1): ("h",), (0, 2): ("skip0",), (1, 2): ("h", "skip1")}
    assert set(plan.reshards[False]) == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}
    shapes = {(edge, name): one.shape for edge, named in plan.reshards[False].items() for name, one in named.items()}
    assert shapes[(0, 1), "h"] == (8, 4, 8)
    assert shapes[(2, 0), "skip0"] == (16, 4, 8)
    assert shapes[(1, 2), "skip1"] == (8, 4, 8)
    assert [list(mesh.ranks) for mesh in plan.layout.meshes] == [[0, 1], [2, 3], [4]]
    assert [plan.rows_of(rank, 4) for rank in range(5)] == [
        slice(0, 2),
        slice(2, 4),
        slice(0, 4),
        slice(0, 4),
        slice(0, 4),
    ]


def test_a_schedule_by_hand_must_have_the_models_edges() -> None:
    chain = with_transfers(generate("1f1b", Shape(ranks=3, micro_batches=3)))
    with pytest.raises(JobError, match="0>1 0>2 1>2"):
        planned(chain)
    again = parse_schedule(str(planned().schedule))
    assert planned(again).schedule == again


@pytest.mark.parametrize(("changes", "says"), [
    ({"degrees": ((1, 1), (1, 1))}, "is for pp = 3, but the job has pp = 2"),
    ({"num_micro_batches": 4}, "is for 3 micro-batches, a step has 4"),
    ({"micro_batch": 1}, "dp = 2 exceeds the 1 sequences"),
    ({"stage_layers": (4, 1)}, "is not a division of 5 layers over 3 stages"),
])  # fmt: skip
def test_what_does_not_fit_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        planned(**changes)


def test_one_place_needs_no_transfer() -> None:
    schedule = replace(generate("interleaved", Shape(ranks=1, micro_batches=2, chunks=2)), name="two on one")
    plan = planned(schedule, degrees=((1, 1),), num_micro_batches=2)
    assert plan.reshards == {False: {}}
    assert plan.names == {(0, 1): ("h", "skip0", "skip1")}


def test_a_file_that_is_called_like_a_generator_is_what_is_planned(tmp_path: Path) -> None:
    """As what ``plait schedule`` printed is, once somebody has changed it."""
    other = replace(generate("gpipe", Shape(ranks=2, micro_batches=4)), name="1f1b")
    (tmp_path / "mine.txt").write_text(str(other))
    shapes = {"family": "gpt", "num_layers": 2, "hidden": 8, "num_heads": 2, "vocab": 9, "max_sequence": 16}
    values = {
        "model": shapes,
        "data": {"text": "x.txt", "sequence_length": 16},
        "train": {"global_batch_size": 4, "micro_batch_size": 1},
        "strategy": {"pp": 2, "schedule": str(tmp_path / "mine.txt")},
    }
    for draft in (True, False):
        plan = make_plan(Job.from_dict(values), Hosts(ranks_per_host=2, rate=1e9), vocab=9, draft=draft)
        computing = [[op for op in ops if op.computes] for ops in plan.schedule.ranks]
        assert computing == [list(ops) for ops in other.ranks]


@pytest.mark.parametrize("each", [2, 3, 4, 8])
@pytest.mark.parametrize("degrees", [((2, 2),) * 5, ((1, 4), (4, 1), (1, 4), (4, 1)), ((3, 1),) * 4])
def test_boundaries_that_are_alike_have_the_plan_that_each_would_have(
    each: int, degrees: tuple[tuple[int, int], ...]
) -> None:
    hosts, pp = Hosts(ranks_per_host=each, rate=1e9), len(degrees)
    model = ModelSpec(family="gpt", num_layers=pp, hidden=8, num_heads=4, vocab=9, max_sequence=16)
    workload = Workload(micro_batch=4, num_micro_batches=3, sequence=16)
    schedule = generate("1f1b", Shape(ranks=pp, micro_batches=3))
    plan = assemble_plan(Step.of(model, workload, Strategy(), Layout(degrees), schedule), hosts)
    fabric = Fabric(hosts=hosts.of(plan.layout.world_size), rate=1e9)
    for named in plan.reshards[False].values():
        for one in named.values():
            assert one == plan_reshard(Reshard(one.source, one.destination, one.shape, one.itemsize), fabric)
    ranks = {(min(one["h"].source.ranks), min(one["h"].destination.ranks)) for one in plan.reshards[False].values()}
    assert len(ranks) == 2 * (pp - 1)


def job_of(degrees: Any = 1, tp: Any = 2, batch: int = 16, **strategy: Any) -> Job:
    """degrees: of dp."""
    shapes = {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 8, "vocab": 64, "max_sequence": 64}
    values = {
        "model": shapes,
        "data": {"text": "x.txt", "sequence_length": 64},
        "train": {"global_batch_size": batch, "micro_batch_size": 0},
        "strategy": {"dp": degrees, "tp": tp, **strategy},
    }
    return Job.from_dict(values)


def choices(**asked: Any) -> Choices:
    """What timed steps are to choose from."""
    return make_plan(job_of(**asked), HERE, vocab=64).choices


def told(found: Choices) -> set[tuple[int, int, bool]]:
    return {(one.p1, one.p2, one.sequence_parallel) for one in found.strategies}


ALL = {(p1, p2) for p1 in (1, 2, 4, 8) for p2 in (1, 2)}


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"slices": "auto"}, {(p1, p2, False) for p1, p2 in ALL}),
        ({"slices": "auto", "sequence_parallel": True}, {(p1, p2, True) for p1, p2 in ALL}),
        ({"slices": "auto", "sequence_parallel": "auto"}, {(*one, flat) for one in ALL for flat in (False, True)}),
        ({"slices": {"batch": 2, "columns": 2}, "sequence_parallel": "auto"}, {(2, 2, False), (2, 2, True)}),
        ({"slices": {"batch": 2, "columns": 2}}, set()),
        ({"slices": "auto", "tp": 1}, set()),
        ({"slices": "auto", "tp": 1, "degrees": 2}, set()),
        ({"slices": "auto", "tp": 1, "cp": 2}, {(p1, 1, False) for p1 in (1, 2, 4, 8)}),
        ({"slices": "auto", "tp": 1, "cp": 2, "sequence_parallel": "auto"}, {(p1, 1, False) for p1 in (1, 2, 4, 8)}),
        ({"slices": {"batch": 1, "columns": 1}, "tp": 1, "cp": 2, "sequence_parallel": "auto"}, set()),
        ({"slices": "auto", "batch": 4}, {(p1, p2, False) for p1, p2 in ALL if p1 <= 4}),
        ({"slices": "auto", "degrees": 4, "batch": 8}, {(p1, p2, False) for p1, p2 in ALL if p1 <= 2}),
        ({"slices": "auto", "pp": 2, "degrees": [4, 2], "tp": [2, 4], "batch": 8, "schedule": "1f1b"},
         {(p1, p2, False) for p1, p2 in ALL if p1 <= 2}),
        ({"slices": "auto", "pp": 2, "degrees": [4, 2], "tp": [1, 2], "batch": 8, "schedule": "1f1b"},
         {(p1, p2, False) for p1, p2 in ALL if p1 <= 2}),
    ],
)  # fmt: skip
def test_slices_and_streams_that_every_place_allows_are_to_be_timed(
    asked: dict[str, Any], wanted: set[tuple[int, int, bool]]
) -> None:
    assert told(choices(**asked)) == wanted


@pytest.mark.parametrize(
    ("asked", "key", "open_"),
    [
        ({"overlap": {"tp": "domino", "shard": "auto"}, "degrees": 2}, "shard_overlap", True),
        ({"overlap": {"tp": "domino", "shard": "auto"}, "degrees": 1}, "shard_overlap", False),
        ({"overlap": {"tp": "domino", "shard": "both"}, "degrees": 2}, "shard_overlap", False),
        ({"overlap": {"shard": "auto"}, "pp": 2, "degrees": [2, 1], "tp": [1, 2], "schedule": "1f1b"},
         "shard_overlap", True),
        ({"schedule": "slack-1f1b", "pp": 2}, "slack", True),
        ({"schedule": "slack-1f1b"}, "slack", False),
        ({"schedule": "slack-1f1b", "pp": 2, "slack": [1]}, "slack", False),
        ({"schedule": "1f1b", "pp": 2}, "slack", False),
        ({"compile": "auto"}, "compile", True),
        ({"compile": False}, "compile", False),
    ],
)  # fmt: skip
def test_what_the_job_leaves_open_is_to_be_timed_where_it_matters(asked: dict[str, Any], key: str, open_: bool) -> None:
    assert getattr(choices(**asked), key) == open_


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "whole"),
        ({"degrees": 2}, "eager-1f1b"),
        ({"tp": 1, "cp": 2}, "eager-1f1b"),
        ({"pp": 2}, "eager-1f1b"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "interleaved"),
    ],
)
def test_micro_batches_of_one_rank_alone_run_whole(asked: dict[str, Any], name: str) -> None:
    """Where neither stages nor replicas share a step; other schedules are the generators'."""
    assert make_plan(job_of(**asked), HERE, vocab=64).schedule.name == name

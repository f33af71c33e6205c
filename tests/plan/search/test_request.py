"""What a job asks of the planner, and the job that a point makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.step.columns.points import SCHEDULES, WORDS, StrategyTable
from plait.core.step.memory.closed_memory import step_memory
from plait.core.step.schedules import generate, planned_shape
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.search.request import job_at, point_of, ranks_of, search_request
from plait.plan.search.space import enumerate_space

H100 = Cluster.preset("h100")


def job(*, strategy: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **train: Any) -> Job:
    values: dict[str, Any] = {
        "model": {"preset": "gpt3-125m"},
        "train": {"global_batch_size": 64, **train},
        "cluster": {"preset": "h100", "ranks": 16, **(cluster or {})},
    }
    return Job.from_dict(values | ({} if strategy is None else {"strategy": strategy}))


def asked(one: Job) -> Any:
    return search_request(one, one.model_spec(vocab=257), H100)


def test_a_micro_batch_that_is_said_is_kept() -> None:
    assert asked(job(micro_batch_size=2)).fixed["micro"] == [2]
    assert "micro" not in asked(job(strategy={"tp": "auto"}, micro_batch_size="auto")).fixed


def test_what_is_captured_is_planned_with_weights_and_gradients_that_stay() -> None:
    open_ = dict.fromkeys(("tp", "dp", "pp", "shard"), "auto")
    for graphs, stays in ((True, True), ("auto", False), (False, False)):
        points = enumerate_space(asked(job(strategy=open_ | {"cuda_graphs": graphs})))
        assert (points.params.max() == points.grads.max() == 1) == stays
        assert points.optim.max() > 1
        assert set(points.graphs.tolist()) == {int(stays)}
        assert point_of(job_at(job(strategy=open_ | {"cuda_graphs": graphs}), points.row(0)))["graphs"] == stays


@pytest.mark.parametrize(
    ("strategy", "key", "words"),
    [
        ({"pp": 2, "dp": [2, 4], "tp": [4, 2], "recompute": "auto"}, "strategy.dp", "differs between pp ranks"),
        ({"pp": "auto", "schedule": "mine.txt"}, "strategy.schedule", "unknown schedule"),
    ],
)
def test_what_cannot_be_searched_around_is_named(strategy: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as caught:
        asked(job(strategy=strategy))
    assert caught.value.key == key


def test_a_schedule_in_a_file_is_searched_with_its_places_and_micro_batches(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(str(generate("zb-v", planned_shape("zb-v", 2, 4))))
    open_ = dict.fromkeys(("tp", "dp", "pp", "shard", "recompute"), "auto")
    space = asked(job(strategy=open_ | {"schedule": str(file)}))
    points = enumerate_space(space)
    assert set(points.pp.tolist()) == {2} and set(points.num_micro.tolist()) == {4}
    assert len({tuple(row) for row in zip(points.tp, points.dp, strict=True)}) > 1
    named = replace(points, schedule=np.full(len(points), SCHEDULES.index("zb-v")))
    for found, known in ((each(points), each(named)) for each in (memory_of, seconds_of)):
        assert found == pytest.approx(known, rel=0.03)
    with pytest.raises(JobError, match="is for pp = 2, but the job has pp = 4"):
        asked(job(strategy=open_ | {"pp": 4, "schedule": str(file)}))


def memory_of(points: StrategyTable) -> np.ndarray:
    return step_memory(job().model_spec(vocab=32_000), points, sequence=job().data.sequence_length).total


def seconds_of(points: StrategyTable) -> np.ndarray:
    model, length = job().model_spec(vocab=32_000), job().data.sequence_length
    return total_seconds(model, points, H100, sequence=length, precision="bf16-mixed")


def test_ranks_are_the_jobs_or_the_strategys_or_all_there_are() -> None:
    assert ranks_of(job(), H100) == 16
    fixed = job(strategy={"tp": 2, "dp": 2, "pp": 2, "cp": 1, "schedule": "auto"}, cluster={"ranks": 0})
    assert ranks_of(fixed, H100) == 8
    lab = Cluster.preset("lab")
    assert ranks_of(job(cluster={"ranks": 0}), lab) == lab.nodes * lab.ranks_per_node
    with pytest.raises(JobError, match=r"is 0 or missing.*at least 1: the number of ranks to use on h100"):
        ranks_of(job(cluster={"ranks": 0}), H100)
    with pytest.raises(JobError, match=r"6 ranks exceed the 4 of lab \(2 nodes of 2\) by 2\. Use at most 4"):
        ranks_of(job(cluster={"preset": "lab", "ranks": 6}), lab)
    with pytest.raises(JobError, match=r"6 ranks exceed the 4 of lab"):
        ranks_of(job(cluster={"preset": "here", "file": "lab.toml", "ranks": 6}), lab)
    assert ranks_of(job(cluster={"preset": "here", "ranks": 6}), lab) == 6, "this machine runs as many as one likes"
    assert ranks_of(job(cluster={"preset": "lab", "ranks": 4}), lab) == 4
    with pytest.raises(JobError, match=r"cluster\.ranks: 1000000000000000000 is not allowed"):
        ranks_of(job(cluster={"ranks": 10**18}), H100)


@pytest.mark.parametrize("key", ["dp", "tp"])
def test_places_that_are_equal_are_one_number(key: str) -> None:
    fixed = dict(asked(job(strategy={"pp": 2, key: [2, 2], "recompute": "auto"})).fixed)
    assert fixed[key] == [2] and fixed["pp"] == [2]


def test_a_point_makes_a_job_that_stands_at_it() -> None:
    one = job()
    space = enumerate_space(asked(one), most=2_000)
    for at in range(0, len(space), max(1, len(space) // 150)):
        row = space.row(at)
        made = job_at(one, row)
        assert made.open == ()
        assert point_of(made) == row
        assert Job.from_dict(made.to_dict()) == made


def test_the_point_of_unequal_places_is_the_firsts() -> None:
    one = job(strategy={"pp": 2, "dp": [4, 2], "tp": [2, 4], "schedule": "1f1b"}, micro_batch_size=4)
    point = point_of(one)
    assert (point["dp"], point["tp"], point["schedule"]) == (4, 2, SCHEDULES.index("1f1b"))


def test_layers_of_stages_are_not_dropped_by_a_search() -> None:
    values = {"model": {"preset": "gpt3-125m"}, "strategy": {"pp": 2, "tp": "auto", "stage_layers": [5, 7]}}
    with pytest.raises(JobError, match=r"strategy\.stage_layers: \[5, 7\] fixes the layers of stages"):
        asked(Job.from_dict(values))


@pytest.mark.parametrize(
    ("strategy", "fixed"),
    [
        ({"cp": 4, "cp_comm_type": "ulysses"}, {"cp": 4, "ring": 1}),
        ({"cp": 4, "cp_comm_type": "ring"}, {"cp": 4, "ring": 4}),
        ({"cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}}, {"cp": 4, "ring": 2}),
        ({"cp": "auto", "cp_comm_type": "ulysses"}, {"ring": 1}),
        ({"pp": 2, "schedule": "zb-v"}, {"schedule": "zb-v", "virtual": 2}),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
         {"schedule": "interleaved", "virtual": 2}),
        ({"pp": 2, "schedule": "1f1b"}, {"schedule": "1f1b", "virtual": 1}),
        ({"pp": 2, "schedule": "auto", "virtual_stages": "auto"}, {"pp": 2}),
        ({"recompute": {"kind": "full", "layers": 3}, "shard": "zero1"}, {"recompute": "full", "recompute_layers": 3}),
        ({"recompute": "selective"},
         {"recompute": "selective", "recompute_layers": -1}),
        ({"overlap": "sync"},
         {"overlap": "sync", "shard_overlap": "none"}),
        ({"overlap": "async"},
         {"overlap": "async", "shard_overlap": "both"}),
        ({"overlap": {"tp": "sync", "shard": "forward"}},
         {"overlap": "sync", "shard_overlap": "forward"}),
        ({"overlap": {"tp": "sync", "shard": "auto"}},
         {"overlap": "sync", "shard_overlap": "both"}),
        ({"tp": 2, "dp": "auto", "sequence_parallel": True}, {"sequence_parallel": 1}),
        ({"tp": 2, "dp": "auto", "sequence_parallel": False}, {"sequence_parallel": 0}),
        ({"slices": {"batch": 2, "columns": 4}}, {"p1": 2, "p2": 4}),
        ({"dp": 4, "shard": {"params": 1, "grads": 2, "optim": 4}},
         {"params": 1, "grads": 2, "optim": 4, "secondary": 0}),
    ],
)  # fmt: skip
def test_columns_that_are_fixed_by_what_is_said(strategy: dict[str, Any], fixed: dict[str, int | str]) -> None:
    request = asked(job(strategy={"tp": "auto"} | strategy))
    assert request.shard == (strategy["shard"] if isinstance(strategy.get("shard"), str) else request.shard)
    found = request.fixed
    columns = {name: [WORDS[name].index(one) if isinstance(one, str) else one] for name, one in fixed.items()}
    assert {name: found.get(name) for name in fixed} == columns
    if "ring" not in fixed and "cp" in strategy:
        assert "ring" not in found
    open_ = [name for name, value in strategy.items() if value == "auto"]
    assert not {*open_, *(["virtual"] if "virtual_stages" in open_ else [])} & set(found)


def test_a_batch_has_as_many_micro_batches_as_are_tried_at_most() -> None:
    most = 16 * 64 * 4096
    assert asked(job(global_batch_size=most)).global_batch == most
    says = r"4,194,305 sequences need more than 4,096 micro-batches of 64 on each of 16 ranks\. Use at most 4,194,304"
    with pytest.raises(JobError, match=says) as caught:
        asked(job(global_batch_size=most + 1))
    assert caught.value.key == "train.global_batch_size"
    assert asked(job(global_batch_size=16 * 128 * 4096, micro_batch_size=128)).global_batch == 16 * 128 * 4096
    with pytest.raises(JobError, match="micro-batches of 64"):
        asked(job(global_batch_size=most + 16, micro_batch_size=1))


def test_a_domain_is_a_node_or_all_ranks() -> None:
    assert [asked(job(cluster={"ranks": ranks})).domain for ranks in (4, 8, 16)] == [4, 8, 8]
    one = job()
    flat = H100.model_copy(update={"tiers": (H100.tiers[0].model_copy(update={"ranks": 0}),)})
    assert search_request(one, one.model_spec(vocab=257), flat).domain == 16


def test_the_point_of_a_job_is_what_its_places_do() -> None:
    one = job(strategy={"pp": 2, "dp": 4, "cp": 2, "cp_comm_type": "ring", "shard": "fsdp", "schedule": "mine.txt"},
              micro_batch_size=4)  # fmt: skip
    point = point_of(one)
    told = {"dp": 4, "cp": 2, "ring": 2, "tp": 1, "params": 8, "grads": 8, "optim": 8, "secondary": 0, "ep": 1,
            "micro": 4, "num_micro": 4, "schedule": SCHEDULES.index("1f1b"), "virtual": 1}  # fmt: skip
    assert {name: point[name] for name in told} == told

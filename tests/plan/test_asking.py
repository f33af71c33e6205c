"""What a job asks of the planner, and the job that a point makes."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, Points
from plait.plan.asking import asked_of, job_at, point_of, ranks_of, strategy_table
from plait.plan.space import enumerate_space

H100 = Cluster.preset("h100")


def job(*, strategy: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **train: Any) -> Job:
    values: dict[str, Any] = {
        "model": {"preset": "gpt3-125m"},
        "train": {"global_batch_size": 64, **train},
        "cluster": {"preset": "h100", "ranks": 16, **(cluster or {})},
    }
    return Job.from_dict(values | ({} if strategy is None else {"strategy": strategy}))


def asked(one: Job) -> Any:
    return asked_of(one, one.model_spec(vocab=257), H100)


def test_without_a_strategy_nothing_is_fixed() -> None:
    found = asked(job())
    assert (dict(found.fixed), found.shard, found.ranks, found.domain) == ({"graphs": [0]}, None, 16, 8)


def test_what_is_said_is_fixed_and_auto_is_not() -> None:
    one = job(
        strategy={
            "tp": 2,
            "pp": "auto",
            "recompute": {"kind": "full", "layers": 3},
            "shard": "zero1",
            "slices": {"batch": 2},
        }
    )
    found = asked(one)
    assert found.shard == "zero1"
    assert "pp" not in found.fixed
    assert found.fixed["tp"] == [2]
    assert (found.fixed["recompute"], found.fixed["recompute_layers"]) == ([RECOMPUTES.index("full")], [3])
    assert (found.fixed["p1"], found.fixed["p2"]) == ([2], [1])
    assert asked(job(strategy={"pp": "auto", "overlap": "sync"})).fixed["overlap"] == [OVERLAPS.index("sync")]


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
        ({"pp": 2, "dp": [2, 4], "tp": [4, 2], "recompute": "auto"}, "strategy.dp", "unequal places"),
        ({"pp": "auto", "schedule": "mine.txt"}, "strategy.schedule", "nothing can be searched around it"),
    ],
)
def test_what_cannot_be_searched_around_is_named(strategy: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as caught:
        asked(job(strategy=strategy))
    assert caught.value.key == key


def test_ranks_are_the_jobs_or_the_strategys_or_all_there_are() -> None:
    assert ranks_of(job(), H100) == 16
    fixed = job(strategy={"tp": 2, "dp": 2, "pp": 2, "cp": 1, "schedule": "auto"}, cluster={"ranks": 0})
    assert ranks_of(fixed, H100) == 8
    lab = Cluster.preset("lab")
    assert ranks_of(job(cluster={"ranks": 0}), lab) == lab.nodes * lab.ranks_per_node
    with pytest.raises(JobError, match="how many ranks of h100"):
        ranks_of(job(cluster={"ranks": 0}), H100)
    with pytest.raises(JobError, match=r"6 ranks are 2 more than the 4 of lab \(2 nodes of 2\)\. Use at most 4"):
        ranks_of(job(cluster={"preset": "lab", "ranks": 6}), lab)
    with pytest.raises(JobError, match=r"6 ranks are 2 more than the 4 of lab"):
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
    with pytest.raises(JobError, match=r"strategy\.stage_layers: \[5, 7\] are layers of stages"):
        asked(Job.from_dict(values))


@pytest.mark.parametrize(
    ("strategy", "fixed"),
    [
        ({"tp": "auto", "cp": 4, "cp_comm_type": "ulysses"}, {"cp": [4], "ring": [1]}),
        ({"tp": "auto", "cp": 4, "cp_comm_type": "ring"}, {"cp": [4], "ring": [4]}),
        ({"tp": "auto", "cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}}, {"cp": [4], "ring": [2]}),
        ({"tp": "auto", "cp": "auto", "cp_comm_type": "ulysses"}, {"ring": [1]}),
        ({"tp": "auto", "cp": "auto", "cp_comm_type": "ring"}, {}),
        ({"tp": "auto", "cp": "auto", "cp_comm_type": "auto"}, {}),
        ({"tp": "auto", "pp": 2, "schedule": "zb-v"}, {"schedule": [SCHEDULES.index("zb-v")], "virtual": [2]}),
        ({"tp": "auto", "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
         {"schedule": [SCHEDULES.index("interleaved")], "virtual": [2]}),
        ({"tp": "auto", "pp": 2, "schedule": "1f1b"}, {"schedule": [SCHEDULES.index("1f1b")], "virtual": [1]}),
        ({"tp": "auto", "pp": 2, "schedule": "auto", "virtual_stages": "auto"}, {"pp": [2]}),
        ({"tp": "auto", "recompute": "selective"},
         {"recompute": [RECOMPUTES.index("selective")], "recompute_layers": [-1]}),
        ({"tp": "auto", "overlap": "sync"},
         {"overlap": [OVERLAPS.index("sync")], "shard_overlap": [SHARD_OVERLAPS.index("none")]}),
        ({"tp": "auto", "overlap": "async"},
         {"overlap": [OVERLAPS.index("async")], "shard_overlap": [SHARD_OVERLAPS.index("both")]}),
        ({"tp": "auto", "overlap": {"tp": "sync", "shard": "forward"}},
         {"overlap": [OVERLAPS.index("sync")], "shard_overlap": [SHARD_OVERLAPS.index("forward")]}),
        ({"tp": "auto", "overlap": {"tp": "sync", "shard": "auto"}},
         {"overlap": [OVERLAPS.index("sync")], "shard_overlap": [SHARD_OVERLAPS.index("both")]}),
        ({"tp": 2, "dp": "auto", "sequence_parallel": True}, {"sequence_parallel": [1]}),
        ({"tp": 2, "dp": "auto", "sequence_parallel": False}, {"sequence_parallel": [0]}),
        ({"tp": "auto", "slices": {"batch": 2, "columns": 4}}, {"p1": [2], "p2": [4]}),
        ({"tp": "auto", "dp": 4, "shard": {"params": 1, "grads": 2, "optim": 4}},
         {"params": [1], "grads": [2], "optim": [4], "secondary": [0]}),
    ],
)  # fmt: skip
def test_columns_that_are_fixed_by_what_is_said(strategy: dict[str, Any], fixed: dict[str, list[int]]) -> None:
    found = asked(job(strategy=strategy)).fixed
    assert {name: found.get(name) for name in fixed} == fixed
    if "ring" not in fixed and "cp" in strategy:
        assert "ring" not in found
    open_ = [name for name, value in strategy.items() if value == "auto"]
    assert not {*open_, *(["virtual"] if "virtual_stages" in open_ else [])} & set(found)


@pytest.mark.parametrize(
    ("cp", "ring", "kind"), [(1, 1, "ulysses"), (4, 1, "ulysses"), (4, 4, "ring"), (4, 2, {"ulysses": 2, "ring": 2})]
)
def test_kinds_of_context_parallelism_as_a_job_says_them(cp: int, ring: int, kind: Any) -> None:
    row = Points.of([{"cp": cp, "ring": ring}]).row(0)
    found = strategy_table(row)
    assert (found["cp_comm_type"], found["stage_layers"], found["sequence_parallel"]) == (kind, [], False)
    assert found["recompute"] == "none"
    again = strategy_table(row | {"recompute": RECOMPUTES.index("full"), "recompute_layers": 0})
    assert again["recompute"] == {"kind": "full", "layers": 0}
    v = strategy_table(row | {"schedule": SCHEDULES.index("zb-v"), "virtual": 2})
    assert (v["schedule"], v["virtual_stages"]) == ("zb-v", 2)
    assert strategy_table(row | {"virtual": 3})["virtual_stages"] == 3


def test_a_batch_has_as_many_micro_batches_as_are_tried_at_most() -> None:
    most = 16 * 64 * 4096
    assert asked(job(global_batch_size=most)).global_batch == most
    says = r"4,194,305 sequences are more than 4,096 micro-batches of 64 on each of 16 ranks\. Use at most 4,194,304"
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
    assert asked_of(one, one.model_spec(vocab=257), flat).domain == 16


def test_the_point_of_a_job_is_what_its_places_do() -> None:
    one = job(strategy={"pp": 2, "dp": 4, "cp": 2, "cp_comm_type": "ring", "shard": "fsdp", "schedule": "mine.txt"},
              micro_batch_size=4)  # fmt: skip
    point = point_of(one)
    told = {"dp": 4, "cp": 2, "ring": 2, "tp": 1, "params": 8, "grads": 8, "optim": 8, "secondary": 0, "ep": 1,
            "micro": 4, "num_micro": 4, "schedule": SCHEDULES.index("1f1b"), "virtual": 1}  # fmt: skip
    assert {name: point[name] for name in told} == told

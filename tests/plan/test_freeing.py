"""What would free memory: each change is one that a job can make, and frees what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, Points
from plait.plan.answer import Planner
from plait.plan.asking import job_at, point_of
from plait.plan.freeing import SHARDED, FreeingChange, best_changes, possible, told_together

GIB = 1 << 30
FULL, INTERLEAVED = RECOMPUTES.index("full"), SCHEDULES.index("interleaved")


def point(**values: int) -> dict[str, int]:
    return Points.of([values]).row(0)


def changes(layers: int = 8, local: int = 8, **values: int) -> dict[str, dict[str, int]]:
    """By words: the columns that are others."""
    base = point(**values)
    return {
        one.what: {name: value for name, value in one.point.items() if value != base[name]}
        for one in possible(base, layers, local)
    }


def test_changes_that_may_free_memory() -> None:
    found = changes(dp=4, micro=2, num_micro=4, tp=2, pp=2, schedule=INTERLEAVED, virtual=2)
    assert found == {
        "selective recomputation": {"recompute": 1},
        "full recomputation of 2 of a stage's 8 layers": {"recompute": FULL, "recompute_layers": 2},
        "full recomputation of 4 of a stage's 8 layers": {"recompute": FULL, "recompute_layers": 4},
        "full recomputation of 6 of a stage's 8 layers": {"recompute": FULL, "recompute_layers": 6},
        "full recomputation of 8 of a stage's 8 layers": {"recompute": FULL},
        "micro-batches of 1": {"micro": 1, "num_micro": 8},
        "sequence parallelism": {"sequence_parallel": 1},
        "the schedule 1f1b": {"schedule": SCHEDULES.index("1f1b"), "virtual": 1},
        "sharding parameters, gradients and optimizer states over 2 ranks": {"params": 2, "grads": 2, "optim": 2},
        "sharding parameters, gradients and optimizer states over 4 ranks": {"params": 4, "grads": 4, "optim": 4},
        "sharding gradients and optimizer states over 2 ranks": {"grads": 2, "optim": 2},
        "sharding gradients and optimizer states over 4 ranks": {"grads": 4, "optim": 4},
        "sharding optimizer states over 2 ranks": {"optim": 2},
        "sharding optimizer states over 4 ranks": {"optim": 4},
    }


def test_what_is_done_already_is_no_change() -> None:
    some = changes(recompute=FULL, recompute_layers=4, micro=1, tp=2, sequence_parallel=1)
    assert list(some) == [f"full recomputation of {n} more of a stage's 8 layers" for n in (2, 4)]
    assert changes(recompute=FULL, recompute_layers=-1, micro=3) == {}
    assert "p1" in changes(micro=2, tp=2, p1=2, sequence_parallel=1)["micro-batches of 1"]


def test_sharding_keeps_the_order_of_factors() -> None:
    for one in possible(point(dp=12, grads=2, optim=6), 1, 4):
        assert one.point["optim"] % one.point["grads"] == one.point["grads"] % one.point["params"] == 0
        more = [name for name in SHARDED if one.point[name] > {"params": 1, "grads": 2, "optim": 6}[name]]
        assert bool(more) == (one.kind in SHARDED.values())


def test_of_each_kind_the_cheapest_is_told() -> None:
    """Six changes of 100 bytes and 10 seconds; a rule forbids the third."""
    kinds = ["", "activations", "activations", "activations", "gradients", "gradients", "parameters"]
    tried = [FreeingChange(kind, f"change {at}", point(micro=at + 1)) for at, kind in enumerate(kinds)]
    memory = np.array([100.0, 80, 60, 50, 99.9, 90, 100])
    seconds = np.array([10.0, 11, 12, 10, 10, 10.05, 10])
    held = {"activations": 70, "gradients": 20, "parameters": 10}
    found = best_changes(tried, held, memory, seconds, lambda at: at != 3, 100.0)
    told = [(one.change.what, one.freed, pytest.approx(one.longer)) for one in found]
    assert told == [("change 1", 20, 0.1), ("change 5", 10, 0.005)]  # change 2 costs as much for what it frees
    assert told_together(found) == (
        "What would free memory: activations 70 B: change 1 would free 20 B (a step takes 10.0% longer); "
        "gradients 20 B: change 5 would free 10 B (a step takes about as long)."
    )
    assert told_together([]) == ""


def job(**sections: Any) -> Job:
    given = {
        "model": {"preset": "llama2-7b"}, "data": {"sequence_length": 4096},
        "train": {"global_batch_size": 64, "precision": "bf16-mixed", "micro_batch_size": 2},
        "cluster": {"preset": "h100", "ranks": 8}, "strategy": {"dp": 8, "shard": "zero1", "overlap": "sync"},
    }  # fmt: skip
    return Job.from_dict(given | sections)


def test_changes_are_what_a_job_makes_of_them() -> None:
    """What is told is walked, and frees as much within two hundredths."""
    planner = Planner(job(), Cluster.preset("h100"), 32_000)
    one = planner.predict(planner.job)
    found = planner.freeing(one)
    assert {one.change.kind for one in found} == {"activations", "gradients", "parameters"}
    for each in found:
        other = planner.predict(job_at(one.job, each.change.point))
        assert one.most_memory - other.most_memory == pytest.approx(each.freed, rel=0.02)
        assert other.seconds / one.seconds - 1 == pytest.approx(each.longer, abs=0.05)
    assert [each.freed for each in found] == sorted((each.freed for each in found), reverse=True)


def test_what_has_room_or_uneven_places_gets_no_advice() -> None:
    train = {"global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16-mixed"}
    own = {"dp": 8, "shard": "fsdp", "recompute": "full"}
    small = Planner(job(train=train, strategy=own), Cluster.preset("h100"), 32_000)
    assert small.freeing(small.predict(small.job)) == []
    assert point_of(small.job)["recompute"] == FULL


def test_no_advice_that_the_model_forbids_is_walked() -> None:
    """A U-Transformer has no sequence parallelism, and is walked: it was refused for the advice."""
    train = {"global_batch_size": 256, "micro_batch_size": 32, "precision": "bf16-mixed"}
    own = {"tp": 2, "pp": 2, "dp": 2, "schedule": "1f1b", "shard": "ddp"}
    given = job(model={"preset": "utransformer-1b"}, data={"sequence_length": 1024}, train=train, strategy=own)
    planner = Planner(given, Cluster.preset("v100"), 50_257)
    found = [one.change.what for one in planner.freeing(planner.predict(planner.job))]
    assert found and "sequence parallelism" not in found

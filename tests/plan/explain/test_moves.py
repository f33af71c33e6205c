"""Changes of a strategy that take less memory: which there are, in which order, and what each
frees."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import InfeasiblePlan
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.explain.moves import (
    FACTORS,
    Move,
    changed_job,
    cheapest,
    describe_savings,
    in_words,
    moves,
    moves_together,
    nearest_change,
    quoted,
    would_fit,
)

FULL = {"strategy.recompute": "full"}
FSDP = {"strategy.shard": "fsdp"}
FLAT = {"strategy.sequence_parallel": True}
MODEL = {"family": "gpt", "num_layers": 64, "hidden": 512, "num_heads": 64, "vocab": 300, "max_sequence": 256}


def now(recompute: Any = "none", each: int = 1, **strategy: Any) -> Job:
    """each: sequences of a replica's micro-batch."""
    dp = strategy.get("dp", 1)
    return Job.from_dict({
        "model": MODEL, "data": {"sequence_length": 256},
        "train": {"global_batch_size": 64 * each * (dp if isinstance(dp, int) else max(dp)), "micro_batch_size": each},
        "strategy": {"recompute": recompute, "schedule": "1f1b", **strategy},
    })  # fmt: skip


def size(sequences: int) -> dict[str, Any]:
    return {"train.micro_batch_size": sequences}


def part(layers: int) -> dict[str, Any]:
    return {"strategy.recompute": {"kind": "full", "layers": layers}}


def shard(params: int, grads: int, optim: int) -> dict[str, Any]:
    return {"strategy.shard": {"params": params, "grads": grads, "optim": optim}}


SOME = now(each=2, dp=4, tp=2, pp=2, schedule="interleaved", virtual_stages=2, sequence_parallel=False, shard="ddp")


@pytest.mark.parametrize(
    ("job", "layers", "shards", "found"),
    [
        (SOME, 8, (1, 2, 4), {
            "parameters": [shard(2, 2, 2), shard(4, 4, 4)], "gradients": [shard(1, 2, 2), shard(1, 4, 4)],
            "optimizer": [shard(1, 1, 2), shard(1, 1, 4)],
            "activations": [{"strategy.recompute": "selective"}, part(2), part(4), part(6), FULL, size(1), FLAT,
                            {"strategy.schedule": "1f1b", "strategy.virtual_stages": 1}],
        }),
        (SOME, 1, (), {
            "optimizer": [{"strategy.shard": "zero1"}], "parameters": [FSDP],
            "activations": [{"strategy.recompute": "selective"}, FULL, size(1), FLAT,
                            {"strategy.schedule": "1f1b", "strategy.virtual_stages": 1}],
        }),
        (now({"kind": "full", "layers": 4}), 8, (1,), {"activations": [part(6), FULL]}),
        (now("full", each=7), 8, (1,), {"activations": [size(3)]}),
        (now("full"), 8, (1,), {}),
        (now("full", each=2, tp=2, sequence_parallel=True, slices={"batch": 2, "columns": 2}), 1, (),
         {"activations": [size(1) | {"strategy.slices": {"batch": 1, "columns": 2}}]}),
        (now("full", dp=12, shard={"params": 1, "grads": 2, "optim": 6}), 1, (3, 6), {
            "parameters": [shard(3, 3, 6), shard(6, 6, 6)], "gradients": [shard(1, 3, 6), shard(1, 6, 6)],
            "optimizer": []}),
    ],
)  # fmt: skip
def test_changes_of_one_setting(job: Job, layers: int, shards: tuple[int, ...], found: dict[str, Any]) -> None:
    every = list(moves(job, layers, shards))
    kinds = {kind: [one.change for one in every if one.kind.startswith(kind)] for kind in found}
    assert kinds == found and sum(map(len, found.values())) == len(every)
    assert all("gradients" in one.kind for one in every if one.change in (FSDP, shard(4, 4, 4)))


def test_with_the_same_ranks_what_costs_least_comes_first() -> None:
    selective, zero1 = {"strategy.recompute": "selective"}, {"strategy.shard": "zero1"}
    one = now(each=4, dp=4, cp=2)
    assert list(moves_together(one, more=False)) == [
        zero1, FSDP, selective, FULL, size(2), FULL | FSDP,
        size(2), FULL | FSDP | size(2), size(1), FULL | FSDP | size(1),
    ]  # fmt: skip
    assert list(moves_together(now("full"), more=False)) == [{}]
    assert list(moves_together(now("full", tp=2, sequence_parallel=False), more=False)) == [FLAT, FLAT]


def test_then_replicas_are_given_up_where_they_divide_and_then_there_are_more_ranks() -> None:
    one = now("full", each=3, tp=4, pp=2, dp=4, sequence_parallel=True)
    last = FSDP | size(1)
    found = list(moves_together(one, more=True))[len(list(moves_together(one, more=False))) :]
    alone = [
        *({f"strategy.{axis}": degree * factor, "strategy.dp": 4 // factor}
          for axis, degree in (("tp", 4), ("cp", 1), ("pp", 2)) for factor in (2, 4)),
        *({"strategy.tp": 4 * factor} for factor in (2, 4, 8)),
        *({"strategy.dp": 4 * factor} | FSDP for factor in FACTORS),
        *(change for factor in FACTORS for change in
          ({"strategy.pp": 2 * factor}, {"strategy.tp": 32, "strategy.pp": 2 * factor})),
    ]  # fmt: skip
    assert found == [change for each in alone for change in (each, last | each)]
    unequal = now(pp=2, dp=[2, 1], tp=[1, 2])
    assert list(moves_together(unequal, more=True)) == list(moves_together(unequal, more=False))


# ---- tried ----


def test_the_first_change_that_fits_and_that_no_rule_forbids_is_taken() -> None:
    job, tried = now(dp=2), list[Job]()

    def fits(other: Job) -> bool:
        tried.append(other)
        if other.strategy.tp == 4:
            raise InfeasiblePlan("No.")
        return other.strategy.tp == 8

    given = [{"strategy.tp": 3}, {"strategy.tp": 2}, {"strategy.tp": 4}, {"strategy.tp": 8}, {"strategy.tp": 16}]
    assert nearest_change(job, given, fits) == {"strategy.tp": 8}
    assert [one.strategy.tp for one in tried] == [2, 4, 8]
    assert nearest_change(job, given[:3], fits) is None
    assert would_fit({"strategy.tp": 8} | FLAT) == "It would fit with strategy.tp=8 strategy.sequence_parallel=true."
    assert "nor are 64 times as many ranks" in would_fit(None)


def test_a_job_that_says_its_ranks_says_the_new_number() -> None:
    job = Job.from_dict(now(dp=2).to_dict() | {"cluster": {"preset": "a100-80", "ranks": 2}})
    found = nearest_change(job, [{"strategy.tp": 2}], lambda other: other.cluster.ranks == other.world_size)
    assert found == {"strategy.tp": 2, "cluster.ranks": 4}
    assert nearest_change(job, [FSDP], lambda other: other.cluster.ranks == 2) == FSDP


# ---- priced ----


def test_of_each_kind_the_cheapest_is_told() -> None:
    """Changes of 100 bytes and 10 seconds."""
    kinds = ["activations", "activations", "gradients", "gradients, optimizer", "parameters"]
    tried = [Move(kind, size(at)) for at, kind in enumerate(kinds)]
    memory, seconds = np.array([100.0, 80, 60, 99.9, 90, 100]), np.array([10.0, 11, 12, 10, 10.05, 10])
    found = cheapest(tried, {"activations": 70, "gradients": 20, "optimizer": 4}, memory, seconds, 100.0)
    named = [(one.move.change, one.freed_bytes, pytest.approx(one.longer)) for one in found]
    assert named == [(size(0), 20, 0.1), (size(3), 10, 0.005)]  # the second costs as much for what it frees
    assert describe_savings(found) == (
        "What would free memory: activations 70 B: train.micro_batch_size=0 would free 20 B (a step takes 10.0% "
        "longer); gradients, optimizer 24 B: train.micro_batch_size=3 would free 10 B (a step takes about as long)."
    )
    assert describe_savings([]) == ""
    assert [one.cells for one in found] == [
        ("activations 70 B", "20 B", "+10.0%", "train.micro_batch_size=0"),
        ("gradients, optimizer 24 B", "10 B", "same", "train.micro_batch_size=3"),
    ]
    gib = replace(found[0], held=63 << 29, freed_bytes=3 << 29)
    assert gib.cells[:2] == ("activations 32 GiB", "1.5 GiB")


def job(**sections: Any) -> Job:
    given = {
        "model": {"preset": "llama2-7b"}, "data": {"sequence_length": 4096},
        "train": {"global_batch_size": 64, "precision": "bf16-mixed", "micro_batch_size": 2},
        "cluster": {"preset": "h100", "ranks": 8}, "strategy": {"dp": 8, "shard": "zero1", "overlap": "sync"},
    }  # fmt: skip
    return Job.from_dict(given | sections)


def test_changes_are_what_a_job_makes_of_them() -> None:
    """What is named is walked, and frees as much within two hundredths; a user can write it so."""
    planner = Planner(job(), Cluster.preset("h100"), 32_000)
    one = planner.predict(planner.job)
    found = planner.memory_savings(one)
    assert {one.move.kind for one in found} == {"activations", "gradients", "parameters, gradients"}
    for each in found:
        change = each.move.change
        other = planner.predict(changed_job(one.job, change))
        for words in ([in_words({key: value}) for key, value in change.items()], shlex.split(quoted(change))):
            assert one.job.changed(words) == other.job
        assert one.most_memory - other.most_memory == pytest.approx(each.freed_bytes, rel=0.02)
        assert other.seconds / one.seconds - 1 == pytest.approx(each.longer, abs=0.05)
    assert [each.freed_bytes for each in found] == sorted((each.freed_bytes for each in found), reverse=True)


def test_what_has_room_or_uneven_places_gets_no_advice() -> None:
    train = {"global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16-mixed"}
    own = {"dp": 8, "shard": "fsdp", "recompute": "full"}
    small = Planner(job(train=train, strategy=own), Cluster.preset("h100"), 32_000)
    assert small.memory_savings(small.predict(small.job)) == []


def test_no_advice_that_the_model_forbids_is_walked() -> None:
    """A U-Transformer has no sequence parallelism, and is walked: it was refused for the advice."""
    train = {"global_batch_size": 256, "micro_batch_size": 32, "precision": "bf16-mixed"}
    own = {"tp": 2, "pp": 2, "dp": 2, "schedule": "1f1b", "shard": "ddp"}
    given = job(model={"preset": "utransformer-1b"}, data={"sequence_length": 1024}, train=train, strategy=own)
    planner = Planner(given, Cluster.preset("v100"), 50_257)
    found = [one.move.change for one in planner.memory_savings(planner.predict(planner.job))]
    assert found and FLAT not in found

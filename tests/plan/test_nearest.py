"""Changes of a job that take less memory: which there are, their order, which are ruled out."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from plait.core.base.errors import InfeasiblePlan
from plait.core.job.spec import Job
from plait.plan.nearest import changed_job, changes, more_ranks, nearest_change, trades

FULL = {"strategy.recompute": "full"}
FSDP = {"strategy.shard": "fsdp"}
ONE = {"train.micro_batch_size": 1}
FLAT = {"strategy.sequence_parallel": True}
MODEL = {"family": "gpt", "num_layers": 64, "hidden": 512, "num_heads": 64, "vocab": 300, "max_sequence": 256}


def now(recompute: str = "none", each: int = 1, **strategy: Any) -> Job:
    """each: sequences of a replica's micro-batch."""
    dp = strategy.get("dp", 1)
    return Job.from_dict({
        "model": MODEL, "data": {"sequence_length": 256},
        "train": {"global_batch_size": 64 * each * (dp if isinstance(dp, int) else max(dp)), "micro_batch_size": each},
        "strategy": {"recompute": recompute, "schedule": "1f1b", **strategy},
    })  # fmt: skip


def size(sequences: int) -> dict[str, Any]:
    return {"train.micro_batch_size": sequences}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (now("full"), [{}]),
        (now("selective"), [{}]),
        (now(), [{"strategy.recompute": "selective"}, FULL, FULL]),
        (now("full", dp=2), [{"strategy.shard": "zero1"}, FSDP, FSDP]),
        (now("full", each=2), [{}, size(1), size(1)]),
        (now("full", each=7), [{}, size(3), size(3), size(1), size(1)]),
        (
            now(each=4, dp=4, cp=2),
            [
                {"strategy.shard": "zero1"}, FSDP, {"strategy.recompute": "selective"}, FULL, FULL | FSDP,
                size(2), FULL | FSDP | size(2), size(1), FULL | FSDP | size(1),
            ],
        ),
        (
            now("full", each=4, tp=2, slices={"batch": 2, "columns": 2}),
            [{}, size(2), size(2), *[size(1) | {"strategy.slices": {"batch": 1, "columns": 2}}] * 2],
        ),
    ],
)  # fmt: skip
def test_with_the_same_ranks_what_costs_least_comes_first(job: Job, told: list[dict[str, Any]]) -> None:
    assert list(changes(job)) == told


def axis(name: str, degree: int, dp: int) -> dict[str, Any]:
    return {f"strategy.{name}": degree, "strategy.dp": dp}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (now("full", tp=2, dp=1, sequence_parallel=True), []),
        (now("full", tp=2, dp=3, sequence_parallel=True), []),
        (now("full", tp=1, dp=1), []),
        (now("full", tp=2, sequence_parallel=False), [FLAT, FLAT]),
        (now(each=2, dp=1, cp=2, tp=2, sequence_parallel=False), [FLAT, FULL | FSDP | ONE | FLAT]),
        (now("full", tp=1, cp=2, pp=2, dp=16, shard="fsdp"),
         [one for name, degree in (("tp", 1), ("cp", 2), ("pp", 2)) for factor in (2, 4, 8, 16)
          for change in [axis(name, degree * factor, 16 // factor)] for one in (change, FSDP | change)]),
    ],
)  # fmt: skip
def test_replicas_are_given_up_where_they_divide(job: Job, told: list[dict[str, Any]]) -> None:
    assert list(trades(job)) == told


def test_degrees_that_differ_from_place_to_place_stay() -> None:
    unequal = now(pp=2, dp=[2, 1], tp=[1, 2])
    assert list(trades(unequal)) == list(more_ranks(unequal)) == []


def test_more_ranks_of_every_axis() -> None:
    found = list(more_ranks(now(each=3, tp=4, pp=2, dp=4)))
    last, factors = FULL | FSDP | ONE, (2, 4, 8, 16, 32, 64)
    assert found[:6] == [
        one for factor in (2, 4, 8) for one in ({"strategy.tp": 4 * factor}, last | {"strategy.tp": 4 * factor})
    ]
    assert found[6:12] == [last | FSDP | {"strategy.dp": 4 * factor} for factor in factors]
    assert found[12:] == [
        one
        for factor in factors
        for one in (last | {"strategy.pp": 2 * factor}, last | {"strategy.tp": 32, "strategy.pp": 2 * factor})
    ]


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


def test_a_job_that_says_its_ranks_says_the_new_number() -> None:
    job = Job.from_dict(now(dp=2).to_dict() | {"cluster": {"preset": "a100-80", "ranks": 2}})
    found = nearest_change(job, [{"strategy.tp": 2}], lambda other: other.cluster.ranks == other.world_size)
    assert found == {"strategy.tp": 2, "cluster.ranks": 4}
    assert nearest_change(job, [FSDP], lambda other: other.cluster.ranks == 2) == FSDP


def test_of_what_is_tried_most_is_a_job() -> None:
    """A shard that no longer divides is refused by the job's own rules, and passed over."""
    job = now(dp=8, shard={"params": 8, "grads": 8, "optim": 8})
    every = list(chain(changes(job), trades(job), more_ranks(job)))
    kept = list[Job]()
    nearest_change(job, every, lambda other: bool(kept.append(other)))
    assert len(every) / 2 < len(kept) < len(every)
    assert changed_job(job, ONE).train.micro_batch_size == 1

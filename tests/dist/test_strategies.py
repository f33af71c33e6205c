"""Strategies drawn from the whole space are the unsharded computation, or refused before ranks start; what
must be equal on several ranks is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plait.core.errors import PlaitError
from plait.core.job import Job
from tests.dist import drawn, pipelining
from tests.dist.test_pipeline import TOLERANCE
from tests.ranks import Ranks

COUNT, IN_SUITE, SEED = 200, 10, 20261121
MOST, MOST_IN_SUITE = 10, 4  # ranks


def sample(number: int) -> tuple[Job, random.Random]:
    """The first job of a sequence of its own that the rules allow, and the chance that is left."""
    chance, most = random.Random(f"{SEED}/{number}"), MOST_IN_SUITE if number < IN_SUITE else MOST
    while True:
        try:
            job = Job.from_dict(drawn.draw(chance))
            if 2 <= job.world_size <= most and drawn.plan_of(job):
                return job, chance
        except PlaitError:
            continue


def cases() -> Iterator[Any]:
    """Their numbers, a part of them in the suite."""
    for number in range(COUNT):
        yield pytest.param(number, marks=() if number < IN_SUITE else pytest.mark.contract)


@pytest.mark.parametrize("number", list(cases()))
def test_a_drawn_job_equals_the_reference(pool: Callable[[int], Ranks], number: int) -> None:
    job, chance = sample(number)
    costs = drawn.measured(chance, job, job.model_spec(vocab=1)) if chance.random() < 0.7 else None
    delay = number if chance.random() < 0.3 else None
    args = drawn.plan_of(job), costs, delay
    for error, what in pool(job.world_size).run(pipelining.job_error, *args, timeout=60.0):
        assert error < TOLERANCE, f"{what} is off by {error:.1e} in\n{job.to_toml()}"


def test_what_is_refused_is_refused_by_a_rule_that_names_a_key() -> None:
    chance, refused, allowed = random.Random(SEED), 0, 0
    for _ in range(2000):
        try:
            drawn.plan_of(Job.from_dict(drawn.draw(chance)))
            allowed += 1
        except PlaitError as error:
            assert getattr(error, "key", None), error
            refused += 1
    assert refused > 100 and allowed > 100


# Shares of 4 and 3 sequences, which three slices cut into 2 + 1 + 1 and 1 + 1 + 1; attention and MLP of equal
# size, so that one that takes the other's place is not noticed by its bytes.
UNEVEN = {
    "model": {
        "family": "gpt",
        "num_layers": 3,
        "hidden": 16,
        "num_heads": 4,
        "ffn_hidden": 32,
        "vocab": 37,
        "max_sequence": 32,
    },
    "data": {"sequence_length": 32},
    "train": {"global_batch_size": 7, "precision": "fp64"},
    "strategy": {"dp": 2, "tp": 2, "slices": {"p1": 3}, "sequence_parallel": True},
}


@pytest.mark.parametrize("ffn_hidden", [32, 64])
@pytest.mark.parametrize("shard", ["ddp", "zero1", "zero2", "fsdp"])
def test_replicas_with_unequal_shares_have_one_order(pool: Callable[[int], Ranks], shard: str, ffn_hidden: int) -> None:
    model, strategy = UNEVEN["model"] | {"ffn_hidden": ffn_hidden}, UNEVEN["strategy"] | {"shard": shard}
    job = Job.from_dict(UNEVEN | {"model": model, "strategy": strategy})
    planned, costs = drawn.plan_of(job), drawn.measured(random.Random(0), job, job.model_spec(vocab=1))
    for given in (None, costs):
        found = pool(4).run(pipelining.lists, planned, given)
        assert all(one == found[0] for one in found)
        for error, what in pool(4).run(pipelining.job_error, planned, given, timeout=60.0):
            assert error < TOLERANCE, f"{what} is off by {error:.1e}"

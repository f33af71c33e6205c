"""Muon and SGD under drawn strategies are the single process; what they keep goes on under others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import PlaitError
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from tests.dist import optimizing
from tests.support import drawn
from tests.support.ranks import Ranks

COUNT, IN_SUITE, SEED = 30, 6, 20261126
MOST, MOST_IN_SUITE = 8, 4
TOLERANCE = 1e-9
PATIENCE = 300.0
TABLES: dict[str, Any] = {"optimizer": "muon", "muon": {"precision": "master"}}


def sample(chance: drawn.Chance, most: int, like: dict[str, Any] | None, train: dict[str, Any]) -> dict[str, Any]:
    """The next drawn job that the rules allow; its model, data and batch those of ``like``."""
    while True:
        values = drawn.draw(chance, most)
        if like:
            values |= {"model": like["model"], "data": like["data"]}
            values["train"]["global_batch_size"] = like["train"]["global_batch_size"]
        values["train"] |= train
        try:
            plan = plan_of(values)
        except PlaitError:
            continue
        if 2 <= plan.layout.world_size <= most:
            return values


def plan_of(values: dict[str, Any]) -> Plan:
    return drawn.plan_of(Job.from_dict(values))


def cases() -> Iterator[Any]:
    """Their numbers, a part of them in the suite."""
    for number in range(COUNT):
        yield pytest.param(number, marks=() if number < IN_SUITE else pytest.mark.contract)


@pytest.mark.parametrize("number", list(cases()))
def test_muon_is_the_single_process_and_goes_on_under_another_strategy(
    pool: Callable[[int], Ranks], tmp_path: Path, number: int
) -> None:
    chance, most = drawn.Chance(f"{SEED}/{number}"), MOST_IN_SUITE if number < IN_SUITE else MOST
    values = sample(chance, most, None, TABLES)
    plan, other = plan_of(values), plan_of(sample(chance, most, values, TABLES))
    for error, what, _ in pool(plan.layout.world_size).run(optimizing.trained, plan, (0, 4), timeout=PATIENCE):
        assert plan.job and error < TOLERANCE, f"{what} is off by {error:.1e} in\n{plan.job and plan.job.to_toml()}"
    pool(plan.layout.world_size).run(optimizing.trained, plan, (0, 2), tmp_path, timeout=PATIENCE)
    found = pool(other.layout.world_size).run(optimizing.trained, other, (2, 4), tmp_path, timeout=PATIENCE)
    for error, what, _ in found:
        assert error < TOLERANCE, f"resumed, {what} is off by {error:.1e} in\n{other.job and other.job.to_toml()}"


@pytest.mark.parametrize("number", range(3))
def test_sgd_is_the_single_process(pool: Callable[[int], Ranks], number: int) -> None:
    chance = drawn.Chance(f"{SEED}/sgd/{number}")
    plan = plan_of(sample(chance, MOST_IN_SUITE, None, {"optimizer": "sgd"}))
    for error, what, kept in pool(plan.layout.world_size).run(optimizing.trained, plan, (0, 4), timeout=PATIENCE):
        assert plan.job and error < TOLERANCE, f"{what} is off by {error:.1e} in\n{plan.job and plan.job.to_toml()}"
        assert set(kept) == {"momentum"}


SHARDS = ("ddp", "zero1", "zero2", "zero3", {"params": 1, "grads": 2, "optim": 4})
SMALL: dict[str, Any] = {
    "model": {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 4, "vocab": 64, "max_sequence": 16},
    "data": {"sequence_length": 16},
    "train": {"global_batch_size": 8, "micro_batch_size": 1, "precision": "fp64", "optimizer": "sgd"},
}


def small(strategy: dict[str, Any], **train: Any) -> Plan:
    return plan_of(SMALL | {"train": SMALL["train"] | train, "strategy": {"slices": {}} | strategy})


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_gradients_are_summed_over_ranks_in_bf16(pool: Callable[[int], Ranks], shard: Any) -> None:
    """Each rank's gradient is rounded once a reduction, to 8 bits: so far may a weight be off."""
    dp, tp = (4, 1) if isinstance(shard, dict) else (2, 2)
    plain = small({"dp": dp, "tp": tp, "shard": shard})
    plan = small({"dp": dp, "tp": tp, "shard": shard, "reduce_dtype": "bf16"})
    assert max(one for one, *_ in pool(4).run(optimizing.trained, plain, (0, 4), timeout=PATIENCE)) < TOLERANCE
    worst = max(one for one, *_ in pool(4).run(optimizing.trained, plan, (0, 4), timeout=PATIENCE))
    assert 1e-7 < worst < 2e-2


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_moments_in_bf16_are_those_rounded_after_every_step(
    pool: Callable[[int], Ranks], tmp_path: Path, optimizer: str
) -> None:
    how: dict[str, Any] = {"optimizer": optimizer, "optimizer_dtype": "bf16", "muon": {"precision": "master"}}
    plan, other = small({"dp": 2, "tp": 2, "shard": "zero1"}, **how), small({"dp": 2, "shard": "zero3"}, **how)
    for error, what, _ in pool(4).run(optimizing.trained, plan, (0, 4), timeout=PATIENCE):
        assert error < ROUNDED, what
    pool(4).run(optimizing.trained, plan, (0, 2), tmp_path, timeout=PATIENCE)
    for error, what, _ in pool(2).run(optimizing.trained, other, (2, 4), tmp_path, timeout=PATIENCE):
        assert error < ROUNDED, f"resumed, {what}"


ROUNDED = 1e-5
"""A sum in another order may be rounded to the neighbour, once in a long while: a number of a weight is then
off by some 2^-8 of an update; most are equal to 1e-12."""

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

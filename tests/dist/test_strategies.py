"""Strategies drawn from the whole space are the unsharded computation, or refused before ranks start; what
must be equal on several ranks is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plait.core.base.errors import JobError, PlaitError
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from tests.dist import compiling, pipelining
from tests.dist.test_pipeline import TOLERANCE
from tests.streams import running
from tests.support import drawn
from tests.support.ranks import Ranks

COUNT, IN_SUITE, DOCUMENTS_IN_SUITE, SEED = 200, 10, 6, 20261121
OF_A_KIND, OF_A_KIND_IN_SUITE = 30, 3
MOST, MOST_IN_SUITE = 10, 4  # ranks
PATIENCE = 300.0  # seconds: ten ranks on two busy cores have taken 65, and what hangs takes for ever


def sample(number: int, *, levels: bool = True, **told: Any) -> tuple[Plan, drawn.Chance]:
    """The plan of the first job of a sequence of its own that the rules allow, and the chance that is left.
    levels: whether models may halve sequences. told: keys of ``[strategy]`` that are not drawn."""
    chance, most = drawn.Chance(f"{SEED}/{number}"), MOST_IN_SUITE if number % 1000 < IN_SUITE else MOST
    while True:
        values = drawn.draw(chance, most)
        values["strategy"] |= {"compile": number % 3 == 1} | told
        try:
            plan = drawn.plan_of(Job.from_dict(values))
        except PlaitError:
            continue
        if 2 <= plan.layout.world_size <= most and (levels or not plan.model.levels):
            return plan, chance


def cases(in_suite: int, count: int = COUNT) -> Iterator[Any]:
    """Their numbers, a part of them in the suite."""
    for number in range(count):
        yield pytest.param(number, marks=() if number < in_suite else pytest.mark.contract)


@pytest.mark.parametrize("number", list(cases(DOCUMENTS_IN_SUITE)))
def test_a_drawn_job_with_documents_and_loss_weights_equals_the_reference(
    pool: Callable[[int], Ranks], number: int
) -> None:
    plan, chance = sample(1000 + number, levels=False)
    costs = drawn.measured(chance, plan) if chance.random() < 0.7 else None
    delay = number if chance.random() < 0.3 else None
    ranks = pool(plan.layout.world_size)
    for error, what in ranks.run(compiling.job_error, plan, costs, delay, True, timeout=PATIENCE):
        assert plan.job and error < TOLERANCE, f"{what} is off by {error:.1e} in\n{plan.job and plan.job.to_toml()}"


@pytest.mark.parametrize("number", list(cases(IN_SUITE)))
def test_a_drawn_job_equals_the_reference(pool: Callable[[int], Ranks], number: int) -> None:
    plan, chance = sample(number)
    costs = drawn.measured(chance, plan) if chance.random() < 0.7 else None
    delay = number if chance.random() < 0.3 else None
    for error, what in pool(plan.layout.world_size).run(compiling.job_error, plan, costs, delay, timeout=PATIENCE):
        assert plan.job and error < TOLERANCE, f"{what} is off by {error:.1e} in\n{plan.job and plan.job.to_toml()}"


@pytest.mark.parametrize("number", list(cases(OF_A_KIND_IN_SUITE, OF_A_KIND)))
def test_a_drawn_job_that_keeps_one_stream_a_layer_equals_the_reference(
    pool: Callable[[int], Ranks], number: int
) -> None:
    again: Any = {"kind": "layer", "layers": 1} if number % 4 == 3 else "layer"
    plan, chance = sample(2000 + number, recompute=again)
    costs = drawn.measured(chance, plan) if chance.random() < 0.7 else None
    for error, what in pool(plan.layout.world_size).run(compiling.job_error, plan, costs, number, timeout=PATIENCE):
        assert plan.job and error < TOLERANCE, f"{what} is off by {error:.1e} in\n{plan.job and plan.job.to_toml()}"


@pytest.mark.parametrize("number", list(cases(1, OF_A_KIND)))
def test_a_drawn_job_on_several_compute_streams_equals_the_reference(pool: Callable[[int], Ranks], number: int) -> None:
    """On virtual streams: and nothing is read or let go of before it is waited for."""
    plan, chance = sample(3000 + 3 * number, streams=2 + number % 2)
    costs = drawn.measured(chance, plan) if chance.random() < 0.7 else None
    ranks = pool(plan.layout.world_size)
    for one in ranks.run(running.observed, "", pipelining.job_error, plan, costs, timeout=PATIENCE):
        error, what = one.result
        assert plan.job and error < TOLERANCE, f"{what} is off by {error:.1e} in\n{plan.job and plan.job.to_toml()}"
        assert not one.problems, f"{one.problems[:5]} in\n{plan.job.to_toml()}"
        assert "compute 1" in one.streams


@pytest.mark.unit
def test_what_is_refused_is_refused_by_a_rule_that_names_a_key() -> None:
    chance, errors = drawn.Chance(SEED), list[PlaitError]()
    for _ in range(1000):
        try:
            drawn.plan_of(Job.from_dict(drawn.draw(chance, MOST)))
        except PlaitError as error:  # nothing else: an assertion would end the test
            errors.append(error)
    assert 100 < len(errors) < 900
    assert all(getattr(error, "key", None) for error in errors)


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
    "train": {"global_batch_size": 7, "micro_batch_size": 0, "precision": "fp64"},
    "strategy": {"dp": 2, "tp": 2, "slices": {"batch": 3}, "sequence_parallel": True},
}


@pytest.mark.parametrize("ffn_hidden", [32, 64])
@pytest.mark.parametrize("shard", ["ddp", "zero1", "zero2", "fsdp"])
def test_replicas_with_unequal_shares_have_one_order(pool: Callable[[int], Ranks], shard: str, ffn_hidden: int) -> None:
    model, strategy = UNEVEN["model"] | {"ffn_hidden": ffn_hidden}, UNEVEN["strategy"] | {"shard": shard}
    plan = drawn.plan_of(Job.from_dict(UNEVEN | {"model": model, "strategy": strategy}))
    for costs in (None, drawn.measured(random.Random(0), plan)):
        found = pool(4).run(pipelining.lists, plan, costs)
        assert all(one == found[0] for one in found)
        for error, what in pool(4).run(pipelining.job_error, plan, costs, timeout=PATIENCE):
            assert error < TOLERANCE, f"{what} is off by {error:.1e}"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        (["strategy.slices.batch=4"], "strategy.slices.batch", "4 slices of a micro-batch of 3 sequences"),
        (["strategy.dp=8"], "strategy.dp", "dp = 8 shares a micro-batch of 7"),
        (["train.micro_batch_size=2"], "train.global_batch_size", "not a multiple of micro_batch_size x dp = 2 x 2"),
        (["strategy.tp=4", "data.sequence_length=30"], "strategy.sequence_parallel", "a rank's 30 tokens"),
        (["strategy.tp=3"], "strategy.tp", "tp = 3 does not divide num_heads = 4"),
        (["strategy.shard={ optim = 4 }"], "strategy.shard.optim", "4 does not divide the 2 ranks"),
    ],
    ids=str,
)
def test_shares_that_do_not_fit_are_refused_by_name(changes: list[str], key: str, said: str) -> None:
    with pytest.raises(JobError, match=said) as refused:
        drawn.plan_of(Job.from_dict(UNEVEN).changed(changes))
    assert refused.value.key == key

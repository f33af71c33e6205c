"""Strategies drawn from the whole space are the unsharded computation, or refused before ranks
start; what must be equal on several ranks is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from plait.core.base.errors import JobError, PlaitError
from plait.core.job.spec import Job
from tests.dist import pipelining
from tests.dist.equality import TOLERANCE, Pool, assert_equal, run
from tests.dist.pipelining import Planned
from tests.streams import running
from tests.support import drawn
from tests.support.cases import each_other, first

IN_SUITE, SEED = 10, 20261121
MOST, MOST_IN_SUITE = 10, 4  # ranks


def sample(number: int, *, late: bool = False, **told: Any) -> Planned:
    """The first job of a sequence of its own that the rules allow; mostly with costs as if
    measured, sometimes or always with late transfers."""
    chance, most = drawn.Chance(f"{SEED}/{number}"), MOST_IN_SUITE if number % 1000 < IN_SUITE else MOST
    strategy = {"compile": number % 3 == 1} | told
    detailed = number // 1000 == 1
    plan = drawn.planned(chance, most, levels=not detailed, strategy=strategy)
    costs = drawn.measured(chance, plan) if chance.random() < 0.7 else None
    return Planned(plan, costs, number if late or chance.random() < 0.3 else None, detailed)


@pytest.mark.parametrize("number", first(6, of=200))
def test_a_drawn_job_with_documents_and_loss_weights_equals_the_reference(pool: Pool, number: int) -> None:
    assert_equal(pool, sample(1000 + number))


@pytest.mark.parametrize("number", first(IN_SUITE, of=200))
def test_a_drawn_job_equals_the_reference(pool: Pool, number: int) -> None:
    assert_equal(pool, sample(number))


@pytest.mark.parametrize("number", first(3, of=30))
def test_a_drawn_job_that_keeps_one_stream_a_layer_equals_the_reference(pool: Pool, number: int) -> None:
    again: Any = {"kind": "layer", "layers": 1} if number % 4 == 3 else "layer"
    assert_equal(pool, sample(2000 + number, late=True, recompute=again))


@pytest.mark.parametrize("number", first(1, of=30))
def test_a_drawn_job_on_several_compute_streams_equals_the_reference(pool: Pool, number: int) -> None:
    """On virtual streams: and nothing is read or let go of before it is waited for."""
    for one in run(pool, case := sample(3000 + 3 * number, streams=2 + number % 2), running.observed, ""):
        error, what = one.result
        assert error < TOLERANCE, f"{what} is off by {error:.1e} in\n{case}"
        assert not one.problems, f"{one.problems[:5]} in\n{case}"
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


@pytest.mark.parametrize(("shard", "ffn_hidden"), each_other(["ddp", "zero1", "zero2", "fsdp"], [32, 64]))
def test_replicas_with_unequal_shares_have_one_order(pool: Pool, shard: str, ffn_hidden: int) -> None:
    model, strategy = UNEVEN["model"] | {"ffn_hidden": ffn_hidden}, UNEVEN["strategy"] | {"shard": shard}
    plan = drawn.plan_of(Job.from_dict(UNEVEN | {"model": model, "strategy": strategy}))
    for costs in (None, drawn.measured(random.Random(0), plan)):
        found = pool(4).run(pipelining.lists, plan, costs)
        assert all(one == found[0] for one in found)
        assert_equal(pool, Planned(plan, costs))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        (["strategy.slices.batch=4"], "strategy.slices.batch", "4 slices of a micro-batch of 3 sequences"),
        (["strategy.dp=8"], "strategy.dp", "dp = 8 exceeds the 7 sequences of a micro-batch"),
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

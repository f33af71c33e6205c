"""Hints of a batch or a number of ranks nearby: they share better, and what is told was
predicted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.explain.hints import NEAR_BATCH, NEAR_RANKS, WORTH, Hint, divisor_hints, near_batches, near_ranks

H100 = Cluster.preset("h100")


def planner(batch: int, ranks: int, **strategy: object) -> Planner:
    job = Job.from_dict({
        "model": {"preset": "gpt3-125m"}, "data": {"sequence_length": 512},
        "train": {"global_batch_size": batch, "precision": "bf16-mixed"},
        "cluster": {"preset": "h100", "ranks": ranks}, "plan": {"top": 1, "points": 20_000},
        **({"strategy": strategy} if strategy else {}),
    })  # fmt: skip
    return Planner(job, H100, 32_000)


def hints(one: Planner) -> list[Hint]:
    return divisor_hints(one, one.answer().best)


@given(batch=st.integers(1, 10_000), ranks=st.integers(1, 4096))
def test_batches_nearby_have_more_in_common_with_the_ranks(batch: int, ranks: int) -> None:
    for other in (near := near_batches(batch, ranks)):
        assert 0 < abs(other - batch) <= NEAR_BATCH * batch
        assert math.gcd(other, 2 * ranks) > math.gcd(batch, 2 * ranks)
    assert not near or batch % (2 * ranks)


@given(batch=st.integers(1, 10_000), ranks=st.integers(1, 4096), node=st.integers(1, 72))
def test_ranks_nearby_can_share_more_of_the_batch(batch: int, ranks: int, node: int) -> None:
    for other in (near := near_ranks(ranks, batch, node)):
        assert 0 < abs(other - ranks) <= NEAR_RANKS * ranks
        assert math.gcd(other, batch) / other >= 2 * math.gcd(ranks, batch) / ranks
        assert other % node == 0 or ranks < node
    assert not near or batch % ranks


def test_a_batch_that_no_ranks_can_share() -> None:
    """What is told is what a planner of the other batch finds, or a little more."""
    one = planner(127, 16)
    found = hints(one)
    assert [(hint.key, hint.nearby) for hint in found] == [("train.global_batch_size", 128)]
    hint = found[0]
    best, other = one.answer().best, replace(one, job=one.job.changed(["train.global_batch_size=128"])).answer().best
    assert hint.seconds == best.seconds
    assert other.seconds <= hint.seconds_nearby * 1.0001
    assert hint.more == pytest.approx(128 / hint.seconds_nearby / (127 / hint.seconds) - 1)
    assert hint.more > WORTH
    assert hint.sentence.startswith("127 sequences have few divisors in common with the ranks: with 128 a step takes ")


def test_ranks_that_cannot_share_the_batch() -> None:
    found = {hint.key: hint for hint in hints(planner(128, 15))}
    assert found["cluster.ranks"].nearby == 16
    assert "15 ranks cannot all share the batch: with 16 a step takes " in found["cluster.ranks"].sentence


def test_a_job_that_shares_out_well_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planner(128, 16)
    best = one.answer().best
    monkeypatch.setattr("plait.plan.explain.hints.search", None)
    assert divisor_hints(one, best) == []


def test_what_is_hardly_better_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planner(127, 16)
    monkeypatch.setattr("plait.plan.explain.hints.WORTH", 1e9)
    assert hints(one) == []


def test_many_times_as_many_tokens_are_told_as_such() -> None:
    told = Hint("train.global_batch_size", 1009, 1008, 12.7, 1.0, 11.69).sentence
    assert "12.7 times as many tokens a second (train.global_batch_size=1008)" in told

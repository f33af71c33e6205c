"""What would have the runner-up win: what is told holds when both are predicted again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.asking import job_at
from plait.plan.candidate import Candidate
from plait.plan.sensitivity import MATMUL, RATES, TRIED, Sensitivity, TurningPoint, sensitivity

H100 = Cluster.preset("h100")


def planner() -> Planner:
    job = Job.from_dict({
        "model": {"preset": "gpt3-1.3b"}, "data": {"sequence_length": 2048},
        "train": {"global_batch_size": 64, "micro_batch_size": 1, "precision": "bf16-mixed"},
        "cluster": {"preset": "h100", "ranks": 32}, "strategy": {"dp": 32, "shard": "zero1"},
    })  # fmt: skip
    return Planner(job, H100, 50_257)


def strategies(one: Planner, *changes: list[str]) -> list[Candidate]:
    return [one.predict(one.job.changed(some)) for some in changes]


def test_what_is_told_holds_when_both_are_predicted_again() -> None:
    """Thirty-two replicas against half as many of two stages, which send less."""
    one = planner()
    pair = strategies(one, [], ["strategy.dp=16", "strategy.pp=2"])
    found = sensitivity(one, *pair)
    assert found and found.turns
    for turn in found.turns:
        assert 1 / TRIED[-1] <= turn.factor <= TRIED[-1]
        there = replace(one, cluster=RATES[turn.rate](H100, turn.factor))
        best, other = (there.predict(each.job).seconds for each in pair)
        assert other < best, turn
        near = replace(one, cluster=RATES[turn.rate](H100, 1 + (turn.factor - 1) / 100))
        best, other = (near.predict(each.job).seconds for each in pair)
        assert other > best, turn
    assert found.turns == sorted(found.turns, key=lambda turn: turn.size)


def test_nothing_helps_a_strategy_that_only_does_more() -> None:
    one = planner()
    found = sensitivity(one, *strategies(one, [], ["strategy.shard=fsdp"]))
    assert found and not found.turns
    assert (
        Sensitivity([], 0)
        .told()
        .startswith("Nothing up to 4 times as fast or slow would in closed form make the runner-up")
    )


def test_what_the_simulation_does_not_confirm_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planner()
    pair = strategies(one, [], ["strategy.dp=16", "strategy.pp=2"])
    monkeypatch.setattr(Planner, "seconds", lambda _, job: 1.0 if job == pair[0].job else 2.0)
    found = sensitivity(one, *pair)
    assert found and not found.turns and found.proposed
    assert found.told() == "What in closed form would make the runner-up the faster one does not when it is simulated."


def test_strategies_that_take_as_long_have_nothing_to_turn() -> None:
    one = planner()
    best = one.predict(one.job)
    assert sensitivity(one, best, best) is None
    assert sensitivity(one, replace(best, closed_form=None), replace(best, seconds=2 * best.seconds)) is None


@pytest.mark.parametrize("name", RATES)
def test_a_rate_that_is_lower_makes_no_step_shorter(name: str) -> None:
    one = planner()
    job = job_at(one.job, {**one.predict(one.job).point})
    seconds = [replace(one, cluster=RATES[name](H100, factor)).seconds(job) for factor in (0.25, 1.0, 4.0)]
    assert seconds[0] * 1.01 > seconds[1] > seconds[2] * 0.99  # what is hidden shifts a little
    assert seconds[0] > seconds[2]
    other = RATES[name](H100, 0.5)
    assert other != H100
    assert other.efficiency.matmul.value == H100.efficiency.matmul.value * (0.5 if name == "matrix products" else 1)
    assert len(MATMUL) == 4


def test_a_change_is_told_as_faster_or_slower() -> None:
    told = Sensitivity([TurningPoint("attention", 1 / 1.12), TurningPoint("links between nodes", 1.4)], 2).told()
    assert told == (
        "The runner-up would be the faster one if attention were 1.12 times as slow, or links between nodes were 1.4 "
        "times as fast (each alone, simulated)."
    )

"""The planner's answer for models with experts: closed form alone, and nothing wrong beside it."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.cluster import Cluster
from plait.core.errors import JobError
from plait.core.job import Job
from plait.plan.answer import Planner
from plait.plan.estimate import estimate

VALUES: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b"},
    "data": {"sequence_length": 4096},
    "train": {"global_batch_size": 64, "precision": "bf16-mixed"},
    "cluster": {"preset": "h100", "ranks": 32},
    "plan": {"top": 3, "points": 20_000, "constraints": ["pp <= 4", "schedule in 1f1b"]},
}


def planner(**more: Any) -> Planner:
    return Planner(Job.from_dict(VALUES | more), Cluster.preset("h100"), vocab=32000)


def test_experts_are_shared_out_where_that_is_best() -> None:
    found = planner().answer()
    assert len(found.candidates) == 3
    for one in found.candidates:
        assert one.memory.fits
        assert sum(one.parts.values()) == pytest.approx(one.seconds)
        assert one.seconds == one.closed_form
        assert one.job.strategy.ep == one.point["ep"]
        assert (one.point["dp"] * one.point["cp"]) % one.point["ep"] == 8 % one.point["ep"] == 0
    assert any(one.point["ep"] > 1 for one in found.candidates)


def test_what_the_job_says_of_experts_is_kept() -> None:
    constraint = VALUES["plan"] | {"constraints": ["pp <= 4", "schedule in 1f1b", "ep = 4"]}
    assert {one.point["ep"] for one in planner(plan=constraint).answer().candidates} == {4}


def test_dense_models_are_searched_without() -> None:
    model = {"preset": "llama3-8b"}
    assert {one.point["ep"] for one in planner(model=model).answer().candidates} == {1}


def test_lists_refuse_what_they_do_not_know() -> None:
    asked = planner()
    best = asked.answer().best
    for call in (lambda: asked.simulated(best.job), lambda: estimate(asked.step(asked.plan(best.job)))):
        with pytest.raises(JobError) as refused:
            call()
        assert refused.value.key == "model.experts"


def test_experts_at_unequal_places_are_refused() -> None:
    asked = planner(strategy={"pp": 2, "dp": [2, 4], "tp": [4, 2], "schedule": "1f1b"})
    with pytest.raises(JobError, match=r"strategy\.dp: are unequal places; experts need equal ones\. Give one number"):
        asked.predict(asked.job)

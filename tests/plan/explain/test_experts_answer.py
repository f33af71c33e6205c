"""The planner's answer for models with experts: closed form alone, and nothing wrong beside it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import SCHEDULES, StrategyTable
from plait.core.step.memory.closed_memory import plait_on, step_memory, usable
from plait.core.step.seconds.closed_form import Seconds
from plait.plan.answer import Planner
from plait.plan.explain.memory_report import closed_report
from plait.plan.explain.reasons import closed_parts

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


def test_lists_refuse_what_they_do_not_know() -> None:
    asked = planner()
    best = asked.answer().best
    with pytest.raises(JobError) as refused:
        asked.simulated(best.job)
    assert refused.value.key == "model.experts"


def test_experts_at_unequal_places_are_refused() -> None:
    train = VALUES["train"] | {"micro_batch_size": 2}
    asked = planner(train=train, strategy={"pp": 2, "dp": [2, 4], "tp": [4, 2], "schedule": "1f1b"})
    with pytest.raises(
        JobError, match=r"strategy\.dp: differs between pp ranks; experts need the same on all\. Give one number"
    ):
        asked.predict(asked.job)


@pytest.mark.parametrize(("schedule", "fullest"), [("1f1b", 0), ("gpipe", 3)])
def test_the_report_of_a_closed_form_is_of_the_fullest_pp_rank(schedule: str, fullest: int) -> None:
    h100, model, job = Cluster.preset("h100"), planner().model, planner().job
    row = {"pp": 4, "dp": 2, "cp": 2, "tp": 2, "ring": 2, "micro": 3, "num_micro": 8, "ep": 2}
    point = StrategyTable.of([{**row, "schedule": SCHEDULES.index(schedule)}]).row(0)
    own = plait_on(h100.device)
    report = closed_report(model, point, h100, job, own)
    found = step_memory(
        model, StrategyTable.of([point]), sequence=4096, options=plait_on(h100.device), overhead=h100.overhead
    )
    (one,) = report.pp_ranks
    tensors, index = one.estimate, int(found.pp_rank[0])
    assert index == fullest
    assert (tensors.index, tensors.ranks) == (index, (index * 8, index * 8 + 7))
    assert (tensors.dp, tensors.cp, tensors.tp, tensors.count, tensors.share, tensors.sent) == (2, 2, 2, 8, 3, {})
    assert tensors.layers == {index: 8}
    for kind in ("parameters", "gradients", "optimizer", "buffers", "activations"):
        assert getattr(tensors.memory, kind) == int(getattr(found, kind)[0])
    assert (one.overhead, report.usable) == (int(found.overhead[0]), int(usable(h100.device, h100.overhead)))
    assert (tensors.memory.when, tensors.memory.alive) == ("the fullest moment", 1)
    uneven = closed_report(model, {**point, "pp": 5, "tp": 1}, h100, job.changed(["plan.memory_margin=0.1"]), own)
    assert list(uneven.pp_ranks[0].estimate.layers.values()) == [7]
    assert uneven.kept(uneven.pp_ranks[0]) == int(0.1 * usable(h100.device, h100.overhead))
    never = closed_report(model, {**point, "pp": 64}, h100, job, own)
    assert never.pp_ranks[0].estimate.memory.parameters == 1 << 62
    assert not never.fits


def test_parts_of_a_closed_form_are_axes() -> None:
    given = Seconds(**{field.name: np.array([float(1 << at)]) for at, field in enumerate(fields(Seconds))})
    axes = {
        "compute": ("linear", "attention", "elementwise", "host", "head"), "tp": ("tp",), "cp": ("cp",), "ep": ("ep",),
        "dp": ("sharding", "sync"), "pp": ("transfers",), "optimizer": ("optimizer",),
        "idle": ("bubble", "straggler"), "beside": ("fixed",),
    }  # fmt: skip
    told = {axis: sum(float(getattr(given, name)[0]) for name in names) for axis, names in axes.items()}
    assert closed_parts(given) == told
    assert sum(told.values()) == given.total[0]


def test_latent_attention_is_planned_in_closed_form_and_not_trained() -> None:
    values = {
        "model": {"preset": "deepseek-v3"}, "data": {"sequence_length": 4096},
        "train": {"global_batch_size": 1024, "precision": "fp8"}, "cluster": {"preset": "gb200", "ranks": 256},
        "plan": {"top": 1, "points": 20_000}, "recipe": {"moe_token_dispatcher": "deepep"},
    }  # fmt: skip
    asked = Planner(Job.from_dict(values), Cluster.preset("gb200"), vocab=129_280)
    found = asked.answer()
    best = found.best
    assert best.seconds == best.closed_form and best.memory.fits
    states = best.memory.fullest.estimate.memory
    assert states.parameters + states.gradients + states.optimizer > 671e9 * 8 / 256
    assert "Planned without multi-token prediction, biases of the router." in found.why
    dense = ModelSpec.from_dict({**asked.model.to_dict(), "experts": None, "without": []})
    with pytest.raises(JobError, match="latent attention can be planned for, and not be trained yet"):
        asked.job.check_trains(dense)

"""Planning by values: jobs, plans and labs in, answers and plans out."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.api.places import place_of
from plait.api.planning import plan_job, predict_plan
from plait.core.base.errors import JobError

JOB = """
[model]
family = "gpt"
num_layers = 2
hidden = 32
num_heads = 2
max_sequence = 64
[data]
text = "python-stdlib"
sequence_length = 64
[train]
steps = 5
global_batch_size = 4
"""
SETTINGS = ("cluster.preset=h100", "cluster.ranks=8")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


def test_a_jobs_best_strategy_becomes_a_plan_that_is_predicted_alike(job: Path) -> None:
    asked = plan_job(job, SETTINGS)
    best = asked.answer().best
    plan = asked.plan(best)
    assert plan.layout.world_size == 8
    plan.write(job.with_name("plan.json"))
    again = predict_plan(job.with_name("plan.json")).candidate
    assert again.seconds == pytest.approx(best.seconds, rel=1e-12)


def test_an_answer_is_a_table_in_a_notebook(job: Path) -> None:
    found = plan_job(job, SETTINGS).answer()
    html = found._repr_html_()
    assert "<th>step" in html
    assert html.count("<tr>") == 1 + len(found.candidates)
    assert found.text().count("\n") > len(found.candidates)


def test_a_plan_is_checked_as_it_stands(job: Path) -> None:
    asked = plan_job(job, [*SETTINGS, "strategy.tp=2", "strategy.dp=4", "train.global_batch_size=8"])
    plan = asked.plan(asked.answer(evaluate=True).best)
    file = job.with_name("plan.json")
    plan.write(file)
    of_plan = plan_job(file)
    assert of_plan.written is not None
    assert of_plan.plan(of_plan.answer().best).key == plan.key
    with pytest.raises(JobError, match="would change the plan"):
        plan_job(file, ["strategy.tp=1"])


def test_a_lab_stands_for_this_machine(job: Path) -> None:
    asked = plan_job(job, (), place_of("lab:2x2@1gbit"))
    assert asked.answer().best.job.world_size == 4


def test_changes_are_of_the_cluster_alone(job: Path) -> None:
    asked, as_it_is = plan_job(job, SETTINGS, changes=["compute=2x"]), plan_job(job, SETTINGS)
    assert asked.factors == {"compute": 2.0}
    assert asked.planner.cluster != as_it_is.planner.cluster


def test_a_vocabulary_that_is_not_the_presets_is_said(job: Path) -> None:
    job.write_text('[model]\npreset = "gpt3-125m"\n' + JOB[JOB.index("[data]") :])
    asked = plan_job(job, SETTINGS)
    assert asked.planner.model.vocab > 50_000
    assert "byte tokenizer" in asked.note

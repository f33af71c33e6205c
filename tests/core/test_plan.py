from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import JobError
from plait.core.job import Job
from plait.core.layout import Layout
from plait.core.plan import Plan
from plait.core.segment_costs import SegmentCosts


@pytest.fixture
def plan() -> Plan:
    job = Job.from_dict({"model": {"preset": "llama3-405b"}, "strategy": {"tp": 2, "p1": 2}})
    costs = SegmentCosts({"attn.F": 0.1 + 0.2}, {"attn.R": 1e-9}, 5e-6)
    return Plan(
        job=job.to_dict(), job_fingerprint=job.fingerprint, model=job.model_spec(257), strategy=job.base_strategy,
        layout=Layout(tp=2), costs=costs, notes={"slices": "as the job says"},
    )  # fmt: skip


def test_a_plan_reads_back_equal_with_an_equal_hash(plan: Plan, tmp_path: Path) -> None:
    for one in (plan, replace(plan, costs=None)):
        one.write(tmp_path / "plan.json")
        again = Plan.read(tmp_path / "plan.json")
        assert again == one
        assert again.hash == one.hash


def test_another_jobs_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.write(file)
    assert Plan.of_job(file, plan.job_fingerprint) == plan
    with pytest.raises(JobError, match=r"another job.*run\.name") as caught:
        Plan.of_job(file, "0" * 64)
    assert caught.value.file == str(tmp_path)


def test_the_hash_covers_the_content_and_not_the_notes(plan: Plan) -> None:
    assert replace(plan, notes={}).hash == plan.hash
    assert replace(plan, layout=Layout(dp=2)).hash != plan.hash
    assert replace(plan, strategy=replace(plan.strategy, p2=2)).hash != plan.hash


def test_writing_leaves_nothing_but_the_plan(plan: Plan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    plan.write(tmp_path / "plan.json")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 1}, "1 is not a plan version"),
        ({"strategy": {"tp": 4}}, "edited or damaged"),
        ({"layout": {"qp": 4}}, "not a complete plan"),
        ({"layout": {"tp": 0}}, "not a complete plan"),
        ({"costs": 3}, "not a complete plan"),
        ({"model": {}}, "is missing"),
        ({"hash": "0" * 64}, "edited or damaged"),
    ],
)
def test_an_edited_plan_is_refused(plan: Plan, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "plan.json"
    plan.write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(JobError, match=words) as caught:
        Plan.read(file)
    assert caught.value.file == str(file)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3"])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "plan.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(JobError) as caught:
        Plan.read(file)
    assert caught.value.file == str(file)

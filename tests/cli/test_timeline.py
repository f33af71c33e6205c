"""``plait diagnose --timeline``: a run beside its plan has every span that was planned, and no
other."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from plait.cli.diagnose import show_timeline
from plait.core.base.errors import DataError, JobError
from plait.core.record.timeline import Timeline
from tests.support.runs import metrics, train, write_job

pytestmark = pytest.mark.slow

SHAPES = {
    "tensor": ("strategy.slices=auto", "train.micro_batch_size=2"),
    "pipeline": ("strategy.pp=2", "strategy.tp=1", "strategy.schedule=zb-h1", "strategy.slices.batch=1",
                 "train.micro_batch_size=1"),
    "sharded": ("strategy.tp=1", "strategy.dp=2", "strategy.shard=fsdp", "strategy.slices.batch=1",
                "train.eval_every=2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every shape."""
    found: dict[str, Path] = {}
    for name, settings in SHAPES.items():
        job = write_job(tmp_path_factory.mktemp(name), steps=6, every=0)
        train(job, "train.eval_every=0", *settings)
        found[name] = job.parent / "runs" / "job"
    return found


def told(run: Path, **options: Any) -> str:
    with redirect_stdout(StringIO()) as out:
        show_timeline(run, **options)
    return out.getvalue()


def compared(run: Path, against: Path) -> dict[str, Any]:
    return json.loads(told(run, against=against, as_json=True))


@pytest.mark.parametrize("name", SHAPES)
def test_all_that_is_measured_was_planned_and_all_that_was_planned_is_measured(
    runs: dict[str, Path], name: str
) -> None:
    found = compared(runs[name], runs[name] / "plan.json")
    assert (found["never_seen"], found["not_planned"]) == ([], [])
    assert (found["steps"], found["ranks"]) == ([0, 1, 2, 3, 4, 5], [0, 1])
    kinds = {row["kind"] for row in found["rows"]}
    assert kinds == ({"compute", "idle", "transfer"} if name == "pipeline" else {"compute", "comm", "wait"})
    assert all(row["measured"] > 0 for row in found["rows"])


def test_measured_costs_predict_what_ops_take(runs: dict[str, Path]) -> None:
    """Costs were measured by the same processes just before; within an order of magnitude on a busy
    machine."""
    found = compared(runs["tensor"], runs["tensor"] / "plan.json")
    computing = [row for row in found["rows"] if row["kind"] == "compute"]
    ratio = sum(row["measured"] for row in computing) / sum(row["predicted"] for row in computing)
    assert 0.1 < ratio < 10
    assert found["communication"]["predicted"]["total"] > 0
    text = told(runs["tensor"], against=runs["tensor"] / "plan.json")
    assert "planned, never seen: nothing" in text
    assert "exposed communication, predicted: " in text
    assert "exposed communication, measured: " in text
    assert "no measured costs" not in text


def test_what_only_one_of_them_has_is_listed(runs: dict[str, Path]) -> None:
    text = told(runs["sharded"], against=runs["sharded"] / "plan.json")
    assert "gather mlp1" not in text  # both have it
    assert "no measured costs" in text
    found = compared(runs["sharded"], runs["pipeline"])
    assert {one["kind"] for one in found["not_planned"]} >= {"comm"}
    assert {one["kind"] for one in found["never_seen"]} >= {"idle", "transfer"}


def test_two_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["tensor"]
    found = compared(run, run)
    assert all(row["ratio"] in (1.0, None) for row in found["rows"])
    text = told(run, against=runs["pipeline"])
    assert f"only in {runs['pipeline']}: " in text
    assert "ms there" in text


def test_mistakes(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["tensor"]
    other = runs["pipeline"] / "plan.json"
    with pytest.raises(JobError, match=r"is plan .* and the last steps in .* were of plan .*plan.json"):
        told(run, against=other)
    with pytest.raises(JobError, match="cannot be read as a plan"):
        told(run, against=run / "metrics.jsonl")
    with pytest.raises(DataError, match="no such run folder"):
        told(tmp_path / "nothing")
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("*.parquet"))
    for options in ({}, {"against": run / "plan.json"}):
        with pytest.raises(DataError, match="holds no timeline"):
            told(tmp_path / "run", **options)
    with pytest.raises(DataError, match="holds no timeline"):
        told(run, against=tmp_path / "run")


def test_the_trend_of_hidden_communication(runs: dict[str, Path]) -> None:
    found = json.loads(told(runs["tensor"], as_json=True))
    assert [(one["first"], one["last"]) for one in found["hidden_by_step"]] == [(0, 1), (2, 3), (4, 5)]
    shares = [m["hidden"] for m in metrics(runs["tensor"].parent.parent / "job.toml")]
    for one in found["hidden_by_step"]:
        assert 0 <= one["hidden"] <= 1
    assert min(shares) - 0.5 <= found["hidden"] <= 1
    assert "hidden, the mean of 2 ranks in steps 1 to 2: " in told(runs["tensor"])


def test_a_run_that_went_on_under_another_plan_shows_what_is_of_its_own(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["tensor"], run)
    part = next((run / "timeline").glob("rank-00000-*.parquet"))
    spans = Timeline.read_parquet(part).spans
    before = json.loads(told(run, as_json=True))
    other = Timeline(tuple(replace(span, step=6) for span in spans if span.step == 5), "beef")
    other.write_parquet(run / "timeline" / "rank-00000-step-00000099.parquet")
    found = json.loads(told(run, as_json=True))
    assert {name: found[name] for name in ("spans", "steps", "hidden")} == {
        name: before[name] for name in ("spans", "steps", "hidden")
    }
    assert "1 files belong to other plans of this run" in " ".join(found["notes"])


def test_a_step_that_was_done_twice_counts_once(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["tensor"], run)
    before = json.loads(told(run, as_json=True))
    for part in sorted((run / "timeline").glob("*.parquet")):
        read = Timeline.read_parquet(part)
        again = Timeline(tuple(span for span in read.spans if span.step >= 4), read.plan_hash)
        again.write_parquet(part.with_name(part.name.replace("00000006", "00000050")))
    assert json.loads(told(run, as_json=True)) == before

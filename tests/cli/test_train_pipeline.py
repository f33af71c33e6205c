"""A run through a pipeline, as a user sees it: it resumes, also in another shape, and says what
does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout
from plait.core.record.timeline import Timeline
from tests.support.runs import (
    curve,
    metrics,
    start,
    start_and_kill,
    stopped_after,
    train,
    wait_for_step,
    write_job,
)

pytestmark = pytest.mark.slow

SHAPE = (
    "strategy.pp=2",
    "strategy.tp=1",
    "strategy.schedule=zb-h1",
    "strategy.slices.batch=1",
    "train.micro_batch_size=1",
)
RING = ("strategy.tp=1", "strategy.cp=2", "strategy.cp_comm_type=ring", "strategy.shard=zero1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipelined run that was never disturbed."""
    job = write_job(tmp_path_factory.mktemp("pipeline"))
    train(job, *SHAPE)
    return job


def test_a_killed_pipeline_continues_exactly(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    start_and_kill(job, 1, 9, *SHAPE)
    done = train(job, *SHAPE)
    assert re.search("resuming after step [48]", done.stdout)  # that of 8 is begun when that of 4 is complete
    assert curve(job) == curve(finished)


def test_a_run_goes_on_in_another_shape(finished: Path, tmp_path: Path) -> None:
    """What a pipeline has begun, ring attention with sharded optimizer states ends, on the
    pipeline's curve but for rounding."""
    job = write_job(tmp_path)
    process = start(job, *SHAPE)
    wait_for_step(process, job, 3)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    train(job, *RING, *SHAPE[3:])
    assert [m["loss"] for m in metrics(job)] == pytest.approx([m["loss"] for m in metrics(finished)], rel=1e-6)


def test_what_a_pipelined_run_leaves(finished: Path) -> None:
    run = finished.parent / "runs" / "job"
    assert 0 <= metrics(finished)[-1]["idle"] <= 1
    plan = Plan.read(run / "plan.json")
    assert plan.layout == Layout.of(pp=2)
    whole = Timeline.concat([Timeline.read_parquet(path) for path in sorted((run / "timeline").glob("*.parquet"))])
    found = {(span.kind, span.name) for span in whole.spans}
    assert found >= {("transfer", "0SEND_F3"), ("transfer", "1SEND_B0"), ("idle", "1RECV_F0"), ("compute", "leave.N0")}


def test_what_of_sharding_is_hidden_is_measured_once(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=1_000_000, more="parallel_block = true")  # worth timing for
    shape = (
        "strategy.tp=1",
        "strategy.dp=2",
        "strategy.shard=fsdp",
        "strategy.overlap.shard=auto",
        "strategy.recompute=selective",
    )
    said = stopped_after(job, 3, *shape)
    assert "sharding hides" in said
    assert "sharding: fastest of 4 timed candidates" in said
    fastest = re.search(r"\b(none|forward|backward|both)\b.* 1\.00x", said)
    first = Plan.read(tmp_path / "runs" / "job" / "plan.json").strategy
    assert fastest
    assert fastest[1] == first.shard_overlap
    again = train(job, *shape, f"train.steps={len(metrics(job)) + 1}")
    assert "sharding hides" not in again.stdout
    assert Plan.read(tmp_path / "runs" / "job" / "plan.json").strategy == first


def test_slices_and_slack_are_measured_once(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=1_000_000)  # worth timing for
    shape = (
        "strategy.pp=2",
        "strategy.tp=[1,2]",
        "strategy.schedule=slack-1f1b",
        "strategy.slices=auto",
        "strategy.sequence_parallel=auto",
        "train.micro_batch_size=2",
    )
    said = stopped_after(job, 3, *shape)
    assert "Measured before training" in said
    assert "slack from measured times: at most " in said
    run = tmp_path / "runs" / "job"
    first = Plan.read(run / "plan.json")
    assert first.layout.degrees == ((1, 1), (1, 2))
    assert first.schedule.name == "slack-1f1b"
    assert first.costs is not None
    spans = [span for path in (run / "timeline").glob("*.parquet") for span in Timeline.read_parquet(path).spans]
    assert ("comm", "mlp1.C0") in {(span.kind, span.name) for span in spans}
    steps = len(metrics(job)) + 2
    again = train(job, *shape, f"train.steps={steps}")
    assert "measured" not in again.stdout
    second = Plan.read(run / "plan.json")
    assert replace(second, job=first.job).hash == first.hash
    assert [row["step"] for row in metrics(job)] == list(range(1, steps + 1))

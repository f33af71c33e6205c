"""A run through a pipeline, as a user sees it: it resumes, also in another shape, and says what does not
fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout
from plait.core.record.timeline import Timeline
from tests.support.runs import (
    assert_refused,
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
    done = train(job, *SHAPE)
    assert done.returncode == 0, done.stderr
    return job


def test_a_killed_pipeline_continues_exactly(finished: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    start_and_kill(job, 1, 9, *SHAPE)
    done = train(job, *SHAPE)
    assert done.returncode == 0, done.stderr
    assert re.search("resuming after step [48]", done.stdout)  # that of 8 is begun when that of 4 is complete
    assert curve(job) == curve(finished)


def test_a_run_goes_on_in_another_shape(finished: Path, tmp_path: Path) -> None:
    """What a pipeline has begun, ring attention with sharded optimizer states ends, on the pipeline's curve
    but for rounding."""
    job = write_job(tmp_path)
    process = start(job, *SHAPE)
    wait_for_step(process, job, 3)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    done = train(job, *RING, *SHAPE[3:])
    assert done.returncode == 0, done.stderr
    assert [m["loss"] for m in metrics(job)] == pytest.approx([m["loss"] for m in metrics(finished)], rel=1e-6)


@pytest.mark.contract
def test_a_run_goes_on_in_any_other_shape(tmp_path: Path) -> None:
    """Six shapes, one after the other, give the curve of one rank alone: loss and gradient norm."""
    job = write_job(tmp_path, steps=48, every=2)
    common = ("train.precision=fp64", "train.micro_batch_size=2", "strategy.slices.batch=1", "train.clip_grad=0.5")
    alone = train(job, *common, "strategy.tp=1", "train.eval_batches=2", "run.name=alone")
    assert alone.returncode == 0, alone.stderr
    every = (
        ("strategy.tp=1", "strategy.pp=2", "strategy.schedule=1f1b"),
        ("strategy.tp=[2,1]", "strategy.pp=2"),
        ("strategy.tp=1", "strategy.dp=2"),
        ("strategy.tp=1", "strategy.dp=2", "strategy.shard=fsdp", "strategy.recompute=full"),
        RING,
        ("strategy.tp=1", "strategy.pp=1", "strategy.virtual_stages=2", "strategy.schedule=interleaved"),
    )
    reached = 0
    for shape in every:
        # An evaluation's micro-batches are all replicas': with dp = 2 half as many are the same sequences.
        batches = 1 if "strategy.dp=2" in shape else 2
        process = start(job, *common, *shape, f"train.eval_batches={batches}")
        if shape != every[-1]:
            wait_for_step(process, job, reached + 1)
            process.terminate()
        _, errors = process.communicate(timeout=120)
        assert process.returncode in (0, 143), errors
        assert metrics(job)[-1]["step"] > reached
        reached = metrics(job)[-1]["step"]
    assert metrics(job)[-1]["step"] == 48
    for (step, *found), (_, *wanted) in zip(curve(job), curve(job, "alone"), strict=True):
        ours, theirs = ([x for x in values if x] for values in (found, wanted))
        assert ours == pytest.approx(theirs, rel=1e-9), f"step {step}"


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
    assert again.returncode == 0, again.stderr
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
    assert again.returncode == 0, again.stderr
    assert "measured" not in again.stdout
    second = Plan.read(run / "plan.json")
    assert replace(second, job=first.job).hash == first.hash
    assert [row["step"] for row in metrics(job)] == list(range(1, steps + 1))


def test_a_short_run_times_no_candidates_but_still_measures_its_slack(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=3)
    done = train(
        job,
        "strategy.pp=2",
        "strategy.tp=[1,2]",
        "strategy.schedule=slack-1f1b",
        "strategy.slices=auto",
        "train.micro_batch_size=2",
    )
    assert done.returncode == 0, done.stderr
    assert "slices: nothing is timed before training" in done.stdout
    assert "slack from measured times: at most " in done.stdout
    assert not Plan.read(tmp_path / "runs" / "job" / "plan.json").choices.any


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("strategy.schedule=1f1p",), ("no schedule is called '1f1p'", "did you mean '1f1b'")),
        (("strategy.pp=3",), ("2 layers leave one of 3 stages without a layer",)),
        (("strategy.stage_layers=[2,1]",), ("strategy.stage_layers", "does not divide 2 layers")),
        (("strategy.tp=[1,2,1]",), ("strategy.tp", "3 numbers for pp = 2 places")),
        (
            ("strategy.dp=8", "strategy.slices.batch=1", "train.micro_batch_size=0"),
            ("strategy.dp", "dp = 8 shares a micro-batch of 4"),
        ),
        (("strategy.schedule=slack-1f1b", "strategy.slack=[1,2]"), ("has 2 numbers for 1 boundaries of stages",)),
        (("strategy.schedule={mine}",), ("deadlock: rank 0 waits at 0B0", "rank 1 waits at 1F1")),
        (
            ("strategy.schedule={mine}", "train.micro_batch_size=1", "strategy.slices.batch=1"),
            ("is for 2 micro-batches, a step has 4",),
        ),
        (
            ("strategy.dp=2", "strategy.slices.batch=1", "strategy.shard=zero9"),
            ("strategy.shard", "'zero9' is no named sharding", "zero3"),
        ),
        (
            ("strategy.dp=2", "strategy.slices.batch=1", "strategy.shard.params=2"),
            ("strategy.shard.params", "2 does not divide shard.grads = 1"),
        ),
        (
            ("strategy.dp=2", "strategy.slices.batch=1", "strategy.shard.optim=4"),
            ("strategy.shard.optim", "4 does not divide the 2 ranks that"),
        ),
        (("strategy.cp=8",), ("strategy.cp", "8 ranks cannot share out 4 heads", "ring")),
        (("strategy.cp=16", "strategy.cp_comm_type=ring"), ("strategy.cp", "into 32 parts, not 16 tokens")),
        (
            ("strategy.cp=4", "strategy.cp_comm_type.ulysses=2", "strategy.cp_comm_type.ring=4"),
            ("strategy.cp_comm_type", "2 x 4 is not cp = 4"),
        ),
    ],
)
def test_what_does_not_fit_is_one_paragraph(tmp_path: Path, settings: tuple[str, ...], says: tuple[str, ...]) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0\n")
    given = (setting.format(mine=mine) for setting in settings)
    assert_refused(
        train(write_job(tmp_path), "strategy.tp=1", "strategy.pp=2", "train.micro_batch_size=2", *given), *says
    )

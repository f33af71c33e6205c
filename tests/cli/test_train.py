"""A whole run: it trains, survives being stopped and killed, resumes exactly, and explains itself
when it cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.core.job.plan import Plan
from plait.core.record.timeline import Timeline
from tests.support.exposure import exposure_of
from tests.support.runs import (
    assert_refused,
    curve,
    kill_rank,
    metrics,
    rank_pids,
    start,
    start_and_kill,
    train,
    write_job,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def damaged(finished: Path) -> Iterator[Path]:
    """The finished run, for a test to damage; afterwards it is put back."""
    run, kept = finished.parent / "runs" / "job", finished.parent / "kept"
    shutil.copytree(run, kept)
    yield finished
    shutil.rmtree(run)
    kept.rename(run)


def test_a_run_leaves_everything_it_promises(finished: Path) -> None:
    run = finished.parent / "runs" / "job"
    found = metrics(finished)
    assert [m["step"] for m in found] == list(range(1, 13))
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["eval_loss"] > 0
    assert 0 < found[-1]["communication_seconds"] < found[-1]["seconds"]
    plan = Plan.read(run / "plan.json")
    whole = Timeline.concat([Timeline.read_parquet(path) for path in sorted((run / "timeline").glob("*.parquet"))])
    assert whole.plan_hash == plan.key
    assert {span.rank for span in whole.spans} == {0, 1}
    assert {span.name for span in whole.spans if span.kind == "comm"} >= {"embed.R0", "attn1.R1", "mlp0.C1", "head.F0"}
    assert exposure_of(s for s in whole.spans if s.rank == 0 and s.step == 11).total > 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"], summary["plan"]) == (12, 12 * 4 * 16, plan.key)
    assert summary["seconds"] > sum(m["seconds"] for m in found)
    assert summary["latest"] == found[-1]


@pytest.mark.parametrize("kills", [[(1, 9)], pytest.param([(1, 6), (0, 9)], marks=pytest.mark.contract)], ids=len)
def test_kill_any_rank_at_any_moment_and_the_curve_continues_exactly(
    finished: Path, tmp_path: Path, kills: list[tuple[int, int]]
) -> None:
    job = write_job(tmp_path)
    for rank, step in kills:
        start_and_kill(job, rank, step)
    done = train(job)
    assert re.search("resuming after step [48]", done.stdout)  # that of 8 is begun when that of 4 is complete
    assert curve(job) == curve(finished)


@pytest.mark.contract
@pytest.mark.parametrize("moment", [0.5, 2.5, 4.0])
def test_kill_early(finished: Path, tmp_path: Path, moment: float) -> None:
    """While ranks start, the corpus is prepared, the first steps run."""
    job = write_job(tmp_path)
    process = start(job)
    time.sleep(moment)
    if process.poll() is None and rank_pids(process):
        kill_rank(process, 0)
    process.communicate(timeout=60)
    train(job)
    assert curve(job) == curve(finished)


def test_another_job_under_the_same_name_is_refused(finished: Path) -> None:
    run = finished.parent / "runs" / "job"
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "job.toml", "plan.json")}
    assert_refused(train(finished, "train.seed=7", status=2), "another job: train.seed was 0 and is 7", "run.name")
    assert {name: (run / name).read_bytes() for name in before} == before


def test_a_truncated_token_shard_is_prepared_again_and_a_damaged_checkpoint_is_skipped(damaged: Path) -> None:
    run, wanted = damaged.parent / "runs" / "job", curve(damaged)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    os.truncate(next(newest.glob("*.safetensors")), 100)
    os.truncate(run / "corpus" / "text" / "train-00000.bin", 1000)
    done = train(damaged)
    assert "resuming after step 8" in done.stdout
    warnings = " ".join(done.stdout.split()).split("warning: ")[1:]
    (warning,) = (line for line in warnings if "/checkpoints/" in line.split()[0])
    assert re.match(r"\S+/step-00000012/rank-\d+\.safetensors: damaged: .*The checkpoint of step 8 is used", warning)
    assert (run / "checkpoints" / "step-00000012.unusable").is_dir()
    assert curve(damaged) == wanted


def test_a_damaged_only_checkpoint_is_one_clear_error(damaged: Path) -> None:
    for shard in (damaged.parent / "runs" / "job" / "checkpoints").glob("step-*/*.safetensors"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1  # right size, wrong bits
        shard.write_bytes(content)
    assert_refused(train(damaged, status=2), "none of its checkpoints can be used", "run.name=NAME")


def export(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plait.cli.main", "export", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_export_of_an_older_step(finished: Path, tmp_path: Path) -> None:
    run = finished.parent / "runs" / "job"
    done = export(run, "--out", tmp_path / "out", "--step", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == f"{tmp_path / 'out'} holds {run} after step 8".split()
    assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert export(run, "--out", tmp_path / "newest").stdout.endswith("after step 12\n")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "newest")]
    assert weights[0] != weights[1]
    assert_refused(export(run, "--out", tmp_path / "no", "--step", "5"), "step-00000005", "also holds steps 8, 12")
    assert_refused(export(tmp_path, "--out", tmp_path / "no"), "no run that has started")


def test_a_port_in_use_is_named_where_ranks_meet_at_one(tmp_path: Path) -> None:
    """Ranks of Plait's launchers meet inside the launcher: MASTER_PORT is for others' launchers."""
    job = write_job(tmp_path, steps=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {"MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        argv = [sys.executable, "-m", "plait.train.worker", str(job), f"run.folder={tmp_path / 'runs'}"]
        begun = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=os.environ | environ, check=False)
        assert_refused(begun, port, "port")
        train(job, environ={"MASTER_PORT": port})


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(small)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        job = write_job(tmp_path)
        done = train(job, f"run.folder={small}", "run.timeline_steps=0", status=2)
        assert "Traceback" not in done.stderr
        assert str(small) in done.stderr
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
        shutil.rmtree(small, ignore_errors=True)


def test_a_run_that_is_over_before_timing_pays_keeps_the_plain_order_and_says_so(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=8)  # half of the most that 8 steps can save is less than two candidates take
    settings = ("strategy.slices=auto", "strategy.sequence_parallel=auto")
    done = train(job, *settings)
    assert "Measured before training" not in done.stdout
    said = r"slices: nothing is timed before training: .* at most \d+\.\d s of this run, timing 12 candidates takes"
    assert re.search(said, " ".join(done.stdout.split()))
    plan = Plan.read(tmp_path / "runs" / "job" / "plan.json")
    assert (plan.strategy.p1, plan.strategy.p2, plan.strategy.sequence_parallel) == (1, 1, False)
    assert not plan.choices.any
    assert plan.costs is not None  # of the one plain step
    assert "nothing is timed" in plan.notes["slices"]
    again = train(job, *settings, "train.steps=9")
    assert "timed" not in again.stdout
    assert [row["step"] for row in metrics(job)] == list(range(1, 10))

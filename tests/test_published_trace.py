"""Published operation traces: one with a slow worker, one with uneven sequences, one with a heavy
last stage.

Made up here with the statistics of the published ones: the slow worker takes 2.35 times what its
stage takes; sequence lengths make the worst rank of a step 5 % slower, another one each time; the
last stage takes 1.6 times the others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.published_trace import read_meta, read_operations
from plait.core.base.errors import DataError
from plait.diagnose.report import Report, explain
from tests.support.recordings.made import At, Job, write_trace


def length(at: At) -> float:
    return 0.1 if at.way == "forward" else 0.2


def slow_worker(at: At) -> float:
    return length(at) * (2.35 if (at.dp, at.stage) == (0, 0) else 1.0)


def uneven(at: At) -> float:
    """Sequences differ; those of a micro-batch do on all stages, forward and backward."""
    drawn = np.random.default_rng((at.dp, at.step, at.micro_batch))
    return length(at) * float(drawn.lognormal(0.0, 0.2))


def heavy_last_stage(at: At) -> float:
    return length(at) * (1.65 if at.stage == 3 else 1.0)


def report(tmp_path: Path, job: Job) -> Report:
    trace, meta = write_trace(tmp_path, job)
    return explain(read_operations(trace, read_meta(meta)), "trace")


def test_the_slow_worker_is_named_and_not_who_arrives_last(tmp_path: Path) -> None:
    found = report(tmp_path, Job(compute=slow_worker))
    assert [(one.what, one.ranks, one.where) for one in found.stragglers] == [
        ("slow processor", (0,), "stage 0, dp 0")
    ]  # fmt: skip
    one = found.stragglers[0]
    assert one.effect == pytest.approx(1.35, abs=0.02)
    assert one.recurs == 1.0
    assert found.verdicts.arrivals[0].behind == 0
    assert found.what_if is not None
    assert found.what_if.m_w == pytest.approx(1.0, abs=0.1)
    assert found.what_if.m_s == pytest.approx(0.0, abs=0.03)
    assert found.what_if.slowdown > 1.6
    assert found.what_if.worst[0][:2] == (0, 0)


def test_what_it_costs_is_what_the_step_is_shorter_without(tmp_path: Path) -> None:
    slow, clean = Job(compute=slow_worker, jitter=0.0), Job(compute=length, jitter=0.0)
    found = report(tmp_path, slow)
    assert found.what_if is not None
    without = report(tmp_path, clean)
    assert without.what_if is not None
    difference = found.what_if.recorded - without.what_if.recorded
    assert found.costs[0] == pytest.approx(difference, rel=0.02)
    assert found.what_if.replayed == pytest.approx(found.what_if.recorded, rel=0.02)


def test_uneven_sequences_are_nobodys_fault(tmp_path: Path) -> None:
    found = report(tmp_path, Job(compute=uneven, dp=4, pp=2, micro_batches=8, steps=44))
    assert found.stragglers == ()
    assert found.batches is not None
    assert found.batches.spread > 0.1
    assert found.batches.alike > 0.9
    assert found.batches.turns > 0.5


def test_a_heavy_last_stage_is_nobodys_fault(tmp_path: Path) -> None:
    found = report(tmp_path, Job(compute=heavy_last_stage, dp=2))
    assert found.stragglers == ()
    assert found.stages is not None
    assert (found.stages.heaviest, found.stages.ratio) == (3, pytest.approx(1.65, abs=0.03))
    assert found.what_if is not None
    assert found.what_if.m_s is not None
    assert found.what_if.m_s > 0.5
    assert found.batches is None or found.batches.alike < 0.5


def test_an_interleaved_pipelines_chunks_are_compared_apart(tmp_path: Path) -> None:
    trace, meta = write_trace(tmp_path, Job(pp=2, dp=4))
    chunks = pl.read_parquet(trace).with_columns(
        mc=pl.when(pl.col("optype").cast(pl.String).str.ends_with("compute")).then(pl.col("mb_id") % 2).otherwise(-1)
    )
    chunks.write_parquet(trace)
    recording = read_operations(trace, read_meta(meta))
    assert set(recording.rollup["site"].cast(pl.String).unique()) >= {"stage", "chunk 1"}
    assert explain(recording, "chunks").stragglers == ()


def test_files_that_are_none(tmp_path: Path) -> None:
    trace, meta = write_trace(tmp_path, Job(steps=5))
    other = tmp_path / "other.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(other)
    with pytest.raises(DataError, match="no column dp_rank"):
        read_operations(other, read_meta(meta))
    with pytest.raises(DataError, match="give its meta file"):
        read_operations(trace, read_meta(meta) | {"pp_size": 2})
    meta.write_text("dp_size: many\npp_size: 2\ntp_size: 0\n")
    with pytest.raises(DataError, match="no number for dp_size, tp_size"):
        read_meta(meta)

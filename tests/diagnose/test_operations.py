"""Published operation traces: one with a slow worker, one with uneven sequences, one with a heavy last stage.

Made up here with the statistics of the published ones: the slow worker takes 2.35 times what its stage takes;
sequence lengths make the worst rank of a step 5 % slower, another one each time; the last stage takes 1.6
times the others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from plait.core.base.errors import DataError
from plait.core.base.numbers import LARGEST, MOST_RANKS
from plait.diagnose.explain import explain
from plait.diagnose.operations import LATEST, read_meta, read_operations
from plait.diagnose.report import Report
from plait.diagnose.stragglers import verdicts
from plait.diagnose.tables import LONGEST, LONGEST_TEXT
from tests.support.recordings.made import At, Job, operation_trace, write_trace


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


def test_who_is_last_is_followed_back_along_its_pipeline(tmp_path: Path) -> None:
    trace, meta = write_trace(tmp_path, Job(compute=slow_worker))
    recording = read_operations(trace, read_meta(meta))
    third = recording.meetings.filter(pl.col("group") == "stage 2")
    last = verdicts(replace(recording, meetings=third)).arrivals[0]
    assert (last.rank, last.behind) == (8, 0), "(dp 0, stage 2) comes last, and waits for (dp 0, stage 0)"


def test_what_it_costs_is_what_the_step_is_shorter_without(tmp_path: Path) -> None:
    slow, clean = Job(compute=slow_worker, jitter=0.0), Job(compute=length, jitter=0.0)
    found = report(tmp_path, slow)
    assert found.what_if is not None
    without = report(tmp_path, clean)
    assert without.what_if is not None
    difference = found.what_if.recorded - without.what_if.recorded
    assert found.costs[0] == pytest.approx(difference, rel=0.02)
    assert found.what_if.replayed == pytest.approx(found.what_if.recorded, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_uneven_sequences_are_nobodys_fault(tmp_path: Path, seed: int) -> None:
    found = report(tmp_path, Job(compute=uneven, seed=seed, dp=4, pp=2, micro_batches=8, steps=44))
    assert found.stragglers == ()
    assert found.batches is not None
    assert found.batches.spread > 0.1
    assert found.batches.alike > 0.9
    assert found.batches.turns > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_heavy_last_stage_is_nobodys_fault(tmp_path: Path, seed: int) -> None:
    found = report(tmp_path, Job(compute=heavy_last_stage, seed=seed, dp=2))
    assert found.stragglers == ()
    assert found.stages is not None
    assert (found.stages.heaviest, found.stages.ratio) == (3, pytest.approx(1.65, abs=0.03))
    assert found.what_if is not None
    assert found.what_if.m_s is not None
    assert found.what_if.m_s > 0.5
    assert found.batches is None or found.batches.alike < 0.5


def test_clean_jobs(tmp_path: Path) -> None:
    for seed in range(3):
        found = report(tmp_path, Job(seed=seed, jitter=0.02))
        assert found.stragglers == ()
        assert found.what_if is not None
        assert found.what_if.slowdown == pytest.approx(1.0, abs=0.06)


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
    degrees = read_meta(meta)
    short = tmp_path / "short.parquet"
    short.write_bytes(trace.read_bytes()[:1000])
    other = tmp_path / "other.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(other)
    empty = tmp_path / "empty.parquet"
    operation_trace(Job(steps=1)).clear().write_parquet(empty)
    for file, said in (
        (short, "no Parquet file"), (other, "no column dp_rank"), (empty, "it has no rows"),
        (tmp_path / "missing.parquet", "no Parquet file"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=said):
            read_operations(file, degrees)
    with pytest.raises(DataError, match="give the meta file that belongs to it"):
        read_operations(trace, degrees | {"pp_size": 2})
    (tmp_path / "bad.yaml").write_text("dp_size: many\n")
    with pytest.raises(DataError, match="no number for dp_size, pp_size, tp_size"):
        read_meta(tmp_path / "bad.yaml")
    with pytest.raises(DataError, match="cannot be read"):
        read_meta(tmp_path / "missing.yaml")


HARM: dict[str, pl.Expr] = {
    "no step": pl.lit(None, pl.Int64).alias("step"), "step is nothing": pl.lit(float("nan")).alias("step"),
    "step without end": pl.lit(2**62).alias("step"), "rank without end": pl.lit(2**40).alias("rank"),
    "a rank too many": pl.lit(MOST_RANKS).alias("rank"), "rank below 0": pl.lit(-1).alias("rank"),
    "a step too many": pl.lit(LARGEST + 1).alias("step"), "step below 0": pl.lit(-1).alias("step"),
    "starts too late": pl.lit(LATEST * 1.01).alias("start_ts"),
    "starts too early": pl.lit(-LATEST * 1.01).alias("start_ts"),
    "takes too long": pl.lit(LONGEST * 1.01).alias("duration"),
    "a type too long": pl.lit("x" * (LONGEST_TEXT + 1)).alias("optype"),
    "no type": pl.lit(None, pl.String).alias("optype"),
    "start is nothing": pl.lit(float("nan")).alias("start_ts"),
    "lasts for ever": pl.lit(float("inf")).alias("duration"),
    "ends before it begins": pl.lit(-1.0).alias("duration"), "no duration": pl.lit(None, pl.Float32).alias("duration"),
    "a type of megabytes": pl.lit("x" * (1 << 20)).alias("optype"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_rows_that_cannot_be_are_counted_and_left_out(tmp_path: Path, harm: str) -> None:
    trace, meta = write_trace(tmp_path, Job(dp=2, pp=2, steps=4))
    whole = pl.read_parquet(trace).with_columns(pl.col("optype").cast(pl.String))
    pl.concat([whole.tail(-3), whole.head(3).with_columns(HARM[harm])], how="vertical_relaxed").write_parquet(trace)
    found = read_operations(trace, read_meta(meta))
    assert found.spans.height == whole.height - 3
    assert explain(found, "trace").to_dict()["passed_over"] == [
        {"what": "rows of trace.parquet that cannot be", "count": 3, "first": ""}
    ]
    whole.with_columns(HARM[harm]).write_parquet(trace)
    with pytest.raises(DataError, match="none of its 528 rows can be"):
        read_operations(trace, read_meta(meta))


@pytest.mark.parametrize("column", [pl.lit("x").alias("rank"), pl.lit(b"x").alias("optype"),
                                    pl.concat_list("mb_id").alias("mc"), pl.lit("y").alias("start_ts")])  # fmt: skip
def test_columns_of_other_types_are_refused(tmp_path: Path, column: pl.Expr) -> None:
    trace, meta = write_trace(tmp_path, Job(dp=2, pp=2, steps=4))
    pl.read_parquet(trace).with_columns(column).write_parquet(trace)
    with pytest.raises(DataError, match="is no operation trace: column"):
        read_operations(trace, read_meta(meta))


@pytest.mark.parametrize("degree", ["9" * 5000, "²", "0", "-2", ""])
def test_degrees_that_cannot_be_are_refused(tmp_path: Path, degree: str) -> None:
    (tmp_path / "meta.yaml").write_text(f"dp_size: {degree}\npp_size: 2\ntp_size: 1\n")
    with pytest.raises(DataError, match="no number for dp_size"):
        read_meta(tmp_path / "meta.yaml")


@pytest.mark.parametrize("column", ["stage", "dp_rank"])
@pytest.mark.parametrize("other", [-1, 2, 1])
def test_places_that_the_meta_file_does_not_have(tmp_path: Path, column: str, other: int) -> None:
    """As many of them, but of other numbers."""
    trace, meta = write_trace(tmp_path, Job(dp=2, pp=2, steps=4))
    whole = pl.read_parquet(trace)
    moved = whole.with_columns(pl.col(column).replace({1: other}))
    moved.write_parquet(trace)
    kept = whole.height if other == 1 else whole.filter(pl.col(column) == 0).height
    assert read_operations(trace, read_meta(meta)).spans.height == kept

"""A run's last shape, its last steps on one clock, and what it looks like at a glance: from files
alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.errors import DataError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.job.plan import Plan
from plait.core.job.spec import Job as TrainJob
from plait.core.record.clocks import FILE as CLOCKS
from plait.core.record.rollup import STEPS
from plait.diagnose.measured import tables
from plait.diagnose.measured.reading import drawable_recording, glance, read_run, read_timeline
from plait.diagnose.measured.run_files import ImportRemarks, write_notes
from plait.diagnose.measured.tables import read_totals
from tests.support.recordings.made import Job, plan_of, spans_of_job, write_run

JOB = Job(dp=2, pp=2, steps=4, micro_batches=2)
PLAN = plan_of(JOB).key


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", JOB, hosts=2)


def part(run: Path, rank: int = 0) -> Path:
    (found,) = (run / "timeline").glob(f"rank-{rank:05d}-*.parquet")
    return found


def write(table: pl.DataFrame, path: Path, noun: str = "timeline", **metadata: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.write_parquet(path, metadata={f"plait.{noun}.version": "1", **metadata})


def sums(folder: Path, plan: str = PLAN) -> None:
    """Roll-ups of every step, of another plan if asked."""
    length = (pl.col("end") - pl.col("start")).sum()
    table = spans_of_job(JOB).group_by("step", "rank", "kind", "site", "direction").agg(n=pl.len(), sum=length)
    write(table, folder / "timeline" / "rollup" / "block=0" / "ranks.parquet", "rollup", **{"plait.plan": plan})


# ---- the last shape ----


def test_a_folder_without_a_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such run folder"):
        read_timeline(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"train with run\.timeline_steps above 0"):
        read_timeline(tmp_path)


def test_spans_sampled_spans_and_sums_are_told_apart(run: Path) -> None:
    write(pl.read_parquet(part(run)), run / "timeline" / "sampled" / "x.parquet", **{"plait.plan": PLAN})
    sums(run)
    found = read_timeline(run)
    assert (found.plan_hash, found.notes) == (PLAN, ())
    assert found.sampled.height == pl.read_parquet(part(run)).height
    assert found.spans["rank"].unique().to_list() == [1, 2, 3], "what was written last counts, which is sampled here"
    assert found.rollups.height > 0


def test_without_spans_the_sums_tell_the_plan(run: Path) -> None:
    for rank in range(4):
        part(run, rank).unlink()
    sums(run)
    found = read_timeline(run)
    assert (found.spans.height, found.sampled.height, found.plan_hash) == (0, 0, PLAN)
    assert found.rollups["step"].unique().sort().to_list() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="no spans that could be drawn"):
        drawable_recording(found, run, 2)


def test_of_several_plans_the_one_of_the_last_step_counts(run: Path) -> None:
    later = pl.read_parquet(part(run)).with_columns(step=pl.col("step") + 2)
    write(later, run / "timeline" / "rank-00000-step-00000009.parquet", **{"plait.plan": "another"})
    sums(run)
    found = read_timeline(run)
    assert found.plan_hash == "another"
    assert found.spans["step"].unique().sort().to_list() == [2, 3, 4, 5]
    assert found.rollups.height == 0


def test_what_was_to_be_said_when_a_recording_was_imported_is_said_again(run: Path) -> None:
    over = IgnoredInput()
    over.note("streams that are empty", "stream 7", 2)
    assert read_timeline(run).notes == ()
    write_notes(run, ImportRemarks(("a name was guessed",), over, steps=True))
    for found in (read_timeline(run), read_run(run)):
        assert found.notes[0] == "a name was guessed" and len(found.notes) == 2
        assert found.passed_over.counts == {"streams that are empty": 2}


# ---- the last steps ----


def test_a_recording_of_the_last_steps_stands_where_the_plan_says(run: Path) -> None:
    found = drawable_recording(read_timeline(run), run, 2)
    assert found.steps == [2, 3]
    assert found.grid.select("pp", "dp", "host").rows() == [(0, 0, "h0"), (0, 1, "h0"), (1, 0, "h1"), (1, 1, "h1")]
    assert found.clocks_agree is False
    other = drawable_recording(read_timeline(run)._replace(plan_hash="another"), run, 2)
    assert other.grid["pp"].n_unique() == 1, "of the plan that they obeyed nothing is known"
    (run / "plan.json").unlink()
    assert drawable_recording(read_timeline(run), run, 2).grid["pp"].n_unique() == 1


# ---- one clock ----


def clocks(run: Path, *, known: bool = True, hosts: int = 2, **second: Any) -> None:
    """Compared clocks of the hosts of four ranks."""
    here = {"offset": 0, "drift": 0.0, "origin": 0, "error": 3000, "drift_error": 0.0}
    there = {"offset": 5_000_000_000, "drift": 0.5, "origin": 2_000_000_000, "error": 7000, "drift_error": 0.0}
    of = {str(rank): f"h{rank // 2 if hosts == 2 else 0}" for rank in range(3)}
    told = {"h0": here, "h1": there | second} if known else {"h0": here}
    (run / "timeline" / CLOCKS).write_text(json.dumps({"version": 1, "hosts": of, "clocks": told}))


def test_times_are_led_to_the_clock_of_the_first_host(run: Path) -> None:
    before = read_run(run).recording.spans.sort("rank", "start", "name")
    clocks(run)
    found = read_run(run)
    after = found.recording.spans.sort("rank", "start", "name")
    led = pl.when(pl.col("rank") == 2)
    for name in ("start", "end"):
        moved = before.select(led.then(pl.col(name) + 5 + 0.5 * (pl.col(name) - 2)).otherwise(name))
        assert after[name].to_list() == pytest.approx(moved.to_series().to_list()), "rank 3 is in none of the hosts"
    assert found.notes == ("clocks of hosts were compared: times of different hosts may be wrong by 7 us",)
    drawn = drawable_recording(read_timeline(run), run, 1).spans.filter(rank=2)
    assert drawn["end"].max() == after.filter(rank=2)["end"].max()


@pytest.mark.parametrize("how", ["unknown", "one host", "damaged"])
def test_times_stay_where_clocks_are_not_compared(run: Path, how: str) -> None:
    before = read_run(run).recording.spans
    clocks(run, known=how != "unknown", hosts=1 if how == "one host" else 2)
    if how == "damaged":
        (run / "timeline" / CLOCKS).write_text('{"version": 2, "hosts": {}, "clocks": {}}')
    found = read_run(run)
    assert found.recording.spans.equals(before)
    assert bool(found.notes) == (how == "damaged")
    assert found.passed_over.counts == ({"files of the run that cannot be read": 1} if how == "damaged" else {})


# ---- at a glance ----


def totals(run: Path, block: str, first: int, last: int, seconds: float, *, name: str = "a", plan: str = PLAN) -> None:
    table = pl.DataFrame({
        "rank": [0, 1], "kind": ["compute"] * 2, "site": ["mlp"] * 2, "direction": ["forward"] * 2,
        "steps": [last - first + 1] * 2, "n": [1, 1], "sum": [seconds, 3 * seconds],
    })  # fmt: skip
    metadata = {STEPS: f"{first} {last}", "plait.plan": plan}
    write(table, run / "timeline" / "totals" / block / f"{name}.parquet", "totals", **metadata)


def test_a_glance_is_a_mean_step_of_all_blocks(run: Path) -> None:
    assert glance(run) is None
    totals(run, "block=0", 0, 999, 1000.0)
    totals(run, "block=10", 10_000, 10_099, 1000.0)
    found = glance(run)
    assert found is not None
    seen, grid = found
    assert (seen.first, seen.last, seen.notes) == (0, 10_099, ())
    assert seen.segments.sort("rank")["seconds"].to_list() == pytest.approx([2000 / 1100, 6000 / 1100])
    assert grid["rank"].to_list() == [0, 1, 2, 3], "as the plan says"
    (run / "plan.json").unlink()
    again = glance(run)
    assert again is not None and again[1]["rank"].to_list() == [0, 1], "as many as there are"


def test_totals_of_the_last_blocks_are_looked_at_and_the_last_one_whole(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, block in enumerate((9, 10, 11)):
        for name in "ab":
            totals(run, f"block={block}", 1000 * number, 1000 * number + 9, 1.0, name=name)
    totals(run, "block=x", 5000, 5009, 1.0)
    monkeypatch.setattr(tables, "MAX_TOTALS_FILES", 4)
    found = read_totals(run / "timeline", PLAN)
    assert found is not None and (found.first, found.last) == (1000, 2009)
    monkeypatch.setattr(tables, "MAX_TOTALS_FILES", 1)
    found = read_totals(run / "timeline", PLAN)
    assert found is not None and (found.first, found.last) == (2000, 2009)


def test_totals_of_other_plans_or_without_steps_are_none(run: Path) -> None:
    totals(run, "block=0", 0, 9, 1.0, plan="another")
    assert read_totals(run / "timeline", PLAN) is None
    everything = read_totals(run / "timeline", None)
    assert everything is not None and everything.last == 9
    (run / "timeline" / "totals" / "block=0" / "a.parquet").unlink()
    table = pl.DataFrame({
        "rank": [0], "kind": ["compute"], "site": ["mlp"], "direction": ["forward"],
        "steps": [1], "n": [1], "sum": [1.0],
    })  # fmt: skip
    write(table, run / "timeline" / "totals" / "block=0" / "b.parquet", "totals", **{STEPS: "3", "plait.plan": PLAN})
    assert read_totals(run / "timeline", PLAN) is None


DAY = 86_400.0


@pytest.mark.parametrize(
    ("seconds", "kept"), [(DAY, True), (DAY * 1.001, False), (0.0, True), (-0.001, False), (None, False)]
)
def test_sums_of_a_step_are_of_a_day_at_most(run: Path, seconds: float | None, kept: bool) -> None:
    table = pl.DataFrame(
        {"step": [1], "rank": [0], "kind": ["data"], "site": ["x"], "direction": [""], "n": [1], "sum": [seconds]},
        schema_overrides={"sum": pl.Float64},
    )
    write(table, run / "timeline" / "rollup" / "block=0" / "ranks.parquet", "rollup", **{"plait.plan": PLAN})
    found = read_timeline(run)
    assert found.rollups.height == kept
    assert found.passed_over.counts == ({} if kept else {"rows that cannot be": 1})


def test_totals_are_of_as_many_days_as_a_block_has_steps(run: Path) -> None:
    totals(run, "block=0", 0, 999, 300 * DAY)
    found = read_totals(run / "timeline", PLAN)
    assert found is not None and found.segments.height == 2
    totals(run, "block=0", 0, 999, 400 * DAY)
    found = read_totals(run / "timeline", PLAN)
    assert found is not None and found.segments["rank"].to_list() == [0], "1,200 days are too many"


@pytest.mark.parametrize("column", ["bytes", "slice", "kind"])
def test_a_table_that_lacks_a_column_is_no_timeline(run: Path, column: str) -> None:
    own = pl.read_parquet(part(run)).drop(column)
    own.write_parquet(part(run), metadata={"plait.timeline.version": "1", "plait.plan": PLAN})
    found = read_timeline(run)
    assert found.notes == (f"{part(run).name}: a Parquet file, but no timeline of Plait",)
    assert found.spans["rank"].unique().sort().to_list() == [1, 2, 3]


def test_sums_alone_are_read_where_there_are_any(run: Path) -> None:
    assert read_run(run, spans=False).recording.spans.height == read_run(run).recording.spans.height > 0
    sums(run)
    alone = read_run(run, spans=False).recording
    assert alone.spans.is_empty() and alone.steps == [0, 1, 2, 3]
    assert read_run(run).recording.spans.height > 0


def test_why_there_is_no_timeline(run: Path) -> None:
    for rank in range(4):
        part(run, rank).unlink()
    plan = Plan.read(run / "plan.json")
    with pytest.raises(DataError, match=r"holds no timeline that can be read\. "):
        read_run(run)
    for steps, says in ((0, "run.timeline_steps is 0; train with a value above 0"),
                        (3, "no step of it was recorded, or not yet")):  # fmt: skip
        job = TrainJob.from_dict({
            "model": {"family": "gpt", "num_layers": 2, "hidden": 8, "num_heads": 2, "vocab": 9, "max_sequence": 16},
            "data": {"sequence_length": 16}, "run": {"timeline_steps": steps},
            "train": {"global_batch_size": 4, "micro_batch_size": 2},
        })  # fmt: skip
        replace(plan, job=job).write(run / "plan.json")
        with pytest.raises(DataError, match=f"holds no timeline: {says}"):
            read_run(run)

"""Run folders as they are found: broken files are said and skipped, what was done twice counts
once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.errors import DataError
from plait.core.base.numbers import LARGEST, MOST_SECONDS
from plait.diagnose.measured import reading
from plait.diagnose.measured import run_files as metrics
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.run_files import LATEST_TIME
from plait.diagnose.report import explain
from tests.support.recordings.made import Job, write_run

JOB = Job(dp=2, pp=2, steps=10, micro_batches=4)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", JOB)


def parts(run: Path) -> list[Path]:
    return sorted((run / "timeline").glob("*.parquet"))


def test_a_whole_run(run: Path) -> None:
    found = read_run(run)
    assert (found.notes, found.recording.ranks, found.recording.steps) == ((), 4, list(range(10)))
    assert found.recording.grid.select("rank", "pp", "dp").rows() == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    met = found.recording.meetings.group_by("meeting").len().join(found.recording.meetings, on="meeting")
    assert set(met.filter(axis="dp")["len"]) == {2}
    waits = found.recording.spans.filter(kind="idle")
    moves = found.recording.spans.filter(kind="transfer")
    assert set(waits["meeting"]) == set(moves["meeting"]), "every wait finds its transfer"


def test_what_cannot_be_read_is_said_and_skipped(run: Path) -> None:
    whole = read_run(run).recording.spans.height
    first, second, third, _ = parts(run)
    first.write_bytes(first.read_bytes()[:-40])
    second.write_bytes(b"nothing")
    (run / "timeline" / "other.parquet").write_bytes(third.read_bytes())
    pl.DataFrame({"a": [1]}).write_parquet(run / "timeline" / "foreign.parquet")
    old = pl.read_parquet(third)
    old.write_parquet(run / "timeline" / "old.parquet", metadata={"plait.timeline.version": "0"})
    words = old.with_columns(start=pl.lit("soon"))
    words.write_parquet(run / "timeline" / "words.parquet", metadata={"plait.timeline.version": "1"})
    (run / "timeline" / "folder.parquet").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0}\nnonsense\n[1]\n{"step": 2')
    found = read_run(run)
    said = " ".join(found.notes)
    for word in (
        first.name, second.name, "foreign.parquet: a Parquet file, but no timeline",
        "old.parquet: a timeline of version 0",
        "words.parquet: column start holds no numbers", "folder.parquet", "metrics.jsonl: 3 lines",
    ):  # fmt: skip
        assert word in said
    assert found.recording.ranks == 2
    assert found.recording.spans.height == pytest.approx(whole / 2, rel=0.2)
    report = explain(found.recording, "run", run=found)
    assert report.stragglers == ()
    assert {row["what"]: row["count"] for row in report.to_dict()["passed_over"]} == {
        "files of the timeline that cannot be read": 6, "lines of metrics.jsonl that are no JSON objects": 3,
    }  # fmt: skip


IMPOSSIBLE: dict[str, dict[str, pl.Expr]] = {
    "no step": {"step": pl.lit(None, pl.Int64)},
    "no rank": {"rank": pl.lit(None, pl.Int64)},
    "no kind": {"kind": pl.lit(None, pl.String)},
    "no start": {"start": pl.lit(None, pl.Float64)},
    "start is nothing": {"start": pl.lit(float("nan"))},
    "step below 0": {"step": pl.lit(-1)},
    "rank below 0": {"rank": pl.lit(-1)},
    "step without end": {"step": pl.lit(2**62)},
    "rank without end": {"rank": pl.lit(2**40)},
    "ends before it begins": {"end": pl.col("start") - 0.5},
    "lasts for years": {"end": pl.col("start") + 1e8},
    "years ago": {"start": pl.col("start") - 1e8, "end": pl.col("end") - 1e8},
}


def test_rows_that_cannot_be_are_said_and_left_out(run: Path) -> None:
    whole = read_run(run).recording
    part = parts(run)[1]
    own = pl.read_parquet(part)
    for number, harm in enumerate(IMPOSSIBLE.values()):  # two rows of each
        rows = pl.int_range(pl.len()).is_in([2 * number + 3, 2 * number + 40])
        own = own.with_columns(
            pl.when(rows).then(wrong).otherwise(pl.col(name)).alias(name) for name, wrong in harm.items()
        )
    own.write_parquet(part, metadata=dict(pl.read_parquet_metadata(part)))
    count = 2 * len(IMPOSSIBLE)
    found = read_run(run)
    assert found.recording.spans.height == whole.spans.height - count
    assert [note for note in found.notes if f"{count} rows ({part.name}) have no numbers" in note]
    assert found.passed_over.rows() == [{"what": "rows that cannot be", "count": count, "first": part.name}]
    assert explain(found.recording, "run", run=found).stragglers == ()


def test_a_name_of_megabytes_costs_its_row(run: Path) -> None:
    part = parts(run)[1]
    own = pl.read_parquet(part)
    long = own.with_columns(name=pl.when(pl.int_range(pl.len()) < 3).then(pl.lit("x" * (1 << 20))).otherwise("name"))
    long.write_parquet(part, metadata=dict(pl.read_parquet_metadata(part)))
    found = read_run(run)
    assert [row["count"] for row in found.passed_over.rows()] == [3]


def test_few_bytes_that_hold_many_rows_are_not_read(run: Path) -> None:
    part = parts(run)[1]
    one = pl.read_parquet(part).head(1)
    many = pl.concat([one] * 1000)
    for _ in range(3):
        many = pl.concat([many] * 10)
    many.write_parquet(part, metadata=dict(pl.read_parquet_metadata(part)), row_group_size=100_000)
    found = read_run(run)
    assert any(note.startswith(f"{part.name}: it holds 1000000 rows") for note in found.notes)
    assert found.recording.ranks == 3


def test_a_line_without_end_is_read_to_a_limit(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"[" * (3 << 20))
    found = read_run(run)
    assert any("is too long to be read" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_in_a_run_are_told_and_not_waited_for(run: Path, kind: str) -> None:
    names = ("metrics.jsonl", "attempts.jsonl", "rank_table.json", "timeline/clocks.json", "plan.json",
             "timeline/x.parquet", "rings/rank-00000.ring")  # fmt: skip
    (run / "rings").mkdir()
    for name in names:
        (run / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(run / name)
        else:
            (run / name).symlink_to("/dev/zero")
    found = read_run(run)
    assert found.passed_over.counts
    for name in names:
        assert any((run / name).name in note for note in found.notes), name


def test_numbers_of_lines_that_cannot_be(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "seconds": 1.0, "loss": 2}\n{"step": 2, "seconds": NaN, "loss": 2}\n'
        '{"step": 3, "seconds": -1, "loss": Infinity}\n{"step": 4611686018427387904, "seconds": 1.0}\n'
    )
    (run / "attempts.jsonl").write_text('{"started": 5.0, "ended": Infinity, "steps": 2}\n')
    found = read_run(run)
    report = explain(found.recording, "run", run=found)
    assert report.goodput is not None
    assert report.goodput.productive == 2.0
    assert found.recording.seconds[0] == 1.0
    assert max(found.recording.seconds) == 9
    assert found.notes == (
        "metrics.jsonl: 4 numbers cannot be, such as seconds of line 2, and were left out",
        "attempts.jsonl: ended of line 1 cannot be, and was left out",
    )
    assert report.text()


@pytest.mark.parametrize("content", [bytes(5000), b"null\n", None])
def test_metrics_of_which_nothing_is_left_are_told_and_make_no_goodput(run: Path, content: bytes | None) -> None:
    if content is None:
        (run / "metrics.jsonl").unlink(missing_ok=True)
        (run / "metrics.jsonl").mkdir()
    else:
        (run / "metrics.jsonl").write_bytes(content)
    (run / "attempts.jsonl").write_text('{"started": 5.0, "ended": 80.0, "steps": 10}\n')
    found = read_run(run)
    assert [note for note in found.notes if note.startswith("metrics.jsonl")]
    goodput = explain(found.recording, "run", run=found).goodput
    assert goodput is not None and goodput.productive > 0 and goodput.redone == 0


def test_of_a_step_that_was_done_twice_the_second_time_counts(run: Path) -> None:
    """A run that was killed after step 10 and went on from its checkpoint of step 5."""
    first = parts(run)[0]
    spans = pl.read_parquet(first)
    again = spans.filter(pl.col("step") >= 5).with_columns(start=pl.col("start") + 100, end=pl.col("end") + 100)
    target = run / "timeline" / first.name.replace("00000010", "00000012")
    again.write_parquet(target, metadata=pl.read_parquet_metadata(first) | {})
    later = first.stat().st_mtime + 10
    os.utime(target, (later, later))
    found = read_run(run).recording.spans.filter(rank=0)
    assert found.height == spans.height
    assert set(found.filter(pl.col("step") >= 5)["start"] >= 100) == {True}
    assert set(found.filter(pl.col("step") < 5)["start"] < 100) == {True}


def test_without_a_plan_all_count_as_equals(run: Path) -> None:
    (run / "plan.json").unlink()
    found = read_run(run)
    assert "plan.json is missing" in found.notes[0]
    assert found.recording.grid["pp"].n_unique() == 1
    (run / "plan.json").write_text("{")
    assert "cannot be read as a plan" in read_run(run).notes[0]


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("seconds", MOST_SECONDS, True), ("seconds", MOST_SECONDS * 1.01, False), ("seconds", 0, True),
        ("seconds", -1e-9, False), ("restart_seconds", MOST_SECONDS * 1.01, False),
        ("started", LATEST_TIME, True), ("started", LATEST_TIME * 1.01, False), ("ended", -1, False),
        ("step", -1, True), ("step", -2, False), ("resumed", LARGEST + 1, False),
        ("skipped", -2, False), ("loss", -2, True), ("loss", -1.1e300, False), ("step", "-9", True),
        ("seconds", None, True),
    ],
)  # fmt: skip
def test_which_numbers_a_line_may_hold(run: Path, name: str, value: Any, taken: bool) -> None:
    (run / "metrics.jsonl").write_text(json.dumps({"x": 1, name: value}) + "\n")
    found = read_run(run)
    assert found.metrics == (({"x": 1, name: value} if taken else {"x": 1}),)
    assert bool(found.notes) == (not taken)


def test_a_last_line_that_was_cut_off_is_nothing_to_speak_of(run: Path) -> None:
    good = '{"step": 1}\n'
    for text, said in ((good + '{"st', False), ('{"st', True), (good + "[1]\n[2]", True), (good * 3, False)):
        (run / "metrics.jsonl").write_text(text)
        found = read_run(run)
        assert bool(found.notes) == said
        assert len(found.metrics) == text.count(good)


def test_lines_and_values_are_read_to_a_limit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_LINES", 3)
    for count, read in ((3, 3), (4, 3)):
        (run / "metrics.jsonl").write_text('{"step": 1}\n' * count)
        found = read_run(run)
        assert len(found.metrics) == read
        assert bool(found.notes) == (count > 3)
    assert found.notes == ("metrics.jsonl: from line 4 on it is too long to be read, and was left out",)
    monkeypatch.setattr(metrics, "MOST_VALUES", 4)
    for values, read in ((2, 2), (3, 1)):
        (run / "metrics.jsonl").write_text((json.dumps(dict.fromkeys("abc"[:values], 1)) + "\n") * 2)
        assert len(read_run(run).metrics) == read


def test_a_timeline_that_may_not_be_looked_at(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in parts(run):
        part.unlink()

    def refused(_: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(DataError, match="holds no timeline"):
        read_run(run)
    monkeypatch.setattr(reading.os, "listdir", refused)
    with pytest.raises(PermissionError):
        read_run(run)


def test_ranks_that_the_plan_does_not_have_are_left_out(run: Path) -> None:
    own = pl.read_parquet(parts(run)[0])
    for rank in (4, 9):
        later = own.with_columns(rank=pl.lit(rank, own.schema["rank"]))
        later.write_parquet(
            run / "timeline" / f"rank-{rank:05d}-step-00000010.parquet",
            metadata=dict(pl.read_parquet_metadata(parts(run)[0])),
        )
    found = read_run(run).recording
    assert (found.ranks, found.grid.height) == (4, 4)
    (run / "plan.json").unlink()
    assert read_run(run).recording.ranks == 6


@pytest.mark.parametrize(("written", "alive"), [(1060, True), (1061, False)])
def test_a_history_written_much_later_than_it_tells_is_a_copy(run: Path, written: int, alive: bool) -> None:
    """An attempt's line is written when it has done a step: within a minute of it."""
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "attempts.jsonl").write_text(
        '{"started": 900.0, "restart_seconds": 70.0, "first_step_seconds": 30.0, "ended": null}\n'
    )
    os.utime(run / "attempts.jsonl", (written, written))
    os.utime(run / "metrics.jsonl", (5000, 5000))
    assert read_run(run).last_written == (5000.0 if alive else None)

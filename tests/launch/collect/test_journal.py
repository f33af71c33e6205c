"""What is written of steps: spans of the last ones, a sample of the others."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch

from plait.core.record.ring import RecordKind
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.record.timeline import Timeline
from plait.core.step.segments import Kind, SegmentOp
from plait.diagnose.measured.reading import read_timeline
from plait.launch.collect.timeline_files import PART, Journal, SlowStepDetector, Sums
from plait.train.machine.device import RankDevice
from plait.train.record.recorder import Recorder

TIER = "unit"

FORWARD, BACKWARD = SegmentOp("mlp", 0, Kind.COLUMN_FORWARD, 0), SegmentOp("mlp", 0, Kind.ROW_DGRAD, 0)


def step(recorder: Recorder, number: int) -> None:
    """Two forwards of 2 and 3 us, one backward of 4 us, one optimizer of 5 us."""
    recorder.begin_step(number)
    at = 10_000 * number + 100
    for op, taken in ((FORWARD, 2000), (FORWARD, 3000), (BACKWARD, 4000)):
        recorder.ring.begin(RecordKind.COMPUTE, recorder.name_of(op), number, at, at, at + taken)
        at += taken
    recorder.ring.begin(RecordKind.OPTIMIZER, recorder.ring.name("optimizer"), number, at, at, at + 5000)


def run(folder: Path, steps: range, *, keep: int = PART, sample: int = 0, slow: int = -1, every: int = PART) -> Journal:
    """Steps of 1 s, one of them of 5 s, all of them written; every: so many at once."""
    header = this_process(rank=3, world=4, plan="feed")
    recorder = Recorder(RankDevice(torch.device("cpu")), RingWriter(None, header))
    journal, sums = Journal(folder, header, keep_steps=keep, sample=sample), Sums(folder, range(3, 4))
    for number in steps:
        step(recorder, number)
        records = recorder.records()
        whole = records.table["kind"] == RecordKind.STEP
        records.table["ended"][whole] = records.table["started"][whole] + (5 if number == slow else 1) * 10**9
        journal.add(records)
        sums.add(header, records)
        if (number + 1) % every == 0:
            assert journal.flush() is None
            assert sums.flush() is None
    assert journal.flush() is None
    assert sums.flush(last=True) is None
    return journal


def sums(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "rollup" / "**" / "*.parquet", hive_partitioning=True).sort(
        "step", maintain_order=True
    )


def steps_in(folder: Path) -> list[int]:
    parts = [Timeline.read_parquet(path) for path in sorted(folder.glob("*.parquet"))]
    return sorted({span.step for part in parts for span in part.spans})


def test_spans_of_the_last_steps_stay_whole(tmp_path: Path) -> None:
    run(tmp_path, range(4 * PART))
    assert steps_in(tmp_path) == list(range(3 * PART, 4 * PART))
    [part] = [Timeline.read_parquet(path) for path in tmp_path.glob("*.parquet")]
    first = [span for span in part.spans if span.step == 3 * PART]
    assert part.plan_hash == "feed" and {span.rank for span in first} == {3}
    assert [(span.kind, span.name, span.seq, span.direction) for span in first] == [
        ("compute", "mlp0.F0", 0, "forward"),
        ("compute", "mlp0.F0", 1, "forward"),
        ("compute", "mlp0.D0", 0, "backward"),
        ("optimizer", "optimizer", 0, ""),
    ]
    assert [round(span.seconds * 1e9) for span in first] == [2000, 3000, 4000, 5000]


def test_of_older_steps_a_sample_stays_and_those_around_an_unusual_one(tmp_path: Path) -> None:
    run(tmp_path, range(5 * PART), sample=40, slow=72)
    assert steps_in(tmp_path / "sampled") == [0, 40, 71, 72, 73, 80, 120, 160]


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    run(tmp_path / "timeline", range(70))
    run(tmp_path / "timeline", range(60, 65))
    run(tmp_path / "timeline", range(3))
    found = read_timeline(tmp_path)
    assert found.rollups["step"].unique().sort().to_list() == list(range(70))
    assert found.rollups.filter(kind="compute").height == 70 * 2, "what was done twice counts once"
    assert found.spans.height == found.spans.unique(["step", "name", "seq"]).height


def test_a_full_disk_costs_what_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.launch.collect.timeline_files.MAX_WAITING_RECORDS", 100)
    header = this_process(rank=0, world=1)
    recorder = Recorder(RankDevice(torch.device("cpu")), RingWriter(None, header))
    (tmp_path / "timeline").write_text("in the way")
    journal = Journal(tmp_path / "timeline", header, keep_steps=500)
    for number in range(60):
        step(recorder, number)
        journal.add(recorder.records())
        assert isinstance(journal.flush(), OSError)
    assert journal.waiting <= 100 and journal.lost == 60 - 20
    (tmp_path / "timeline").unlink()
    assert journal.flush() is None
    assert steps_in(tmp_path / "timeline") == list(range(40, 60))


READERS = ("duckdb", "pandas")


@pytest.mark.parametrize("reader", READERS)
def test_others_read_the_folder_as_tables(tmp_path: Path, reader: str) -> None:
    run(tmp_path, range(120), keep=100, sample=10)
    spans, rollups = tmp_path / "*.parquet", tmp_path / "rollup"
    if reader == "duckdb":
        import duckdb

        [(count, longest)] = duckdb.execute(f"select count(*), max(end_ns - start_ns) from '{spans}'").fetchall()
        [(total,)] = duckdb.execute(
            f"select sum(sum_ns) from read_parquet('{rollup_glob(rollups)}', hive_partitioning = true) "
            "where kind = 'compute' and block = 0"
        ).fetchall()
    else:
        import pandas

        whole = pandas.concat([pandas.read_parquet(path) for path in tmp_path.glob("*.parquet")])
        count, longest = len(whole), (whole["end_ns"] - whole["start_ns"]).max()
        sums_of = pandas.read_parquet(rollups)
        total = sums_of[sums_of["kind"] == "compute"]["sum_ns"].sum()
    assert (count, longest, total) == (120 * 4, 5000, 120 * 9000)


def rollup_glob(folder: Path) -> Path:
    return folder / "**" / "*.parquet"


@pytest.mark.parametrize(
    ("recent", "seconds", "unusual"),
    [
        ([1.0] * 9, 99.0, False),  # too few are known
        ([1.0] * 10, 1.25, False),
        ([1.0] * 10, 1.26, True),
        ([1.0, 1.1] * 5, 1.45, False),  # 1.05 and eight times 0.05
        ([1.0, 1.1] * 5, 1.46, True),
        ([5.0] * 50 + [1.0] * 50, 1.3, True),  # of the last fifty
        ([5.0] * 26 + [1.0] * 25, 1.3, False),
    ],
)
def test_an_unusual_step_is_longer_by_a_quarter_and_by_eight_deviations(
    recent: list[float], seconds: float, unusual: bool
) -> None:
    tells = SlowStepDetector()
    for one in recent:
        tells(one)
    assert tells(seconds) is unusual


def test_of_what_cannot_be_written_one_large_part_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.launch.collect.timeline_files.MAX_WAITING_RECORDS", 4)
    header = this_process(rank=0, world=1)
    recorder = Recorder(RankDevice(torch.device("cpu")), RingWriter(None, header))
    (tmp_path / "timeline").write_text("in the way")
    journal = Journal(tmp_path / "timeline", header, keep_steps=500)
    step(recorder, 0)
    journal.add(recorder.records())
    assert isinstance(journal.flush(), OSError)
    assert (journal.waiting, journal.lost) == (0, 1)


def test_a_part_has_its_file_until_it_is_full(tmp_path: Path) -> None:
    run(tmp_path, range(PART + 1), keep=500, every=1)
    assert steps_in(tmp_path) == list(range(PART + 1))
    names = sorted(path.name for path in tmp_path.glob("*.parquet"))
    assert names == [f"rank-00003-step-{number:08d}.parquet" for number in (PART, PART + 1)]


def test_a_folder_that_is_not_there_is_made_but_not_its_parent(tmp_path: Path) -> None:
    run(tmp_path / "timeline", range(2))
    assert steps_in(tmp_path / "timeline") == [0, 1]
    header = this_process(rank=0, world=1)
    recorder = Recorder(RankDevice(torch.device("cpu")), RingWriter(None, header))
    journal = Journal(tmp_path / "gone" / "timeline", header, keep_steps=5)
    step(recorder, 0)
    journal.add(recorder.records())
    assert isinstance(journal.flush(), OSError)
    assert not (tmp_path / "gone").exists()

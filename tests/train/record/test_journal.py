"""What is written of steps: spans of the last ones, a sample of the others, sums of all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.core.ring import Kind
from plait.core.rollup import read_rollups
from plait.core.segments import SegmentOp
from plait.core.timeline import Span, Timeline, hidden, spans_of
from plait.train.machine.device import Device
from plait.train.record.journal import PART, Journal, Unusual
from plait.train.record.recorder import Recorder

FORWARD, BACKWARD = SegmentOp("mlp", 0, "F", 0), SegmentOp("mlp", 0, "D", 0)


def step(recorder: Recorder, number: int) -> None:
    """Two forwards of 2 and 3 us, one backward of 4 us, one optimizer of 5 us."""
    recorder.begins(number)
    at = 10_000 * number + 100
    for op, taken in ((FORWARD, 2000), (FORWARD, 3000), (BACKWARD, 4000)):
        recorder.ring.begin(Kind.COMPUTE, recorder.name_of(op), number, at, at, at + taken)
        at += taken
    recorder.ring.begin(Kind.OPTIMIZER, recorder.ring.name("optimizer"), number, at, at, at + 5000)


def run(folder: Path, steps: range, *, keep: int = PART, sample: int = 0, slow: int = -1) -> None:
    recorder = Recorder(Device(torch.device("cpu")))
    journal = Journal(folder, rank=3, plan_hash="feed", keep_steps=keep, sample=sample)
    for number in steps:
        step(recorder, number)
        journal.add(number, recorder.records(), 5.0 if number == slow else 1.0)
        journal._settle(wait=True)
    journal.close()


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


def test_sums_of_all_steps_stay_however_few_spans_do(tmp_path: Path) -> None:
    run(tmp_path, range(1040), keep=1)
    assert sorted(path.name for path in (tmp_path / "rollup").iterdir()) == ["block=0", "block=1"]
    table, problems = read_rollups(tmp_path)
    assert not problems and sorted(set(table["step"].tolist())) == list(range(1040)) and set(table["rank"]) == {3}
    rows = [tuple(table[name][i] for name in table) for i in range(len(table["step"])) if table["step"][i] == 1017]
    assert sorted(row[2:] for row in rows if row[2] != "step") == [
        ("compute", "mlp", "backward", 1, 4000, 4000, 4000),
        ("compute", "mlp", "forward", 2, 5000, 2000, 3000),
        ("optimizer", "", "", 1, 5000, 5000, 5000),
    ]


def test_a_step_that_was_done_twice_counts_the_second_time(tmp_path: Path) -> None:
    run(tmp_path, range(70))
    run(tmp_path, range(60, 65))
    table, _ = read_rollups(tmp_path)
    assert sorted(set(table["step"].tolist())) == list(range(70))
    assert len(table["step"]) == 70 * 4


def test_without_a_timeline_nothing_is_written(tmp_path: Path) -> None:
    run(tmp_path, range(60), keep=0, sample=10)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_roll_ups_are_told_and_left_out(tmp_path: Path) -> None:
    run(tmp_path, range(60))
    block = tmp_path / "rollup" / "block=0"
    [whole] = block.iterdir()
    (block / "a.parquet").write_bytes(b"")
    (block / "b.parquet").write_bytes(whole.read_bytes()[:-50])
    (block / "c.parquet").write_bytes(next(tmp_path.glob("*.parquet")).read_bytes())
    table, problems = read_rollups(tmp_path)
    assert len(set(table["step"].tolist())) == 60 and len(problems) == 3


@pytest.mark.parametrize("seconds", [1.0, 1.02, 0.9])
def test_an_ordinary_step_is_not_unusual(seconds: float) -> None:
    unusual = Unusual()
    assert not any(unusual(1.0 + 0.01 * (i % 5)) for i in range(40))
    assert not unusual(seconds)
    assert unusual(2.0)


def test_columns_and_spans_say_the_same() -> None:
    recorder = Recorder(Device(torch.device("cpu")))
    step(recorder, 0)
    records = recorder.records()
    recorder.forget()
    step(recorder, 0)
    found: list[Span] = spans_of(0, 0, recorder.take())
    columns = records.spans(0)
    ops = [i for i, kind in enumerate(columns["kind"]) if kind == "compute"]
    assert [span.key for span in found] == [
        (0, 0, str(columns["kind"][i]), str(columns["name"][i]), int(columns["seq"][i])) for i in ops
    ]
    assert hidden(found) == records.hidden()

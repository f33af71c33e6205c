"""Memory that was measured beside what was predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from plait.core.runs.memory_peaks import PROCESS, TENSORS
from plait.diagnose.measured.reading import read_run
from plait.diagnose.report import explain
from plait.diagnose.verdicts.progress import MemoryUse, memory_use
from tests.support.recordings.made import Job, write_run

LINES = [
    {"step": 5, TENSORS: {"stage 0, rank 0": 100, "stage 0, rank 1": 120, "stage 1, rank 2": 50}},
    {"step": 10, TENSORS: {"stage 0, rank 0": 130, "stage 0, rank 1": 120}, PROCESS: {"stage 0, rank 0": 900}},
]


def test_the_fullest_rank_of_a_stage_beside_the_prediction() -> None:
    assert memory_use(LINES, {"stage 0": 110, "stage 2": 7}) == (
        MemoryUse("stage 0", 110, 130, 0, 900), MemoryUse("stage 2", 7, None, None), MemoryUse("stage 1", None, 50, 2)
    )  # fmt: skip
    assert memory_use([{"step": 5}], {"stage 0": 110}) == ()
    assert memory_use(LINES[:1], {}) == (MemoryUse("stage 0", None, 120, 1), MemoryUse("stage 1", None, 50, 2))


def test_on_the_page_of_text_and_for_programs(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Job(dp=2, pp=2, steps=6)))
    report = explain(run.recording, "run", run=replace(run, metrics=tuple(LINES)), memory={"stage 0": 64 << 20})
    text = report.text()
    assert "tensors of a rank, at most" in text
    assert "On a CPU what a process grows by" not in text
    more = explain(run.recording, "run", run=replace(run, metrics=tuple(LINES)), memory={"stage 0": 110}).text()
    assert "On a CPU what a process grows by in a step is measured: buffers of libraries" in " ".join(more.split())
    assert report.to_dict()["memory"][0] == {
        "place": "stage 0",
        "predicted": 64 << 20,
        "measured": 130,
        "rank": 0,
        "process": 900,
    }


def test_where_nobody_knows_of_tensors_a_process_is_told() -> None:
    lines = [{"step": 5, PROCESS: {"stage 0, rank 0": 900, "stage 0, rank 1": 950}}]
    assert memory_use(lines, {"stage 0": 110}) == (MemoryUse("stage 0", 110, None, 1, 950),)

"""Memory that was measured beside what was predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.runs.memory_peaks import PROCESS, TENSORS, peaks_of
from plait.diagnose.explain import explain
from plait.diagnose.memory_use import MemoryUse, memory_use
from plait.diagnose.reading import read_run
from plait.diagnose.series import memory_of
from plait.view.series_figure import memory_figure
from tests.support.managed import write_job
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


@pytest.mark.system
def test_a_run_says_what_its_ranks_took(tmp_path: Path) -> None:
    job = write_job(tmp_path, 14)
    argv = [sys.executable, "-m", "plait.cli.main", "train", str(job)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "job" / "metrics.jsonl").read_text().splitlines()]
    told = [line["step"] for line in lines if TENSORS in line]
    assert told[-1] == 14  # at the end, and once after the checkpoint of step 10
    assert len(told) == 2
    assert set(told[:1]) <= {11, 12, 13}
    peaks = peaks_of(lines)
    assert {stage: list(ranks) for stage, ranks in peaks.items()} == {"stage 0": [0], "stage 1": [1]}
    processes = peaks_of(lines, PROCESS)
    for stage, ranks in peaks.items():
        assert all(2**17 < size < processes[stage][rank] < 2**32 for rank, size in ranks.items())


def test_where_nobody_knows_of_tensors_a_process_is_told() -> None:
    lines = [{"step": 5, PROCESS: {"stage 0, rank 0": 900, "stage 0, rank 1": 950}}]
    assert memory_use(lines, {"stage 0": 110}) == (MemoryUse("stage 0", 110, None, 1, 950),)


def test_what_earlier_versions_said_of_processes_is_compared_with_nothing() -> None:
    lines = [{"step": 5, "memory_peak": {"stage 0, rank 0": 10**9}}]
    assert memory_use(lines, {"stage 0": 110}) == () and memory_of(lines) == []


def test_on_the_page_beside_the_bars() -> None:
    figure = memory_figure([("stage 0", {"parameters": 1 << 20}), ("stage 1", {})], memory_of(LINES))
    marks = next(one for one in figure["data"] if one["name"] == "measured, at most")
    assert marks["x"] == ["stage 0", "stage 1"]
    assert [round(value * 2**20) for value in marks["y"]] == [130, 50]
    assert marks["customdata"] == ["rank 0", "rank 2"]

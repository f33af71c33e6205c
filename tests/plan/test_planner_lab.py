"""Runs of a lab, predicted from a profile of its machine."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.core.job import Job

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("planner_lab")
    for name in ("planner_lab", "keeping"):
        sys.modules.pop(name, None)


def test_recorded_runs_are_predicted_from_a_profile(lab: Any) -> None:
    """Of four ranks on two cores: all 22 that were run, and the fastest of them is the one chosen."""
    results = BENCHMARKS / "results"
    found = lab.work_out(lab.again(results / "planner-lab-2core.json", results / "planner-lab-profile.json"))
    assert len(found["rows"]) == 22
    assert found["median_abs_rel_error"] < 0.05
    assert max(abs(row["error"]) for row in found["rows"]) < 0.2
    assert found["chosen_over_best"] < 0.05
    assert found["band_coverage"] > 0.8


def test_a_strategy_in_words_is_the_strategy(lab: Any) -> None:
    words = "p1=2 pp=2 tp=2 schedule=zb-h1 overlap.tp=domino micro_batch_size=8 sequence_parallel=true shard.optim=2"
    values = lab.described(Job.from_dict({"train": {"global_batch_size": 16}}), words).to_dict()
    said = values["strategy"]
    assert (said["pp"], said["tp"], said["schedule"], said["sequence_parallel"]) == (2, 2, "zb-h1", True)
    assert (said["slices"], said["shard"]["optim"]) == ({"p1": 2, "p2": 1}, 2)
    assert values["train"]["micro_batch_size"] == 8

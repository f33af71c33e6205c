"""The benchmark's errors beside simple predictors, and its search of settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.forecast_errors import FEWEST_JUDGED, GRID, HeldBack, errors, held_back, search
from plait.place.queue.features import Features
from plait.place.queue.forecast import assess
from plait.place.queue.jct import JctSettings
from tests.support.workloads import heavy_tailed, trace_of

QUICK = JctSettings(bags=1, rounds=20, leaves=8)
COUNT = 120


def test_errors_by_unit_and_predictor(tmp_path: Path) -> None:
    trace = trace_of(heavy_tailed(1500), tmp_path)
    found, own = errors(trace, QUICK), assess(trace, QUICK)[1].rmse["ln seconds"]
    assert {name: found["ln seconds"][name] for name in own} == own
    for by in found.values():
        assert max(by["model"], by["group"]) < by["constant"]
    short, long = found["10-minute buckets, at most 4 h"], found["10-minute buckets, at most 24 h"]
    assert short["constant"] < long["constant"]
    alone = errors(trace_of(heavy_tailed(1500, groups=1).replace("cluster", "x"), tmp_path), QUICK)["ln seconds"]
    assert alone["group"] == alone["constant"]


def flat() -> HeldBack:
    """Jobs that are all alike."""
    known = Features(matrix=np.zeros((2 * COUNT, 1)), names=("gpus",), categorical=())
    sizes = np.full(COUNT, 6.0)
    return HeldBack(known=known, past=sizes, ended=np.ones(COUNT, bool), truth=sizes, names={})


def test_settings_are_judged_by_what_they_miss_of_jobs_that_come_later() -> None:
    [one] = search(flat(), QUICK, 0)
    assert one.error < 1e-3 and one.settings == {name: getattr(QUICK, name) for name in GRID}
    [one] = search(replace(flat(), truth=np.full(COUNT, 7.0)), QUICK, 0)
    assert one.error == pytest.approx(1.0, abs=1e-3)
    drawn = [tuple(one.settings.values()) for one in search(flat(), replace(QUICK, rounds=1), 5)]
    assert len(set(drawn)) == 6
    few = np.where(np.arange(COUNT) < FEWEST_JUDGED - 1, 6.0, np.nan)
    assert search(replace(flat(), truth=few), QUICK, 0) == []


def test_jobs_are_held_back_from_those_that_had_ended(tmp_path: Path) -> None:
    rows = "\n".join(f"{at * 60},{30 + at % 7},8" for at in range(700))
    held = held_back(trace_of(f"submit,duration,gpus\n{rows}\n", tmp_path))
    assert held and (len(held.past), len(held.truth)) == (567, 63) and held.ended.all()
    assert held_back(trace_of(heavy_tailed(500), tmp_path)) is None

"""Predictions that never look ahead, and bounds that are exceeded as often as they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.core.base.errors import DataError
from plait.formats.job_traces.table import Trace
from plait.place.queue.conformal import LAST, JobTimes, first_margins, follow, margin_of
from plait.place.queue.features import Features, features
from plait.place.queue.forecast import ForecastAccuracy, assess, log_seconds, names_of, walk_forward
from plait.place.queue.jct import LONGEST, JctSettings, Predictor, from_history, load, save
from tests.support.workloads import heavy_tailed, trace_of

QUICK = JctSettings(bags=2, rounds=20, leaves=8)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace_of(heavy_tailed(2500), tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def assessed(trace: Trace) -> tuple[Predictor, ForecastAccuracy]:
    return assess(trace, QUICK)


def test_what_happens_later_changes_no_feature(trace: Trace) -> None:
    """Other ends after a time, other jobs after it: what was known before it stays."""
    cut = 1500
    now = trace.submit[cut]
    later = trace.end > now
    changed = replace(trace, duration=np.where(later, trace.duration * 7 + 1e5, trace.duration))
    before, after = features(trace), features(changed)
    np.testing.assert_array_equal(before.matrix[: cut + 1], after.matrix[: cut + 1])
    assert not np.array_equal(before.matrix, after.matrix, equal_nan=True)
    short = features(trace.only(np.arange(cut)))
    np.testing.assert_array_equal(before.matrix[:cut], short.matrix)


def test_running_statistics_by_hand(tmp_path: Path) -> None:
    text = "submit,duration,gpus,group\n0,10,1,a\n5,1000,1,a\n20,100,2,a\n200,7,1,b\n300,7,1,a\n"
    known = features(trace_of(text, tmp_path))
    assert known.column("group:count").tolist() == [0, 0, 1, 0, 2]
    assert known.column("group:running").tolist() == [0, 1, 1, 0, 1]
    assert known.column("group:mean")[4] == pytest.approx((np.log(10) + np.log(100)) / 2)
    assert known.column("group_gpus:last")[4] == pytest.approx(np.log(10))
    assert known.column("all:q90")[4] == pytest.approx(np.log(100))
    assert np.isnan(known.column("group:mean")[0])


def test_predictions_do_not_look_ahead(trace: Trace) -> None:
    """The end of a trace may be anything: what was predicted before stays."""
    cut = int(0.8 * len(trace))
    now = trace.submit[cut]
    changed = replace(trace, duration=np.where(trace.end > now, trace.duration + 1e6, trace.duration))
    first, second = walk_forward(trace, QUICK), walk_forward(changed, QUICK)
    np.testing.assert_array_equal(first.upper[: cut + 1], second.upper[: cut + 1])
    np.testing.assert_array_equal(first.mean[: cut + 1], second.mean[: cut + 1])
    assert first.mean.shape == first.upper.shape == (len(trace),)
    assert np.isfinite(first.mean).all() and first.mean[cut:].max() <= QUICK.horizon * 600
    assert np.corrcoef(np.log(np.maximum(first.mean[cut:], 1)), log_seconds(trace)[cut:])[0, 1] > 0.3


def test_the_model_is_better_than_none_and_its_bound_is_kept(assessed: tuple[Predictor, ForecastAccuracy]) -> None:
    report = assessed[1]
    assert report.tested == 250 and report.fitted <= 2250
    assert 0.06 <= report.late["online"] <= 0.14
    for by in report.rmse.values():
        assert by["model"] < by["constant"]


def test_a_margin_moves_when_a_fate_is_known_and_not_before() -> None:
    logs, bounds = np.log([1000.0, 1.0, 1.0, 1.0]), np.log([100.0, 100.0, 100.0, 100.0])
    submit, one = np.array([0.0, 50.0, 99.0, 101.0]), {"all": [""] * 4}
    found, last = follow(JobTimes(submit, submit, logs), bounds, one, level=0.9, margins={}, scale=1 / LAST)
    # the first is known to be late at 100 s; the others end in time at 51, 100 and 102 s. Two are open at 51,
    # two at 100, and one of them a moment later
    two = np.sqrt(2)
    assert (found - bounds).tolist() == pytest.approx([0.0, 0.0, -0.1 / two, 0.9 - 0.2 / two])
    assert last["all"][""] == pytest.approx(0.8 - 0.2 / two)


@pytest.mark.parametrize("drift", [0.0, 2.0])
def test_a_bound_is_kept_in_every_group(drift: float) -> None:
    """Two clusters and two GPU counts that the model takes for one, of which one drifts."""
    draw = np.random.default_rng(3)
    count = 6000
    group, gpus = draw.integers(0, 2, count), draw.integers(1, 3, count)
    submit = np.cumsum(draw.exponential(60.0, count))
    logs = draw.normal(5.0 + group - gpus, 1.0) + drift * group * np.linspace(0, 1, count)
    labels = {"all": [""] * count, "all_gpus": [str(one) for one in gpus], "group": [f"c{one}" for one in group],
              "group_gpus": [f"c{one} {two}" for one, two in zip(group, gpus, strict=True)]}  # fmt: skip
    said, jobs = np.full(count, 6.0), JobTimes(submit, submit, logs)
    bounds, _ = follow(jobs, said, labels, level=0.9, margins={})
    alone, _ = follow(jobs, said, {"all": labels["all"]}, level=0.9, margins={})
    for own in labels.values():
        for name in set(own):
            here = np.array([one == name for one in own]) & (np.arange(count) > count // 5)
            assert float((logs > bounds)[here].mean()) == pytest.approx(0.1, abs=0.03)
    worst = max(abs(float((logs > alone)[group == one].mean()) - 0.1) for one in (0, 1))
    assert worst > 0.03


def test_a_burst_moves_a_margin_no_further_than_the_root_of_its_jobs() -> None:
    """A hundred jobs are bounded before the first is known to be late."""
    submit = np.linspace(0, 1, 100)
    _, last = follow(JobTimes(submit, submit, np.full(100, 9.0)), np.full(100, 2.0), {"all": [""] * 100}, level=0.9,
                     margins={})  # fmt: skip
    assert 4.5 < last["all"][""] < 0.9 * LAST * 2 * np.sqrt(100)


def test_first_margins_are_those_of_groups_with_enough_jobs() -> None:
    """None of its own for a group that is not known, little for one of 10 jobs that are far off."""
    draw = np.random.default_rng(4)
    names = np.array(["many"] * 10_000 + ["few"] * 10)
    logs = draw.normal(np.where(names == "many", 5.0, 8.0), 0.1)
    labels = {"all": [""] * len(names), "group": names.tolist()}
    found = first_margins(logs, np.full(len(names), 5.0), labels, 0.9, np.ones(len(names), bool))
    assert margin_of(found, {"all": [""] * 3, "group": ["many", "few", "new"]}).tolist() == pytest.approx(
        [0.128, 0.128 + 10 / 110 * 3, 0.128], abs=0.05
    )


def test_a_model_on_disk_says_the_same(
    trace: Trace, assessed: tuple[Predictor, ForecastAccuracy], tmp_path: Path
) -> None:
    model = assessed[0]
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "model.json", "log-0.txt", "log-1.txt", "buckets.txt", "upper.txt",
    }  # fmt: skip
    known = features(trace)
    first, second = model.predict(known, names_of(trace)), again.predict(known, names_of(trace))
    for name, column in vars(first).items():
        np.testing.assert_array_equal(column, vars(second)[name])
    assert (again.margins, again.groups, again.sure) == (model.margins, model.groups, model.sure)
    once_more, _ = assess(trace, QUICK)
    np.testing.assert_array_equal(once_more.predict(known, names_of(trace)).bound, first.bound)


def test_names_mean_the_same_in_another_trace(trace: Trace, assessed: tuple[Predictor, ForecastAccuracy]) -> None:
    """Codes are a table's own; names are what counts, and unknown names are none."""
    model, known, names = assessed[0], features(trace), names_of(trace)
    other = {"group": tuple(reversed(names["group"]))}
    at = known.names.index("group")
    turned = known.matrix.copy()
    turned[:, at] = len(names["group"]) - 1 - turned[:, at]
    same = model.predict(replace(known, matrix=turned), other)
    np.testing.assert_array_equal(same.log, model.predict(known, names).log)
    strangers = model.predict(known, {"group": tuple(f"new {name}" for name in names["group"])})
    assert np.isfinite(strangers.log).all()


@pytest.mark.parametrize("damage", ["nothing", "empty", "version", "text", "names", "margins"])
def test_folders_that_hold_no_model(assessed: tuple[Predictor, ForecastAccuracy], tmp_path: Path, damage: str) -> None:
    if damage != "nothing":
        save(assessed[0], tmp_path)
    if damage == "empty":
        (tmp_path / "model.json").write_text("{}")
    elif damage == "version":
        about = (tmp_path / "model.json").read_text()
        (tmp_path / "model.json").write_text(about.replace('"version": 2', '"version": 3'))
    elif damage in ("names", "margins"):
        about = json.loads((tmp_path / "model.json").read_text())
        (tmp_path / "model.json").write_text(json.dumps(about | {damage: 10**4000}))
    elif damage == "text":
        (tmp_path / "upper.txt").write_text("tree\n")
    with pytest.raises(DataError, match="version 3" if damage == "version" else "no model"):
        load(tmp_path)


def test_few_jobs_have_no_model(tmp_path: Path) -> None:
    few = trace_of(heavy_tailed(100), tmp_path)
    with pytest.raises(DataError, match="a model needs 500"):
        assess(few)
    found = walk_forward(few)
    assert np.isfinite(found.upper).all() and found.upper[0] == pytest.approx(np.exp(LONGEST))


def test_jobs_that_are_all_alike(tmp_path: Path) -> None:
    rows = "\n".join(f"{at * 60},300,8,a" for at in range(800))
    found = trace_of(f"submit,duration,gpus,group\n{rows}\n", tmp_path)
    said = walk_forward(found, QUICK)
    assert np.quantile(np.abs(np.log(said.upper[100:]) - np.log(300)), 0.9) < 1.0
    assert assess(found, QUICK)[1].rmse["ln seconds"]["model"] < 1e-3
    assert log_seconds(found)[0] == pytest.approx(np.log(300))


@pytest.mark.parametrize(("level", "column"), [(0.9, "q90"), (0.89, "median")])
def test_without_a_model_the_most_particular_history_that_has_seen_enough(level: float, column: str) -> None:
    """Twenty of a group with as many GPUs, else of the group, else of all; then any; then the
    longest."""
    names = [f"{kind}:{what}" for kind in ("all", "group", "group_gpus") for what in ("count", "mean", "q90", "median")]
    counts = [(99, 30, 20), (99, 20, 19), (20, 19, 19), (19, 3, 1), (19, 1, 0), (0, 0, 0)]
    rows = [
        [value for at, count in enumerate(seen) for value in (count, *((count and [3 * at + n for n in (1.0, 2.0, 3.0)])
         or [np.nan] * 3))] for seen in counts
    ]  # fmt: skip
    found = from_history(Features(matrix=np.array(rows), names=tuple(names), categorical=()), level)
    kinds = [2, 1, 0, 2, 1]
    assert found.log.tolist() == pytest.approx([*([1.0, 4.0, 7.0][kind] for kind in kinds), LONGEST])
    at = names.index(f"all:{column}")
    assert found.bound.tolist() == pytest.approx([*(rows[0][at + 4 * kind] for kind in kinds), LONGEST])

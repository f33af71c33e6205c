"""Forecasts, features and their reports by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.core.base.errors import DataError
from plait.formats.job_traces.read import read_trace
from plait.formats.job_traces.table import Trace
from plait.place.queue import jct
from plait.place.queue.conformal import LAST, JobTimes, first_margin, follow
from plait.place.queue.features import PARTS, WINDOW, features
from plait.place.queue.forecast import assess, log_seconds, names_of, walk_forward
from plait.place.queue.jct import FEWEST, JctSettings, Predictor, fit, labels_of, load, save
from tests.support.workloads import heavy_tailed, trace_of

QUICK = JctSettings(bags=2, rounds=20, leaves=8)


def even(jobs: int, folder: Path, seconds: float = 30.0) -> Trace:
    """One a minute, each over before the next."""
    rows = "\n".join(f"{at * 60},{seconds + at % 7},8,g{at % 3}" for at in range(jobs))
    return trace_of(f"submit,duration,gpus,group\n{rows}\n", folder)


def test_columns_of_a_job(tmp_path: Path) -> None:
    """Thursday, 2 January 2020, 23:30, and half an hour later; what is not said is no number."""
    start = 1_578_007_800
    (tmp_path / "t.csv").write_text(
        f"submit,duration_s,gpus,cpus,memory,group\n{start},10,1,4,,b\n"
        f"{start + 1800},10,2,8,16,\n{start + 3600},1,2,,,a\n"
    )
    found = features(read_trace(tmp_path / "t.csv"))
    assert found.column("gpus").tolist() == [1, 2, 2]
    assert found.column("hour").tolist() == [23.5, 0.0, 0.5]
    assert found.column("weekday").tolist() == [0, 1, 1], "1 January 1970 was a Thursday, too"
    np.testing.assert_array_equal(found.column("cpus"), [4, 8, np.nan])
    np.testing.assert_array_equal(found.column("memory"), [np.nan, 16, np.nan])
    np.testing.assert_array_equal(found.column("group"), [1, np.nan, 0])
    assert found.categorical == ("group",)
    np.testing.assert_array_equal(found.column("all:since"), [np.nan, 1800, 1800])
    np.testing.assert_array_equal(found.column("all_gpus:since"), [np.nan, np.nan, 1800])
    assert {name.partition(":")[0] for name in found.names if ":" in name} == {"all", "all_gpus", "group", "group_gpus"}


def test_statistics_look_back_on_so_many_jobs(tmp_path: Path) -> None:
    """Each is over before the next comes, and takes e^n seconds, n from 0 on and then anew."""
    lengths = [round(float(np.exp(at % 10)), 6) for at in range(WINDOW + 12)]
    submit = np.cumsum([0.0, *lengths[:-1]])
    rows = "\n".join(f"{at},{length},1" for at, length in zip(submit, lengths, strict=True))
    found = features(trace_of(f"submit,duration_s,gpus\n{rows}\n", tmp_path))
    logs = np.log(np.maximum(1.0, lengths))
    for job in (1, 2, 3, 10, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 11):
        past = logs[max(0, job - WINDOW) : job]
        told = {part: float(found.column(f"all:{part}")[job]) for part in PARTS}
        ordered = np.sort(past)
        assert told == pytest.approx({
            "count": job, "mean": past.mean(), "median": ordered[len(past) // 2],
            "q90": ordered[min(len(past) - 1, int(0.9 * len(past)))], "last": past[-1],
        }, abs=1e-9)  # fmt: skip


def test_who_ends_as_another_comes_has_ended(tmp_path: Path) -> None:
    found = features(trace_of("submit,duration_s,gpus\n0,10,1\n10,5,1\n14.9,1,1\n", tmp_path))
    assert found.column("all:count").tolist() == [0, 1, 1]
    assert found.column("all:running").tolist() == [0, 0, 1]


def test_progress_of_features_is_told_every_5000(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    features(even(5001, tmp_path), lambda done, jobs: told.append((done, jobs)))
    assert told == [(0, 5001), (5000, 5001)]


# ---- margins ----


def test_a_margin_is_the_quantile_of_what_was_missed() -> None:
    """Nine jobs; of ten, the next one included, a tenth may be late."""
    logs = np.arange(9.0)
    assert first_margin(logs, np.zeros(9), 0.89) == 8.0
    assert first_margin(logs, np.zeros(9), 0.79) == 7.0
    assert first_margin(logs, logs - 3, 0.89) == 3.0
    assert first_margin(logs, np.zeros(9), 0.96) == 8.0, "so many are not known: the most"
    assert first_margin(logs[:3], np.zeros(3), 0.25) == 0.0, "three of four may be late"
    running = np.array([True] * 8 + [False])
    assert first_margin(logs, np.zeros(9), 0.79, running) == 7.0
    assert first_margin(logs, np.zeros(9), 0.89, running) == 8.0
    first = np.array([False] + [True] * 8)
    assert first_margin(logs, np.zeros(9), 0.79, first) == 8.0, "what still runs may yet be the longest"


def test_of_jobs_of_one_length_those_that_ended_come_first() -> None:
    logs = np.array([1.0, 1.0, 2.0, 3.0])
    ended = np.array([False, True, True, True])
    swapped = np.array([True, False, True, True])
    for level in (0.5, 0.7, 0.75):
        assert first_margin(logs, np.zeros(4), level, ended) == first_margin(logs, np.zeros(4), level, swapped)


def test_margins_of_jobs_that_wait_are_known_when_their_bound_has_passed() -> None:
    """The first begins at 30 s and its bound is 10 s: late at 40 s; ends that coincide count at
    once."""
    submit = np.array([0.0, 39.9, 40.0])
    logs, bounds = np.log([1000.0, 5.0, 5.0]), np.log([10.0, 10.0, 10.0])
    begin, one, scale = np.array([30.0, 39.9, 40.0]), {"all": [""] * 3}, 1 / LAST
    found, _ = follow(JobTimes(submit, begin, logs), bounds, one, level=0.75, margins={}, scale=scale)
    assert (found - bounds).tolist() == pytest.approx([0.0, 0.0, 0.75 / np.sqrt(2)])
    even_, last = follow(
        JobTimes(submit[:1], submit[:1], bounds[:1]), bounds[:1], {"all": [""]}, level=0.75,
        margins={"all": {"": 0.5}}, scale=scale,
    )  # fmt: skip
    assert even_[0] == bounds[0] + 0.5 and last["all"][""] == pytest.approx(0.25), (
        "who takes just as long as was said is not late"
    )


# ---- models ----


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace_of(heavy_tailed(1500), tmp_path_factory.mktemp("trace"))


def test_every_number_of_a_report(trace: Trace) -> None:
    model, report = assess(trace, QUICK)
    known, logs, names = features(trace), log_seconds(trace), names_of(trace)
    cut = 1350
    rest, now = np.arange(cut, 1500), trace.submit[cut]
    ended = np.flatnonzero(trace.end[:cut] <= now)
    assert (report.jobs, report.tested, report.fitted) == (1500, 150, len(ended))
    of_rest = replace(known, matrix=known.matrix[rest])
    said, truth, labels = model.predict(of_rest, names), logs[rest], labels_of(of_rest, names)
    plain = fit(
        replace(known, matrix=known.matrix[:cut]),
        np.log(np.maximum(1.0, np.minimum(trace.duration[:cut], now - trace.begin[:cut]))),
        trace.end[:cut] <= now, QUICK, names,
    )  # fmt: skip
    times = JobTimes(trace.submit[rest], trace.begin[rest], truth)
    bounds, margins = follow(times, said.bound, labels, level=0.9, margins=plain.margins)
    assert model.margins == margins != plain.margins
    assert report.spread == float(said.spread.mean())
    assert report.late == {"online": (truth > bounds).mean()}
    assert report.rmse == {"ln seconds": pytest.approx({
        "model": np.sqrt(np.mean((said.log - truth) ** 2)),
        "constant": np.sqrt(np.mean((logs[ended].mean() - truth) ** 2)),
    })}  # fmt: skip


@pytest.mark.parametrize("more", [0, -1])
def test_so_many_jobs_must_have_ended(tmp_path: Path, more: int) -> None:
    """Of the first nine tenths all have."""
    count = next(jobs for jobs in range(600) if int(0.9 * jobs) == FEWEST + more)
    found = even(count, tmp_path)
    if more:
        with pytest.raises(DataError, match=r"499 jobs ended before the last 10% arrived; a model needs 500"):
            assess(found, QUICK)
    else:
        assert assess(found, QUICK)[1].fitted == FEWEST
    with pytest.raises(DataError, match="before the last 0% arrived"):
        assess(found, QUICK, test=0.0)


def small(trace: Trace, **more: object) -> Predictor:
    known = features(trace)
    settings = replace(QUICK, rounds=5, bags=1, **more)  # type: ignore[arg-type]
    return fit(known, log_seconds(trace), np.ones(len(trace), bool), settings, names_of(trace))


def test_a_column_that_a_trace_lacks_is_not_known(trace: Trace) -> None:
    model, known, names = small(trace), features(trace), names_of(trace)
    at = known.names.index("all:count")
    blank = known.matrix.copy()
    blank[:, at] = np.nan
    lacks = replace(
        known, names=tuple(name for name in known.names if name != "all:count"),
        matrix=np.delete(known.matrix, at, axis=1),
    )  # fmt: skip
    np.testing.assert_array_equal(
        model.predict(lacks, names).bound, model.predict(replace(known, matrix=blank), names).bound
    )


def test_forecasts_have_their_bounds(trace: Trace) -> None:
    known, names = features(trace), names_of(trace)
    assert small(trace, horizon=1.5).predict(known, names).buckets.max() <= 1.5
    few = replace(known, matrix=known.matrix[:0])
    found = small(trace).predict(few, names)
    assert [len(column) for column in vars(found).values()] == [0, 0, 0, 0]
    assert np.isnan(replace(small(trace), bags=()).predict(known, names).log).all()


def test_a_folder_that_cannot_be_written(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: .*Choose another with --out"):
        save(small(trace), tmp_path / "file" / "model")


def test_who_ends_as_the_first_of_the_last_arrives_has_ended(tmp_path: Path) -> None:
    rows = "\n".join(f"{at * 60},60,8,g{at % 3}" for at in range(600))
    found = trace_of(f"submit,duration,gpus,group\n{rows}\n", tmp_path)
    told: list[str] = []
    _, report = assess(found, QUICK, progress=told.append)
    assert report.fitted == 540
    assert told == [
        "600 jobs: what was known when each was submitted", "fitting to 540 jobs",
    ]  # fmt: skip


def test_progress_of_predictions_is_told_model_by_model(tmp_path: Path) -> None:
    told: list[str] = []
    walk_forward(even(1300, tmp_path), replace(QUICK, rounds=1), told.append)
    assert told == [
        "1,300 jobs: what was known when each was submitted", "model 4 of 6: 520 ended jobs",
        "model 5 of 6: 780 ended jobs", "model 6 of 6: 1040 ended jobs",
    ]  # fmt: skip


def test_a_model_that_was_written_in_part_is_none(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a whole one was before."""
    save(small(trace), tmp_path)
    assert load(tmp_path).margins == small(trace).margins

    def full(_: Path) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jct, "replacing", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        save(small(trace), tmp_path)
    with pytest.raises(DataError, match="holds no model"):
        load(tmp_path)

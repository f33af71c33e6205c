"""A rank whose host is late: it computes as long as the others, and comes last to what they wait
for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from plait.core.base.text import seconds_text
from plait.core.parallel.layout import Layout
from plait.diagnose.measured.reading import read_run
from plait.diagnose.measured.recording import Recording
from plait.diagnose.report import Report, explain
from plait.diagnose.verdicts.bottlenecks import late_of
from plait.diagnose.verdicts.verdict_words import verdict_words
from tests.support.recordings.made import recording_of, spans_of
from tests.support.recordings.theirs import dump, entry, imported, kernel, kineto


def report(folder: Path, *contents: dict[str, object]) -> Report:
    imported(folder, *contents)
    run = read_run(folder / "run")
    return explain(run.recording, "run", run=run)


def notes_of(folder: Path) -> tuple[str, ...]:
    return read_run(folder / "run").notes


def test_a_late_host_is_named(tmp_path: Path) -> None:
    found = report(tmp_path, *(kineto(rank, late=200.0 if rank == 2 else 0.0) for rank in range(4)))
    assert found.stragglers == ()
    assert found.late is not None
    assert (found.late.rank, found.late.axis, found.late.recurs) == (2, "dp", 1.0)
    assert found.late.seconds == pytest.approx(200e-6)
    assert found.late.computing == pytest.approx(0.0, abs=1e-6)


def test_a_clock_that_differs_is_no_lateness(tmp_path: Path) -> None:
    traces = [kineto(rank) for rank in range(4)]
    traces[2]["baseTimeNanoseconds"] += 200_000
    assert report(tmp_path, *traces).late is None


def without_computation(content: dict[str, Any], every: int) -> dict[str, Any]:
    """Of every so many kernels that compute the length cannot be read."""
    gemms = [one for one in content["traceEvents"] if one["name"] == "gemm"]
    for one in gemms[::every]:
        one["dur"] = "long"
    return content


def test_of_a_rank_whose_kernels_cannot_be_read_nobody_tells_why_it_is_late(tmp_path: Path) -> None:
    traces = [kineto(rank, slow=1.5 if rank == 2 else 1.0) for rank in range(4)]
    found = report(tmp_path, *traces[:2], without_computation(traces[2], 1), traces[3])
    assert (found.late, found.stragglers) == (None, ())
    assert (
        "10 of rank 2's 30 kernels cannot be read, so what it computes is unknown: no cause is reported for it"
        in notes_of(tmp_path)
    )
    (tmp_path / "few").mkdir()
    traces[2]["traceEvents"] = kineto(2, slow=1.5)["traceEvents"]
    few = [one | {"traceEvents": one["traceEvents"] * 1} for one in traces]
    few[2]["traceEvents"].append(few[2]["traceEvents"][3] | {"name": "gemm", "ts": "never"})
    few[2]["traceEvents"] += [kernel(f"small{n}", 1e4 + n, 0.5) for n in range(30)]
    assert [one.ranks for one in report(tmp_path / "few", *few).stragglers] == [(2,)], "one of 61 is not many"


def test_where_a_trace_has_no_base_time_nobody_is_late(tmp_path: Path) -> None:
    traces = [kineto(rank, late=200.0 if rank == 2 else 0.0) for rank in range(4)]
    traces[2]["traceEvents"][:7] = kineto(2)["traceEvents"][:7]  # only its first step is on time
    del traces[2]["baseTimeNanoseconds"]
    found = report(tmp_path, *traces)
    assert (found.late, found.verdicts.arrivals) == (None, ())
    assert "rank 2's trace has no base time (baseTimeNanoseconds): lateness cannot be computed" in notes_of(tmp_path)
    spans = read_run(tmp_path / "run").recording.spans
    assert float(spans["end"].max() or 0.0) < 1.0, "it lies beside the others"  # type: ignore[arg-type]
    (tmp_path / "none").mkdir()
    for content in traces:
        content.pop("baseTimeNanoseconds", None)
    none = report(tmp_path / "none", *traces)
    assert none.late is not None
    assert not any("base time" in note for note in notes_of(tmp_path / "none"))


def test_steps_that_only_some_recorded_are_said(tmp_path: Path) -> None:
    traces = [kineto(rank) for rank in range(3)]
    kept = {0: range(3, 7), 1: range(3, 7), 2: range(5, 9)}
    for rank, content in enumerate(traces):
        content["traceEvents"] = [
            one for one in content["traceEvents"] if one.get("ts") is not None and one["ts"] // 1000 in kept[rank]
        ]
    report(tmp_path, *traces)
    assert "steps common to all: 2 of 6 (ranks 0, 1: 3-6; rank 2: 5-8)" in notes_of(tmp_path)


def test_dumps_have_no_steps_and_tell_who_comes_last(tmp_path: Path) -> None:
    ms = 10**6

    def one(rank: int) -> dict[str, object]:
        start = 6 * ms if rank == 1 else 0
        return dump(
            rank, *(entry(n, 10**12 + 40 * n * ms + start, 10**12 + (40 * n + 9) * ms) for n in range(6)), ended=0
        )

    found = report(tmp_path, one(0), one(1))
    assert (found.steps, found.mean, found.goodput) == (None, None, None)
    assert found.late is not None
    assert (found.late.rank, found.late.in_steps, found.late.seconds) == (1, False, pytest.approx(6e-3))


# ---- in numbers ----


def arrivals(*steps: list[float], ranks: int = 2, length: float = 1.0, axis: str = "dp", **more: Any) -> Recording:
    """Of every step when each rank comes to a collective, which ends for all at 1 s."""
    rows = [
        {"kind": "comm", "name": "all_reduce", "axis": axis, "lane": axis, "step": step, "rank": rank, "meeting": step,
         "start": 10.0 * step + came, "end": 10.0 * step + 1.0, "group": "0"}
        for step, own in enumerate(steps) for rank, came in enumerate(own)
    ]  # fmt: skip
    rows += [{"step": step, "rank": rank, "end": 0.1 * rank} for step in range(len(steps)) for rank in range(ranks)]
    seconds = dict.fromkeys(range(len(steps)), length)
    return recording_of(spans_of(*rows), Layout.of(dp=ranks), **({"seconds": seconds} | more))


@pytest.mark.parametrize(("came", "late"), [(0.0625, True), (0.0624, False)])
def test_how_much_of_a_step_lateness_must_be(came: float, late: bool) -> None:
    found = late_of(arrivals(*[[0.0, came]] * 6, length=1.25), in_steps=True)
    assert (found is not None) == late
    if found:
        assert (found.rank, found.axis, found.recurs, found.in_steps) == (1, "dp", 1.0, True)
        assert found.seconds == pytest.approx(came) and found.computing == pytest.approx(0.1)


@pytest.mark.parametrize(("came", "late"), [(1e-3, True), (0.9e-3, False)])
def test_how_late_one_must_be_where_there_are_no_steps(came: float, late: bool) -> None:
    found = late_of(arrivals(*[[0.0, came + 1e-12]] * 6), in_steps=False)
    assert (found is not None) == late


def test_steps_in_which_nobody_meets_another_are_not_counted() -> None:
    """Of 15 steps one rank alone has all but five; in each of these, rank 1 is late."""
    late, alone = [0.0] * 7 + [0.2], [0.0]
    found = late_of(arrivals(*[late] * 5, *[alone] * 10, ranks=8), in_steps=True)
    assert found is not None and found.recurs == 1.0


def test_lateness_of_a_step_adds_up_and_its_median_counts() -> None:
    steps = [[0.0, came] for came in (0.1, 0.2, 0.2, 0.3, 0.9, 0.2)]
    found = late_of(arrivals(*steps), in_steps=True)
    assert found is not None and found.seconds == pytest.approx(0.2)


def test_what_does_not_count_as_late() -> None:
    late = [[0.0, 0.3]] * 6
    assert late_of(arrivals(*late, axis="pp"), in_steps=True) is None, "a stage waits for the one before"
    assert late_of(arrivals(*[[0.3, 0.3]] * 6), in_steps=True) is None
    assert late_of(arrivals(*[[0.3]] * 6), in_steps=True) is None, "alone"
    assert late_of(arrivals(*late, seconds={}), in_steps=True) is None, "nobody knows how long steps are"
    shifted = arrivals(*late)
    clocks = shifted.meetings.with_columns(end=pl.col("end") + 0.3 * pl.col("rank"))
    assert late_of(replace(shifted, meetings=clocks), in_steps=True) is None, "a clock that is ahead"


def test_the_worst_worker_can_cost_more_than_all_that_is_lost(tmp_path: Path) -> None:
    """A step in which all kernels take the mean is longer than one in which only its kernels do. In
    words it is all that is lost."""
    traces = [kineto(rank, slow=2.0 if rank == 2 else 1.0) for rank in range(4)]
    traces[0]["traceEvents"] += [kernel("small", 1000.0 * step + 400, 100) for step in range(10)]
    told = report(tmp_path, *traces)
    found = told.what_if
    assert found is not None
    assert (found.m_w, found.few, len(found.worst)) == (pytest.approx(6.0), 1, 4)
    slower = replace(told, what_if=replace(found, replayed=2 * found.ideal))
    (said,) = (line for line in map(str, verdict_words(slower)) if "all ranks equal" in line)
    assert f"takes {seconds_text(2 * found.ideal)} (the mean of the last {found.steps}), 2.00 times" in said
    assert f"({seconds_text(found.ideal)}); the worst of 4 workers cost 100% of what is lost" in said


def test_the_axis_is_the_one_on_which_it_is_late() -> None:
    """Of ten steps: once a step behind in its group, and three times as early as all others in
    another."""
    rows = [
        {"step": step, "rank": rank, "kind": "comm", "lane": axis, "axis": axis, "group": axis, "name": f"{axis} {n}",
         "start": 10.0 * step + n + (0.5 if axis == "tp" and rank == 1 else 0.0), "end": 10.0 * step + n + 0.75,
         "meeting": 100 * step + 10 * n + (axis == "tp")}
        for step in range(1, 11) for rank in range(2) for axis, count in (("tp", 1), ("dp", 3)) for n in range(count)
    ]  # fmt: skip
    seen = recording_of(spans_of(*rows), Layout.of(dp=1, tp=2), seconds=dict.fromkeys(range(1, 11), 9.0))
    found = late_of(seen, in_steps=True)
    assert found is not None
    assert (found.rank, found.axis, found.seconds, found.recurs) == (1, "tp", pytest.approx(0.5), 1.0)


def lately(late: int, of: int, ranks: int = 2) -> Recording:
    """Of so many steps, rank 1 is late in some and rank 0 in the others, by half a second of
    nine."""
    rows = [
        {"step": step, "rank": rank, "kind": "comm", "lane": "dp", "axis": "dp", "group": "dp", "name": "x",
         "start": 10.0 * step + (0.5 if rank == (step <= late) else 0.0), "end": 10.0 * step + 1, "meeting": step}
        for step in range(1, of + 1) for rank in range(ranks)
    ]  # fmt: skip
    return recording_of(spans_of(*rows), Layout.of(dp=ranks), seconds=dict.fromkeys(range(1, of + 1), 9.0))


@pytest.mark.parametrize(
    ("late", "of", "ranks", "told"),
    [
        (12, 15, 2, True), (11, 15, 2, False),  # by chance in 1.8 % of all cases, and in 5.9 %
        (3, 4, 2, False), (6, 6, 2, True), (5, 5, 2, False),
        (3, 4, 6, True), (2, 2, 6, False), (15, 20, 4, True), (14, 20, 4, False),
    ],
)  # fmt: skip
def test_so_often_that_it_is_hardly_chance(late: int, of: int, ranks: int, told: bool) -> None:
    found = late_of(lately(late, of, ranks), in_steps=True)
    assert (found is not None) == told
    if found:
        assert (found.rank, found.recurs, found.seconds) == (1, late / of, pytest.approx(0.5))

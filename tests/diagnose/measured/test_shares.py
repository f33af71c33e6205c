"""Where steps go: the shares add up, and what changed is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.parallel.layout import Layout
from plait.diagnose.measured.recording import ROLLUP, Recording, seconds_of
from plait.diagnose.measured.shares import Drift, StepShare, StepTimes, drift_of, mean_step, steady_steps, steps_of
from plait.diagnose.report import explain
from plait.diagnose.series import summarise
from tests.diagnose.verdicts.test_stragglers import recording
from tests.support.recordings.made import Job, recording_of, spans_of
from tests.support.recordings.theirs import REDUCE_SCATTER, annotation, imported, kernel, told, trace


def shares(recording: Recording) -> tuple[StepShare, ...]:
    """Parts of the mean step."""
    found = mean_step(recording)
    assert found is not None
    return found.parts


def test_a_collective_that_is_told_many_times_counts_once(tmp_path: Path) -> None:
    """A trace may give one number to all: a rank waits for no more than it waited."""
    again = [kernel(REDUCE_SCATTER, 100.0 * number + 10, 50, **told(0)) for number in range(400)]
    late = [kernel(REDUCE_SCATTER, 100.0 * number + 40, 20, **told(0)) for number in range(400)]
    work = [kernel("gemm", 100.0 * number, 10) for number in range(400)]
    step = annotation("ProfilerStep#1", 0.0, 40_000.0, cat="gpu_user_annotation")
    seen = imported(tmp_path, *(trace([step, *work, *one], rank, 2) for rank, one in enumerate((again, late))))[0]
    for one in shares(seen):
        assert (one.late or 0.0) <= one.seconds * (1 + 1e-9)


def test_evaluations_and_checkpoints_come_after_a_step() -> None:
    """The lengths of steps are without them."""
    plain = recording(Job(dp=2, pp=1, steps=4))
    found = {one.what: one.seconds for one in shares(replace(plain, seconds=dict.fromkeys(range(4), 5.0)))}
    rows = plain.rollup.filter(kind="compute").unique(["step", "rank"])
    after = [rows.with_columns(kind=pl.lit(kind), seconds=0.3).cast(ROLLUP) for kind in ("evaluation", "checkpoint")]  # type: ignore[arg-type]
    seen = replace(plain, rollup=pl.concat([plain.rollup, *after]), seconds=dict.fromkeys(range(4), 5.0))
    parts = shares(seen)
    more = {one.what: one.seconds for one in parts}
    assert sum(one.share for one in parts) == pytest.approx(5.6 / 5.0), "of the step, of which they are none"
    assert more["rest"] == pytest.approx(found["rest"])
    assert (more["evaluation"], more["checkpoint"]) == (pytest.approx(0.3), pytest.approx(0.3))
    assert sum(more.values()) == pytest.approx(5.6)


def test_spans_after_a_step_do_not_count_in_its_length() -> None:
    spans = recording(Job(dp=1, pp=1, steps=1)).spans
    end = float(spans["end"].max())  # type: ignore[arg-type]
    later = spans[:1].with_columns(kind=pl.lit("evaluation"), start=end, end=end + 9)
    assert seconds_of(pl.concat([spans, later])) == seconds_of(spans)


@pytest.mark.parametrize("agree", [True, False])
def test_waiting_for_the_last_to_come_is_a_part_of_what_is_exposed(agree: bool) -> None:
    """Rank 1 comes 0.3 s after rank 0, and the transfer takes 0.1 s, of which rank 1 hides nothing
    and rank 0 hid 0.2 s of the waiting."""
    rows: list[dict[str, Any]] = []
    comm = {"name": "attn0.R0", "axis": "tp", "group": "0"}
    for step in range(3):
        for rank, (came, waits) in enumerate([(1.0, 1.2), (1.3, 1.3)]):
            begin = 10.0 * step + (0.0 if agree else 1000.0 * rank)
            for kind, start, end, more in (
                ("compute", 0.0, came, {}), ("comm", came, 1.4, comm | {"lane": "tp", "meeting": step}),
                ("compute", came, waits, {}), ("wait", waits, 1.4, comm),
            ):  # fmt: skip
                at = {"step": step, "rank": rank, "kind": kind, "start": begin + start, "end": begin + end}
                rows.append(at | more)
    spans = spans_of(*rows)
    seen = recording_of(spans, Layout.of(dp=1, tp=2), seconds=seconds_of(spans), clocks_agree=agree)
    found = {one.what: one for one in shares(seen)}
    assert found["tp"].seconds == pytest.approx((0.2 + 0.1) / 2)
    assert found["tp"].late == pytest.approx(0.1 / 2), "0.1 s of rank 0, the rest of whose waiting was hidden"


def test_drift_says_how_much_of_the_change_its_largest_part_is() -> None:
    """Of 40 % more, computing is a quarter and what is beside recorded ops three."""
    seen = recording(Job(dp=2, pp=1, steps=40, jitter=0.0))
    step = float(pl.Series(list(seen.seconds.values())).median() or 0.0)  # type: ignore[arg-type]
    grows = 1 + 0.1 * (pl.col("step") >= 20) * (pl.col("kind") == "compute")
    computing = float(seen.rollup.filter(kind="compute", step=1, rank=0)["seconds"].sum())
    rollup = seen.rollup.with_columns(seconds=pl.col("seconds") * grows)
    seconds = {n: s + (0.4 * computing if n >= 20 else 0.0) for n, s in seen.seconds.items()}
    found = drift_of(replace(seen, rollup=rollup, seconds=seconds))
    assert found is not None and found.first == pytest.approx(step)
    assert (found.grew, found.of) == ("rest", pytest.approx(0.75, abs=0.01))
    assert found.by == pytest.approx(0.3 * computing, rel=0.01)


OVER = " (the mean rank's means over the middle half of each quarter by length)"


@pytest.mark.parametrize(
    ("drift", "said"),
    [
        (Drift(1.0, 1.75, "compute", 0.1, 0.3625),
         "Steps became 75% longer: 1.00 s in the first quarter, 1.75 s in the last"
         f"{OVER}; 35% of that is computing (100.0 ms to 362.5 ms), the largest part."),
        (Drift(1.0, 1.75, "compute", 0.1, 0.7), "80% of that is computing (100.0 ms to 700.0 ms)."),
        (Drift(1.0, 0.9, "data", 0.3, 0.1),
         f"10% shorter: 1.00 s in the first quarter, 900.0 ms in the last{OVER}; waiting "
         "for data (300.0 ms to 100.0 ms) changed by more than that, other parts the other way."),
        (Drift(1.0, 1.75), "1.75 s in the last (medians); the part that changed is unknown: "),
    ],
)  # fmt: skip
def test_drift_in_words(drift: Drift, said: str) -> None:
    report = explain(recording(Job(dp=2, pp=1, steps=3)), "run")
    assert said in replace(report, drift=drift).text()


def test_what_took_no_time_became_longer_by_no_share() -> None:
    assert (Drift(0.0, 1.0, "compute", 0.0, 1.0).share, Drift(1.0, 1.0, "compute", 0.0, 1.0).of) == (0.0, 0.0)


# ---- whatever is recorded ----

OPS = st.tuples(
    st.sampled_from(["compute", "wait", "idle", "data", "optimizer", "host"]), st.integers(0, 40)
)  # fmt: skip
COLLECTIVES = st.tuples(st.sampled_from(["tp", "dp"]), st.integers(-60, 90), st.integers(0, 60))
STEPS = st.tuples(st.lists(OPS, min_size=1, max_size=8), st.lists(COLLECTIVES, max_size=4), st.integers(0, 30))


@st.composite
def drawn(draw: st.DrawFn) -> Recording:
    """Two ranks of 24 steps of two kinds; a collective may have begun in the step before."""
    kinds = [draw(STEPS), draw(STEPS)]
    rows: list[dict[str, Any]] = []
    seconds: dict[int, float] = {}
    for step in range(25):
        ops, collectives, more = kinds[step > 12]
        for rank in (0, 1):
            at = {"step": step, "rank": rank}
            begin, clock = 1000.0 * step, 1000.0 * step
            rows.append(at | {"kind": "data", "name": "data", "start": clock, "end": clock})
            for number, (kind, taken) in enumerate(ops):
                axis = "tp" if kind == "wait" else "pp" if kind == "idle" else ""
                row = {
                    "kind": kind,
                    "name": "mlp0.F0",
                    "seq": number,
                    "axis": axis,
                    "start": clock,
                    "end": clock + taken,
                }
                rows += [at | row] if kind != "host" else []
                clock += taken
            for number, (axis, start, taken) in enumerate(collectives):
                end = min(begin + start + taken, clock)
                row = {"kind": "comm", "name": "mlp0.R0", "seq": number, "axis": axis, "start": min(begin + start, end)}
                rows.append(at | row | {"end": end, "lane": axis, "meeting": 100 * step + number})
            seconds[step] = clock - begin + more
    return recording_of(spans_of(*rows), Layout.of(dp=2), seconds=seconds)


@given(drawn())
@settings(max_examples=20, deadline=None)
def test_nothing_of_a_step_exceeds_it_and_its_parts_are_all_of_it(seen: Recording) -> None:
    found = mean_step(seen)
    steps = [seen.seconds[step] for step in steady_steps(seen)]
    assert found is not None
    assert found.seconds == pytest.approx(sum(steps) / len(steps), abs=1e-6)
    assert sum(one.seconds for one in found.parts) == pytest.approx(found.seconds, abs=1e-6)
    for one in found.parts:
        assert 0 <= (one.late or 0.0) <= one.seconds <= found.seconds + 1e-6
    summary = summarise(seen)
    parts = {one.what: one.seconds for one in found.parts}
    if summary.hidden.total:
        assert 0 <= summary.hidden.exposed <= summary.hidden.total <= found.seconds + 1e-6
        exposed = sum(parts.get(axis, 0.0) for axis in ("tp", "dp"))
        assert exposed == pytest.approx(summary.hidden.exposed, abs=1e-6), "the same in the timeline's answer"
        if len(summary.last) == len(summary.every):
            assert summary.hidden_of_all == pytest.approx(summary.hidden, abs=1e-6), "and in sums"


@given(drawn())
@settings(max_examples=20, deadline=None)
def test_no_part_changes_by_more_than_it_has(seen: Recording) -> None:
    found = drift_of(seen)
    ends = [mean_step(seen, steps) for steps in (range(1, 7), range(19, 25))]
    assert all(ends)
    if found:
        before, after = (one.seconds for one in ends if one)
        assert (found.first, found.last) == pytest.approx((before, after), abs=1e-6)
        assert abs(found.by) <= max(found.before, found.after) <= max(before, after) + 1e-6


# ---- steps and drift, in numbers ----


def lasting(seconds: dict[int, float]) -> Recording:
    """Steps of such lengths, half of each computing."""
    rows = [{"step": n, "end": one / 2} for n, one in seconds.items()]
    return recording_of(spans_of(*rows), Layout.of(dp=1), seconds=seconds)


def test_steps_without_a_runs_first() -> None:
    seen = lasting({0: 99.0, **{n: float(n) for n in range(1, 12)}})
    metrics: list[dict[str, Any]] = [
        {"seconds": 2.0, "tokens_per_second": 50.0}, {"seconds": 1.0, "tokens_per_second": 200.0},
        {"seconds": 4.0, "tokens_per_second": 30.0}, {"seconds": None, "tokens_per_second": 1e9}, {"seconds": 1.0},
    ]  # fmt: skip
    found = steps_of(seen, metrics)
    assert found == StepTimes(11, 1, 11, 6.0, 2.0, 10.0, 11.0, 11, 120 / 6.0), "120 tokens a step"
    assert (one := steps_of(lasting({0: 3.0}), [])) and (one.count, one.first, one.median) == (1, 0, 3.0)
    assert one.tokens_per_second is None
    assert steps_of(replace(seen, seconds={}), metrics) is None and drift_of(replace(seen, seconds={})) is None
    assert (still := steps_of(replace(seen, seconds={1: 0.0}), metrics)) and still.tokens_per_second is None


@pytest.mark.parametrize(
    ("steps", "grew", "told"),
    [(20, 1.04, True), (19, 1.04, False), (20, 1.02, False), (20, 1.03125, True), (20, 0.96, True)],
)
def test_by_how_much_steps_must_change(steps: int, grew: float, told: bool) -> None:
    """Of twenty and a run's first, a quarter is five. 3 % of a step is what is told."""
    quarter = steps // 4
    seen = lasting({0: 50.0, **{n: 8.0 * (grew if n > steps - quarter else 1.0) for n in range(1, steps + 1)}})
    found = drift_of(seen)
    assert (found is not None) == told
    if found:
        assert (found.first, found.last, found.share) == (8.0, 8.0 * grew, pytest.approx(grew - 1))
        assert (found.grew, found.of) == ("compute", pytest.approx(0.5))
        assert found.by == pytest.approx(4.0 * (grew - 1))


@pytest.mark.parametrize(("spread", "told"), [(0.8, True), (0.9, False)])
def test_steps_that_are_uneven_must_change_by_more(spread: float, told: bool) -> None:
    """Their median distance, in standard errors of a median of five: six times 1.4826 x 1.2533 /
    sqrt(5)."""
    uneven = [8.0 - spread, 8.0 + spread, 8.0, 8.0 - spread, 8.0 + spread]
    first = dict(enumerate(uneven, 1))
    seen = lasting({0: 50.0, **first, **dict.fromkeys(range(6, 16), 8.0), **dict.fromkeys(range(16, 21), 12.2)})
    assert 6 * 0.8 * 1.4826 * 1.2533 / 5**0.5 < 4.2 < 6 * 0.9 * 1.4826 * 1.2533 / 5**0.5
    assert (drift_of(seen) is not None) == told
    turned = lasting({0: 50.0, **dict.fromkeys(range(1, 16), 12.2), **{n + 15: one for n, one in first.items()}})
    assert (drift_of(turned) is not None) == told


def test_where_some_steps_have_sums_alone_these_tell_what_grew() -> None:
    """Of the first half only roll-ups are left; exposed communication grew."""
    rows: list[dict[str, Any]] = []
    for n in range(41):
        waits = 1.0 if n > 30 else 0.2
        rows += [
            {"step": n, "end": 1.0},
            {"step": n, "kind": "wait", "name": "mlp0.R0", "axis": "tp", "start": 1.0, "end": 1.0 + waits},
        ]  # fmt: skip
    seen = recording_of(spans_of(*rows), Layout.of(dp=1), seconds={n: 2.2 if n > 30 else 1.4 for n in range(41)})
    found = drift_of(seen)
    assert found is not None and found.grew == "tp"
    part = replace(seen, spans=seen.spans.filter(pl.col("step") > 20))
    assert drift_of(part) == found and found.by == pytest.approx(0.8) and found.of == pytest.approx(1.0)
    earlier = replace(part, rollup=part.rollup.filter(~pl.col("kind").is_in(["communication", "exposed", "host"])))
    assert drift_of(earlier) == pytest.approx(Drift(1.4, 2.2)), "waits alone are no communication"


def test_the_first_step_counts_only_where_there_is_no_other() -> None:
    """Whether spans of it are kept, or its sums alone; and what takes no time is no share."""
    seen = lasting({0: 50.0, 1: 8.0, 2: 10.0})
    for one in (seen, replace(seen, spans=seen.spans.clear())):
        assert {each.what: each.seconds for each in shares(one)} == pytest.approx({"compute": 4.5, "rest": 4.5})
    assert [each.seconds for each in shares(lasting({0: 50.0}))] == [25.0, 25.0]
    idle = spans_of({"step": 1, "end": 2.0}, {"step": 1, "kind": "data", "name": "data", "start": 2.0, "end": 2.0})
    assert [each.what for each in shares(recording_of(idle, Layout.of(dp=1), seconds={1: 2.0}))] == ["compute"]


def test_what_was_not_there_before_grew_from_nothing() -> None:
    rows: list[dict[str, Any]] = []
    for n in range(41):
        rows.append({"step": n, "end": 1.0})
        if n > 30:
            rows.append({"step": n, "kind": "data", "name": "data", "site": "data", "start": 1.0, "end": 1.5})
    lengths = {n: 1.5 if n > 30 else 1.0 for n in range(41)}
    found = drift_of(recording_of(spans_of(*rows), Layout.of(dp=1), seconds=lengths))
    assert found is not None and (found.grew, found.by, found.of) == ("data", pytest.approx(0.5), pytest.approx(1.0))
    turned = spans_of(*({**row, "step": 40 - int(str(row["step"]))} for row in rows))
    found = drift_of(recording_of(turned, Layout.of(dp=1), seconds={40 - n: one for n, one in lengths.items()}))
    assert found is not None and (found.grew, found.by) == ("data", pytest.approx(-0.5))


@pytest.mark.parametrize(("agree", "moving"), [(True, 1.0), (False, 1.5)])
def test_of_a_wait_for_another_stage_the_transfer_within_it_is_told_apart(agree: bool, moving: float) -> None:
    """The wait from 2.5 to 4, the transfer from 2 to 3.5; where clocks differ, it may lie within
    the wait."""
    usual = {"name": "x", "axis": "pp", "group": "0>1", "meeting": 7}
    rows = [
        {"rank": 0, "end": 2.0}, {"rank": 1, "end": 2.5},
        usual | {"rank": 0, "kind": "transfer", "lane": "pp", "start": 2.0, "end": 3.5},
        usual | {"rank": 1, "kind": "idle", "start": 2.5, "end": 4.0},
    ]  # fmt: skip
    seen = recording_of(spans_of(*rows), Layout.of(pp=2, dp=1), seconds={1: 4.0}, clocks_agree=agree)
    found = {one.what: one.seconds for one in shares(seen)}
    assert found["pp"] == pytest.approx(moving / 2) and found.get("bubble", 0.0) == pytest.approx((1.5 - moving) / 2)

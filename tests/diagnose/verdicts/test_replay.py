"""Replaying what was seen gives what was seen; with other durations, what simulating those
gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.diagnose.measured.recording import Recording
from plait.diagnose.verdicts import what_if as asking
from plait.diagnose.verdicts.replay import EventGraph, graph_of
from plait.diagnose.verdicts.what_if import what_if
from tests.diagnose.verdicts.test_stragglers import recording
from tests.support.recordings.made import At, Job


def graph(job: Recording) -> EventGraph:
    return graph_of(job.spans.with_columns(waits=pl.col("kind").is_in(["wait", "idle"])))


def lengths(job: Recording) -> list[float]:
    own = job.spans.group_by("step").agg(length=pl.max("end") - pl.min("start")).sort("step")
    return own["length"].to_list()


@given(
    seed=st.integers(0, 2**32), dp=st.integers(1, 3), pp=st.integers(1, 4), micro_batches=st.integers(1, 6),
    jitter=st.floats(0, 0.3), launch=st.floats(0, 0.05),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_what_was_seen(seed: int, dp: int, pp: int, micro_batches: int, jitter: float, launch: float) -> None:
    job = Job(
        dp=dp, pp=pp, micro_batches=micro_batches, steps=3, seed=seed, jitter=jitter, launch=lambda at: launch * at.dp
    )
    seen = recording(job)
    made = graph(seen)
    assert made.forced == 0
    assert made.replay(made.seconds + made.lead) == pytest.approx(lengths(seen), rel=1e-6)
    twice = made.replay(np.stack([made.seconds + made.lead, 2 * (made.seconds + made.lead)], axis=1))
    assert twice[:, 0] == pytest.approx(lengths(seen), rel=1e-6)
    assert (twice[:, 1] >= twice[:, 0]).all()


@given(st.integers(0, 3), st.integers(0, 2), st.floats(1.2, 3.0))
@settings(max_examples=6, deadline=None)
def test_a_rank_as_the_others(dp: int, stage: int, factor: float) -> None:
    def slow(at: At) -> float:
        return (0.1 if at.way == "forward" else 0.2) * (factor if (at.dp, at.stage) == (dp, stage) else 1.0)

    seen = recording(Job(dp=4, pp=3, compute=slow, jitter=0.0, steps=4))
    clean = recording(Job(dp=4, pp=3, jitter=0.0, steps=4))
    found = what_if(seen, [(stage * 4 + dp,)])
    assert found is not None
    assert found.costs[0] == pytest.approx(np.mean(lengths(seen)[1:]) - np.mean(lengths(clean)[1:]), rel=0.02)
    assert found.recorded == pytest.approx(found.replayed, rel=1e-6)
    assert found.worst[0][:2] == (stage, dp)


def test_dependencies_in_a_circle_are_cut() -> None:
    """Two collectives that two ranks saw in opposite orders: impossible, so somebody's clock is
    wrong."""
    ops = pl.DataFrame({
        "step": [0] * 4, "rank": [0, 0, 1, 1], "lane": ["processor"] * 4, "start": [0.0, 1.0, 0.0, 1.0],
        "end": [1.0, 2.0, 1.0, 2.0], "waits": [False] * 4, "meeting": [1, 2, 2, 1],
    })  # fmt: skip
    made = graph_of(ops)
    assert made.forced == 1
    assert np.isfinite(made.replay(made.seconds)).all()


def test_without_spans_there_is_nothing_to_replay() -> None:
    seen = recording(Job(dp=2, pp=1, steps=2))
    none = Recording(grid=seen.grid, rollup=seen.rollup, meetings=seen.meetings, spans=seen.spans.clear())
    assert what_if(none) is None


# ---- by hand ----


def ops(*rows: tuple[Any, ...], **more: Any) -> EventGraph:
    """A graph of (rank, lane, start, end[, meeting[, whether it waits]]), all of one step."""
    columns = {
        "rank": pl.Int64, "lane": pl.String, "start": pl.Float64, "end": pl.Float64, "meeting": pl.Int64,
        "waits": pl.Boolean,
    }  # fmt: skip
    whole = [(*row, *(None, False)[len(row) - 4 :]) for row in rows]
    table = pl.DataFrame(whole, schema=columns, orient="row")
    return graph_of(table.with_columns(step=pl.lit(7)), **more)


def of_ops(made: EventGraph, what: np.ndarray) -> list[float]:
    return [round(float(one), 6) for one in what[made.event]]


PROCESSOR = "processor"


def test_what_passes_between_ops_is_the_hosts() -> None:
    made = ops((0, PROCESSOR, 5.0, 6.0), (0, PROCESSOR, 6.5, 8.5),
               (1, PROCESSOR, 5.25, 6.25))  # fmt: skip
    assert made.steps.tolist() == [7]
    assert of_ops(made, made.seconds) == [1.0, 2.0, 1.0]
    assert of_ops(made, made.lead) == [0.0, 0.5, 0.0]
    assert of_ops(made, made.first) == [0.0, 0.0, 0.25], "since the first of the step began"
    assert made.replay(made.seconds).tolist() == [3.0]
    assert made.replay(made.seconds + made.lead).tolist() == [3.5]
    apart = ops((0, PROCESSOR, 5.0, 6.0), (1, PROCESSOR, 900.0, 903.0), clocks_agree=False)
    assert of_ops(apart, apart.first) == [0.0, 0.0] and apart.replay(apart.seconds).tolist() == [3.0]


def test_a_collective_begins_when_all_are_there_and_takes_what_it_takes_the_last() -> None:
    made = ops((0, PROCESSOR, 0.0, 1.0), (0, "dp", 1.25, 4.0, 3),
               (1, PROCESSOR, 0.0, 3.0), (1, "dp", 3.5, 4.0, 3))  # fmt: skip
    assert made.event[1] == made.event[3] and len(made.seconds) == 3
    assert of_ops(made, made.seconds) == [1.0, 0.5, 3.0, 0.5]
    assert of_ops(made, made.lead) == [0.0] * 4, "of an event of several ranks it stands at the edges"
    assert made.replay(made.seconds).tolist() == [4.0]
    assert made.replay(made.seconds, gaps=False).tolist() == [3.5]
    quick = made.seconds.copy()
    quick[made.event[2]] = 1.0
    assert made.replay(quick).tolist() == [2.0], "1 + 0.5 + 0.5 of rank 1; rank 0 is there at 1.25"


def test_a_wait_lasts_until_what_it_names_has_ended() -> None:
    made = ops((0, PROCESSOR, 0.0, 1.0), (0, PROCESSOR, 1.0, 3.25, 3, True),
               (1, PROCESSOR, 0.0, 2.0), (1, "pp", 2.0, 3.0, 3))  # fmt: skip
    assert of_ops(made, made.seconds) == [1.0, 0.25, 2.0, 1.0], "what passed after the end of the transfer"
    assert made.replay(made.seconds).tolist() == [3.25]
    slow = made.seconds.copy()
    slow[made.event[3]] = 4.0
    assert made.replay(slow).tolist() == [6.25]
    apart = ops((0, PROCESSOR, 0.0, 1.0), (0, PROCESSOR, 1.0, 3.25, 3, True),
                (1, PROCESSOR, 0.0, 2.0), (1, "pp", 2.0, 3.0, 3), clocks_agree=False)  # fmt: skip
    assert of_ops(apart, apart.seconds)[1] == 0.0


def test_a_wait_that_names_nothing_waits_for_what_its_rank_communicated_last() -> None:
    made = ops((0, "dp", 0.0, 1.0), (0, "tp", 0.0, 2.0), (0, "dp", 1.0, 5.0),
               (0, PROCESSOR, 0.0, 2.5, None, True), (1, "dp", 0.0, 2.25))  # fmt: skip
    assert of_ops(made, made.seconds)[3] == 0.5
    slow = made.seconds.copy()
    slow[made.event[1]], slow[made.event[2]] = 9.0, 1.0
    assert made.replay(slow).tolist() == [9.5]
    none = ops((0, PROCESSOR, 0.0, 1.0), (0, PROCESSOR, 1.0, 4.0, 99, True),
               (0, "dp", 0.0, 0.5, 5))  # fmt: skip
    assert of_ops(none, none.seconds)[1] == 3.0, "what it names is nowhere"
    silent = ops((0, PROCESSOR, 0.0, 1.0), (0, PROCESSOR, 1.0, 3.0, None, True))
    assert of_ops(silent, silent.seconds) == [1.0, 2.0], "there is no communication at all"
    early = ops((0, PROCESSOR, 0.0, 1.0, None, True), (0, "dp", 0.5, 2.0))
    assert of_ops(early, early.seconds)[0] == 1.0, "nothing had ended"


def test_an_op_needs_the_last_of_every_lane_before_it() -> None:
    """Also those that ended together with it, and not what ended after it began."""
    made = ops((0, PROCESSOR, 0.0, 1.0), (0, "dp", 0.0, 2.0),
               (0, "pp", 0.0, 2.5), (0, PROCESSOR, 2.0, 3.0))  # fmt: skip
    assert made.replay(made.seconds + made.lead).tolist() == [3.0]
    slow = made.seconds.copy()
    slow[made.event[1]] = 7.0
    assert made.replay(slow).tolist() == [8.0]
    slow[made.event[2]] = 20.0
    assert made.replay(slow).tolist() == [20.0], "which nothing needs"
    longer = ops((0, "dp", 0.0, 1.0), (0, "dp", 0.0, 2.0),
                 (0, PROCESSOR, 2.0, 9.0))  # fmt: skip
    slow = longer.seconds.copy()
    slow[longer.event[0]] = 8.0
    assert longer.replay(slow).tolist() == [9.0], "not what had ended long before"
    batch = ops(*[(0, "pp", 0.0, 1.0)] * 3, (0, PROCESSOR, 1.0, 2.0))
    for each in range(3):
        slow = batch.seconds.copy()
        slow[batch.event[each]] = 5.0
        assert batch.replay(slow).tolist() == [6.0], "a batch of sends and receives ends as one"


@pytest.mark.parametrize(("begins", "needed"), [(0.99996, True), (0.99, False)])
def test_times_that_are_rounded(begins: float, needed: bool) -> None:
    made = ops((0, PROCESSOR, 0.0, 1.0), (0, PROCESSOR, begins, 2.0), tolerance=1e-4)
    slow = made.seconds.copy()
    slow[made.event[0]] = 5.0
    assert (made.replay(slow)[0] > 5.5) == needed


# ---- what is asked ----


def plain(**more: Any) -> Recording:
    return recording(Job(dp=2, pp=2, micro_batches=2, jitter=0.0, steps=6, **more))


def test_which_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(since: int | None = None) -> int:
        found = what_if(plain(), since=since)
        return 0 if found is None else found.steps

    assert (steps(), steps(0), steps(1), steps(4), steps(5), steps(6)) == (5, 5, 5, 2, 1, 0), "the first is no other"
    one = plain().spans.filter(step=3).height
    for most, kept in ((2 * one, 2), (3 * one - 1, 2), (3 * one, 3), (1, 1)):
        monkeypatch.setattr(asking, "SPANS", most)
        assert steps() == kept, "the last ones, and one at least"


def test_without_computation_nothing_is_replayed() -> None:
    seen = plain()
    assert what_if(replace(seen, spans=seen.spans.filter(pl.col("kind") != "compute"))) is None


@pytest.mark.parametrize(("most", "told"), [(4, True), (3, False)])
def test_of_so_many_replicas_and_stages_workers_are_compared(
    monkeypatch: pytest.MonkeyPatch, most: int, told: bool
) -> None:
    monkeypatch.setattr(asking, "SCENARIOS", most)
    found = what_if(plain())
    assert found is not None
    assert (len(found.worst), found.few) == ((4, 1) if told else (0, 0))
    assert told or found.m_w is None


def test_a_slow_worker_in_numbers() -> None:
    """No transfers to speak of; of eight workers one takes twice as long, and its stage and replica
    wait."""

    def slow(at: At) -> float:
        return (0.1 if at.way == "forward" else 0.2) * (2.0 if (at.dp, at.stage) == (1, 1) else 1.0)

    seen = recording(Job(dp=4, pp=2, micro_batches=8, compute=slow, jitter=0.0, steps=4, transfer=lambda at: 0.0))
    found = what_if(seen, [(5,), (4,), (1, 5)])
    assert found is not None
    assert found.recorded == pytest.approx(np.mean(lengths(seen)[1:]))
    assert found.slowdown == found.replayed / found.ideal > 1.3
    assert found.worst[0][:2] == (1, 1) and len(found.worst) == 8 and found.few == 1
    assert [one.slowdown for one in found.worst] == sorted((one.slowdown for one in found.worst), reverse=True)
    assert found.worst[-1].slowdown < 1.05 < found.worst[0].slowdown
    assert found.m_w == pytest.approx(1.0, abs=0.1) and found.m_s == pytest.approx(1.0, abs=0.1), "it is the last stage"
    assert found.costs[0] == pytest.approx(found.costs[2]) and found.costs[1] == pytest.approx(0, abs=1e-9)
    clean = recording(Job(dp=4, pp=2, micro_batches=8, jitter=0.0, steps=4, transfer=lambda at: 0.0))
    assert found.costs[0] == pytest.approx(found.recorded - np.mean(lengths(clean)[1:]), rel=1e-6)


def test_one_worker_and_one_stage_are_not_compared() -> None:
    alone = what_if(recording(Job(dp=1, pp=1, micro_batches=4, steps=4, jitter=0.2)))
    assert alone is not None and (alone.m_w, alone.m_s) == (None, None)
    stage = what_if(recording(Job(dp=3, pp=1, micro_batches=4, steps=4, jitter=0.2)))
    assert stage is not None and stage.m_s is None and stage.m_w is not None


def test_where_clocks_differ_the_lengths_of_steps_are_those_that_were_told() -> None:
    seen = plain()
    told = replace(seen, clocks_agree=False, seconds=dict.fromkeys(range(6), 42.0))
    found = what_if(told)
    assert found is not None and found.recorded == 42.0
    agree = what_if(replace(told, clocks_agree=True))
    assert agree is not None and agree.recorded == pytest.approx(np.mean(lengths(seen)[1:]))


def test_of_workers_that_slow_as_much_the_one_with_more_work_comes_first() -> None:
    """The first stage has little to do and slows nobody; in the second replica a little more."""

    def light(at: At) -> float:
        return (0.01 if at.stage == 0 else 0.1) * (1.2 if (at.dp, at.stage) == (1, 0) else 1.0)

    found = what_if(recording(Job(dp=2, pp=2, micro_batches=4, compute=light, jitter=0.0, steps=4)))
    assert found is not None
    assert found.worst[2].slowdown == found.worst[3].slowdown < found.worst[1].slowdown
    assert [one[:2] for one in found.worst[2:]] == [(0, 1), (0, 0)]

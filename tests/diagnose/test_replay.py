"""Replaying what was seen gives what was seen; with other durations, what simulating those gives."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.diagnose.recording import Recording
from plait.diagnose.replay import Graph, graph_of
from plait.diagnose.what_if import what_if
from tests.diagnose.test_stragglers import recording
from tests.support.recordings.made import At, Job


def graph(job: Recording) -> Graph:
    return graph_of(job.spans.with_columns(waits=pl.col("kind").is_in(["wait", "idle"])))


def lengths(job: Recording) -> list[float]:
    own = job.spans.group_by("step").agg(length=pl.col("end").max() - pl.col("start").min()).sort("step")
    return own["length"].to_list()


@given(
    seed=st.integers(0, 2**32), dp=st.integers(1, 3), pp=st.integers(1, 4), micro_batches=st.integers(1, 6),
    jitter=st.floats(0, 0.3), launch=st.floats(0, 0.05),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
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
@settings(max_examples=10, deadline=None)
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
    """Two collectives that two ranks saw in opposite orders: impossible, so somebody's clock is wrong."""
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

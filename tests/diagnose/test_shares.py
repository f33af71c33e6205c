"""Where steps go: the shares add up, and what changed is found."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.diagnose.recording import ROLLUP, seconds_of
from plait.diagnose.shares import drift_of, shares
from tests.diagnose.made import TRANSFER, At, Job
from tests.diagnose.test_stragglers import recording


@given(seed=st.integers(0, 2**32), dp=st.integers(1, 3), pp=st.integers(1, 3), launch=st.floats(0, 0.05))
@settings(max_examples=10, deadline=None)
def test_they_add_up(seed: int, dp: int, pp: int, launch: float) -> None:
    seen = recording(Job(dp=dp, pp=pp, seed=seed, micro_batches=4, steps=4, launch=lambda at: launch))
    found = {one.what: one.seconds for one in shares(seen)}
    steps = [seconds for step, seconds in seen.seconds.items() if step > 0]
    assert sum(found.values()) == pytest.approx(sum(steps) / len(steps), rel=1e-6)
    assert found["compute"] == pytest.approx(4 * 0.3, rel=0.05)
    if pp > 1:
        assert found["bubble"] > 0
    if launch:
        assert found.get("host", 0.0) <= 8 * launch * 1.01 + 1e-9


def test_transfers_that_a_stage_waits_for_are_no_bubble() -> None:
    quick, slow = (
        {one.what: one.seconds for one in shares(recording(Job(dp=1, pp=2, transfer=lambda at, t=t: t)))}
        for t in (TRANSFER, 0.05)
    )
    assert slow["pp"] > 10 * quick["pp"]


def test_evaluations_and_checkpoints_come_after_a_step() -> None:
    """The lengths of steps are without them."""
    plain = recording(Job(dp=2, pp=1, steps=4))
    found = {one.what: one.seconds for one in shares(replace(plain, seconds=dict.fromkeys(range(4), 5.0)))}
    rows = plain.rollup.filter(kind="compute").unique(["step", "rank"])
    after = [rows.with_columns(kind=pl.lit(kind), seconds=0.3).cast(ROLLUP) for kind in ("evaluation", "checkpoint")]  # type: ignore[arg-type]
    seen = replace(plain, rollup=pl.concat([plain.rollup, *after]), seconds=dict.fromkeys(range(4), 5.0))
    more = {one.what: one.seconds for one in shares(seen)}
    assert more["rest"] == pytest.approx(found["rest"])
    assert (more["evaluation"], more["checkpoint"]) == (pytest.approx(0.3), pytest.approx(0.3))
    assert sum(more.values()) == pytest.approx(5.6)


def test_spans_after_a_step_do_not_count_in_its_length() -> None:
    spans = recording(Job(dp=1, pp=1, steps=1)).spans
    end = float(spans["end"].max())  # type: ignore[arg-type]
    later = spans[:1].with_columns(kind=pl.lit("evaluation"), start=end, end=end + 9)
    assert seconds_of(pl.concat([spans, later])) == seconds_of(spans)


def test_drift() -> None:
    def grows(at: At) -> float:
        return (0.1 if at.way == "forward" else 0.2) * (1 + at.step / 100)

    found = drift_of(recording(Job(dp=2, pp=1, compute=grows, steps=40)))
    assert found is not None
    assert found.grew == "compute"
    assert found.share == pytest.approx(0.3, abs=0.05)
    assert drift_of(recording(Job(dp=2, pp=1, steps=40))) is None
    assert drift_of(recording(Job(dp=2, pp=1, steps=10))) is None
    assert drift_of(replace(recording(Job(dp=2, pp=1, steps=3)), seconds={})) is None

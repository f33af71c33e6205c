"""Timing before training never costs more than it may, and is left out where it cannot pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.job.refine import (
    COMPILE_SAVING,
    COMPILE_SECONDS,
    ROUNDS,
    TIMING_SHARE,
    WARM_UP,
    timing_budget,
    worth_compiling,
)

SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, SECONDS, st.integers(0, 10**7), st.integers(0, 40), st.just(0.0) | SECONDS)
def test_it_costs_at_most_its_share_of_what_it_can_save(
    step: float, exposed: float, steps: int, candidates: int, beside: float
) -> None:
    found = timing_budget(step, exposed, steps, candidates, overhead=beside)
    assert found.candidates <= candidates
    assert found.candidates != 1  # has nothing to be compared with
    assert (found.candidates == 0) == (found.rounds == 0)
    if found.candidates:
        spent = found.candidates * (beside + (found.rounds + WARM_UP) * step)
        assert spent <= TIMING_SHARE * min(exposed, step) * steps * (1 + 1e-9)
        assert 1 <= found.rounds <= ROUNDS
        assert found.candidates == candidates or found.rounds == 1  # rounds are given up first


@given(SECONDS, SECONDS, st.integers(0, 10**6), st.integers(0, 40), st.just(0.0) | SECONDS)
def test_a_longer_run_times_no_less(step: float, exposed: float, steps: int, candidates: int, beside: float) -> None:
    less, more = (timing_budget(step, exposed, each, candidates, overhead=beside) for each in (steps, 2 * steps))
    assert (more.candidates, more.rounds) >= (less.candidates, less.rounds)


@pytest.mark.parametrize(
    ("exposed", "steps", "expected"),
    [
        (0.0, 10**6, (0, 0)),  # nothing to hide
        (0.05, 3, (0, 0)),  # over before it pays
        (0.05, 20, (2, 1)),
        (0.05, 100, (8, 2)),
        (0.05, 10**6, (8, ROUNDS)),
    ],
)
def test_what_a_run_can_pay_for(exposed: float, steps: int, expected: tuple[int, int]) -> None:
    found = timing_budget(0.1, exposed, steps, 8)
    assert (found.candidates, found.rounds) == expected
    assert ("nothing is timed" in str(found)) == (expected == (0, 0))


def test_orders_that_take_long_to_find_are_timed_only_where_they_pay() -> None:
    assert timing_budget(0.01, 0.005, 400, 16).candidates == 16
    assert timing_budget(0.01, 0.005, 400, 16, overhead=0.3).candidates == 3
    assert timing_budget(0.01, 0.005, 4000, 16, overhead=0.3).candidates == 16


@given(SECONDS, st.integers(0, 10**7))
def test_compiling_is_tried_where_it_can_pay(step: float, steps: int) -> None:
    assert (worth_compiling(step, steps) == "") == (TIMING_SHARE * COMPILE_SAVING * step * steps >= COMPILE_SECONDS)


def test_what_is_assumed_of_timing_and_compiling() -> None:
    """What people are told, worked out by hand: 0.25 x 0.1 s x 400 steps; (3 + 1) x 8 x 0.1 s."""
    assert worth_compiling(0.1, 400) == "not tried: it can save at most 10 s of this run, and takes some 40 s itself"
    assert worth_compiling(0.8, 400) == ""
    assert worth_compiling(0.799, 400)
    assert worth_compiling(9.0, -1).startswith("not tried: it can save at most 0 s")
    assert str(timing_budget(0.1, 0.03, 10, 8)) == (
        "nothing is timed before training: hiding communication can save at most 0.3 s of this run, "
        "timing 8 candidates takes 3.2 s"
    )
    assert str(timing_budget(0.1, 0.03, 40, 8)).startswith("timing 2 of 8 candidates, rounds: 1;")
    assert timing_budget(0.1, 0.9, 64, 8).rounds == ROUNDS  # half of 64 x 0.1 s
    assert timing_budget(0.1, 0.9, 63, 8).rounds == ROUNDS - 1
    assert timing_budget(0.1, 0.9, -5, 8).saves == 0

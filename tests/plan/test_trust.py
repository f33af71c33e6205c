"""Drawn jobs, six in the suite, sixty with its contract, each asked three times: a condition never
makes the best better, nor hardware twice as good worse. ``benchmarks/planner_trust.py`` asks more
of more jobs."""

from __future__ import annotations

import pytest

from benchmarks.planner_trust import tried

TIER = "system"
CLOSE = 1.01
"""The simulation is asked about the best that the closed form finds, which errs by that much."""


LIGHT = (0, 20, 30, 40)
"""The drawn jobs of the suite; all take a third of its seconds, jobs 10 and 50 six minutes."""


@pytest.mark.parametrize(
    "number", [pytest.param(one, marks=[pytest.mark.contract] if one not in LIGHT else []) for one in range(60)]
)
def test_the_best_of_a_drawn_job_is_the_best(number: int) -> None:
    told = tried(number, few=True)
    ratios = {**told.get("conditions", {}), **told.get("better", {})}
    assert "refused" in told or len(ratios) == 2
    assert {name: ratio for name, ratio in ratios.items() if ratio is not None and ratio > CLOSE} == {}

"""The optimum of orders that no bound proves, on jobs small enough to be ordered by hand."""

from __future__ import annotations

import pytest

from plait.core.base.errors import InfeasiblePlan
from plait.plan.reshard_order import Job, bound, ends, list_order
from plait.plan.reshard_searches import exact
from tests.plan.test_reshard_order import A, B, C, D, job

TWICE = [job((B, D, 3)), job((B, D, 3)), job((A, C | D, 1)), job((B, C, 2))]
"""B sends for 8, and A has to find 1 in which neither C nor D receives: 9."""


@pytest.mark.parametrize(
    ("jobs", "least"),
    [
        (TWICE, 9),
        ([job((B, C | D, 3)), job((A, B | D, 1)), job((A, C, 2)), job((B, C | D, 3))], 9),
        ([job((B, A | D, 3)), job((B, A | D, 3)), job((B, C, 1)), job((A, C | D, 1))], 8),
        ([*TWICE[:2], job((A, C | D, 1), (A, C | D, 1)), TWICE[3]], 9),  # two ways that are alike
    ],
)
def test_an_order_is_best_where_the_bound_is_below_it(jobs: list[Job], least: int) -> None:
    assert bound(jobs) == least - 1, "else nothing is asked of the solver"
    found = exact(jobs)
    assert (found.optimal, found.lower, ends(jobs, found.slots)) == (True, least, least)
    assert sorted(slot.job for slot in found.slots) == list(range(len(jobs)))
    assert list(found.slots) == sorted(found.slots, key=lambda slot: (slot.start, slot.job))
    busy: dict[int, int] = {}
    for slot in found.slots:
        _, uses, duration = jobs[slot.job][slot.choice]
        for bit in range(8):
            if uses >> bit & 1:
                assert busy.get(bit, 0) <= slot.start, "one at a time"
                busy[bit] = slot.start + duration
    starts = {slot.job: slot.start for slot in found.slots}
    for one in range(len(jobs)):
        for other in range(one + 1, len(jobs)):
            if jobs[one] == jobs[other]:
                assert starts[one] < starts[other], "equal jobs in their own order"


def test_an_order_that_ends_at_the_bound_is_the_answer() -> None:
    jobs = TWICE[:2]
    assert exact(jobs, work=0.0) == (list_order(jobs), 6, True)


def test_a_limit_of_work_that_finds_nothing_is_said() -> None:
    with pytest.raises(InfeasiblePlan, match=r"no order in its limit of work \(0\.0\): UNKNOWN\. Raise the limit"):
        exact(TWICE, work=0.0)

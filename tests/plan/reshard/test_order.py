"""Searches for senders and order, on jobs small enough to be ordered by hand."""

from __future__ import annotations

import pytest

from benchmarks.baselines.reshard_searches import dfs, greedy, load_balance, naive
from plait.plan.reshard.order import Choice, Job, Slot, bound, ends, in_order, list_order

A, B, C, D = (1 << 2 * nic for nic in range(4))
"""NICs as senders; a NIC receives as its next bit."""


def job(*choices: tuple[int, int, int]) -> Job:
    """(sender, receivers, duration) of each way."""
    return tuple(Choice(sender, sender | receivers << 1, duration) for sender, receivers, duration in choices)


def starts(slots: tuple[Slot, ...]) -> list[int]:
    return [slot.start for slot in sorted(slots)]


def test_a_job_starts_when_all_that_it_uses_is_free() -> None:
    jobs = [job((A, C, 3)), job((B, D, 5)), job((A, D, 2)), job((B, A, 1))]
    slots = in_order(jobs, [(0, 0), (1, 0), (2, 0), (3, 0)])
    assert starts(slots) == [0, 0, 5, 5]
    assert ends(jobs, slots) == 7
    assert ends(jobs, ()) == 0
    assert starts(in_order([job((0, 0, 3))], [(0, 0)])) == [0]


def test_naively_the_first_holder_sends() -> None:
    jobs = [job((A, C, 3), (B, C, 1)), job((A, D, 3), (B, D, 1))]
    assert naive(jobs) == (Slot(0, 0, 0), Slot(1, 0, 3))


def test_the_holder_that_has_least_to_do_sends() -> None:
    jobs = [job((A, C, 3), (B, C, 3)), job((A, D, 3), (B, D, 3)), job((A, C, 2), (B, C, 1)), job((A, D, 9))]
    assert [slot.choice for slot in load_balance(jobs)] == [0, 1, 1, 0]  # of equal load the shorter, else the first
    assert [slot.choice for slot in load_balance([job((A | B, C, 3)), job((A, D, 3), (C, D, 3))])] == [0, 1]


@pytest.mark.parametrize(
    ("jobs", "least"),
    [
        ([], 0),
        ([job((A, C, 3)), job((A, D, 4))], 7),  # one sends both
        ([job((A, C, 3)), job((B, C, 4))], 7),  # one receives both
        ([job((A, C, 3)), job((B, D, 4))], 4),
        ([job((A, C, 3), (B, C, 3)), job((A, D, 3), (B, D, 3)), job((A, C, 1), (B, D, 1))], 4),  # 7 over two, as whole
        ([job((A, C, 5), (B, C, 2)), job((A, D, 5), (B, D, 2))], 2),
        ([job((A | B, C, 4)), job((A, D, 3), (B, D, 3))], 6),  # 8 + 3 of two senders
        ([job((A, C, 3), (0, 0, 9))], 3),  # one way sends nothing
    ],
)
def test_no_order_beats_the_bound(jobs: list[Job], least: int) -> None:
    assert bound(jobs) == least
    for search in (naive, load_balance, greedy, list_order, lambda each: dfs(each)[0]):
        slots = search(jobs)
        assert sorted(slot.job for slot in slots) == list(range(len(jobs)))
        assert ends(jobs, slots) >= least


CHAIN = [job((A, C, 3)), job((B, C, 2)), job((B, D, 4))]
"""In this order 9: while C receives the first, B waits. The last first: 6."""


def test_sets_that_touch_nothing_twice_start_together() -> None:
    slots = greedy(CHAIN)
    assert ends(CHAIN, slots) == 6
    assert {slot.job for slot in slots if slot.start == 0} == {0, 2}


def test_what_has_most_left_to_do_goes_first() -> None:
    assert ends(CHAIN, list_order(CHAIN, restarts=0)) == 6
    assert list_order([]) == ()


def test_what_has_been_started_is_not_left_to_do() -> None:
    """Else B, which has most to do at the beginning, would be served first to the end, and C would
    wait."""
    jobs = [job((B, A, 3)), job((C, B, 2)), job((C, A, 1)), job((C, D, 2)), job((B, C, 4))]
    assert ends(jobs, list_order(jobs, restarts=0)) == bound(jobs) == 7


def test_jobs_of_the_same_nics_are_kept_together_where_that_is_better() -> None:
    """Merged they are one long job that is begun early; one by one they fill gaps."""
    jobs = [job((A, C, 1)), job((A, C, 2)), job((B, D, 3)), job((A, D, 1)), job((B, C, 1))]
    slots = list_order(jobs)
    assert ends(jobs, slots) == bound(jobs) == 4
    busy: dict[int, int] = {}
    for slot in sorted(slots, key=lambda each: each.start):
        uses, duration = jobs[slot.job][0].uses, jobs[slot.job][0].duration
        for bit in (1 << at for at in range(8)):
            if uses & bit:
                assert busy.get(bit, 0) <= slot.start
                busy[bit] = slot.start + duration
    same = [job((A, C, duration)) for duration in (5, 1, 3)]
    assert sorted((slot.start, slot.job) for slot in list_order(same, restarts=0)) in (
        [(0, 0), (5, 1), (6, 2)], [(0, 0), (5, 2), (8, 1)],
    )  # fmt: skip

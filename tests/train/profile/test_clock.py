"""Samples: how many, of what, and what they say."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.train.comm.tree import largest
from plait.train.machine.device import RankDevice
from plait.train.tune.timing import FEWEST, LONG_ENOUGH, MOST, Clock, MedianSeconds
from tests.support.threads import threads

CPU = RankDevice(torch.device("cpu"))


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=20))
def test_a_median_and_its_spread(samples: list[float]) -> None:
    timed = MedianSeconds.of(samples)
    assert min(samples) <= timed.seconds <= max(samples)
    assert timed.spread >= 0
    assert MedianSeconds.of([7 * each for each in samples]).spread == pytest.approx(timed.spread)


def test_a_disturbed_sample_does_not_count() -> None:
    assert MedianSeconds.of([1.0] * 9 + [50.0]) == (1.0, 0.0)


class Hours:
    """A clock that runs by its own."""

    now = others = 0.0

    def thread_time(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now + self.others

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    found = Hours()
    monkeypatch.setattr("plait.train.tune.timing.time", found)
    return found


@pytest.mark.parametrize(("budget", "samples"), [(0.0, FEWEST), (10.5, 10), (1e9, MOST)])
def test_as_many_samples_as_the_budget_allows(hours: Hours, budget: float, samples: int) -> None:
    runs: list[int] = []
    timed = Clock(CPU, 1e3).sample(lambda: runs.append(0) or hours.spend(1.0), budget, together=True)
    assert len(runs) == samples + (1 if budget == 0 else 2)
    assert timed == (1.0, 0.0)


def test_what_is_short_runs_several_times_a_sample(hours: Hours) -> None:
    runs: list[int] = []
    timed = Clock(CPU, 1e3).sample(lambda: runs.append(0) or hours.spend(LONG_ENOUGH / 8), 0.0, together=False)
    assert len(runs) == 2 + FEWEST * 8
    assert timed.seconds == pytest.approx(LONG_ENOUGH / 8)


def test_the_first_run_is_none_of_the_samples(hours: Hours) -> None:
    times = iter([50.0] + [1.0] * 20)
    assert Clock(CPU, 1e3).sample(lambda: hours.spend(next(times)), 1e3, together=True) == (1.0, 0.0)


@pytest.mark.parametrize("crowd", [1.0, 3.0])
def test_where_ranks_share_cores_computation_takes_processor_seconds(crowd: float) -> None:
    """As many times as many as ranks share a core; by the wall's clock, samples are shorter than a
    time slice and have the core for themselves. Waiting takes none."""
    clock = Clock(CPU, time.monotonic() + 10, crowd)
    found = clock.sample(lambda: time.sleep(0.02), 0.0, together=False).seconds
    assert found >= 0.02 if crowd == 1 else found < 0.01
    assert clock.sample(lambda: time.sleep(0.02), 0.0, together=True).seconds >= 0.02
    with clock.work() as worked:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
    assert worked == ([] if crowd == 1 else [pytest.approx(0.02 * crowd, rel=0.2)])


@pytest.mark.parametrize("times", [1, 8])
def test_what_other_threads_take_counts_for_each_run(hours: Hours, times: int) -> None:
    runs: list[int] = []

    def run() -> None:
        runs.append(0)
        hours.spend(1.0)
        hours.others += 3.0

    hours.others, hours.now = 50.0, 7.0  # before
    assert Clock(CPU, 1e3).carried(run, times) == pytest.approx(3.0)
    assert len(runs) == times


def test_a_part_keeps_the_crowd() -> None:
    assert Clock(CPU, time.monotonic() + 10, 2.0).part(0.5).crowd == 2.0


def test_a_part_of_what_is_left(hours: Hours) -> None:
    hours.spend(2.0)
    assert Clock(CPU, 12.0).part(0.5).left() == 5
    assert Clock(CPU, 1.0).left() == 0


@pytest.mark.parametrize(("threads", "crowd", "seconds"), [(1, 3.0, 6.0), (4, 3.0, 7.5), (1, 1.0, None)])
def test_work_is_the_threads_share_of_a_core_that_others_compute_on(
    hours: Hours, monkeypatch: pytest.MonkeyPatch, threads: int, crowd: float, seconds: float | None
) -> None:
    """Of one thread its own processor time, of several that of all, each a part of it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with Clock(CPU, 1e3, crowd).work() as worked:
        hours.spend(2.0)
        hours.others += 8.0
    assert worked == ([] if seconds is None else [seconds])


def test_samples_that_compute_are_timed_by_what_they_work(hours: Hours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def run() -> None:
        hours.spend(1.0)

    clock = Clock(CPU, 1e3, 2.0)
    assert clock.sample(run, 0.0, together=False).seconds == 2.0
    assert clock.sample(run, 0.0, together=True).seconds == 1.0


@pytest.mark.parametrize(
    ("first", "budget", "runs"),
    [
        (3.0, 10.0, 1 + FEWEST),  # a run of more than a quarter of the budget is warm enough
        (2.4, 10.0, 2 + 4),
        (LONG_ENOUGH / 2, 0.0, 2 + 2 * FEWEST),
    ],
)
def test_a_short_first_run_is_done_once_more(hours: Hours, first: float, budget: float, runs: int) -> None:
    done: list[int] = []
    Clock(CPU, 1e3).sample(lambda: done.append(0) or hours.spend(first), budget, together=True)
    assert len(done) == runs


def test_what_runs_several_times_a_sample_fits_the_budget_as_well(hours: Hours) -> None:
    done: list[int] = []
    run = LONG_ENOUGH / 4
    Clock(CPU, 1e3).sample(lambda: done.append(0) or hours.spend(run), 8.5 * LONG_ENOUGH, together=True)
    assert len(done) == 2 + 4 * 8


def test_the_device_has_done_its_work_when_a_sample_ends(hours: Hours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankDevice, "synchronize", lambda self: hours.spend(5.0))
    assert Clock(CPU, 1e3).once(lambda: hours.spend(1.0)) == 6.0


def test_a_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert MedianSeconds.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(3.0 / 2 / 3.0))
    assert MedianSeconds.of([2.0, 4.0]).spread > 0
    assert MedianSeconds.of([2.0]) == (2.0, 0.0)


def test_ranks_begin_together_and_the_slowest_counts() -> None:
    """Of samples that communicate the slowest of each, of others the slowest rank's median."""

    def measure(rank: int) -> tuple[list[float], MedianSeconds, MedianSeconds]:
        clock, times = Clock(CPU, time.monotonic() + 60), iter(range(100))

        def run() -> None:
            time.sleep(0.004 if (next(times) + rank) % 2 else 0.001)

        together, apart = (clock.sample(run, 0.0, together=one) for one in (True, False))
        return largest([float(rank), -float(rank)]), together, apart

    found = threads(2).run(measure)
    assert [one[0] for one in found] == [[1.0, 0.0]] * 2
    assert found[0][1] == found[1][1] and found[0][2] == found[1][2]
    assert found[0][1].seconds >= 0.004

"""Samples: how many, of what, and what they say."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.train.machine.device import Device
from plait.train.profile.clock import FEWEST, LONG_ENOUGH, MOST, Clock, Timed

CPU = Device(torch.device("cpu"))


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=20))
def test_a_median_and_its_spread(samples: list[float]) -> None:
    timed = Timed.of(samples)
    assert min(samples) <= timed.seconds <= max(samples)
    assert timed.spread >= 0
    assert Timed.of([7 * each for each in samples]).spread == pytest.approx(timed.spread)


def test_a_disturbed_sample_does_not_count() -> None:
    assert Timed.of([1.0] * 9 + [50.0]) == (1.0, 0.0)


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
    monkeypatch.setattr("plait.train.profile.clock.time", found)
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
    """As many times as many as ranks share a core; by the wall's clock, samples are shorter than a time slice
    and have the core for themselves. Waiting takes none."""
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

    hours.others = 50.0  # before
    assert Clock(CPU, 1e3).carried(run, times) == pytest.approx(3.0)
    assert len(runs) == times


def test_a_part_keeps_the_crowd() -> None:
    assert Clock(CPU, time.monotonic() + 10, 2.0).part(0.5).crowd == 2.0


def test_a_part_of_what_is_left(hours: Hours) -> None:
    hours.spend(2.0)
    assert Clock(CPU, 12.0).part(0.5).left() == 5
    assert Clock(CPU, 1.0).left() == 0

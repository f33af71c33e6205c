"""Baselines, each on a case that can be done by hand."""

from __future__ import annotations

from benchmarks.baselines.bipartition import topology_aware
from benchmarks.baselines.fits import best_fit, gpu_packing, random_fit
from plait.core.job.communication import Volume
from plait.place.solve.problem import Problem, spread_of


def test_best_fit_fills_the_minipod_with_least_left() -> None:
    problem = Problem.plain(3, 2, [5, 2, 3])
    assert best_fit(problem).cells == (1, 2, 2, 1, 2, 0)
    assert best_fit(problem, by_column=True).cells == (1, 1, 2, 2, 2, 0)


def test_gpu_packing_takes_the_tightest_that_holds_the_rest() -> None:
    assert gpu_packing(Problem.plain(3, 2, [9, 6, 7])).cells == (1,) * 6
    assert gpu_packing(Problem.plain(3, 2, [5, 2, 4])).cells == (0, 0, 0, 0, 0, 1)


def test_random_fit_is_balanced_and_repeats() -> None:
    problem = Problem.plain(50, 4, [200, 200, 200, 200])
    counts = [random_fit(problem).cells.count(pod) for pod in range(4)]
    assert sum(counts) == 200
    assert all(30 < count < 70 for count in counts)
    assert random_fit(problem) == random_fit(problem)
    assert random_fit(problem) != random_fit(problem, seed=1)


def test_bipartition_cuts_where_little_is_sent() -> None:
    """Two minipods that hold half of a 4 x 4 matrix each: whichever axis sends more is kept
    whole."""
    heavy = Volume(dp=100.0, pp=1.0), Volume(dp=1.0, pp=100.0)
    spreads = [
        spread_of(problem, topology_aware(problem).cells)
        for problem in (Problem.plain(4, 4, [8, 8], volumes=(volume,) * 4) for volume in heavy)
    ]
    assert (spreads[0].columns, spreads[0].rows) == (1, 2)
    assert (spreads[1].columns, spreads[1].rows) == (2, 1)


def test_bipartition_on_the_fewest_minipods() -> None:
    problem = Problem.plain(4, 2, [5, 5, 5, 5])
    assert spread_of(problem, topology_aware(problem, fewest=True).cells).used == 2

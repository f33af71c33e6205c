"""Estimates that a few wild values do not spoil, against their definitions; and who stands out of
drawn steps, in numbers: chances of a false alarm hold for these, so whoever changes one looks at
them anew."""

from __future__ import annotations

from dataclasses import astuple
from statistics import stdev

import numpy as np
import pytest

from plait.diagnose.verdicts.outliers import (
    PRIOR_FREEDOM,
    PeerMeans,
    healthy_spread,
    mean_step,
    outliers,
)

APART = np.arange(4)


def means(values: list[float], error: float = 0.1) -> PeerMeans:
    return PeerMeans(np.array(values), np.full(len(values), error), np.full(len(values), 5.0))


def test_steps_that_take_turns_count_as_independent() -> None:
    values = np.array([[1.0, -1.0] * 5])
    found = mean_step(values, 5, np.zeros(1, np.int64))
    assert found.error[0] == pytest.approx(stdev([1.0, -1.0] * 5) * (9 / 30) ** 0.5 / (1 - 2 / 45) ** 1.5)


def test_a_unit_of_too_few_steps_is_not_known() -> None:
    values = np.full((3, 6), np.nan)
    values[0, :5], values[1, :4], values[2] = [1.0, 2.0, 3.0, 4.0, 5.0], 1.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = mean_step(values, 5, APART[:3])
    assert np.isfinite(found.mean).tolist() == [True, False, True]
    assert (found.mean[0], found.mean[2]) == (3.0, 3.5), "one of five or six is left out at either end"
    nothing = mean_step(values[:, :3], 5, APART[:3])
    assert not np.isfinite(nothing.mean).any() and not np.isfinite(nothing.error).any()


def test_steps_that_are_all_equal_have_no_error() -> None:
    found = mean_step(np.ones((2, 8)), 5, APART[:2])
    assert found.mean.tolist() == [1.0, 1.0] and found.error.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("values", "centre"), [([1.0, 2.0, 3.0], 0.0), ([1.0, 2.0, 3.0, 9.0], 2.5)])
def test_of_few_units_nobody_knows_the_middle(values: list[float], centre: float) -> None:
    assert healthy_spread(means(values), 1.0, np.arange(len(values)), lower=False).centre == centre


def test_units_of_which_nothing_is_known() -> None:
    found = healthy_spread(means([np.nan, np.nan]), 1.0, np.arange(2), lower=False)
    assert (found.centre, found.freedom, found.sigma.tolist()) == (0.0, PRIOR_FREEDOM, [1.0, 1.0])
    one = healthy_spread(means([np.nan, 2.0]), 1.0, np.arange(2), lower=False)
    assert (one.freedom, one.sigma.tolist()) == (PRIOR_FREEDOM, [1.0, 1.0])


# ---- who stands out, in numbers ----


def drawn(seed: int, peers: int, steps: int, jitter: float, bias: float, *, alike: float = 0.0, lost: float = 0.0,
          slow: dict[int, tuple[int, float]]) -> np.ndarray:  # fmt: skip
    """Work of units. slow: from which step on, and how many times as long."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((peers, steps))
    for step in range(1, steps):
        noise[:, step] = alike * noise[:, step - 1] + (1 - alike**2) ** 0.5 * noise[:, step]
    work = (1 + bias * rng.standard_normal((peers, 1))) * np.maximum(0.1, 1 + jitter * noise)
    work[rng.random(work.shape) < lost] = np.nan
    for peer, (begin, times) in slow.items():
        work[peer, begin:] *= times
    return work


ONE = drawn(0, 8, 50, 0.02, 0.004, slow={3: (30, 1.2)})
FEW = drawn(1, 4, 12, 0.03, 0.004, slow={1: (0, 1.5)})
ALIKE = drawn(2, 16, 100, 0.05, 0.01, alike=0.7, lost=0.2, slow={5: (0, 1.3), 9: (60, 1.4)})
NOBODY = drawn(3, 6, 40, 0.1, 0.01, slow={})
# named: unit, effect, z, recurs, first, last; nearest: effect, z, unit, named from
NUMBERS = {
    "one": (ONE, False, [(3, 0.204846, 11.424142, 1.0, 30, 49)], (0.009871, 1.585146, 1, 4.70813)),
    "one, by the faster half": (ONE, True, [(3, 0.204846, 5.317966, 1.0, 30, 49)], (0.009871, 0.811622, 1, 4.70813)),
    "few": (FEW, False, [(1, 0.492952, 12.267412, 1.0, 0, 11)], (0.00128, 0.302256, 0, 4.255767)),
    "few, by the faster half": (FEW, True, [(1, 0.492952, 6.619724, 1.0, 0, 11)], (0.00128, 1.007694, 0, 4.255767)),
    "steps alike": (
        ALIKE, False, [(9, 0.388774, 9.000248, 1.0, 60, 99), (5, 0.289988, 8.375025, 1.0, 0, 99)],
        (0.037281, 2.787442, 15, 4.983328),
    ),
    "steps alike, by the faster half": (
        ALIKE, True, [(9, 0.388774, 7.547695, 1.0, 60, 99), (5, 0.289988, 7.178309, 1.0, 0, 99)],
        (0.039484, 2.838132, 15, 4.983328),
    ),
    "nobody": (NOBODY, False, [], (0.037145, 2.575106, 2, 4.602891)),
    "nobody, by the faster half": (NOBODY, True, [], (0.039251, 2.57676, 2, 4.602891)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_who_stands_out_in_numbers(name: str) -> None:
    work, lower, named, nearest = NUMBERS[name]
    found, spread = outliers(work / np.nanmedian(work, axis=0) - 1, lower_half=lower, minimum=0.1 if lower else 0.03)
    assert [astuple(one) for one in found] == [pytest.approx(one, abs=2e-6) for one in named]
    assert astuple(spread) == pytest.approx(nearest, abs=2e-6)


def test_pairs_in_numbers() -> None:
    work = drawn(9, 6, 30, 0.02, 0.004, slow={1: (10, 1.15)})
    others = work.reshape(3, 2, 30)[:, ::-1].reshape(6, 30)
    [found], spread = outliers(work / others - 1, minimum=0.05, pair_ids=np.repeat(np.arange(3), 2))
    assert astuple(found) == pytest.approx((1, 0.1440499, 6.3819556, 1.0, 10, 29))
    assert astuple(spread) == pytest.approx((0.0110931, 0.6907674, 5, 4.5426344), rel=1e-5)
    work = drawn(10, 2, 30, 0.02, 0.004, slow={1: (0, 1.15)})
    [found], spread = outliers(work / work[::-1] - 1)
    assert astuple(found) == pytest.approx((1, 0.1512400, 7.2717472, 1.0, 0, 29))
    assert astuple(spread) == pytest.approx((-0.1317160, -5.4409432, 0, 4.3054234), rel=1e-5)

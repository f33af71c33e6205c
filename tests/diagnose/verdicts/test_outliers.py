"""Who stands out: those who are slow again and again, and nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.diagnose.verdicts.outliers import FEWEST, MINIMUM, WINDOW, outliers, threshold


def noise(seed: int, peers: int, steps: int, jitter: float, bias: float = 0.0) -> np.ndarray:
    """Deviations of equals from their median."""
    rng = np.random.default_rng(seed)
    work = (1 + bias * rng.standard_normal(peers)[:, None]) * (1 + jitter * rng.standard_normal((peers, steps)))
    return work / np.median(work, axis=0) - 1


@given(st.integers(0, 2**32), st.integers(2, 200), st.integers(1, 150), st.floats(0, 0.2), st.floats(0, 0.006))
@settings(max_examples=30)
def test_nobody_stands_out_of_jitter(seed: int, peers: int, steps: int, jitter: float, bias: float) -> None:
    assert outliers(noise(seed, peers, steps, jitter, bias))[0] == []


@given(st.integers(0, 2**32), st.floats(0.001, 0.1))
@settings(max_examples=5, deadline=None)
def test_nobody_stands_out_of_12288_healthy_ranks(seed: int, jitter: float) -> None:
    found, spread = outliers(noise(seed, 12_288, 3 * WINDOW, jitter, 0.003))
    assert found == []
    assert 0 < spread.z < spread.named_from


@given(
    seed=st.integers(0, 2**32),
    peers=st.integers(8, 100),
    slow=st.floats(0.1, 2.0),
    jitter=st.floats(0.0, 0.02),
    begin=st.integers(0, 60),
)
@settings(max_examples=40)
def test_who_is_slow_is_named_and_since_when(seed: int, peers: int, slow: float, jitter: float, begin: int) -> None:
    deviation = noise(seed, peers, 100, jitter)
    deviation[peers // 2, begin:] += slow
    found, spread = outliers(deviation)
    assert [one.peer for one in found] == [peers // 2]
    assert found[0].effect == pytest.approx(slow, rel=0.2)
    assert abs(found[0].first - begin) <= 2
    assert found[0].last == 99
    assert spread.z < spread.named_from


def test_a_slow_spell_is_none_unless_it_comes_back_or_is_the_last() -> None:
    deviation = noise(2, 32, 5 * WINDOW, 0.01)
    deviation[3, WINDOW : 2 * WINDOW] += 0.2
    assert outliers(deviation)[0] == []
    deviation[3, 2 * WINDOW : 3 * WINDOW] += 0.2
    found, _ = outliers(deviation)
    assert [(one.peer, one.first, one.last) for one in found] == [(3, WINDOW, 3 * WINDOW - 1)]
    deviation = noise(2, 32, 5 * WINDOW, 0.01)
    deviation[3, 4 * WINDOW :] += 0.2
    assert [(one.peer, one.first) for one in outliers(deviation)[0]] == [(3, 4 * WINDOW)]


def test_what_does_not_recur_or_is_too_small_is_not_named() -> None:
    deviation = noise(3, 32, WINDOW, 0.001)
    deviation[3] += MINIMUM * 0.9
    assert outliers(deviation)[0] == []
    deviation = noise(3, 32, WINDOW, 0.001)
    deviation[3, ::2] += 0.5  # every other step: the median is the mean of both
    assert outliers(deviation)[0] == []


def test_two_ranks_are_told_apart_by_how_steady_the_difference_is() -> None:
    rng = np.random.default_rng(4)
    difference = 0.2 + 0.02 * rng.standard_normal(WINDOW)
    assert [one.peer for one in outliers(np.stack([difference, -difference]))[0]] == [0]
    unsteady = 0.2 + 0.8 * rng.standard_normal(WINDOW)
    assert outliers(np.stack([unsteady, -unsteady]))[0] == []


def test_too_little_says_nothing() -> None:
    assert outliers(np.full((4, FEWEST - 1), 1.0))[0] == []
    assert outliers(np.full((1, 50), 1.0))[0] == []
    assert outliers(np.full((4, 50), np.nan))[0] == []
    alone = np.full((4, 50), np.nan)
    alone[0] = 1.0
    assert outliers(alone)[1].peer in (-1, 0)


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8, 64]))
@settings(max_examples=4, deadline=None)
def test_nobody_stands_out_of_10000_steps_on_a_busy_machine(seed: int, peers: int) -> None:
    """Ops that now and then take many times as long, spells in which a rank is disturbed, uneven
    hosts."""
    rng = np.random.default_rng(seed)
    work = (1 + 0.004 * rng.standard_normal((peers, 1))) * rng.lognormal(0, 0.15, (peers, 10_000))
    work *= np.where(rng.random(work.shape) < 0.02, rng.pareto(2, work.shape) + 1, 1)
    for spell in range(50):  # apart from each other: two that follow each other are a slow rank
        peer, begin = rng.integers(peers), 200 * spell + rng.integers(100)
        work[peer, begin : begin + rng.integers(1, WINDOW)] *= 1.5
    usual = np.median(work, axis=0) if peers > 2 else work[::-1]
    assert outliers(work / usual - 1)[0] == []


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 8, 64]), st.floats(0.001, 0.2), st.floats(0.0, 0.9))
@settings(max_examples=8, deadline=None)
def test_nobody_stands_out_for_who_looks_after_every_step(seed: int, peers: int, jitter: float, alike: float) -> None:
    """Also where steps are like those before them."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((peers, 60))
    for step in range(1, 60):
        noise[:, step] = alike * noise[:, step - 1] + (1 - alike**2) ** 0.5 * noise[:, step]
    work = np.maximum(0.1, 1 + jitter * noise)
    usual = np.median(work, axis=0) if peers > 2 else work[::-1]
    twins = np.zeros(2, np.int64) if peers == 2 else None
    assert not any(outliers((work / usual - 1)[:, :steps], pair_ids=twins)[0] for steps in range(1, 61))


@pytest.mark.parametrize("slow", [0.1, 0.3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_of_two_in_a_stage_the_slow_one_is_named(stages: int, slow: float) -> None:
    """What one has too much the other has too little: of two stages, half of all are then far from
    the rest."""
    named: list[list[int]] = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        pace = 1 + 0.003 * rng.standard_normal((2 * stages, 1))
        work = pace * (1 + 0.015 * rng.standard_normal((2 * stages, WINDOW)))
        work[1] *= 1 + slow
        usual = work.reshape(stages, 2, WINDOW)[:, ::-1].reshape(work.shape)
        found, _ = outliers(work / usual - 1, minimum=0.05, pair_ids=np.repeat(np.arange(stages), 2))
        named.append([one.peer for one in found])
    assert named == [[1]] * 50


@pytest.mark.parametrize("peers", [4, 8, 64, 1024])
def test_ten_percent_are_found_within_twenty_steps_of_their_beginning(peers: int) -> None:
    """Whenever they begin: the last window is of the last steps."""
    for begin in range(0, 60, 7):
        deviation = noise(begin, peers, begin + WINDOW, 0.03, 0.003)
        deviation[2, begin:] += 0.1
        found, _ = outliers(deviation)
        assert [(one.peer, abs(one.first - begin) <= 3) for one in found] == [(2, True)]


@pytest.mark.parametrize(("peers", "jitter", "slow"), [(4, 0.3, 0.5), (8, 0.3, 0.3), (2, 0.2, 0.4)])
def test_since_when_is_not_late_where_single_windows_are_too_noisy(peers: int, jitter: float, slow: float) -> None:
    """The first windows with it may not be clear by themselves."""
    away: list[int] = []
    for seed in range(40):
        deviation = noise(seed, peers, 160, jitter)
        deviation[1, 90:] += slow
        if peers == 2:
            deviation[0] = -deviation[1]
        away += [one.first - 90 for one in outliers(deviation, minimum=0.05)[0] if one.peer == 1]
    assert len(away) >= 38 and sum(abs(one) <= 20 for one in away) >= 0.9 * len(away) and np.median(np.abs(away)) <= 5


def test_the_more_might_be_named_by_chance_the_clearer_it_must_be() -> None:
    assert threshold(2, 20) < threshold(8, 20) < threshold(8, 1000) < threshold(12_288, 1000) < 7


def test_what_is_not_clear_in_twenty_steps_may_be_in_two_hundred() -> None:
    deviation = noise(6, 8, 200, 0.2)
    deviation[3] += 0.1
    assert outliers(deviation[:, -WINDOW:])[0] == []
    assert [one.peer for one in outliers(deviation)[0]] == [3]


def test_of_two_windows_one_suffices() -> None:
    deviation = noise(7, 32, 2 * WINDOW, 0.01)
    deviation[3, :WINDOW] += 0.2
    found, _ = outliers(deviation)
    assert [(one.peer, one.first, one.last) for one in found] == [(3, 0, WINDOW - 1)]


def test_five_steps_suffice_for_what_is_clear() -> None:
    deviation = noise(8, 32, FEWEST, 0.001)
    deviation[3] += 1.0
    assert [(one.peer, one.first, one.last) for one in outliers(deviation)[0]] == [(3, 0, FEWEST - 1)]
    assert outliers(deviation[:, 1:]) == ([], outliers(np.full((1, 50), 1.0))[1])


def test_who_was_slow_before_and_is_again_is_named_since_the_last_time() -> None:
    deviation = noise(9, 32, 5 * WINDOW, 0.01)
    deviation[3] += 0.2
    deviation[3, 2 * WINDOW : 3 * WINDOW] -= 0.2
    assert [(one.peer, one.first, one.last) for one in outliers(deviation)[0]] == [(3, 3 * WINDOW, 5 * WINDOW - 1)]

"""Calibration: known constants come back, priors hold what nothing measures, outliers pull
little."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from plait.plan.calibrate.fit import FittedConstant, Scatter, calibrate

WORK = np.geomspace(1, 100, 30)
SENT = np.tile([0.0, 5.0, 40.0], 10)
TRUE = {"rate": 3.0, "delay": 0.7}
PRIORS = {"rate": FittedConstant(value=2.0, error=0.5), "delay": FittedConstant(value=1.0, error=0.5)}


def model(values: Mapping[str, float]) -> np.ndarray:
    return WORK / values["rate"] + SENT * values["delay"] + 0.1


def test_constants_come_back_from_what_they_predict() -> None:
    found = calibrate(model, model(TRUE), PRIORS, scatter=Scatter(noise=0.01))
    assert found.values == pytest.approx(TRUE, rel=0.01)
    assert all(found.constants[name].error < 0.02 for name in TRUE)
    assert np.abs(found.residuals).max() < 0.01


def test_few_measurements_move_little_and_many_move_more() -> None:
    def moved(count: int) -> float:
        truth = model(TRUE)[:count]
        found = calibrate(
            lambda values: model(values)[:count],
            truth,
            {**PRIORS, "rate": FittedConstant(value=2.0, error=0.1)},
            scatter=Scatter(noise=0.3),
        )
        return found.values["rate"]

    assert 2.0 < moved(1) < moved(5) < moved(30) < 3.0


def test_what_nothing_measures_stays_and_keeps_its_error() -> None:
    priors = {**PRIORS, "unused": FittedConstant(value=5.0, error=0.3), "fixed": FittedConstant(value=7.0, error=0.0)}
    found = calibrate(model, model(TRUE), priors)
    assert found.values["unused"] == pytest.approx(5.0)
    assert found.constants["unused"].error == pytest.approx(0.3)
    assert found.constants["fixed"] == priors["fixed"]


def test_a_limit_holds() -> None:
    priors = {**PRIORS, "rate": FittedConstant(value=2.0, error=0.5, most=2.5)}
    assert calibrate(model, model(TRUE), priors, scatter=Scatter(noise=0.01)).values["rate"] == pytest.approx(2.5)


PRIOR_VALUES = {name: known.value for name, known in PRIORS.items()}


def test_where_a_fit_begins_may_be_given_and_is_bounded() -> None:
    asked = list[dict[str, float]]()

    def recorded(values: Mapping[str, float]) -> np.ndarray:
        asked.append(dict(values))
        return model(values)

    calibrate(recorded, model(TRUE), PRIORS, start={"rate": 2.8})
    assert asked[0] == pytest.approx({"rate": 2.8, "delay": 1.0})
    asked.clear()
    bounded = {**PRIORS, "rate": FittedConstant(value=2.0, error=0.5, most=2.5)}
    calibrate(recorded, model(TRUE), bounded, start=TRUE)
    assert asked[0] == pytest.approx({"rate": 2.5, "delay": 0.7})


def test_residuals_are_logarithms_of_predicted_to_measured() -> None:
    fixed = {**PRIORS, "rate": FittedConstant(value=2.0, error=1e-9), "delay": FittedConstant(value=1.0, error=0.0)}
    found = calibrate(model, 2 * model(PRIOR_VALUES), fixed, scatter=Scatter(noise=0.3))
    assert found.residuals == pytest.approx(-np.log(2) * np.ones(30))


@pytest.mark.parametrize("outlier", [2.0, 1e9])
def test_a_measurement_may_be_worth_several(outlier: float) -> None:
    """As if it had been made as often."""
    measured = model(TRUE) * np.exp(0.3 * np.sin(np.arange(30)))
    times = 1 + np.arange(30) % 3
    weighed = calibrate(model, measured, PRIORS, weights=times, scatter=Scatter(noise=0.1, outlier=outlier))
    often = np.repeat(np.arange(30), times)
    repeated = calibrate(
        lambda v: model(v)[often], measured[often], PRIORS, scatter=Scatter(noise=0.1, outlier=outlier)
    )
    assert weighed.values == pytest.approx(repeated.values, rel=1e-6)
    for name in PRIORS:
        assert weighed.constants[name].error == pytest.approx(repeated.constants[name].error, rel=1e-6)


def test_errors_shrink_as_least_squares_say() -> None:
    """Of one constant that every measurement is proportional to: the prior and each of them
    count."""
    prior = {"scale": FittedConstant(value=2.0, error=0.5, most=9.0)}
    found = calibrate(lambda v: np.full(4, v["scale"]), np.full(4, 3.0), prior, scatter=Scatter(noise=0.1, outlier=1e9))
    told = 1 / 0.5**2 + 4 / 0.1**2
    assert found.constants["scale"].error == pytest.approx(told**-0.5, rel=1e-3)
    assert found.constants["scale"].most == 9.0
    assert np.log(found.values["scale"] / 2) == pytest.approx(np.log(1.5) * 4 / 0.1**2 / told, rel=1e-3)


def test_what_is_no_measurement_of_this_pulls_with_bounded_force() -> None:
    """Four residuals beyond the limit: each pulls by limit / noise, the prior against them."""
    prior = {"scale": FittedConstant(value=2.0, error=0.5)}
    found = calibrate(
        lambda v: np.full(4, v["scale"]), np.full(4, 3.0), prior, scatter=Scatter(noise=0.1, outlier=0.02)
    )
    assert np.log(found.values["scale"] / 2) == pytest.approx(4 * 0.02 / 0.1 * 0.5**2, rel=0.01)


def test_seconds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        calibrate(model, np.append(model(TRUE)[:-1], 0.0), PRIORS)

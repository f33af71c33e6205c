"""Constants from measured seconds: least squares in logarithms, held near what is known of each constant.

A constant's prior is a value and how far it may be off. Few measurements move it little, many move it as far
as they agree; what no measurement depends on stays where it was. Measurements that no constants explain
(another bottleneck, a typing error) pull with bounded force (Huber 1964).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Predict = Callable[[Mapping[str, float]], Floats]
STEP = 1e-3
"""Of a constant's logarithm, in units of its error, for derivatives."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A constant: its value, its relative error (one standard deviation of its logarithm), and the most that
    it can be. An error of 0 keeps it."""

    value: float
    error: float
    most: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """constants: what was found, with the errors that are left. residuals: log(predicted / measured). moved:
    rounds until nothing changed."""

    constants: Mapping[str, Known]
    residuals: Floats
    rounds: int

    @property
    def values(self) -> dict[str, float]:
        """By name."""
        return {name: known.value for name, known in self.constants.items()}


def calibrate(
    predict: Predict,
    measured: ArrayLike,
    priors: Mapping[str, Known],
    *,
    start: Mapping[str, float] | None = None,
    weights: ArrayLike | None = None,
    noise: float = 0.05,
    outlier: float = 2.0,
    rounds: int = 20,
) -> Calibrated:
    """The constants with which ``predict`` comes nearest to ``measured`` seconds.

    weights: how many independent measurements each one is worth. noise: relative, of one measurement and of
    the model's form together. outlier: residuals beyond so many times ``noise`` pull no harder. start: where
    to begin; the priors' values if left out. Levenberg-Marquardt, derivatives by differences.
    """
    seconds = np.asarray(measured, dtype=np.float64)
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ValueError("measured seconds must be positive")
    worth = np.ones_like(seconds) if weights is None else np.asarray(weights, dtype=np.float64)
    problem = _Problem(predict, np.log(seconds), priors, worth, noise, outlier)
    at = problem.position(start or {})
    damping, now = 1e-2, problem.at(at)
    done = 0
    while done < rounds:
        done += 1
        slopes = problem.slopes(at, now.residuals)
        pull = now.pull[:, None] * slopes
        normal, gradient = slopes.T @ pull + np.eye(len(at)), pull.T @ now.residuals + at
        better = None
        while damping < 1e6 and better is None:
            step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = problem.bounded(at + step)
            there = problem.at(trial)
            if there.cost < now.cost:
                better, damping = (trial, there), damping / 5
            else:
                damping *= 5
        if better is None:
            break
        gained = now.cost - better[1].cost
        at, now = better
        if gained < 1e-4 * now.cost:
            break
    slopes = problem.slopes(at, now.residuals)
    left = np.sqrt(np.diag(np.linalg.inv(slopes.T @ (now.pull[:, None] * slopes) + np.eye(len(at)))))
    found = {
        name: Known(value=value, error=float(prior.error * left[i]), most=prior.most)
        for i, (name, prior, value) in enumerate(
            (name, priors[name], value) for name, value in problem.values(at).items() if priors[name].error > 0
        )
    }
    fixed = {name: prior for name, prior in priors.items() if prior.error == 0}
    return Calibrated(constants={**found, **fixed}, residuals=now.residuals * noise, rounds=done)


@dataclass(frozen=True)
class _At:
    residuals: Floats
    pull: Floats
    cost: float


class _Problem:
    """Positions are distances from the priors, each in units of its error."""

    def __init__(self, predict: Predict, target: Floats, priors: Mapping[str, Known], worth: Floats, noise: float,
                 outlier: float) -> None:  # fmt: skip
        self.predict, self.target, self.priors = predict, target, priors
        self.worth, self.noise, self.outlier = worth, noise, outlier
        self.free = [name for name, prior in priors.items() if prior.error > 0]
        self.highest = np.array([np.log(priors[n].most / priors[n].value) / priors[n].error for n in self.free])

    def position(self, start: Mapping[str, float]) -> Floats:
        values = [np.log(start.get(n, self.priors[n].value) / self.priors[n].value) / self.priors[n].error
                  for n in self.free]  # fmt: skip
        return self.bounded(np.array(values, dtype=np.float64))

    def bounded(self, at: Floats) -> Floats:
        return np.minimum(at, self.highest)

    def values(self, at: Floats) -> dict[str, float]:
        moved = {
            name: self.priors[name].value * float(np.exp(self.priors[name].error * x))
            for name, x in zip(self.free, at, strict=True)
        }
        return {**{name: prior.value for name, prior in self.priors.items()}, **moved}

    def residuals(self, at: Floats) -> Floats:
        return (np.log(self.predict(self.values(at))) - self.target) / self.noise

    def at(self, at: Floats) -> _At:
        residuals = self.residuals(at)
        size = np.abs(residuals)
        far = size > self.outlier
        loss = np.where(far, 2 * self.outlier * size - self.outlier**2, size**2)
        pull = self.worth * np.where(far, self.outlier / np.maximum(size, self.outlier), 1.0)
        return _At(residuals, pull, float(self.worth @ loss + at @ at))

    def slopes(self, at: Floats, residuals: Floats) -> Floats:
        columns: list[Any] = []
        for i in range(len(at)):
            moved = at.copy()
            moved[i] -= STEP
            columns.append((residuals - self.residuals(moved)) / STEP)
        return np.stack(columns, axis=1)

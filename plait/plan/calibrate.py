"""Constants from measured seconds: least squares in logarithms, held near what is known of each constant.

A constant's prior is a value and how far it may be off. Few measurements move it little, many move it as far
as they agree; what no measurement depends on stays where it was. Measurements that no constants explain
(another bottleneck, a typing error) pull with bounded force (Huber 1964).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Predict = Callable[[Mapping[str, float]], Floats]
GAIN = 1e-4
"""Relative fall of the cost below which a fit is done."""


@dataclass(frozen=True, kw_only=True)
class FittedConstant:
    """A constant: its value, its relative error (one standard deviation of its logarithm), and the most that
    it can be. An error of 0 keeps it."""

    value: float
    error: float
    most: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Scatter of measured seconds about a model's. noise: relative, of one measurement and of the model's
    form together. outlier: residuals beyond so many times ``noise`` pull no harder."""

    noise: float = 0.05
    outlier: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """constants: fitted values, with the errors that are left. residuals: log(predicted / measured)."""

    constants: Mapping[str, FittedConstant]
    residuals: Floats

    @property
    def values(self) -> dict[str, float]:
        """By name."""
        return {name: known.value for name, known in self.constants.items()}


def calibrate(
    predict: Predict,
    measured: ArrayLike,
    priors: Mapping[str, FittedConstant],
    *,
    start: Mapping[str, float] | None = None,
    weights: ArrayLike | None = None,
    scatter: Scatter = Scatter(),
) -> Calibrated:
    """The constants with which ``predict`` comes nearest to ``measured`` seconds.

    weights: how many independent measurements each one is worth. start: where the fit begins; the priors'
    values if left out. Raises ValueError where seconds are not positive.
    """
    from scipy.optimize import least_squares

    seconds = np.asarray(measured, dtype=np.float64)
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ValueError("measured seconds must be positive")
    worth = np.ones_like(seconds) if weights is None else np.asarray(weights, dtype=np.float64)
    free = {name: prior for name, prior in priors.items() if prior.error > 0}
    noise, outlier = scatter.noise, scatter.outlier

    # Unknowns are distances from the priors in units of their errors, and so residuals themselves.
    def distance(name: str, value: float) -> float:
        return float(np.log(value / free[name].value)) / free[name].error

    def constants(at: Floats) -> dict[str, FittedConstant]:
        values = zip(free.items(), at, strict=True)
        return {**priors, **{n: replace(p, value=p.value * float(np.exp(p.error * x))) for (n, p), x in values}}

    def residuals(at: Floats) -> Floats:
        predicted = predict({name: known.value for name, known in constants(at).items()})
        return np.concatenate([np.log(predicted / seconds) / noise, at])

    def loss(squares: Floats) -> Floats:
        """Huber's loss of each residual and its slope. The second derivative is left out: with it an outlier
        would count for nothing in the errors that are left."""
        root = np.sqrt(squares)
        far = (root > outlier) & (np.arange(len(root)) < len(seconds))
        rho = np.where(far, 2 * outlier * root - outlier**2, squares)
        slope = np.where(far, outlier / np.maximum(root, outlier), 1.0)
        return np.stack([rho, slope, np.zeros_like(root)]) * np.concatenate([worth, np.ones(len(free))])

    highest = np.array([distance(name, prior.most) for name, prior in free.items()])
    first = np.array([distance(name, (start or {}).get(name, prior.value)) for name, prior in free.items()])
    found = least_squares(
        residuals, np.minimum(first, highest), bounds=(-np.inf, highest), method="dogbox", ftol=GAIN,
        loss=loss,  # pyright: ignore[reportArgumentType]: scipy's own annotation lacks functions
    )  # fmt: skip
    left = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    errors = {name: prior.error * float(part) for (name, prior), part in zip(free.items(), left, strict=True)}
    return Calibrated(
        constants={n: replace(known, error=errors.get(n, 0.0)) for n, known in constants(found.x).items()},
        residuals=found.fun[: len(seconds)] * noise,
    )

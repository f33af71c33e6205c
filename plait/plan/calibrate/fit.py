"""Fits a cluster's constants to measured seconds: least squares in logarithms, with a prior for
each constant.

A prior is a value and its error. Few measurements move a constant little; many move it as far as
they agree. A constant on which no measurement depends keeps its value. Measurements that no
constants explain (another bottleneck, a typing error) pull with bounded force (Huber 1964).

Constants have names (``matmul``, ``inside.share``); functions below list them and return clusters
with other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.core.cluster.efficiency import Constant, Efficiency, Links
from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import QUANTISED

Floats = NDArray[np.float64]
Predict = Callable[[Mapping[str, float]], Floats]
GAIN = 1e-4
"""Relative decrease of the cost below which a fit ends."""


@dataclass(frozen=True, kw_only=True)
class FittedConstant:
    """A constant. error: relative, one standard deviation of its logarithm; 0 keeps the value
    fixed. most: upper limit."""

    value: float
    error: float
    most: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Scatter of measured seconds around a model's predictions. noise: relative standard deviation,
    of one measurement and the model's form together. outlier: residuals beyond this multiple of
    ``noise`` pull no harder."""

    noise: float = 0.05
    outlier: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Result of a fit. constants: fitted values, with their remaining errors. residuals:
    log(predicted / measured)."""

    constants: Mapping[str, FittedConstant]
    residuals: Floats

    @property
    def values(self) -> dict[str, float]:
        """Values of the constants by name."""
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
    """Return the constants with which ``predict`` comes closest to the ``measured`` seconds, by
    name, with their errors after the fit.

    priors: each constant's value and error before the fit. start: initial values, by default the
    priors'. weights: for each measurement, the number of independent ones that it counts as. Raises
    ValueError unless all measured seconds are positive."""
    from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

    seconds = np.asarray(measured, dtype=np.float64)
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ValueError("measured seconds must be positive")
    worth = np.ones_like(seconds) if weights is None else np.asarray(weights, dtype=np.float64)
    free = {name: prior for name, prior in priors.items() if prior.error > 0}
    noise, outlier = scatter.noise, scatter.outlier

    # Unknowns are distances from the priors in units of the priors' errors, so they are residuals themselves.
    def distance(name: str, value: float) -> float:
        return float(np.log(value / free[name].value)) / free[name].error

    def constants(at: Floats) -> dict[str, FittedConstant]:
        values = zip(free.items(), at, strict=True)
        return {**priors, **{n: replace(p, value=p.value * float(np.exp(p.error * x))) for (n, p), x in values}}

    def residuals(at: Floats) -> Floats:
        predicted = predict({name: known.value for name, known in constants(at).items()})
        return np.concatenate([np.log(predicted / seconds) / noise, at])

    def loss(squares: Floats) -> Floats:
        """Return (Huber's loss of each squared residual, its slope, its second derivative). The
        second derivative is taken as 0: with the true one, an outlier would not affect the
        constants' errors at all."""
        root = np.sqrt(squares)
        far = (root > outlier) & (np.arange(len(root)) < len(seconds))
        rho = np.where(far, 2 * outlier * root - outlier**2, squares)
        slope = np.where(far, outlier / np.maximum(root, outlier), 1.0)
        return np.stack([rho, slope, np.zeros_like(root)]) * np.concatenate([worth, np.ones(len(free))])

    highest = np.array([distance(name, prior.most) for name, prior in free.items()])
    first = np.array([distance(name, (start or {}).get(name, prior.value)) for name, prior in free.items()])
    found = cast("Any", optimize).least_squares(
        residuals, np.minimum(first, highest), bounds=(-np.inf, highest), method="dogbox", ftol=GAIN, loss=loss
    )
    jac: Floats = found.jac
    left = np.sqrt(np.diag(np.linalg.inv(jac.T @ jac)))
    errors = {name: prior.error * float(part) for (name, prior), part in zip(free.items(), left, strict=True)}
    return Calibrated(
        constants={n: replace(known, error=errors.get(n, 0.0)) for n, known in constants(found.x).items()},
        residuals=found.fun[: len(seconds)] * noise,
    )


def constant_of(cluster: Cluster, name: str) -> Constant:
    """Return a cluster's constant by its name, such as ``matmul`` or ``inside.share``."""
    outer, _, inner = name.partition(".")
    found = getattr(cluster.efficiency, outer)
    return getattr(found, inner) if inner else found


def timed_constants(cluster: Cluster) -> Iterator[str]:
    """Yield the names of constants that affect a step's duration."""
    for outer in Efficiency.model_fields:
        found = getattr(cluster.efficiency, outer)
        if isinstance(found, Constant):
            yield outer
        elif isinstance(found, Links):
            yield from (f"{outer}.{inner}" for inner in Links.model_fields)


def lacked_format(cluster: Cluster, name: str) -> str:
    """Return the format whose products the constant describes if the cluster's device lacks that
    format; else an empty string.

    >>> h100 = Cluster.preset("h100")
    >>> lacked_format(h100, "matmul_nvfp4"), lacked_format(h100, "matmul_fp8"), lacked_format(h100, "memory")
    ('nvfp4', '', '')
    """
    precision = name.removeprefix("matmul_")
    return precision if precision in QUANTISED and precision not in cluster.device.peak else ""


def copy_constants(cluster: Cluster, other: Cluster, names: Iterable[str]) -> Cluster:
    """Return ``cluster`` with the named constants copied from ``other``: value, error, source and
    date."""
    efficiency = cluster.efficiency
    for name in names:
        outer, _, inner = name.partition(".")
        constant: Any = constant_of(other, name)
        if inner:
            constant = getattr(efficiency, outer).model_copy(update={inner: constant})
        efficiency = efficiency.model_copy(update={outer: constant})
    return cluster.model_copy(update={"efficiency": efficiency})


def with_constants(cluster: Cluster, values: Mapping[str, tuple[float, float]], *, source: str, date: str) -> Cluster:
    """Return the cluster with new values of constants. values: (value, relative error) by name.
    source, date: recorded with each."""
    efficiency = cluster.efficiency
    for name, (value, error) in values.items():
        outer, _, inner = name.partition(".")
        constant: Any = Constant(value=value, source=source, date=date, error=error)
        if inner:
            constant = getattr(efficiency, outer).model_copy(update={inner: constant})
        efficiency = efficiency.model_copy(update={outer: constant})
    return cluster.model_copy(update={"efficiency": efficiency})

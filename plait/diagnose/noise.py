"""How far a mean of a few steps may be off by chance, and how far healthy units are apart: estimates that a
few wild values do not spoil, and how much each of them is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

SIGMA = 1.4826
"""Of a normal distribution, in MADs (median absolute deviations)."""
MAD_IS_WORTH = 0.37
"""Of a standard deviation of as many values."""
TRIMMED = 0.2
"""Share of values left out at either end."""
KNOWN = 8.0
"""Degrees of freedom that what is taken of healthy units is worth."""
UNSTEADY = 3.0
"""Normal deviate of a unit's spread over steps among all units', from which on its own counts."""
MOST_ALIKE = 0.9
"""Of neighbouring steps, at most, as a correlation."""


@dataclass(frozen=True, eq=False)
class Means:
    """Of each unit's steps: their mean, its standard error, and the degrees of freedom of the error; NaN
    where too few are known."""

    mean: Floats
    error: Floats
    freedom: Floats


@dataclass(frozen=True, eq=False)
class Between:
    """Of healthy units' means: where they lie, how far they are apart (a standard deviation, for each unit as
    the others tell it), and its degrees of freedom."""

    centre: float
    sigma: Floats
    freedom: float


def normal_deviate(t: Floats, freedom: Floats) -> Floats:
    """The normal deviate that is as rare as Student's t: within 0.02 for 3 degrees of freedom and more
    (Wallace, Annals of Mathematical Statistics 30, 1959)."""
    worth = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom * np.log1p(t * t / freedom))
    return np.copysign(worth, t)


def mean_step(values: Floats, fewest: int, twins: Ints) -> Means:
    """Trimmed means of (units, steps); NaN: not known. The error is that of the unit's own steps, or of all
    units' if that is larger: then as many units know it. Steps may be alike their neighbours; by how much,
    all units tell. twins: a number for each unit, the same for two whose steps are the same but for the
    sign."""
    count = np.isfinite(values).sum(axis=1)
    mean, sigma, freedom = (np.full(len(values), np.nan) for _ in range(3))
    ordered = np.sort(values, axis=1)  # NaN last
    for known in np.unique(count[count >= fewest]).tolist():
        rows = count == known
        mean[rows], sigma[rows], freedom[rows] = _trimmed(ordered[rows, :known])
    if not np.isfinite(sigma).any():
        return Means(mean, sigma, freedom)
    own = np.where(np.isfinite(sigma), freedom, 1.0)
    common = float(np.nanmedian(sigma / _chi(own, 0.0)))
    shared = sigma <= common * _chi(own, UNSTEADY)
    estimates = len(np.unique(twins[shared]))
    freedom = np.where(shared, freedom * max(1, estimates), freedom)
    error = np.maximum(sigma, common) / np.sqrt(np.maximum(count, 1)) * _alike(values, mean, sigma)
    return Means(mean, error, freedom)


def _chi(freedom: Floats, deviate: float) -> Floats:
    """Of a standard deviation that so many degrees of freedom tell, against the true one, the value that is
    as rare as a normal deviate (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return (1 - spread + deviate * np.sqrt(spread)) ** 1.5


def _trimmed(ordered: Floats) -> tuple[Floats, Floats, float]:
    """Trimmed means of sorted rows, the standard deviation of values that would have such a mean's error, and
    its degrees of freedom."""
    known = ordered.shape[1]
    cut = int(TRIMMED * known)
    kept = known - 2 * cut
    winsorized = np.clip(ordered, ordered[:, cut, None], ordered[:, known - cut - 1, None])
    error = winsorized.std(axis=1, ddof=1) * np.sqrt((known - 1) / (kept * (kept - 1)))
    return ordered[:, cut : known - cut].mean(axis=1), error * np.sqrt(known), kept - 1.0


def _alike(values: Floats, mean: Floats, sigma: Floats) -> float:
    """By how much an error is larger because steps are like the ones before them: of a first-order
    autoregression, whose correlation all units' steps tell."""
    with np.errstate(invalid="ignore", divide="ignore"):
        left = np.clip((values - mean[:, None]) / sigma[:, None], -2.5, 2.5)
    left = left[np.isfinite(left).all(axis=1)]
    square = float((left * left).sum())
    if not square:
        return 1.0
    steps = left.shape[1]
    alike = float((left[:, 1:] * left[:, :-1]).sum()) / square * steps / (steps - 1) + 1 / steps
    alike = min(max(alike, 0.0), MOST_ALIKE)
    return float(np.sqrt((1 + alike) / (1 - alike)))


def healthy_spread(steps: Means, taken: float, twins: Ints, *, lower: bool) -> Between:
    """How far healthy units are apart, beyond what their steps' chance makes of it. taken: what is taken of
    them beforehand, a standard deviation; the more units there are, the less it counts. Each unit is held
    against the others, without itself and its twin. lower: only the lower half is healthy; they are as far
    apart as their means are."""
    means = steps.mean
    known = np.isfinite(means)
    found = np.sort(means[known])
    spread, chance = np.zeros(len(means)), 0.0
    if lower:
        found = found[: (len(found) + 1) // 2]
        centre = float(np.median(found)) if found.size > 1 else 0.0
        spread[:] = np.median(np.abs(found - centre)) if found.size > 1 else 0.0
        others = len(found) - 1
    else:
        centre = float(np.median(found)) if found.size > 3 else 0.0
        _, entry = np.unique(twins[known], return_inverse=True)
        apart = np.bincount(entry, np.abs(means[known] - centre)) / np.bincount(entry)
        spread[known] = _others(apart)[entry]
        others = len(apart) - 1
        chance = float(np.median(steps.error[known] ** 2)) if known.any() else 0.0
    freedom = MAD_IS_WORTH * max(0, others)
    # What is taken and what was found, each by its degrees of freedom (Smyth, 2004).
    beyond = np.maximum(0, (SIGMA * spread) ** 2 - chance)
    sigma = np.sqrt((KNOWN * taken**2 + freedom * beyond) / (KNOWN + freedom))
    return Between(centre, sigma, KNOWN + freedom)


def _others(values: Floats) -> Floats:
    """Of each the median of the others; 0 where there are none."""
    if values.size < 2:
        return np.zeros(values.size)
    ordered = np.sort(values)
    place = np.empty(values.size, np.int64)
    place[np.argsort(values, kind="stable")] = np.arange(values.size)
    left = values.size - 1
    low, high = (left - 1) // 2, left // 2
    return (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2

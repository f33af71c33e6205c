"""Who is slower than those who should be as fast, again and again.

The rule for ranks and for links alike. In each window of steps a unit's *effect* is the median of how much
longer it took than its equals. It stands out where the effect is large against the spread of all units' (MAD,
the median absolute deviation) and against its own changes from step to step, is worth speaking of, and recurs
in most steps. With thousands of ranks a lower threshold names healthy ones in every step: of 12,288 with
jitter of 1 %, the best z of a healthy rank is above 4.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WINDOW = 20
"""Steps of which it is judged together, so that what begins late is not averaged away."""
FEWEST = 5
"""Steps below which nothing is said."""
Z = 6.0
MINIMUM = 0.03
"""Effect that is worth speaking of: 3 %."""
RECURS = 0.75
"""Share of a window's steps in which the effect must be seen."""
SIGMA = 1.4826
"""Of a normal distribution, in MADs."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median against that of a mean."""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """unit: its row. effect, z, recurs: of the windows in which it stood out, the last of them. first, last:
    columns of these windows, ``last`` included."""

    unit: int
    effect: float
    z: float
    recurs: float
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far units are apart that do not stand out: the largest effect and z of any of them."""

    effect: float
    z: float
    unit: int


def outliers(deviation: Floats, *, minimum: float = MINIMUM, lower: bool = False) -> tuple[list[Outlier], Spread]:
    """Of (units, steps), how much longer than its equals each took, as a share; NaN: not known.

    minimum: of effects. lower: the faster half is what is healthy, because up to half of the units may be
    slow together, as the links of one host are. One window suffices where it is the last, or of few; earlier
    ones must be two that follow each other.
    """
    units, steps = deviation.shape
    if units < 2 or steps < FEWEST:
        return [], Spread(effect=0.0, z=0.0, unit=-1)
    windows = max(1, steps // WINDOW)
    edges = [round(i * steps / windows) for i in range(windows + 1)]
    effect, z, recurs = (np.full((units, windows), np.nan) for _ in range(3))
    for number, (first, last) in enumerate(pairwise(edges)):
        effect[:, number], z[:, number], recurs[:, number] = _window(deviation[:, first:last], minimum, lower)
    out = (z >= Z) & (effect >= minimum) & (recurs >= RECURS)
    if windows > 2:
        follows = np.zeros_like(out)
        follows[:, :-1] |= out[:, :-1] & out[:, 1:]
        follows[:, 1:] |= out[:, 1:] & out[:, :-1]
        follows[:, -1] |= out[:, -1]
        out = follows
    found: list[Outlier] = []
    for unit in np.flatnonzero(out.any(axis=1)).tolist():
        own = np.flatnonzero(out[unit])
        at = int(own[-1])
        begin = at
        while begin > 0 and out[unit, begin - 1]:
            begin -= 1
        first = _since(deviation[unit], edges[begin], edges[max(0, begin - 1)], effect[unit, at])
        found.append(
            Outlier(
                unit=unit, effect=float(effect[unit, at]), z=float(z[unit, at]), recurs=float(recurs[unit, at]),
                first=first, last=edges[at + 1] - 1,
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: -one.effect), _spread(effect, z, out)


def _window(deviation: Floats, minimum: float, lower: bool) -> tuple[Floats, Floats, Floats]:
    """Effect, z and recurrence of every unit in a window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of units that recorded nothing here
        effect = np.nanmedian(deviation, axis=1)
        changes = SIGMA * np.nanmedian(np.abs(deviation - effect[:, None]), axis=1)
    known = np.isfinite(deviation)
    count = known.sum(axis=1)
    error = MEDIAN_ERROR * changes / np.sqrt(np.maximum(count, 1))
    judged = np.sort(effect[count >= FEWEST])
    if lower:
        judged = judged[: (len(judged) + 1) // 2]
    enough = 2 if lower else 4
    between = SIGMA * float(np.median(np.abs(judged - np.median(judged)))) if judged.size >= enough else 0.0
    centre = float(np.median(judged)) if judged.size >= enough else 0.0
    noise = np.maximum(max(between, minimum / Z), error)
    with np.errstate(invalid="ignore"):
        recurs = ((deviation >= max(minimum, 1e-12)) & known).sum(axis=1) / np.maximum(count, 1)
    return effect, np.where(count >= FEWEST, (effect - centre) / noise, np.nan), recurs


def _since(deviation: Floats, begin: int, earliest: int, effect: float) -> int:
    """The first step of the stretch that leads into a window from which on the effect is mostly there."""
    high = deviation >= effect / 2
    first = begin
    while first > earliest and (high[first - 1] or (first - 2 >= earliest and high[first - 2])):
        first -= 1
    while first < len(high) - 1 and not high[first]:
        first += 1
    return first


def _spread(effect: Floats, z: Floats, out: NDArray[np.bool_]) -> Spread:
    """Of the others, in whichever window it is largest."""
    named = np.asarray(out.any(axis=1))
    left = np.where(named[:, None] | ~np.isfinite(z), -np.inf, z)
    unit, window = np.unravel_index(int(np.argmax(left)), left.shape)
    if not np.isfinite(left[unit, window]):
        return Spread(effect=0.0, z=0.0, unit=-1)
    return Spread(effect=float(effect[unit, window]), z=float(z[unit, window]), unit=int(unit))

"""Who is slower than those who should be as fast, again and again.

The rule for ranks and for links alike. In each window of steps a unit's *effect* is the mean of how much
longer it took than its equals, without the fifth of its steps at either end (Tukey and McLaughlin, 1963).
Against it stand two kinds of chance: what healthy units differ by, and what steps differ by. Both are
estimated from the others as well as from the unit itself, and how well they are known is counted: four
steps of two ranks say less than twenty of a thousand. So *z* is how many standard deviations of a normal
distribution the effect is worth, and it must be so large that in a run without any slow unit nobody is
named by chance, whichever of its units is looked at after whichever of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plait.diagnose.noise import healthy_spread, mean_step, normal_deviate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

WINDOW = 20
"""Steps of which it is judged together, so that what begins late is not averaged away."""
FEWEST = 5
"""Steps below which nothing is said."""
CHANCE = 5e-4
"""That in a run where all are healthy anybody is named, by one who looks after every step: each look may take
so much by the number of units and of steps until then, which adds up to this times the logarithm of steps."""
MINIMUM = 0.03
"""Effect that is worth speaking of: 3 %."""
LEAST = -0.99
"""Deviation below which it does not matter."""
SURE = 6.0
"""Healthy units are taken to differ by this part of the effect that is worth speaking of, until they show
otherwise."""
THERE = 0.36
"""Share of an effect from which on it is there, as to since when: it may grow."""
SOON = 1.3
"""Times by which z must be larger in half a window: so few steps tell little of how alike neighbours are."""
RECURS = 0.6
"""Share of a window's steps in which half of that effect must be seen."""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A unit that stands out. unit: its row. effect, z, recurs: values of the last window in which it was an
    outlier. first, last: columns between which the effect is there, ``last`` included."""

    unit: int
    effect: float
    z: float
    recurs: float
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class UnitSpread:
    """How far units are apart that do not stand out: the largest effect and z of any of them. named_from: the
    z from which on they would."""

    effect: float
    z: float
    unit: int
    named_from: float = 0.0


class _Seen(NamedTuple):
    """What windows say of units: (units, windows) each, effects as logarithms. edges: where windows begin,
    and the last one ends."""

    effect: Floats
    z: Floats
    recurs: Floats
    edges: list[int]


def threshold(units: int, steps: int) -> float:
    """The z from which on one of ``units`` stands out after so many steps."""
    return NormalDist().inv_cdf(1 - CHANCE / (units * steps))


def outliers(deviation: Floats, *, minimum: float = MINIMUM, twins: Ints | None = None,
             lower: bool = False) -> tuple[list[Outlier], UnitSpread]:  # fmt: skip
    """Of (units, steps), how much longer than its equals each took, as a share; NaN: not known.

    All is judged by logarithms, because chance lengthens what takes longer by more. minimum: of effects.
    twins: of each unit a number, the same for two that have no other equal: one's deviation is then the
    other's, turned round. lower: the faster half is what is healthy, because up to half of the units may be
    slow together, as the links of one host are. One window suffices where it is the last, or of few;
    earlier ones must be two that follow each other. What is not clear in so few steps may be so in twice as
    many.
    """
    units, steps = deviation.shape
    if units < 2 or steps < FEWEST:
        return [], UnitSpread(effect=0.0, z=0.0, unit=-1)
    least = threshold(units, steps)
    deviation = np.log1p(np.maximum(deviation, LEAST))
    single = np.arange(units) // (2 if units == 2 else 1) if twins is None else twins
    found: dict[int, Outlier] = {}
    looks: list[_Seen] = []
    for edges in _scales(steps):
        seen = _look(deviation, edges, float(np.log1p(minimum)), single, lower=lower)
        clear = least * (SOON if edges[0] else 1.0)
        out = _lasting((seen.z >= clear) & (seen.effect >= np.log1p(minimum)) & (seen.recurs >= RECURS))
        for unit in np.flatnonzero(out.any(axis=1)).tolist():
            found.setdefault(unit, _outlier(deviation[unit], seen, out[unit], unit))
        if not edges[0]:
            looks.append(seen)
    nearest = max((_nearest(seen, set(found), least) for seen in looks), key=lambda one: one.z)
    return sorted(found.values(), key=lambda one: -one.effect), nearest


def _scales(steps: int) -> Iterator[list[int]]:
    """Where windows begin, and the last one ends; then those of twice as many steps, up to all; then half of
    one. They are counted from the end, so that the last one is of the last steps, whenever somebody looks."""
    edges = [0, *reversed(range(steps - WINDOW, FEWEST - 1, -WINDOW)), steps]
    yield edges
    while len(edges) > 2:
        later = edges[::-1][::2][::-1]
        edges = later if later[0] == 0 else [0, *later]
        yield edges
    if steps > WINDOW // 2:
        yield [steps - WINDOW // 2, steps]


def _look(deviation: Floats, edges: list[int], minimum: float, twins: Ints, *, lower: bool) -> _Seen:
    shape = len(deviation), len(edges) - 1
    seen = _Seen(np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan), edges)
    for number, (first, last) in enumerate(pairwise(edges)):
        own = deviation[:, first:last]
        seen.effect[:, number], seen.z[:, number] = _window(own, minimum, twins, lower=lower)
        known = np.isfinite(own)
        with np.errstate(invalid="ignore"):
            often = ((own >= minimum / 2) & known).sum(axis=1)
        seen.recurs[:, number] = often / np.maximum(known.sum(axis=1), 1)
    return seen


def _window(deviation: Floats, minimum: float, twins: Ints, *, lower: bool) -> tuple[Floats, Floats]:
    """Effect and z of every unit in a window."""
    steps = mean_step(deviation, FEWEST, twins)
    between = healthy_spread(steps, minimum / SURE, twins, lower=lower)
    with np.errstate(invalid="ignore", divide="ignore"):
        noise = np.hypot(between.sigma, steps.error)
        freedom = noise**4 / (between.sigma**4 / between.freedom + steps.error**4 / steps.freedom)
        return steps.mean, normal_deviate((steps.mean - between.centre) / noise, freedom)


def _lasting(out: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of many windows, those that follow each other, and the last."""
    if out.shape[1] <= 2:
        return out
    follows = np.zeros_like(out)
    follows[:, :-1] |= out[:, :-1] & out[:, 1:]
    follows[:, 1:] |= out[:, 1:] & out[:, :-1]
    follows[:, -1] |= out[:, -1]
    return follows


def _outlier(deviation: Floats, seen: _Seen, out: NDArray[np.bool_], unit: int) -> Outlier:
    at = int(np.flatnonzero(out)[-1])
    begin, effect = at, float(seen.effect[unit, at])
    usual = _usual(deviation[: seen.edges[np.flatnonzero(out)[0]]], effect)
    there = usual + THERE * (effect - usual)
    # A window beside it in which the effect is there may be too noisy to be one by itself.
    while begin > 0 and (out[begin - 1] or seen.effect[unit, begin - 1] >= there):
        begin -= 1
    end = seen.edges[at + 1]
    last = next((n for n in range(at + 1, len(out)) if not seen.effect[unit, n] >= there), len(out))
    return Outlier(
        unit=unit, effect=float(np.expm1(effect)), z=float(seen.z[unit, at]), recurs=float(seen.recurs[unit, at]),
        first=_since(deviation[:end], seen.edges[max(0, begin - 1)], there, effect - there), last=seen.edges[last] - 1,
    )  # fmt: skip


def _usual(before: Floats, effect: float) -> float:
    """What a unit has before its effect: ranks that share processors are never quite equal."""
    known = before[np.isfinite(before)]
    return min(max(0.0, float(np.median(known))), effect / 2) if len(known) >= FEWEST else 0.0


def _since(deviation: Floats, earliest: int, there: float, most: float) -> int:
    """The step from which on deviations are mostly above ``there``, not before ``earliest``: where their sum
    beyond it, each at most ``most``, from there to the end, is largest (Page, 1954)."""
    above = np.clip(np.nan_to_num(deviation[earliest:] - there), -most, most)
    return earliest + int(np.argmax(np.cumsum(above[::-1])[::-1]))


def _nearest(seen: _Seen, named: set[int], least: float) -> UnitSpread:
    """Of those not named, the one that comes nearest to it, in whichever window."""
    left = np.where(np.isfinite(seen.z), seen.z, -np.inf)
    left[sorted(named)] = -np.inf
    unit, window = np.unravel_index(int(np.argmax(left)), left.shape)
    if not np.isfinite(left[unit, window]):
        return UnitSpread(effect=0.0, z=0.0, unit=-1, named_from=least)
    effect = float(np.expm1(seen.effect[unit, window]))
    return UnitSpread(effect=effect, z=float(seen.z[unit, window]), unit=int(unit), named_from=least)

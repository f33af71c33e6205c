"""Find peers (ranks or links) that are repeatedly slower than the others.

The *effect* of a peer in a window of steps is its mean excess over the others. The mean is trimmed
by a fifth of the steps at either end (Tukey and McLaughlin, 1963). The effect is compared with two
kinds of chance: the spread between healthy peers, and the spread between steps. Both are estimated
from all peers, and the precision of the estimates counts: four steps of two ranks say less than
twenty of a thousand.

*z* is the standard normal deviate that is as rare as the effect. Its threshold grows with the
numbers of peers and steps, so that a run without a slow peer names none by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

WINDOW = 20
"""Steps per window, so that a late onset is not averaged away."""
FEWEST = 5
"""Least number of steps for any result."""
CHANCE = 5e-4
"""Probability that a healthy run names any peer when evaluated after every step. Each evaluation
may use this share divided by the peers and the steps so far, which sums to this times the logarithm
of the steps."""
MINIMUM = 0.03
"""Least effect that is reported, as a fraction: 3 %."""
LEAST = -0.99
"""Lowest relative deviation from the peers; lower ones are raised to it."""
SURE = 6.0
"""Divisor: the assumed spread of healthy peers, before any are measured, is the least reported
effect divided by it."""
PRESENT_SHARE = 0.36
"""Share of an effect from which on it counts as present, to find its onset: an effect may grow."""
SOON = 1.3
"""Factor on the threshold of z in half a window: so few steps say little about how alike
neighbouring steps are."""
RECURS = 0.6
"""Least share of a window's steps whose excess is at least half of the least reported effect."""
SIGMA = 1.4826
"""Standard deviation of a normal distribution, in MADs (median absolute deviations)."""
MAD_IS_WORTH = 0.37
"""Precision of a MAD relative to a standard deviation of as many values."""
TRIMMED = 0.2
"""Share of values that are trimmed at either end."""
PRIOR_FREEDOM = 8.0
"""Degrees of freedom of the assumed spread of healthy peers."""
UNSTEADY = 3.0
"""Normal deviate of a peer's spread over steps among all peers, from which on its own spread
counts."""
MOST_ALIKE = 0.9
"""Highest correlation of neighbouring steps that is assumed."""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A slow peer. peer: its row in the table of deviations. effect, z, recurs: mean excess as a
    fraction, its significance, and share of steps with it, of the last window in which the peer was
    an outlier. first, last: columns (steps) between which the effect is present, ``last`` included.
    """

    peer: int
    effect: float
    z: float
    recurs: float
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class PeerSpread:
    """The peer nearest to being an outlier: its row, effect (a fraction) and z, the largest z of
    the peers that are no outliers. named_from: the z from which on a peer is one."""

    effect: float
    z: float
    peer: int
    named_from: float = 0.0


class _Windows(NamedTuple):
    """Results of all windows: (peers, windows) each, effects as logarithms. edges: the first step
    of each window, and the end of the last one."""

    effect: Floats
    z: Floats
    recurs: Floats
    edges: list[int]


def threshold(peers: int, steps: int) -> float:
    """Return the z from which on one of ``peers`` peers is an outlier after ``steps`` steps."""
    return NormalDist().inv_cdf(1 - CHANCE / (peers * steps))


def outliers(deviation: Floats, *, minimum: float = MINIMUM, pair_ids: Ints | None = None,
             lower_half: bool = False) -> tuple[list[Outlier], PeerSpread]:  # fmt: skip
    """Return the outliers, and the spread of the other peers. deviation: (peers, steps), relative
    excess over the others; NaN: unknown.

    Effects are logarithms, because chance lengthens long times by more. minimum: least effect.
    pair_ids: a number for each peer, equal for two peers that have only each other: their
    deviations have opposite signs. lower_half: treat the faster half as healthy, because up to half
    of the peers may be slow together, as the links of one host.

    One window suffices if it is the last, or of few; earlier windows must be two in succession. An
    effect that is unclear in so few steps may be clear in windows of twice as many.
    """
    peers, steps = deviation.shape
    if peers < 2 or steps < FEWEST:
        return [], PeerSpread(effect=0.0, z=0.0, peer=-1)
    least = threshold(peers, steps)
    deviation = np.log1p(np.maximum(deviation, LEAST))
    single = np.arange(len(deviation)) // (2 if peers == 2 else 1) if pair_ids is None else pair_ids
    found: dict[int, Outlier] = {}
    looks: list[_Windows] = []
    for edges in _scales(steps):
        seen = _look(deviation, edges, float(np.log1p(minimum)), single, lower=lower_half)
        clear = least * (SOON if edges[0] else 1.0)
        out = _lasting((seen.z >= clear) & (seen.effect >= np.log1p(minimum)) & (seen.recurs >= RECURS))
        for peer in np.flatnonzero(out.any(axis=1)).tolist():
            found.setdefault(peer, _outlier(deviation[peer], seen, out[peer], peer))
        if not edges[0]:
            looks.append(seen)
    nearest = max((_nearest(seen, set(found), least) for seen in looks), key=lambda one: one.z)
    return sorted(found.values(), key=lambda one: -one.effect), nearest


def _scales(steps: int) -> Iterator[list[int]]:
    """Yield the edges of windows, then of windows of twice as many steps, up to all steps, then of
    half a window. Windows are counted from the end, so that the last one always holds the last
    steps."""
    edges = [0, *reversed(range(steps - WINDOW, FEWEST - 1, -WINDOW)), steps]
    yield edges
    while len(edges) > 2:
        later = edges[::-1][::2][::-1]
        edges = later if later[0] == 0 else [0, *later]
        yield edges
    if steps > WINDOW // 2:
        yield [steps - WINDOW // 2, steps]


def _look(deviation: Floats, edges: list[int], minimum: float, twins: Ints, *, lower: bool) -> _Windows:
    shape = len(deviation), len(edges) - 1
    seen = _Windows(np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan), edges)
    for number, (first, last) in enumerate(pairwise(edges)):
        own = deviation[:, first:last]
        seen.effect[:, number], seen.z[:, number] = _window(own, minimum, twins, lower=lower)
        known = np.isfinite(own)
        with np.errstate(invalid="ignore"):
            often = ((own >= minimum / 2) & known).sum(axis=1)
        seen.recurs[:, number] = often / np.maximum(known.sum(axis=1), 1)
    return seen


def _window(deviation: Floats, minimum: float, twins: Ints, *, lower: bool) -> tuple[Floats, Floats]:
    """Return (effect, z) of every peer in a window of steps, effects as logarithms. twins: as
    ``pair_ids`` of ``outliers``. lower: treat the faster half as healthy."""
    steps = mean_step(deviation, FEWEST, twins)
    between = healthy_spread(steps, minimum / SURE, twins, lower=lower)
    with np.errstate(invalid="ignore", divide="ignore"):
        noise = np.hypot(between.sigma, steps.error)
        freedom = noise**4 / (between.sigma**4 / between.freedom + steps.error**4 / steps.freedom)
        return steps.mean, normal_deviate((steps.mean - between.centre) / noise, freedom)


def _lasting(out: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return True for the windows in which a peer counts as an outlier: the last, and those with a
    neighbour; with at most two windows, all. out: True where z exceeds its threshold."""
    if out.shape[1] <= 2:
        return out
    follows = np.zeros_like(out)
    follows[:, :-1] |= out[:, :-1] & out[:, 1:]
    follows[:, 1:] |= out[:, 1:] & out[:, :-1]
    follows[:, -1] |= out[:, -1]
    return follows


def _outlier(deviation: Floats, seen: _Windows, out: NDArray[np.bool_], peer: int) -> Outlier:
    at = int(np.flatnonzero(out)[-1])
    begin, effect = at, float(seen.effect[peer, at])
    usual = _usual(deviation[: seen.edges[np.flatnonzero(out)[0]]], effect)
    there = usual + PRESENT_SHARE * (effect - usual)
    # A neighbouring window with the effect may be too noisy to be an outlier by itself.
    while begin > 0 and (out[begin - 1] or seen.effect[peer, begin - 1] >= there):
        begin -= 1
    end = seen.edges[at + 1]
    last = next((n for n in range(at + 1, len(out)) if not seen.effect[peer, n] >= there), len(out))
    return Outlier(
        peer=peer, effect=float(np.expm1(effect)), z=float(seen.z[peer, at]), recurs=float(seen.recurs[peer, at]),
        first=_since(deviation[:end], seen.edges[max(0, begin - 1)], there, effect - there), last=seen.edges[last] - 1,
    )  # fmt: skip


def _usual(before: Floats, effect: float) -> float:
    """Return a peer's usual relative deviation, from ``before``, its steps before the effect: ranks
    that share processors are never quite equal."""
    known = before[np.isfinite(before)]
    return min(max(0.0, float(np.median(known))), effect / 2) if len(known) >= FEWEST else 0.0


def _since(deviation: Floats, earliest: int, there: float, most: float) -> int:
    """Return the step from which on deviations are mostly above ``there``, not before ``earliest``.
    The sum of the excess over ``there``, each at most ``most``, to the end is largest from this
    step (Page, 1954)."""
    above = np.clip(np.nan_to_num(deviation[earliest:] - there), -most, most)
    return earliest + int(np.argmax(np.cumsum(above[::-1])[::-1]))


def _nearest(seen: _Windows, named: set[int], least: float) -> PeerSpread:
    """Return the peer, not in ``named``, with the largest z in any window, and its effect. least:
    threshold of z."""
    left = np.where(np.isfinite(seen.z), seen.z, -np.inf)
    left[sorted(named)] = -np.inf
    peer, window = np.unravel_index(int(np.argmax(left)), left.shape)
    if not np.isfinite(left[peer, window]):
        return PeerSpread(effect=0.0, z=0.0, peer=-1, named_from=least)
    effect = float(np.expm1(seen.effect[peer, window]))
    return PeerSpread(effect=effect, z=float(seen.z[peer, window]), peer=int(peer), named_from=least)


@dataclass(frozen=True, eq=False)
class PeerMeans:
    """Mean of each peer's steps, its standard error, and the error's degrees of freedom; NaN with
    too few steps."""

    mean: Floats
    error: Floats
    freedom: Floats


@dataclass(frozen=True, eq=False)
class HealthySpread:
    """The means of healthy peers. centre: their median; 0 for few peers. sigma: their spread, a
    standard deviation, for each peer from the other peers. freedom: its degrees of freedom."""

    centre: float
    sigma: Floats
    freedom: float


def normal_deviate(t: Floats, freedom: Floats) -> Floats:
    """Return the normal deviate that is as rare as Student's t: within 0.02 for 3 degrees of
    freedom and more (Wallace, Annals of Mathematical Statistics 30, 1959)."""
    worth = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom * np.log1p(t * t / freedom))
    return np.copysign(worth, t)


def mean_step(values: Floats, fewest: int, twins: Ints) -> PeerMeans:
    """Return trimmed means of (peers, steps); NaN: unknown. The error is the peer's own, or the
    larger one of all peers, which then has as many degrees of freedom as all peers give.
    Neighbouring steps may be correlated; all peers give the correlation. twins: a number for each
    peer, equal for two peers whose steps differ only in sign."""
    count = np.isfinite(values).sum(axis=1)
    mean, sigma, freedom = (np.full(len(values), np.nan) for _ in range(3))
    ordered = np.sort(values, axis=1)  # NaN last
    for known in np.unique(count[count >= fewest]).tolist():
        rows = count == known
        mean[rows], sigma[rows], freedom[rows] = _trimmed(ordered[rows, :known])
    if not np.isfinite(sigma).any():
        return PeerMeans(mean, sigma, freedom)
    own = np.where(np.isfinite(sigma), freedom, 1.0)
    common = float(np.nanmedian(sigma / _chi(own, 0.0)))
    shared = sigma <= common * _chi(own, UNSTEADY)
    estimates = len(np.unique(twins[shared]))
    freedom = np.where(shared, freedom * max(1, estimates), freedom)
    error = np.maximum(sigma, common) / np.sqrt(np.maximum(count, 1)) * _alike(values, mean, sigma)
    return PeerMeans(mean, error, freedom)


def _chi(freedom: Floats, deviate: float) -> Floats:
    """Return a quantile of an estimated standard deviation, relative to the true one (Wilson and
    Hilferty, 1931). deviate: the quantile's normal deviate."""
    spread = 2 / (9 * freedom)
    return (1 - spread + deviate * np.sqrt(spread)) ** 1.5


def _trimmed(ordered: Floats) -> tuple[Floats, Floats, float]:
    """Return the trimmed means of sorted rows; the standard deviation of values whose mean would
    have the same error; and its degrees of freedom."""
    known = ordered.shape[1]
    cut = int(TRIMMED * known)
    kept = known - 2 * cut
    winsorized = np.clip(ordered, ordered[:, cut, None], ordered[:, known - cut - 1, None])
    error = winsorized.std(axis=1, ddof=1) * np.sqrt((known - 1) / (kept * (kept - 1)))
    return ordered[:, cut : known - cut].mean(axis=1), error * np.sqrt(known), kept - 1.0


def _alike(values: Floats, mean: Floats, sigma: Floats) -> float:
    """Return the factor by which correlated steps raise the error of their mean: for a first-order
    autoregression with the correlation of all peers' steps."""
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


def healthy_spread(steps: PeerMeans, prior: float, twins: Ints, *, lower: bool) -> HealthySpread:
    """Return the spread of healthy peers, beyond what the chance of their steps explains. prior:
    the assumed spread, a standard deviation; the more peers, the less it counts. Each peer is
    compared with the other peers, without its twin. lower: only the lower half is healthy; its
    spread is that of its means."""
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
        spread[known] = _leave_one_out_medians(apart)[entry]
        others = len(apart) - 1
        chance = float(np.median(steps.error[known] ** 2)) if known.any() else 0.0
    freedom = MAD_IS_WORTH * max(0, others)
    # The assumed and the measured spread, weighted by their degrees of freedom (Smyth, 2004).
    beyond = np.maximum(0, (SIGMA * spread) ** 2 - chance)
    sigma = np.sqrt((PRIOR_FREEDOM * prior**2 + freedom * beyond) / (PRIOR_FREEDOM + freedom))
    return HealthySpread(centre, sigma, PRIOR_FREEDOM + freedom)


def _leave_one_out_medians(values: Floats) -> Floats:
    """Return, for each value, the median of the other values; 0 for a single value."""
    if values.size < 2:
        return np.zeros(values.size)
    ordered = np.sort(values)
    position = np.empty(values.size, np.int64)
    position[np.argsort(values, kind="stable")] = np.arange(values.size)
    left = values.size - 1
    low, high = (left - 1) // 2, left // 2
    return (ordered[low + (position <= low)] + ordered[high + (position <= high)]) / 2

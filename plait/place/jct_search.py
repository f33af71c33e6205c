"""Random grid search over the predictor's settings, as Arnold (arXiv 2509.15940) tunes its own: settings are
drawn from a grid, and judged on the last jobs of what a model may learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.place.features import Features
from plait.place.jct import JctSettings, fit

Floats = NDArray[np.float64]
GRID: dict[str, tuple[Any, ...]] = {
    "leaves": (7, 15, 31, 63, 127),
    "learning_rate": (0.02, 0.03, 0.06, 0.1),
    "rounds": (60, 120, 240, 480),
    "min_leaf": (10, 20, 40, 100, 200),
}
FEWEST_JUDGED = 50
"""Ended jobs to judge settings by."""


@dataclass(frozen=True, kw_only=True)
class TriedSettings:
    """Settings, by name, and their error in log seconds (root mean square) on the jobs held back."""

    settings: dict[str, Any]
    error: float


@dataclass(frozen=True, kw_only=True)
class HeldBack:
    """What settings are judged on. past: log seconds that the jobs to learn from had run, ended: which had
    ended, both when the first job held back came. truth: log seconds of those held back; NaN for one that has
    not ended in time to be judged by."""

    known: Features
    past: Floats
    ended: NDArray[np.bool_]
    truth: Floats
    names: dict[str, tuple[str, ...]]


def search(
    held: HeldBack, settings: JctSettings, draws: int, progress: Callable[[str], None] | None = None
) -> list[TriedSettings]:
    """The settings given and ``draws`` others, the best first. None where too few jobs can be judged by."""
    judged = np.isfinite(held.truth)
    if judged.sum() < FEWEST_JUDGED:
        return []
    cut = len(held.past)
    first = replace(held.known, matrix=held.known.matrix[:cut])
    rest = replace(held.known, matrix=held.known.matrix[cut:])

    def error(one: JctSettings) -> float:
        model = fit(first, held.past, held.ended, replace(one, bags=1), held.names)
        missed = model.predict(rest, held.names).log - held.truth
        return float(np.sqrt(np.mean(missed[judged] ** 2)))

    found: list[TriedSettings] = []
    for number, one in enumerate([{name: getattr(settings, name) for name in GRID}, *_drawn(settings, draws)]):
        if progress:
            shown = ", ".join(f"{name} {value}" for name, value in one.items())
            progress(f"{f'settings {number} of {draws}' if number else 'the usual settings'}: {shown}")
        found.append(TriedSettings(settings=one, error=error(replace(settings, **one))))
    return sorted(found, key=lambda tried: tried.error)


def _drawn(settings: JctSettings, draws: int) -> list[dict[str, Any]]:
    """Points of the grid, none twice, as far as it has them."""
    chance = np.random.default_rng(settings.seed)
    sizes = [len(values) for values in GRID.values()]
    whole = int(np.prod(sizes))
    places = chance.choice(whole, size=min(draws, whole), replace=False)
    return [
        {name: values[at] for (name, values), at in zip(GRID.items(), np.unravel_index(place, sizes), strict=True)}
        for place in places
    ]

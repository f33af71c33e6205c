"""Errors of predicted durations beside four simple predictors, and settings found by random search.

Both are Arnold's (arXiv 2509.15940): errors in 10-minute intervals (figure 13), settings drawn from a grid
and judged on the last jobs of what a model may learn from. ``durations.py`` and ``queue.py`` print them.

    python -m benchmarks.forecast_errors TRACE --search 20
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.formats.job_traces.table import Trace
from plait.place.queue.features import Features, features
from plait.place.queue.forecast import Split, log_seconds, names_of, observed_until, rms, rows_of
from plait.place.queue.jct import BUCKET, FEWEST, JctSettings, fit, labels_of

Floats = NDArray[np.float64]
HOURS = (4, 24)
"""Up to which longer jobs count as so long, in buckets."""
PREDICTORS = {"constant": "all", "group": "group", "gpus": "all_gpus", "group_gpus": "group_gpus"}
"""Simple predictors, and the groups whose means they are."""
GRID: dict[str, tuple[Any, ...]] = {
    "leaves": (7, 15, 31, 63, 127),
    "learning_rate": (0.02, 0.03, 0.06, 0.1),
    "rounds": (60, 120, 240, 480),
    "min_leaf": (10, 20, 40, 100, 200),
}
FEWEST_JUDGED = 50
"""Ended jobs to judge settings by."""


def errors(trace: Trace, settings: JctSettings | None = None) -> dict[str, dict[str, float]]:
    """Root mean square errors on the last tenth, by unit and predictor: the ``model``, and means of the jobs
    learnt from."""
    settings, split, names = settings or JctSettings(), Split.of(trace), names_of(trace)
    labels = {kind: np.asarray(own, str) for kind, own in labels_of(split.known, names).items()}
    model = split.fit(settings, names)
    found = {"ln seconds": _beside_means(model.predict(split.tested, names).log, split.logs, split, labels)}
    for hours in HOURS:
        cap = hours * 3600 / BUCKET
        own = model if cap == settings.horizon else split.fit(replace(settings, horizon=cap, bags=0), names)
        buckets = np.minimum(np.exp(split.logs) / BUCKET, cap)
        said = own.predict(split.tested, names).buckets
        found[f"10-minute buckets, at most {hours} h"] = _beside_means(said, buckets, split, labels)
    return found


def _beside_means(said: Floats, values: Floats, split: Split, labels: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    truth = values[split.rest]
    found = {"model": rms(said - truth)}
    for name, kind in PREDICTORS.items():
        own = labels.get(kind, labels["all_gpus" if "gpus" in kind else "all"])
        found[name] = rms(_mean_of_group(own, values, split) - truth)
    return found


def _mean_of_group(group: NDArray[Any], values: Floats, split: Split) -> Floats:
    """The mean of the group's ended jobs; of all where it has none."""
    found = np.full(len(split.rest), values[split.ended].mean())
    for one in np.unique(group[split.rest]):
        own = values[split.ended][group[split.ended] == one]
        if len(own):
            found[group[split.rest] == one] = own.mean()
    return found


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


def held_back(trace: Trace) -> HeldBack | None:
    """The last tenth of the first nine tenths, judged by those that had ended before the last tenth; None
    where too few had ended before."""
    cut = int(0.9 * len(trace))
    held = int(0.9 * cut)
    past, ended = observed_until(trace, held)
    if ended.sum() < FEWEST:
        return None
    truth = np.where(observed_until(trace, cut)[1][held:], log_seconds(trace)[held:cut], np.nan)
    known = rows_of(features(trace), slice(0, cut))
    return HeldBack(known=known, past=past, ended=ended, truth=truth, names=names_of(trace))


def search(held: HeldBack, settings: JctSettings, draws: int) -> list[TriedSettings]:
    """The settings given and ``draws`` others, the best first. None where too few jobs can be judged by."""
    judged = np.isfinite(held.truth)
    if judged.sum() < FEWEST_JUDGED:
        return []
    cut = len(held.past)
    first, rest = rows_of(held.known, slice(0, cut)), rows_of(held.known, slice(cut, None))

    def error(one: JctSettings) -> float:
        model = fit(first, held.past, held.ended, replace(one, bags=1), held.names)
        return rms((model.boosted(rest, held.names)[0] - held.truth)[judged])

    asked: Sequence[dict[str, Any]] = [{name: getattr(settings, name) for name in GRID}, *_drawn(settings, draws)]
    found = [TriedSettings(settings=one, error=error(replace(settings, **one))) for one in asked]
    return sorted(found, key=lambda tried: tried.error)


def _drawn(settings: JctSettings, draws: int) -> list[dict[str, Any]]:
    """Points of the grid, none twice, as far as it has them."""
    chance = np.random.default_rng(settings.seed)
    sizes = [len(values) for values in GRID.values()]
    places = chance.choice(int(np.prod(sizes)), size=min(draws, int(np.prod(sizes))), replace=False)
    return [
        {name: values[at] for (name, values), at in zip(GRID.items(), np.unravel_index(place, sizes), strict=True)}
        for place in places
    ]


def main() -> int:
    """One trace."""
    from benchmarks.keeping import keep, make_parser
    from benchmarks.public_traces import read

    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--search", type=int, default=0, help="settings drawn from the grid (default none)")
    options = parser.parse_args()
    trace, settings = read(options.trace), JctSettings()
    held = held_back(trace) if options.search else None
    tried = search(held, settings, options.search) if held else []
    found = {"usual": errors(trace), "tried": [vars(one) for one in tried]}
    if tried:
        found["best"] = errors(trace, replace(settings, **tried[0].settings))
    if not options.json:
        print(*(f"{name}: {value}" for name, value in found.items()), sep="\n")
    keep(found, options)
    return 0


if __name__ == "__main__":
    from benchmarks.keeping import finish

    finish(main)

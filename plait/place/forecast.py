"""Predictions for a whole trace that never look ahead, and how good they are on its last tenth.

The predictor's settings are found by random grid search, as Arnold (arXiv 2509.15940) tunes its own: drawn
from a grid, and judged on the last jobs of what a model may learn from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import DataError
from plait.place.conformal import JobTimes, follow
from plait.place.features import Features, features
from plait.place.groups import labels_of
from plait.place.jct import BUCKET, FEWEST, LONGEST, Forecast, JctSettings, Predictor, fit, from_history
from plait.place.traces.table import Ints, Trace

Floats = NDArray[np.float64]
Progress = Callable[[str], None]
BLOCKS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
"""Shares of the jobs after which a model is fitted anew, to those that have ended by then."""


FEWEST_SURE, SURE = 200, 0.03
"""Jobs of a group of which a share of late ones tells anything; how far it may be from what is promised."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Seconds of each job of a trace, (J,), by what was known when it was submitted. mean: of 10-minute
    buckets; upper: the quantile, calibrated."""

    mean: Floats
    upper: Floats


def names_of(trace: Trace) -> dict[str, tuple[str, ...]]:
    """What the codes of its categories mean."""
    return {name: category.names for name, category in trace.categories.items()}


def log_seconds(trace: Trace) -> Floats:
    """What its jobs took."""
    return np.log(np.maximum(1.0, trace.duration))


def walk_forward(trace: Trace, settings: JctSettings | None = None, progress: Progress | None = None) -> Predicted:
    """Predict every job by a model of jobs that had ended before its block began."""
    settings, told = replace(settings or JctSettings(), bags=0), progress or (lambda _: None)
    told(f"{len(trace)} jobs: what was known when each was submitted")
    known, logs = features(trace), log_seconds(trace)
    cuts = [int(share * len(trace)) for share in BLOCKS] + [len(trace)]
    parts = [from_history(_rows(known, slice(0, cuts[0])), settings.level)]
    bounds = [parts[0].bound]
    for number, (first, last) in enumerate(pairwise(cuts), 1):
        block = _rows(known, slice(first, last))
        past, ended = _so_far(trace, first)
        if ended.sum() < FEWEST or first == last:
            parts.append(from_history(block, settings.level))
            bounds.append(parts[-1].bound)
            continue
        told(f"model {number} of {len(cuts) - 1}: {ended.sum()} ended jobs")
        model = fit(_rows(known, slice(0, first)), past, ended, settings, names_of(trace))
        parts.append(model.predict(block, names_of(trace)))
        bounds.append(model.raised(parts[-1].bound, labels_of(block, names_of(trace))))
    whole, labels = Forecast.join(parts), labels_of(known, names_of(trace))
    upper, _ = follow(
        JobTimes(trace.submit, trace.begin, logs), np.concatenate(bounds), labels, level=settings.level, margins={}
    )
    return Predicted(
        mean=whole.buckets * BUCKET,
        upper=np.exp(np.minimum(upper, LONGEST)),
    )


@dataclass(frozen=True, kw_only=True)
class GroupLate:
    """Jobs of a cluster and GPU count (or of either): how many had ended before the test, how many were
    tested, the share of these that ran longer than the upper quantile."""

    kind: str
    group: str
    ended: int
    tested: int
    late: float


@dataclass(frozen=True, kw_only=True)
class ForecastAccuracy:
    """How a model of the first ``1 - test`` of the jobs does on the rest.

    rmse: by unit and by predictor (``model``; means of the training part: ``constant``, of a ``group``, of a
    number of ``gpus``, of ``group_gpus``). late: share of jobs that ran longer than the upper quantile, by
    way (``online`` is what the queue uses, ``split`` never learns after the fit, ``raw`` is LightGBM's own,
    ``constant`` and ``group`` are quantiles of the training part). groups: late jobs of every group of which
    ``FEWEST_SURE`` had ended and as many were tested; sure: whether all of these are within ``SURE`` of what
    is promised. tried: settings of a search, the best first.
    """

    jobs: int
    tested: int
    fitted: int
    rmse: dict[str, dict[str, float]]
    late: dict[str, float]
    spread: float
    groups: tuple[GroupLate, ...] = ()
    sure: bool = False
    tried: tuple[TriedSettings, ...] = ()


def assess(
    trace: Trace,
    settings: JctSettings | None = None,
    test: float = 0.1,
    progress: Progress | None = None,
    *,
    draws: int = 0,
) -> tuple[Predictor, ForecastAccuracy]:
    """Fit to the first jobs, all that had ended when the last ones began to arrive, and test on those.

    draws: so many settings of a grid are tried, on the last tenth of the first jobs, and the best are used.
    The error of the settings as they were is reported beside (``untuned``). Raises DataError where too few
    jobs have ended for a model.
    """
    settings, told = settings or JctSettings(), progress or (lambda _: None)
    told(f"{len(trace)} jobs: what was known when each was submitted")
    known, logs = features(trace), log_seconds(trace)
    cut = int((1 - test) * len(trace))
    (past, over), rest = _so_far(trace, cut), np.arange(cut, len(trace))
    ended, before = np.flatnonzero(over), _rows(known, slice(0, cut))
    if len(ended) < FEWEST or not len(rest):
        raise DataError(
            f"{trace.name}: {len(ended)} jobs ended before the last {test:.0%} arrived; a model needs {FEWEST}."
        )
    held = _held_back(trace, known, logs, cut) if draws else None
    usual, tried = settings, search(held, settings, draws, told) if held else []
    if tried:
        settings = replace(settings, **tried[0].settings)
    told(f"fitting to {len(ended)} jobs")
    model = fit(before, past, over, settings, names_of(trace))
    forecast = model.predict(_rows(known, rest), names_of(trace))
    labels = {kind: np.asarray(own, str) for kind, own in labels_of(known, names_of(trace)).items()}
    tested = {kind: own[rest].tolist() for kind, own in labels.items()}
    bounds, margins = follow(
        JobTimes(trace.submit[rest], trace.begin[rest], logs[rest]), forecast.bound, tested,
        level=settings.level, margins=model.margins,
    )  # fmt: skip
    truth = logs[rest]
    codes = {kind: np.unique(own, return_inverse=True)[1].astype(np.int64) for kind, own in labels.items()}
    code, level = codes.get("group", codes["all"]), settings.level
    late = {
        "online": float((truth > bounds).mean()),
        "split": float((truth > model.raised(forecast.bound, tested)).mean()),
        "raw": float((truth > forecast.bound).mean()),
        "constant": float((truth > np.quantile(logs[ended], level)).mean()),
        "group": float((truth > _by_group(code, logs, ended, rest, level)).mean()),
    }
    rmse = {"ln seconds": _rmse(truth, forecast.log, logs, ended, rest, codes)}
    if tried:
        other = fit(before, past, over, usual, names_of(trace)).predict(_rows(known, rest), names_of(trace))
        rmse["ln seconds"]["untuned"] = float(np.sqrt(np.mean((other.log - truth) ** 2)))
    for hours in (4, 24):
        cap = hours * 3600 / BUCKET
        told(f"fitting 10-minute buckets up to {hours} h")
        other = replace(settings, horizon=cap, bags=0)
        own = model if cap == settings.horizon else fit(before, past, over, other, names_of(trace))
        said = own.predict(_rows(known, rest), names_of(trace)).buckets
        counted = np.minimum(np.exp(logs) / BUCKET, cap)
        rmse[f"10-minute buckets, at most {hours} h"] = _rmse(counted[rest], said, counted, ended, rest, codes)
    groups = _late_groups(labels, truth > bounds, ended, rest)
    sure = bool(groups) and all(abs(one.late - (1 - level)) <= SURE for one in groups)
    report = ForecastAccuracy(
        jobs=len(trace),
        tested=len(rest),
        fitted=len(ended),
        rmse=rmse,
        late=late,
        spread=float(forecast.spread.mean()),
        groups=groups,
        sure=sure,
        tried=tuple(tried),
    )
    counts = Counter(labels[list(labels)[-1]][ended].tolist())
    known_well = tuple(sorted(group for group, count in counts.items() if count >= FEWEST_SURE)) if sure else ()
    return replace(model, margins=margins, sure=known_well), report


def _late_groups(
    labels: Mapping[str, NDArray[Any]], late: NDArray[np.bool_], ended: NDArray[np.int64], rest: NDArray[np.int64]
) -> tuple[GroupLate, ...]:
    found: list[GroupLate] = []
    for kind, own in labels.items():
        before = Counter(own[ended].tolist())
        for group in np.unique(own[rest]).tolist() if kind != "all" else ():
            here = own[rest] == group
            if min(before[group], int(here.sum())) >= FEWEST_SURE:
                found.append(
                    GroupLate(
                        kind=kind,
                        group=group,
                        ended=before[group],
                        tested=int(here.sum()),
                        late=float(late[here].mean()),
                    )
                )
    return tuple(found)


def _held_back(trace: Trace, known: Features, logs: Floats, cut: int) -> HeldBack | None:
    """The last tenth of the first ``cut`` jobs, to judge settings by those of it that had ended by then; None
    where too few had ended before it."""
    held = int(0.9 * cut)
    past, ended = _so_far(trace, held)
    _, over = _so_far(trace, cut)
    truth = np.where(over[held:], logs[held:cut], np.nan)
    if ended.sum() < FEWEST:
        return None
    return HeldBack(known=_rows(known, slice(0, cut)), past=past, ended=ended, truth=truth, names=names_of(trace))


def _rmse(
    truth: Floats, said: Floats, values: Floats, ended: NDArray[np.int64], rest: NDArray[np.int64],
    codes: Mapping[str, Ints],
) -> dict[str, float]:  # fmt: skip
    kinds = {"constant": "all", "group": "group", "gpus": "all_gpus", "group_gpus": "group_gpus"}
    guesses = {"model": said} | {
        name: _by_group(codes.get(kind, codes["all_gpus" if "gpus" in kind else "all"]), values, ended, rest, None)
        for name, kind in kinds.items()
    }
    return {name: float(np.sqrt(np.mean((guess - truth) ** 2))) for name, guess in guesses.items()}


def _by_group(
    code: Ints, values: Floats, ended: NDArray[np.int64], rest: NDArray[np.int64], level: float | None
) -> Floats:
    """Mean, or quantile, of the group's ended jobs; of all where it has none."""

    def take(part: Floats) -> float:
        return float(part.mean() if level is None else np.quantile(part, level))

    found = np.full(len(rest), take(values[ended]))
    for one in np.unique(code[rest]):
        own = values[ended][code[ended] == one]
        if len(own):
            found[code[rest] == one] = take(own)
    return found


def _rows(known: Features, rows: slice | NDArray[np.int64]) -> Features:
    return replace(known, matrix=known.matrix[rows])


def _so_far(trace: Trace, cut: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Log seconds that the jobs before ``cut`` had run when it was submitted, and which of them had ended."""
    now = trace.submit[cut] if cut < len(trace) else np.inf
    ran = np.minimum(trace.duration[:cut], now - trace.begin[:cut])
    return np.log(np.maximum(1.0, ran)), trace.end[:cut] <= now


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
        missed = model.boosted(rest, held.names)[0] - held.truth
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

"""Predictions for a whole trace that never look ahead, and their accuracy on its last tenth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import DataError
from plait.core.base.text import counted
from plait.formats.job_traces.table import Ints, Trace
from plait.place.queue.conformal import JobTimes, follow
from plait.place.queue.features import Features, features
from plait.place.queue.jct import (
    BUCKET,
    FEWEST,
    LONGEST,
    Forecast,
    JctSettings,
    Predictor,
    fit,
    from_history,
    labels_of,
)

Floats = NDArray[np.float64]
Progress = Callable[[str], None]
BLOCKS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
"""Fractions of the jobs after which a model is fitted anew, to the jobs that have ended by then."""


FEWEST_SURE, SURE = 200, 0.03
"""FEWEST_SURE: minimum number of jobs for a group's share of late jobs to be meaningful. SURE:
maximum deviation of that share from the promised one."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted run times of each job of a trace in seconds, (J,), from what was known at its
    submission. mean: the mean, in whole 10-minute buckets. upper: the calibrated upper quantile."""

    mean: Floats
    upper: Floats


def names_of(trace: Trace) -> dict[str, tuple[str, ...]]:
    """Return the texts (names of users, groups, ...) behind the codes of each categorical
    feature."""
    return {name: category.names for name, category in trace.categories.items()}


def log_seconds(trace: Trace) -> Floats:
    """Return ln of the seconds that each job ran, (J,)."""
    return np.log(np.maximum(1.0, trace.duration))


def walk_forward(trace: Trace, settings: JctSettings | None = None, progress: Progress | None = None) -> Predicted:
    """Return predictions for every job of a trace, block by block: each block by a model of the
    jobs that had ended before the block began. progress: called with (jobs done, number of jobs).
    """
    settings = replace(settings or JctSettings(), bags=0)
    told: Progress = progress or (lambda _: None)
    told(f"{counted(len(trace), 'job')}: what was known when each was submitted")
    known, logs = features(trace), log_seconds(trace)
    cuts = [int(share * len(trace)) for share in BLOCKS] + [len(trace)]
    parts = [from_history(rows_of(known, slice(0, cuts[0])), settings.level)]
    bounds = [parts[0].bound]
    for number, (first, last) in enumerate(pairwise(cuts), 1):
        block = rows_of(known, slice(first, last))
        past, ended = observed_until(trace, first)
        if ended.sum() < FEWEST or first == last:
            parts.append(from_history(block, settings.level))
            bounds.append(parts[-1].bound)
            continue
        told(f"model {number} of {len(cuts) - 1}: {ended.sum()} ended jobs")
        model = fit(rows_of(known, slice(0, first)), past, ended, settings, names_of(trace))
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
    """Late jobs of one group: a cluster and GPU count, or either. ended: jobs that had ended before
    the test. tested: jobs tested. late: share of these that ran longer than the upper quantile."""

    kind: str
    group: str
    ended: int
    tested: int
    late: float


@dataclass(frozen=True, kw_only=True)
class ForecastAccuracy:
    """Accuracy on the last jobs of a model that was fitted to the first ``1 - test`` of them.

    rmse: root mean square error in log seconds, of the ``model`` and of one mean for all
    (``constant``). late: share of jobs that ran longer than the upper quantile. groups: late jobs
    of every group with at least ``FEWEST_SURE`` ended and as many tested jobs. sure: True if all of
    these are within ``SURE`` of the promised share.
    """

    jobs: int
    tested: int
    fitted: int
    rmse: dict[str, dict[str, float]]
    late: dict[str, float]
    spread: float
    groups: tuple[GroupLate, ...] = ()
    sure: bool = False


@dataclass(frozen=True, kw_only=True)
class Split:
    """A trace cut in two by order of submission. known, logs: features and log seconds of all jobs.
    past: for jobs before the cut, log seconds that they had run at the cut. over: True for those
    that had ended by then. ended: numbers of these. rest: numbers of the jobs after the cut."""

    known: Features
    logs: Floats
    past: Floats
    over: NDArray[np.bool_]
    ended: Ints
    rest: Ints

    @classmethod
    def of(cls, trace: Trace, test: float = 0.1) -> Split:
        """Return a trace cut in two. test: share of the jobs after the cut, to test a model on.
        Raises DataError if too few jobs had ended at the cut."""
        cut = int((1 - test) * len(trace))
        past, over = observed_until(trace, cut)
        if over.sum() < FEWEST or cut == len(trace):
            problem = f"{over.sum()} jobs ended before the last {test:.0%} arrived; a model needs {FEWEST}"
            raise DataError(f"{trace.name}: {problem}.")
        return cls(known=features(trace), logs=log_seconds(trace), past=past, over=over,
                   ended=np.flatnonzero(over), rest=np.arange(cut, len(trace)))  # fmt: skip

    def fit(self, settings: JctSettings, names: dict[str, tuple[str, ...]]) -> Predictor:
        """Return a model fitted to the jobs before the cut. names: the texts behind the codes of
        features."""
        return fit(rows_of(self.known, slice(0, len(self.past))), self.past, self.over, settings, names)

    @property
    def tested(self) -> Features:
        """Features of the jobs to test on."""
        return rows_of(self.known, self.rest)


def assess(
    trace: Trace, settings: JctSettings | None = None, test: float = 0.1, progress: Progress | None = None
) -> tuple[Predictor, ForecastAccuracy]:
    """Return a model fitted to the first jobs (those that had ended when the test jobs began to
    arrive), and its accuracy on the test jobs. Raises DataError if too few jobs have ended for a
    model."""
    settings, names = settings or JctSettings(), names_of(trace)
    told: Progress = progress or (lambda _: None)
    told(f"{counted(len(trace), 'job')}: what was known when each was submitted")
    split = Split.of(trace, test)
    ended, rest, logs = split.ended, split.rest, split.logs
    told(f"fitting to {len(ended)} jobs")
    model = split.fit(settings, names)
    forecast, truth = model.predict(split.tested, names), logs[rest]
    labels = {kind: np.asarray(own, str) for kind, own in labels_of(split.known, names).items()}
    bounds, margins = follow(
        JobTimes(trace.submit[rest], trace.begin[rest], truth), forecast.bound,
        {kind: own[rest].tolist() for kind, own in labels.items()}, level=settings.level, margins=model.margins,
    )  # fmt: skip
    groups = _late_groups(labels, truth > bounds, ended, rest)
    sure = bool(groups) and all(abs(one.late - (1 - settings.level)) <= SURE for one in groups)
    report = ForecastAccuracy(
        jobs=len(trace), tested=len(rest), fitted=len(ended),
        rmse={"ln seconds": {"model": rms(forecast.log - truth), "constant": rms(logs[ended].mean() - truth)}},
        late={"online": float((truth > bounds).mean())}, spread=float(forecast.spread.mean()), groups=groups, sure=sure,
    )  # fmt: skip
    counts = Counter[str](labels[list(labels)[-1]][ended].tolist())
    known_well = tuple(sorted(group for group, count in counts.items() if count >= FEWEST_SURE)) if sure else ()
    return replace(model, margins=margins, sure=known_well), report


def rms(missed: Floats) -> float:
    """Return the root mean square of prediction errors, in their unit."""
    return float(np.sqrt(np.mean(missed**2)))


def _late_groups(
    labels: Mapping[str, NDArray[Any]], late: NDArray[np.bool_], ended: Ints, rest: Ints
) -> tuple[GroupLate, ...]:
    found: list[GroupLate] = []
    for kind, own in labels.items():
        before = Counter[str](own[ended].tolist())
        for group in np.unique(own[rest]).tolist() if kind != "all" else ():
            here = own[rest] == group
            known, tested = before[group], int(here.sum())
            if min(known, tested) >= FEWEST_SURE:
                share = float(late[here].mean())
                found.append(GroupLate(kind=kind, group=group, ended=known, tested=tested, late=share))
    return tuple(found)


def rows_of(known: Features, rows: slice | Ints) -> Features:
    """Return the features of the jobs at ``rows`` alone."""
    return replace(known, matrix=known.matrix[rows])


def observed_until(trace: Trace, cut: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return (log seconds that the jobs before ``cut`` had run when job ``cut`` was submitted, True
    for those that had ended)."""
    now = trace.submit[cut] if cut < len(trace) else np.inf
    ran = np.minimum(trace.duration[:cut], now - trace.begin[:cut])
    return np.log(np.maximum(1.0, ran)), trace.end[:cut] <= now

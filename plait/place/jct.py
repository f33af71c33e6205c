"""How long a job will run (JCT: job completion time), from what is known at its submission.

Gradient boosting (LightGBM) over ``features``: bagged models of log seconds (their spread is the
uncertainty), one of 10-minute buckets, and one of an upper quantile, corrected to be exceeded as often as
it says (``conformal``). Log seconds are half the bags' and half the means of a job's group (``groups``): what
boosting knows more of a trace it loses where the trace changes, and the mean of two that err differently errs
less. Newer jobs count more, and counts that only grow are no features: they are a clock. With few jobs,
running statistics alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.place.conformal import Labels, Margins, first_margins, margin_of
from plait.place.features import Features
from plait.place.groups import GroupMeans, labels_of

Floats = NDArray[np.float64]
BUCKET = 600.0
"""Seconds: the paper's label is the number of 10-minute intervals."""
FEWEST = 500
"""Ended jobs from which on there is a model; with fewer, running statistics speak."""
FADING = 0.5
"""Of the time since the first job, after which a job counts half."""
LONGEST = 20.0
"""Log seconds; nothing runs for 15 years."""


@dataclass(frozen=True, kw_only=True)
class JctSettings:
    """level: of the upper quantile. horizon: buckets that the mean in buckets counts to (24 h): longer is as
    long. bags: models of log seconds (none: no such means). threads: two take ten times as long as one where
    others use the processors too, since they wait for each other at every leaf. The rest are LightGBM's.
    """

    level: float = 0.9
    horizon: float = 144.0
    bags: int = 5
    rounds: int = 120
    threads: int = 1
    leaves: int = 31
    learning_rate: float = 0.06
    min_leaf: int = 40
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Of each job, (J,). log: mean log seconds; spread: standard deviation of that over bags; buckets: mean
    10-minute buckets, up to the horizon; bound: the upper quantile in log seconds, before its margin."""

    log: Floats
    spread: Floats
    buckets: Floats
    bound: Floats

    @classmethod
    def join(cls, parts: Sequence[Forecast]) -> Forecast:
        """One after the other."""
        return cls(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in cls.__annotations__})


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A fitted model: LightGBM boosters and the columns that they expect. margins: what the upper quantile is
    raised by at first, in log seconds, by level and group. sure: groups of cluster and GPU count for each of
    which the upper quantile is promised, not only for all jobs together."""

    settings: JctSettings
    columns: tuple[str, ...]
    names: dict[str, tuple[str, ...]]
    bags: tuple[Any, ...]
    mean: Any
    upper: Any
    groups: GroupMeans
    margins: Margins
    sure: tuple[str, ...] = ()

    def predict(self, known: Features, categories: dict[str, tuple[str, ...]]) -> Forecast:
        """Of jobs with these features. categories: what the codes in them mean; a name that the model has
        never seen is no name."""
        matrix, logs = self._matrix(known, categories), self.boosted(known, categories)
        means = self.groups.predict(labels_of(known, categories), known)
        return Forecast(
            log=np.minimum((logs.mean(axis=0) + means) / 2, LONGEST),
            spread=logs.std(axis=0),
            buckets=np.clip(self._run(self.mean, matrix), 0, self.settings.horizon),
            bound=np.minimum(self._run(self.upper, matrix), LONGEST),
        )

    def boosted(self, known: Features, categories: dict[str, tuple[str, ...]]) -> Floats:
        """Log seconds by every bag, (bags, J)."""
        matrix = self._matrix(known, categories)
        return np.array([self._run(bag, matrix) for bag in self.bags] or [np.full(len(matrix), np.nan)])

    def raised(self, bound: Floats, labels: Labels) -> Floats:
        """The upper quantile with its margins."""
        return bound + margin_of(self.margins, labels)

    def _run(self, booster: Any, matrix: Floats) -> Floats:
        if not len(matrix):
            return np.zeros(0)
        return np.asarray(booster.predict(matrix, num_threads=self.settings.threads), float)

    def _matrix(self, known: Features, categories: dict[str, tuple[str, ...]]) -> Floats:
        columns = []
        for name in self.columns:
            if name not in known.names:
                columns.append(np.full(len(known.matrix), np.nan))
                continue
            column = known.column(name)
            if name in self.names:
                column = _recode(column, categories[name], self.names[name])
            columns.append(column)
        return np.column_stack(columns)


def fit(
    known: Features,
    logs: Floats,
    ended: NDArray[np.bool_],
    settings: JctSettings,
    categories: dict[str, tuple[str, ...]],
) -> Predictor:
    """Fit to jobs in the order of their submission. logs: what they took, in log seconds; where one has not
    ended, what it has run for: it counts for the margin alone.

    The upper quantile's model sees the first 85 %; the rest says what margin it needs.
    """
    gbm = import_module("lightgbm")
    own = {name: categories[name] for name in known.categorical}
    where = [known.names.index(name) for name in known.categorical]

    newer = 0.5 ** (np.linspace(1, 0, len(logs)) / FADING)

    def train(target: Floats, rows: NDArray[np.bool_] = ended, weight: Floats | None = None, **more: Any) -> Any:
        data = gbm.Dataset(
            known.matrix[rows],
            target[rows],
            weight=None if weight is None else weight[rows],
            feature_name=[f"f{number}" for number in range(len(known.names))],
            categorical_feature=where,
            params={"verbosity": -1, "max_bin": 127, "num_threads": settings.threads},
        )
        return gbm.train(_parameters(settings) | more, data, num_boost_round=settings.rounds)

    no_clock = [float(not name.endswith(":count")) for name in known.names]
    bags = tuple(
        train(
            logs,
            weight=newer,
            objective="regression",
            bagging_fraction=0.7,
            bagging_freq=1,
            bagging_seed=settings.seed + bag,
            feature_contri=no_clock,
        )
        for bag in range(settings.bags)
    )
    buckets = np.minimum(np.exp(np.minimum(logs, 700.0)) / BUCKET, settings.horizon)
    steady = {  # squared buckets are noise where leaves are small
        "num_leaves": 15,
        "min_data_in_leaf": max(20, min(200, int(ended.sum()) // 20)),
        "feature_contri": no_clock,
    }
    late = np.arange(len(logs)) >= int(0.85 * len(logs))
    upper = train(logs, ended & ~late, objective="quantile", alpha=settings.level)
    bounds = np.asarray(upper.predict(known.matrix[late], num_threads=settings.threads), float)
    labels = labels_of(known, categories)

    def chosen(rows: NDArray[np.bool_]) -> Labels:
        return {name: np.asarray(own, str)[rows].tolist() for name, own in labels.items()}

    return Predictor(
        settings=settings,
        columns=known.names,
        names=own,
        bags=bags,
        mean=train(buckets, objective="regression", **steady),
        upper=upper,
        groups=GroupMeans.fit(chosen(ended), logs[ended]),
        margins=first_margins(logs[late], bounds, chosen(late), settings.level, ended[late]),
    )


def from_history(known: Features, level: float) -> Forecast:
    """Running statistics alone, the most particular that have seen enough; a job like none before gets
    ``LONGEST``."""
    kinds = [name.removesuffix(":q90") for name in known.names if name.endswith(":q90")]
    log, bound = np.full(len(known.matrix), np.nan), np.full(len(known.matrix), np.nan)
    for fewest in (20, 1):
        for kind in reversed(kinds):  # from particular to general
            use = np.isnan(log) & (known.column(f"{kind}:count") >= fewest)
            log = np.where(use, known.column(f"{kind}:mean"), log)
            bound = np.where(use, known.column(f"{kind}:q90" if level >= 0.9 else f"{kind}:median"), bound)
    log, bound = (np.where(np.isnan(one), LONGEST, one) for one in (log, bound))
    return Forecast(log=log, spread=np.zeros(len(log)), buckets=np.exp(log) / BUCKET, bound=bound)


def _parameters(settings: JctSettings) -> dict[str, Any]:
    return {
        "num_leaves": settings.leaves,
        "learning_rate": settings.learning_rate,
        "min_data_in_leaf": settings.min_leaf,
        "feature_fraction": 0.8,
        "cat_smooth": 20.0,
        "seed": settings.seed,
        "num_threads": settings.threads,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }


def _recode(column: Floats, names: tuple[str, ...], wanted: tuple[str, ...]) -> Floats:
    """Codes of one list of names as codes of another."""
    place = {name: float(number) for number, name in enumerate(wanted)}
    table = np.array([place.get(name, np.nan) for name in names] + [np.nan])
    return table[np.where(np.isnan(column), len(names), column).astype(np.int64)]

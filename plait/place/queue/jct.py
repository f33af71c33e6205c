"""Prediction of a job's run time (JCT: job completion time) from what is known at its submission.

Gradient boosting (LightGBM) over ``features``: bagged models of log seconds, whose spread is the
uncertainty; one model of 10-minute buckets; and one of an upper quantile, corrected to be exceeded
at the promised rate (``conformal``). Log seconds are the mean of the bags' prediction and of the
job's group means (``GroupMeans``). Boosting knows a trace better, but loses that where the trace
changes; the mean of two different errors is smaller. Newer jobs have more weight. Counts that only
grow are not used as features, since they would act as a clock. With few jobs, running statistics
are used alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DataError
from plait.core.base.files import contents_within, reason_of, replacing
from plait.place.queue.conformal import Labels, Margins, first_margins, margin_of
from plait.place.queue.features import WINDOW, Features

Floats = NDArray[np.float64]
BUCKET = 600.0
"""Seconds of a bucket: the paper's label is the number of 10-minute intervals."""
FEWEST = 500
"""Minimum number of ended jobs for a model; with fewer, running statistics are used."""
HALF_WEIGHT_AGE = 0.5
"""Age at which a job's weight is one half, as a fraction of the time since the first job."""
LONGEST = 20.0
"""Maximum log seconds: no job runs for 15 years."""
PRIOR_JOBS = 20.0
"""Weight, in jobs, of the surrounding group's mean."""
VERSION = 2
ABOUT = "model.json"
AGAIN = "Fit one with plait queue fit, or name its folder."
LARGEST = 64 << 20
"""Maximum bytes of a file of trees: ten times the size for a trace of a million jobs."""


@dataclass(frozen=True, kw_only=True)
class JctSettings:
    """Settings of a model.

    level: of the upper quantile. horizon: maximum of the mean in buckets (24 h); longer jobs count
    as this long. bags: number of models of log seconds (0: none). threads: two take ten times as
    long as one if other processes use the CPUs, since they wait for each other at every leaf. The
    other settings are LightGBM's.
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
    """Predictions of jobs, (J,) each. log: mean log seconds. spread: its standard deviation over
    bags. buckets: mean number of 10-minute buckets, up to the horizon. bound: the upper quantile in
    log seconds, without its margin."""

    log: Floats
    spread: Floats
    buckets: Floats
    bound: Floats

    @classmethod
    def join(cls, parts: Sequence[Forecast]) -> Forecast:
        """Return several forecasts concatenated."""
        return cls(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in cls.__annotations__})


def labels_of(known: Features, categories: Mapping[str, tuple[str, ...]]) -> Labels:
    """Return each job's group for every grouping (all, by cluster, by GPUs, both), the most general
    first. "": unknown cluster. categories: texts behind the features' codes."""
    gpus = [f"{count:g}" for count in (known.column("gpus").tolist() if "gpus" in known.names else ())]
    gpus = gpus or [""] * len(known.matrix)
    labels = {"all": [""] * len(gpus), "all_gpus": gpus}
    if "group" in known.names:
        names = categories["group"]
        own = ["" if np.isnan(code) else names[int(code)] for code in known.column("group").tolist()]
        labels |= {"group": own, "group_gpus": [f"{name} {count}" for name, count in zip(own, gpus, strict=True)]}
    return labels


@dataclass(frozen=True, kw_only=True)
class GroupMeans:
    """Mean log seconds by kind and group: jobs of one number of GPUs, of one cluster, of both.

    A group's mean is shrunk towards the mean of the group around it, with the weight of
    ``PRIOR_JOBS`` jobs, since most groups are small. The mean of the last ended jobs (``features``) is shrunk
    likewise, towards the mean of all time.
    """

    means: Mapping[str, Mapping[str, float]]

    @classmethod
    def fit(cls, labels: Labels, logs: Floats) -> GroupMeans:
        """Return the mean log seconds of jobs by grouping and group. logs: log seconds of ended
        jobs."""
        around, found = np.full(len(logs), float(logs.mean())), dict[str, dict[str, float]]()
        for kind in _chain(labels):
            groups, where = np.unique(np.asarray(labels[kind], str), return_inverse=True)
            moved = np.bincount(where, logs - around) / (np.bincount(where) + (PRIOR_JOBS if found else 0.0))
            around = around + moved[where]
            means = np.bincount(where, around) / np.bincount(where)
            found[kind] = dict(zip(groups.tolist(), means.tolist(), strict=True))
        return cls(means=found)

    def predict(self, labels: Labels, known: Features) -> Floats:
        """Return predicted log seconds, (J,): half the mean of all time, half that of the last
        ended jobs."""
        found = np.array([self._of(labels, job) for job in range(len(known.matrix))], float)
        kind = _chain(labels)[-1]
        if f"{kind}:mean" not in known.names:
            return found
        count = np.minimum(known.column(f"{kind}:count"), WINDOW)
        recent = np.where(count > 0, known.column(f"{kind}:mean"), found)
        return (found + (count * recent + PRIOR_JOBS * found) / (count + PRIOR_JOBS)) / 2

    def _of(self, labels: Labels, job: int) -> float:
        """Return the mean log seconds of the most specific group of a job that is known."""
        for kind in reversed(_chain(labels)):
            if (mean := self.means.get(kind, {}).get(labels[kind][job])) is not None:
                return mean
        return self.means["all"][""]


def _chain(labels: Labels) -> tuple[str, ...]:
    """Return the groupings of jobs, each within the one before it."""
    return ("all", "group", "group_gpus") if "group" in labels else ("all", "all_gpus")


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A fitted model: LightGBM boosters and the columns that they expect. margins: initial margins
    of the upper quantile, in log seconds, by level and group. sure: groups (cluster and GPU count)
    for which the upper quantile's rate is promised, not only for all jobs together."""

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
        """Return the forecast of jobs with these features. categories: texts behind the features'
        codes; a text that the model was not fitted to counts as missing."""
        matrix, logs = self._matrix(known, categories), self.boosted(known, categories)
        means = self.groups.predict(labels_of(known, categories), known)
        return Forecast(
            log=np.minimum((logs.mean(axis=0) + means) / 2, LONGEST),
            spread=logs.std(axis=0),
            buckets=np.clip(self._run(self.mean, matrix), 0, self.settings.horizon),
            bound=np.minimum(self._run(self.upper, matrix), LONGEST),
        )

    def boosted(self, known: Features, categories: dict[str, tuple[str, ...]]) -> Floats:
        """Return the log seconds by every bag, (bags, J)."""
        matrix = self._matrix(known, categories)
        return np.array([self._run(bag, matrix) for bag in self.bags] or [np.full(len(matrix), np.nan)])

    def raised(self, bound: Floats, labels: Labels) -> Floats:
        """Return the upper quantile in log seconds, (J,), with the margins of each job's groups
        added to ``bound``."""
        return bound + margin_of(self.margins, labels)

    def _run(self, booster: Any, matrix: Floats) -> Floats:
        if not len(matrix):
            return np.zeros(0)
        return np.asarray(booster.predict(matrix, num_threads=self.settings.threads), float)

    def _matrix(self, known: Features, categories: dict[str, tuple[str, ...]]) -> Floats:
        columns = list[Floats]()
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
    """Return a model fitted to jobs in the order of their submission. logs: log seconds that they
    ran. ended: False for a job that still runs; its time so far counts for the margin alone.
    categories: texts behind the features' codes.

    The upper quantile's model is fitted to the first 85 %; the other jobs set its margin."""
    gbm = import_module("lightgbm")
    own = {name: categories[name] for name in known.categorical}
    where = [known.names.index(name) for name in known.categorical]

    newer = 0.5 ** (np.linspace(1, 0, len(logs)) / HALF_WEIGHT_AGE)

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
    steady: dict[str, Any] = {  # the squared error of buckets is noisy if leaves are small
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
    """Return forecasts from running statistics alone, of the most specific group with enough jobs.
    level: of the upper quantile. A job unlike any before gets ``LONGEST``."""
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
    """Return the codes in ``column``, which number ``names``, as codes that number ``wanted``; NaN
    for a name that ``wanted`` lacks."""
    place = {name: float(number) for number, name in enumerate(wanted)}
    table = np.array([place.get(name, np.nan) for name in names] + [np.nan])
    return table[np.where(np.isnan(column), len(names), column).astype(np.int64)]


# ---- files ----


def save(model: Predictor, folder: Path) -> None:
    """Write a model into a folder. ``model.json`` is written last, so a folder that has it is
    complete. Raises DataError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        for name, booster in _boosters(model).items():
            with replacing(folder / name) as partial:
                partial.write_text(booster.model_to_string())
        about = {
            "version": VERSION,
            "settings": asdict(model.settings),
            "columns": list(model.columns),
            "names": {name: list(names) for name, names in model.names.items()},
            "means": model.groups.means,
            "margins": model.margins,
            "sure": list(model.sure),
        }
        with replacing(folder / ABOUT) as partial:
            partial.write_text(json.dumps(about, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}. Choose another with --out.") from None


def load(folder: Path) -> Predictor:
    """Return the model in a folder that ``save`` has written. Raises DataError for any other
    folder, for another version, and for a damaged file."""
    if (folder / ABOUT).exists() and not (folder / ABOUT).is_file():
        raise DataError(f"{folder} holds no model of plait queue fit: its {ABOUT} is not a regular file. {AGAIN}")
    try:
        about = read_table(folder / ABOUT)
        if about["version"] != VERSION:
            raise DataError(f"{folder} was written in version {about['version']}; {VERSION} is read. {AGAIN}")
        settings = JctSettings(**about["settings"])
        return Predictor(
            settings=settings,
            columns=tuple(about["columns"]),
            names={name: tuple(names) for name, names in about["names"].items()},
            bags=tuple(_read(folder / f"log-{bag}.txt") for bag in range(settings.bags)),
            mean=_read(folder / "buckets.txt"),
            upper=_read(folder / "upper.txt"),
            groups=GroupMeans(means=_numbers(about["means"])),
            margins=_numbers(about["margins"]),
            sure=tuple(about["sure"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{folder} holds no model of plait queue fit: {' '.join(reason_of(error).split())}. {AGAIN}"
        ) from None


def _numbers(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {kind: {group: float(value) for group, value in own.items()} for kind, own in table.items()}


def _boosters(model: Predictor) -> dict[str, Any]:
    bags = {f"log-{number}.txt": bag for number, bag in enumerate(model.bags)}
    return {**bags, "buckets.txt": model.mean, "upper.txt": model.upper}


def _read(file: Path) -> Any:
    gbm = import_module("lightgbm")
    try:
        return gbm.Booster(model_str=contents_within(file, LARGEST).decode())
    except gbm.basic.LightGBMError as error:
        raise ValueError(f"{file.name}: {error}") from None

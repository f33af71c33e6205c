"""A cluster's constants refitted to steps that were really run on it (``plait calibrate``).

Every run is one measurement: the seconds of a step in the middle of it, under its plan or its configuration.
Constants stay near where they are, as far as their errors say; a few runs move what they agree on, and the
errors shrink. Who told a constant is the run whose seconds depend on it most.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plait.core.base.codec.json_text import DOCUMENT, parse_table
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within
from plait.core.base.numbers import shown
from plait.core.cluster.efficiency import SHARES
from plait.core.cluster.hardware import Cluster
from plait.core.job.plan import Plan
from plait.core.step.columns.points import Points
from plait.core.step.seconds.closed_form import step_seconds
from plait.plan.asking import point_of
from plait.plan.calibrate import FittedConstant, Predict, Scatter, calibrate
from plait.plan.constants import constant_of, timed_constants, with_constants

METRICS = "metrics.jsonl"
LEAST, MOST = 1e-9, 1e9
"""Seconds that a step may take."""
WARM = 3
"""First steps of a run that are left out."""
FEWEST = 3
"""Steps that must be left."""
LEAST_ERROR = 0.1
"""How far a constant may be off at least, for measured steps to be believed rather than where it came
from."""
NOISE = 0.05
"""Relative, of a step's median and of the closed form together."""
OUTLIER = 10.0
"""Runs are few and meant: only what is off by more than so many times ``NOISE`` pulls with bounded force."""
SMALLEST = 1e-12
KEPT = ("jitter", "step")
"""Constants that single runs say nothing about."""
SLOPE = 0.01
"""Relative change of a constant by which it is found which runs depend on it."""
TELLS = 0.1
"""Share of what all runs tell of a constant from which on a run is named for it."""


class TimedRun(Protocol):
    """A run whose steps were timed."""

    @property
    def folder(self) -> str:
        """Where it is from: a folder, or a log."""
        ...

    @property
    def seconds(self) -> float:
        """Of a step."""
        ...

    def predicted(self, cluster: Cluster) -> float:
        """Seconds of a step on a cluster, in closed form."""
        ...


def read_seconds(folder: Path) -> list[float]:
    """Of every step that the run in ``folder`` has recorded. Raises JobError for a folder that is no run, and
    naming the line of what cannot be."""
    file = folder / METRICS
    try:
        lines = contents_within(file, DOCUMENT).decode().splitlines()
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}", file=str(file), fix="Name a run's folder") from None
    except ValueError as error:
        raise JobError(f"is damaged: {error}", file=str(file)) from None
    return [_seconds(line, number, str(file)) for number, line in enumerate(lines, 1)]


def _seconds(line: str, number: int, file: str) -> float:
    """Of one step."""
    try:
        told = parse_table(line)["seconds"]
        seconds = float(told)
    except KeyError:
        raise JobError("is damaged: it has no seconds", file=file, key=f"line {number}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise JobError(f"is damaged: {error}", file=file, key=f"line {number}") from None
    if isinstance(told, bool) or not LEAST <= seconds <= MOST:
        problem = f"{shown(told)} are no seconds of a step"
        raise JobError(problem, file=file, key=f"line {number}", fix="Leave this run out, or train it again")
    return seconds


@dataclass(frozen=True)
class Recorded:
    """A run's plan, and seconds of a step: the median of those after the first."""

    folder: str
    plan: Plan
    seconds: float

    @staticmethod
    def read(folder: Path) -> Recorded:
        """Raises JobError for a folder that is no run, or one too short to tell anything."""
        plan = Plan.read(folder / "plan.json")
        if plan.job is None:
            raise JobError("was planned without a job file and says nothing of a cluster", file=str(folder))
        if len(set(plan.job.degrees)) > 1:
            raise JobError("has places that differ, which the closed form does not describe", file=str(folder))
        first = WARM + plan.job.train.batches.ramped
        left = read_seconds(folder)[first:]
        if len(left) < FEWEST:
            problem = f"has {len(left)} steps after the first {first}, which tell too little"
            raise JobError(problem, file=str(folder / METRICS), fix=f"Train at least {first + FEWEST} steps")
        return Recorded(str(folder), plan, statistics.median(left))

    @property
    def point(self) -> dict[str, int]:
        """Where the run stands in the strategy space."""
        assert self.plan.job is not None
        timed = {"p1": self.plan.strategy.p1, "p2": self.plan.strategy.p2}
        flat = int(self.plan.strategy.sequence_parallel)
        return point_of(self.plan.job) | timed | {"sequence_parallel": flat}

    def predicted(self, cluster: Cluster) -> float:
        """Seconds of a step on a cluster, in closed form."""
        load = self.plan.workload
        points = Points.of([self.point])
        asked = {"sequence": load.sequence, "precision": load.precision}
        return float(step_seconds(self.plan.model, points, cluster, **asked).total[0])


@dataclass(frozen=True)
class Refitted:
    """cluster: with the constants that were found. before, after: predicted seconds of every run. moved: by
    name, the old value and the new, of constants that moved by more than a hundredth. left: by name, the
    relative error before and after. told: by name, runs that tell it, the first most."""

    cluster: Cluster
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    moved: Mapping[str, tuple[float, float]]
    left: Mapping[str, tuple[float, float]]
    told: Mapping[str, Sequence[str]]


def refit(cluster: Cluster, runs: Sequence[TimedRun], *, date: str) -> Refitted:
    """The cluster as these runs know it. date: of the fit."""
    names = [name for name in timed_constants(cluster) if name not in KEPT]
    old = {name: max(constant_of(cluster, name).value, SMALLEST) for name in names}
    errors = {name: max(constant_of(cluster, name).error, LEAST_ERROR) for name in names}
    priors = {name: FittedConstant(value=old[name], error=errors[name], most=_most(name, old[name])) for name in names}

    def predicted(values: Mapping[str, float]) -> NDArray[np.float64]:
        changed = with_constants(cluster, {name: (value, 0.0) for name, value in values.items()}, source="", date=date)
        return _predict(changed, runs)

    measured = np.array([run.seconds for run in runs])
    found = calibrate(predicted, measured, priors, scatter=Scatter(noise=NOISE, outlier=OUTLIER))
    source = f"{_basis(runs)}, fitted from {cluster.name}"
    new = {name: (one.value, one.error) for name, one in found.constants.items()}
    moved = {name: (old[name], value) for name, (value, _) in new.items() if abs(value / old[name] - 1) > 0.01}
    changed = with_constants(cluster, {name: new[name] for name in moved}, source=source, date=date)
    left = {name: (errors[name], error) for name, (_, error) in new.items()}
    told = _told(found.values, predicted, runs)
    return Refitted(changed, _predict(cluster, runs), _predict(changed, runs), moved, left, told)


def _most(name: str, value: float) -> float:
    """Shares of a peak end at the peak."""
    return max(1.0, value) if name in SHARES or name.endswith(".share") else float("inf")


def _told(values: Mapping[str, float], predicted: Predict, runs: Sequence[TimedRun]) -> dict[str, list[str]]:
    """By constant, runs whose seconds depend on it."""
    base, found = predicted(values), dict[str, list[str]]()
    for name, value in values.items():
        slope = np.log(predicted({**values, name: value * (1 + SLOPE)}) / base) ** 2
        if slope.sum() > 0:
            share = slope / slope.sum()
            order = [int(at) for at in np.argsort(-share, kind="stable") if share[at] >= TELLS]
            found[name] = list(dict.fromkeys(runs[at].folder for at in order))
    return found


def _basis(runs: Sequence[TimedRun]) -> str:
    """What the constants rest on, in words."""
    return f"{len(runs)} recorded run{'s' * (len(runs) > 1)}"


def _predict(cluster: Cluster, runs: Sequence[TimedRun]) -> NDArray[np.float64]:
    return np.array([run.predicted(cluster) for run in runs])

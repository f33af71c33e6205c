"""Refits a cluster's constants to steps of real runs (``plait calibrate``).

Every run is one measurement: its median step time, under its plan or its configuration. Constants
stay near their values, as far as their errors hold them there. A few runs move the constants on
which they agree, and the errors shrink. A constant's source is the run whose seconds depend on it
most.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.core.base.codec.json_text import DOCUMENT, parse_table
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within
from plait.core.base.numbers import shown
from plait.core.cluster.efficiency import SHARES
from plait.core.cluster.hardware import Cluster, Device
from plait.core.job.plan import Plan
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import StrategyTable
from plait.core.step.seconds.closed_form import Options, step_seconds
from plait.formats.base.step_log import FEWEST, LEAST, MOST, WARM
from plait.plan.calibrate.fit import (
    FittedConstant,
    Predict,
    Scatter,
    calibrate,
    constant_of,
    timed_constants,
    with_constants,
)
from plait.plan.search.request import point_of

METRICS = "metrics.jsonl"
LEAST_ERROR = 0.1
"""Minimum relative error assumed for a constant, so that measured steps can move it away from its
source's value."""
NOISE = 0.05
"""Relative error of a step's median and of the closed form together."""
OUTLIER = 10.0
"""Multiple of ``NOISE`` beyond which a run pulls with bounded force. It is high since runs are few
and chosen on purpose."""
SMALLEST = 1e-12
KEPT = ("jitter", "step")
"""Constants that single runs cannot determine."""
AGAIN = "Leave this run out, or train it again"
SLOPE = 0.01
"""Relative change of a constant with which the runs' dependence on it is tested."""
MIN_INFORMATION_SHARE = 0.1
"""Minimum share of all runs' information on a constant for a run to be named as its source."""


class TimedRun(Protocol):
    """A run with measured step times."""

    @property
    def folder(self) -> str:
        """Origin of the run: a folder, or a log."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        ...

    def priced_step(self, device: Device) -> PricedStep:
        """Return the run's step as the closed form prices it on a device."""
        ...


class PricedStep(NamedTuple):
    """A run's step as input of the closed form. point: its strategy, as columns of
    ``StrategyTable``. sequence: tokens. options: what its framework and job change in the formulas;
    None: Plait's own."""

    point: dict[str, int]
    model: ModelSpec
    sequence: int
    precision: Precision
    options: Options | None = None


def predicted_seconds(cluster: Cluster, steps: Sequence[PricedStep]) -> NDArray[np.float64]:
    """Return the closed form's seconds per step of every run on a cluster, in the order of
    ``steps``: an array. Runs that differ only in their strategy are priced together."""
    found, kinds = np.zeros(len(steps)), list[PricedStep]()
    for one in steps:
        kinds += [one] if all(one[1:] != other[1:] for other in kinds) else []
    for kind in kinds:
        which = [at for at, one in enumerate(steps) if one[1:] == kind[1:]]
        points = StrategyTable.of([steps[at].point for at in which])
        found[which] = step_seconds(
            kind.model, points, cluster, sequence=kind.sequence, precision=kind.precision, options=kind.options
        ).total
    return found


def read_seconds(folder: Path) -> list[float]:
    """Return the seconds of every step that the run in ``folder`` recorded. Raises JobError if the
    folder is not a run; for an invalid record the error names its line."""
    file = folder / METRICS
    try:
        lines = contents_within(file, DOCUMENT).decode().splitlines()
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}", file=str(file), fix="Name a run's folder") from None
    except ValueError as error:
        raise JobError(f"is damaged: {error}", file=str(file), fix=AGAIN) from None
    return [_seconds(line, number, str(file)) for number, line in enumerate(lines, 1)]


def _seconds(line: str, number: int, file: str) -> float:
    """Return the seconds of a step from its line of metrics.jsonl. number: of the line, for errors.
    Raises JobError for a line without valid seconds."""
    try:
        told = parse_table(line)["seconds"]
        seconds = float(told)
    except KeyError:
        raise JobError("is damaged: it has no seconds", file=file, key=f"line {number}", fix=AGAIN) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise JobError(f"is damaged: {error}", file=file, key=f"line {number}", fix=AGAIN) from None
    if isinstance(told, bool) or not LEAST <= seconds <= MOST:
        problem = f"{shown(told)} is not a valid step time in seconds"
        raise JobError(problem, file=file, key=f"line {number}", fix=AGAIN)
    return seconds


@dataclass(frozen=True)
class Recorded:
    """A run's plan and its seconds per step: the median, without the first steps."""

    folder: str
    plan: Plan
    seconds: float

    @staticmethod
    def read(folder: Path) -> Recorded:
        """Read a run. Raises JobError if the folder is not a run, or if the run is too short to
        use."""
        if not (folder / "plan.json").exists():
            raise JobError("is no folder of a run", file=str(folder), fix="Name logs and traces one by one")
        plan = Plan.read(folder / "plan.json")
        if plan.job is None or plan.settings is None:
            raise JobError("was planned without a job file, so its cluster is unknown", file=str(folder), fix=AGAIN)
        if len(set(plan.job.degrees)) > 1:
            raise JobError("has pp ranks of different sizes", file=str(folder), fix="Leave this run out")
        first = WARM + plan.settings.train.batches.ramped
        left = read_seconds(folder)[first:]
        if len(left) < FEWEST:
            problem = f"has only {len(left)} steps after the first {first}, too few to calibrate with"
            raise JobError(problem, file=str(folder / METRICS), fix=f"Train at least {first + FEWEST} steps")
        return Recorded(str(folder), plan, statistics.median(left))

    @property
    def point(self) -> dict[str, int]:
        """The run's strategy, as integers by column of ``StrategyTable``."""
        assert self.plan.job is not None
        timed = {"p1": self.plan.strategy.p1, "p2": self.plan.strategy.p2}
        flat = int(self.plan.strategy.sequence_parallel)
        return point_of(self.plan.job) | timed | {"sequence_parallel": flat}

    def priced_step(self, device: Device) -> PricedStep:
        """Return the run's step as the closed form prices it."""
        load = self.plan.workload
        return PricedStep(self.point, self.plan.model, load.sequence, load.precision)


@dataclass(frozen=True)
class Refitted:
    """Result of a refit. cluster: with the fitted constants. before, after: predicted seconds per
    step of every run. moved: (old value, new value) by name, for constants that moved by more than
    1 %. left: (relative error before, after) by name. sources: by name, the runs that determine the
    constant, the most influential first."""

    cluster: Cluster
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    moved: Mapping[str, tuple[float, float]]
    left: Mapping[str, tuple[float, float]]
    sources: Mapping[str, Sequence[str]]


def refit(cluster: Cluster, runs: Sequence[TimedRun], *, date: str) -> Refitted:
    """Return the cluster with constants refitted to these runs. date: of the fit."""
    names = [name for name in timed_constants(cluster) if name not in KEPT]
    old = {name: max(constant_of(cluster, name).value, SMALLEST) for name in names}
    errors = {name: max(constant_of(cluster, name).error, LEAST_ERROR) for name in names}
    priors = {name: FittedConstant(value=old[name], error=errors[name], most=_most(name, old[name])) for name in names}

    def predicted(values: Mapping[str, float]) -> NDArray[np.float64]:
        changed = with_constants(cluster, {name: (value, 0.0) for name, value in values.items()}, source="", date=date)
        return predicted_seconds(changed, steps)

    steps = [run.priced_step(cluster.device) for run in runs]
    measured = np.array([run.seconds for run in runs])
    found = calibrate(predicted, measured, priors, scatter=Scatter(noise=NOISE, outlier=OUTLIER))
    source = f"{_basis(runs)}, fitted from {cluster.name}"
    new = {name: (one.value, one.error) for name, one in found.constants.items()}
    moved = {name: (old[name], value) for name, (value, _) in new.items() if abs(value / old[name] - 1) > 0.01}
    changed = with_constants(cluster, {name: new[name] for name in moved}, source=source, date=date)
    left = {name: (errors[name], error) for name, (_, error) in new.items()}
    told = _sources(found.values, predicted, runs)
    return Refitted(changed, predicted_seconds(cluster, steps), predicted_seconds(changed, steps), moved, left, told)


def _most(name: str, value: float) -> float:
    """Return the upper limit of a constant: shares of a peak cannot exceed 1."""
    return max(1.0, value) if name in SHARES or name.endswith(".share") else float("inf")


def _sources(values: Mapping[str, float], predicted: Predict, runs: Sequence[TimedRun]) -> dict[str, list[str]]:
    """Return, for each constant, the runs whose predicted seconds depend on it most, the most
    influential first."""
    base, found = predicted(values), dict[str, list[str]]()
    for name, value in values.items():
        slope = np.log(predicted({**values, name: value * (1 + SLOPE)}) / base) ** 2
        if slope.sum() > 0:
            share = slope / slope.sum()
            order = [int(at) for at in np.argsort(-share, kind="stable") if share[at] >= MIN_INFORMATION_SHARE]
            found[name] = list(dict.fromkeys(runs[at].folder for at in order))
    return found


def _basis(runs: Sequence[TimedRun]) -> str:
    """Return a phrase that names the runs to which constants were fitted, for the constants'
    ``source``."""
    return f"{len(runs)} recorded run{'s' * (len(runs) > 1)}"

"""The planner's shipped constants as a fit to published rows: which are free, which devices share one, what a
row weighs."""

from __future__ import annotations

import multiprocessing
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planner_row import Row

from plait.core.base.env import specs_folder
from plait.core.cluster.efficiency import Constant, Efficiency
from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.seconds.closed_form import Seconds, step_seconds
from plait.plan.calibrate.fit import Calibrated, FittedConstant, Scatter, calibrate
from plait.plan.search.needs import P90, REGIMES, regimes

PRIORS = Path(__file__).with_name("planner_priors.toml")
FAMILIES = ("ampere", "hopper", "blackwell", "blackwell-ultra", "ada", "cdna3", "volta")
NOISE = 0.06
"""Relative, of a measurement and of the model's form: what remains within one source after any fit."""
Floats = NDArray[np.float64]


def priors() -> dict[str, dict[str, Any]]:
    """Of all GPUs and of each family, as the file has them."""
    return tomllib.loads(PRIORS.read_text())


def known() -> dict[str, FittedConstant]:
    """The priors by ``family.constant``."""
    return {
        f"{family}.{name}": FittedConstant(
            value=said["value"], error=said["error"], most=said.get("most", float("inf"))
        )
        for family, table in priors().items()
        for name, said in table.items()
    }


@cache
def family_of(preset: str) -> str:
    """Whose constants a cluster's file uses."""
    return str(tomllib.loads((specs_folder() / "clusters" / f"{preset}.toml").read_text())["efficiency"])


def with_values(efficiency: Efficiency, family: str, values: Mapping[str, float]) -> Efficiency:
    """The same constants with other values: those of all GPUs and of this family."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        owner, _, path = name.partition(".")
        if owner not in ("all", family):
            continue
        outer, _, inner = path.partition(".")
        old = changed.get(outer, getattr(efficiency, outer))
        changed[outer] = (
            old.model_copy(update={inner: getattr(old, inner).model_copy(update={"value": value})})
            if inner
            else old.model_copy(update={"value": value})
        )
    return efficiency.model_copy(update=changed)


@dataclass(frozen=True)
class Batch:
    """Rows of one cluster and precision, as columns. where: their places among all rows."""

    cluster: Cluster
    family: str
    rows: Sequence[Row]
    where: NDArray[np.int64]

    @cached_property
    def columns(self) -> tuple[Shapes, StrategyTable, Floats, Options]:
        """What ``step_seconds`` takes."""
        rows = self.rows
        points = StrategyTable(**{
            f.name: np.concatenate([getattr(row.point, f.name) for row in rows]) for f in fields(StrategyTable)
        })  # fmt: skip
        options = Options(**{
            f.name: np.array([getattr(row.options, f.name) for row in rows]) for f in fields(Options)
        })  # fmt: skip
        sequence = np.array([row.sequence for row in rows], dtype=np.float64)
        return Shapes.stack([row.shapes for row in rows]), points, sequence, options

    def seconds(self, values: Mapping[str, float]) -> Seconds:
        """Predicted, with other constants than shipped where given."""
        shapes, points, sequence, options = self.columns
        efficiency = with_values(self.cluster.efficiency, self.family, values)
        cluster = self.cluster.model_copy(update={"efficiency": efficiency})
        precision = self.rows[0].precision
        return step_seconds(shapes, points, cluster, sequence=sequence, precision=precision, options=options)


def batches(rows: Sequence[Row]) -> list[Batch]:
    """Rows that can be computed at once."""
    groups: dict[Any, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault((id(row.cluster), row.precision), []).append(at)
    return [
        Batch(rows[where[0]].cluster, family_of(rows[where[0]].device), [rows[at] for at in where], np.array(where))
        for where in groups.values()
    ]


def predict(parts: Sequence[Batch], values: Mapping[str, float]) -> Floats:
    """Seconds of all rows, in their order."""
    seconds = np.empty(sum(len(part.rows) for part in parts))
    for part in parts:
        seconds[part.where] = part.seconds(values).total
    return seconds


def weights(rows: Sequence[Row]) -> Floats:
    """Rows of one origin share its conditions, so n of them are worth sqrt(n) independent ones."""
    count = Counter(map(origin_of, rows))
    return np.array([count[origin_of(row)] ** -0.5 for row in rows])


def fit(
    rows: Sequence[Row], start: Mapping[str, float] | None = None, held: Mapping[str, FittedConstant] | None = None
) -> Calibrated:
    """Constants from rows with times. held: constants of an earlier fit, which these rows do not move."""
    parts = batches(rows)
    measured = np.array([row.seconds for row in rows])
    families = {"all", *(family_of(row.device) for row in rows)} - {name.partition(".")[0] for name in held or ()}
    before = {**known(), **(held or {})}
    free = {name: prior if name.partition(".")[0] in families else replace(prior, error=0.0)
            for name, prior in before.items()}  # fmt: skip
    found = calibrate(
        lambda values: predict(parts, values),
        measured,
        free,
        start=start,
        weights=weights(rows),
        scatter=Scatter(noise=NOISE),
    )
    kept = {name: prior for name, prior in before.items() if free[name].error == 0}
    return replace(found, constants={**found.constants, **kept})


def origin_of(row: Row) -> str:
    """Who measured: sources of one origin are left out together."""
    return row.source.split("-")[0]


def left_out(rows: Sequence[Row]) -> Iterator[tuple[list[int], dict[str, float]]]:
    """For every origin: the places of its rows, and constants fitted to the timed rows of all others. Every
    processor fits."""
    timed = [row for row in rows if row.seconds and row.stated]
    start = fit(timed).values
    origins = sorted({origin_of(row) for row in rows})
    others = [[row for row in timed if origin_of(row) != origin] for origin in origins]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        found = pool.map(_values, others, [start] * len(others))
        for origin, values in zip(origins, found, strict=True):
            yield [at for at, row in enumerate(rows) if origin_of(row) == origin], values


def _values(rows: Sequence[Row], start: Mapping[str, float]) -> dict[str, float]:
    return fit(rows, start=start).values


def spread_of(residuals: Floats, weights: Floats) -> float:
    """The spread with which four fifths of ``residuals`` (log predicted / measured) lie within the band."""
    order = np.argsort(np.abs(residuals))
    reached = np.cumsum(weights[order]) / np.sum(weights)
    return float(np.abs(residuals)[order][np.searchsorted(reached, 0.8)]) / P90


def spreads(rows: Sequence[Row]) -> dict[str, float]:
    """The spread of left-out predictions, by regime; every source has the weight that it has in a fit."""
    residuals, regime = np.empty(len(rows)), np.empty(len(rows), dtype=np.int64)
    for places, values in left_out(rows):
        for part in batches([rows[at] for at in places]):
            at = np.array(places)[part.where]
            residuals[at] = np.log(part.seconds(values).total / np.array([row.seconds for row in part.rows]))
            regime[at] = regimes(part.columns[1], part.cluster)
    worth = weights(rows)
    return {f"spread.{name}": spread_of(residuals[regime == n], worth[regime == n]) for n, name in enumerate(REGIMES)}


def shipped(
    family: str, fitted: Mapping[str, FittedConstant], sources: Mapping[str, str], date: str
) -> dict[str, Constant]:
    """A family's constants by name: fitted ones with the source of their owner (all GPUs, or the family),
    those that no row moved with their prior's."""
    said = priors()
    constants: dict[str, Constant] = {}
    for owner in ("all", family):
        for name, prior in said[owner].items():
            now = fitted[f"{owner}.{name}"]
            moved = now.value != prior["value"] and now.error < 0.98 * (prior["error"] or 1)
            text = (
                f"{sources[owner]}; prior {prior['value']:g}: {prior['source']}"
                if moved
                else f"prior: {prior['source']}"
            )
            constants[name] = Constant(
                value=float(f"{now.value:.4g}"), source=text, date=date, error=round(now.error, 3)
            )
    return constants

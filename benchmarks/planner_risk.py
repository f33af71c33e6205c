"""Memory as a risk: how far predicted memory is off by what it is, and what is lost by trusting it.

    python benchmarks/planner_accuracy.py [--leave-one-out]    prints the table
    python benchmarks/planner_memory.py --fit                  prints the constants of ``Doubt``

Of every row: whether it is said to fit by the median of its prediction, and with the margin that a plan keeps
by default. Of every sweep with rows that ran out of memory: whether the predicted best of those said to fit
ran, and what that loses against the best that ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from planner_memory import Floats, measured, predict, predicted_bytes, room
from planner_row import Row

from plait.core.cluster.efficiency import Uncertainty
from plait.core.job.constraint import SURE, Margin

KINDS = ("lasting", "moving", "beside")
PRIOR: Mapping[str, float] = {"lasting": 0.02, "moving": 0.08, "beside": 0.5}
"""What the constants would be without rows: known shapes, decision 0014's errors of activations, and the
error of each constant of ``Overhead``."""
LOOSE = 0.4
"""Standard deviation of their logarithms."""
MOST = 8
"""A source counts as so many rows at most."""
OUTLIER = 3.0
"""Standard deviations beyond which an error pulls no harder."""
FARTHEST = 4.0
"""Standard deviations from the limit beyond which a row that ran, or ran out, says no more."""


@dataclass(frozen=True)
class Sizes:
    """Of rows, bytes: by what they are, what they may fill, how much too low what was measured is predicted
    (nan where nothing was). inside: whether what is no tensor was measured as well."""

    kinds: Floats
    limit: Floats
    error: Floats
    inside: Floats
    oom: np.ndarray[Any, np.dtype[np.bool_]]
    source: np.ndarray[Any, np.dtype[np.str_]]

    @staticmethod
    def of(rows: Sequence[Row]) -> Sizes:
        """Predicted with the options of rows' frameworks."""
        columns, known = predict(rows), [measured(row) for row in rows]
        kinds = np.array(
            [[float(getattr(one, kind)[0]) for one in columns] for kind in ("lasting", "moving", "overhead")]
        )
        error = [
            one[0] - predicted_bytes(column, row, one[1]) if one else np.nan
            for row, column, one in zip(rows, columns, known, strict=True)
        ]
        return Sizes(
            kinds, np.array([room(row) for row in rows]), np.array(error),
            np.array([float(one is not None and one[1] == "device") for one in known]),
            np.array([row.oom for row in rows]), np.array([row.source for row in rows]),
        )  # fmt: skip

    def take(self, which: np.ndarray[Any, np.dtype[np.bool_]]) -> Sizes:
        """Of some rows."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Sizes(**{name: value[..., which] for name, value in values.items()})

    def deviation(self, doubt: Floats) -> Floats:
        """Bytes. doubt: of ``KINDS``."""
        return np.sqrt(((doubt[:, None] * self.kinds) ** 2).sum(axis=0))

    def weights(self) -> Floats:
        """What rows count."""
        names, at, count = np.unique(self.source, return_inverse=True, return_counts=True)
        return (np.minimum(count, MOST) / count)[at] if len(names) else np.zeros(0)


def fit_doubt(sizes: Sizes) -> Floats:
    """The constants of ``Doubt`` that explain rows best: errors of what was measured, and which of the others
    ran. Normal, beyond ``OUTLIER`` as if exponential."""
    from scipy.optimize import minimize
    from scipy.stats import norm

    start, worth, known = np.log(list(PRIOR.values())), sizes.weights(), np.isfinite(sizes.error)
    tensors = np.array([[1.0], [1.0], [0.0]]) * np.ones(len(worth)) + np.array([[0.0], [0.0], [1.0]]) * sizes.inside

    def cost(logs: Floats) -> float:
        doubt = np.exp(logs)
        seen = np.sqrt(((doubt[:, None] * sizes.kinds * tensors) ** 2).sum(axis=0))
        far = np.abs(np.where(known, sizes.error, 0) / seen)
        apart = np.where(far < OUTLIER, far**2 / 2, OUTLIER * far - OUTLIER**2 / 2) + np.log(seen)
        room = np.clip((sizes.limit - sizes.kinds.sum(axis=0)) / sizes.deviation(doubt), -FARTHEST, FARTHEST)
        ended = -norm.logcdf(np.where(sizes.oom, -room, room))
        return float((worth * np.where(known, apart, ended)).sum() + (((logs - start) / LOOSE) ** 2).sum() / 2)

    return np.exp(minimize(cost, start, method="Nelder-Mead", options={"maxiter": 4000}).x)


def shipped() -> Floats:
    """The constants of a CUDA device."""
    return np.array([getattr(Uncertainty(), kind).value for kind in KINDS])


def doubts_left_out(sizes: Sizes) -> dict[str, Floats]:
    """Of every source, the constants of all other sources' rows."""
    return {str(name): fit_doubt(sizes.take(sizes.source != name)) for name in np.unique(sizes.source)}


def kept_free(sizes: Sizes, left_out: Mapping[str, Floats] | None = None) -> Floats:
    """Bytes that the default margin keeps. left_out: constants by source; those that ship if not given."""
    found = np.zeros(len(sizes.limit))
    for name in np.unique(sizes.source):
        which = sizes.source == name
        doubt = left_out[str(name)] if left_out else shipped()
        found[which] = Margin(confidence=SURE).reserved_bytes(sizes.take(which).deviation(doubt), 0.0)
    return found


RISKS = ("rows", "ran_fits", "out_does_not", "of_said_to_fit_ran", "sweeps", "best_ran", "mean_loss", "worst_loss")


def risk(rows: Sequence[Row], seconds: Floats, fits: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The figures of ``RISKS``. seconds: predicted. fits: whether rows are said to fit."""
    oom = np.array([row.oom for row in rows])
    sweeps: dict[tuple[Any, ...], list[int]] = {}
    for at, row in enumerate(rows):
        sweeps.setdefault((row.source, *row.job), []).append(at)
    best_ran, lost = list[bool](), list[float]()
    for which in sweeps.values():
        ran, said = [at for at in which if rows[at].seconds], [at for at in which if fits[at]]
        if not any(oom[at] for at in which) or not ran or not said:
            continue
        best = min(said, key=lambda at: seconds[at])
        best_ran.append(not oom[best])
        if rows[best].seconds:
            lost.append(float(rows[best].seconds or 0) / min(float(rows[at].seconds or 0) for at in ran) - 1)
    shares = [fits[~oom], ~fits[oom], ~oom[fits]]
    figures = (
        len(rows), *(float(np.mean(one)) if len(one) else None for one in shares), len(best_ran), sum(best_ran),
        float(np.mean(lost)) if lost else None, max(lost, default=None),
    )  # fmt: skip
    return dict(zip(RISKS, figures, strict=True))


def coverage(sizes: Sizes, left_out: Mapping[str, Floats]) -> dict[str, tuple[int, float]]:
    """Of every source with measured memory: rows, and which share lies between p10 and p90."""
    found: dict[str, tuple[int, float]] = {}
    for name in np.unique(sizes.source):
        some = sizes.take((sizes.source == name) & np.isfinite(sizes.error))
        if len(some.error):
            seen = np.sqrt(
                ((left_out[str(name)][:, None] * some.kinds) ** 2)[:2].sum(axis=0)
                + some.inside * (left_out[str(name)][2] * some.kinds[2]) ** 2
            )
            inside = np.abs(some.error) <= Margin(confidence=SURE).reserved_bytes(seen, 0.0)
            found[str(name)] = len(some.error), float(np.mean(inside))
    return found

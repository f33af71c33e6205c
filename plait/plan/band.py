"""How far predictions may be off: bands from p10 to p90.

Errors of a step's time are taken as log-normal around the prediction. Their spread is a constant of the
cluster, one for each regime: calibration says it, from steps that were left out of the fit. Errors of memory
are taken as normal. What lasts, what comes and goes, and what is no tensor err apart from each other, each by
a share of it (``Overhead.doubt``).
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.hardware import Cluster
from plait.core.cluster.overhead import Overhead
from plait.core.step.columns.points import Points
from plait.core.step.seconds.rates import Seconds

Regime = Literal["node", "nodes", "pipeline"]
REGIMES: tuple[Regime, ...] = ("node", "nodes", "pipeline")
P90 = NormalDist().inv_cdf(0.9)
Floats = NDArray[np.float64]
LONG = 4
"""Places from which on a pipeline over several nodes is a regime of its own."""


def regimes(points: Points, cluster: Cluster) -> NDArray[np.int64]:
    """A number into ``REGIMES`` for every point: one node; several; several and a long pipeline."""
    several = points.ranks > cluster.ranks_per_node
    return np.where(several, np.where(points.pp >= LONG, 2, 1), 0)


def band(total: Seconds, points: Points, cluster: Cluster) -> tuple[Seconds, Seconds]:
    """p10 and p90 of predicted seconds."""
    told = cluster.efficiency.spread
    spread = np.array([getattr(told, regime).value for regime in REGIMES])[regimes(points, cluster)]
    return total * np.exp(-P90 * spread), total * np.exp(P90 * spread)


def memory_deviation(overhead: Overhead, lasting: Floats, moving: Floats, beside: Floats, doubted: Floats) -> Floats:
    """Bytes: standard deviation of a device's memory. lasting, moving: bytes of tensors; beside: of the rest;
    doubted: as of ``MemoryColumns``."""
    doubt = overhead.doubt
    fixed = (doubt.lasting.value * lasting) ** 2 + (doubt.beside.value * beside) ** 2
    return np.sqrt(fixed + (doubt.moving.value * moving) ** 2 + doubted**2)

"""Memory that strategies need on a device, as arrays: predicted bytes, and bytes that must stay
free. Also the uncertainty of predictions: bands from p10 to p90.

Errors of a step's time count as log-normal around the prediction. Their standard deviation is a
constant of the cluster for each regime; calibration derives it from steps left out of the fit.
Errors of memory count as normal. Lasting tensors, tensors of a step, and memory besides tensors
have independent errors, each a fraction of its size (``Overhead.doubt``).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.efficiency import Overhead
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import Margin
from plait.core.step.columns.points import StrategyTable
from plait.core.step.memory.closed_memory import MemoryColumns, usable
from plait.core.step.seconds.rates import Seconds

Regime = Literal["node", "nodes", "pipeline"]
REGIMES: tuple[Regime, ...] = ("node", "nodes", "pipeline")
P90 = NormalDist().inv_cdf(0.9)
Floats = NDArray[np.float64]
LONG = 4
"""Number of pp ranks from which on a pipeline over several nodes is a regime of its own."""


def regimes(points: StrategyTable, cluster: Cluster) -> NDArray[np.int64]:
    """Return an index into ``REGIMES`` for every strategy: one node; several nodes; several nodes
    with a long pipeline."""
    several = points.ranks > cluster.ranks_per_node
    return np.where(several, np.where(points.pp >= LONG, 2, 1), 0)


def band(total: Seconds, points: StrategyTable, cluster: Cluster) -> tuple[Seconds, Seconds]:
    """Return (p10, p90) of the seconds of a step of each strategy: arrays. total: predicted
    seconds."""
    told = cluster.efficiency.spread
    spread = np.array([getattr(told, regime).value for regime in REGIMES])[regimes(points, cluster)]
    return total * np.exp(-P90 * spread), total * np.exp(P90 * spread)


def memory_deviation(overhead: Overhead, lasting: Floats, moving: Floats, other: Floats, doubted: Floats) -> Floats:
    """Return the standard deviation of a device's memory in bytes. lasting, moving: bytes of
    tensors that last, and of tensors within a step; other: bytes of overhead besides tensors;
    doubted: as in ``MemoryColumns``."""
    doubt = overhead.doubt
    fixed = (doubt.lasting.value * lasting) ** 2 + (doubt.beside.value * other) ** 2
    return np.sqrt(fixed + (doubt.moving.value * moving) ** 2 + doubted**2)


Column = NDArray[np.float64]


class Needs(NamedTuple):
    """Bytes of each strategy's fullest device, as arrays. total: predicted bytes. kept: bytes that
    must stay free. limit: bytes of a device that a plan may fill, one number."""

    total: Column
    kept: Column
    limit: float

    @staticmethod
    def of(memory: MemoryColumns, margin: Margin, cluster: Cluster) -> Needs:
        """Return the needs for predicted memory. margin: memory that must stay free. cluster: its
        device's size gives the limit."""
        return Needs.with_overhead(memory, memory.overhead, margin, cluster)

    @staticmethod
    def with_overhead(memory: MemoryColumns, overhead: Column, margin: Margin, cluster: Cluster) -> Needs:
        """Return the needs with ``overhead`` bytes besides tensors instead of the predicted
        overhead."""
        limit = usable(cluster.device, cluster.overhead)
        total = memory.allocated + overhead
        deviation = np.zeros(total.shape)
        if margin.confidence:
            deviation = memory_deviation(cluster.overhead, memory.lasting, memory.moving, overhead, memory.doubted)
        return Needs(total, margin.reserved_bytes(deviation, limit), limit)

    @property
    def all(self) -> Column:
        """Bytes that each strategy needs on a device: predicted, and to be kept free."""
        return self.total + self.kept

    def fits(self, share: float = 1.0) -> NDArray[np.bool_]:
        """Return True for each strategy that fits into ``share`` of the limit, margin included: an
        array."""
        return self.all <= share * self.limit

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Needs:
        """Return the needs of the strategies at indices ``which``."""
        return Needs(self.total[which], self.kept[which], self.limit)

    @staticmethod
    def joined(parts: Sequence[Needs]) -> Needs:
        """Return the needs of all strategies in ``parts``, concatenated. The parts must be of the
        same device."""
        totals, kepts = [one.total for one in parts], [one.kept for one in parts]
        return Needs(np.concatenate(totals), np.concatenate(kepts), parts[0].limit)

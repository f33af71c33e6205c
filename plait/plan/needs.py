"""What strategies need of a device, as columns: memory as predicted, and what is to stay free beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import Margin
from plait.core.step.memory.closed_memory import MemoryColumns, usable
from plait.plan.band import memory_deviation

Column = NDArray[np.float64]


class Needs(NamedTuple):
    """Bytes of every strategy's fullest device. total: what it holds; kept: what is to stay free; limit: what
    may be filled."""

    total: Column
    kept: Column
    limit: float

    @staticmethod
    def of(found: MemoryColumns, margin: Margin, cluster: Cluster) -> Needs:
        """Of predicted memory."""
        return Needs.beside(found, found.overhead, margin, cluster)

    @staticmethod
    def beside(found: MemoryColumns, overhead: Column, margin: Margin, cluster: Cluster) -> Needs:
        """The same with other bytes besides tensors than were found."""
        limit = usable(cluster.device, cluster.overhead)
        total = found.allocated + overhead
        deviation = np.zeros(total.shape)
        if margin.sure:
            deviation = memory_deviation(cluster.overhead, found.lasting, found.moving, overhead, found.doubted)
        return Needs(total, margin.kept(deviation, limit), limit)

    @property
    def all(self) -> Column:
        """What a device must have."""
        return self.total + self.kept

    def fits(self, share: float = 1.0) -> NDArray[np.bool_]:
        """Which fit into a share of what may be filled."""
        return self.all <= share * self.limit

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Needs:
        """Of some strategies."""
        return Needs(self.total[which], self.kept[which], self.limit)

    @staticmethod
    def joined(parts: Sequence[Needs]) -> Needs:
        """One after the other, of one device."""
        totals, kepts = [one.total for one in parts], [one.kept for one in parts]
        return Needs(np.concatenate(totals), np.concatenate(kepts), parts[0].limit)

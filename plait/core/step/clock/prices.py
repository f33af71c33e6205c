"""Prices of a simulated step: seconds of ops, collectives, passes over memory and transfers.

``ClusterPrices`` knows a described cluster. ``PlanPrices`` knows no more than a plan: its measured costs, or
costs from shapes, whose proportions mean more than their seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from plait.core.cluster.hardware import Cluster
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds import rates
from plait.core.step.seconds.costs import Launches, cluster_costs, cluster_launches
from plait.core.step.seconds.muon_time import MuonPrices, cluster_prices, group_at, kinds_at, muon_seconds
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.segments import Collective
from plait.core.step.step import Place, Step


class Prices(Protocol):
    """Prices of one plan on one machine."""

    @property
    def slow(self) -> tuple[float, float]:
        """Factors of computation and of communication while both run."""
        ...

    @property
    def buffered(self) -> bool:
        """Whether a transfer starts without its receive."""
        ...

    @property
    def jitter(self) -> float:
        """Standard deviation of a node's step time, relative."""
        ...

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node; 0: all."""
        ...

    @property
    def beside(self) -> float:
        """Seconds of a step beside what is simulated."""
        ...

    def costs(self, place: int) -> SegmentCosts:
        """Seconds of the segment ops of a place."""
        ...

    def launches(self, place: int) -> Launches:
        """Seconds of the host of a place."""
        ...

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, place: int | None = None) -> float:
        """Seconds of ``nbytes`` gathered or reduced over ranks that lie ``stride`` apart. place: whose they
        are; None for ranks of several."""
        ...

    def alike(self, place: int) -> object:
        """What is equal for places at which equal stages cost the same."""
        ...

    def tier(self, ranks: int, stride: int) -> int:
        """Number of the links that such a collective uses."""
        ...

    def update(self, numbers: int) -> float:
        """Seconds of an optimizer's step over so many numbers."""
        ...

    def muon(self, place: Place) -> float:
        """Seconds of orthogonalising a place's matrices, beside ``update``; 0 of another optimizer."""
        ...

    def travel(self, source: int, target: int) -> float:
        """Seconds of what one stage hands to another, for one micro-batch."""
        ...

    def way(self, source: int, target: int) -> int:
        """Number of the links that this uses."""
        ...


def muon_of(place: Place, prices: MuonPrices) -> float:
    """Seconds of orthogonalising a place's matrices by these prices."""
    return float(muon_seconds(kinds_at(place), *group_at(place), prices))


@dataclass(frozen=True)
class ClusterPrices:
    """Prices on a described cluster, whose nodes a plan's ranks fill in order. pace: of micro-batches'
    computation, as a multiple of the seconds that the cluster says; optimizers run at once."""

    step: Step
    cluster: Cluster
    pace: float = 1.0

    @property
    def slow(self) -> tuple[float, float]:
        reached = self.cluster.efficiency
        return reached.slow_computation.value, reached.slow_communication.value

    @property
    def buffered(self) -> bool:
        return self.cluster.device.kind == "cpu"  # gloo takes in what nobody asked for yet, NCCL does not

    @property
    def jitter(self) -> float:
        return self.cluster.efficiency.jitter.value

    @property
    def ranks_per_node(self) -> int:
        return self.cluster.ranks_per_node

    @property
    def beside(self) -> float:
        return self.cluster.efficiency.step.value

    def costs(self, place: int) -> SegmentCosts:
        found = cluster_costs(*self._asked(place), precision=self.step.workload.precision)
        if self.pace == 1.0:
            return found
        return replace(found, compute={key: seconds * self.pace for key, seconds in found.compute.items()})

    def launches(self, place: int) -> Launches:
        return cluster_launches(*self._asked(place), precision=self.step.workload.precision)

    def _asked(self, place: int) -> tuple[ModelSpec, Strategy, Load, Cluster]:
        load = Load(self.step.largest_share(place), self.step.workload.sequence)
        return self.step.model, self.step.strategy_of(place), load, self.cluster

    def alike(self, place: int) -> object:
        return None

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, place: int | None = None) -> float:
        assert kind != "rotate"
        return float(rates.collective(self.cluster, kind, nbytes, ranks, stride))

    def tier(self, ranks: int, stride: int) -> int:
        return self.cluster.tier_of(ranks * stride)

    def update(self, numbers: int) -> float:
        return float(rates.memory_bound(self.cluster, numbers * self.cluster.efficiency.optimizer_bytes.value))

    def muon(self, place: Place) -> float:
        work = self.step.workload
        prices = cluster_prices(self.cluster, work.precision, work.matrix_steps, work.matrix_itemsize)

        def exchange(nbytes: float, ranks: int) -> float:
            return self.collective("all_to_all", nbytes * ranks, ranks, 1, place.index)

        return muon_of(place, replace(prices, exchange=exchange))

    def travel(self, source: int, target: int) -> float:
        """Every node of the target gets each part once, over all its links, and shares it out inside."""
        meshes, ends = self.step.layout.meshes, [self.step.schedule.rank_of[stage] for stage in (source, target)]
        shares = {place: self.step.largest_share(place) for place in ends}
        tile = max(self.step.crossing_bytes(place, (source, target), share) for place, share in shares.items())
        tp = min(meshes[place].tp for place in ends)
        inside = self._stride(ends) < self.cluster.ranks_per_node
        copies = 1 if self.step.strategy.sequence_parallel or inside else min(tp, self.cluster.ranks_per_node)
        there = rates.collective(self.cluster, "send", tile / copies, 2, self._stride(ends))
        return float(there) + self.collective("all_gather", tile, copies, 1)

    def way(self, source: int, target: int) -> int:
        ends = [self.step.schedule.rank_of[stage] for stage in (source, target)]
        return self.tier(2, self._stride(ends))

    def _stride(self, ends: list[int]) -> int:
        """Ranks between one of a place and its counterpart."""
        meshes = self.step.layout.meshes
        return abs(meshes[ends[0]].first - meshes[ends[1]].first)

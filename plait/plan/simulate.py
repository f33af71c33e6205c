"""A plan in virtual time: on a described cluster, or on what the plan itself knows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.core.cluster.hardware import Cluster
from plait.core.cluster.network import Network
from plait.core.job.plan import Plan
from plait.core.model.experts import refuse_experts
from plait.core.record.records import sent_bytes
from plait.core.step.clock.crowd import shared_pace
from plait.core.step.clock.pipeline import Simulated, Simulation
from plait.core.step.clock.placed_prices import PlacedPrices
from plait.core.step.clock.prices import ClusterPrices, Prices, muon_of
from plait.core.step.seconds.costs import Launches
from plait.core.step.seconds.muon_time import MuonPrices, Number
from plait.core.step.seconds.segment_costs import BANDWIDTH, FLOPS, SegmentCosts
from plait.core.step.segments import Collective
from plait.core.step.step import Place

OPTIMIZER_BYTES, FLOPS_A_BYTE = 40, 4
"""Of the memory traffic of a parameter's update, and of a byte of it, where nothing is described."""


def simulate_plan(
    plan: Plan, cluster: Cluster | None = None, *, jitter_seed: int | None = None, placed: PlacedOn | None = None
) -> Simulated:
    """A step of ``plan`` on ``cluster``, whose nodes its ranks fill in order.

    cluster: None for what the plan itself knows: its measured costs, or costs from shapes, whose
    proportions mean more than their seconds. placed: in which minipods these nodes lie; None: in one.
    jitter_seed: every node's step takes longer or shorter by a factor that is drawn with it, and a place
    waits for its slowest; None: all take as long as the slowest of the job's nodes does on average.
    Raises JobError where the cluster has no peak for the plan's precision.
    """
    refuse_experts(plan.model, "simulated")
    if cluster is None:
        return Simulation(plan, PlanPrices(plan), jitter_seed, lambda: plan.key).simulated
    prices = placed.prices(plan, cluster) if placed else ClusterPrices(plan, cluster)
    found = Simulation(plan, prices, jitter_seed, lambda: plan.key).simulated
    if cluster.crowd == 1.0:
        return found
    pace = shared_pace(found.simulation.run().courses, cluster.crowd)
    return Simulation(plan, replace(prices, pace=pace), jitter_seed, lambda: plan.key).simulated


@dataclass(frozen=True, kw_only=True)
class PlacedOn:
    """pods: the minipod of every host, by node rank. network: what crossing minipods costs."""

    pods: tuple[int, ...]
    network: Network

    def prices(self, plan: Plan, cluster: Cluster) -> PlacedPrices:
        """Of a plan's step on a cluster."""
        return PlacedPrices(plan, cluster, pods=self.pods, network=self.network)


@dataclass(frozen=True)
class PlanPrices(Prices):
    """Prices that a plan alone knows."""

    plan: Plan
    slow: tuple[float, float] = (1.0, 1.0)
    buffered: bool = True
    jitter: float = 0.0
    ranks_per_node: int = 0
    beside: float = 0.0

    def costs(self, place: int) -> SegmentCosts:
        return self.plan.order_costs(place)

    def launches(self, place: int) -> Launches:
        return Launches()

    def alike(self, place: int) -> object:
        return None

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, place: int | None = None) -> float:
        return sent_bytes(kind, int(nbytes), ranks) / BANDWIDTH

    def tier(self, ranks: int, stride: int) -> int:
        return 0

    def update(self, numbers: int) -> float:
        return numbers * OPTIMIZER_BYTES * FLOPS_A_BYTE / FLOPS

    def muon(self, place: Place) -> float:
        def product(m: Number, k: Number, n: Number) -> Number:
            return 2 * m * k * n / FLOPS

        def exchange(nbytes: Number, ranks: Number) -> Number:
            return sent_bytes("all_to_all", int(nbytes), int(ranks)) / BANDWIDTH

        work = self.plan.workload
        return muon_of(place, MuonPrices(work.matrix_steps, work.matrix_itemsize, product, exchange))

    def travel(self, source: int, target: int) -> float:
        """Tensors one after the other, as their reshard plans say."""
        reshards = self.plan.reshards.get(self.plan.strategy.sequence_parallel, {})
        return sum(plan.predicted for plan in reshards.get((source, target), {}).values()) * 1e-9

    def way(self, source: int, target: int) -> int:
        return 1

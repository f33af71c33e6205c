"""Costs for a simulated step: seconds of ops, collectives, passes over memory and transfers.

``ClusterPrices`` uses a described cluster. ``PlanPrices`` (``plait.plan.search.simulate``) uses
only a plan: its measured costs, or costs estimated from shapes, whose proportions are more reliable
than their seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from plait.core.cluster.hardware import Cluster
from plait.core.cluster.network import Network
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.core.step.seconds import rates
from plait.core.step.seconds.costs import Launches, cluster_costs, cluster_launches
from plait.core.step.seconds.sharding_costs import MuonPrices, cluster_prices, group_at, kinds_at, muon_seconds
from plait.core.step.segments import Collective
from plait.core.step.step import PipelineRank, Step


class Prices(Protocol):
    """Interface: the costs of one plan on one machine."""

    @property
    def slow(self) -> tuple[float, float]:
        """Slowdown factors of computation and of communication while both run."""
        ...

    @property
    def buffered(self) -> bool:
        """True if a transfer starts without a posted receive."""
        ...

    @property
    def jitter(self) -> float:
        """Standard deviation of a node's step time, as a fraction of its mean."""
        ...

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node; 0: all ranks are on one node."""
        ...

    @property
    def step_overhead(self) -> float:
        """Overhead of a step in seconds that the simulation does not cover."""
        ...

    def costs(self, pp_rank: int) -> SegmentCosts:
        """Return the seconds of a pp rank's segment ops."""
        ...

    def launches(self, pp_rank: int) -> Launches:
        """Return the host's launch seconds for a pp rank."""
        ...

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, pp_rank: int | None = None) -> float:
        """Return the seconds to gather or reduce ``nbytes`` over ``ranks`` ranks, ``stride`` ranks
        apart. pp_rank: None if the group spans several."""
        ...

    def cost_class(self, pp_rank: int) -> object:
        """Return a key that is equal for pp ranks on which equal stages cost the same."""
        ...

    def tier(self, ranks: int, stride: int) -> int:
        """Return the number of the network tier (0: innermost) that a collective uses over groups
        of ``ranks`` ranks, ``stride`` ranks apart."""
        ...

    def update(self, numbers: int) -> float:
        """Return the seconds of an optimizer step over ``numbers`` parameters."""
        ...

    def muon(self, pipeline_rank: PipelineRank) -> float:
        """Return the seconds to orthogonalise a pp rank's matrices, in addition to ``update``; 0
        for another optimizer."""
        ...

    def travel(self, source: int, target: int) -> float:
        """Return the seconds of one micro-batch's transfer between two stages."""
        ...

    def way(self, source: int, target: int) -> int:
        """Return the number of the network tier that a transfer between two stages uses."""
        ...


def muon_of(pipeline_rank: PipelineRank, prices: MuonPrices) -> float:
    """Return the seconds to orthogonalise a pp rank's matrices at these costs."""
    return float(muon_seconds(kinds_at(pipeline_rank), *group_at(pipeline_rank), prices))


@dataclass(frozen=True)
class ClusterPrices:
    """Costs on a described cluster, whose nodes a plan's ranks fill in order. pace: factor on the
    seconds of micro-batches' computation that the cluster predicts; optimizer steps are not
    scaled."""

    step: Step
    cluster: Cluster
    pace: float = 1.0

    @property
    def slow(self) -> tuple[float, float]:
        reached = self.cluster.efficiency
        return reached.slow_computation.value, reached.slow_communication.value

    @property
    def buffered(self) -> bool:
        return self.cluster.device.kind == "cpu"  # gloo receives without a posted receive, NCCL does not

    @property
    def jitter(self) -> float:
        return self.cluster.efficiency.jitter.value

    @property
    def ranks_per_node(self) -> int:
        return self.cluster.ranks_per_node

    @property
    def step_overhead(self) -> float:
        return self.cluster.efficiency.step.value

    def costs(self, pp_rank: int) -> SegmentCosts:
        found = cluster_costs(*self._arguments(pp_rank), precision=self.step.workload.precision)
        if self.pace == 1.0:
            return found
        return replace(found, compute={key: seconds * self.pace for key, seconds in found.compute.items()})

    def launches(self, pp_rank: int) -> Launches:
        return cluster_launches(*self._arguments(pp_rank), precision=self.step.workload.precision)

    def _arguments(self, pp_rank: int) -> tuple[ModelSpec, Strategy, Load, Cluster]:
        load = Load(self.step.largest_share(pp_rank), self.step.workload.sequence)
        return self.step.model, self.step.strategy_of(pp_rank), load, self.cluster

    def cost_class(self, pp_rank: int) -> object:
        return None

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, pp_rank: int | None = None) -> float:
        assert kind != "rotate"
        return float(rates.collective(self.cluster, kind, nbytes, ranks, stride))

    def tier(self, ranks: int, stride: int) -> int:
        return self.cluster.tier_of(ranks * stride)

    def update(self, numbers: int) -> float:
        return float(rates.memory_bound(self.cluster, numbers * self.cluster.efficiency.optimizer_bytes.value))

    def muon(self, pipeline_rank: PipelineRank) -> float:
        work = self.step.workload
        prices = cluster_prices(self.cluster, work.precision, work.matrix_steps, work.matrix_itemsize)

        def exchange(nbytes: float, ranks: int) -> float:
            return self.collective("all_to_all", nbytes * ranks, ranks, 1, pipeline_rank.index)

        return muon_of(pipeline_rank, replace(prices, exchange=exchange))

    def travel(self, source: int, target: int) -> float:
        """Return the seconds of one micro-batch's transfer. Every node of the target receives each
        part once, over all its links, and distributes it inside the node."""
        meshes, ends = self.step.layout.meshes, [self.step.schedule.rank_of[stage] for stage in (source, target)]
        shares = {pp_rank: self.step.largest_share(pp_rank) for pp_rank in ends}
        tile = max(self.step.crossing_bytes(pp_rank, (source, target), share) for pp_rank, share in shares.items())
        tp = min(meshes[pp_rank].tp for pp_rank in ends)
        inside = self._stride(ends) < self.cluster.ranks_per_node
        copies = 1 if self.step.strategy.sequence_parallel or inside else min(tp, self.cluster.ranks_per_node)
        there = rates.collective(self.cluster, "send", tile / copies, 2, self._stride(ends))
        return float(there) + self.collective("all_gather", tile, copies, 1)

    def way(self, source: int, target: int) -> int:
        ends = [self.step.schedule.rank_of[stage] for stage in (source, target)]
        return self.tier(2, self._stride(ends))

    def _stride(self, ends: list[int]) -> int:
        """Return the distance in ranks between a rank of one pp rank and its counterpart on the
        other."""
        meshes = self.step.layout.meshes
        return abs(meshes[ends[0]].first - meshes[ends[1]].first)


# ---- costs by placement of ranks ----


RING_PASSES: dict[str, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""How often an edge of a ring carries (n - 1) / n of a tensor, by collective."""


@dataclass(frozen=True, kw_only=True)
class MinipodCrossing:
    """Minipod crossings of concurrent groups. spread: minipods of the most spread group; flows:
    maximum number of concurrent flows that leave or enter one minipod; hosts: hosts in the group
    with the fewest ranks per host."""

    spread: int = 1
    flows: int = 0
    hosts: int = 1


@dataclass(frozen=True)
class PlacedPrices(ClusterPrices):
    """Costs for ranks placed on minipods. pods: the minipod of every host, by node rank. network:
    costs of crossing minipods."""

    pods: tuple[int, ...] = ()
    network: Network = field(default_factory=Network.read)

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, pp_rank: int | None = None) -> float:
        """Return the seconds of a collective; longer than inside a minipod if groups of this kind
        cross minipods."""
        inside = super().collective(kind, nbytes, ranks, stride, pp_rank)
        crossing = self._crossing(ranks, stride, pp_rank)
        if crossing.spread == 1 or ranks == 1:
            return inside
        if self.network.core is None:
            return inside * self.network.collective_factor(crossing.spread)
        n = crossing.hosts
        carried = nbytes * RING_PASSES[kind] * (n - 1) / n
        carried = carried / n if kind == "all_to_all" else carried
        return max(inside, carried * crossing.flows / self.network.core)

    def travel(self, source: int, target: int) -> float:
        inside = super().travel(source, target)
        ends = [self.step.layout.meshes[self.step.schedule.rank_of[stage]].ranks for stage in (source, target)]
        hosts = [self._hosts(ranks) for ranks in ends]
        most = max(map(len, hosts))
        pairs = {(one[at * len(one) // most], two[at * len(two) // most]) for one, two in [hosts] for at in range(most)}
        crossing = self._over([[(a, b)] for a, b in pairs])
        if crossing.spread == 1:
            return inside
        if self.network.core is None:
            return inside * self.network.pair_factor
        pp_ranks = [self.step.schedule.rank_of[stage] for stage in (source, target)]
        tile = max(self.step.crossing_bytes(at, (source, target), self.step.largest_share(at)) for at in pp_ranks)
        tp = min(self.step.layout.meshes[at].tp for at in pp_ranks)
        handed = tile * max(1, self.cluster.ranks_per_node // tp)  # every tp group of a host sends a tile
        return max(inside, handed * crossing.flows / self.network.core)

    def cost_class(self, pp_rank: int) -> object:
        """Return the minipods of the pp rank's hosts as a key: pp ranks of one kind may cross
        minipods differently."""
        hosts = self._hosts(self.step.layout.meshes[pp_rank].ranks)
        known: dict[int, int] = {}
        return tuple(known.setdefault(self.pods[host], len(known)) for host in hosts)

    def spreads(self) -> tuple[int, int]:
        """Return the minipods of the most spread DP group and of the most spread PP group."""
        meshes = self.step.layout.meshes
        dp = max(len({self.pods[host] for host in self._hosts(mesh.ranks)}) for mesh in meshes)
        hosts = [self._hosts(mesh.ranks) for mesh in meshes]
        most = max(map(len, hosts))
        return dp, max(len({self.pods[one[at * len(one) // most]] for one in hosts}) for at in range(most))

    def _hosts(self, ranks: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(rank // self.cluster.ranks_per_node for rank in ranks))

    def _crossing(self, ranks: int, stride: int, pp_rank: int | None) -> MinipodCrossing:
        key = ranks, stride, pp_rank
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._crossing_of(ranks, stride, pp_rank)
        return found

    @cached_property
    def _known(self) -> dict[tuple[int, int, int | None], MinipodCrossing]:
        return {}

    def _crossing_of(self, ranks: int, stride: int, pp_rank: int | None) -> MinipodCrossing:
        """Return the minipod crossings of one kind of group: the spread of a pp rank's groups, and
        the flows of all pp ranks' groups, which communicate at about the same time."""
        every = [list(self._groups(ranks, stride, at)) for at in range(len(self.step.layout.meshes))]
        own = self._over(every[pp_rank] if pp_rank is not None else [one for groups in every for one in groups])
        if own.spread == 1:
            return own
        both = self._over([one for groups in every for one in groups])
        return MinipodCrossing(spread=own.spread, flows=both.flows, hosts=own.hosts)

    def _groups(self, ranks: int, stride: int, pp_rank: int) -> Iterator[list[tuple[int, int]]]:
        """Yield, for each of a pp rank's groups, the ring of its hosts as (sending host, receiving
        host) pairs; for groups of all ranks if a group is larger than a pp rank."""
        mesh = self.step.layout.meshes[pp_rank]
        first, size = mesh.first, len(mesh.ranks)
        if ranks * stride > size:
            first, size = 0, self.step.layout.world_size
        for block in range(first, first + size - (ranks - 1) * stride, ranks * stride):
            for at in range(block, min(block + stride, first + size - (ranks - 1) * stride)):
                hosts = self._hosts(range(at, at + ranks * stride, stride)[:ranks])
                yield [(host, hosts[(number + 1) % len(hosts)]) for number, host in enumerate(hosts)]

    def _over(self, rings: Sequence[Sequence[tuple[int, int]]]) -> MinipodCrossing:
        """Return the minipod crossings of groups, each a list of (sending host, receiving host)."""
        pods, out, into, spread, hosts = self.pods, Counter[int](), Counter[int](), 1, 1
        for ring in rings:
            spread = max(spread, len({pods[host] for pair in ring for host in pair}))
            hosts = max(hosts, len({host for pair in ring for host in pair}))
            for a, b in ring:
                if pods[a] != pods[b]:
                    out[pods[a]] += 1
                    into[pods[b]] += 1
        flows = max([*out.values(), *into.values()], default=0)
        return MinipodCrossing(spread=spread, flows=flows, hosts=hosts)

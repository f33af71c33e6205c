"""Prices of a step whose ranks have been placed: what crosses minipods takes as long as the network says.

A cluster's own prices are of groups that cross no minipod. Of one that does there are two descriptions
(``Network``). Where the rate of a minipod's link to the core is known, flows that cross it at once share
it: collectives as rings over a group's hosts in the order of their ranks, all groups of a kind at once;
what a stage hands on, for all replicas at once. Else a group over several minipods loses the share that
was published, and two stages of which one replica crosses all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plait.core.cluster.network import Network
from plait.core.step.clock.prices import ClusterPrices
from plait.core.step.segments import Collective

WIRE: dict[str, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""How often a ring's edge carries (n - 1) / n of a tensor."""


@dataclass(frozen=True, kw_only=True)
class MinipodCrossing:
    """Of groups that run at once. spread: minipods of the most spread one; flows: most of them that leave one
    minipod, or come into one, at once; hosts: in the group that has fewest ranks on a host."""

    spread: int = 1
    flows: int = 0
    hosts: int = 1


@dataclass(frozen=True)
class PlacedPrices(ClusterPrices):
    """pods: the minipod of every host, by node rank. network: what crossing costs."""

    pods: tuple[int, ...] = ()
    network: Network = field(default_factory=Network.read)

    def collective(self, kind: Collective, nbytes: float, ranks: int, stride: int, place: int | None = None) -> float:
        """Seconds; more than inside a minipod where groups of this kind cross."""
        inside = super().collective(kind, nbytes, ranks, stride, place)
        crossing = self._crossing(ranks, stride, place)
        if crossing.spread == 1 or ranks == 1:
            return inside
        if self.network.core is None:
            return inside * self.network.collective_factor(crossing.spread)
        n = crossing.hosts
        carried = nbytes * WIRE[kind] * (n - 1) / n
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
        places = [self.step.schedule.rank_of[stage] for stage in (source, target)]
        tile = max(self.step.crossing_bytes(at, (source, target), self.step.largest_share(at)) for at in places)
        tp = min(self.step.layout.meshes[at].tp for at in places)
        handed = tile * max(1, self.cluster.ranks_per_node // tp)  # every tp group of a host hands on a tile
        return max(inside, handed * crossing.flows / self.network.core)

    def alike(self, place: int) -> object:
        """What of its groups crosses minipods: those of places of one kind may differ in it."""
        hosts = self._hosts(self.step.layout.meshes[place].ranks)
        known: dict[int, int] = {}
        return tuple(known.setdefault(self.pods[host], len(known)) for host in hosts)

    def spreads(self) -> tuple[int, int]:
        """Minipods of the most spread DP group and of the most spread PP group."""
        meshes = self.step.layout.meshes
        dp = max(len({self.pods[host] for host in self._hosts(mesh.ranks)}) for mesh in meshes)
        hosts = [self._hosts(mesh.ranks) for mesh in meshes]
        most = max(map(len, hosts))
        return dp, max(len({self.pods[one[at * len(one) // most]] for one in hosts}) for at in range(most))

    def _hosts(self, ranks: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(rank // self.cluster.ranks_per_node for rank in ranks))

    def _crossing(self, ranks: int, stride: int, place: int | None) -> MinipodCrossing:
        key = ranks, stride, place
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._crossing_of(ranks, stride, place)
        return found

    @cached_property
    def _known(self) -> dict[tuple[int, int, int | None], MinipodCrossing]:
        return {}

    def _crossing_of(self, ranks: int, stride: int, place: int | None) -> MinipodCrossing:
        """Spread of a place's groups, and flows of all places' groups of the kind, which send at about
        the same time."""
        every = [list(self._groups(ranks, stride, at)) for at in range(len(self.step.layout.meshes))]
        own = self._over(every[place] if place is not None else [one for groups in every for one in groups])
        if own.spread == 1:
            return own
        both = self._over([one for groups in every for one in groups])
        return MinipodCrossing(spread=own.spread, flows=both.flows, hosts=own.hosts)

    def _groups(self, ranks: int, stride: int, place: int) -> Iterator[list[tuple[int, int]]]:
        """Rings of the hosts of a place's groups; of all ranks, where a group is larger than a place."""
        mesh = self.step.layout.meshes[place]
        first, size = mesh.first, len(mesh.ranks)
        if ranks * stride > size:
            first, size = 0, self.step.layout.world_size
        for block in range(first, first + size - (ranks - 1) * stride, ranks * stride):
            for at in range(block, min(block + stride, first + size - (ranks - 1) * stride)):
                hosts = self._hosts(range(at, at + ranks * stride, stride)[:ranks])
                yield [(host, hosts[(number + 1) % len(hosts)]) for number, host in enumerate(hosts)]

    def _over(self, rings: Sequence[Sequence[tuple[int, int]]]) -> MinipodCrossing:
        """Of groups, each given by the hosts that send to each other."""
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

"""Slowdown of transfers between nodes where switches choose uplinks by a hash (ECMP).

A flow stays on one uplink, whatever its size. f equal flows hash independently and uniformly over u
uplinks, and the slowest finishes with the fullest uplink. Flows within one leaf are not hashed.
With rails, NICs of equal number share a leaf switch: flows between them stay below the leaf, and
above it they have the leaf's uplinks for themselves. Conflicts further up are not counted.

MegaScale (NSDI'24, section 3.6) reduces conflicts in the three ways that are parameters here:
uplinks twice as fast as downlinks (``speedup``), the eight NICs of a server on eight switches
(``rails``), and nodes with much mutual traffic under the same switch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from plait.core.topology.switches import Topology

MOST_EXACT = 2048
"""Maximum of flows times uplinks for the exact sum. Beyond, loads count as independent Poisson
variables, with an error below 0.02 flows."""


def largest_load(flows: int, uplinks: int) -> float:
    """Return the expected number of flows on the fullest of ``uplinks`` when ``flows`` choose one
    each, independently and uniformly: the sum over k of 1 - P(no uplink has more than k).

    >>> largest_load(1, 8), round(largest_load(8, 8), 3), round(largest_load(100, 4), 2)
    (1.0, 2.597, 30.23)
    """
    if flows < 0 or uplinks < 1:
        raise ValueError(f"{flows} flows over {uplinks} uplinks")
    if flows == 0 or uplinks == 1:
        return float(flows)
    if flows * uplinks > MOST_EXACT:
        return _large(flows, uplinks)
    return _exact(flows, uplinks)


@cache
def _exact(flows: int, uplinks: int) -> float:
    expected, level = 0.0, -(-flows // uplinks)
    expected += level  # the fullest uplink has at least the mean load
    while level < flows:
        above = 1.0 - _none_above(flows, uplinks, level)
        expected += above
        level += 1
        if above < 1e-12:
            break
    return expected


def _none_above(flows: int, uplinks: int, level: int) -> float:
    """Return the probability that no uplink has more than ``level`` of ``flows`` flows. Uplinks are
    filled one after the other: the number of remaining flows that the next one takes is binomial.
    """
    chances = {flows: 1.0}  # flows left to the uplinks that follow
    for place in range(uplinks, 1, -1):
        following: dict[int, float] = {}
        for left, chance in chances.items():
            for own, part in enumerate(_binomial(left, 1 / place, min(level, left))):
                if (rest := left - own) <= level * (place - 1):
                    following[rest] = following.get(rest, 0.0) + chance * part
        chances = {left: chance for left, chance in following.items() if chance > 1e-18}
    return min(sum(chance for left, chance in chances.items() if left <= level), 1.0)


@cache
def _binomial(count: int, chance: float, most: int) -> tuple[float, ...]:
    """Return the probabilities of 0 to ``most`` successes in ``count`` trials."""
    logs = (math.log(chance), math.log1p(-chance))
    total = math.lgamma(count + 1)
    return tuple(
        math.exp(total - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * logs[0] + (count - k) * logs[1])
        for k in range(most + 1)
    )


def _large(flows: int, uplinks: int) -> float:
    """Return the expected number of flows on the fullest uplink if loads are independent Poisson
    variables: E[max] is the sum over k of 1 - P(load <= k)^uplinks."""
    mean = flows / uplinks
    term, below, expected, level = math.exp(-mean), 0.0, 0.0, 0
    if mean > 600:  # exp underflows; the tails are normal there
        return mean + math.sqrt(mean) * _largest_normal(uplinks)
    while True:
        below += term
        above = -math.expm1(uplinks * math.log(min(below, 1.0))) if below > 0 else 1.0
        expected += above
        level += 1
        term *= mean / level
        if above < 1e-12 and level > mean:
            return expected


def _largest_normal(count: int) -> float:
    """Return the expected largest of ``count`` standard normal variables: the mean of its limiting
    Gumbel distribution."""
    if count == 1:
        return 0.0
    root = math.sqrt(2 * math.log(count))
    return root - (math.log(math.log(count)) + math.log(4 * math.pi)) / (2 * root) + 0.5772156649 / root


@dataclass(frozen=True, kw_only=True)
class RailFabric:
    """Network parameters that determine hash conflicts. uplinks: of a leaf switch on each rail.
    speedup: an uplink's rate relative to a NIC's. rails: planes of the fabric. active: NICs under
    one leaf switch that send upwards at the same time."""

    uplinks: int = 32
    speedup: float = 1.0
    rails: int = 1
    active: int = 32

    def __post_init__(self) -> None:
        if self.uplinks < 1 or self.rails < 1 or self.active < 1 or not 0 < self.speedup < math.inf:
            raise ValueError(f"{self}: counts are at least 1, the speed-up is above 0")

    @staticmethod
    def of(topology: Topology, node: str, *, speedup: float = 1.0, active: int | None = None) -> RailFabric:
        """Return the parameters of a node's leaf. If the topology does not give the number of
        uplinks, they can carry all that the leaf's nodes can send. active: by default all NICs of
        these nodes."""
        place = topology.node(node)
        rails = max(place.hardware.rails or 1, 1)
        each = max(-(-(place.hardware.nics or 1) // rails), 1)
        downlinks = topology.nodes_per_switch[place.leaf] * each
        uplinks = topology.switches[place.leaf].uplinks or max(round(downlinks / speedup), 1)
        return RailFabric(uplinks=uplinks, speedup=speedup, rails=rails, active=active or downlinks)


def conflict_factor(fabric: RailFabric, flows_per_nic: int = 1) -> float:
    """Return the slowdown factor by hash conflicts of equal transfers of all active NICs of a leaf
    switch, relative to transfers limited by NICs. flows_per_nic: connections over which a NIC
    spreads its bytes; many of them balance the load.

    >>> round(conflict_factor(RailFabric(uplinks=8, active=8)), 2)
    2.6
    >>> round(conflict_factor(RailFabric(uplinks=8, active=8, speedup=2.0)), 2)
    1.3
    """
    load = largest_load(fabric.active * flows_per_nic, fabric.uplinks) / flows_per_nic
    return max(load / fabric.speedup, 1.0)

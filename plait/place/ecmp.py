"""How much slower a transfer between two nodes gets where switches choose uplinks by a hash (ECMP).

A flow keeps to one uplink, whatever its size; f equal flows over u uplinks hash independently and alike, and
the slowest ends with the fullest uplink. Flows that stay under one leaf meet no hash. With rails, NICs of
equal number share a leaf switch: flows between them stay in it below the leaf, and have its uplinks for
themselves above. Conflicts further up are not counted.

MegaScale (NSDI'24, section 3.6) lessens conflicts in the three ways that are parameters here: uplinks twice
as fast as downlinks (``speedup``), the eight NICs of a server on eight switches (``rails``), and nodes that
exchange much under the same switch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from plait.core.topology.switches import Topology

MOST_EXACT = 2048
"""Flows times uplinks up to which the exact sum is made. Beyond, loads count as independent Poisson
variables, which is less than 0.02 flows off there."""


def largest_load(flows: int, uplinks: int) -> float:
    """Flows expected on the fullest of ``uplinks`` when ``flows`` choose one each, independently and alike:
    the sum over k of 1 - P(no uplink has more than k).

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
    expected += level  # the fullest has at least the mean
    while level < flows:
        above = 1.0 - _none_above(flows, uplinks, level)
        expected += above
        level += 1
        if above < 1e-12:
            break
    return expected


def _none_above(flows: int, uplinks: int, level: int) -> float:
    """The probability that no uplink has more than ``level``, filling one uplink after the other: how many
    the next one takes of those left is binomial."""
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
    """Probabilities of 0 to ``most`` successes of ``count``."""
    logs = (math.log(chance), math.log1p(-chance))
    total = math.lgamma(count + 1)
    return tuple(
        math.exp(total - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * logs[0] + (count - k) * logs[1])
        for k in range(most + 1)
    )


def _large(flows: int, uplinks: int) -> float:
    """Loads as independent Poisson variables: E[max] is the sum over k of 1 - P(load <= k)^uplinks."""
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
    """The largest of ``count`` standard normal variables, expected: the mean of the Gumbel distribution that
    it tends to."""
    if count == 1:
        return 0.0
    root = math.sqrt(2 * math.log(count))
    return root - (math.log(math.log(count)) + math.log(4 * math.pi)) / (2 * root) + 0.5772156649 / root


@dataclass(frozen=True, kw_only=True)
class RailFabric:
    """What the hash sees. uplinks: of a leaf switch on each rail. speedup: rate of an uplink over a NIC's.
    rails: planes of the fabric. active: NICs under one leaf switch that send upwards at the same time."""

    uplinks: int = 32
    speedup: float = 1.0
    rails: int = 1
    active: int = 32

    def __post_init__(self) -> None:
        if self.uplinks < 1 or self.rails < 1 or self.active < 1 or not 0 < self.speedup < math.inf:
            raise ValueError(f"{self}: counts are at least 1, the speed-up is above 0")

    @staticmethod
    def of(topology: Topology, node: str, *, speedup: float = 1.0, active: int | None = None) -> RailFabric:
        """Of the leaf that a node is plugged into. Where the source tells no uplinks: as many as carry what
        its nodes can send. active: left out, all of them send."""
        place = topology.node(node)
        rails = max(place.hardware.rails or 1, 1)
        each = max(-(-(place.hardware.nics or 1) // rails), 1)
        downlinks = topology.plugged[place.leaf] * each
        uplinks = topology.switches[place.leaf].uplinks or max(round(downlinks / speedup), 1)
        return RailFabric(uplinks=uplinks, speedup=speedup, rails=rails, active=active or downlinks)


def conflict_factor(fabric: RailFabric, flows_per_nic: int = 1) -> float:
    """How many times longer equal transfers of all active NICs of a leaf switch take for hashing than if NICs
    were the limit. flows_per_nic: connections over which a NIC spreads its bytes; many even out.

    >>> round(conflict_factor(RailFabric(uplinks=8, active=8)), 2)
    2.6
    >>> round(conflict_factor(RailFabric(uplinks=8, active=8, speedup=2.0)), 2)
    1.3
    """
    load = largest_load(fabric.active * flows_per_nic, fabric.uplinks) / flows_per_nic
    return max(load / fabric.speedup, 1.0)

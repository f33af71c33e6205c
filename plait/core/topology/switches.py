"""Topology: the switches of a cluster's network as a tree, and the nodes below them with what they are doing.

A *leaf* is the switch that a node is plugged into (where nodes have several rails: the set of rail switches
that the same nodes share). A *minipod* is a switch one level below the top, with everything under it; another
level may be asked for by its name or its depth, the top being 0. Trees may be of any depth, and uneven: the
switch of a node that is plugged in above the level asked for counts as a minipod of its own.

``core.topology.wiring`` makes topologies of what files say, and checks that they are trees.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from plait.core.base.errors import JobError, nearest

Status: TypeAlias = Literal["free", "busy", "down"]
Level: TypeAlias = str | int
RESERVED_TAINT = "plait.dev/reserved"
"""Key of the taint on Kubernetes nodes that Plait holds for a job; its value is the job's name."""
MOST_LOOKED_THROUGH = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a node is made of; None and "" where the source does not say, so that 0 GPUs are none. rails:
    planes that its NICs are spread over, NIC i on rail i modulo rails. device: type of its GPUs."""

    gpus: int | None = None
    nics: int | None = None
    rails: int | None = None
    device: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """What a node is doing. until: seconds since 1970 at which its holder is expected to leave it, None if
    nobody knows. holder: a job's name or number, or why it is down."""

    status: Status = "free"
    until: float | None = None
    holder: str = ""


UNKNOWN = Hardware()
FREE = NodeState()
DOWN = NodeState(status="down")


@dataclass(frozen=True, slots=True)
class Switch:
    """parent: its place in ``Topology.switches``, -1 for the top. depth: links from the top down to it.
    uplinks: links from it to its parent, None where the source does not say."""

    name: str
    parent: int
    depth: int
    uplinks: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """leaf: place in ``Topology.switches`` of the switch that it is plugged into."""

    name: str
    leaf: int
    hardware: Hardware = UNKNOWN
    state: NodeState = FREE


@dataclass(frozen=True, kw_only=True)
class Topology:
    """switches: every one after its parent, the top first. nodes: leaf by leaf, in the order of ``switches``.
    levels: what switches of each depth are called.

    >>> from plait.core.topology.wiring import Wiring, build
    >>> tree = build([Wiring("core", ["a", "b"]), Wiring("a", nodes=["n1", "n2"]), Wiring("b", nodes=["n3"])])
    >>> tree.free()
    {'a': {'a': ('n1', 'n2')}, 'b': {'b': ('n3',)}}
    >>> tree.distance("n1", "n2"), tree.distance("n1", "n3"), tree.path("n3")
    (1, 2, ('b', 'core'))
    """

    switches: tuple[Switch, ...]
    nodes: tuple[Node, ...]
    levels: tuple[str, ...]
    name: str = ""

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of every node in ``nodes``."""
        return {node.name: place for place, node in enumerate(self.nodes)}

    @cached_property
    def plugged(self) -> Counter[int]:
        """How many nodes are plugged into each switch, by its place in ``switches``."""
        return Counter(node.leaf for node in self.nodes)

    def node(self, name: str) -> Node:
        """The node of a name. Raises JobError for one that is not there."""
        try:
            return self.nodes[self.places[name]]
        except KeyError:
            raise JobError(f"the topology has no node '{name}'{close(name, self.places)}") from None

    def depth_of(self, level: Level | None = None) -> int:
        """How deep switches of a level are: its name, its depth or, left out, one below the top. Raises
        JobError for a level that is not there."""
        last = len(self.levels) - 1
        if level is None:
            return min(1, last)
        if isinstance(level, int) or level.isdecimal():
            if 0 <= int(level) <= last:
                return int(level)
        elif level in self.levels:
            return self.levels.index(level)
        known = ", ".join(f"{depth} ({name})" for depth, name in enumerate(self.levels))
        hint = nearest(level, self.levels) if isinstance(level, str) else ""
        raise JobError(f"no level '{level}' in the topology{hint}", key="level", fix=f"Levels are {known}")

    def above(self, level: Level | None = None) -> tuple[int, ...]:
        """For every switch the place of the one at a level that it is or lies under; where it lies higher, of
        itself."""
        depth = self.depth_of(level)
        found: list[int] = []
        for place, switch in enumerate(self.switches):  # parents come first
            found.append(place if switch.depth <= depth else found[switch.parent])
        return tuple(found)

    def minipods(self, level: Level | None = None) -> dict[str, tuple[Node, ...]]:
        """The nodes of every minipod, in the order of the tree."""
        above = self.above(level)
        pods: dict[int, list[Node]] = {}
        for node in self.nodes:
            pods.setdefault(above[node.leaf], []).append(node)
        return {self.switches[pod].name: tuple(nodes) for pod, nodes in pods.items()}

    def free(self, level: Level | None = None) -> dict[str, dict[str, tuple[str, ...]]]:
        """Names of the free nodes of every leaf of every minipod. Minipods without any are kept, so that
        their order is that of ``minipods``; leaves without any are left out."""
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for pod, nodes in self.minipods(level).items():
            leaves: dict[int, list[str]] = {}
            for node in nodes:
                if node.state.status == "free":
                    leaves.setdefault(node.leaf, []).append(node.name)
            found[pod] = {self.switches[leaf].name: tuple(names) for leaf, names in leaves.items()}
        return found

    def count(self, status: Status) -> int:
        """Nodes that are free, busy or down."""
        return sum(node.state.status == status for node in self.nodes)

    def path(self, name: str) -> tuple[str, ...]:
        """The switches above a node, from its leaf to the top."""
        return tuple(self.switches[place].name for place in self._upwards(self.node(name).leaf))

    def distance(self, first: str, second: str) -> int:
        """Levels that a packet between two nodes climbs: 0 to itself, 1 under the same leaf, one more for
        every further level. Where leaves lie at different depths: of the longer way."""
        if first == second:
            self.node(first)
            return 0
        leaves = self.node(first).leaf, self.node(second).leaf
        over = set(self._upwards(leaves[0]))
        meeting = next(place for place in self._upwards(leaves[1]) if place in over)
        return 1 + max(self.switches[leaf].depth for leaf in leaves) - self.switches[meeting].depth

    def _upwards(self, place: int) -> list[int]:
        found = [place]
        while (place := self.switches[place].parent) >= 0:
            found.append(place)
        return found

    def with_states(self, states: Mapping[str, NodeState]) -> Topology:
        """The same wires and nodes, some in another state. Raises JobError for a node that is not there."""
        return self._with(states, {})

    def with_hardware(self, hardware: Mapping[str, Hardware]) -> Topology:
        """The same wires and states, some nodes made of something else."""
        return self._with({}, hardware)

    def _with(self, states: Mapping[str, NodeState], hardware: Mapping[str, Hardware]) -> Topology:
        for name in (*states, *hardware):
            self.node(name)
        nodes = tuple(
            Node(one.name, one.leaf, hardware.get(one.name, one.hardware), states.get(one.name, one.state))
            for one in self.nodes
        )
        return replace(self, nodes=nodes)

    @cached_property
    def key(self) -> str:
        """A hash of wires, nodes and states, whatever order they were told in."""
        nodes = [
            (n.name, self.switches[n.leaf].name, n.hardware.gpus, n.hardware.nics, n.hardware.rails, n.hardware.device,
             n.state.status, n.state.until, n.state.holder)
            for n in self.nodes
        ]  # fmt: skip
        return _hash([self._wires(), sorted(nodes, key=lambda node: node[0])])

    @cached_property
    def fabric_key(self) -> str:
        """A hash of wires and nodes alone: the same while jobs come and go."""
        return _hash([self._wires(), sorted((node.name, self.switches[node.leaf].name) for node in self.nodes)])

    def _wires(self) -> list[tuple[str, str, int | None]]:
        names = [switch.name for switch in self.switches]
        wires = ((s.name, names[s.parent] if s.parent >= 0 else "", s.uplinks) for s in self.switches)
        return sorted(wires, key=lambda wire: wire[:2])


def _hash(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()


def close(name: str, known: Collection[str]) -> str:
    """A name that may have been meant, where there are few enough to look through."""
    return nearest(name, known) if len(known) <= MOST_LOOKED_THROUGH else ""

"""Topology: the switches of a cluster's network as a tree, and the nodes below them with their
states.

A *leaf* is the switch to which a node is connected (if nodes have several rails: the set of rail
switches that the same nodes share). A *minipod* is a switch one level below the root, with
everything under it. Another level may be selected by its name or its depth; the root has depth 0.
Trees may be of any depth, and uneven: a node's switch above the selected level counts as a minipod
of its own.

``core.topology.wiring`` makes topologies from the content of files, and checks that they are trees.
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
"""Key of the taint on Kubernetes nodes that Plait reserves for a job; its value is the job's
name."""
MOST_LOOKED_THROUGH = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Hardware of a node. None and "": the source does not give it, so that 0 GPUs means no GPU.
    rails: planes over which its NICs are spread, NIC i on rail i modulo rails. device: type of its
    GPUs."""

    gpus: int | None = None
    nics: int | None = None
    rails: int | None = None
    device: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """State of a node. until: seconds since 1970 at which its holder is expected to leave it, None
    if unknown. holder: a job's name or number, or the reason why the node is down."""

    status: Status = "free"
    until: float | None = None
    holder: str = ""


UNKNOWN = Hardware()
FREE = NodeState()
DOWN = NodeState(status="down")


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of the tree. parent: index in ``Topology.switches``, -1 for the root. depth: links
    from the root to the switch. uplinks: links from the switch to its parent, None if the source
    does not give it."""

    name: str
    parent: int
    depth: int
    uplinks: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree. leaf: index in ``Topology.switches`` of the switch to which the node is
    connected."""

    name: str
    leaf: int
    hardware: Hardware = UNKNOWN
    state: NodeState = FREE


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A tree of switches, with nodes. switches: each after its parent, the root first. nodes: leaf
    by leaf, in the order of ``switches``. levels: names of the levels, by depth.

    >>> from plait.core.topology.wiring import SwitchEntry, build
    >>> tree = build([SwitchEntry("core", ["a", "b"]), SwitchEntry("a", nodes=["n1", "n2"]),
    ...               SwitchEntry("b", nodes=["n3"])])
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
    def node_index(self) -> dict[str, int]:
        """Index in ``nodes`` of every node, by the node's name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def nodes_per_switch(self) -> Counter[int]:
        """Number of nodes connected to each switch, by the switch's index in ``switches``."""
        return Counter(node.leaf for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node called ``name``. Raises JobError for an unknown name."""
        try:
            return self.nodes[self.node_index[name]]
        except KeyError:
            raise JobError(f"the topology has no node '{name}'{similar_name(name, self.node_index)}") from None

    def depth_of(self, level: Level | None = None) -> int:
        """Return the depth of a level. level: name or depth; by default one below the root. Raises
        JobError for an unknown level."""
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

    def ancestors_at(self, level: Level | None = None) -> tuple[int, ...]:
        """Return, for every switch, the index of the switch at ``level`` that it is or lies under;
        a switch above that level has its own index."""
        depth = self.depth_of(level)
        found: list[int] = []
        for index, switch in enumerate(self.switches):  # parents come first
            found.append(index if switch.depth <= depth else found[switch.parent])
        return tuple(found)

    def minipods(self, level: Level | None = None) -> dict[str, tuple[Node, ...]]:
        """Return the nodes of every minipod, in the order of the tree."""
        above = self.ancestors_at(level)
        pods: dict[int, list[Node]] = {}
        for node in self.nodes:
            pods.setdefault(above[node.leaf], []).append(node)
        return {self.switches[pod].name: tuple(nodes) for pod, nodes in pods.items()}

    def free(self, level: Level | None = None) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return the names of the free nodes of every leaf of every minipod. Minipods without free
        nodes are kept, so that their order is that of ``minipods``; leaves without free nodes are
        left out."""
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for pod, nodes in self.minipods(level).items():
            leaves: dict[int, list[str]] = {}
            for node in nodes:
                if node.state.status == "free":
                    leaves.setdefault(node.leaf, []).append(node.name)
            found[pod] = {self.switches[leaf].name: tuple(names) for leaf, names in leaves.items()}
        return found

    def count(self, status: Status) -> int:
        """Return the number of nodes whose status is ``status`` (free, busy or down)."""
        return sum(node.state.status == status for node in self.nodes)

    def path(self, name: str) -> tuple[str, ...]:
        """Return the switches above a node, from its leaf to the root."""
        return tuple(self.switches[index].name for index in self._upwards(self.node(name).leaf))

    def distance(self, first: str, second: str) -> int:
        """Return the levels that a packet between two nodes climbs: 0 from a node to itself, 1
        under the same leaf, one more for every further level. If the leaves have different depths,
        the longer way counts."""
        if first == second:
            self.node(first)
            return 0
        leaves = self.node(first).leaf, self.node(second).leaf
        over = set(self._upwards(leaves[0]))
        meeting = next(index for index in self._upwards(leaves[1]) if index in over)
        return 1 + max(self.switches[leaf].depth for leaf in leaves) - self.switches[meeting].depth

    def _upwards(self, index: int) -> list[int]:
        found = [index]
        while (index := self.switches[index].parent) >= 0:
            found.append(index)
        return found

    def with_states(self, states: Mapping[str, NodeState]) -> Topology:
        """Return the topology with new states of some nodes. Raises JobError for an unknown
        node."""
        return self._with(states, {})

    def with_hardware(self, hardware: Mapping[str, Hardware]) -> Topology:
        """Return the topology with new hardware of some nodes. Raises JobError for an unknown
        node."""
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
        """Hash of wires, nodes and states, independent of their order in the source."""
        nodes = [
            (n.name, self.switches[n.leaf].name, n.hardware.gpus, n.hardware.nics, n.hardware.rails, n.hardware.device,
             n.state.status, n.state.until, n.state.holder)
            for n in self.nodes
        ]  # fmt: skip
        return _hash([self._wires(), sorted(nodes, key=lambda node: node[0])])

    @cached_property
    def fabric_key(self) -> str:
        """Hash of wires and nodes alone: it stays the same while jobs come and go."""
        return _hash([self._wires(), sorted((node.name, self.switches[node.leaf].name) for node in self.nodes)])

    def _wires(self) -> list[tuple[str, str, int | None]]:
        names = [switch.name for switch in self.switches]
        wires = ((s.name, names[s.parent] if s.parent >= 0 else "", s.uplinks) for s in self.switches)
        return sorted(wires, key=lambda wire: wire[:2])


def _hash(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()


def similar_name(name: str, known: Collection[str]) -> str:
    """Return a hint at a similar known name; empty if there are too many names to compare."""
    return nearest(name, known) if len(known) <= MOST_LOOKED_THROUGH else ""

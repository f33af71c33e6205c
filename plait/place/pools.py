"""Pools of a topology's nodes, and whether those chosen are still there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.core.base.errors import PlacementError
from plait.core.base.passed_over import PassedOver
from plait.core.base.text import counted
from plait.core.topology.placement import Placement
from plait.core.topology.switches import Level, Node, Topology
from plait.place.problem import Pool
from plait.place.repair import Spot


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which nodes may be used. avoid: nodes and switches that may not. gpu: only nodes with this type. mixed:
    a minipod's types of GPU are pools of their own. preempt: also what other jobs hold. gpus: the fewest that
    a node has to have; nodes of which nobody says how many they have count as having them."""

    avoid: frozenset[str] = frozenset()
    gpu: str = ""
    mixed: bool = False
    preempt: bool = False
    level: Level | None = None
    gpus: int = 0


def pools_of(topology: Topology, wanted: Wanted) -> tuple[Pool, ...]:
    """Of every minipod. Raises PlacementError for something to avoid that is not there."""
    switches = [switch.name for switch in topology.switches]
    if unknown := sorted(wanted.avoid - set(switches) - topology.places.keys()):
        raise PlacementError(f"The topology has neither a node nor a switch called {', '.join(unknown[:5])}.")
    shunned = _below(topology, wanted.avoid)
    pools: list[Pool] = []
    for minipod, nodes in topology.minipods(wanted.level).items():
        usable = [node for node in nodes if node.leaf not in shunned and node.name not in wanted.avoid]
        usable = [node for node in usable if enough(node, wanted.gpus)]
        if wanted.gpu:
            usable = [node for node in usable if node.hardware.device.lower() == wanted.gpu.lower()]
        types = sorted({node.hardware.device for node in usable}) if wanted.mixed else [wanted.gpu]
        for gpu in types:
            own = [node for node in usable if not wanted.mixed or node.hardware.device == gpu]
            pools.append(_pool(minipod, gpu, own, preempt=wanted.preempt))
    return tuple(pools)


def enough(node: Node, gpus: int) -> bool:
    """Whether a node has so many GPUs, as far as is known."""
    return node.hardware.gpus is None or node.hardware.gpus >= gpus


def _pool(minipod: str, gpu: str, nodes: Iterable[Node], *, preempt: bool) -> Pool:
    leaves: dict[int, list[str]] = {}
    held: list[str] = []
    for node in nodes:
        if node.state.status == "free":
            leaves.setdefault(node.leaf, []).append(node.name)
        elif node.state.status == "busy" and preempt:
            held.append(node.name)
    return Pool(minipod=minipod, leaves=tuple(map(tuple, leaves.values())), held=tuple(held), gpu=gpu)


def _below(topology: Topology, names: Collection[str]) -> set[int]:
    """Switches with these names and all under them."""
    found = set[int]()
    for place, switch in enumerate(topology.switches):  # parents come first
        if switch.name in names or switch.parent in found:
            found.add(place)
    return found


def spots_of(topology: Topology, level: Level | None = None) -> dict[str, Spot]:
    """Minipod and leaf of every node."""
    above = topology.above(level)
    names = [switch.name for switch in topology.switches]
    return {node.name: Spot(names[above[node.leaf]], names[node.leaf]) for node in topology.nodes}


def types_of(topology: Topology) -> tuple[str, ...]:
    """Types of GPU of the nodes that are free."""
    return tuple(sorted({node.hardware.device for node in topology.nodes if node.state.status == "free"}))


def gpus_per_node(topology: Topology, gpu: str = "") -> int | None:
    """Of the nodes that are not down and have any; None where they differ or nobody says."""
    counts = {
        node.hardware.gpus
        for node in topology.nodes
        if node.state.status != "down" and gpu.lower() in ("", node.hardware.device.lower())
    } - {None, 0}
    return counts.pop() if len(counts) == 1 else None


def remarks_on(topology: Topology, gpus: int) -> PassedOver:
    """Which free nodes are not used for having too few GPUs, and of which nobody says how many they have."""
    over = PassedOver()
    free = [node for node in topology.nodes if node.state.status == "free"]
    for node in free:
        if not enough(node, gpus):
            over.note(f"free nodes with fewer than {counted(gpus, 'GPU')}, a rank each", node.name)
    if any(node.hardware.gpus is not None for node in free):
        for node in free:
            if node.hardware.gpus is None:
                over.note(f"missing numbers of GPUs: such nodes count as having {gpus}", node.name)
    return over


def check_still_there(placement: Placement, topology: Topology, own: Collection[str] = ()) -> None:
    """Raise PlacementError naming the hosts that were taken, went down or lost GPUs since the placement was
    made. own: hosts that the job itself holds."""
    allowed = {*placement.preempted, *own}
    states: Mapping[str, str] = {
        node.name: node.state.status for node in topology.nodes if enough(node, placement.ranks_per_node)
    }
    gone = [
        host
        for host in (*placement.hosts, *placement.spares)
        if states.get(host) != "free" and not (host in allowed and states.get(host) == "busy")
    ]
    if gone:
        many = f"{', '.join(gone[:5])}{' and others' if len(gone) > 5 else ''}"
        raise PlacementError(
            f"{many} {'is' if len(gone) == 1 else 'are'} no longer free: the cluster has changed since the job was "
            "placed. Nothing was written. Place it again."
        )


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as a person would write them.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)

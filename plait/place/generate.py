"""Clusters made up: minipods of leaves of nodes, of equal or uneven sizes, some nodes busy, some down.

How full minipods are is drawn from a Beta distribution, so that some are nearly empty and some nearly full,
and jobs take runs of neighbouring nodes from random places: what is left is fragmented as on a real cluster.
The same numbers and seed make the same cluster everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.core.base.errors import JobError
from plait.core.topology.hostlist import MOST_HOSTS
from plait.core.topology.switches import DOWN, UNKNOWN, Hardware, NodeState, Topology
from plait.core.topology.wiring import Wiring, build

CONCENTRATION = 4.0
"""Of the Beta distribution: the larger, the more alike minipods are. 4 at a mean of one half spreads them
over nearly all of 0 to 1, with a standard deviation of 0.22."""
JOB_NODES = (1, 1, 2, 4, 8, 16)
"""Sizes of jobs, one drawn like the other."""


@dataclass(frozen=True, kw_only=True)
class MinipodSizes:
    """How nodes lie in minipods. nodes: of all minipods. leaf_nodes: of a full leaf. uneven: how far sizes of
    minipods may be from the mean, as a part of it."""

    minipods: int
    nodes: int
    leaf_nodes: int = 16
    uneven: float = 0.0

    def __post_init__(self) -> None:
        """Raises JobError, naming what cannot be."""
        if not 1 <= self.minipods <= self.nodes <= MOST_HOSTS:
            problem = f"{self.nodes} nodes in {self.minipods} minipods"
            raise JobError(problem, key="nodes", fix=f"At least one node a minipod, at most {MOST_HOSTS}")
        if self.leaf_nodes < 1:
            raise JobError(f"{self.leaf_nodes} nodes a leaf", key="nodes-per-leaf", fix="At least 1")
        _check_part("uneven", self.uneven)


def generate(
    sizes: MinipodSizes,
    *,
    busy: float = 0.0,
    down: float = 0.0,
    seed: int = 0,
    hardware: Hardware = UNKNOWN,
    uplinks: int | None = None,
) -> Topology:
    """A cluster of these sizes. busy, down: parts of all nodes that jobs hold, and that are down. uplinks: of
    every leaf. Raises JobError.

    >>> tree = generate(MinipodSizes(minipods=3, nodes=18))
    >>> [len(pod) for pod in tree.minipods().values()], tree.switches[2].name, tree.nodes[0].name
    ([6, 6, 6], 'leaf1', 'n01')
    """
    _check_part("busy", busy)
    _check_part("down", down)
    chance = random.Random(seed)
    leaves = [_split(size, sizes.leaf_nodes) for size in _sizes(sizes, chance)]
    names = iter(_numbered("n", sizes.nodes))
    leaf_names = iter(_numbered("leaf", sum(map(len, leaves))))
    pods = _numbered("mp", sizes.minipods)
    wirings = [Wiring("core", pods)]
    members: list[list[str]] = []
    for pod, inside in zip(pods, leaves, strict=True):
        own = [Wiring(next(leaf_names), (), [next(names) for _ in range(size)], uplinks=uplinks) for size in inside]
        wirings += [Wiring(pod, [leaf.name for leaf in own]), *own]
        members.append([node for leaf in own for node in leaf.nodes])
    states = _states(members, busy, down, chance)
    every = {name: hardware for pod in members for name in pod} if hardware != UNKNOWN else {}
    return build(wirings, hardware=every, states=states, name=f"{sizes.minipods} minipods, seed {seed}")


def _check_part(key: str, part: float) -> None:
    if not 0 <= part < 1:
        raise JobError(f"{part:g}", key=key, fix="From 0 to below 1")


def _numbered(word: str, count: int) -> list[str]:
    digits = len(str(count))
    return [f"{word}{number:0{digits}}" for number in range(1, count + 1)]


def _sizes(of: MinipodSizes, chance: random.Random) -> list[int]:
    """Sizes that sum to ``nodes``, each at least 1."""
    minipods, nodes = of.minipods, of.nodes
    shares = [1 + of.uneven * (2 * chance.random() - 1) for _ in range(minipods)]
    whole, sizes, given = sum(shares), list[int](), 0.0
    for place, share in enumerate(shares):
        given += share
        upto = round(given / whole * nodes)
        sizes.append(min(max(upto - sum(sizes), 1), nodes - sum(sizes) - (minipods - place - 1)))
    return sizes


def _split(size: int, most: int) -> list[int]:
    """A minipod's nodes over as few leaves as hold them, as evenly as can be."""
    count = -(-size // most)
    return [size // count + (place < size % count) for place in range(count)]


def _states(pods: Sequence[Sequence[str]], busy: float, down: float, chance: random.Random) -> Mapping[str, NodeState]:
    names = [name for pod in pods for name in pod]
    states: dict[str, NodeState] = dict.fromkeys(chance.sample(names, round(down * len(names))), DOWN)
    up = [sum(name not in states for name in pod) for pod in pods]
    job = 0
    for pod, left in zip(pods, _occupied(up, min(round(busy * len(names)), sum(up)), chance), strict=True):
        while left:
            job += 1
            state = NodeState(status="busy", holder=f"job {job}")
            start, size = chance.randrange(len(pod)), min(chance.choice(JOB_NODES), left)
            left -= size
            for step in range(len(pod)):
                name = pod[(start + step) % len(pod)]
                if size and name not in states:
                    states[name] = state
                    size -= 1
    return states


def _occupied(sizes: Sequence[int], wanted: int, chance: random.Random) -> list[int]:
    """Busy nodes of every minipod, ``wanted`` in all: parts drawn from a Beta distribution, then scaled
    alike."""
    mean = wanted / sum(sizes) if sum(sizes) else 0.0
    if not 0 < mean < 1:
        return [round(mean * size) for size in sizes]
    parts = [chance.betavariate(mean * CONCENTRATION, (1 - mean) * CONCENTRATION) for _ in sizes]
    low, high = 0.0, 1e9

    def at(scale: float) -> list[float]:
        return [min(part * scale, 1.0) * size for part, size in zip(parts, sizes, strict=True)]

    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < wanted else (low, middle)
    counts = [int(count) for count in at(low)]
    for place in chance.sample(range(len(sizes)), len(sizes)):  # what rounding has left
        more = min(sizes[place] - counts[place], wanted - sum(counts))
        counts[place] += max(more, 0)
    return counts

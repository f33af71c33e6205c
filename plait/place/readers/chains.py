"""Trees from what every node says of the switches above it, as labels and cloud interfaces do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from plait.core.base.errors import JobError
from plait.core.topology.switches import Topology
from plait.core.topology.wiring import Wiring, build, usual_levels

TOP = "fabric"
"""What connects everything where no switch is told of that does."""


def from_chains(
    chains: Mapping[str, Sequence[str]], *, levels: Sequence[str] = (), nested: bool = False, top: bool = False
) -> Topology:
    """chains: of every node, the switches above it from the outermost to its leaf. levels: what these are
    called. nested: equal names under different switches are different switches, as a rack 1 in every block.
    top: whether something above all chains is to be added even where there is one outermost switch.

    Raises JobError for a switch that two nodes put under different ones.
    """
    if not chains:
        raise JobError("no node says which switches are above it")
    chains = _told_apart(chains) if nested else chains
    parents: dict[str, str] = {}
    switches: dict[str, None] = {}
    leaves: dict[str, list[str]] = {}
    for node, chain in chains.items():
        for above, below in pairwise(chain):
            if parents.setdefault(below, above) != above:
                problem = f"its switch '{below}' is under '{above}', and under '{parents[below]}' for others"
                raise JobError(problem, key=node)
        switches |= dict.fromkeys(chain)
        leaves.setdefault(chain[-1], []).append(node)
    outermost = [name for name in switches if name not in parents]
    children: dict[str, list[str]] = {}
    if len(outermost) > 1 or (top and outermost):
        name = TOP
        while name in switches:
            name += "_"
        children[name] = outermost
        levels = (TOP, *levels) if levels else ()
        switches = {name: None, **switches}
    for below, above in parents.items():
        children.setdefault(above, []).append(below)
    tree = build(Wiring(name, children.get(name, ()), leaves.get(name, ())) for name in switches)
    depth = len(tree.levels)
    named = tuple(levels) if len(levels) == depth else usual_levels(depth)
    return Topology(switches=tree.switches, nodes=tree.nodes, levels=named)


def _told_apart(chains: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Names that stand at several places of the tree get those above them put before."""
    places: dict[str, set[tuple[str, ...]]] = {}
    for chain in {tuple(chain) for chain in chains.values()}:  # many nodes, few leaves
        for depth, name in enumerate(chain):
            places.setdefault(name, set()).add(chain[:depth])
    several = {name for name, above in places.items() if len(above) > 1}
    if not several:
        return chains
    return {
        node: tuple("/".join(chain[: depth + 1]) if name in several else name for depth, name in enumerate(chain))
        for node, chain in chains.items()
    }

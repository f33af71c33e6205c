"""The order of ranks on the nodes that a cluster's manager has granted: what the placer says is best there,
and how good that is beside the best on all nodes that are free.

A manager chooses nodes for its own reasons, and numbers them by name; a table that was made before may name
others. So the placer is asked at every start, with no other nodes than those that were granted."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.placing import Placing
from plait.api.topologies import read_topology
from plait.core.base.errors import PlacementError
from plait.core.base.text import counted
from plait.core.topology.form import to_dict
from plait.core.topology.placement import Placement
from plait.core.topology.switches import DOWN, FREE, UNKNOWN, Topology

if TYPE_CHECKING:
    from plait.core.job.plan import Plan
    from plait.launch.slurm_nodes import GrantedNodes


@dataclass(frozen=True)
class OrderedNodes:
    """here: the placement on the nodes that were granted. free: that on these and all that are free. when:
    they are, or were."""

    here: Placement
    free: Placement
    when: str = "are free now"

    @property
    def told(self) -> str:
        """A sentence on both."""
        one = self.here
        kind = "predicted seconds" if one.by == "seconds" else f"weighted spread at alpha {one.alpha:.2f}"
        return (
            f"nodes are ordered by the placer: {kind} {one.score:.3g}, on {counted(one.used, 'minipod')}; with all "
            f"nodes that {self.when}, plait place would get {self.free.score:.3g}"
        )


def ordered(plan: Plan, tree: Topology, granted: GrantedNodes, when: str = "are free now") -> OrderedNodes:
    """The best order of the granted nodes for a plan. tree: the cluster, and what its nodes are doing.
    when: that was, in words. Raises PlacementError for nodes that it does not have, or that the plan's groups
    do not fit on."""
    if missing := [host for host in granted.hosts if host not in tree.places]:
        raise PlacementError(f"The topology has no node {', '.join(missing[:5])}.")
    own = dict.fromkeys(granted.hosts, FREE)
    tree = tree.with_states(own).with_hardware(dict.fromkeys(granted.hosts, UNKNOWN))  # a manager has checked them
    others = {node.name: DOWN for node in tree.nodes if node.name not in own}
    here = _best(plan, tree.with_states(others), granted.each)
    if len(here.hosts) != granted.count:
        raise PlacementError(f"The plan needs {len(here.hosts)} nodes, and ranks are on {granted.count}.")
    return OrderedNodes(here, _best(plan, tree, granted.each), when)


def _best(plan: Plan, tree: Topology, each: int) -> Placement:
    asked = Placing(job=plan, topology=tree, overrides=(f"place.gpus_per_node={each}", "place.spares=0"))
    asked.read()
    return asked.placed()


def slurm_order(plan: Plan, granted: GrantedNodes) -> tuple[Sequence[str], str]:
    """``ordered`` by what Slurm says of its switches and nodes."""
    tree, _ = read_topology("slurm:")
    found = ordered(plan, tree, granted)
    return found.here.hosts, found.told


def pod_order(plan: Plan, granted: GrantedNodes, file: Path) -> tuple[Sequence[str], str]:
    """``ordered`` by a topology that was sent along: pods need no right to see nodes then."""
    tree, _ = read_topology(str(file))
    found = ordered(plan, tree, granted, "were free when it was sent")
    return found.here.hosts, found.told


def kubernetes_topology(nodes: Sequence[Any], pods: Sequence[Any]) -> str:
    """The topology that nodes' labels tell, in Plait's own form. pods: which hold nodes. Raises JobError
    where labels tell none."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"kind": "List", "items": [one | {"kind": "Node"} for one in nodes]
                   + [one | {"kind": "Pod"} for one in pods]}, file)  # fmt: skip
        file.flush()
        tree, _ = read_topology(file.name)
    return json.dumps(to_dict(tree))

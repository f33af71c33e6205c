"""The entry point of a run inside a Slurm job or a pod, with the detection of hangs and the order
of its nodes.

python -m plait.api.in_cluster RUN_FOLDER          in the batch script (``plait.launch.slurm.job``)
python -m plait.api.in_cluster                     in a pod (``plait.launch.kubernetes.pod``)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.placing import PlacementRequest
from plait.api.ranks import hang_detection_of_plan
from plait.api.topologies import read_topology
from plait.core.base.errors import PlacementError, PlaitError
from plait.core.base.text import counted
from plait.core.topology.form import to_dict
from plait.core.topology.placement import Placement
from plait.core.topology.switches import DOWN, FREE, UNKNOWN, Topology

if TYPE_CHECKING:
    from plait.core.job.plan import Plan
    from plait.launch.slurm.nodes import GrantedNodes


def main() -> int:
    """Run the launcher of a batch job or of a pod; return its exit status."""
    if sys.argv[1:]:
        from plait.launch.slurm import job

        return job.main(hang_detection_of_plan, slurm_order)
    from plait.launch.kubernetes import pod

    try:
        return pod.main(hang_detection_of_plan, pod_order)
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        return 1  # another pod knows the outcome of the run


@dataclass(frozen=True)
class OrderedNodes:
    """Two placements of a plan. granted: on the granted nodes. free: on these and all free nodes.
    when_free: the time at which the nodes of ``free`` are or were free, in words."""

    granted: Placement
    free: Placement
    when_free: str = "are free now"

    @property
    def description(self) -> str:
        """A sentence that compares both placements."""
        one = self.granted
        kind = "predicted seconds" if one.by == "seconds" else f"weighted spread at alpha {one.alpha:.2f}"
        return (
            f"nodes are ordered by the placer: {kind} {one.score:.3g}, on {counted(one.used, 'minipod')}; with all "
            f"nodes that {self.when_free}, plait place would get {self.free.score:.3g}"
        )


def order_nodes(plan: Plan, tree: Topology, granted: GrantedNodes, when_free: str = "are free now") -> OrderedNodes:
    """Return the best order of the granted nodes for a plan. tree: the cluster and its nodes'
    states. when_free: the time of these states, in words. Raises PlacementError for nodes that the
    topology lacks, and if the plan's groups do not fit on the granted nodes."""
    if missing := [host for host in granted.hosts if host not in tree.node_index]:
        raise PlacementError(
            f"The topology has no node {', '.join(missing[:5])}. Give this cluster's (place.topology)."
        )
    own = dict.fromkeys(granted.hosts, FREE)
    tree = tree.with_states(own).with_hardware(dict.fromkeys(granted.hosts, UNKNOWN))  # checked by the manager
    others = {node.name: DOWN for node in tree.nodes if node.name not in own}
    here = _best(plan, tree.with_states(others), granted.each)
    if len(here.hosts) != granted.nodes:
        raise PlacementError(f"The plan needs {len(here.hosts)} nodes, and ranks are on {granted.nodes}.")
    return OrderedNodes(here, _best(plan, tree, granted.each), when_free)


def _best(plan: Plan, tree: Topology, each: int) -> Placement:
    asked = PlacementRequest(job=plan, topology=tree, overrides=(f"place.gpus_per_node={each}", "place.spares=0"))
    asked.read()
    return asked.solve()


def slurm_order(plan: Plan, granted: GrantedNodes) -> tuple[Sequence[str], str]:
    """Return (best order of the granted nodes by Slurm's switches and node states, a sentence on
    it). Raises PlacementError and JobError if there is none."""
    tree, _ = read_topology("slurm:")
    found = order_nodes(plan, tree, granted)
    return found.granted.hosts, found.description


def pod_order(plan: Plan, granted: GrantedNodes, file: Path) -> tuple[Sequence[str], str]:
    """Return (best order of the granted nodes by a topology file sent with the run, a sentence on
    it). Pods need no right to read nodes then. Raises PlacementError and JobError if there is none.
    """
    tree, _ = read_topology(str(file))
    found = order_nodes(plan, tree, granted, "were free when it was sent")
    return found.granted.hosts, found.description


def kubernetes_topology(nodes: Sequence[Any], pods: Sequence[Any]) -> str:
    """Return the topology in the labels of nodes, as JSON in Plait's own form. pods: the pods,
    which occupy nodes. Raises JobError if the labels contain no topology."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"kind": "List", "items": [one | {"kind": "Node"} for one in nodes]
                   + [one | {"kind": "Pod"} for one in pods]}, file)  # fmt: skip
        file.flush()
        tree, _ = read_topology(file.name)
    return json.dumps(to_dict(tree))


if __name__ == "__main__":
    sys.exit(main())

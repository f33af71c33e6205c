"""The order of ranks on granted nodes: the best there is, on drawn topologies, by counting all; and
what is said."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from plait.api.in_cluster import OrderedNodes, kubernetes_topology, order_nodes, pod_order
from plait.core.base.errors import JobError, PlacementError
from plait.core.topology.switches import NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build
from plait.launch.slurm.nodes import GrantedNodes
from tests.support.orders import a_plan, least_score, score

TIER = "unit"


def a_tree(pods: list[int]) -> Topology:
    names = iter(f"n{number}" for number in range(sum(pods)))
    leaves = [SwitchEntry(f"pod{at}", nodes=list(itertools.islice(names, size))) for at, size in enumerate(pods)]
    return build([SwitchEntry("core", [leaf.name for leaf in leaves]), *leaves])


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_the_best_there_is_on_the_nodes_that_were_granted(seed: int) -> None:
    drawn = random.Random(seed)
    dp, pp = drawn.choice([(2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (6, 1), (1, 6)])
    tree = a_tree([drawn.randint(1, 5) for _ in range(drawn.randint(2, 4))] + [dp * pp])
    hosts = drawn.sample([node.name for node in tree.nodes], dp * pp)
    plan = a_plan(dp, pp, drawn.choice([0.0, 0.3, 0.5, 0.9, 1.0]))
    busy = {name: NodeState(status=drawn.choice(["busy", "free", "down"])) for name in tree.node_index}
    found = order_nodes(plan, tree.with_states(busy), GrantedNodes(tuple(hosts), dp * pp, 1))
    assert sorted(found.granted.hosts) == sorted(hosts)
    assert found.granted.score == pytest.approx(least_score(plan, tree, hosts))
    assert found.granted.score == pytest.approx(score(plan, tree, found.granted.hosts))
    assert found.free.score <= found.granted.score + 1e-9


def test_slurms_own_order_is_not_taken_where_a_better_one_is_known() -> None:
    """24 x 16 nodes over four minipods of 96: neighbours by switches are DP-aligned, and PP groups
    then lie in all."""
    tree = a_tree([96] * 4)
    hosts = tuple(node.name for node in tree.nodes)
    found = order_nodes(a_plan(24, 16, 0.0), tree, GrantedNodes(hosts, 384, 1))
    assert found.granted.score == found.free.score == 1.0
    assert "weighted spread at alpha 0.00 1, on 4 minipods; with all nodes that are free now" in found.description


def test_a_node_that_nobody_knows_is_named() -> None:
    with pytest.raises(PlacementError, match="The topology has no node x9"):
        order_nodes(a_plan(2, 1, 0.5), a_tree([2]), GrantedNodes(("n0", "x9"), 2, 1))


def test_spares_are_chosen_by_the_placer() -> None:
    tree = a_tree([1, 2, 1])
    found: OrderedNodes = order_nodes(a_plan(2, 1, 0.5), tree, GrantedNodes(("n0", "n1", "n2", "n3"), 2, 1))
    assert set(found.granted.hosts) == {"n1", "n2"}


def test_a_run_in_a_job_asks_the_manager_it_is_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from plait.api import in_cluster
    from plait.place.topologies import Remarks

    asked = list[str]()
    monkeypatch.setattr(in_cluster, "read_topology", lambda path: asked.append(path) or (a_tree([2, 2]), Remarks()))
    hosts, told = in_cluster.slurm_order(a_plan(2, 1, 0.5), GrantedNodes(("n0", "n3"), 2, 1))
    assert sorted(hosts) == ["n0", "n3"] and asked == ["slurm:"]
    assert told.startswith("nodes are ordered by the placer: ")


def test_pods_order_their_nodes_by_the_labels_that_were_sent_along(tmp_path: Path) -> None:
    """Two pods of a stage in each of two blocks, whatever their numbers, at alpha 0 two of a
    replica."""

    def node(name: str, block: str) -> dict[str, object]:
        labels = {"cloud.provider.com/topology-block": block, "kubernetes.io/hostname": name}
        ready = [{"type": "Ready", "status": "True"}]
        return {"metadata": {"name": name, "labels": labels}, "status": {"conditions": ready}}

    block = {f"n{at}": "ab"[at % 2] for at in range(6)}
    busy = {"metadata": {"name": "other"}, "spec": {"nodeName": "n5", "containers": [
        {"name": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}, "status": {"phase": "Running"}}  # fmt: skip
    file = tmp_path / "topology.json"
    file.write_text(kubernetes_topology([node(*one) for one in block.items()], [busy]))
    plan = a_plan(2, 2, 1.0)
    hosts, told = pod_order(plan, GrantedNodes(("n0", "n1", "n2", "n3"), 4, 1), file)
    assert sorted(hosts) == ["n0", "n1", "n2", "n3"]
    assert all(len({block[hosts[rank]] for rank in group}) == 1 for group in plan.layout.groups("dp"))
    assert "plait place would get" in told and "nodes that were free when it was sent" in told
    with pytest.raises(PlacementError, match="The topology has no node x9"):
        pod_order(plan, GrantedNodes(("n0", "n1", "n2", "x9"), 4, 1), file)


def test_nodes_whose_labels_name_no_switch_have_no_order() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    with pytest.raises(JobError, match="no label of these nodes is known to name a switch"):
        kubernetes_topology([{"metadata": {"name": "n0", "labels": {}}, "status": ready}], [])

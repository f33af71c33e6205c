"""Kubernetes' nodes and Topograph's graph: levels from labels, states from taints, conditions and cordons."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import JobError
from plait.core.topology import RESERVED_TAINT, State
from plait.place.readers import read_topology
from tests.place.readers import texts
from tests.place.readers.test_formats import shape, write
from tests.place.readers.texts import BLOCK, RACK, node, node_list, pod


def nodes(labels: dict[str, str]) -> list[dict[str, Any]]:
    """The small cluster's nodes; labels: for ``leaf`` and ``pod``."""
    return [node(name, {labels["leaf"]: leaf, labels["pod"]: pod}) for name, (leaf, pod) in texts.ABOVE.items()]


def test_levels_are_those_that_the_user_names(tmp_path: Path) -> None:
    file = write(tmp_path, node_list(*nodes({"leaf": "site/rack", "pod": "site/row"})))
    topology, _ = read_topology(file, levels=["site/row", "site/rack", "kubernetes.io/hostname"])
    assert topology.levels == ("fabric", "site/row", "site/rack")
    assert list(topology.minipods("site/row")) == ["mp1", "mp2"]
    with pytest.raises(JobError, match="no label of these nodes is known to name a switch"):
        read_topology(file)
    with pytest.raises(JobError, match="no node has all of the labels site/hall, site/rack"):
        read_topology(file, levels=["site/hall", "site/rack"])


def test_levels_of_a_known_cloud(tmp_path: Path) -> None:
    topology, _ = read_topology(write(tmp_path, node_list(*nodes({"leaf": RACK, "pod": BLOCK}))))
    assert topology.levels == ("fabric", BLOCK, RACK)
    old = {"leaf": "network.topology.nvidia.com/leaf", "pod": "network.topology.nvidia.com/spine"}
    assert shape(read_topology(write(tmp_path, node_list(*nodes(old))))[0]) == shape(topology)


def test_racks_of_equal_names_in_different_blocks_are_different(tmp_path: Path) -> None:
    items = [node(f"n{b}{r}", {BLOCK: f"b{b}", RACK: f"r{r}"}) for b in (1, 2) for r in (1, 2)]
    topology, _ = read_topology(write(tmp_path, node_list(*items)))
    assert list(topology.minipods(RACK)) == ["b1/r1", "b1/r2", "b2/r1", "b2/r2"]
    assert topology.distance("n11", "n21") == 3


def test_topographs_switches_have_one_name_everywhere(tmp_path: Path) -> None:
    tiers = {"leaf": "fabric.topograph.run/tier-0", "pod": "fabric.topograph.run/tier-1"}
    items = nodes(tiers)
    topology, _ = read_topology(write(tmp_path, node_list(*items)))
    assert topology.switches[0].name == "fabric"  # two tier-1 switches and nothing above
    items[1]["metadata"]["labels"][tiers["pod"]] = "mp2"
    with pytest.raises(JobError, match="n002: its switch 'leaf1' is under 'mp2', and under 'mp1' for others"):
        read_topology(write(tmp_path, node_list(*items)))


def test_accelerator_domains(tmp_path: Path) -> None:
    domain, leaf = "accelerator.topograph.run/domain", "fabric.topograph.run/tier-0"
    alone = [node(f"n{i}", {domain: f"nvl{i // 2}"}) for i in range(6)]
    assert [len(pod) for pod in read_topology(write(tmp_path, node_list(*alone)))[0].minipods().values()] == [2, 2, 2]
    inside = [node(f"n{i}", {domain: f"nvl{i // 2}", leaf: f"leaf{i // 4}"}) for i in range(6)]
    topology, _ = read_topology(write(tmp_path, node_list(*inside)))
    assert topology.path("n5") == ("nvl2", "leaf1", "fabric")
    across = [node(f"n{i}", {domain: f"nvl{i % 2}", leaf: f"leaf{i // 4}"}) for i in range(6)]
    assert read_topology(write(tmp_path, node_list(*across)))[0].path("n5") == ("leaf1", "fabric")


def test_nodes_without_labels_are_left_out_and_said(tmp_path: Path) -> None:
    topology, notes = read_topology(write(tmp_path, texts.TIERS))
    assert "control-plane" not in topology.places
    assert "1 nodes without these labels are left out, the first control-plane" in notes[0]


def test_one_of_several_kueue_topologies(tmp_path: Path) -> None:
    other = json.loads(json.dumps(texts.KUEUE_TOPOLOGY))
    other["metadata"]["name"], other["spec"]["levels"] = "rows", [{"nodeLabel": BLOCK}]
    file = write(tmp_path, node_list(*nodes({"leaf": RACK, "pod": BLOCK}), texts.KUEUE_TOPOLOGY, other))
    with pytest.raises(JobError, match="several Topologies: default, rows"):
        read_topology(file)
    assert read_topology(file, name="rows")[0].levels == ("fabric", BLOCK)
    with pytest.raises(JobError, match=r"no Topology 'row'.*There are default, rows"):
        read_topology(file, name="row")


@pytest.mark.parametrize(
    "changes, state",
    [
        ({}, State()),
        ({"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]},
         State(status="down", holder="not ready: NodeStatusUnknown")),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, State(status="down", holder="not ready: unknown")),
        ({"conditions": []}, State(status="down")),
        ({"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}]}, State()),
        ({"spec": {"unschedulable": True}}, State(status="down", holder="cordoned")),
        ({"spec": {"taints": [{"key": RESERVED_TAINT, "value": "llama-70b", "effect": "NoSchedule"}]}},
         State(status="busy", holder="llama-70b")),
        ({"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}, State()),
        ({"spec": {"unschedulable": True, "taints": [{"key": RESERVED_TAINT}]}},
         State(status="down", holder="cordoned")),
    ],
)  # fmt: skip
def test_states(tmp_path: Path, changes: dict[str, Any], state: State) -> None:
    topology, _ = read_topology(write(tmp_path, node_list(node("n1", {BLOCK: "b"}, **changes))))
    assert topology.node("n1").state == state
    assert topology.node("n1").hardware.gpus == 8


@pytest.mark.parametrize(
    "break_it, says",
    [
        (lambda item: item["metadata"].pop("name"), r"items\[0\].metadata.name: no name"),
        (lambda item: item["metadata"].update(labels={BLOCK: 3}), "n1.metadata.labels: labels that are no texts"),
        (lambda item: item["metadata"].update(labels={BLOCK: "a b"}), "'a b' cannot be the name of a switch"),
        (lambda item: item.update(status=3), "n1.status: not an object|n1: not an object"),
        (lambda item: item["status"].update(conditions={"a": 1}), "n1.status.conditions: not a list"),
        (lambda item: item["status"].update(allocatable={"nvidia.com/gpu": "x"}), "n1.status.allocatable: 'x' GPUs"),
        (lambda item: item["spec"].update(taints="x"), "n1.spec.taints: not a list"),
        (lambda item: item["spec"].update(taints=["x"]), "n1.spec.taints: not an object"),
    ],
)  # fmt: skip
def test_a_wrong_node_is_named(tmp_path: Path, break_it: Any, says: str) -> None:
    item = node("n1", {BLOCK: "b"})
    break_it(item)
    file = write(tmp_path, node_list(item))
    with pytest.raises(JobError, match=says):
        read_topology(file)


def test_a_node_listed_twice(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"items\[1\]: the node 'n1' is listed twice"):
        read_topology(write(tmp_path, node_list(node("n1", {BLOCK: "b"}), node("n1", {BLOCK: "c"}))))


def test_topographs_graph(tmp_path: Path) -> None:
    topology, _ = read_topology(write(tmp_path, texts.GRAPH))
    assert topology.path("n008") == ("leaf4", "mp2", "core")
    assert topology.node("n008").hardware.device == "H100"
    domains = {"instances": [{"id": f"i{k}", "attributes": {"nvlink": f"nvl{k // 3}"}} for k in range(6)]}
    assert len(read_topology(write(tmp_path, json.dumps(domains)))[0].minipods()) == 2
    some = json.loads(texts.GRAPH)
    some["instances"].append({"id": "lost"})
    _, notes = read_topology(write(tmp_path, json.dumps(some)))
    assert "1 instances without layers are left out, the first lost" in notes[0]
    some["instances"].append({"id": "lost"})
    with pytest.raises(JobError, match=r"instances\[9\]: the instance 'lost' stands twice"):
        read_topology(write(tmp_path, json.dumps(some)))


def test_ten_thousand_nodes_are_read_at_once(tmp_path: Path) -> None:
    items = [node(f"n{i}", {BLOCK: f"b{i // 80}", RACK: f"r{i // 16}"}) for i in range(10_000)]
    graph = {"instances": [{"id": f"n{i}", "network_layers": [f"r{i // 16}", f"b{i // 80}"]} for i in range(10_000)]}
    for text in (node_list(*items), json.dumps(graph)):
        file, best = write(tmp_path, text), float("inf")
        for _ in range(3):
            start = time.process_time()  # others' work does not count
            topology, _ = read_topology(file)
            best = min(best, time.process_time() - start)
        assert len(topology.minipods()) == 125
        assert best < 1  # 0.2 s alone; ten times as much if it were not linear


def test_pods_hold_the_nodes_whose_gpus_they_have(tmp_path: Path) -> None:
    job = {"jobset.sigs.k8s.io/jobset-name": "llama", "batch.kubernetes.io/job-name": "llama-workers-0"}
    pods = [
        pod("a", "n001", 8, labels=job),
        pod("a2", "n001", 1, labels=job),
        pod("b", "n002", 1),
        pod("c", "n002", 1, phase="Pending"),
        pod("agent", "n003", 0),
        pod("done", "n004", 8, phase="Succeeded"),
        pod("waits", None, 8, phase="Pending"),
    ]
    nodes_file = write(tmp_path, node_list(*nodes({"leaf": RACK, "pod": BLOCK}), *pods))
    apart = write(tmp_path, node_list(*nodes({"leaf": RACK, "pod": BLOCK})), "nodes")
    theirs = write(tmp_path, node_list(*pods), "pods")
    for topology, notes in (read_topology(nodes_file), read_topology(apart, states=[theirs])):
        busy = {one.name: one.state.holder for one in topology.nodes if one.state.status == "busy"}
        assert busy == {"n001": "llama", "n002": "b, c"}
        assert notes == []
    with pytest.raises(JobError, match=r"items\[0\].spec.containers: not a list"):
        read_topology(
            write(tmp_path, node_list(pod("a", "n", 1) | {"spec": {"nodeName": "n"}}, node("n", {BLOCK: "b"})))
        )

"""Kubernetes' nodes and Topograph's graph: levels from labels, lists of objects, what is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.place.topologies import read_topology
from tests.place.readers import texts
from tests.place.readers.test_formats import shape, told, write
from tests.place.readers.texts import BLOCK, RACK, node, node_list, nodes, pod


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
    topology, _ = told(tmp_path, node_list(*nodes({"leaf": RACK, "pod": BLOCK})))
    assert topology.levels == ("fabric", BLOCK, RACK)
    old = {"leaf": "network.topology.nvidia.com/leaf", "pod": "network.topology.nvidia.com/spine"}
    assert shape(told(tmp_path, node_list(*nodes(old)))[0]) == shape(topology)


def test_racks_of_equal_names_in_different_blocks_are_different(tmp_path: Path) -> None:
    items = [node(f"n{b}{r}", {BLOCK: f"b{b}", RACK: f"r{r}"}) for b in (1, 2) for r in (1, 2)]
    topology, _ = told(tmp_path, node_list(*items))
    assert list(topology.minipods(RACK)) == ["b1/r1", "b1/r2", "b2/r1", "b2/r2"]
    assert topology.distance("n11", "n21") == 3


def test_topographs_switches_have_one_name_everywhere(tmp_path: Path) -> None:
    tiers = {"leaf": "fabric.topograph.run/tier-0", "pod": "fabric.topograph.run/tier-1"}
    items = nodes(tiers)
    topology, _ = told(tmp_path, node_list(*items))
    assert topology.switches[0].name == "fabric"  # two tier-1 switches and nothing above
    items[1]["metadata"]["labels"][tiers["pod"]] = "mp2"
    with pytest.raises(JobError, match="n002: its switch 'leaf1' is under 'mp2', and under 'mp1' for others"):
        told(tmp_path, node_list(*items))


def test_accelerator_domains(tmp_path: Path) -> None:
    domain, leaf = "accelerator.topograph.run/domain", "fabric.topograph.run/tier-0"
    alone = [node(f"n{i}", {domain: f"nvl{i // 2}"}) for i in range(6)]
    assert [len(pod) for pod in told(tmp_path, node_list(*alone))[0].minipods().values()] == [2, 2, 2]
    inside = [node(f"n{i}", {domain: f"nvl{i // 2}", leaf: f"leaf{i // 4}"}) for i in range(6)]
    topology, _ = told(tmp_path, node_list(*inside))
    assert topology.path("n5") == ("nvl2", "leaf1", "fabric")
    across = [node(f"n{i}", {domain: f"nvl{i % 2}", leaf: f"leaf{i // 4}"}) for i in range(6)]
    assert told(tmp_path, node_list(*across))[0].path("n5") == ("leaf1", "fabric")


def test_nodes_without_labels_are_left_out_and_said(tmp_path: Path) -> None:
    topology, remarks = told(tmp_path, texts.TIERS)
    assert "control-plane" not in topology.node_index
    assert remarks.over.lines() == [
        "passed over 1 nodes without the labels that name switches (the first: control-plane)"
    ]


def test_one_of_several_kueue_topologies(tmp_path: Path) -> None:
    other = json.loads(json.dumps(texts.KUEUE_TOPOLOGY))
    other["metadata"]["name"], other["spec"]["levels"] = "rows", [{"nodeLabel": BLOCK}]
    file = write(tmp_path, node_list(*nodes({"leaf": RACK, "pod": BLOCK}), texts.KUEUE_TOPOLOGY, other))
    with pytest.raises(JobError, match="several Topologies: default, rows"):
        read_topology(file)
    assert read_topology(file, name="rows")[0].levels == ("fabric", BLOCK)
    with pytest.raises(JobError, match=r"no Topology 'row'.*There are default, rows"):
        read_topology(file, name="row")


def test_topographs_graph(tmp_path: Path) -> None:
    topology, _ = told(tmp_path, texts.GRAPH)
    assert topology.path("n008") == ("leaf4", "mp2", "core")
    assert topology.node("n008").hardware.device == "H100"
    domains = {"instances": [{"id": f"i{k}", "attributes": {"nvlink": f"nvl{k // 3}"}} for k in range(6)]}
    assert len(told(tmp_path, json.dumps(domains))[0].minipods()) == 2
    some = json.loads(texts.GRAPH)
    some["instances"].append({"id": "lost"})
    _, remarks = told(tmp_path, json.dumps(some))
    assert remarks.over.lines() == ["passed over 1 instances without layers (the first: lost)"]
    some["instances"].append({"id": "lost"})
    with pytest.raises(JobError, match=r"instances\[9\]: the instance 'lost' is listed twice"):
        told(tmp_path, json.dumps(some))


OCI = "oci.oraclecloud.com/rdma."


def oci(name: str, island: str, network: str, local: str) -> dict[str, Any]:
    values = {"hpc_island_id": island, "network_block_id": network, "local_block_id": local}
    return node(name, {OCI + key: value for key, value in values.items() if value})


def test_labels_of_ocis_network(tmp_path: Path) -> None:
    items = [oci("n1", "i1", "nb1", "lb1"), oci("n2", "i1", "nb1", "lb2"), oci("n3", "i1", "nb2", "lb1")]
    items += [oci("n4", "", "nb1", "lb1"), oci("n5", "no-imds-data", "no-imds-data", "no-imds-data")]
    topology, remarks = told(tmp_path, node_list(*items))
    assert (
        topology.levels == (f"{OCI}hpc_island_id", f"{OCI}network_block_id", f"{OCI}local_block_id")
        or len(topology.levels) == 4
    )
    assert [topology.distance("n1", other) for other in ("n2", "n3")] == [2, 3]
    assert remarks.over.lines() == ["passed over 2 nodes without the labels that name switches (the first: n4)"]


@pytest.mark.parametrize("leaf, top", [("block", "datacenter"), ("leaf", "core")])
def test_labels_of_old_topographs(tmp_path: Path, leaf: str, top: str) -> None:
    prefix = "network.topology.nvidia.com/"
    items = [
        node(name, {prefix + top: "dc", prefix + "spine": pod, prefix + leaf: own, prefix + "accelerator": own + "a"})
        for name, (own, pod) in texts.ABOVE.items()
    ]
    topology, _ = told(tmp_path, node_list(*items))
    assert topology.path("n008")[:2] == ("leaf4", "mp2")
    only = [node(name, {prefix + top: "dc", prefix + "spine": pod}) for name, (_, pod) in texts.ABOVE.items()]
    with pytest.raises(JobError, match="no label of these nodes is known to name a switch"):
        told(tmp_path, node_list(*only))  # their leaves are not told


def test_a_node_without_a_leaf_is_passed_over(tmp_path: Path) -> None:
    tiers = [f"fabric.topograph.run/tier-{tier}" for tier in range(2)]
    items = [
        node("n1", {tiers[0]: "l1", tiers[1]: "s"}),
        node("n2", {tiers[1]: "s"}),
        node("n3", {tiers[0]: "unknown"}),
    ]
    topology, remarks = told(tmp_path, node_list(*items))
    assert [one.name for one in topology.nodes] == ["n1"]
    assert remarks.over.counts == {"nodes without the labels that name switches": 2}


@pytest.mark.parametrize("packed", ["json", "yaml", "list"])
def test_a_config_map_of_slinkys(tmp_path: Path, packed: str) -> None:
    data = {"slurm.conf": "ClusterName=c", "topology.conf": texts.TREE_CONF, "topology.yaml": texts.YAML}
    value: dict[str, Any] = {"kind": "ConfigMap", "metadata": {"name": "slurm"}, "data": data}
    if packed == "yaml":
        blocks = "".join(
            f"  {key}: |\n" + "".join(f"    {line}\n" for line in text.splitlines()) for key, text in data.items()
        )
        text = f"apiVersion: v1\nkind: ConfigMap\ndata:\n{blocks}"
    else:
        text = json.dumps({"kind": "List", "items": [value]} if packed == "list" else value)
    topology, remarks = told(tmp_path, text)
    assert topology.name == "tree1"  # of topology.yaml, which Slurm reads first
    assert remarks.over.counts["entries of the ConfigMap beside the topology"] == 2
    del data["topology.conf"], data["topology.yaml"]
    with pytest.raises(JobError, match=r"data: no entry is a topology.conf or a topology.yaml. It has slurm.conf"):
        told(tmp_path, json.dumps(value))
    data["topology.conf"] = "SwitchName=a Nodes=ALL"
    with pytest.raises(JobError, match=r"data.topology.conf, line 1: ALL stands"):
        told(tmp_path, json.dumps(value))


def test_one_node_is_a_list_of_one(tmp_path: Path) -> None:
    assert [*told(tmp_path, json.dumps(node("n1", {BLOCK: "b"})))[0].node_index] == ["n1"]
    listed = {"kind": "NodeList", "items": [{**node("n1", {BLOCK: "b"})}]}
    del listed["items"][0]["kind"]
    assert [*told(tmp_path, json.dumps(listed))[0].node_index] == ["n1"], "which say not what they are"


def test_so_many_objects_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.formats.kubernetes.nodes.MOST_ITEMS", 2)
    items = [node(f"n{at}", {BLOCK: "b"}) for at in range(3)]
    assert len(told(tmp_path, node_list(*items[:2]))[0].nodes) == 2
    with pytest.raises(JobError, match=r"more than 2 objects.*one namespace's pods"):
        told(tmp_path, node_list(*items))


def test_objects_and_features_of_others_are_counted(tmp_path: Path) -> None:
    others = [{"kind": kind, "metadata": {"name": f"x{at}"}} for at, kind in enumerate(["Job", "Job", "NodeFeature"])]
    _, remarks = told(tmp_path, node_list(node("n1", {BLOCK: "b"}), *others))
    assert remarks.over.rows() == [
        {"what": "objects of kind Job", "count": 2, "first": "x0"},
        {"what": "objects of kind NodeFeature", "count": 1, "first": "x2"},
    ]
    feature = json.loads(texts.FEATURES)["items"][0]
    feature["spec"]["features"]["attributes"]["topograph.network"]["elements"]["fabric-tier-0"] = 3
    with pytest.raises(JobError, match=r"fabric-tier-0: not a text"):
        told(tmp_path, node_list(feature))


def test_levels_format_and_name_are_those_of_the_first_source(tmp_path: Path) -> None:
    """The second has labels of its own; and counts name their source where there are several."""
    first = [*nodes({"leaf": "site/rack", "pod": "site/row"}), node("n009", {})]
    second = [node(name, {BLOCK: "b"}, spec={"unschedulable": True}) for name in ("n001", "n002")]
    second.append(node("n010", {}))
    file, other = write(tmp_path, node_list(*first), "first"), write(tmp_path, node_list(*second), "second")
    asked = ["site/row", "site/rack"]
    topology, remarks = read_topology(file, levels=asked, form="kubernetes", states=[other])
    assert [one.state.status for one in topology.nodes[:3]] == ["down", "down", "free"]
    assert remarks.over.rows() == [
        {"what": "nodes without the labels that name switches", "count": 2, "first": f"{file}: n009"}
    ]
    assert read_topology(file, levels=asked)[1].over.rows()[0]["first"] == "n009"
    texted = write(tmp_path, texts.SQUEUE, "jobs")
    assert read_topology(file, levels=asked, form="kubernetes", states=[texted])[0].node("n001").state.status == "busy"


def one(**more: Any) -> dict[str, Any]:
    """A node, with parts of it in place of its own; labels among them."""
    item = node("n1", {BLOCK: "b"})
    labels = {"metadata": item["metadata"] | {"labels": more.pop("labels")}} if "labels" in more else {}
    return item | labels | more


def kueue(levels: Any) -> str:
    return node_list(one(), {"kind": "Topology", "metadata": {"name": "t"}, "spec": {"levels": levels}})


CONTAINERS = {"nodeName": "n1", "containers": [{"resources": {"limits": 3}}]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (node_list(one(metadata={"labels": {BLOCK: "b"}})), r"items\[0\].metadata.name: no name"),
        *((node_list(one(labels=labels)), "n1.metadata.labels: labels that are no texts")
          for labels in ({BLOCK: 3}, {BLOCK: "b", "x": None}, [BLOCK], "x")),
        (node_list(one(labels={BLOCK: "a b"})), "'a b' cannot be the name of a switch"),
        (node_list(one(status=3)), "n1.status: not an object|n1: not an object"),
        (node_list(one(status={"conditions": {"a": 1}})), "n1.status.conditions: not a list"),
        (node_list(one(status={"allocatable": [1]})), "n1.status.allocatable: not an object"),
        (node_list(one(spec={"taints": "x"})), "n1.spec.taints: not a list"),
        (node_list(one(spec={"taints": ["x"]})), "n1.spec.taints: not an object"),
        (node_list(one(), one()), r"items\[1\]: the node 'n1' is listed twice"),
        (node_list(), "no nodes in the list. Write it with kubectl get nodes"),
        (node_list({"kind": "Job", "metadata": {"name": "j"}}), "no nodes in the list"),
        (node_list(pod("a", "n1", 1)), "states of nodes, and no switches"),
        (node_list(pod("a", "n1", 0) | {"spec": CONTAINERS}),
         r"items\[0\].spec.containers.resources.limits: not an object"),
        (json.dumps({"instances": [{"id": "a", "labels": 3}]}), r"instances\[0\].labels: not an object"),
        (json.dumps({"instances": [{"id": "a", "attributes": [3]}]}), r"instances\[0\].attributes: not an object"),
        *((json.dumps(value), "items: not a list of objects")
          for value in ([], 3, {"kind": "List"}, {"items": 3}, {"items": [{}, "x"]})),
        (kueue({"a": 1}), r"items\[1\].spec.levels: not a list"),
        *((kueue(levels), "a level without a nodeLabel")
          for levels in ([{"nodeLabel": 3}], [{}], [{"nodeLabel": RACK}, {"other": "x"}])),
        ("apiVersion: v1\nitems: []\nkind: List\n", "objects of Kubernetes as YAML. Write them with kubectl"),
    ],
)  # fmt: skip
def test_what_tells_nothing_is_refused_by_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        told(tmp_path, text, form="" if text.startswith(("api", '{"instances"')) else "kubernetes")
    assert caught.value.file == str(tmp_path / "topology")

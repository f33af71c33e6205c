"""What Kubernetes' nodes are doing: taints and conditions, pods that hold them, GPUs that they give
away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.topology.switches import RESERVED_TAINT, NodeState
from plait.formats.kubernetes.gpus import unallocatable
from plait.place.topologies import read_topology
from tests.place.readers import texts
from tests.place.readers.test_formats import told, write
from tests.place.readers.texts import BLOCK, RACK, node, node_list, nodes, pod


@pytest.mark.parametrize(
    "changes, state",
    [
        ({}, NodeState()),
        ({"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]},
         NodeState(status="down", holder="not ready: NodeStatusUnknown")),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, NodeState(status="down", holder="not ready: unknown")),
        ({"conditions": []}, NodeState(status="down")),
        (
            {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}]},
            NodeState(),
        ),
        ({"conditions": [{"type": "Ready", "status": "True"}, {"type": "PIDPressure", "status": "True"}]},
         NodeState(status="down", holder="PIDPressure")),
        ({"conditions": [{"type": "DiskPressure", "status": "False"}]},
         NodeState(status="down", holder="not ready: unknown")),
        ({"spec": {"unschedulable": True}}, NodeState(status="down", holder="cordoned")),
        ({"spec": {"taints": [{"key": RESERVED_TAINT, "value": "llama-70b", "effect": "NoSchedule"}]}},
         NodeState(status="busy", holder="llama-70b")),
        ({"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}, NodeState()),
        ({"spec": {"unschedulable": True, "taints": [{"key": RESERVED_TAINT}]}},
         NodeState(status="down", holder="cordoned")),
    ],
)  # fmt: skip
def test_states(tmp_path: Path, changes: dict[str, Any], state: NodeState) -> None:
    topology, _ = told(tmp_path, node_list(node("n1", {BLOCK: "b"}, **changes)))
    assert topology.node("n1").state == state
    assert topology.node("n1").hardware.gpus == 8


@pytest.mark.parametrize(
    "taint, holder",
    [
        ({"key": "maintenance", "value": "planned", "effect": "NoSchedule"}, "tainted maintenance=planned:NoSchedule"),
        ({"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"},
         "tainted node.kubernetes.io/disk-pressure:NoSchedule"),
        ({"key": "example.com/repair", "effect": "NoExecute"}, "tainted example.com/repair:NoExecute"),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, ""),
        ({"key": "amd.com/gpu", "effect": "NoExecute"}, ""),
        ({"key": "spot", "effect": "PreferNoSchedule"}, ""),
        ({"key": "dedicated", "value": "ml", "effect": "NoSchedule"}, ""),
    ],
)  # fmt: skip
def test_taints_keep_jobs_away(tmp_path: Path, taint: dict[str, str], holder: str) -> None:
    file = write(tmp_path, node_list(node("n1", {BLOCK: "b"}, spec={"taints": [taint]})))
    topology, remarks = read_topology(file, tolerated=["dedicated"])
    assert topology.node("n1").state == (NodeState(status="down", holder=holder) if holder else NodeState())
    assert any("taken as down for a taint" in note for note in remarks.notes) == bool(holder)
    assert any("no pods in the list" in note for note in remarks.notes)
    assert read_topology(file, tolerated=["dedicated", taint["key"]])[0].node("n1").state == NodeState()


def test_a_node_that_is_being_deleted(tmp_path: Path) -> None:
    item = node("n1", {BLOCK: "b"})
    item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert told(tmp_path, node_list(item))[0].node("n1").state.holder == "being deleted"


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
    for topology, remarks in (read_topology(nodes_file), read_topology(apart, states=[theirs])):
        busy = {one.name: one.state.holder for one in topology.nodes if one.state.status == "busy"}
        assert busy == {"n001": "llama", "n002": "b, c"}
        assert not remarks.notes and not remarks.over
    with pytest.raises(JobError, match=r"items\[0\].spec.containers: not a list"):
        read_topology(
            write(tmp_path, node_list(pod("a", "n", 1) | {"spec": {"nodeName": "n"}}, node("n", {BLOCK: "b"})))
        )


def with_resources(name: str, resources: dict[str, str], **labels: str) -> dict[str, Any]:
    item = node(name, {BLOCK: "b", **{key.replace("__", "/"): value for key, value in labels.items()}})
    item["status"]["allocatable"] = {"cpu": "96", **resources}
    return item


REPLICAS, PRODUCT = {"nvidia.com/gpu.replicas": "4"}, "nvidia.com/gpu.product"


@pytest.mark.parametrize(
    "resources, labels, gpus, parts",
    [
        ({"nvidia.com/gpu": "8"}, {}, 8, False),
        ({"amd.com/gpu": "8"}, {}, 8, False),
        ({"gpu.intel.com/i915": "4"}, {}, 4, False),
        ({"nvidia.com/gpu": "0"}, {}, 0, False),
        ({}, {}, 0, False),
        ({"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "56"}, {}, 0, True),
        ({"nvidia.com/gpu": "4", "nvidia.com/mig-3g.40gb": "8"}, {}, 4, True),
        ({"nvidia.com/gpu.shared": "32"}, {}, 0, True),
        ({"nvidia.com/gpu": "32"}, REPLICAS, 0, True),
        ({"nvidia.com/gpu": "56"}, {PRODUCT: "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}, 0, True),
        ({"nvidia.com/gpu": "16"}, {PRODUCT: "NVIDIA-L40S-SHARED"}, 0, True),
        ({"aliyun.com/gpu-mem": "80"}, {}, 0, True),
        ({"amd.com/cpx_nps1": "64"}, {}, 0, True),
    ],
)  # fmt: skip
def test_whole_gpus(tmp_path: Path, resources: dict[str, str], labels: dict[str, str], gpus: int, parts: bool) -> None:
    """Of a node beside one with eight."""
    items = [with_resources("n1", resources, **labels), with_resources("n2", {"nvidia.com/gpu": "8"})]
    topology, remarks = told(tmp_path, node_list(*items))
    assert topology.node("n1").hardware.gpus == gpus
    assert topology.node("n1").state == (NodeState() if gpus else NodeState(status="down", holder="no whole GPU"))
    assert bool(remarks.over) == parts
    if parts:
        assert "no whole ones" in remarks.over.lines()[0] and "n1" in remarks.over.lines()[0]


def test_a_cluster_without_gpus_says_nothing_of_them(tmp_path: Path) -> None:
    topology, remarks = told(tmp_path, node_list(with_resources("n1", {}), with_resources("n2", {})))
    assert [one.hardware.gpus for one in topology.nodes] == [None, None]
    assert topology.count("free") == 2
    assert not remarks.over


@pytest.mark.parametrize("amount", ["7.5", "x", "-1", 7.5, None, "8k", "99999999"])
def test_a_node_with_an_unknown_number_of_gpus_is_not_free(tmp_path: Path, amount: Any) -> None:
    """The others are what they were."""
    items = [with_resources("n1", {"nvidia.com/gpu": amount}), with_resources("n2", {"nvidia.com/gpu": "8"})]
    topology, remarks = told(tmp_path, node_list(*items))
    assert [one.hardware.gpus for one in topology.nodes] == [None, 8]
    assert [one.state.status for one in topology.nodes] == ["down", "free"]
    (said,) = remarks.over.lines()
    assert "number of GPUs is no whole number" in said and "n1" in said


def test_other_accelerators_are_counted(tmp_path: Path) -> None:
    _, remarks = told(tmp_path, node_list(with_resources("n1", {"habana.ai/gaudi": "8"})))
    assert remarks.over.counts == {"nodes with accelerators that are no GPUs": 1}


def test_what_pods_hold_in_other_ways(tmp_path: Path) -> None:
    first = pod("first", "n001", 0)
    first["spec"]["initContainers"] = [{"name": "warm", "resources": {"limits": {"nvidia.com/gpu": 8}}}]
    slices = pod("mig", "n002", 0)
    slices["spec"]["containers"][0]["resources"] = {"requests": {"nvidia.com/mig-1g.10gb": "2"}}
    claims = pod("dra", "n003", 0)
    claims["spec"]["resourceClaims"] = [{"name": "gpus"}]
    file = write(tmp_path, node_list(*nodes({"leaf": RACK, "pod": BLOCK}), first, slices, claims, {"kind": "Job",
                 "metadata": {"name": "j"}}))  # fmt: skip
    topology, remarks = read_topology(file)
    busy = {one.name: one.state.holder for one in topology.nodes if one.state.status == "busy"}
    assert busy == {"n001": "first", "n002": "mig"}
    assert remarks.over.counts == {"pods with resource claims, which may hold GPUs": 1, "objects of kind Job": 1}


def test_states_of_another_cluster(tmp_path: Path) -> None:
    states = write(tmp_path, "NODELIST STATE\nz1 idle\n", "states")
    with pytest.raises(JobError, match="tells of other nodes, such as 'z1', than the topology, such as 'n001'"):
        told(tmp_path, texts.KUEUE, states=[states])


def test_capacity_is_taken_where_nothing_is_said_of_what_is_given_away(tmp_path: Path) -> None:
    item = node("n1", {BLOCK: "b"})
    item["status"].pop("allocatable", None)
    item["status"]["capacity"] = {"nvidia.com/gpu": "4"}
    assert told(tmp_path, node_list(item))[0].node("n1").hardware.gpus == 4
    item["status"]["allocatable"] = {"nvidia.com/gpu": "2"}
    assert told(tmp_path, node_list(item))[0].node("n1").hardware.gpus == 2
    item["status"]["capacity"] = 3
    assert told(tmp_path, node_list(item))[0].node("n1").hardware.gpus == 2


@pytest.mark.parametrize(
    ("has", "gives", "count"),
    [("8", "7", 1), ("8", "8", 0), ("8", "x", 0), ("x", "8", 0), ("8", None, 8), (None, "8", 0), ("12345", "1", 0)],
)
def test_gpus_that_a_node_has_and_does_not_give_away(has: str | None, gives: str | None, count: int) -> None:
    """Of those whose amounts are whole numbers."""
    told = [{"cpu": "9", **({"nvidia.com/gpu": one} if one else {})} for one in (has, gives)]
    assert unallocatable(*told) == count
    more = [one | {"amd.com/gpu": amount} for one, amount in zip(told, ("4", "1"), strict=True)]
    assert unallocatable(*more) == count + 3


def test_gpus_kept_back_are_said(tmp_path: Path) -> None:
    items = [with_resources(f"n{at}", {"nvidia.com/gpu": gives}) for at, gives in enumerate(("8", "6", "8"))]
    for item in items:
        item["status"]["capacity"] = {"nvidia.com/gpu": "8"}
    _, remarks = told(tmp_path, node_list(*items))
    assert remarks.over.rows() == [
        {"what": "GPUs that their nodes do not give away (capacity above allocatable)", "count": 2, "first": "n1"}
    ]


def test_a_node_that_tells_no_resources_may_have_gpus(tmp_path: Path) -> None:
    item = node("n1", {BLOCK: "b"})
    item["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    topology, _ = told(tmp_path, node_list(item, with_resources("n2", {"nvidia.com/gpu": "8"})))
    assert [one.hardware.gpus for one in topology.nodes] == [None, 8]
    assert topology.node("n1").state == NodeState()

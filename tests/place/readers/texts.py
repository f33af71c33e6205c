"""One small cluster as every format tells it: two minipods of two leaves of two nodes."""

from __future__ import annotations

import json
from typing import Any

LEAVES = {"leaf1": ("mp1", "n001", "n002"), "leaf2": ("mp1", "n003", "n004"),
          "leaf3": ("mp2", "n005", "n006"), "leaf4": ("mp2", "n007", "n008")}  # fmt: skip
ABOVE = {node: (leaf, pod) for leaf, (pod, *nodes) in LEAVES.items() for node in nodes}

TOML = """version = 1
levels = ["core", "minipod", "leaf"]
states = [{nodes = "n003", status = "down", holder = "bad nic"}]

[switches]
core = {switches = "mp[1-2]"}
mp1 = {switches = "leaf[1-2]"}
mp2 = {switches = "leaf[3-4]"}
leaf1 = {nodes = "n[001-002]"}
leaf2 = {nodes = "n[003-004]"}
leaf3 = {nodes = "n[005-006]"}
leaf4 = {nodes = ["n007", "n008"]}
"""

JSON = json.dumps({
    "version": 1,
    "switches": {"core": {"switches": "mp1,mp2"}, "mp1": {"switches": "leaf1,leaf2"}, "mp2": {"switches": "leaf[3-4]"}}
    | {leaf: {"nodes": list(nodes)} for leaf, (_, *nodes) in LEAVES.items()},
})  # fmt: skip

TREE_CONF = r"""# two minipods
SwitchName=core Switches=mp[1-2]  # the top
switchname=mp1 switches=leaf[1-2]
SwitchName=mp2 \
    Switches=leaf[3-4]
SwitchName=leaf1 Nodes=n[001-002] LinkSpeed=400
SwitchName=leaf2 Nodes=n[003-004]

SwitchName=leaf3 Nodes=n[005-006]
SwitchName=leaf4 Nodes=n007,n008
"""

BLOCK_CONF = """BlockName=leaf1 Nodes=n[001-002]
BlockName=leaf2 Nodes=n[003-004]
BlockName=leaf3 Nodes=n[005-006]
BlockName=leaf4 Nodes=n[007-008]
BlockSizes=2,4
"""

BLOCKS_SHOWN = """BlockName=leaf1 BlockIndex=0 Nodes=n[001-002] BlockSize=2
BlockName=leaf2 BlockIndex=1 Nodes=n[003-004] BlockSize=2
BlockName=leaf3 BlockIndex=2 Nodes=n[005-006] BlockSize=2
BlockName=leaf4 BlockIndex=3 Nodes=n[007-008] BlockSize=2
AggregatedBlock=leaf[1-2] BlockIndex=4 Nodes=n[001-004] BlockSize=4
AggregatedBlock=leaf[3-4] BlockIndex=5 Nodes=n[005-008] BlockSize=4
"""

TREE_SHOWN = """SwitchName=core Level=2 LinkSpeed=1 Nodes=n[001-008] Switches=mp[1-2]
SwitchName=mp1 Level=1 LinkSpeed=1 Nodes=n[001-004] Switches=leaf[1-2]
SwitchName=mp2 Level=1 LinkSpeed=1 Nodes=n[005-008] Switches=leaf[3-4]
SwitchName=leaf1 Level=0 LinkSpeed=400 Nodes=n[001-002]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[003-004]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[005-006]
SwitchName=leaf4 Level=0 LinkSpeed=1 Nodes=n[007-008]
"""
"""As scontrol 22.05 prints it."""

YAML = """---
- topology: flat1
  flat: true
- topology: tree1
  cluster_default: true
  tree:
    switches:
    - switch: core
      children: mp[1-2]
    - switch: mp1
      children: leaf[1-2]
    - switch: mp2
      children: leaf[3-4]
    - {switch: leaf1, nodes: "n[001-002]"}
    - {switch: leaf2, nodes: "n[003-004]"}
    - {switch: leaf3, nodes: "n[005-006]"}
    - {switch: leaf4, nodes: "n[007-008]"}
- topology: block1
  block:
    block_sizes: [2, 4]
    blocks:
    - {block: leaf1, nodes: "n[001-002]"}
    - {block: leaf2, nodes: "n[003-004]"}
    - {block: leaf3, nodes: "n[005-006]"}
    - {block: leaf4, nodes: "n[007-008]"}
"""

NODES_SHOWN = """NodeName=n001 CoresPerSocket=1 
   CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=N/A
   AvailableFeatures=h100
   Gres=gpu:h100:8(S:0-1)
   NodeAddr=127.0.0.1 NodeHostName=n001 Port=47901 
   State=ALLOCATED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=main 

NodeName=n003 CoresPerSocket=1 
   Gres=gpu:h100:8
   State=DOWN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Reason=bad nic [root@2026-11-23T03:04:04]

NodeName=n004 CoresPerSocket=1 
   Gres=gpu:4
   State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Reason=maintenance soon [root@2026-11-23T03:04:04]

NodeName=n005 CoresPerSocket=1 
   Gres=(null)
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A

"""  # noqa: W291, scontrol leaves blanks at the ends of lines

SINFO = """PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST
main*        up   infinite      1  drain n004
main*        up   infinite      1  down* n003
main*        up   infinite      4   idle n[005-008]
main*        up   infinite      2  alloc n[001-002]
empty        up   infinite      0    n/a
"""

SQUEUE = """JOBID|END_TIME|NODELIST
7|2026-11-23T12:00:00|n[001-002]
8_3|N/A|n002
9|2026-11-23T12:00:00|
"""


def node(name: str, labels: dict[str, str], **changes: Any) -> dict[str, Any]:
    """One of Kubernetes' nodes, with what a reader may look at."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": changes.get("spec", {}),
        "status": {
            "allocatable": {"cpu": "96", "nvidia.com/gpu": "8"},
            "conditions": changes.get("conditions", [{"type": "Ready", "status": "True"}]),
        },
    }


def node_list(*items: dict[str, Any]) -> str:
    """As ``kubectl get ... -o json`` prints it."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)})


def pod(name: str, on: str | None, gpus: int, **changes: Any) -> dict[str, Any]:
    """One of Kubernetes' pods, with what a reader may look at."""
    resources = {"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": str(gpus)} if gpus else {}}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": changes.get("labels", {})},
        "spec": {"nodeName": on, "containers": [{"name": "sidecar"}, {"name": "main", "resources": resources}]},
        "status": {"phase": changes.get("phase", "Running")},
    }


BLOCK, RACK = "cloud.provider.com/topology-block", "cloud.provider.com/topology-rack"
KUEUE_TOPOLOGY = {
    "apiVersion": "kueue.x-k8s.io/v1beta1",
    "kind": "Topology",
    "metadata": {"name": "default"},
    "spec": {"levels": [{"nodeLabel": BLOCK}, {"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]},
}
KUEUE = node_list(*(node(name, {BLOCK: pod, RACK: leaf}) for name, (leaf, pod) in ABOVE.items()), KUEUE_TOPOLOGY)
TIERS = node_list(
    *(
        node(name, {"fabric.topograph.run/tier-0": leaf, "fabric.topograph.run/tier-1": pod,
                    "fabric.topograph.run/tier-2": "core"})
        for name, (leaf, pod) in ABOVE.items()
    ),
    node("control-plane", {}),
)  # fmt: skip
GRAPH = json.dumps(
    {"instances": [{"id": name, "type": "H100", "network_layers": [*above, "core"]} for name, above in ABOVE.items()]}
)
PODS = node_list(pod("a", "n001", 8), pod("b", "n002", 1, phase="Pending"), pod("c", None, 8, phase="Pending"))
CONFIG_MAP = json.dumps(
    {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "slurm-config", "namespace": "slurm"},
        "data": {"topology.conf": TREE_CONF},
    }
)  # fmt: skip
FEATURES = json.dumps(
    {
        "kind": "NodeFeatureList",
        "items": [
            {
                "kind": "NodeFeature",
                "metadata": {"name": f"topograph-{name}", "labels": {"nfd.node.kubernetes.io/node-name": name}},
                "spec": {"features": {"attributes": {"topograph.network": {"elements": {
                    "fabric-tier-0": leaf, "fabric-tier-1": above, "fabric-tier-2": "core"}}}}},
            }
            for name, (leaf, above) in ABOVE.items()
        ],
    }
)  # fmt: skip


def nodes(labels: dict[str, str]) -> list[dict[str, Any]]:
    """The small cluster's nodes; labels: for ``leaf`` and ``pod``."""
    return [node(name, {labels["leaf"]: leaf, labels["pod"]: pod}) for name, (leaf, pod) in ABOVE.items()]

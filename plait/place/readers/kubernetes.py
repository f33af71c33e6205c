"""Kubernetes nodes, as ``kubectl get nodes -o json`` prints them, and the labels that say where they are.

The levels of switches are labels: those that the user names, those of a Kueue ``Topology`` in the same list
(``kubectl get nodes,topologies.kueue.x-k8s.io -o json``), Topograph's (tier 0 is next to the node), or those
of a known cloud. Pods in the list, or in one of their own, hold the nodes whose GPUs they have asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from plait.core.errors import JobError, nearest
from plait.core.text import printable
from plait.core.topology import DOWN, FREE, RESERVED_TAINT, Hardware, State
from plait.place.readers.chains import from_chains
from plait.place.readers.kubernetes_pods import GPUS, at, held
from plait.place.readers.source import Asked, Found, Source
from plait.place.readers.states import worse

HOST = "kubernetes.io/hostname"
TIER = re.compile(r"fabric\.topograph\.run/tier-([0-9]{1,3})")
DOMAINS = ("accelerator.topograph.run/domain", "accelerator.topograph.run/sub-domain")
KNOWN = (
    tuple(f"network.topology.nvidia.com/{name}" for name in ("core", "spine", "leaf")),  # Topograph before 1.0
    ("cloud.provider.com/topology-block", "cloud.provider.com/topology-rack"),  # Kueue's documents
    tuple(f"cloud.google.com/gce-topology-{name}" for name in ("block", "subblock", "host")),
    tuple(f"topology.k8s.aws/network-node-layer-{number}" for number in (1, 2, 3)),
    ("oci.oraclecloud.com/host.network_block_id", "oci.oraclecloud.com/host.rack_id"),
)
"""Labels that clouds and tools give their nodes, the outermost first."""
_PRODUCT = ("nvidia.com/gpu.product", "amd.com/gpu.product-name")


def looks(source: Source) -> bool:
    """Whether a file is such a list."""
    if not source.is_json or not isinstance(source.json, dict):
        return False
    return source.json.get("kind") in ("List", "NodeList", "Node")


def read(source: Source, asked: Asked) -> Found:
    """Raises JobError naming the item."""
    items = _items(source.json)
    nodes: dict[str, dict[str, Any]] = {}
    topologies: dict[str, tuple[str, ...]] = {}
    pods: list[tuple[str, dict[str, Any]]] = []
    for number, item in enumerate(items):
        where = f"items[{number}]"
        kind, name = item.get("kind", "Node"), at(item, where, "metadata", "name")
        if not isinstance(name, str):
            raise JobError("no name", key=f"{where}.metadata.name")
        if kind == "Node":
            if name in nodes:
                raise JobError(f"the node '{name[:60]}' is listed twice", key=where)
            nodes[name] = item
        elif kind == "Topology":
            topologies[name] = _kueue(item, where)
        elif kind == "Pod":
            pods.append((where, item))
    busy = held(pods)
    if pods and not nodes:
        return Found(states=busy, partial=True)
    if not nodes:
        raise JobError("no nodes in the list", fix="Write it with kubectl get nodes -o json")
    labels = {name: _labels(item, name) for name, item in nodes.items()}
    chains, levels, nested = _chains(labels, topologies, asked)
    topology = from_chains(chains, levels=levels, nested=nested, top=nested)
    notes: list[str] = []
    if left := [name for name in nodes if name not in chains]:
        notes.append(f"{source.where}: {len(left)} nodes without these labels are left out, the first {left[0]}.")
    return Found(
        topology=topology,
        states={name: worse(_state(nodes[name], name), busy.get(name, FREE)) for name in chains},
        hardware={name: _hardware(nodes[name], labels[name], name) for name in chains},
        notes=tuple(notes),
    )


def _items(value: Any) -> list[dict[str, Any]]:
    listed = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    items = [listed] if listed.get("kind") == "Node" else listed.get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in cast("list[Any]", items)):
        raise JobError("not a list of objects", key="items", fix="Write it with kubectl get nodes -o json")
    return cast("list[dict[str, Any]]", items)


def _labels(item: dict[str, Any], name: str) -> dict[str, str]:
    labels = at(item, name, "metadata", "labels")
    if labels is None:
        return {}
    if not isinstance(labels, dict) or not all(isinstance(one, str) for one in cast("dict[str, Any]", labels).values()):
        raise JobError("labels that are no texts", key=f"{name}.metadata.labels")
    return cast("dict[str, str]", labels)


def _kueue(item: dict[str, Any], where: str) -> tuple[str, ...]:
    levels = at(item, where, "spec", "levels")
    if not isinstance(levels, list):
        raise JobError("not a list", key=f"{where}.spec.levels")
    found = [at(level, where, "nodeLabel") for level in cast("list[Any]", levels)]
    if not all(isinstance(label, str) for label in found):
        raise JobError("a level without a nodeLabel", key=f"{where}.spec.levels")
    return tuple(cast("list[str]", found))


def _chains(
    labels: Mapping[str, Mapping[str, str]], topologies: Mapping[str, tuple[str, ...]], asked: Asked
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], bool]:
    """Switches above every node, what the levels are called, and whether a switch is known by its name only
    under the one above it."""
    if asked.name and asked.name not in topologies:
        known = f"There are {', '.join(topologies)}" if topologies else "The list has no Topology"
        raise JobError(f"no Topology '{asked.name}'{nearest(asked.name, topologies)}", fix=known)
    if len(topologies) > 1 and not asked.name and not asked.levels:
        raise JobError(f"several Topologies: {', '.join(topologies)}", fix="Choose one with --name")
    levels = asked.levels or next((topologies[name] for name in topologies if asked.name in ("", name)), ())
    if levels:
        return _by_labels(labels, [level for level in levels if level != HOST])
    tiers = _tiers(labels)
    if tiers:
        return tiers, (), False
    present = {label for one in labels.values() for label in one}
    for known in (DOMAINS, *KNOWN):
        if shown := [label for label in known if label in present]:
            return _by_labels(labels, shown)
    raise JobError(
        "no label of these nodes is known to name a switch",
        fix="Name labels with --levels, the outermost first, as in --levels example.com/block,example.com/rack",
    )


def _by_labels(
    labels: Mapping[str, Mapping[str, str]], levels: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], bool]:
    chains = {
        name: tuple(one[level] for level in levels)
        for name, one in labels.items()
        if all(one.get(level) for level in levels)
    }
    if not chains or not levels:
        shown = ", ".join(levels) or f"{HOST} alone"
        raise JobError(f"no node has all of the labels {shown}", fix="Name labels that nodes have with --levels")
    return chains, tuple(levels), True


def _tiers(labels: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Topograph's switches above every node, the outermost first; its accelerator domains below them where
    each lies under one leaf and they cut one of them."""
    chains: dict[str, tuple[str, ...]] = {}
    for name, one in labels.items():
        tiers = sorted(((int(match[1]), one[key]) for key in one if (match := TIER.fullmatch(key))), reverse=True)
        if tiers:
            chains[name] = tuple(switch for _, switch in tiers)
    domains = {name: labels[name].get(DOMAINS[0]) for name in chains}
    leaves = {(domain, chains[name][-1]) for name, domain in domains.items()}
    whole = len({domain for domain, _ in leaves}) == len(leaves) > len({leaf for _, leaf in leaves})
    if whole and all(domains.values()) and not set(domains.values()) & {s for chain in chains.values() for s in chain}:
        chains = {name: (*chain, cast("str", domains[name])) for name, chain in chains.items()}
    return chains


def _state(item: dict[str, Any], name: str) -> State:
    conditions = at(item, name, "status", "conditions") or []
    if not isinstance(conditions, list):
        raise JobError("not a list", key=f"{name}.status.conditions")
    for condition in cast("list[Any]", conditions):
        if at(condition, f"{name}.status.conditions", "type") == "Ready" and condition.get("status") != "True":
            return State(status="down", holder=printable(f"not ready: {condition.get('reason') or 'unknown'}")[:200])
    taints = at(item, name, "spec", "taints") or []
    if not isinstance(taints, list):
        raise JobError("not a list", key=f"{name}.spec.taints")
    if at(item, name, "spec", "unschedulable"):
        return State(status="down", holder="cordoned")
    for taint in cast("list[Any]", taints):
        if at(taint, f"{name}.spec.taints", "key") == RESERVED_TAINT:
            return State(status="busy", holder=printable(str(taint.get("value") or "reserved"))[:200])
    return FREE if conditions else DOWN  # a node that never reported


def _hardware(item: dict[str, Any], labels: Mapping[str, str], name: str) -> Hardware:
    found = at(item, name, "status", "allocatable") or at(item, name, "status", "capacity") or {}
    if not isinstance(found, dict):
        raise JobError("not an object", key=f"{name}.status.allocatable")
    counts = [str(found[key]) for key in GPUS if key in found]
    if not all(re.fullmatch(r"[0-9]{1,4}", count) for count in counts):
        raise JobError(f"{counts[0][:60]!r} GPUs", key=f"{name}.status.allocatable")
    device = next((labels[key] for key in _PRODUCT if key in labels), "")
    return Hardware(gpus=sum(map(int, counts)), device=printable(device)[:60])

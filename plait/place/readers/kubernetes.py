"""Kubernetes nodes, as ``kubectl get nodes -o json`` prints them, and the labels that say where they are.

The levels of switches are labels: those that the user names, those of a Kueue ``Topology`` in the same list
(``kubectl get nodes,topologies.kueue.x-k8s.io -o json``), Topograph's (tier 0 is next to the node), or those
of a known cloud (``kubernetes_labels.FAMILIES``). Pods in the list, or in one of their own, hold the nodes
whose GPUs they have asked for.

===========  ====================================================================================
known        of Nodes: name, labels, conditions, taints, unschedulable, deletionTimestamp,
             allocatable (else capacity); of Pods: nodeName, phase, what containers ask for, labels
             that name a job; of Topologies: levels; of NodeFeatures of Topograph's engine ``nfd``:
             the node and its tiers
passed over  nodes without the labels that name switches (or whose values say "unknown"), parts of
             GPUs and other accelerators, amounts of GPUs that are no whole numbers (their nodes
             count as down), pods with resource claims, objects of other kinds; all
             other fields
refused      a list without nodes and pods, a node without a name or listed twice, a switch that
             nodes put under different ones
===========  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.base.text import counted, printable
from plait.core.topology.switches import DOWN, FREE, RESERVED_TAINT, Hardware, NodeState
from plait.place.readers.chains import from_chains
from plait.place.readers.kubernetes_gpus import KEPT_BACK, WHOLE, countable, hardware, kept_back
from plait.place.readers.kubernetes_labels import chains_of
from plait.place.readers.kubernetes_pods import at, held
from plait.place.readers.source import Asked, Found, Source
from plait.place.readers.states import without_gpus, worse

MOST_ITEMS = 200_000
UNCOUNTED = NodeState(status="down", holder="unknown number of GPUs")
UNLABELLED = "nodes without the labels that name switches"


def looks(source: Source) -> bool:
    """Whether a file is such a list."""
    if not source.is_json or not isinstance(source.json, dict):
        return False
    return source.json.get("kind") in ("List", "NodeList", "Node", "PodList", "NodeFeatureList")


@dataclass
class _Objects:
    """What a list holds, by kind. placed: labels by node that NodeFeatures stand for."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    pods: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    topologies: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    placed: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])


def read(source: Source, asked: Asked) -> Found:
    """Raises JobError naming the item."""
    over = PassedOver()
    found = _sorted(source.json, over)
    busy = held(found.pods, over)
    if found.pods and not found.nodes and not found.placed:
        return Found(states=busy, partial=True, over=over)
    if not found.nodes and not found.placed:
        raise JobError("no nodes in the list", fix="Write it with kubectl get nodes -o json")
    names = list(dict.fromkeys([*found.nodes, *found.placed]))
    labels = {name: _labels(found.nodes.get(name, {}), name) | found.placed.get(name, {}) for name in names}
    chains = chains_of(labels, found.topologies, asked)
    left = [name for name in names if name not in chains.above]
    over.note(UNLABELLED, left[0] if left else "", len(left))
    nodes = {name: found.nodes[name] for name in chains.above if name in found.nodes}
    resources = {name: _resources(item, name) for name, item in nodes.items()}
    made = _hardware(nodes, resources, labels, over)
    states = {name: state_of(item, name, asked.tolerated) for name, item in nodes.items()}
    states = {
        name: worse(worse(state, busy.get(name, FREE)), FREE if countable(resources[name]) else UNCOUNTED)
        for name, state in states.items()
    }
    return Found(
        topology=from_chains(chains.above, levels=chains.levels, nested=chains.nested, top=chains.nested),
        states=without_gpus(states, made),
        hardware=made,
        notes=_tainted(source.where, states),
        over=over,
    )


def _sorted(value: Any, over: PassedOver) -> _Objects:
    kind = str(value.get("kind", "")) if isinstance(value, dict) else ""
    usual = kind.removesuffix("List") or "Node"  # items of a NodeList need not say what they are
    found = _Objects()
    for number, item in enumerate(_items(value)):
        where = f"items[{number}]"
        kind, name = item.get("kind", usual), at(item, where, "metadata", "name")
        if not isinstance(name, str):
            raise JobError("no name", key=f"{where}.metadata.name")
        if kind == "Node":
            if name in found.nodes:
                raise JobError(f"the node '{name[:60]}' is listed twice", key=where)
            found.nodes[name] = item
        elif kind == "Topology":
            found.topologies[name] = _kueue(item, where)
        elif kind == "Pod":
            found.pods.append((where, item))
        elif kind == "NodeFeature" and (placed := _nfd(item, where)):
            found.placed[placed[0]] = placed[1]
        else:
            over.note(f"objects of kind {printable(str(kind))[:60]}", name)
    return found


def _items(value: Any) -> list[dict[str, Any]]:
    listed = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    items = [listed] if listed.get("kind") == "Node" else listed.get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in cast("list[Any]", items)):
        raise JobError("not a list of objects", key="items", fix="Write it with kubectl get nodes -o json")
    if len(cast("list[Any]", items)) > MOST_ITEMS:
        raise JobError(f"more than {MOST_ITEMS} objects", key="items", fix="Give fewer kinds, or one namespace's pods")
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


def _nfd(item: dict[str, Any], where: str) -> tuple[str, dict[str, str]] | None:
    """A node and, as labels, what Topograph's engine ``nfd`` says of it; None for another's features."""
    told = at(item, where, "spec", "features", "attributes", "topograph.network", "elements")
    node = at(item, where, "metadata", "labels", "nfd.node.kubernetes.io/node-name")
    if not isinstance(told, dict) or not isinstance(node, str):
        return None
    labels: dict[str, str] = {}
    for key, value in cast("dict[str, Any]", told).items():
        if not isinstance(value, str):
            raise JobError("not a text", key=f"{where}.{key}")
        kind, _, rest = key.partition("-")
        labels[f"{kind}.topograph.run/{rest}"] = value  # fabric-tier-0, accelerator-domain
    return node, labels


def _resources(item: dict[str, Any], name: str) -> dict[str, Any]:
    """What a node gives away, or else has."""
    found = at(item, name, "status", "allocatable") or at(item, name, "status", "capacity") or {}
    if not isinstance(found, dict):
        raise JobError("not an object", key=f"{name}.status.allocatable")
    return cast("dict[str, Any]", found)


def _hardware(
    nodes: Mapping[str, dict[str, Any]],
    resources: Mapping[str, dict[str, Any]],
    labels: Mapping[str, Mapping[str, str]],
    over: PassedOver,
) -> dict[str, Hardware]:
    """Of every node; without GPUs where others have some and its resources name none."""
    made: dict[str, Hardware] = {}
    silent: list[str] = []
    for name, item in nodes.items():
        found = resources[name]
        made[name] = hardware(found, labels[name], name, over)
        whole = at(item, name, "status", "capacity")
        if isinstance(whole, dict):
            over.note(KEPT_BACK, name, kept_back(cast("dict[str, Any]", whole), found))
        if found and made[name].gpus is None and countable(found):
            silent.append(name)
    if any(one.gpus is not None for one in made.values()):
        made |= {name: replace(made[name], gpus=0) for name in silent}
    return made


def _tainted(where: str, states: Mapping[str, NodeState]) -> tuple[str, ...]:
    """What to do where nodes are down for taints that jobs may tolerate."""
    found = sorted(name for name, state in states.items() if state.holder.startswith(TAINTED))
    if not found:
        return ()
    said = f"{counted(len(found), 'node')} taken as down for a taint, the first {found[0]}"
    return (f"{where}: {said} ({states[found[0]].holder}). If the job tolerates it, add tolerate=KEY.",)


# ---- what nodes are doing ----


BAD = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
"""Conditions of Kubernetes' own that are bad where they are true."""
EFFECTS = ("NoSchedule", "NoExecute")
TAINTED = "tainted "


def state_of(item: dict[str, Any], name: str, tolerated: Collection[str]) -> NodeState:
    """What a node is doing, by its conditions, taints and cordon. A node is down that is not ready, under
    pressure, cordoned, being deleted, or tainted so that pods are kept away (NoSchedule, NoExecute).

    Taints that say no more than that there are GPUs keep no job away, nor do those whose keys are
    ``tolerated``. Plait's own taint means a reservation: busy. Raises JobError naming the node and the key.
    """
    taints = _list(item, name, "spec", "taints")
    conditions = _list(item, name, "status", "conditions")
    if why := _unready(conditions, name):
        return NodeState(status="down", holder=printable(why)[:200])
    if at(item, name, "metadata", "deletionTimestamp"):
        return NodeState(status="down", holder="being deleted")
    if at(item, name, "spec", "unschedulable"):
        return NodeState(status="down", holder="cordoned")
    reserved = None
    for taint in taints:
        key, effect = (at(taint, f"{name}.spec.taints", word) for word in ("key", "effect"))
        if key == RESERVED_TAINT:
            reserved = NodeState(status="busy", holder=printable(str(taint.get("value") or "reserved"))[:200])
        elif effect in EFFECTS and key not in WHOLE and key not in tolerated:
            value = f"={taint['value']}" if taint.get("value") else ""
            return NodeState(status="down", holder=TAINTED + printable(f"{key}{value}:{effect}")[:200])
    return reserved or (FREE if conditions else DOWN)  # a node that never reported


def _unready(conditions: list[Any], name: str) -> str:
    ready = False
    for condition in conditions:
        kind, status = (at(condition, f"{name}.status.conditions", key) for key in ("type", "status"))
        if kind == "Ready":
            ready = True
            if status != "True":
                return f"not ready: {condition.get('reason') or 'unknown'}"
        elif kind in BAD and status == "True":
            return str(kind)
    return "" if ready or not conditions else "not ready: unknown"


def _list(item: dict[str, Any], name: str, *keys: str) -> list[Any]:
    found = at(item, name, *keys)
    if found is None:
        return []
    if not isinstance(found, list):
        raise JobError("not a list", key=".".join((name, *keys)))
    return cast("list[Any]", found)

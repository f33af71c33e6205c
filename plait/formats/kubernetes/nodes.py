"""Reader of Kubernetes nodes as printed by ``kubectl get nodes -o json``, and of their topology
labels.

The levels of switches are labels: the user's own choice, the levels of a Kueue ``Topology`` in the
same list (``kubectl get nodes,topologies.kueue.x-k8s.io -o json``), Topograph's tiers (tier 0 is
next to the node), or the labels of a known cloud (``FAMILIES``). Pods, in the same list or a list
of their own, hold the nodes whose GPUs they request.

===========  ====================================================================================
read         of Nodes: name, labels, conditions, taints, unschedulable, deletionTimestamp,
             allocatable (else capacity); of Pods: nodeName, phase, the containers' requests and
             limits, labels with the job's name; of Topologies: levels; of NodeFeatures of
             Topograph's engine ``nfd``: the node and its tiers
ignored      nodes without switch labels (or with values such as "unknown"), parts of GPUs and
             other accelerators, amounts of GPUs that are no whole numbers (their nodes count as
             down), pods with resource claims, objects of other kinds; all other fields
refused      a list without nodes and pods, a node without a name or listed twice, a switch under
             different parents
===========  ====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.core.base.codec.json_text import is_list, is_table
from plait.core.base.errors import JobError, nearest
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import counted, printable
from plait.core.topology.switches import DOWN, FREE, RESERVED_TAINT, Hardware, NodeState
from plait.formats.base.source import ReadOptions, ReadResult, Source, at, from_chains, without_gpus, worse_state
from plait.formats.kubernetes.gpus import UNALLOCATABLE, WHOLE, busy_nodes, countable, hardware, unallocatable

HOST = "kubernetes.io/hostname"
_TIER = re.compile(r"fabric\.topograph\.run/tier-([0-9]{1,3})")
_NVIDIA, _OCI, _AWS = "network.topology.nvidia.com", "oci.oraclecloud.com", "topology.k8s.aws"
_DOMAIN = "accelerator.topograph.run/domain"
_OLD_DOMAIN = f"{_NVIDIA}/accelerator"
UNKNOWN = frozenset(("", "unknown", "none", "null", "n/a", "no-imds-data"))
"""Label values, in lower case, that mean unknown."""


@dataclass(frozen=True)
class Family:
    """A tool's or cloud's topology labels, the outermost first. A node is placed by the labels that
    occur in the cluster; the last label must occur. domain: the label of an accelerator domain,
    which may lie below the innermost level."""

    labels: tuple[str, ...]
    domain: str = ""


FAMILIES = (
    Family(tuple(f"{_NVIDIA}/{name}" for name in ("core", "spine", "leaf")), _OLD_DOMAIN),  # Topograph 0.2 to 0.5
    Family(tuple(f"{_NVIDIA}/{name}" for name in ("datacenter", "spine", "block")), _OLD_DOMAIN),  # Topograph 0.1
    Family((_DOMAIN, "accelerator.topograph.run/sub-domain")),
    Family((_DOMAIN,)),
    Family((_OLD_DOMAIN,)),
    Family(("cloud.provider.com/topology-block", "cloud.provider.com/topology-rack")),  # Kueue's documents
    Family(("cloud.provider.com/topology-block",)),
    Family(tuple(f"cloud.google.com/gce-topology-{name}" for name in ("block", "subblock", "host"))),
    Family(tuple(f"cloud.google.com/gce-topology-{name}" for name in ("block", "subblock"))),
    Family(tuple(f"{_AWS}/network-node-layer-{number}" for number in (1, 2, 3, 4))),
    Family(tuple(f"{_AWS}/network-node-layer-{number}" for number in (1, 2, 3))),
    Family(tuple(f"{_OCI}/rdma.{name}" for name in ("hpc_island_id", "network_block_id", "local_block_id"))),
    Family((f"{_OCI}/host.network_block_id", f"{_OCI}/host.rack_id")),
)
"""Known families of labels, in the order in which they are tried, after Topograph's tiers."""


@dataclass(frozen=True)
class Chains:
    """The switches above nodes. above: for every node, its switches from the outermost to the leaf.
    levels: names of the levels. nested: a switch's name is unique only below its parent."""

    above: dict[str, tuple[str, ...]]
    levels: tuple[str, ...] = ()
    nested: bool = False


def chains_of(
    labels: Mapping[str, Mapping[str, str]], topologies: Mapping[str, tuple[str, ...]], options: ReadOptions
) -> Chains:
    """Return the switches above each node. labels: by node. topologies: levels of Kueue's
    Topologies by name. Raises JobError if no label names a switch, and for an unknown or ambiguous
    Topology."""
    if options.name and options.name not in topologies:
        known = f"There are {', '.join(topologies)}" if topologies else "The list has no Topology"
        raise JobError(f"no Topology '{options.name}'{nearest(options.name, topologies)}", fix=known)
    if len(topologies) > 1 and not options.name and not options.levels:
        raise JobError(f"several Topologies: {', '.join(topologies)}", fix="Choose one with name=NAME")
    levels = options.levels or next((topologies[name] for name in topologies if options.name in ("", name)), ())
    if levels:
        return _by_labels(labels, [level for level in levels if level != HOST])
    if tiers := _tiers(labels):
        return Chains(_with_domains(tiers, labels, _DOMAIN))
    present = {label for one in labels.values() for label, value in one.items() if known_value(value)}
    for family in FAMILIES:
        if family.labels[-1] in present:
            found = _by_labels(labels, [label for label in family.labels if label in present])
            return Chains(_with_domains(found.above, labels, family.domain), found.levels, nested=True)
    raise JobError(
        "no label of these nodes is known to name a switch",
        fix="Name labels with levels=, the outermost first, as in levels=example.com/block,example.com/rack",
    )


def known_value(value: str | None) -> str:
    """Return a label's value; empty if it means unknown."""
    return value if value and value.lower() not in UNKNOWN else ""


def _by_labels(labels: Mapping[str, Mapping[str, str]], levels: Sequence[str]) -> Chains:
    chains = {
        name: tuple(one[level] for level in levels)
        for name, one in labels.items()
        if all(known_value(one.get(level)) for level in levels)
    }
    if not chains or not levels:
        shown = ", ".join(levels) or f"{HOST} alone"
        raise JobError(f"no node has all of the labels {shown}", fix="Name labels that nodes have with levels=")
    return Chains(chains, tuple(levels), nested=True)


def _tiers(labels: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return Topograph's switches above every node with a leaf label (tier 0), the outermost
    first."""
    chains: dict[str, tuple[str, ...]] = {}
    for name, one in labels.items():
        found = ((_TIER.fullmatch(key), value) for key, value in one.items() if known_value(value))
        tiers = sorted(((int(match[1]), value) for match, value in found if match), reverse=True)
        if tiers and tiers[-1][0] == 0:
            chains[name] = tuple(switch for _, switch in tiers)
    return chains


def _with_domains(
    chains: dict[str, tuple[str, ...]], labels: Mapping[str, Mapping[str, str]], label: str
) -> dict[str, tuple[str, ...]]:
    """Return the chains with accelerator domains added below the leaves, if each domain lies under
    one leaf and some leaf has several; else the chains unchanged."""
    domains = {name: known_value(labels[name].get(label)) for name in chains}
    leaves = {(domain, chains[name][-1]) for name, domain in domains.items()}
    whole = len({domain for domain, _ in leaves}) == len(leaves) > len({leaf for _, leaf in leaves})
    if whole and all(domains.values()) and not set(domains.values()) & {s for chain in chains.values() for s in chain}:
        return {name: (*chain, domains[name]) for name, chain in chains.items()}
    return chains


MOST_ITEMS = 200_000
UNCOUNTED = NodeState(status="down", holder="unknown number of GPUs")
UNLABELLED = "nodes without the labels that name switches"


def is_node_list(source: Source) -> bool:
    """True if the file is a Kubernetes list or a Node."""
    if not source.is_json or not is_table(source.json):
        return False
    return source.json.get("kind") in ("List", "NodeList", "Node", "PodList", "NodeFeatureList")


@dataclass
class _Objects:
    """A list's objects by kind. pods: with their position in the list. topologies: levels by name.
    placed: labels by node, as derived from NodeFeatures."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    pods: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    topologies: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    placed: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])


def read(source: Source, options: ReadOptions) -> ReadResult:
    """Return the topology and node states of a list; states alone for a list of pods. Raises
    JobError naming the item."""
    over = IgnoredInput()
    found = _sorted(source.json, over)
    busy = busy_nodes(found.pods, over)
    if found.pods and not found.nodes and not found.placed:
        return ReadResult(states=busy, partial=True, over=over)
    if not found.nodes and not found.placed:
        raise JobError("no nodes in the list", fix="Write it with kubectl get nodes -o json")
    names = list(dict.fromkeys([*found.nodes, *found.placed]))
    labels = {name: _labels(found.nodes.get(name, {}), name) | found.placed.get(name, {}) for name in names}
    chains = chains_of(labels, found.topologies, options)
    left = [name for name in names if name not in chains.above]
    over.note(UNLABELLED, left[0] if left else "", len(left))
    nodes = {name: found.nodes[name] for name in chains.above if name in found.nodes}
    resources = {name: _resources(item, name) for name, item in nodes.items()}
    made = _hardware(nodes, resources, labels, over)
    states = {name: state_of(item, name, options.tolerated) for name, item in nodes.items()}
    states = {
        name: worse_state(worse_state(state, busy.get(name, FREE)), FREE if countable(resources[name]) else UNCOUNTED)
        for name, state in states.items()
    }
    return ReadResult(
        topology=from_chains(chains.above, levels=chains.levels, nested=chains.nested, top=chains.nested),
        states=without_gpus(states, made),
        hardware=made,
        notes=(*_tainted(source.where, states), *(_without_pods(source.where, found) if options.only_source else ())),
        over=over,
    )


def _sorted(value: Any, over: IgnoredInput) -> _Objects:
    kind = str(value.get("kind", "")) if is_table(value) else ""
    usual = kind.removesuffix("List") or "Node"  # items of a NodeList need no kind
    found = _Objects()
    for number, item in enumerate(_items(value)):
        where = f"items[{number}]"
        kind, name = item.get("kind", usual), at(item, where, "metadata", "name", kind=str)
        if name is None:
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
    listed = value if is_table(value) else {}
    items = [listed] if listed.get("kind") == "Node" else listed.get("items")
    if not is_list(items) or not all(is_table(item) for item in items):
        raise JobError("not a list of objects", key="items", fix="Write it with kubectl get nodes -o json")
    if len(items) > MOST_ITEMS:
        raise JobError(f"more than {MOST_ITEMS} objects", key="items", fix="Give fewer kinds, or one namespace's pods")
    return items


def _labels(item: dict[str, Any], name: str) -> dict[str, str]:
    labels: dict[str, Any] = at(item, name, "metadata", "labels") or {}
    if not is_table(labels) or not all(isinstance(one, str) for one in labels.values()):
        raise JobError("labels that are no texts", key=f"{name}.metadata.labels")
    return labels


def _kueue(item: dict[str, Any], where: str) -> tuple[str, ...]:
    levels = at(item, where, "spec", "levels", kind=list) or ()
    found = [at(level, where, "nodeLabel") for level in levels]
    if not found or not all(isinstance(label, str) for label in found):
        raise JobError("a level without a nodeLabel", key=f"{where}.spec.levels")
    return tuple(found)


def _nfd(item: dict[str, Any], where: str) -> tuple[str, dict[str, str]] | None:
    """Return a node's name and the labels that Topograph's engine ``nfd`` wrote as features; None
    for other features."""
    told = at(item, where, "spec", "features", "attributes", "topograph.network", "elements")
    node = at(item, where, "metadata", "labels", "nfd.node.kubernetes.io/node-name")
    if not is_table(told) or not isinstance(node, str):
        return None
    labels: dict[str, str] = {}
    for key in told:
        kind, _, rest = key.partition("-")
        labels[f"{kind}.topograph.run/{rest}"] = at(told, where, key, kind=str)  # fabric-tier-0, accelerator-domain
    return node, labels


def _resources(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a node's allocatable resources, else its capacity."""
    allocatable = at(item, name, "status", "allocatable", kind=dict)
    return allocatable or at(item, name, "status", "capacity", kind=dict) or {}


def _hardware(
    nodes: Mapping[str, dict[str, Any]],
    resources: Mapping[str, dict[str, Any]],
    labels: Mapping[str, Mapping[str, str]],
    over: IgnoredInput,
) -> dict[str, Hardware]:
    """Return every node's hardware; a node whose resources name no GPUs has 0 if another node names
    some."""
    made: dict[str, Hardware] = {}
    silent: list[str] = []
    for name, item in nodes.items():
        found = resources[name]
        made[name] = hardware(found, labels[name], name, over)
        whole = at(item, name, "status", "capacity")
        over.note(UNALLOCATABLE, name, unallocatable(whole if is_table(whole) else {}, found))
        if found and made[name].gpus is None and countable(found):
            silent.append(name)
    if any(one.gpus is not None for one in made.values()):
        made |= {name: replace(made[name], gpus=0) for name in silent}
    return made


def _without_pods(where: str, objects: _Objects) -> tuple[str, ...]:
    """Return a note that a list without pods cannot show which nodes are in use."""
    if objects.pods or not objects.nodes:
        return ()
    said = "no pods in the list, so that nodes count as free whoever holds them"
    return (f"{where}: {said}. kubectl get nodes,pods -A -o json has both; pods alone may be given with states=FILE.",)


def _tainted(where: str, states: Mapping[str, NodeState]) -> tuple[str, ...]:
    """Return a note on nodes that count as down for a taint that the job may tolerate."""
    found = sorted(name for name, state in states.items() if state.holder.startswith(TAINTED))
    if not found:
        return ()
    said = f"{counted(len(found), 'node')} taken as down for a taint, the first {found[0]}"
    return (f"{where}: {said} ({states[found[0]].holder}). If the job tolerates it, add tolerate=KEY.",)


# ---- node states ----


BAD = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
"""Kubernetes' conditions that are bad if true."""
EFFECTS = ("NoSchedule", "NoExecute")
TAINTED = "tainted "


def state_of(item: dict[str, Any], name: str, tolerated: Collection[str]) -> NodeState:
    """Return a node's state by its conditions, taints and cordon. A node is down if it is not
    ready, under pressure, cordoned, being deleted, or tainted with NoSchedule or NoExecute.

    Taints whose key is a GPU resource or is in ``tolerated`` keep no job away. Plait's own taint
    means reserved: busy. Raises JobError naming the node and the key.
    """
    taints: list[dict[str, Any]] = at(item, name, "spec", "taints", kind=list) or []
    conditions: list[dict[str, Any]] = at(item, name, "status", "conditions", kind=list) or []
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
    return reserved or (FREE if conditions else DOWN)  # no conditions: the node never reported


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

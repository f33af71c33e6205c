"""Which switches Kubernetes nodes say are above them: labels that tools and clouds give them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from plait.core.base.errors import JobError, nearest
from plait.place.readers.source import Asked

HOST = "kubernetes.io/hostname"
_TIER = re.compile(r"fabric\.topograph\.run/tier-([0-9]{1,3})")
_NVIDIA, _OCI, _AWS = "network.topology.nvidia.com", "oci.oraclecloud.com", "topology.k8s.aws"
_DOMAIN = "accelerator.topograph.run/domain"
_OLD_DOMAIN = f"{_NVIDIA}/accelerator"
UNKNOWN = frozenset(("", "unknown", "none", "null", "n/a", "no-imds-data"))
"""Values, in small letters, with which a label says that nobody knows."""


@dataclass(frozen=True)
class Family:
    """Labels of one origin, the outermost first. A node is placed by those that occur; the last of them has
    to. domain: the label of an accelerator domain, which may lie below the innermost."""

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
"""In the order in which they are tried, after Topograph's tiers."""


@dataclass(frozen=True)
class Chains:
    """above: of every node, the switches above it from the outermost to its leaf. levels: what these are
    called. nested: whether a switch is known by its name only under the one above it."""

    above: dict[str, tuple[str, ...]]
    levels: tuple[str, ...] = ()
    nested: bool = False


def chains_of(
    labels: Mapping[str, Mapping[str, str]], topologies: Mapping[str, tuple[str, ...]], asked: Asked
) -> Chains:
    """labels: of every node. topologies: the levels of Kueue's, by name. Raises JobError where no label names
    a switch, and for a Topology that is not there."""
    if asked.name and asked.name not in topologies:
        known = f"There are {', '.join(topologies)}" if topologies else "The list has no Topology"
        raise JobError(f"no Topology '{asked.name}'{nearest(asked.name, topologies)}", fix=known)
    if len(topologies) > 1 and not asked.name and not asked.levels:
        raise JobError(f"several Topologies: {', '.join(topologies)}", fix="Choose one with name=NAME")
    levels = asked.levels or next((topologies[name] for name in topologies if asked.name in ("", name)), ())
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
    """A label's value; empty where it says that nobody knows."""
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
    """Topograph's switches above every node that says its leaf (tier 0), the outermost first."""
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
    """Accelerator domains below the leaves where each lies under one leaf and they cut one of them."""
    domains = {name: known_value(labels[name].get(label)) for name in chains}
    leaves = {(domain, chains[name][-1]) for name, domain in domains.items()}
    whole = len({domain for domain, _ in leaves}) == len(leaves) > len({leaf for _, leaf in leaves})
    if whole and all(domains.values()) and not set(domains.values()) & {s for chain in chains.values() for s in chain}:
        return {name: (*chain, cast("str", domains[name])) for name, chain in chains.items()}
    return chains

"""Topologies as files that others read: Slurm's two, and Plait's own TOML and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from plait.core.base.codec.toml_text import to_toml
from plait.core.base.errors import JobError, nearest
from plait.core.topology.form import to_dict
from plait.core.topology.switches import Topology


def to_topology_conf(topology: Topology) -> str:
    """For Slurm's topology/tree; states and hardware have no place in it."""
    lines = ["# TopologyPlugin=topology/tree"]
    for name, told in _switches(topology):
        below = f" Switches={told['switches']}" if "switches" in told else ""
        nodes = f" Nodes={told['nodes']}" if "nodes" in told else ""
        lines.append(f"SwitchName={name}{below}{nodes}")
    return "\n".join(lines) + "\n"


def to_topology_yaml(topology: Topology) -> str:
    """For Slurm since 25.05, the cluster's default."""
    lines = [f"- topology: {_quoted(topology.name or 'default')}", "  cluster_default: true"]
    lines += ["  tree:", "    switches:"]
    for name, told in _switches(topology):
        lines.append(f"    - switch: {_quoted(name)}")
        lines += [f"      children: {_quoted(told['switches'])}"] if "switches" in told else []
        lines += [f"      nodes: {_quoted(told['nodes'])}"] if "nodes" in told else []
    return "\n".join(lines) + "\n"


def to_json(topology: Topology) -> str:
    """Plait's own form."""
    return json.dumps(to_dict(topology), indent=1, ensure_ascii=False) + "\n"


WRITERS: dict[str, Callable[[Topology], str]] = {
    "toml": lambda topology: to_toml(to_dict(topology)),
    "json": to_json,
    "topology.conf": to_topology_conf,
    "topology.yaml": to_topology_yaml,
}


def written(topology: Topology, form: str) -> str:
    """The text of a topology in one of ``WRITERS``."""
    if form not in WRITERS:
        raise JobError(f"no form '{form}'{nearest(form, WRITERS)}", key="--as", fix=f"Known: {', '.join(WRITERS)}")
    return WRITERS[form](topology)


def _switches(topology: Topology) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from to_dict(topology)["switches"].items()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # YAML takes JSON's texts

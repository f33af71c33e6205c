"""Slurm's ``topology.yaml`` (since 25.05, topology.yaml(5)): several named topologies, each a tree, blocks or
flat; a partition uses one of them.

===========  =======================================================================================
known        topology, cluster_default, tree (switches: switch, children, nodes, link_speed), block
             (block_sizes, blocks: block, nodes), flat
passed over  topologies that are not the one asked for; switches and blocks without nodes, which
             Slurm allows (a block keeps its place in its group); further spines; block_sizes
             of -1, as Topograph wrote where it had found none
refused      other keys, aliases, a flat topology or a ring where it is the one asked for,
             ``nodes: ALL``, what is no tree
===========  =======================================================================================
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

from plait.core.base.codec.yaml_text import load
from plait.core.base.errors import JobError, nearest
from plait.core.base.passed_over import PassedOver
from plait.core.topology.switches import Topology
from plait.core.topology.wiring import HostLists, Wiring, build
from plait.place.readers.slurm_wires import NO_SIZES, SlurmBlock, nodes_of, of_blocks, one_of_parallel, with_nodes
from plait.place.readers.source import Asked, Found, Source

_LOOKS = re.compile(r"^[ \t]*-?[ \t]*[\"']?topology[\"']?\s*:", re.MULTILINE)
_KINDS = ("tree", "block", "flat")


def looks(source: Source) -> bool:
    """Whether a text is one of these."""
    return not source.is_json and bool(_LOOKS.search(source.text[:65536]))


def read(source: Source, asked: Asked) -> Found:
    """The topology asked for by name, or the cluster's default, or the only one. Raises JobError naming the
    line or the key."""
    told = load(source.text)
    if not isinstance(told, list) or not told:
        raise JobError("not a list of topologies", fix="Write '- topology: NAME' and below it its tree or blocks")
    entries: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(cast("list[Any]", told)):
        where = f"[{number}]"
        entry = _mapping(one, ("topology", "cluster_default", *_KINDS, "ring", "torus3d"), where)
        name = _name(entry, "topology", where)
        if name in entries:
            raise JobError(f"the topology '{name}' stands twice", key=where)
        entries[name] = entry
    name = _chosen(entries, asked.name)
    over = PassedOver()
    for other in entries:
        if other != name and not asked.name:
            over.note(f"topologies beside '{name}'", other)
    return Found(topology=replace(_topology(entries[name], name, over), name=name), over=over)


def _chosen(entries: dict[str, dict[str, Any]], asked: str) -> str:
    if asked and asked not in entries:
        raise JobError(f"no topology '{asked}'{nearest(asked, entries)}", fix=f"There are {', '.join(entries)}")
    default = next((name for name, entry in entries.items() if entry.get("cluster_default") is True), None)
    return asked or default or next(iter(entries))


def _topology(entry: dict[str, Any], name: str, over: PassedOver) -> Topology:
    kinds = [kind for kind in (*_KINDS, "ring", "torus3d") if entry.get(kind)]
    if len(kinds) != 1 or kinds[0] not in ("tree", "block"):
        problem = f"a {kinds[0]} topology has no switches" if len(kinds) == 1 else "neither or both of tree and block"
        raise JobError(problem, key=name, fix="Name another one of the file with name=NAME, if it has a tree or blocks")
    lists = HostLists()
    if kinds[0] == "tree":
        where = f"{name}.tree"
        switches = _mapping(entry["tree"], ("switches",), where).get("switches")
        wirings: list[Wiring] = []
        for number, told in enumerate(_list(switches, f"{where}.switches")):
            at = f"{where}.switches[{number}]"
            one = _mapping(told, ("switch", "children", "nodes", "link_speed"), at)
            below = lists(one["children"], f"{at}.children") if one.get("children") is not None else []
            plugged = nodes_of(lists, one.get("nodes"), f"{at}.nodes")
            wirings.append(Wiring(_name(one, "switch", at), below, plugged, at))
        return build(one_of_parallel(with_nodes(wirings, over), over))
    where = f"{name}.block"
    told = _mapping(entry["block"], ("block_sizes", "blocks"), where)
    sizes = _list(told.get("block_sizes", []), f"{where}.block_sizes")
    if sizes == [-1]:
        over.note(NO_SIZES, f"{where}.block_sizes")
        sizes = []
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 31 for size in sizes):
        raise JobError("not a list of sizes", key=f"{where}.block_sizes")
    blocks: list[SlurmBlock] = []
    for number, one in enumerate(_list(told.get("blocks"), f"{where}.blocks")):
        at = f"{where}.blocks[{number}]"
        block = _mapping(one, ("block", "nodes"), at)
        blocks.append(SlurmBlock(_name(block, "block", at), nodes_of(lists, block.get("nodes"), f"{at}.nodes"), at))
    return of_blocks(blocks, sizes, over)


def _mapping(value: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise JobError("not a mapping", key=where, fix=f"Known here: {', '.join(known)}")
    for key in cast("dict[Any, Any]", value):
        if key not in known:
            shown = str(key)[:60] if isinstance(key, str) else "a key that is no text"
            raise JobError(f"unknown key {shown}{nearest(shown, known)}", key=where, fix=f"Known: {', '.join(known)}")
    return cast("dict[str, Any]", value)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise JobError("not a list", key=where)
    return cast("list[Any]", value)


def _name(entry: dict[str, Any], key: str, where: str) -> str:
    name = entry.get(key)
    if not isinstance(name, str):
        raise JobError(f"no {key}" if name is None else "not a text", key=f"{where}.{key}", fix="Put it in quotes")
    return name

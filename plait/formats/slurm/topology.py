"""Reader of Slurm's topologies: ``topology.conf`` (tree and block), the similar output of
``scontrol show topology``, and ``topology.yaml`` (since 25.05) with several named topologies. All
become switches and blocks (``_Wires``).

Sources: topology.conf(5), topology.yaml(5) and topology/block of Slurm 26.11, and ``scontrol`` of
22.05, whose switches also list the nodes of lower switches. As in Slurm, a group is as many
neighbouring blocks as fit into the larger size.

===========  ====================================================================================
read         SwitchName with Switches, Nodes, LinkSpeed, Level; BlockName and AggregatedBlock with
             Nodes, BlockIndex, BlockSize; BlockSizes; records of nodes (NodeName=) after them. Of
             YAML: topology, cluster_default, tree (switches: switch, children, nodes, link_speed),
             block (block_sizes, blocks: block, nodes), flat
ignored      switches and blocks without nodes, which Slurm allows (a block keeps its place in its
             group); further spines above the same switches; sizes of -1, which Topograph up to 1.0
             wrote for unknown sizes; topologies other than the requested one
refused      any other line or key, ``Include``, aliases, rings, flat topologies, switches together
             with blocks, ``Nodes=ALL``, switches that form no tree
===========  ====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from plait.core.base.codec.yaml_text import load
from plait.core.base.errors import JobError, nearest
from plait.core.base.ignored_input import IgnoredInput
from plait.core.topology.switches import Topology
from plait.core.topology.wiring import MOST_SWITCHES, HostLists, SwitchEntry, build, check_switch_count, usual_levels
from plait.formats.base.source import ReadOptions, ReadResult, Source
from plait.formats.slurm import nodes as slurm_nodes
from plait.formats.slurm.lines import lines

TOP = "fabric"
EMPTY = "switches without nodes"
PARALLEL = "switches above the same switches as another, such as further spines"
NO_SIZES = "block sizes of -1, as where none was found"
PHANTOMS = "blocks without nodes, whose places in their group stay empty"
_LINE = re.compile(
    r"^[ \t]*(SwitchName|BlockName|BlockSizes|AggregatedBlock|RingName)[ \t]*=|^[ \t]*Include[ \t]+\S",
    re.IGNORECASE | re.MULTILINE,
)
_YAML = re.compile(r"^[ \t]*-?[ \t]*[\"']?topology[\"']?\s*:", re.MULTILINE)
_KEYS = {
    "switchname": ("switches", "nodes", "linkspeed", "level"),
    "blockname": ("nodes", "blockindex", "blocksize"),
    "aggregatedblock": ("nodes", "blockindex", "blocksize"),
    "blocksizes": (),
}
_KINDS = ("tree", "block", "flat", "ring", "torus3d")


@dataclass
class _Wires:
    """Switches or blocks as read, and the sizes of blocks. over: ignored input. listed: switches
    also list the nodes of lower switches, as scontrol's do."""

    over: IgnoredInput
    switches: list[SwitchEntry] = field(default_factory=list[SwitchEntry])
    blocks: list[SwitchEntry] = field(default_factory=list[SwitchEntry])
    sizes: list[int] = field(default_factory=list[int])
    listed: bool = False
    lists: HostLists = field(default_factory=HostLists)

    def nodes(self, host_list: object, where: str) -> list[str]:
        """Return the nodes of a host list; empty for ``(null)``, None and an empty text. Raises
        JobError for ``ALL``, because only slurm.conf names these nodes."""
        if host_list in (None, "", "(null)"):
            return []
        where = self._at(where, "nodes")
        names = self.lists(host_list, where)
        if any(name.upper() == "ALL" for name in names):
            fix = "Write their names, or give what scontrol show topology prints"
            raise JobError("ALL stands for nodes that this file does not name", key=where, fix=fix)
        return names

    def _at(self, where: str, key: str) -> str:
        """Return where an error is, for messages: a line of topology.conf, or a key of YAML below
        ``where``."""
        return where if where.startswith("line ") else f"{where}.{key}"

    def switch(self, name: str, below: object, nodes: object, where: str) -> None:
        """Add a switch."""
        children = [] if below in (None, "", "(null)") else self.lists(below, self._at(where, "children"))
        self.switches.append(SwitchEntry(name, children, self.nodes(nodes, where), where))
        check_switch_count(self.switches)

    def block(self, name: str, nodes: object, where: str) -> None:
        """Add a block; a block without nodes keeps its place in its group."""
        self.blocks.append(SwitchEntry(name, (), self.nodes(nodes, where), where))
        if len(self.blocks) > MOST_SWITCHES:
            raise JobError(f"more than {MOST_SWITCHES} blocks", key=where)

    def topology(self) -> Topology:
        """Return the topology of the switches or blocks. Raises JobError if they form no tree."""
        if self.switches and self.blocks:
            raise JobError("both switches and blocks", key=self.blocks[0].where, fix="A topology is one or the other")
        if self.blocks:
            return _of_blocks(self.blocks, self.sizes, self.over)
        switches = _only_their_own(self.switches) if self.listed else self.switches
        return build(_one_of_parallel(_with_nodes(switches, self.over), self.over))


# ---- lines ----


def is_topology_conf(source: Source) -> bool:
    """True if the text has lines of a topology."""
    return not source.is_json and bool(_LINE.search(source.text))


def read(source: Source, options: ReadOptions) -> ReadResult:
    """Return the topology of a topology.conf or scontrol's output, with node states if node records
    follow. Raises JobError naming the line."""
    nodes_from, over = re.search(r"^NodeName=", source.text, re.MULTILINE), IgnoredInput()
    wires = _read_lines(source.text[: nodes_from.start()] if nodes_from else source.text, over)
    found = ReadResult()
    if nodes_from:
        found = slurm_nodes.read(Source(source.where, source.text[nodes_from.start() :]), options)
    over.add(found.over)
    return replace(found, topology=wires.topology(), over=over)


def _read_lines(text: str, over: IgnoredInput) -> _Wires:
    wires = _Wires(over)
    for where, words in _lines(text):
        kind = next(iter(words))
        if kind == "switchname":
            wires.listed = wires.listed or "level" in words
            wires.switch(words[kind], words.get("switches"), words.get("nodes"), where)
        elif kind == "blockname":
            wires.block(words[kind], words.get("nodes"), where)
            if not wires.sizes and words.get("blocksize"):
                wires.sizes = _sizes(words["blocksize"], where)
        elif kind == "aggregatedblock":
            size = _sizes(words.get("blocksize", ""), where)[0]
            wires.sizes += [size] if size not in wires.sizes else []
        elif words[kind] == "-1":
            over.note(NO_SIZES, where)
        else:
            wires.sizes = _sizes(words[kind], where)
    return wires


def _lines(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each line's position and its words by key in lower case. Raises JobError for unknown
    lines."""
    for where, words in lines(text):
        kind = next(iter(words))
        if kind == "ringname":
            raise JobError("rings have no switches to place ranks by", key=where, fix="Use a tree or blocks")
        if kind not in _KEYS:
            problem = f"a line begins with {kind[:60]}={nearest(kind, _KEYS)}"
            raise JobError(problem, key=where, fix="Lines begin with SwitchName=, BlockName= or BlockSizes=")
        _check_keys(list(words)[1:], _KEYS[kind], where)
        yield where, words


def _sizes(text: str, where: str) -> list[int]:
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,9}", word) and int(word) for word in words):
        raise JobError(f"'{text[:60]}' is no list of block sizes", key=where, fix="Write it as in BlockSizes=16,32")
    return [int(word) for word in words]


# ---- YAML ----


def is_topology_yaml(source: Source) -> bool:
    """True if the text is a topology.yaml."""
    return not source.is_json and bool(_YAML.search(source.text[:65536]))


def read_yaml(source: Source, options: ReadOptions) -> ReadResult:
    """Return the topology requested by name, else the cluster's default, else the first. Raises
    JobError naming the line or the key."""
    told = load(source.text)
    if not isinstance(told, list) or not told:
        raise JobError("not a list of topologies", fix="Write '- topology: NAME' and below it its tree or blocks")
    entries: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(cast("list[Any]", told)):
        where = f"[{number}]"
        entry = _mapping(one, ("topology", "cluster_default", *_KINDS), where)
        name = _name(entry, "topology", where)
        if name in entries:
            raise JobError(f"the topology '{name}' is listed twice", key=where)
        entries[name] = entry
    if options.name and options.name not in entries:
        problem = f"no topology '{options.name}'{nearest(options.name, entries)}"
        raise JobError(problem, fix=f"There are {', '.join(entries)}")
    default = next((name for name, entry in entries.items() if entry.get("cluster_default") is True), None)
    name, over = options.name or default or next(iter(entries)), IgnoredInput()
    for other in entries:
        if other != name and not options.name:
            over.note(f"topologies beside '{name}'", other)
    return ReadResult(topology=replace(_read_entry(entries[name], name, over).topology(), name=name), over=over)


def _read_entry(entry: dict[str, Any], name: str, over: IgnoredInput) -> _Wires:
    kinds = [kind for kind in _KINDS if entry.get(kind)]
    if len(kinds) != 1 or kinds[0] not in ("tree", "block"):
        problem = f"a {kinds[0]} topology has no switches" if len(kinds) == 1 else "neither or both of tree and block"
        raise JobError(problem, key=name, fix="Name another one of the file with name=NAME, if it has a tree or blocks")
    wires, where = _Wires(over), f"{name}.{kinds[0]}"
    if kinds[0] == "tree":
        tree = _mapping(entry["tree"], ("switches",), where)
        for at, one in _entries(tree, f"{where}.switches", ("switch", "children", "nodes", "link_speed")):
            wires.switch(_name(one, "switch", at), one.get("children"), one.get("nodes"), at)
        return wires
    told = _mapping(entry["block"], ("block_sizes", "blocks"), where)
    sizes = _list(told.get("block_sizes", []), f"{where}.block_sizes")
    if sizes == [-1]:
        over.note(NO_SIZES, f"{where}.block_sizes")
        sizes = []
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 31 for size in sizes):
        raise JobError("not a list of sizes", key=f"{where}.block_sizes")
    wires.sizes = sizes
    for at, one in _entries(told, f"{where}.blocks", ("block", "nodes")):
        wires.block(_name(one, "block", at), one.get("nodes"), at)
    return wires


def _entries(table: dict[str, Any], where: str, known: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the mappings of a list with their positions."""
    for number, one in enumerate(_list(table.get(where.rpartition(".")[2]), where)):
        yield f"{where}[{number}]", _mapping(one, known, f"{where}[{number}]")


def _mapping(value: Any, known: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise JobError("not a mapping", key=where, fix=f"Known here: {', '.join(known)}")
    _check_keys(list(cast("dict[Any, Any]", value)), known, where)
    return cast("dict[str, Any]", value)


def _check_keys(keys: Sequence[Any], known: Sequence[str], where: str) -> None:
    for key in keys:
        if key not in known:
            shown = str(key)[:60] if isinstance(key, str) else "a key that is no text"
            fix = f"Known: {', '.join(known) or 'nothing else'}"
            raise JobError(f"unknown key {shown}{nearest(shown, known)}", key=where, fix=fix)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise JobError("not a list", key=where)
    return cast("list[Any]", value)


def _name(entry: dict[str, Any], key: str, where: str) -> str:
    name = entry.get(key)
    if not isinstance(name, str):
        raise JobError(f"no {key}" if name is None else "not a text", key=f"{where}.{key}", fix="Put it in quotes")
    return name


# ---- trees ----


def _only_their_own(switches: Sequence[SwitchEntry]) -> list[SwitchEntry]:
    """Return the switches without nodes that belong to a lower switch."""
    listed = {one.name: one.nodes for one in switches}
    lower = [{node for child in one.switches for node in listed.get(child, ())} for one in switches]
    return [
        replace(one, nodes=[node for node in one.nodes if node not in below])
        for one, below in zip(switches, lower, strict=True)
    ]


def _with_nodes(switches: Sequence[SwitchEntry], over: IgnoredInput) -> list[SwitchEntry]:
    """Return the switches with nodes below them; Slurm allows leaves without nodes, for nodes to
    come."""
    above: dict[str, list[SwitchEntry]] = {}
    for one in switches:
        for name in one.switches:
            above.setdefault(name, []).append(one)
    below = {id(one): len(one.switches) for one in switches}  # by object: a name may occur twice
    empty = [one for one in switches if not one.nodes and not one.switches]
    for one in empty:  # the list grows during the iteration
        over.note(EMPTY, one.where or one.name)
        for parent in above.get(one.name, ()):
            below[id(parent)] -= 1
            if not below[id(parent)] and not parent.nodes:
                empty.append(parent)
    gone, names = set(map(id, empty)), {one.name for one in empty}
    left = [one for one in switches if id(one) not in gone]
    if switches and not left:
        raise JobError("no switch has nodes", fix="Give the file that Slurm reads, with Nodes= of every leaf")
    return [replace(one, switches=[name for name in one.switches if name not in names]) for one in left]


def _one_of_parallel(switches: Sequence[SwitchEntry], over: IgnoredInput) -> list[SwitchEntry]:
    """Return the switches with one of each set that have the same children, such as a fat tree's
    spines.

    A tree needs one of them (Slurm's topology guide). Their parents are compared again afterwards.
    """
    left = list(switches)
    while True:
        first, instead = dict[frozenset[str], str](), dict[str, str]()
        for one in left:
            if one.switches and not one.nodes:
                kept = first.setdefault(frozenset(one.switches), one.name)
                if kept != one.name:
                    instead[one.name] = kept
                    over.note(PARALLEL, one.where or one.name)
        if not instead:
            return left
        rest = (one for one in left if one.name not in instead)
        left = [replace(one, switches=list(dict.fromkeys(instead.get(n, n) for n in one.switches))) for one in rest]


def _of_blocks(blocks: Sequence[SwitchEntry], sizes: Sequence[int], over: IgnoredInput) -> Topology:
    """Return the topology of blocks in Slurm's groups of neighbours: one level of groups for every
    size after the first (the planning base size). A top switch joins groups if several remain.
    Raises JobError for wrong sizes, and if no block has nodes."""
    for smaller, larger in pairwise(sizes):
        if larger % smaller or (ratio := larger // smaller) & (ratio - 1) or ratio < 2:
            problem = f"the block size {larger} is not a power of two times {smaller}"
            raise JobError(problem, key="BlockSizes", fix="Slurm joins blocks in pairs: double the size before")
    for block in blocks:
        if not block.nodes:
            over.note(PHANTOMS, block.where or block.name)
    wirings = [block for block in blocks if block.nodes]
    if not wirings:
        raise JobError("no block has nodes", fix="Give the file that Slurm reads, with the nodes of every block")
    level: list[tuple[str, list[str]]] = [
        (block.name, [block.name]) if block.nodes else ("", []) for block in blocks
    ]  # "": none has nodes
    for smaller, larger in pairwise(sizes):
        groups: list[tuple[str, list[str]]] = []
        for start in range(0, len(level), larger // smaller):
            part = level[start : start + larger // smaller]
            below, inside = [name for name, _ in part if name], [name for _, own in part for name in own]
            if len(below) > 1:
                wirings.append(SwitchEntry(f"{inside[0]}..{inside[-1]}", below))
                below = [wirings[-1].name]
            groups.append((below[0] if below else "", inside))
        level = groups
    if len(top := [name for name, _ in level if name]) > 1:
        name = TOP
        while name in {wiring.name for wiring in wirings}:
            name += "_"
        wirings.append(SwitchEntry(name, top))
    tree = build(wirings)
    return replace(tree, levels=block_levels(len(tree.levels)))


def block_levels(depth: int) -> tuple[str, ...]:
    """Return the names of the levels of blocks, from the top.

    >>> block_levels(1), block_levels(3)
    (('block',), ('fabric', 'group', 'block'))
    """
    return tuple({"core": TOP, "leaf": "block", "minipod": "group"}.get(name, name) for name in usual_levels(depth))

"""Slurm's ``topology.conf`` (tree and block), and what ``scontrol show topology`` prints, much alike.

After topology.conf(5) and topology/block of Slurm 26.11 and ``scontrol`` of 22.05, whose switches list the
nodes of all below them as well. Blocks are grouped as Slurm does: neighbours, as many as a larger size holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from plait.core.errors import JobError, nearest
from plait.core.slurm_lines import lines
from plait.core.topology import Topology
from plait.core.wiring import HostLists, Wiring, build, usual_levels
from plait.place.readers import slurm_nodes
from plait.place.readers.source import Asked, Found, Source

_LINE = re.compile(r"^\s*(SwitchName|BlockName|BlockSizes|AggregatedBlock|RingName)\s*=", re.IGNORECASE | re.MULTILINE)
_KEYS = {
    "switchname": ("switches", "nodes", "linkspeed", "level"),
    "blockname": ("nodes", "blockindex", "blocksize"),
    "aggregatedblock": ("nodes", "blockindex", "blocksize"),
    "blocksizes": (),
}
TOP = "fabric"


@dataclass(frozen=True)
class Block:
    """A block of nodes that Slurm keeps together."""

    name: str
    nodes: Sequence[str]
    where: str


def looks(source: Source) -> bool:
    """Whether a text is one of these."""
    return not source.is_json and bool(_LINE.search(source.text))


def read(source: Source, asked: Asked) -> Found:
    """Raises JobError naming the line."""
    del asked
    lists, nodes_from = HostLists(), re.search(r"^NodeName=", source.text, re.MULTILINE)
    text = source.text[: nodes_from.start()] if nodes_from else source.text
    wirings: list[Wiring] = []
    blocks: list[Block] = []
    sizes: list[int] = []
    printed = False
    for where, words in _lines(text):
        kind = next(iter(words))
        if kind == "blocksizes":
            sizes = _sizes(words[kind], where)
        elif kind == "blockname":
            blocks.append(Block(words[kind], lists(words.get("nodes", ""), where), where))
            sizes = sizes or [int(words["blocksize"])] if words.get("blocksize", "").isdecimal() else sizes
        elif kind == "aggregatedblock":
            size = _sizes(words.get("blocksize", ""), where)[0]
            sizes += [size] if size not in sizes else []
        else:
            printed = printed or "level" in words
            below, plugged = (lists(words.get(key, ""), where) for key in ("switches", "nodes"))
            wirings.append(Wiring(words[kind], below, plugged, where))
    if wirings and blocks:
        raise JobError("both switches and blocks", key=blocks[0].where, fix="A topology is one or the other")
    rest = Source(source.where, source.text[nodes_from.start() :]) if nodes_from else None
    found = slurm_nodes.read(rest, Asked()) if rest else Found()
    topology = of_blocks(blocks, sizes) if blocks else build(_only_their_own(wirings) if printed else wirings)
    return replace(found, topology=topology)


def _lines(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Where a line is and its words, keys in small letters."""
    for where, words in lines(text):
        kind = next(iter(words))
        if kind == "ringname":
            raise JobError("rings have no switches to place ranks by", key=where, fix="Use a tree or blocks")
        if kind not in _KEYS:
            problem = f"a line begins with {kind[:60]}={nearest(kind, _KEYS)}"
            raise JobError(problem, key=where, fix="Lines begin with SwitchName=, BlockName= or BlockSizes=")
        for key in words:
            if key != kind and key not in _KEYS[kind]:
                known = ", ".join(_KEYS[kind]) or "nothing else"
                raise JobError(f"unknown key {key[:60]}{nearest(key, _KEYS[kind])}", key=where, fix=f"Known: {known}")
        yield where, words


def _sizes(text: str, where: str) -> list[int]:
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,9}", word) and int(word) for word in words):
        raise JobError(f"'{text[:60]}' is no list of block sizes", key=where, fix="Write it as in BlockSizes=16,32")
    return [int(word) for word in words]


def _only_their_own(wirings: Sequence[Wiring]) -> list[Wiring]:
    """Switches without the nodes that are listed again for being under a lower one."""
    listed = {wiring.name: wiring.nodes for wiring in wirings}
    own: list[Wiring] = []
    for wiring in wirings:
        lower = {node for child in wiring.switches for node in listed.get(child, ())}
        own.append(replace(wiring, nodes=[node for node in wiring.nodes if node not in lower]))
    return own


def of_blocks(blocks: Sequence[Block], sizes: Sequence[int]) -> Topology:
    """Blocks in groups of neighbours, one level of groups for every size after the first (the planning base
    size), and something above where several are left."""
    for smaller, larger in pairwise(sizes):
        if larger % smaller or (ratio := larger // smaller) & (ratio - 1) or ratio < 2:
            problem = f"the block size {larger} is not a power of two times {smaller}"
            raise JobError(problem, key="BlockSizes", fix="Slurm pairs blocks")
    wirings = [Wiring(block.name, (), block.nodes, block.where) for block in blocks]
    names, level = [[block.name] for block in blocks], [block.name for block in blocks]
    for smaller, larger in pairwise(sizes):
        many, groups, members = larger // smaller, list[str](), list[list[str]]()
        for start in range(0, len(level), many):
            inside = [name for group in names[start : start + many] for name in group]
            members.append(inside)
            if len(level[start : start + many]) == 1:
                groups.append(level[start])
                continue
            groups.append(f"{inside[0]}..{inside[-1]}")
            wirings.append(Wiring(groups[-1], level[start : start + many]))
        names, level = members, groups
    if len(level) > 1:
        wirings.append(Wiring(_free_name({wiring.name for wiring in wirings}), level))
    tree = build(wirings)
    return replace(tree, levels=block_levels(len(tree.levels)))


def block_levels(depth: int) -> tuple[str, ...]:
    """What levels of blocks are called, from the top.

    >>> block_levels(1), block_levels(3)
    (('block',), ('fabric', 'group', 'block'))
    """
    return tuple({"core": TOP, "leaf": "block", "minipod": "group"}.get(name, name) for name in usual_levels(depth))


def _free_name(taken: Set[str]) -> str:
    name = TOP
    while name in taken:
        name += "_"
    return name

"""Slurm's ``topology.conf`` (tree and block), and what ``scontrol show topology`` prints, much alike.

After topology.conf(5) and topology/block of Slurm 26.11 and ``scontrol`` of 22.05, whose switches list the
nodes of all below them as well. Blocks are grouped as Slurm does: neighbours, as many as a larger size holds.

===========  ====================================================================================
known        SwitchName with Switches, Nodes, LinkSpeed, Level; BlockName and AggregatedBlock with
             Nodes, BlockIndex, BlockSize; BlockSizes; records of nodes (NodeName=) behind them
passed over  switches and blocks without nodes, which Slurm allows (a block keeps its place in its
             group); further spines above the same switches; BlockSizes=-1, which Topograph up to 1.0
             wrote where it had found none
refused      any other line or key, ``Include``, rings, switches beside blocks, ``Nodes=ALL``, what is no tree
===========  ====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from plait.core.base.errors import JobError, nearest
from plait.core.base.passed_over import PassedOver
from plait.core.topology.slurm_lines import lines
from plait.core.topology.wiring import MOST_SWITCHES, HostLists, Wiring, build, within
from plait.place.readers import slurm_nodes
from plait.place.readers.slurm_wires import NO_SIZES, SlurmBlock, nodes_of, of_blocks, one_of_parallel, with_nodes
from plait.place.readers.source import Asked, Found, Source

_LINE = re.compile(
    r"^[ \t]*(SwitchName|BlockName|BlockSizes|AggregatedBlock|RingName)[ \t]*=|^[ \t]*Include[ \t]+\S",
    re.IGNORECASE | re.MULTILINE,
)
_KEYS = {
    "switchname": ("switches", "nodes", "linkspeed", "level"),
    "blockname": ("nodes", "blockindex", "blocksize"),
    "aggregatedblock": ("nodes", "blockindex", "blocksize"),
    "blocksizes": (),
}


@dataclass
class _Told:
    """What the lines tell. printed: whether they are scontrol's."""

    wirings: list[Wiring] = field(default_factory=list[Wiring])
    blocks: list[SlurmBlock] = field(default_factory=list[SlurmBlock])
    sizes: list[int] = field(default_factory=list[int])
    printed: bool = False


def looks(source: Source) -> bool:
    """Whether a text is one of these."""
    return not source.is_json and bool(_LINE.search(source.text))


def read(source: Source, asked: Asked) -> Found:
    """Raises JobError naming the line."""
    nodes_from, over = re.search(r"^NodeName=", source.text, re.MULTILINE), PassedOver()
    told = _told(source.text[: nodes_from.start()] if nodes_from else source.text, over)
    if told.wirings and told.blocks:
        raise JobError("both switches and blocks", key=told.blocks[0].where, fix="A topology is one or the other")
    rest = Source(source.where, source.text[nodes_from.start() :]) if nodes_from else None
    found = slurm_nodes.read(rest, asked) if rest else Found()
    over.add(found.over)
    if told.blocks:
        topology = of_blocks(told.blocks, told.sizes, over)
    else:
        topology = build(
            one_of_parallel(with_nodes(_only_their_own(told.wirings) if told.printed else told.wirings, over), over)
        )
    return replace(found, topology=topology, over=over)


def _told(text: str, over: PassedOver) -> _Told:
    told, lists = _Told(), HostLists()
    for where, words in _lines(text):
        kind = next(iter(words))
        nodes = nodes_of(lists, words.get("nodes"), where)
        if kind == "blocksizes":
            if words[kind] == "-1":
                over.note(NO_SIZES, where)
            else:
                told.sizes = _sizes(words[kind], where)
        elif kind == "blockname":
            told.blocks.append(SlurmBlock(words[kind], nodes, where))
            if len(told.blocks) > MOST_SWITCHES:
                raise JobError(f"more than {MOST_SWITCHES} blocks", key=where)
            if not told.sizes and words.get("blocksize"):
                told.sizes = _sizes(words["blocksize"], where)
        elif kind == "aggregatedblock":
            size = _sizes(words.get("blocksize", ""), where)[0]
            told.sizes += [size] if size not in told.sizes else []
        else:
            told.printed = told.printed or "level" in words
            below = [] if words.get("switches") == "(null)" else lists(words.get("switches", ""), where)
            told.wirings.append(Wiring(words[kind], below, nodes, where))
            within(told.wirings)
    return told


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

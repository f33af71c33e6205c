"""Input and result of the readers of clusters: a file's text, the options, and the topology with
node states."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from json import JSONDecodeError
from typing import Any

from plait.core.base.codec.json_text import is_table, parse_json, unpacked
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within, kind_of
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import counted
from plait.core.topology.switches import Hardware, NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build, usual_levels

LARGEST = 256 << 20
"""The largest unpacked file, in bytes. Ten thousand nodes with all of Kubernetes' fields are 100 to
200 MB."""
MOST_VALUES = 5_000_000
"""The largest number of values in a JSON file."""
LARGEST_TEXT, LONGEST_LINE, MOST_LINES = 32 << 20, 1 << 20, 500_000
"""Limits for files other than JSON: characters of the file, characters of a line, and lines."""
NO_WRITER, SILENCE = 5.0, 60.0
"""The longest time in seconds that a pipe may have no writer, and that its writer may write
nothing."""
_JSON = re.compile(r"\s*(?:\{|\[(?!\[?[ \t]*[A-Za-z_]))")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a reader. name: the topology to read if a file has several. levels: node labels of
    the topology levels, the outermost first. tolerated: keys of taints that the user's jobs
    tolerate. only_source: no other source has the nodes' states."""

    name: str = ""
    levels: tuple[str, ...] = ()
    tolerated: frozenset[str] = frozenset()
    only_source: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """A reader's result. topology: None if the source has node states alone. states, hardware: by
    node name. partial: a node without a state here may be in any state. notes: sentences for the
    user. over: ignored input, counted."""

    topology: Topology | None = None
    states: Mapping[str, NodeState] = field(default_factory=dict[str, NodeState])
    hardware: Mapping[str, Hardware] = field(default_factory=dict[str, Hardware])
    partial: bool = False
    notes: tuple[str, ...] = ()
    over: IgnoredInput = field(default_factory=IgnoredInput)


@dataclass(frozen=True)
class Source:
    """A file's text. where: the file's name in messages. text: the whole text."""

    where: str
    text: str

    @staticmethod
    def read(path: str) -> Source:
        """Return the text of a file (also packed by gzip, bzip2 or xz), of a pipe, or, for ``-``,
        of standard input. Raises JobError if it cannot be read, is no UTF-8 text, or is too
        large."""
        where = "standard input" if path == "-" else path
        try:
            if path == "-":
                data = sys.stdin.buffer.read(LARGEST + 1)
            else:
                data = _from_pipe(path) if kind_of(path) == "pipe" else contents_within(path, LARGEST)
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise JobError(problem, file=where, fix="Name a text file that is there and may be read") from None
        if len(data) > LARGEST:
            raise JobError(f"more than {LARGEST >> 20} MiB", file=where)
        try:
            data = unpacked(data, LARGEST)
        except ValueError as error:
            raise JobError(f"cannot be unpacked: {error}", file=where) from None
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise JobError(f"byte {error.start} is not UTF-8, so this is no text", file=where) from None
        return Source(where, text).checked()

    def checked(self) -> Source:
        """Return the source itself. Raises JobError if its text exceeds the limits for files other
        than JSON."""
        if not self.is_json:
            if len(self.text) > LARGEST_TEXT:
                raise JobError(f"more than {LARGEST_TEXT >> 20} MiB of text", file=self.where)
            if sum(map(self.text.count, _LINE_ENDS)) > MOST_LINES:
                raise JobError(f"more than {MOST_LINES} lines", file=self.where)
            if max(map(len, self.text.split("\n"))) > LONGEST_LINE:
                raise JobError(f"a line of more than {LONGEST_LINE} characters", file=self.where)
        return self

    @cached_property
    def json(self) -> Any:
        """The text's JSON value. Raises JobError naming the line of a syntax error."""
        try:
            return parse_json(self.text, most=MOST_VALUES)
        except ValueError as error:
            line = f"line {error.lineno}" if isinstance(error, JSONDecodeError) else None
            what = f"{error.msg} (character {error.colno})" if isinstance(error, JSONDecodeError) else error
            raise JobError(f"not valid JSON: {what}", key=line) from None

    @cached_property
    def is_json(self) -> bool:
        """True if the text begins like a JSON object or list, and not like a table of TOML."""
        return bool(_JSON.match(self.text))


def _from_pipe(path: str) -> bytes:
    """Return a pipe's bytes up to its writer's close. Raises OSError if no process writes for too
    long."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = bytearray()
    waits = {"nobody has opened this pipe to write": NO_WRITER, "whoever opened this pipe writes nothing": SILENCE}
    begun = time.monotonic()
    try:
        while len(found) <= LARGEST:
            try:
                part = os.read(pipe, 1 << 20)
                why = "nobody has opened this pipe to write"
            except BlockingIOError:
                part, why = b"", "whoever opened this pipe writes nothing"
            if part:
                found += part
                begun = time.monotonic()
            elif found and why.startswith("nobody"):  # the writer closed the pipe
                break
            elif time.monotonic() - begun > waits[why]:
                raise OSError(f"{why}, for {waits[why]:.0f} s")
            else:
                time.sleep(0.02)
    finally:
        os.close(pipe)
    return bytes(found)


JSON_TYPE_NAMES: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text"}


def at(item: Any, where: str, *keys: str, kind: type[Any] = object) -> Any:
    """Return the value at nested keys of an object, None if a key is missing. Raises JobError if a
    parent is no object, or the value is not of ``kind``. where: the object's name in messages."""
    for number, key in enumerate(keys):
        if not is_table(item):
            raise JobError("not an object", key=".".join((where, *keys[:number])))
        item = item.get(key)
        if item is None:
            return None
    if not isinstance(item, kind):
        raise JobError(f"not {JSON_TYPE_NAMES[kind]}", key=".".join((where, *keys)))
    return item


TOP = "fabric"
"""The name of the added switch above all others, if the source names no outermost switch."""


def from_chains(
    chains: Mapping[str, Sequence[str]], *, levels: Sequence[str] = (), nested: bool = False, top: bool = False
) -> Topology:
    """Return the topology of nodes by their chains of switches.

    chains: for every node, the switches above it from the outermost to its leaf. levels: names of
    the levels. nested: equal names under different switches are different switches, such as a rack
    1 in every block. top: add a switch above all chains even if there is one outermost switch.

    Raises JobError if two nodes put a switch under different parents.
    """
    if not chains:
        raise JobError("no node says which switches are above it")
    chains = _with_unique_names(chains) if nested else chains
    parents: dict[str, str] = {}
    switches: dict[str, None] = {}
    leaves: dict[str, list[str]] = {}
    for node, chain in chains.items():
        for above, below in pairwise(chain):
            if parents.setdefault(below, above) != above:
                problem = f"its switch '{below}' is under '{above}', and under '{parents[below]}' for others"
                raise JobError(problem, key=node)
        switches |= dict.fromkeys(chain)
        leaves.setdefault(chain[-1], []).append(node)
    outermost = [name for name in switches if name not in parents]
    children: dict[str, list[str]] = {}
    if len(outermost) > 1 or (top and outermost):
        name = TOP
        while name in switches:
            name += "_"
        children[name] = outermost
        levels = (TOP, *levels) if levels else ()
        switches = {name: None, **switches}
    for below, above in parents.items():
        children.setdefault(above, []).append(below)
    tree = build(SwitchEntry(name, children.get(name, ()), leaves.get(name, ())) for name in switches)
    depth = len(tree.levels)
    named = tuple(levels) if len(levels) == depth else usual_levels(depth)
    return Topology(switches=tree.switches, nodes=tree.nodes, levels=named)


def _with_unique_names(chains: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Return the chains with switch names made unique: a name at several places gets its parents as
    prefix."""
    places: dict[str, set[tuple[str, ...]]] = {}
    for chain in {tuple(chain) for chain in chains.values()}:  # many nodes, few leaves
        for depth, name in enumerate(chain):
            places.setdefault(name, set()).add(chain[:depth])
    several = {name for name, above in places.items() if len(above) > 1}
    if not several:
        return chains
    return {
        node: tuple("/".join(chain[: depth + 1]) if name in several else name for depth, name in enumerate(chain))
        for node, chain in chains.items()
    }


_RANK = {"free": 0, "busy": 1, "down": 2}
_MOST_HOLDERS = 3


def worse_state(first: NodeState, second: NodeState) -> NodeState:
    """Return the worse of two states of a node: down before busy before free. Two busy states join:
    both jobs hold the node, until the later end.

    >>> worse_state(NodeState(), NodeState(status="busy", holder="job 7")).holder
    'job 7'
    """
    if _RANK[first.status] != _RANK[second.status]:
        return max(first, second, key=lambda state: _RANK[state.status])
    if not (first.holder and second.holder):
        return first if first.holder else second
    if first.status != "busy" or first.holder == second.holder:
        return first
    holders = list(dict.fromkeys([*first.holder.split(", "), *second.holder.split(", ")]))
    more = [*holders[:_MOST_HOLDERS], *(["..."] if len(holders) > _MOST_HOLDERS else [])]
    known = first.until is not None and second.until is not None
    until = max(first.until or 0.0, second.until or 0.0) if known else None
    return NodeState(status="busy", until=until, holder=", ".join(more))


def without_gpus(states: Mapping[str, NodeState], hardware: Mapping[str, Hardware]) -> dict[str, NodeState]:
    """Return the states with every node that is known to have no GPUs set to down, so that no job
    is placed there.

    >>> without_gpus({"b": NodeState()}, {"a": Hardware(), "b": Hardware(gpus=0)})["b"].holder
    'no whole GPU'
    """
    none = NodeState(status="down", holder="no whole GPU")
    bare = {name for name, one in hardware.items() if one.gpus == 0}
    return {name: worse_state(state, none) if name in bare else state for name, state in states.items()}


def apply_result(topology: Topology, result: ReadResult, where: str, over: IgnoredInput) -> tuple[Topology, list[str]]:
    """Return a topology with the states and hardware of another source, and notes for the user.
    where: the other source. over: collects nodes outside the topology. Raises JobError if the two
    share no node."""
    notes: list[str] = []
    told = result.states or result.hardware
    if not told.keys() & topology.node_index.keys():
        other, own = next(iter(told)), topology.nodes[0].name
        raise JobError(f"tells of other nodes, such as '{other}', than the topology, such as '{own}'")
    strangers = sorted(told.keys() - topology.node_index.keys())
    over.note("nodes under no switch", f"{where}: {strangers[0]}" if strangers else "", len(strangers))
    states = result.states
    if states and not result.partial and (quiet := [one.name for one in topology.nodes if one.name not in states]):
        notes.append(f"{where}: no state of {_some(quiet)}: taken as they were.")
    known = {
        name: worse_state(topology.node(name).state, state)
        for name, state in states.items()
        if name in topology.node_index
    }
    made = {name: one for name, one in result.hardware.items() if name in topology.node_index}
    return topology.with_hardware(made).with_states(known), notes


def _some(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'node')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"

"""A topology as text: the rows of a tree, kept short by giving identical subtrees one row; and
topology files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.core.base.codec.toml_text import to_toml
from plait.core.base.errors import JobError, nearest
from plait.core.topology.form import to_dict
from plait.core.topology.hostlist import fold
from plait.core.topology.switches import Level, Node, Topology

MOST_ROWS = 40
"""Maximum number of rows in a tree, unless the caller chooses a level."""
BAR = 10
_LONGEST = 32


@dataclass(kw_only=True)
class _Tree:
    """A switch in the tree of a topology, with counts of everything below it. shape: nodes and
    switches below it, for comparing two switches. form: also the states of these nodes."""

    name: str
    depth: int
    children: list[_Tree] = field(default_factory=list["_Tree"])
    states: Counter[str] = field(default_factory=Counter[str])
    leaves: int = 0
    shape: tuple[object, ...] = ()
    form: tuple[object, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SwitchRow:
    """A row of the printed tree: one switch, or ``count`` identical ones. leaves, nodes: number
    below each switch. free, busy, down: fewest and most nodes of one switch in that state. bar: the
    states as a bar of text."""

    label: str
    count: int
    leaves: int
    nodes: int
    free: tuple[int, int]
    busy: tuple[int, int]
    down: tuple[int, int]
    bar: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's columns as text."""
        return (
            self.label,
            str(self.leaves),
            str(self.nodes),
            *map(_range, (self.free, self.busy, self.down)),
            self.bar,
        )


HEADER = ("switch", "leaves", "nodes", "free", "busy", "down", "use")


def outline(topology: Topology, level: Level | None = None) -> list[SwitchRow]:
    """Return the rows of the tree of switches, from the top down to ``level``; None: as deep as
    ``MOST_ROWS`` rows allow. If even minipods are too many, those with equally many nodes share a
    row."""
    top = _counted(topology)
    if level is not None:
        return _rows(top, topology.depth_of(level), "form")
    for depth in range(len(topology.levels) - 1, topology.depth_of() - 1, -1):
        rows = _rows(top, depth, "form")
        if len(rows) <= MOST_ROWS:
            return rows
    return _rows(top, topology.depth_of(), "shape")


def _counted(topology: Topology) -> _Tree:
    trees = [_Tree(name=switch.name, depth=switch.depth) for switch in topology.switches]
    for node in topology.nodes:
        trees[node.leaf].states[node.state.status] += 1
    for place in {node.leaf for node in topology.nodes}:
        trees[place].leaves = 1
    for place in range(len(trees) - 1, -1, -1):  # children before parents
        tree, parent = trees[place], topology.switches[place].parent
        tree.children.reverse()
        tree.shape = (tree.states.total(), tuple(child.shape for child in tree.children))
        tree.form = (tuple(sorted(tree.states.items())), tuple(child.form for child in tree.children))
        if parent >= 0:
            above = trees[parent]
            above.children.append(tree)
            above.states.update(tree.states)
            above.leaves += tree.leaves
    return trees[0]


def _rows(top: _Tree, deepest: int, same: Literal["form", "shape"]) -> list[SwitchRow]:
    """Return the rows of the tree, depth first, down to depth ``deepest``; of identical
    neighbouring switches only the first one's children are shown. same: the field of ``_Tree`` that
    makes switches identical."""
    rows: list[SwitchRow] = []
    waiting = [([top], "", "")]
    while waiting:
        group, indent, below = waiting.pop()
        rows.append(_row(group, indent))
        if group[0].depth < deepest:
            inner = _alike(group[0].children, same)
            ends = [False] * (len(inner) - 1) + [True]
            waiting += [
                (each, below + ("└─ " if end else "├─ "), below + ("   " if end else "│  "))
                for each, end in reversed(list(zip(inner, ends, strict=False)))
            ]
    return rows


def _alike(trees: Sequence[_Tree], same: Literal["form", "shape"]) -> list[list[_Tree]]:
    """Return groups of neighbouring trees with identical contents."""
    groups: list[list[_Tree]] = []
    for tree in trees:
        if groups and getattr(groups[-1][0], same) == getattr(tree, same):
            groups[-1].append(tree)
        else:
            groups.append([tree])
    return groups


def _row(group: Sequence[_Tree], indent: str) -> SwitchRow:
    names = [tree.name for tree in group]
    label = fold(names)
    if len(label) > _LONGEST and len(names) > 1:
        label = f"{names[0]} and {len(names) - 1} more"
    free, busy, down = (
        (min(tree.states[status] for tree in group), max(tree.states[status] for tree in group))
        for status in ("free", "busy", "down")
    )
    total = sum((tree.states for tree in group), Counter[str]())
    return SwitchRow(
        label=f"{indent}{label}{f'  {len(names)} x' if len(names) > 1 else ''}", count=len(group),
        leaves=group[0].leaves, nodes=group[0].states.total(), free=free, busy=busy, down=down,
        bar=_bar(total["busy"], total["down"], total.total()),
    )  # fmt: skip


def _bar(busy: int, down: int, nodes: int) -> str:
    """Return a bar of text whose parts show the busy, down and free ones of ``nodes`` nodes."""
    used = round(BAR * busy / nodes)
    lost = min(-(-BAR * down // nodes), BAR - used)
    return "█" * used + "x" * lost + "·" * (BAR - used - lost)


def _range(numbers: tuple[int, int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[1] else f"{numbers[0]}-{numbers[1]}"


def down_nodes(topology: Topology, most: int = 8) -> str:
    """Return the nodes that are down, grouped by reason, as text; empty if there are none. most:
    number of reasons shown."""
    reasons: dict[str, list[str]] = {}
    for node in topology.nodes:
        if node.state.status == "down":
            reasons.setdefault(node.state.holder, []).append(node.name)
    told = [f"{fold(names)}{f' ({reason})' if reason else ''}" for reason, names in reasons.items()]
    more = [f"and {len(told) - most} more reasons"] if len(told) > most else []
    return ", ".join([*(_shortened(one) for one in told[:most]), *more])


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def spreads(topology: Topology, groups: Mapping[str, str], level: Level | None = None) -> dict[str, int]:
    """Return the number of minipods that each group of nodes touches. groups: group names by
    node."""
    above = topology.ancestors_at(level)
    touched: dict[str, set[int]] = {}
    for name, group in groups.items():
        node: Node = topology.node(name)
        touched.setdefault(group, set()).add(above[node.leaf])
    return {group: len(pods) for group, pods in touched.items()}


def to_topology_conf(topology: Topology) -> str:
    """Return the topology as a ``topology.conf`` for Slurm's topology/tree, which has no states and
    no hardware."""
    lines = ["# TopologyPlugin=topology/tree"]
    for name, told in _switches(topology):
        below = f" Switches={told['switches']}" if "switches" in told else ""
        nodes = f" Nodes={told['nodes']}" if "nodes" in told else ""
        lines.append(f"SwitchName={name}{below}{nodes}")
    return "\n".join(lines) + "\n"


def to_topology_yaml(topology: Topology) -> str:
    """Return the topology as a ``topology.yaml`` for Slurm since 25.05, as the cluster's
    default."""
    lines = [f"- topology: {_quoted(topology.name or 'default')}", "  cluster_default: true"]
    lines += ["  tree:", "    switches:"]
    for name, told in _switches(topology):
        lines.append(f"    - switch: {_quoted(name)}")
        lines += [f"      children: {_quoted(told['switches'])}"] if "switches" in told else []
        lines += [f"      nodes: {_quoted(told['nodes'])}"] if "nodes" in told else []
    return "\n".join(lines) + "\n"


def to_json(topology: Topology) -> str:
    """Return the topology in Plait's own JSON format."""
    return json.dumps(to_dict(topology), indent=1, ensure_ascii=False) + "\n"


WRITERS: dict[str, Callable[[Topology], str]] = {
    "toml": lambda topology: to_toml(to_dict(topology)),
    "json": to_json,
    "topology.conf": to_topology_conf,
    "topology.yaml": to_topology_yaml,
}


def written(topology: Topology, form: str) -> str:
    """Return the topology's text in one of the formats of ``WRITERS``. Raises JobError for other
    formats."""
    if form not in WRITERS:
        raise JobError(f"no form '{form}'{nearest(form, WRITERS)}", key="--as", fix=f"Known: {', '.join(WRITERS)}")
    return WRITERS[form](topology)


def _switches(topology: Topology) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from to_dict(topology)["switches"].items()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # JSON strings are valid YAML

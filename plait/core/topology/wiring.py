"""Builder of a Topology from the switches and nodes of a source; anything that is not a tree raises
one clear JobError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from plait.core.base.errors import JobError
from plait.core.topology.hostlist import MOST_HOSTS, expand
from plait.core.topology.switches import FREE, UNKNOWN, Hardware, Node, NodeState, Switch, Topology, similar_name

MOST_LEVELS, MOST_SWITCHES = 64, 50_000
"""Most levels and switches of a tree; larger trees are mistakes."""
_NAME = re.compile(r"[^\s,\[\]]{1,253}")


@dataclass(frozen=True, slots=True)
class SwitchEntry:
    """A switch as a source describes it. where: key or line, for messages."""

    name: str
    switches: Sequence[str] = ()
    nodes: Sequence[str] = ()
    where: str = ""
    uplinks: int | None = None


class HostLists:
    """Expander of the host lists of one source, which together may stand for ``most`` names: many
    short lines cannot become a billion names either."""

    def __init__(self, most: int = 5 * MOST_HOSTS) -> None:
        self._most = self._left = most

    def __call__(self, value: object, where: str) -> list[str]:
        """Return the names in an expression, or in a list of them. Raises JobError naming
        ``where``."""
        parts: Sequence[object] = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
        names: list[str] = []
        for part in parts:
            if not isinstance(part, str):
                raise JobError(f"{_kind(part)} is no host list", key=where, fix='Write it as text, as in "n[001-016]"')
            try:
                found = expand(part)
            except ValueError as error:
                raise JobError(str(error), key=where) from None
            if len(found) > self._left:
                raise JobError(f"all lists up to here stand for more than {self._most} names", key=where)
            self._left -= len(found)
            names += found
        return names


def _kind(value: object) -> str:
    kinds: dict[type, str] = {bool: "a truth value", int: "a number", float: "a number", dict: "a table"}
    return "nothing" if value is None else kinds.get(type(value), "a value of another kind")


def build(
    wirings: Iterable[SwitchEntry],
    *,
    hardware: Mapping[str, Hardware] | None = None,
    states: Mapping[str, NodeState] | None = None,
    levels: Sequence[str] = (),
    name: str = "",
) -> Topology:
    """Return the tree of a source's switches and nodes, in the source's order. hardware, states: of
    nodes, if known.

    Raises JobError, with a wiring's ``where`` as its key, for anything that is not a tree: no
    switch or several roots, a switch or node under two switches or named twice, a switch that is
    empty or not described, a cycle.
    """
    switches = _wired(check_switch_count(list(wirings)))
    nodes = _plugged(switches, hardware or {}, states or {})
    depth = max(switch.depth for switch, _ in switches) + 1
    if levels and len(levels) != depth:
        raise JobError(f"{len(levels)} names for {depth} levels of switches: give one for each", key="levels")
    if len(set(levels)) != len(levels) or any(not level.strip() or level.isdecimal() for level in levels):
        raise JobError("names of levels have to differ, and be more than a number", key="levels")
    return Topology(
        switches=tuple(switch for switch, _ in switches),
        nodes=nodes,
        levels=tuple(levels) or usual_levels(depth),
        name=name,
    )


def check_switch_count(wirings: list[SwitchEntry]) -> list[SwitchEntry]:
    """Return ``wirings``. Raises JobError for more switches than any network has."""
    if len(wirings) > MOST_SWITCHES:
        raise JobError(f"more than {MOST_SWITCHES} switches", key=wirings[-1].where)
    return wirings


def usual_levels(depth: int) -> tuple[str, ...]:
    """Return the default names of levels.

    >>> usual_levels(2), usual_levels(3), usual_levels(4)
    (('core', 'leaf'), ('core', 'minipod', 'leaf'), ('core', 'minipod', 'level-2', 'leaf'))
    """
    between = ["minipod", *(f"level-{number}" for number in range(2, depth))][: max(depth - 2, 0)]
    return ("core", *between, "leaf") if depth > 1 else ("leaf",)


def _wired(wirings: list[SwitchEntry]) -> list[tuple[Switch, SwitchEntry]]:
    """Return the switches from the root, depth first, each with its wiring."""
    known: dict[str, SwitchEntry] = {}
    for wiring in wirings:
        _check_name(wiring.name, wiring.where, "switch")
        if wiring.name in known:
            raise JobError(
                f"the switch '{wiring.name}' is described twice{_before(known[wiring.name])}", key=wiring.where
            )
        known[wiring.name] = wiring
    parents = _parents(known)
    tops = [name for name in known if name not in parents]
    if len(tops) > 1:
        raise JobError(
            f"{len(tops)} switches are under no other: {_few(tops)}",
            key=known[tops[1]].where,
            fix="Add one switch that connects them",
        )
    if not tops:
        raise JobError("no switches" if not known else f"the switches run in a circle: {_circle(parents)}")
    switches: list[tuple[Switch, SwitchEntry]] = []
    waiting = [(tops[0], -1)]
    while waiting:
        name, parent = waiting.pop()
        depth = switches[parent][0].depth + 1 if parent >= 0 else 0
        if depth >= MOST_LEVELS:
            raise JobError(f"the switch '{name}' is more than {MOST_LEVELS} levels down", key=known[name].where)
        waiting += [(child, len(switches)) for child in reversed(known[name].switches)]
        switches.append((Switch(name, parent, depth, known[name].uplinks), known[name]))
    if len(switches) < len(known):
        reached = {switch.name for switch, _ in switches}
        circle = _circle({child: parent for child, parent in parents.items() if child not in reached})
        raise JobError(f"the switches run in a circle: {circle}")
    return switches


def _parents(known: Mapping[str, SwitchEntry]) -> dict[str, str]:
    parents: dict[str, str] = {}
    for wiring in known.values():
        if not wiring.switches and not wiring.nodes:
            raise JobError(
                f"the switch '{wiring.name}' is empty", key=wiring.where, fix="Give it nodes or leave it out"
            )
        for child in wiring.switches:
            if child not in known:
                problem = f"'{wiring.name}' is above the switch '{child}', which is not described"
                raise JobError(f"{problem}{similar_name(child, known)}", key=wiring.where)
            if child in parents:
                raise _twice("switch", child, parents[child], wiring)
            parents[child] = wiring.name
    return parents


def _circle(parents: Mapping[str, str]) -> str:
    seen: dict[str, int] = {}
    name = next(iter(parents))
    while name not in seen:
        seen[name] = len(seen)
        name = parents[name]
    circle = list(seen)[seen[name] :]
    return " under ".join([*circle[:6], *(["..."] if len(circle) > 6 else []), circle[0]])


def _plugged(
    switches: Sequence[tuple[Switch, SwitchEntry]], hardware: Mapping[str, Hardware], states: Mapping[str, NodeState]
) -> tuple[Node, ...]:
    nodes: dict[str, Node] = {}
    for index, (_, wiring) in enumerate(switches):
        for name in wiring.nodes:
            if name in nodes:
                other = switches[nodes[name].leaf][0].name
                raise _twice("node", name, other, wiring)
            _check_name(name, wiring.where, "node")
            nodes[name] = Node(name, index, hardware.get(name, UNKNOWN), states.get(name, FREE))
    for what, told in (("hardware", hardware), ("a state", states)):
        if missing := [name for name in told if name not in nodes]:
            raise JobError(f"{what} of '{missing[0]}', a node that is under no switch{similar_name(missing[0], nodes)}")
    return tuple(nodes.values())


def _check_name(name: str, where: str, kind: str) -> None:
    if not _NAME.fullmatch(name) or not name.isprintable():
        raise JobError(f"{name[:60]!r} cannot be the name of a {kind}", key=where)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _before(wiring: SwitchEntry) -> str:
    return f", before at {wiring.where}" if wiring.where else ""


def _twice(kind: str, name: str, first: str, second: SwitchEntry) -> JobError:
    where = f"twice under '{first}'" if first == second.name else f"under '{first}' and '{second.name}'"
    fix = f"In a tree each {kind} is under one switch: keep it under '{first}' alone"
    return JobError(f"the {kind} '{name}' is {where}", key=second.where, fix=fix)

"""Topologies as plain values: Plait's own form, the same in TOML and in JSON, short by host lists.

version = 1
levels = ["core", "minipod", "leaf"]
hardware = [{nodes = "n[001-032]", gpus = 8, nics = 8, rails = 8, device = "H100"}]
states = [{nodes = "n[001-004]", status = "busy", holder = "job 7"}]

[switches]
core = {switches = "mp[1-2]"}
mp1 = {switches = "leaf[1-2]"}
...
leaf1 = {nodes = "n[001-008]", uplinks = 8}
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar, cast, get_args

from plait.core.base.errors import JobError, nearest
from plait.core.base.numbers import check_number
from plait.core.topology.hostlist import fold
from plait.core.topology.switches import FREE, UNKNOWN, Hardware, NodeState, Status, Topology
from plait.core.topology.wiring import HostLists, Wiring, build

VERSION = 1
_KEYS = ("version", "name", "levels", "hardware", "states", "switches")
_COUNTS = ("gpus", "nics", "rails")
_Value = TypeVar("_Value", bound=Hashable)


def to_dict(topology: Topology) -> dict[str, Any]:
    """Plain values that ``from_dict`` makes the same topology of."""
    children: list[list[str]] = [[] for _ in topology.switches]
    nodes: list[list[str]] = [[] for _ in topology.switches]
    for switch in topology.switches[1:]:
        children[switch.parent].append(switch.name)
    for node in topology.nodes:
        nodes[node.leaf].append(node.name)
    switches: dict[str, dict[str, Any]] = {}
    for switch, below, plugged in zip(topology.switches, children, nodes, strict=True):
        switches[switch.name] = {
            **({"switches": fold(below)} if below else {}),
            **({"nodes": fold(plugged)} if plugged else {}),
            **({} if switch.uplinks is None else {"uplinks": switch.uplinks}),
        }
    hardware = _grouped((node.name, node.hardware) for node in topology.nodes)
    states = _grouped((node.name, node.state) for node in topology.nodes)
    return {
        "version": VERSION,
        **({"name": topology.name} if topology.name else {}),
        "levels": list(topology.levels),
        "hardware": [{"nodes": names, **_hardware_values(one)} for one, names in hardware.items() if one != UNKNOWN],
        "states": [{"nodes": names, **_state_values(one)} for one, names in states.items() if one != FREE],
        "switches": switches,
    }


def from_dict(values: Mapping[str, Any]) -> Topology:
    """Raises JobError naming the key and what is wrong with it."""
    version: object = values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise JobError("this Plait reads version 1 of topologies", key="version", fix=f"Write version = {VERSION}")
    _known(values, _KEYS, "")
    lists = HostLists()
    tables = values.get("switches")
    if not isinstance(tables, dict):
        raise JobError("no table of switches", key="switches", fix='Write [switches] and leaf1 = {nodes = "n[1-8]"}')
    wirings: list[Wiring] = []
    for name, told in cast("dict[str, Any]", tables).items():
        where = f"switches.{name[:60]}"
        table = _table(told, ("switches", "nodes", "uplinks"), where)
        below, plugged = (lists(table[key], f"{where}.{key}") if key in table else [] for key in ("switches", "nodes"))
        wirings.append(Wiring(name, below, plugged, where, _count(table, "uplinks", where, least=1)))
    return build(
        wirings,
        hardware=_of_nodes(values, "hardware", lists, (*_COUNTS, "device"), _hardware),
        states=_of_nodes(values, "states", lists, ("status", "until", "holder"), _state),
        levels=[_text(level, "levels") for level in _list(values.get("levels", []), "levels")],
        name=_text(values.get("name", ""), "name"),
    )


def _of_nodes(
    values: Mapping[str, Any], key: str, lists: HostLists, known: tuple[str, ...], make: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, told in enumerate(_list(values.get(key, []), key)):
        where = f"{key}[{number}]"
        table = _table(told, ("nodes", *known), where)
        value = make(table, where)
        for name in lists(table.get("nodes"), f"{where}.nodes"):
            if name in found:
                raise JobError(f"'{name}' is told of before", key=f"{where}.nodes")
            found[name] = value
    return found


def _hardware(table: Mapping[str, Any], where: str) -> Hardware:
    counts = {key: _count(table, key, where) for key in _COUNTS}
    return Hardware(**counts, device=_text(table.get("device", ""), f"{where}.device"))


def _state(table: Mapping[str, Any], where: str) -> NodeState:
    status, until = table.get("status"), table.get("until")
    if status not in get_args(Status):
        known = ", ".join(get_args(Status))
        raise JobError("no status" if status is None else "no such status", key=f"{where}.status", fix=f"Use {known}")
    if until is not None:
        check_number(until, f"{where}.until", whole=False)
    return NodeState(
        status=cast("Status", status),
        until=None if until is None else float(until),
        holder=_text(table.get("holder", ""), f"{where}.holder"),
    )


def _hardware_values(hardware: Hardware) -> dict[str, Any]:
    values: dict[str, Any] = {key: value for key in _COUNTS if (value := getattr(hardware, key)) is not None}
    return values | ({"device": hardware.device} if hardware.device else {})


def _state_values(state: NodeState) -> dict[str, Any]:
    until = {} if state.until is None else {"until": state.until}
    return {"status": state.status, **until, **({"holder": state.holder} if state.holder else {})}


def _grouped(pairs: Iterable[tuple[str, _Value]]) -> dict[_Value, str]:
    """Values in order of first use, each with the names that have it."""
    names: dict[_Value, list[str]] = {}
    for name, value in pairs:
        names.setdefault(value, []).append(name)
    return {value: fold(who) for value, who in names.items()}


def _table(value: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise JobError("not a table", key=where, fix=f"Write {{{known[0]} = ...}}")
    table = cast("dict[str, Any]", value)
    _known(table, known, f"{where}.")
    return table


def _known(values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in known:
            raise JobError(
                f"unknown key{nearest(key, known)}", key=f"{where}{key[:60]}", fix=f"Known here: {', '.join(known)}"
            )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise JobError("not a list", key=where)
    return cast("list[Any]", value)


def _count(table: Mapping[str, Any], key: str, where: str, least: int = 0) -> int | None:
    """None where the table does not say."""
    if key not in table:
        return None
    value = table[key]
    check_number(value, f"{where}.{key}", whole=True)
    if value < least:
        fix = "Leave it out where nobody knows"
        raise JobError(f"{value} is below {least}", key=f"{where}.{key}", fix=fix)
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise JobError("not a printable text", key=where)
    return value

"""Topologies as plain values: Plait's own format, the same in TOML and JSON, and short because of
host lists.

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

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.core.base.codec.data import Count, Natural, Texts, decode
from plait.core.base.errors import JobError
from plait.core.topology.hostlist import fold
from plait.core.topology.switches import FREE, UNKNOWN, Hardware, NodeState, Status, Topology
from plait.core.topology.wiring import HostLists, SwitchEntry, build

VERSION = 1
_COUNTS = ("gpus", "nics", "rails")
_Value = TypeVar("_Value", bound=Hashable)


def to_dict(topology: Topology) -> dict[str, Any]:
    """Return plain values from which ``from_dict`` makes the same topology."""
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


@dataclass(frozen=True, kw_only=True)
class _Switch:
    """A switch in a topology file, in the table ``switches``: its switches, its nodes, its links
    upward."""

    switches: Texts = ()
    nodes: Texts = ()
    uplinks: Count | None = None


@dataclass(frozen=True, kw_only=True)
class _HardwareOf:
    """Hardware of some nodes in a topology file: a row of ``hardware``."""

    nodes: Texts
    gpus: Natural | None = None
    nics: Natural | None = None
    rails: Natural | None = None
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class _StateOf:
    """State of some nodes in a topology file: a row of ``states``."""

    nodes: Texts
    status: Status
    until: float | None = None
    holder: str = ""


@dataclass(frozen=True, kw_only=True)
class _Form:
    """All keys of a topology file."""

    version: int
    name: str = ""
    levels: tuple[str, ...] = ()
    hardware: tuple[_HardwareOf, ...] = ()
    states: tuple[_StateOf, ...] = ()
    switches: dict[str, _Switch]


def from_dict(values: Mapping[str, Any]) -> Topology:
    """Return the topology in plain values. Raises JobError naming the key and the problem."""
    version: object = values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise JobError("this Plait reads version 1 of topologies", key="version", fix=f"Write version = {VERSION}")
    form, lists = decode(_Form, values), HostLists()
    wirings = list[SwitchEntry]()
    for name, one in form.switches.items():
        where = f"switches.{name[:60]}"
        below, plugged = (lists(getattr(one, key), f"{where}.{key}") for key in ("switches", "nodes"))
        wirings.append(SwitchEntry(name, below, plugged, where, one.uplinks))
    for key, text in (("name", form.name), *(("levels", level) for level in form.levels)):
        _check_text(text, key)
    return build(
        wirings, hardware=_of_nodes(form.hardware, "hardware", lists, Hardware),
        states=_of_nodes(form.states, "states", lists, NodeState), levels=form.levels, name=form.name,
    )  # fmt: skip


def _of_nodes(
    rows: Sequence[_HardwareOf | _StateOf], key: str, lists: HostLists, make: Callable[..., _Value]
) -> dict[str, _Value]:
    found = dict[str, _Value]()
    for number, row in enumerate(rows):
        where, values = f"{key}[{number}]", {**vars(row)}
        for name, value in values.items():
            if isinstance(value, str):
                _check_text(value, f"{where}.{name}")
        names, one = lists(values.pop("nodes"), f"{where}.nodes"), make(**values)
        if twice := next((name for name in names if name in found), None):
            raise JobError(f"'{twice}' is already listed in an earlier row", key=f"{where}.nodes")
        found |= dict.fromkeys(names, one)
    return found


def _check_text(value: str, where: str) -> None:
    if not value.isprintable():
        raise JobError("not a printable text: take out control characters", key=where)


def _hardware_values(hardware: Hardware) -> dict[str, Any]:
    values: dict[str, Any] = {key: value for key in _COUNTS if (value := getattr(hardware, key)) is not None}
    return values | ({"device": hardware.device} if hardware.device else {})


def _state_values(state: NodeState) -> dict[str, Any]:
    until = {} if state.until is None else {"until": state.until}
    return {"status": state.status, **until, **({"holder": state.holder} if state.holder else {})}


def _grouped(pairs: Iterable[tuple[str, _Value]]) -> dict[_Value, str]:
    """Return values in order of first use, each with the host list of the names that have it."""
    names: dict[_Value, list[str]] = {}
    for name, value in pairs:
        names.setdefault(value, []).append(name)
    return {value: fold(who) for value, who in names.items()}

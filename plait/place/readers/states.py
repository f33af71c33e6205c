"""States from several sources, made one."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.errors import JobError
from plait.core.text import counted
from plait.core.topology import State, Topology
from plait.place.readers.source import Found

_RANK = {"free": 0, "busy": 1, "down": 2}
_MOST_HOLDERS = 3


def worse(first: State, second: State) -> State:
    """What is down for one is down, what is busy for one is busy; of two jobs on a node both hold it, until
    the later one ends.

    >>> worse(State(), State(status="busy", holder="job 7")).holder
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
    return State(status="busy", until=until, holder=", ".join(more))


def applied(topology: Topology, found: Found, where: str) -> tuple[Topology, list[str]]:
    """A topology with what else is known of its nodes, and what a person should know of the two together."""
    notes: list[str] = []
    if found.states and not found.states.keys() & topology.places.keys():
        told, own = next(iter(found.states)), topology.nodes[0].name
        raise JobError(f"tells of other nodes, such as '{told}', than the topology, such as '{own}'")
    if strangers := sorted(found.states.keys() - topology.places.keys()):
        notes.append(f"{where}: {_some(strangers)} under no switch: left out.")
    states = found.states
    if not found.partial and (silent := [node.name for node in topology.nodes if node.name not in states]):
        notes.append(f"{where}: no state of {_some(silent)}: taken as they were.")
    known = {name: worse(topology.node(name).state, state) for name, state in states.items() if name in topology.places}
    made = {name: one for name, one in found.hardware.items() if name in topology.places}
    return topology.with_hardware(made).with_states(known), notes


def _some(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'node')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"

"""States from several sources, made one, and what they leave of a topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.base.text import counted
from plait.core.topology.switches import Hardware, NodeState, Topology
from plait.place.readers.source import Found

_RANK = {"free": 0, "busy": 1, "down": 2}
_MOST_HOLDERS = 3


def worse(first: NodeState, second: NodeState) -> NodeState:
    """What is down for one is down, what is busy for one is busy; of two jobs on a node both hold it, until
    the later one ends.

    >>> worse(NodeState(), NodeState(status="busy", holder="job 7")).holder
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
    """Nodes that are known to have no GPUs are down: nothing is to be placed there.

    >>> without_gpus({"b": NodeState()}, {"a": Hardware(), "b": Hardware(gpus=0)})["b"].holder
    'no whole GPU'
    """
    none = NodeState(status="down", holder="no whole GPU")
    bare = {name for name, one in hardware.items() if one.gpus == 0}
    return {name: worse(state, none) if name in bare else state for name, state in states.items()}


def applied(topology: Topology, found: Found, where: str, over: PassedOver) -> tuple[Topology, list[str]]:
    """A topology with what else is known of its nodes, and what a person should know of the two together."""
    notes: list[str] = []
    told = found.states or found.hardware
    if not told.keys() & topology.places.keys():
        other, own = next(iter(told)), topology.nodes[0].name
        raise JobError(f"tells of other nodes, such as '{other}', than the topology, such as '{own}'")
    strangers = sorted(told.keys() - topology.places.keys())
    over.note("nodes under no switch", f"{where}: {strangers[0]}" if strangers else "", len(strangers))
    states = found.states
    if states and not found.partial and (quiet := [one.name for one in topology.nodes if one.name not in states]):
        notes.append(f"{where}: no state of {_some(quiet)}: taken as they were.")
    known = {name: worse(topology.node(name).state, state) for name, state in states.items() if name in topology.places}
    made = {name: one for name, one in found.hardware.items() if name in topology.places}
    return topology.with_hardware(made).with_states(known), notes


def _some(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'node')} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"

"""States of nodes from several sources, made one."""

from __future__ import annotations

import pytest

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.topology.switches import Hardware, NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build
from plait.formats.base.source import ReadResult, apply_result, without_gpus, worse_state

FREE, DOWN = NodeState(), NodeState(status="down", holder="bad nic")


def busy(holder: str = "job 7", until: float | None = None) -> NodeState:
    return NodeState(status="busy", holder=holder, until=until)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (FREE, busy(), busy()), (busy(), FREE, busy()), (busy(), DOWN, DOWN), (DOWN, busy(), DOWN), (FREE, DOWN, DOWN),
        (busy(""), busy("b", 3.0), busy("b", 3.0)), (busy("a", 3.0), busy(""), busy("a", 3.0)),
        (busy("a", 3.0), busy("b", 2.0), busy("a, b", 3.0)), (busy("a", 2.0), busy("b", 3.0), busy("a, b", 3.0)),
        (busy("a", 2.0), busy("b"), busy("a, b")), (busy("a"), busy("b", 2.0), busy("a, b")),
        (busy("a", 2.0), busy("a", 5.0), busy("a", 2.0)), (busy("a, b"), busy("b, c"), busy("a, b, c")),
        (busy("a, b"), busy("c, d"), busy("a, b, c, ...")), (DOWN, NodeState(status="down", holder="other"), DOWN),
        (NodeState(status="down"), DOWN, DOWN),
    ],
)  # fmt: skip
def test_the_worse_of_two(first: NodeState, second: NodeState, found: NodeState) -> None:
    assert worse_state(first, second) == found


def test_a_node_without_gpus_is_down() -> None:
    states = {"a": FREE, "b": busy(), "c": FREE, "d": DOWN}
    found = without_gpus(
        states, {"a": Hardware(gpus=0), "b": Hardware(gpus=0), "c": Hardware(gpus=1), "d": Hardware(gpus=0)}
    )
    assert {name: one.holder for name, one in found.items()} == {
        "a": "no whole GPU", "b": "no whole GPU", "c": "", "d": "bad nic",
    }  # fmt: skip


def topology(*nodes: str) -> Topology:
    return build([SwitchEntry("leaf", nodes=list(nodes))])


def test_states_are_put_on_the_nodes_of_a_topology() -> None:
    over = IgnoredInput()
    found = ReadResult(states={"b": busy(), "x": DOWN, "w": DOWN}, hardware={"c": Hardware(gpus=8)})
    made, notes = apply_result(topology("a", "b", "c", "d", "e", "f"), found, "file", over)
    assert [one.state.status for one in made.nodes] == ["free", "busy", "free", "free", "free", "free"]
    assert made.node("c").hardware.gpus == 8
    assert notes == ["file: no state of 5 nodes (a, c, d, ...): taken as they were."]
    assert over.rows() == [{"what": "nodes under no switch", "count": 2, "first": "file: w"}]
    again, notes = apply_result(made, ReadResult(states={"a": DOWN, "b": FREE}, partial=True), "file", IgnoredInput())
    assert (again.node("b").state, again.node("a").state, notes) == (busy(), DOWN, [])


def test_of_few_nodes_all_are_named_and_hardware_alone_has_no_states() -> None:
    _, notes = apply_result(topology("a", "b", "c", "d"), ReadResult(states={"d": FREE}), "file", IgnoredInput())
    assert notes == ["file: no state of 3 nodes (a, b, c): taken as they were."]
    _, notes = apply_result(topology("a", "b"), ReadResult(states={"a": FREE}), "file", IgnoredInput())
    assert notes == ["file: no state of 1 node (b): taken as they were."]
    made, notes = apply_result(topology("a", "b"), ReadResult(hardware={"a": Hardware(gpus=4)}), "file", IgnoredInput())
    assert (made.node("a").hardware.gpus, notes) == (4, [])
    with pytest.raises(JobError, match="tells of other nodes, such as 'x', than the topology, such as 'a'"):
        apply_result(topology("a"), ReadResult(states={"x": FREE}), "file", IgnoredInput())

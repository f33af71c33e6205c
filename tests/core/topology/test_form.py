"""Plait's own form of a topology: what is written is read, and what is wrong in it is named by its
key."""

from __future__ import annotations

import json
import time
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.codec.toml_text import to_toml
from plait.core.base.errors import JobError
from plait.core.topology.form import from_dict, to_dict
from plait.core.topology.switches import Hardware, NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build

STATES = st.builds(
    NodeState,
    status=st.sampled_from(["free", "busy", "down"]),
    until=st.none() | st.floats(0, 4e9),
    holder=st.sampled_from(["", "job 7", 'a "quoted" one', "späť"]),
)
HARDWARE = st.builds(Hardware, gpus=st.integers(0, 8), nics=st.integers(0, 8), device=st.sampled_from(["", "H100"]))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    pods = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    leaves = [(f"leaf{p}-{k}", size) for p, sizes in enumerate(pods) for k, size in enumerate(sizes)]
    wirings = [SwitchEntry("core", [f"mp{p}" for p in range(len(pods))])]
    wirings += [
        SwitchEntry(f"mp{p}", [f"leaf{p}-{k}" for k in range(len(s))], uplinks=p or None) for p, s in enumerate(pods)
    ]
    wirings += [SwitchEntry(name, nodes=[f"{name}.n{i:03}" for i in range(size)]) for name, size in leaves]
    names = [node for wiring in wirings for node in wiring.nodes]
    return build(
        wirings,
        states={name: draw(STATES) for name in names if draw(st.booleans())},
        hardware={name: draw(HARDWARE) for name in names if draw(st.booleans())},
        name=draw(st.sampled_from(["", "west"])),
    )


@given(topologies())
def test_what_is_written_is_read(topology: Topology) -> None:
    values = to_dict(topology)
    assert from_dict(values) == topology
    assert from_dict(json.loads(json.dumps(values))) == topology
    assert from_dict(tomllib.loads(to_toml(values))) == topology


def small() -> dict[str, Any]:
    return {
        "version": 1,
        "levels": ["core", "leaf"],
        "states": [{"nodes": "n1", "status": "busy", "until": 5, "holder": "job"}],
        "switches": {"core": {"switches": "leaf[1-2]"}, "leaf1": {"nodes": "n[1-2]"}, "leaf2": {"nodes": ["n3", "n4"]}},
    }


def test_names_may_be_lists() -> None:
    tree = from_dict(small())
    assert [node.name for node in tree.nodes] == ["n1", "n2", "n3", "n4"]
    assert tree.node("n1").state == NodeState(status="busy", until=5.0, holder="job")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"version": 2}, "^version: this Plait reads version 1"),
        ({"version": True}, "^version: "),
        ({"level": []}, r"^level: unknown key \(did you mean 'levels'\?\)"),
        ({"switches": None}, "^switches: None is not a table"),
        ({"switches": {"a": 3}}, "^switches.a: 3 is not a table"),
        ({"switches": {"a": {"node": "n1"}}}, r"^switches.a.node: unknown key \(did you mean 'nodes'"),
        ({"switches": {"a": {"nodes": 3}}}, "^switches.a.nodes: 3 is not allowed"),
        ({"switches": {"a": {"nodes": "n[1-999999999]"}}}, "^switches.a.nodes: .*more than 200000 names"),
        ({"switches": {"a": {"nodes": "n[1-2", "uplinks": 3}}}, "^switches.a.nodes: .*never closed"),
        ({"switches": {"a": {"nodes": "n1", "uplinks": 0}}, "levels": []}, "^switches.a.uplinks: 0 is not"),
        ({"switches": {"a": {"nodes": "n1,n1"}}, "levels": []}, "^switches.a: the node 'n1' is twice"),
        ({"levels": "core"}, "^levels: \"core\" is not allowed"),
        ({"levels": ["core"]}, "^levels: 1 names for 2 levels"),
        ({"levels": ["core", "core"]}, "^levels: names of levels have to differ"),
        ({"levels": ["core", "1"]}, "^levels: names of levels have to differ, and be more than a number"),
        ({"name": "\x1b[31m"}, "^name: not a printable text"),
        ({"states": [{"nodes": "n1"}]}, r"^states\[0\].status: is missing"),
        ({"states": [{"nodes": "n1", "status": "busy", "until": "soon"}]}, r"^states\[0\].until: \"soon\" is not"),
        ({"states": [{"nodes": "n1", "status": "busy", "until": float("nan")}]}, r"^states\[0\].until: nan"),
        ({"states": [{"nodes": "n[1-2]", "status": "down"}, {"nodes": "n2", "status": "down"}]},
         r"^states\[1\].nodes: 'n2' is already listed"),
        ({"states": [{"nodes": "n9", "status": "down"}]}, "a state of 'n9'"),
        ({"states": [{"status": "down"}]}, r"^states\[0\].nodes: is missing"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        from_dict(small() | change)


def test_ten_thousand_nodes_in_toml() -> None:
    wirings = [SwitchEntry("core", [f"mp{i}" for i in range(125)])]
    wirings += [SwitchEntry(f"mp{i}", [f"leaf{k}" for k in range(i * 5, i * 5 + 5)]) for i in range(125)]
    wirings += [SwitchEntry(f"leaf{k}", nodes=[f"n{k * 16 + i:05}" for i in range(16)]) for k in range(625)]
    states = {f"n{i:05}": NodeState(status="busy", holder=f"job{i % 50}") for i in range(0, 10_000, 3)}
    topology = build(wirings, states=states)
    text = to_toml(to_dict(topology))
    best = float("inf")
    for _ in range(5):
        start = time.process_time()  # others' work does not count
        found = from_dict(tomllib.loads(text))
        best = min(best, time.process_time() - start)
    assert found == topology
    assert best < 0.3  # 0.09 s alone

"""Topologies: what they answer, and that only trees are let in."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.topology import switches as topology
from plait.core.topology.switches import DOWN, FREE, Hardware, NodeState, Topology, similar_name
from plait.core.topology.wiring import MOST_LEVELS, HostLists, SwitchEntry, build

BUSY = NodeState(status="busy", until=1.5e9, holder="7")


def cluster() -> Topology:
    """Two minipods of two leaves of two nodes, one of the four leaves with one node more."""
    leaves = [SwitchEntry(f"leaf{k}", nodes=[f"n{k}{i}" for i in range(3 if k == 2 else 2)]) for k in range(4)]
    pods = [
        SwitchEntry("core", ["mp0", "mp1"]),
        SwitchEntry("mp0", ["leaf0", "leaf1"]),
        SwitchEntry("mp1", ["leaf2", "leaf3"]),
    ]
    return build([*leaves, *pods], states={"n00": BUSY, "n10": DOWN, "n11": BUSY})


def test_minipods_and_levels() -> None:
    tree = cluster()
    assert tree.levels == ("core", "minipod", "leaf")
    assert {pod: [n.name for n in nodes] for pod, nodes in tree.minipods().items()} == {
        "mp0": ["n00", "n01", "n10", "n11"],
        "mp1": ["n20", "n21", "n22", "n30", "n31"],
    }
    assert tree.minipods("minipod") == tree.minipods(1) == tree.minipods("1") == tree.minipods()
    assert list(tree.minipods("leaf")) == ["leaf0", "leaf1", "leaf2", "leaf3"]
    assert [len(nodes) for nodes in tree.minipods("core").values()] == [9]


def test_free_nodes_by_minipod_and_leaf() -> None:
    tree = cluster()
    assert tree.free() == {
        "mp0": {"leaf0": ("n01",)},
        "mp1": {"leaf2": ("n20", "n21", "n22"), "leaf3": ("n30", "n31")},
    }
    full = tree.with_states({name: BUSY for name in tree.node_index if name < "n2"})
    assert full.free()["mp0"] == {}
    assert [tree.count("free"), tree.count("busy"), tree.count("down")] == [6, 2, 1]


def test_distances_count_levels() -> None:
    tree = cluster()
    pairs = [("n00", "n00"), ("n00", "n01"), ("n00", "n10"), ("n00", "n20")]
    assert [tree.distance(*pair) for pair in pairs] == [0, 1, 2, 3]
    assert tree.path("n31") == ("leaf3", "mp1", "core")


def test_a_tree_of_unequal_depth() -> None:
    tree = build([SwitchEntry("core", ["pod", "lone"]), SwitchEntry("pod", ["a", "b"]), SwitchEntry("a", nodes=["x"]),
                  SwitchEntry("b", nodes=["y"]), SwitchEntry("lone", nodes=["z"])])  # fmt: skip
    assert {pod: len(nodes) for pod, nodes in tree.minipods().items()} == {"pod": 2, "lone": 1}
    assert list(tree.minipods("leaf")) == ["a", "b", "lone"]
    assert (tree.distance("x", "z"), tree.distance("z", "x"), tree.distance("x", "y")) == (3, 3, 2)


def test_one_switch_is_its_own_minipod() -> None:
    tree = build([SwitchEntry("only", nodes=["a", "b"])])
    assert (list(tree.minipods()), tree.levels, tree.distance("a", "b")) == (["only"], ("leaf",), 1)


def test_states_and_hardware_change_nothing_else() -> None:
    tree = cluster()
    back = tree.with_states({"n00": FREE}).with_states({"n00": BUSY})
    assert back == tree
    assert back.key == tree.key
    changed = tree.with_states({"n01": DOWN})
    assert changed.fabric_key == tree.fabric_key
    assert len({changed.key, tree.key, tree.with_hardware({"n01": Hardware(gpus=8)}).key}) == 3
    assert tree.with_hardware({"n01": Hardware(gpus=8)}).node("n01").hardware.gpus == 8


def test_the_order_of_telling_changes_no_hash() -> None:
    tree = cluster()
    wirings = [
        SwitchEntry(s.name, [c.name for c in tree.switches if c.parent == place][::-1],
               [n.name for n in tree.nodes if n.leaf == place][::-1])
        for place, s in enumerate(tree.switches)
    ]  # fmt: skip
    states = {node.name: node.state for node in tree.nodes}
    assert build(wirings[::-1], states=states).key == tree.key
    assert build(wirings[::-1], states=states).fabric_key == tree.fabric_key
    moved = build([*(w for w in wirings if w.name not in ("leaf0", "leaf1")),
                   SwitchEntry("leaf0", nodes=["n00", "n11"]), SwitchEntry("leaf1", nodes=["n10", "n01"])])  # fmt: skip
    assert moved.fabric_key != tree.fabric_key


@pytest.mark.parametrize(
    "wirings, says",
    [
        ([], "no switches"),
        ([SwitchEntry("a", ["b"], where="line 1"), SwitchEntry("b", ["a"])], "circle: b under a under b"),
        ([SwitchEntry("a", ["a"])], "circle: a under a"),
        ([SwitchEntry("t", nodes=["n"]), SwitchEntry("a", ["b"]), SwitchEntry("b", ["c"]), SwitchEntry("c", ["a"])],
         "run in a circle"),
        ([SwitchEntry("a", nodes=["n"], where="line 1"), SwitchEntry("b", nodes=["m"], where="line 2")],
         "^line 2: 2 switches are under no other: a, b. Add one switch"),
        ([SwitchEntry("a", ["b", "c"]), SwitchEntry("b", nodes=["n"]), SwitchEntry("c", nodes=["n"], where="line 3")],
         "^line 3: the node 'n' is under 'b' and 'c'"),
        ([SwitchEntry(f"s{i}", nodes=["n"], where=f"line {i}") for i in range(50_001)],
         "^line 50000: more than 50000 switches"),
        ([SwitchEntry("a", nodes=["n", "n"], where="line 1")], "^line 1: the node 'n' is twice under 'a'"),
        ([SwitchEntry("t", ["a", "b"]), SwitchEntry("a", ["c"]), SwitchEntry("b", ["c"], where="line 9"),
          SwitchEntry("c", nodes=["n"])],
         "^line 9: the switch 'c' is under 'a' and 'b'"),
        ([SwitchEntry("t", ["c", "c"], where="line 1"), SwitchEntry("c", nodes=["n"])],
         "^line 1: .*'c' is twice under 't'"),
        ([SwitchEntry("a", nodes=["n"], where="line 1"), SwitchEntry("a", nodes=["m"], where="line 2")],
         "^line 2: the switch 'a' is described twice, before at line 1"),
        ([SwitchEntry("a", ["leaf1"], where="line 1"), SwitchEntry("leaf2", nodes=["n"])],
         r"^line 1: 'a' is above the switch 'leaf1', which is not described \(did you mean 'leaf2'\?\)"),
        ([SwitchEntry("a", where="line 1")], "^line 1: the switch 'a' is empty"),
        ([SwitchEntry("a", nodes=["n 1"], where="line 1")], "^line 1: 'n 1' cannot be the name of a node"),
        ([SwitchEntry("a\x1b[31m", nodes=["n1"])], "cannot be the name of a switch"),
        ([SwitchEntry("", nodes=["n1"])], "'' cannot be the name of a switch"),
        ([*(SwitchEntry(f"s{i}", [f"s{i + 1}"]) for i in range(5000)), SwitchEntry("s5000", nodes=["n"])],
         "levels down"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_refused(wirings: list[SwitchEntry], says: str) -> None:
    with pytest.raises(JobError, match=says):
        build(wirings)


def test_what_belongs_to_no_node_is_refused() -> None:
    only = [SwitchEntry("a", nodes=["node1"])]
    with pytest.raises(JobError, match=r"a state of 'node2'.*did you mean 'node1'"):
        build(only, states={"node2": DOWN})
    with pytest.raises(JobError, match="hardware of 'node2'"):
        build(only, hardware={"node2": Hardware()})
    with pytest.raises(JobError, match="2 names for 1 levels"):
        build(only, levels=["core", "leaf"])
    with pytest.raises(JobError, match="no node 'x'"):
        build(only).with_states({"x": DOWN})
    with pytest.raises(JobError, match="no node 'x'"):
        build(only).distance("x", "x")
    for level in ("pod", 3, -1, "-1"):
        with pytest.raises(JobError, match=r"no level .* Levels are 0 \(core\), 1 \(minipod\), 2 \(leaf\)"):
            cluster().minipods(level)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[SwitchEntry], dict[str, str]]:
    """Any tree, and the parent of every switch and node."""
    count = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, count))]
    nodes = iter(range(10_000))
    wirings: list[SwitchEntry] = []
    above: dict[str, str] = {}
    for place in range(count):
        children = [f"s{i}" for i, parent in enumerate(parents) if parent == place]
        own = [f"n{next(nodes)}" for _ in range(draw(st.integers(0 if children else 1, 3)))]
        wirings.append(SwitchEntry(f"s{place}", children, own))
        above |= dict.fromkeys((*children, *own), f"s{place}")
    random.Random(draw(st.integers(0, 99))).shuffle(wirings)
    return wirings, above


@given(trees(), st.data())
def test_any_tree_keeps_its_wires(given_tree: tuple[list[SwitchEntry], dict[str, str]], data: st.DataObject) -> None:
    wirings, above = given_tree
    tree = build(wirings)
    assert {node.name for node in tree.nodes} == {name for wiring in wirings for name in wiring.nodes}
    for node in tree.nodes:
        way, name = [], node.name
        while name in above:
            way.append(name := above[name])
        assert tree.path(node.name) == tuple(way)
    for level in range(len(tree.levels)):
        pods = tree.minipods(level)
        assert sorted(n.name for nodes in pods.values() for n in nodes) == sorted(tree.node_index)
        for pod, nodes in pods.items():
            assert all(pod in tree.path(node.name) for node in nodes)
    first, second = (data.draw(st.sampled_from(sorted(tree.node_index))) for _ in range(2))
    ways = tree.path(first), tree.path(second)
    shared = len(set(ways[0]) & set(ways[1]))
    expected = 0 if first == second else max(map(len, ways)) - shared + 1
    assert tree.distance(first, second) == tree.distance(second, first) == expected


def test_ten_thousand_nodes() -> None:
    leaves = [SwitchEntry(f"leaf{i}", nodes=[f"n{i}-{k}" for k in range(16)]) for i in range(640)]
    pods = [SwitchEntry(f"mp{i}", [f"leaf{k}" for k in range(i * 5, i * 5 + 5)]) for i in range(128)]
    best = float("inf")
    for _ in range(5):
        start = time.process_time()  # others' work does not count
        tree = build([SwitchEntry("core", [pod.name for pod in pods]), *pods, *leaves])
        free = tree.free()
        best = min(best, time.process_time() - start)
    assert sum(len(names) for leaves in free.values() for names in leaves.values()) == 10_240
    assert best < 0.3  # 0.04 s alone


def test_which_of_two_switches_is_on_top_is_part_of_the_hash() -> None:
    one = build([SwitchEntry("a", ["b"], ["n1"]), SwitchEntry("b", nodes=["n2"])])
    other = build([SwitchEntry("b", ["a"], ["n2"]), SwitchEntry("a", nodes=["n1"])])
    assert one.key != other.key
    assert one.fabric_key != other.fabric_key


@pytest.mark.parametrize(("count", "more"), [(6, ""), (7, " under ...")])
def test_a_long_circle_is_told_in_part(count: int, more: str) -> None:
    wirings = [SwitchEntry(f"s{at}", [f"s{(at + 1) % count}"]) for at in range(count)]
    with pytest.raises(JobError) as caught:
        build(wirings)
    names = " under ".join(f"s{at}" for at in [1, 0, *range(count - 1, 1, -1)][:6])
    assert str(caught.value) == f"the switches run in a circle: {names}{more} under s1."


@pytest.mark.parametrize(("count", "told"), [(4, "t0, t1, t2, t3."), (5, "t0, t1, t2, t3 and 1 more.")])
def test_of_many_tops_a_few_are_named(count: int, told: str) -> None:
    with pytest.raises(JobError, match=f"{count} switches are under no other: {told}"):
        build([SwitchEntry(f"t{at}", nodes=[f"n{at}"]) for at in range(count)])


def test_switches_lie_so_deep_and_no_deeper() -> None:
    def chain(switches: int) -> list[SwitchEntry]:
        return [
            *(SwitchEntry(f"s{at}", [f"s{at + 1}"]) for at in range(switches - 1)),
            SwitchEntry(f"s{switches - 1}", nodes=["n"]),
        ]

    assert len(build(chain(MOST_LEVELS)).switches) == MOST_LEVELS
    with pytest.raises(JobError, match=f"the switch 's{MOST_LEVELS}' is more than {MOST_LEVELS} levels down"):
        build(chain(MOST_LEVELS + 1))


def test_lists_of_one_source_stand_for_so_many_names_together() -> None:
    lists = HostLists(most=5)
    assert lists("n[1-3]", "line 1") == ["n1", "n2", "n3"]
    assert lists(["a", "b"], "line 2") == ["a", "b"]
    with pytest.raises(JobError, match="line 3: all lists up to here stand for more than 5 names"):
        lists("c", "line 3")
    for value, says in ((None, "nothing is no host list"), (True, "a truth value"), (5, "a number"), ({}, "a table"),
                        (["a", 5], "a number is no host list"), ([[]], "a value of another kind")):  # fmt: skip
        with pytest.raises(JobError, match=says):
            HostLists()(value, "line 4")


def test_of_very_many_names_none_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for the nearest takes too long."""
    monkeypatch.setattr(topology, "MOST_LOOKED_THROUGH", 2)
    assert similar_name("node2", ["node1", "x"]) == " (did you mean 'node1'?)"
    assert similar_name("node2", ["node1", "x", "y"]) == ""

"""Topologies as text and as pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.api.pictures import colours_of, draw_topology
from plait.core.base.errors import DataError, JobError
from plait.core.base.text import table
from plait.core.topology.switches import NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build
from plait.place.outline import HEADER, MOST_ROWS, down_nodes, outline, spreads
from plait.place.topologies import MinipodSizes, generate


def shown(topology: Topology, level: str | None = None) -> list[str]:
    return table(HEADER, [row.cells for row in outline(topology, level)], 80)[2:]


def test_subtrees_that_are_alike_share_a_row() -> None:
    tree = generate(MinipodSizes(minipods=3, nodes=12, leaf_nodes=2))
    assert shown(tree.with_states({"n01": NodeState(status="busy"), "n12": NodeState(status="down")})) == [
        "core                       6     12    10     1     1  █x········",
        "├─ mp1                     2      4     3     1     0  ██········",
        "│  ├─ leaf1                1      2     1     1     0  █████·····",
        "│  └─ leaf2                1      2     2     0     0  ··········",
        "├─ mp2                     2      4     4     0     0  ··········",
        "│  └─ leaf[3-4]  2 x       1      2     2     0     0  ··········",
        "└─ mp3                     2      4     3     0     1  xxx·······",
        "   ├─ leaf5                1      2     2     0     0  ··········",
        "   └─ leaf6                1      2     1     0     1  xxxxx·····",
    ]
    assert [line.split()[0] for line in shown(tree)] == ["core", "└─", "└─"]


def test_a_level_may_be_asked_for() -> None:
    tree = generate(MinipodSizes(minipods=3, nodes=12, leaf_nodes=2), busy=0.3)
    assert len(outline(tree, "core")) == 1
    assert {row.leaves for row in outline(tree, "minipod")[1:]} == {2}
    with pytest.raises(JobError, match="no level 'pod'"):
        outline(tree, "pod")


@pytest.mark.parametrize("nodes, minipods", [(1019, 11), (10_000, 125), (10_000, 3), (50, 50)])
def test_it_stays_short_and_narrow_and_loses_no_node(nodes: int, minipods: int) -> None:
    tree = generate(MinipodSizes(minipods=minipods, nodes=nodes), busy=0.4, down=0.01, seed=2)
    rows = outline(tree)
    assert len(rows) <= MOST_ROWS
    assert all(len(line) <= 80 for line in shown(tree))
    top = rows[0]
    assert (top.nodes, top.free, top.busy) == (nodes, (tree.count("free"),) * 2, (tree.count("busy"),) * 2)
    pods = [row for row in rows if row.label.startswith(("├─", "└─"))]
    assert sum(row.count for row in pods) == minipods


@pytest.mark.parametrize(("minipods", "deep"), [(13, True), (14, False)])
def test_leaves_are_shown_while_all_rows_fit(minipods: int, deep: bool) -> None:
    """Each minipod has two leaves that are unlike: 1 + 3 * 13 rows are forty."""
    tree = generate(MinipodSizes(minipods=minipods, nodes=4 * minipods, leaf_nodes=2))
    names = list(tree.node_index)
    states = {name: NodeState(status="busy") for at, name in enumerate(names) if at % 4 == 0 or at % 8 == 1}
    rows = outline(tree.with_states(states))
    assert any("leaf" in row.label for row in rows) == deep
    assert len(rows) == (MOST_ROWS if deep else 1 + minipods)


@pytest.mark.parametrize("length", [32, 33])
def test_a_label_of_32_characters_is_shown_whole(length: int) -> None:
    names = ["x" * (length - 6) + "a", "yyyy"]
    tree = build([SwitchEntry("core", names), *(SwitchEntry(name, nodes=[f"{name}.n"]) for name in names)])
    label = outline(tree)[1].label
    assert ("and 1 more" in label) == (length > 32)


def test_names_that_fold_badly_are_counted() -> None:
    racks = [f"S-{place * 7919:08x}{place * 104729:08x}" for place in range(1, 20)]
    tree = build([SwitchEntry("core", racks), *(SwitchEntry(rack, nodes=[f"{rack}.a"]) for rack in racks)])
    assert [row.label for row in outline(tree)] == ["core", f"└─ {racks[0]} and 18 more  19 x"]


def test_down_nodes_by_reason() -> None:
    tree = generate(MinipodSizes(minipods=2, nodes=20))
    assert down_nodes(tree) == ""
    states = {"n01": NodeState(status="down", holder="bad nic"), "n02": NodeState(status="down", holder="bad nic"),
              "n09": NodeState(status="down")}  # fmt: skip
    assert down_nodes(tree.with_states(states)) == "n[01-02] (bad nic), n09"
    many = {f"n{i:02}": NodeState(status="down", holder=f"reason {i}") for i in range(1, 13)}
    assert down_nodes(tree.with_states(many)).endswith("n08 (reason 8), and 4 more reasons")
    eight = {name: state for name, state in many.items() if name <= "n08"}
    assert down_nodes(tree.with_states(eight)).endswith(", n08 (reason 8)")
    for length in (200, 201):
        told = down_nodes(tree.with_states({"n01": NodeState(status="down", holder="x" * (length - 6))}))
        assert told == (f"n01 ({'x' * 194})" if length == 200 else f"n01 ({'x' * 192}...")


def test_minipods_of_one_shape_share_a_row_and_show_the_fewest_and_the_most() -> None:
    tree = generate(MinipodSizes(minipods=60, nodes=240, leaf_nodes=4))
    names = list(tree.node_index)
    busy = {names[4 * pod + at]: NodeState(status="busy") for pod in range(60) for at in range(1 + pod % 3)}
    rows = outline(tree.with_states(busy))
    assert [row.count for row in rows] == [1, 60]
    assert (rows[1].free, rows[1].busy, rows[1].down) == ((1, 3), (1, 3), (0, 0))
    assert rows[1].cells[3:6] == ("1-3", "1-3", "0")


def test_spread_counts_minipods() -> None:
    tree = generate(MinipodSizes(minipods=3, nodes=12, leaf_nodes=2))
    groups = {"n01": "a", "n02": "a", "n03": "a", "n05": "b", "n12": "b"}
    assert spreads(tree, groups) == {"a": 1, "b": 2}
    assert spreads(tree, groups, "leaf") == {"a": 2, "b": 2}
    with pytest.raises(JobError, match="no node 'n99'"):
        spreads(tree, {"n99": "a"})


@pytest.mark.system
def test_a_picture_has_the_groups_colours_and_tells_their_spread(tmp_path: Path) -> None:
    tree = generate(MinipodSizes(minipods=3, nodes=12, leaf_nodes=2), busy=0.2)
    groups = {name: f"pp{place % 3}" for place, name in enumerate(tree.node_index)}
    file = tmp_path / "tree.svg"
    draw_topology(tree, file, groups=groups, title="a < b")
    text = file.read_text()
    for group, colour in colours_of(["pp0", "pp1", "pp2"]).items():
        assert text.count(f"fill: {colour}") >= 1
        assert f"{group}: 3 minipods" in text
    for part in ("3 groups; a group touches 3 minipods", "mp1 · 3 groups", "a &lt; b", "core"):
        assert part in text
    again = tmp_path / "again.svg"
    draw_topology(tree, again, groups=groups, title="a < b")
    assert again.read_text() == text


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    tree = generate(MinipodSizes(minipods=1, nodes=2))
    with pytest.raises(DataError, match=r"ends in .svg, .png, .pdf"):
        draw_topology(tree, tmp_path / "tree.gif")
    with pytest.raises(JobError, match="no node 'n9'"):
        draw_topology(tree, tmp_path / "tree.svg", groups={"n9": "a"})
    assert list(tmp_path.iterdir()) == []

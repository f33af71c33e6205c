"""Where a picture of a topology puts what: leaves in rows, nodes in columns, and the tree above
them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from plait.api import pictures as drawing
from plait.api.pictures import MANY_NODES, STATE_COLOURS, colours_of, draw_topology
from plait.core.topology.switches import NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build
from plait.place.topologies import MinipodSizes, generate


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Draws, and gives the figure before it is written."""

    def picture(topology: Topology, **more: Any) -> Figure:
        found: list[Figure] = []
        monkeypatch.setattr(drawing, "save", lambda figure, _: found.append(figure))
        draw_topology(topology, tmp_path / "tree.svg", **more)
        return found[0]

    return picture


def boxes(figure: Figure) -> dict[str, list[list[float]]]:
    """Corners of what is painted, by colour: left, top, right, bottom."""
    found: dict[str, list[list[float]]] = {}
    for part in figure.axes[0].collections[:-1]:
        paint = to_hex(part.get_facecolor()[0])  # type: ignore[index]
        for path in part.get_paths():
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)  # type: ignore[union-attr]
            found.setdefault(paint, []).append([round(float(one), 6) for one in (left, top, right, bottom)])
    return found


def lines(figure: Figure) -> list[list[list[float]]]:
    return [np.asarray(line).tolist() for line in figure.axes[0].collections[-1].get_segments()]  # type: ignore[attr-defined]


def texts(figure: Figure) -> dict[str, tuple[float, float]]:
    found = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    return {name: (round(x, 6), round(y, 6)) for name, (x, y) in found.items()}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]


FREE, BUSY, DOWN = STATE_COLOURS.values()


def small() -> Topology:
    """Two minipods of two leaves of two nodes."""
    tree = generate(MinipodSizes(minipods=2, nodes=8, leaf_nodes=2))
    return tree.with_states({"n1": NodeState(status="busy"), "n8": NodeState(status="down")})


def test_every_node_has_its_place(drawn: Any) -> None:
    figure = drawn(small())
    assert boxes(figure) == {
        BUSY: [[0.0, 0.0, 1.0, 0.86]],
        FREE: [
            [1.0, 0.0, 2.0, 0.86], [0.0, 1.0, 1.0, 1.86], [1.0, 1.0, 2.0, 1.86],
            [3.6, 0.0, 4.6, 0.86], [4.6, 0.0, 5.6, 0.86], [3.6, 1.0, 4.6, 1.86],
        ],
        DOWN: [[4.6, 1.0, 5.6, 1.86]],
    }  # fmt: skip
    assert [part.get_alpha() for part in figure.axes[0].collections[:-1]] == [1.0] * 3
    assert [float(part.get_linewidths()[0]) for part in figure.axes[0].collections[:-1]] == [0.6] * 3
    assert figure.axes[0].get_xlim() == pytest.approx((-0.5, 6.1))
    assert figure.axes[0].get_ylim() == pytest.approx((2.5, -3.2)), "down is down"


def test_the_tree_above_the_leaves(drawn: Any) -> None:
    figure = drawn(small())
    assert texts(figure) == {"core": (2.8, -2.4), "mp1": (0.2, -0.25), "mp2": (3.8, -0.25)}
    assert [[[pytest.approx(x), pytest.approx(y)] for x, y in line] for line in lines(figure)] == [
        [[-0.4, -2.2], [5.6, -2.2]], [[-0.4, -1.1], [3.6, -1.1]], [[-0.4, -2.2], [-0.4, -1.1]],
        [[0.0, -1.1], [0.0, 2.0]], [[3.6, -1.1], [3.6, 2.0]],
    ]  # fmt: skip
    assert figure.axes[0].get_title() == ""
    assert legend(figure) == ["free", "busy", "down"]


def groups_of(**nodes: str) -> Mapping[str, str]:
    return nodes


@pytest.mark.parametrize(
    ("groups", "title", "names", "named"),
    [
        (groups_of(n1="a", n2="a", n5="b"), "2 groups; a group touches 1 minipods", {"mp1 · 1 group", "mp2 · 1 group"},
         ["a: 1 minipod", "b: 1 minipod"]),
        (groups_of(n1="a", n2="b", n5="b"), "2 groups; a group touches 1 to 2 minipods",
         {"mp1 · 2 groups", "mp2 · 1 group"}, ["a: 1 minipod", "b: 2 minipods"]),
        (groups_of(n1="a"), "1 groups; a group touches 1 minipods", {"mp1 · 1 group", "mp2"}, ["a: 1 minipod"]),
    ],
)  # fmt: skip
def test_groups_are_told(drawn: Any, groups: Mapping[str, str], title: str, names: set[str], named: list[str]) -> None:
    figure = drawn(small(), groups=groups, title="A job")
    assert figure.axes[0].get_title() == f"A job\n{title}"
    assert set(texts(figure)) == names | {"core"}
    assert legend(figure) == [*named, "free", "busy", "down"]
    paints = boxes(figure)
    for name, colour in colours_of(list(dict.fromkeys(groups.values()))).items():
        assert len(paints[colour]) == sum(group == name for group in groups.values())
    faded = {to_hex(part.get_facecolor()[0]): part.get_alpha() for part in figure.axes[0].collections[:-1]}
    assert {alpha for colour, alpha in faded.items() if colour in STATE_COLOURS.values()} == {0.45}
    assert {alpha for colour, alpha in faded.items() if colour not in STATE_COLOURS.values()} == {1.0}


@pytest.mark.parametrize("nodes", [MANY_NODES - 1, MANY_NODES])
def test_of_many_nodes_neighbours_of_one_colour_are_one_box(drawn: Any, nodes: int) -> None:
    figure = drawn(
        generate(MinipodSizes(minipods=1, nodes=nodes, leaf_nodes=1000)).with_states(
            {"n0003": NodeState(status="busy")}
        )
    )
    paints = boxes(figure)
    (part, *_) = figure.axes[0].collections
    if nodes == MANY_NODES:
        assert paints == {
            FREE: [[0.0, 0.0, 2.0, 0.86], [3.0, 0.0, 1000.0, 0.86], [0.0, 1.0, 1000.0, 1.86]],
            BUSY: [[2.0, 0.0, 3.0, 0.86]],
        }  # fmt: skip
        assert float(part.get_linewidths()[0]) == 0.0
    else:
        assert (len(paints[FREE]), len(paints[BUSY])) == (nodes - 1, 1)
        assert float(part.get_linewidths()[0]) == 0.6


def test_a_level_of_its_own(drawn: Any) -> None:
    assert set(texts(drawn(small(), level="leaf"))) == {"core", "leaf1", "leaf2", "leaf3", "leaf4"}


def test_frames_have_room_for_the_largest(drawn: Any) -> None:
    """Leaves of one and three nodes, in minipods of one leaf and of two."""
    tree = build([
        SwitchEntry("core", ["a", "b"]), SwitchEntry("a", ["a1"]), SwitchEntry("b", ["b1", "b2"]),
        SwitchEntry("a1", nodes=["n1"]),
        SwitchEntry("b1", nodes=["n2", "n3", "n4"]), SwitchEntry("b2", nodes=["n5"]),
    ])  # fmt: skip
    figure = drawn(tree)
    assert texts(figure)["a"] == (0.2, -0.25) and texts(figure)["b"] == (4.8, -0.25)
    assert figure.axes[0].get_xlim()[1] == pytest.approx(2 * 4.6 - 1.6 + 0.5)
    assert figure.axes[0].get_ylim()[0] == pytest.approx(2.5)
    assert [line[1][1] for line in lines(figure)[-2:]] == [1.0, 2.0], "as many rows as it has leaves"

"""Clusters made up: as large, as full and as fragmented as asked for, and the same each time."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.topology.switches import Hardware
from plait.place.topologies import MinipodSizes, generate


@given(
    st.integers(1, 12), st.integers(0, 200), st.integers(1, 20), st.floats(0, 0.9), st.floats(0, 0.99),
    st.floats(0, 0.3), st.integers(0, 5),
)  # fmt: skip
def test_what_is_asked_for_is_made(
    minipods: int, more: int, leaf_nodes: int, uneven: float, busy: float, down: float, seed: int
) -> None:
    sizes = MinipodSizes(minipods=minipods, nodes=minipods + more, leaf_nodes=leaf_nodes, uneven=uneven)
    tree = generate(sizes, busy=busy, down=down, seed=seed)
    pods = tree.minipods()
    assert len(pods) == minipods
    assert len(tree.nodes) == minipods + more
    assert max(sum(node.leaf == place for node in tree.nodes) for place in {n.leaf for n in tree.nodes}) <= leaf_nodes
    assert tree.count("down") == round(down * len(tree.nodes))
    assert tree.count("busy") == min(round(busy * len(tree.nodes)), len(tree.nodes) - tree.count("down"))
    assert generate(sizes, busy=busy, down=down, seed=seed).key == tree.key


def test_occupancy_differs_between_minipods_and_is_fragmented() -> None:
    tree = generate(MinipodSizes(minipods=100, nodes=8000), busy=0.5, seed=4)
    full = [sum(n.state.status == "busy" for n in nodes) / len(nodes) for nodes in tree.minipods().values()]
    assert statistics.mean(full) == pytest.approx(0.5)
    assert statistics.stdev(full) == pytest.approx(0.22, abs=0.05)  # of Beta(2, 2)
    partly = sum(0 < len(names) < 16 for leaves in tree.free().values() for names in leaves.values())
    assert partly > 150
    holders = {node.state.holder for node in tree.nodes if node.state.status == "busy"}
    assert 400 < len(holders) < 1500


def test_seeds_make_different_clusters() -> None:
    assert len({generate(MinipodSizes(minipods=4, nodes=64), busy=0.4, seed=seed).key for seed in range(5)}) == 5
    wires = {generate(MinipodSizes(minipods=4, nodes=64), busy=0.4, seed=seed).fabric_key for seed in range(5)}
    assert len(wires) == 1


def test_hardware_and_uplinks() -> None:
    tree = generate(
        MinipodSizes(minipods=2, nodes=8, leaf_nodes=2), hardware=Hardware(gpus=8, nics=8, rails=8), uplinks=4
    )
    assert tree.node("n5").hardware.gpus == 8
    assert {switch.uplinks for switch in tree.switches if switch.depth == 2} == {4}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"nodes": 2}, "^nodes: 2 nodes in 3 minipods"),
        ({"nodes": 10**9}, "at most 200000"),
        ({"leaf_nodes": 0}, "^nodes-per-leaf: "),
        ({"busy": 1.0}, "^busy: 1"),
        ({"busy": -0.1}, "^busy: -0.1"),
        ({"down": float("nan")}, "^down: nan"),
        ({"uneven": 2.0}, "^uneven: 2"),
    ],
)
def test_what_cannot_be_made(change: dict[str, float], says: str) -> None:
    sizes: dict[str, Any] = {"minipods": 3, "nodes": 30}
    occupied: dict[str, Any] = {}
    for key, value in change.items():
        (occupied if key in ("busy", "down") else sizes)[key] = value
    with pytest.raises(JobError, match=says):
        generate(MinipodSizes(**sizes), **occupied)

"""From a topology to pools, and back to whether hosts are still there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.base.errors import PlacementError
from plait.core.topology.switches import DOWN, Hardware, NodeState, Topology
from plait.core.topology.wiring import SwitchEntry, build
from plait.place.placing import (
    NodeFilter,
    Spot,
    check_available,
    gpus_per_node,
    place,
    pools_of,
    ranges,
    remarks_on,
    spots_of,
    types_of,
)
from plait.place.solve.problem import Problem

BUSY = NodeState(status="busy", holder="other")
H100, A100 = Hardware(gpus=8, device="H100"), Hardware(gpus=4, device="A100")


def cluster(**states: NodeState) -> Topology:
    """Two minipods of two leaves of two nodes; the last leaf has another GPU."""
    leaves = [SwitchEntry(f"leaf{k}", nodes=[f"n{k}{i}" for i in range(2)]) for k in range(4)]
    pods = [SwitchEntry("core", ["a", "b"]), SwitchEntry("a", ["leaf0", "leaf1"]), SwitchEntry("b", ["leaf2", "leaf3"])]
    tree = build([*pods, *leaves], states=states)
    return tree.with_hardware({n.name: A100 if n.name.startswith("n3") else H100 for n in tree.nodes})


def test_free_nodes_by_leaf() -> None:
    a, b = pools_of(cluster(n00=BUSY, n21=DOWN), NodeFilter())
    assert (a.minipod, a.leaves, a.held) == ("a", (("n01",), ("n10", "n11")), ())
    assert b.leaves == (("n20",), ("n30", "n31"))
    assert pools_of(cluster(n00=BUSY, n01=DOWN), NodeFilter(preempt=True))[0].held == ("n00",)


def test_nodes_and_switches_to_avoid() -> None:
    a, b = pools_of(cluster(), NodeFilter(avoid=frozenset({"n00", "leaf3"})))
    assert (a.free, b.leaves) == (3, (("n20", "n21"),))
    assert pools_of(cluster(), NodeFilter(avoid=frozenset({"b"})))[1].free == 0
    with pytest.raises(PlacementError, match="neither a node nor a switch called leaf9"):
        pools_of(cluster(), NodeFilter(avoid=frozenset({"leaf9"})))


def test_types_of_gpu() -> None:
    assert types_of(cluster()) == ("A100", "H100")
    assert (gpus_per_node(cluster()), gpus_per_node(cluster(), "a100")) == (None, 4)
    assert [pool.free for pool in pools_of(cluster(), NodeFilter(gpu="h100"))] == [4, 2]
    mixed = pools_of(cluster(), NodeFilter(mixed=True))
    assert [(pool.minipod, pool.gpu, pool.free) for pool in mixed] == [
        ("a", "H100", 4), ("b", "A100", 2), ("b", "H100", 2),
    ]  # fmt: skip


def test_another_level_counts_as_minipods() -> None:
    assert [pool.minipod for pool in pools_of(cluster(), NodeFilter(level="leaf"))] == [
        "leaf0",
        "leaf1",
        "leaf2",
        "leaf3",
    ]
    assert spots_of(cluster())["n20"] == Spot("b", "leaf2")


def test_hosts_that_were_taken_meanwhile_are_named() -> None:
    placed = place(Problem(heights=(2, 2), pools=pools_of(cluster(), NodeFilter())))
    check_available(placed, cluster())
    check_available(placed, cluster(n20=BUSY))
    with pytest.raises(PlacementError, match=r"n10 is no longer free.*Nothing was written"):
        check_available(placed, cluster(n10=BUSY))
    with pytest.raises(PlacementError, match="n00, n10 are no longer free"):
        check_available(placed, cluster(n10=DOWN, n00=BUSY))
    check_available(placed, cluster(n10=BUSY), own=["n10"])
    check_available(replace(placed, preempted=("n10",)), cluster(n10=BUSY))


def test_ranges() -> None:
    assert ranges([3, 1, 2, 7]) == "1-3,7"


def test_nodes_with_fewer_gpus_than_ranks_are_not_used() -> None:
    """Of a cluster of eight and four GPUs a node; of one that does not say, nobody knows."""
    tree = cluster(n01=DOWN)
    assert [pool.free for pool in pools_of(tree, NodeFilter(gpus=8))] == [3, 2]
    assert [pool.free for pool in pools_of(tree, NodeFilter(gpus=4))] == [3, 4]
    assert remarks_on(tree, 8).lines() == [
        "passed over 2 free nodes with fewer than 8 GPUs, a rank each (the first: n30)"
    ]
    assert not remarks_on(tree, 4)
    silent = tree.with_hardware({"n30": Hardware(), "n31": Hardware()})
    assert [pool.free for pool in pools_of(silent, NodeFilter(gpus=8))] == [3, 4]
    assert list(remarks_on(silent, 8).counts.values()) == [2]
    assert not remarks_on(tree.with_hardware({node.name: Hardware() for node in tree.nodes}), 8)
    none = tree.with_hardware({"n30": Hardware(gpus=0), "n31": Hardware(gpus=0)})
    assert gpus_per_node(none) == 8
    assert [pool.free for pool in pools_of(none, NodeFilter(gpus=1))] == [3, 2]


def test_held_nodes_with_fewer_gpus_are_not_preempted() -> None:
    pools = pools_of(cluster(n30=BUSY, n20=BUSY), NodeFilter(gpus=8, preempt=True))
    assert [pool.held for pool in pools] == [(), ("n20",)]


def test_a_host_that_lost_gpus_is_named() -> None:
    tree = cluster()
    placed = place(Problem(heights=(2, 2), pools=pools_of(tree, NodeFilter(gpus=8))))
    check_available(placed, tree)
    with pytest.raises(PlacementError, match="n10 is no longer free"):
        check_available(placed, tree.with_hardware({"n10": Hardware(gpus=7)}))

"""Nodes that are not fit: which other takes their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.core.base.errors import PlacementError
from tests.launch.test_kubernetes_binder import Bound
from tests.support.kubernetes.in_memory import InMemory

TIER = "unit"


@pytest.fixture
def cluster() -> InMemory:
    """n3 is in no table."""
    return InMemory(("n0", "n1", "n2", "n3"))


def reserved(value: str) -> dict[str, Any]:
    return {"spec": {"taints": [{"key": "plait.dev/reserved", "value": value, "effect": "NoSchedule"}]}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda store: store.remove(store.get("Node", "n0")), "is not there"),
        (lambda store: store.get("Node", "n0")["status"]["conditions"].clear(), "is not ready"),
        (lambda store: store.patch("Node", "n0", {"status": {"conditions": []}}), "is not ready"),
        (
            lambda store: store.patch(
                "Node", "n0", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
            ),
            "is not ready",
        ),
        (lambda store: store.patch("Node", "n0", {"spec": {"unschedulable": True}}), "is not ready"),
        (lambda store: store.patch("Node", "n0", reserved("others")), "is not ready"),
    ],
)
def test_a_node_that_is_not_fit_is_replaced(cluster: InMemory, change: Callable[[Any], None], why: str) -> None:
    one = Bound(cluster)
    change(cluster.store)
    one.look()
    assert one.said[0] == f"the node n0 {why}; n3 takes its place"
    assert one.where == ["host-n2", "host-n3", "host-n1"]
    assert one.binder.table.hosts == ("n2", "n3", "n1")


def test_taints_of_others_and_the_own_reservation_close_nothing(cluster: InMemory) -> None:
    other = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    cluster.store.patch("Node", "n0", {"spec": {"taints": [other, *reserved("big")["spec"]["taints"]]}})
    one = Bound(cluster, reservation="big")
    one.look()
    assert one.where == ["host-n2", "host-n0", "host-n1"]


def test_the_users_spares_are_taken_in_their_order_and_no_others(cluster: InMemory) -> None:
    cluster.add_node("n4", gpus=0)
    cluster.store.patch("Node", "n0", {"spec": {"unschedulable": True}})
    one = Bound(cluster, spare_nodes=("n9", "n4", "n3"), gpus=8)
    one.look()
    assert one.where == ["host-n2", "host-n4", "host-n1"]
    for pod in cluster.store.of("Pod"):
        cluster.store.remove(pod)
    one.again()
    cluster.store.patch("Node", "n1", {"spec": {"unschedulable": True}})
    cluster.store.patch("Node", "n3", {"spec": {"unschedulable": True}})
    with pytest.raises(PlacementError, match=r"The node n1 of the rank table is not ready, and there is no other"):
        one.look()
    assert not one.deleted()  # none was given a node


@pytest.mark.parametrize(
    ("gpus", "labels", "taken"),
    [(8, {}, "n5"), (4, {}, "n4"), (0, {}, "n4"), (0, {"kind": "new"}, "n6"), (9, {}, None)],
)
def test_another_node_must_hold_a_pod(cluster: InMemory, gpus: int, labels: dict[str, str], taken: str | None) -> None:
    cluster.store.remove(cluster.node("n3"))
    cluster.add_node("n4", gpus=4)
    cluster.add_node("n5", gpus=8)
    cluster.add_node("n6", gpus=8, kind="new")
    del cluster.add_node("n3")["status"]["allocatable"]
    cluster.node("n3")["spec"]["unschedulable"] = gpus == 0
    cluster.store.patch("Node", "n0", {"spec": {"unschedulable": True}})
    one = Bound(cluster, gpus=gpus, node_labels=tuple(f"{key}={value}" for key, value in labels.items()))
    if taken is None:
        with pytest.raises(PlacementError, match="there is no other to take"):
            one.look()
    else:
        one.look()
        assert one.where == ["host-n2", f"host-{taken}", "host-n1"]


def test_the_nearest_node_is_taken_also_for_one_that_is_gone(cluster: InMemory) -> None:
    """How near one is that is gone is known from when it was seen last."""
    near = {"topology_kubernetes_io__zone": "a", "fabric_topograph_run__leaf": "l1", "other": "x"}
    for key, value in near.items():
        cluster.node("n0")["metadata"]["labels"][key.replace("__", "/").replace("_", ".")] = value
    cluster.add_node("n4", other="x", fabric_topograph_run__leaf="l2", topology_kubernetes_io__zone="a")
    cluster.add_node("n5", other="y", fabric_topograph_run__leaf="l1", topology_kubernetes_io__zone="a")
    one = Bound(cluster)
    one.look()
    for pod in cluster.store.of("Pod"):
        cluster.store.remove(pod)
    one.again()
    cluster.store.remove(cluster.node("n0"))
    one.look()
    assert one.where == ["host-n2", "host-n5", "host-n1"]
    for pod in cluster.store.of("Pod"):
        cluster.store.remove(pod)
    one.again()
    cluster.store.remove(cluster.node("n5"))
    one.look()  # the spare's own labels are known too
    assert one.where == ["host-n2", "host-n4", "host-n1"]

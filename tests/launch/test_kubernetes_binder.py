"""Binding, one look at a time, by a cluster that answers at once: what is patched, undone, refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.errors import LaunchError, PlacementError
from plait.core.topology.rank_table import RankTable
from plait.launch import kubernetes_binder
from plait.launch.kubernetes_api import Away, Conflict
from plait.launch.kubernetes_binder import Binder, index_of, over, unschedulable
from plait.launch.kubernetes_manifests import HOSTNAME, HOSTS, INDEX, PodRun
from tests.support.kubernetes.in_memory import InMemory, a_run

TIER = "unit"

TABLE = RankTable(("n2", "n0", "n1"), ranks_per_node=1)
GATES = [{"name": "other"}]


class Bound:
    """A binder of three pods, which are there behind their gates."""

    def __init__(self, cluster: InMemory, table: RankTable = TABLE, **settings: Any) -> None:
        self.cluster, self.said = cluster, list[str]()
        self.run: PodRun = a_run(table, **settings)
        cluster.store.create({"kind": "ConfigMap", "metadata": {"name": self.run.name}, "data": {"plan": "{}"}})
        for index in range(3):
            cluster.add_pod(self.run, index)
        self.binder = Binder(cluster.api, self.run, self.said.append)

    def look(self) -> None:
        self.binder.look(self.cluster.pods())

    @property
    def where(self) -> list[str | None]:
        """Nodes of all pods whose gate of ours is open."""
        return [
            pod["spec"].get("nodeSelector", {}).get(HOSTNAME) if pod["spec"]["schedulingGates"] == GATES else None
            for pod in self.cluster.pods()
        ]

    def deleted(self) -> list[str]:
        return [name for verb, kind, name, *_ in self.cluster.done if (verb, kind) == ("delete", "Pod")]

    def again(self) -> None:
        """The Job's controller makes what was deleted."""
        for index in range(3):
            if ("Pod", f"{self.run.name}-{index}") not in self.cluster.store.objects:
                self.cluster.add_pod(self.run, index)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """now: the time."""
    made = SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(kubernetes_binder, "time", made)
    return made


@pytest.fixture
def cluster() -> InMemory:
    return InMemory(("n0", "n1", "n2", "n3"))


def test_pods_get_the_tables_nodes_and_then_open_gates(cluster: InMemory) -> None:
    one = Bound(cluster)
    cluster.store.patch(
        "Pod", "plait-test-0", {"spec": {"nodeSelector": {"a": "b"}}, "metadata": {"annotations": {"c": "d"}}}
    )
    one.look()
    assert one.where == ["host-n2", "host-n0", "host-n1"]
    first = cluster.pods()[0]
    assert first["spec"]["nodeSelector"] == {"a": "b", HOSTNAME: "host-n2"}
    assert first["metadata"]["annotations"]["c"] == "d"
    assert {pod["metadata"]["annotations"][HOSTS] for pod in cluster.pods()} == {"n[2,0-1]"}
    kinds = [kind for verb, kind, _ in cluster.done if verb == "patch"]
    assert kinds == ["ConfigMap", *["Pod"] * 6]
    config = cluster.store.get("ConfigMap", "plait-test")["data"]
    assert config["plan"] == "{}" and len(config) == 2
    assert one.said == ["bound 3 pods to n[2,0-1]"]
    assert len(one.binder.bound) == 3


def test_what_is_seen_may_lag_behind_what_was_done(cluster: InMemory) -> None:
    one = Bound(cluster)
    seen = cluster.pods()
    one.binder.look(seen)
    asked = list(cluster.done)
    one.binder.look(seen)
    assert cluster.done == asked and len(one.binder.bound) == 3
    cluster.store.get("Pod", "plait-test-0")["spec"]["nodeName"] = "n1"
    with pytest.raises(PlacementError):
        one.look()
    asked = list(cluster.done)
    one.binder.look(seen)
    assert cluster.done == asked


def test_a_node_without_a_label_for_its_name_is_meant_by_its_name(cluster: InMemory) -> None:
    del cluster.node("n2")["metadata"]["labels"][HOSTNAME]
    one = Bound(cluster)
    one.look()
    assert one.where == ["n2", "host-n0", "host-n1"]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.cluster.store.remove(one.cluster.store.get("Pod", "plait-test-2")),
        lambda one: one.cluster.store.patch("Pod", "plait-test-2", {"metadata": {"deletionTimestamp": "now"}}),
        lambda one: one.cluster.store.patch("Pod", "plait-test-2", {"status": {"phase": "Failed"}}),
        lambda one: one.cluster.store.patch("Pod", "plait-test-2", {"spec": {"schedulingGates": GATES}}),
        lambda one: one.cluster.store.patch("Pod", "plait-test-2", {"metadata": {"labels": {INDEX: "1"}}}),
        lambda one: one.cluster.add_pod(one.run, 2, name="another"),
    ],
    ids=["missing", "deleted", "failed", "open", "twice", "four"],
)
def test_nothing_is_bound_before_all_are_there_and_wait(cluster: InMemory, change: Callable[[Bound], None]) -> None:
    one = Bound(cluster)
    change(one)
    one.look()
    assert not one.binder.bound and not cluster.done and not one.said


def test_pods_that_are_over_count_as_gone(cluster: InMemory) -> None:
    one = Bound(cluster)
    cluster.add_pod(one.run, 1, name="before", phase="Failed")
    one.look()
    assert len(one.binder.bound) == 3


def test_a_conflict_ends_all_pods_and_three_in_a_row_are_the_end(cluster: InMemory) -> None:
    one = Bound(cluster)

    def conflict(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("patch", "Pod"):
            raise Conflict("changed")

    cluster.before = conflict
    for times in range(2):
        one.look()
        assert one.said[-1] == "the binding was undone and is tried again: changed"
        assert len(one.deleted()) == 3 * (times + 1)
        one.look()  # they may be seen for a while yet
        assert len(one.deleted()) == 3 * (times + 1)
        one.again()
    with pytest.raises(PlacementError, match=r"Binding was undone 3 times in a row\. changed"):
        one.look()
    assert all(grace == 0 for verb, _, _, grace, _ in (each for each in cluster.done if each[0] == "delete"))


def test_a_binding_that_succeeds_forgets_the_failures_before(cluster: InMemory) -> None:
    one = Bound(cluster)
    failing = [2, 0, 2, 0]  # how often, before it works

    def conflict(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("patch", "Pod") and failing[0]:
            raise Conflict("changed")

    cluster.before = conflict
    while failing:
        one.look()
        if one.binder.bound:  # all fail
            for pod in cluster.store.of("Pod"):
                cluster.store.remove(pod)
        failing[0] -= 1
        if failing[0] < 0 or (failing[0] == 0 and len(failing) in (4, 2)):
            failing.pop(0)
        one.again()
    assert sum("tried again" in said for said in one.said) == 4
    assert sum("bound 3" in said for said in one.said) == 2


def test_what_is_refused_ends_all_pods(cluster: InMemory) -> None:
    one = Bound(cluster)

    def refuse(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("patch", "ConfigMap"):
            raise LaunchError("you may not")

    cluster.before = refuse
    with pytest.raises(PlacementError, match=r"Pods cannot be bound\. you may not"):
        one.look()
    assert len(one.deleted()) == 3


@pytest.mark.parametrize(("kind", "ended"), [("ConfigMap", 0), ("Pod", 3)])
def test_a_server_that_goes_away_is_told_and_what_was_begun_is_ended_by_the_next_look(
    cluster: InMemory, kind: str, ended: int
) -> None:
    one = Bound(cluster)

    def away(verb: str, its: str, name: str) -> None:
        if (verb, its) == ("patch", kind):
            raise Away("no answer")

    cluster.before = away
    with pytest.raises(Away):
        one.look()
    assert not one.deleted()
    cluster.before = lambda verb, kind, name: None
    one.look()
    assert len(one.deleted()) == ended
    assert len(one.binder.bound) == (0 if ended else 3)


def test_pods_that_could_not_be_ended_are_ended_later_each_once(cluster: InMemory) -> None:
    one = Bound(cluster)

    def away(verb: str, kind: str, name: str) -> None:
        if verb == "patch" and kind == "Pod":
            raise Conflict("changed")
        if verb == "delete" and name.endswith("-1"):
            raise Away("no answer")

    cluster.before = away
    with pytest.raises(Away):
        one.look()
    cluster.before = lambda verb, kind, name: None
    assert sorted(one.deleted()) == ["plait-test-0", "plait-test-2"]
    one.look()
    assert sorted(one.deleted()) == ["plait-test-0", "plait-test-1", "plait-test-2"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda store: store.remove(store.get("Pod", "plait-test-1")), "Pod plait-test-1 went away while pods were"),
        (
            lambda store: store.patch("Pod", "plait-test-1", {"status": {"phase": "Failed"}}),
            "Pod plait-test-1 went away while pods were",
        ),
        (
            lambda store: store.patch("Pod", "plait-test-1", {"spec": {"schedulingGates": GATES}}),
            "Pod plait-test-1 went away while pods were",
        ),
        (lambda store: store.remove(store.get("Node", "n0")), "n0 went away while pods were being bound"),
        (
            lambda store: store.patch("Node", "n0", {"spec": {"unschedulable": True}}),
            "n0 went away while pods were being bound",
        ),
    ],
    ids=["gone", "failed", "open", "node gone", "node closed"],
)
def test_what_changes_while_pods_are_bound_undoes_it(
    cluster: InMemory, change: Callable[[Any], None], said: str
) -> None:
    one = Bound(cluster)

    def meanwhile(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("list", "Pod"):
            change(cluster.store)

    cluster.before = meanwhile
    one.look()
    assert one.said and said in one.said[0]
    assert not one.binder.bound


def test_a_node_that_somebody_else_gave_undoes_it(cluster: InMemory) -> None:
    one = Bound(cluster)

    def meanwhile(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("list", "Pod"):
            cluster.store.get("Pod", "plait-test-1")["spec"]["nodeSelector"] = {HOSTNAME: "host-n3"}

    cluster.before = meanwhile
    one.look()
    assert "Pod plait-test-1 was given another node than host-n0 by somebody else." in one.said[0]


def bound(cluster: InMemory, clock: SimpleNamespace, nodes: tuple[str | None, ...], **settings: Any) -> Bound:
    """Bound, and let in to these nodes."""
    one = Bound(cluster, **settings)
    one.look()
    for pod, node in zip(cluster.store.of("Pod"), nodes, strict=True):
        if node:
            pod["spec"]["nodeName"] = node
    cluster.done.clear()
    return one


def test_pods_where_the_table_has_them_are_left_alone(cluster: InMemory, clock: SimpleNamespace) -> None:
    one = bound(cluster, clock, ("n2", "n0", "n1"))
    clock.now += 1e6
    one.look()
    assert not cluster.done and len(one.binder.bound) == 3


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (("n2", "n0", "n0"), r"node n0 has 2 pods of this run; pod 2 is on n0 and not on n1\.$"),
        (("n2", "n0", "n3"), r": pod 2 is on n3 and not on n1\.$"),
    ],
)
def test_pods_elsewhere_are_ended(cluster: InMemory, clock: SimpleNamespace, nodes: tuple[str, ...], said: str) -> None:
    one = bound(cluster, clock, nodes)
    with pytest.raises(PlacementError, match=said):
        one.look()
    assert len(one.deleted()) == 3 and not one.binder.bound


@pytest.mark.parametrize(
    ("conditions", "said"),
    [([{"reason": "Unschedulable", "message": "0 of 4"}], "0 of 4"), ([], "it only waits")],
)
def test_pods_that_find_no_room_in_time_are_ended(
    cluster: InMemory, clock: SimpleNamespace, conditions: list[Any], said: str
) -> None:
    one = bound(cluster, clock, ("n2", None, "n1"), wait=60)
    cluster.store.get("Pod", "plait-test-1")["status"]["conditions"] = conditions
    clock.now += 60.0
    one.look()
    assert not cluster.done
    clock.now += 0.5
    with pytest.raises(PlacementError, match=f"pod 1 found no room on n0: {said}"):
        one.look()


def test_what_pods_say_of_themselves() -> None:
    assert index_of({"metadata": {"labels": {INDEX: "3"}, "annotations": {INDEX: "4"}}}) == 3
    assert index_of({"metadata": {"annotations": {INDEX: "4"}}}) == 4
    assert index_of({"metadata": {}}) == -1
    assert over({"metadata": {"deletionTimestamp": "now"}}) is True
    assert [over({"metadata": {}, "status": {"phase": one}}) for one in ("Succeeded", "Failed", "Running")] == [
        True, True, False,
    ]  # fmt: skip
    assert over({"metadata": {}}) is False
    waits = {"reason": "Other", "message": "no"}
    assert unschedulable({"status": {"conditions": [waits, {"reason": "Unschedulable", "message": "full"}]}}) == "full"
    assert unschedulable({"status": {"conditions": [waits, {"reason": "Unschedulable"}]}}) == ""
    assert unschedulable({}) == ""

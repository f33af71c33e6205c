"""Pods are bound in the order of the rank table, all or none, whatever goes wrong meanwhile."""

from __future__ import annotations

import copy
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import LaunchError, PlacementError
from plait.core.topology.hostlist import expand
from plait.core.topology.rank_table import RankTable
from plait.launch import kubernetes
from plait.launch.kubernetes_api import KubernetesNamespace
from plait.launch.kubernetes_binder import Binder, uid
from plait.launch.kubernetes_manifests import HOSTS, PodRun
from tests.support.kubernetes.cluster import SmallCluster
from tests.support.kubernetes.runs import pod_run, small_cluster
from tests.support.kubernetes.server import Fault
from tests.support.lab import wait_until

HOSTS_OF = ("n2", "n0", "n3", "n1")
TABLE = RankTable(HOSTS_OF, ranks_per_node=1)
PODS = "/pods/"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    """Five nodes; pods are let in to them and then wait for their image, so that nothing runs."""
    with small_cluster(tmp_path / "cluster", 5) as found:
        yield found


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))


def waiting_run(cluster: SmallCluster, *, table: RankTable = TABLE, name: str = "plait-test", **more: Any) -> PodRun:
    return pod_run(cluster.folder, table=table, name=name, more={"image": "missing", **more})


def bind(cluster: SmallCluster, run: PodRun, *, patience: float = 10.0) -> KubernetesNamespace:
    """Submit, and see all pods bound."""
    api = KubernetesNamespace(patience=patience)
    kubernetes.submit(api, run)
    assert kubernetes.follow(api, run, until_bound=True) == 0
    return api


def placed(cluster: SmallCluster, name: str = "plait-test") -> dict[int, str]:
    """Where pods are to be, by completion index, of those whose gate is open."""
    return {
        int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]):
            pod["spec"]["nodeSelector"]["kubernetes.io/hostname"].removeprefix("host-")
        for pod in cluster.pods()
        if not pod["spec"].get("schedulingGates") and pod["metadata"]["name"].startswith(name)
    }  # fmt: skip


def ever_half_bound(cluster: SmallCluster) -> list[str]:
    """Pods whose gate was opened while another one of their gang had no node yet, of all there were."""
    gangs: dict[str, dict[str, Any]] = {}
    found: list[str] = []
    with cluster.store.changed:
        events = [(what, body) for _, what, body in cluster.store.events if body["kind"] == "Pod"]
    for what, pod in events:
        gang = gangs.setdefault(pod["metadata"]["labels"]["plait.dev/run"], {})
        before = gang.get(pod["metadata"]["uid"], pod)
        gang[pod["metadata"]["uid"]] = pod
        if what == "DELETED":
            gang.pop(pod["metadata"]["uid"])
        pointed = [one for one in gang.values() if "nodeSelector" in one["spec"]]
        opened = before["spec"].get("schedulingGates") and not pod["spec"].get("schedulingGates")
        if opened and len(pointed) < len(gang):
            found.append(pod["metadata"]["name"])
    return found


def nothing_left(cluster: SmallCluster) -> bool:
    with cluster.store.changed:
        return all(kind == "Node" for kind, _ in cluster.store.objects)


def test_pods_stand_in_the_tables_order_each_alone(cluster: SmallCluster) -> None:
    bind(cluster, waiting_run(cluster))
    assert placed(cluster) == dict(enumerate(HOSTS_OF))
    assert {tuple(expand(pod["metadata"]["annotations"][HOSTS])) for pod in cluster.pods()} == {HOSTS_OF}
    wait_until(lambda: all("nodeName" in pod["spec"] for pod in cluster.pods()), "pods were not let in")
    nodes = {pod["spec"]["nodeName"] for pod in cluster.pods()}
    assert nodes == set(HOSTS_OF)
    assert not ever_half_bound(cluster)


def seen(cluster: SmallCluster, run: PodRun) -> tuple[Binder, list[Any]]:
    """A binder, and all pods as they are before it binds them."""
    kubernetes.submit(KubernetesNamespace(), run)
    wait_until(lambda: len(cluster.pods()) == run.nodes, "pods were not made")
    return Binder(KubernetesNamespace(), run, print), copy.deepcopy(cluster.pods())


def test_pods_that_look_as_if_they_waited_are_not_bound_again(cluster: SmallCluster) -> None:
    """What is watched lags behind what was done."""
    binder, pods = seen(cluster, waiting_run(cluster))
    binder.look(pods)
    asked = len(cluster.asked)
    binder.look(pods)
    assert len(cluster.asked) == asked
    assert placed(cluster) == dict(enumerate(HOSTS_OF))


def test_pods_that_were_ended_are_not_bound_again(cluster: SmallCluster) -> None:
    binder, pods = seen(cluster, waiting_run(cluster))
    cluster.faults.append(Fault("PATCH", PODS, 409))
    binder.look(pods)
    asked = len(cluster.asked)
    binder.look(pods)
    assert len(cluster.asked) == asked
    ended = set(map(uid, pods))
    wait_until(lambda: not ended & set(map(uid, cluster.pods())), "pods that were given up are left")
    wait_until(lambda: len(cluster.pods()) == 4, "pods were not made again")
    binder.look(copy.deepcopy(cluster.pods()))
    assert placed(cluster) == dict(enumerate(HOSTS_OF))


@pytest.mark.parametrize("status", [409, 422])
@pytest.mark.parametrize("after", [0, 3])
def test_a_conflict_undoes_the_binding_and_it_is_tried_again(cluster: SmallCluster, status: int, after: int) -> None:
    cluster.faults.append(Fault("PATCH", PODS, status, after=after))
    bind(cluster, waiting_run(cluster))
    assert placed(cluster) == dict(enumerate(HOSTS_OF))
    assert not ever_half_bound(cluster)


@pytest.mark.parametrize("after", range(0, 8, 2))
def test_whatever_is_refused_leaves_nothing_bound(cluster: SmallCluster, after: int) -> None:
    """Patches 1 to 4 give nodes, 5 to 8 open gates."""
    cluster.faults.append(Fault("PATCH", PODS, 403, times=99, after=after))
    with pytest.raises(PlacementError, match="does not let you patch Pod"):
        bind(cluster, waiting_run(cluster))
    wait_until(lambda: nothing_left(cluster), "something is left")
    assert not ever_half_bound(cluster)


def test_conflicts_without_end_are_given_up(cluster: SmallCluster) -> None:
    cluster.faults.append(Fault("PATCH", PODS, 409, times=999))
    with pytest.raises(PlacementError, match="undone 3 times in a row"):
        bind(cluster, waiting_run(cluster))
    wait_until(lambda: nothing_left(cluster), "something is left")


def test_a_node_that_goes_while_pods_are_bound_is_replaced(cluster: SmallCluster) -> None:
    cluster.faults.append(Fault("PATCH", PODS, -1, after=2, then=lambda: cluster.lose("n0")))
    bind(cluster, waiting_run(cluster))
    assert placed(cluster) == dict(enumerate(("n2", "n4", "n3", "n1")))
    assert not ever_half_bound(cluster)


def test_a_node_that_is_down_or_closed_is_replaced_by_the_users_spares_in_order(cluster: SmallCluster) -> None:
    cluster.add("n5")
    cluster.lose("n3")
    cluster.store.patch("Node", "n0", {"spec": {"unschedulable": True}})
    bind(cluster, waiting_run(cluster, spare_nodes=("n5", "n4")))
    assert placed(cluster) == dict(enumerate(("n2", "n5", "n4", "n1")))


def test_the_nearest_node_takes_a_lost_ones_place(cluster: SmallCluster) -> None:
    near, far = {"topology.kubernetes.io/zone": "a"}, {"topology.kubernetes.io/zone": "b"}
    cluster.store.patch("Node", "n3", {"metadata": {"labels": near}})
    cluster.store.patch("Node", "n4", {"metadata": {"labels": far}})
    cluster.add("n5", labels=near)
    cluster.lose("n3")
    bind(cluster, waiting_run(cluster))
    assert placed(cluster)[2] == "n5"


@pytest.mark.parametrize("lost", [("n3", "n4"), ("nowhere",)])
def test_without_another_node_it_is_refused_by_name(cluster: SmallCluster, lost: tuple[str, ...]) -> None:
    table = RankTable(("n2", "n0", lost[0], "n1"), 1)
    for node in lost:
        if node != "nowhere":
            cluster.lose(node)
    if lost == ("nowhere",):
        cluster.lose("n3")
        cluster.lose("n4")
    with pytest.raises(PlacementError, match=f"The node {lost[0]} of the rank table is not"):
        bind(cluster, waiting_run(cluster, table=table))
    wait_until(lambda: nothing_left(cluster), "something is left")


def test_nodes_that_are_reserved_for_others_are_not_taken(cluster: SmallCluster) -> None:
    taint = {"spec": {"taints": [{"key": "plait.dev/reserved", "value": "big", "effect": "NoSchedule"}]}}
    cluster.store.patch("Node", "n3", taint)
    bind(cluster, waiting_run(cluster))
    assert placed(cluster)[2] == "n4"


def test_a_reservation_opens_its_nodes(cluster: SmallCluster) -> None:
    taint = {"spec": {"taints": [{"key": "plait.dev/reserved", "value": "big", "effect": "NoSchedule"}]}}
    for node in HOSTS_OF:
        cluster.store.patch("Node", node, taint)
    bind(cluster, waiting_run(cluster, reservation="big"))
    assert placed(cluster) == dict(enumerate(HOSTS_OF))
    wait_until(lambda: all("nodeName" in pod["spec"] for pod in cluster.pods()), "pods were not let in")


def test_two_runs_never_share_a_node(cluster: SmallCluster) -> None:
    bind(cluster, waiting_run(cluster))
    wait_until(lambda: all("nodeName" in pod["spec"] for pod in cluster.pods()), "pods were not let in")
    other = waiting_run(cluster, table=RankTable(("n4", "n1", "n2", "n3"), 1), name="plait-other", wait=1)
    api = KubernetesNamespace()
    kubernetes.submit(api, other)
    with pytest.raises(PlacementError, match="found no room on n"):
        kubernetes.follow(api, other)
    wait_until(lambda: len(cluster.pods()) == 4, "pods of the run that found no room are left")
    assert placed(cluster) == dict(enumerate(HOSTS_OF))


def test_a_pod_that_is_elsewhere_than_bound_ends_the_run(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that does not obey."""

    def disobey() -> None:
        for pod, node in zip(cluster.store.of("Pod"), ("n0", "n0", "n1", "n2"), strict=False):
            if not pod["spec"].get("schedulingGates") and "nodeName" not in pod["spec"]:
                pod["spec"]["nodeName"] = node
                cluster.store.update(pod)

    monkeypatch.setattr(cluster, "_schedule", disobey)
    api, run = KubernetesNamespace(), waiting_run(cluster)
    kubernetes.submit(api, run)
    with pytest.raises(PlacementError, match="node n0 has 2 pods of this run"):
        kubernetes.follow(api, run)
    wait_until(lambda: nothing_left(cluster), "something is left")


@pytest.mark.parametrize("faults", [
    [Fault("GET", "watch", 0, times=3)],
    [Fault("WATCH", "Pod", 0, times=3)],
    [Fault("GET", "watch", 410, times=2)],
    [Fault("PATCH", PODS, 503, times=2), Fault("GET", "/nodes", 429, times=2)],
    [Fault("POST", "/configmaps", 0, times=1), Fault("PATCH", PODS, -1, times=4, delay=0.3)],
    [Fault("GET", "/nodes", -1, times=2, delay=0.6), Fault("GET", "/jobs", 500, times=2)],
])  # fmt: skip
def test_a_server_that_is_slow_or_breaks_off_is_asked_again(cluster: SmallCluster, faults: list[Fault]) -> None:
    cluster.faults += faults
    bind(cluster, waiting_run(cluster))
    assert placed(cluster) == dict(enumerate(HOSTS_OF))
    assert not ever_half_bound(cluster)


@pytest.mark.parametrize("path", ["/nodes", "/jobs", "/pods"])
def test_a_server_that_is_away_for_long_ends_nothing(
    cluster: SmallCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Longer than a call is tried; what was asked is named, once."""
    monkeypatch.setattr(kubernetes, "LONGEST", 0.05)
    cluster.faults.append(Fault("GET", path, 503, times=6))
    bind(cluster, waiting_run(cluster), patience=0.0)
    assert placed(cluster) == dict(enumerate(HOSTS_OF))
    if path != "/pods":  # which a thread of its own looks at
        told = " ".join(capsys.readouterr().err.split())
        assert told.count("asking again (Ctrl-C twice to leave it)") == 1
        assert f"refused to {'list Node' if path == '/nodes' else 'get Job plait-test'}: it was made to fail" in told
        assert "Kubernetes answers again" in told


@pytest.mark.parametrize("after", range(0, 8, 2))
def test_a_server_that_goes_away_in_the_middle_of_a_binding_has_it_undone_later(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(kubernetes, "LONGEST", 0.05)
    cluster.faults += [Fault("PATCH", PODS, 503, times=4, after=after), Fault("DELETE", PODS, 503, times=3)]
    bind(cluster, waiting_run(cluster), patience=0.0)
    assert placed(cluster) == dict(enumerate(HOSTS_OF))
    assert not ever_half_bound(cluster)


@pytest.mark.parametrize("status", [401, 403])
def test_a_run_that_may_be_seen_no_more_goes_on_and_how_is_said(cluster: SmallCluster, status: int) -> None:
    """A token that has expired says nothing of the run."""
    api = bind(cluster, waiting_run(cluster))
    cluster.faults.append(Fault("GET", "/jobs", status, times=99))
    run = waiting_run(cluster)
    match = (
        r"does not let you get Job plait-test.*no longer followed. It goes on, but pods of its rank table .* are bound "
        r"by nobody; its logs are in .*logs, .*kubectl -n ml delete job plait-test ends it"
    )
    with pytest.raises(LaunchError, match=match):
        kubernetes.follow(api, run)
    assert ("Job", "plait-test") in cluster.store.objects
    assert placed(cluster) == dict(enumerate(HOSTS_OF))


def test_ctrl_c_while_the_server_is_away_is_kept_until_it_answers(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LONGEST", 0.05)
    api = bind(cluster, waiting_run(cluster))
    cluster.faults += [Fault("GET", "/jobs", 503, times=1, then=lambda: os.kill(os.getpid(), signal.SIGTERM)),
                       Fault("GET", "/jobs", 503, times=3), Fault("DELETE", "/jobs", 503, times=5)]  # fmt: skip
    api.patience = 0.0
    assert kubernetes.follow(api, waiting_run(cluster)) == 128 + signal.SIGTERM
    wait_until(lambda: nothing_left(cluster), "something is left")


def test_a_second_ctrl_c_while_the_server_is_away_leaves_the_run_and_says_so(cluster: SmallCluster) -> None:
    api = bind(cluster, waiting_run(cluster))

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    cluster.faults += [Fault("GET", "/jobs", 503, then=interrupt), Fault("DELETE", "/jobs", 503, then=interrupt),
                       Fault("DELETE", "/jobs", 503, times=99)]  # fmt: skip
    with pytest.raises(LaunchError, match=r"delete Job plait-test.* The run could not be told to end. .*It goes on"):
        kubernetes.follow(api, waiting_run(cluster))
    assert ("Job", "plait-test") in cluster.store.objects


def test_an_error_of_our_own_ends_no_run(cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    api = bind(cluster, waiting_run(cluster))

    def broken(self: Binder, pods: object) -> None:
        raise KeyError("a key that a newer server leaves out")

    monkeypatch.setattr(Binder, "look", broken)
    with pytest.raises(KeyError):
        kubernetes.follow(api, waiting_run(cluster))
    assert ("Job", "plait-test") in cluster.store.objects


@pytest.mark.parametrize("what", ["jobs", "configmaps", "secrets", "services"])
def test_what_may_not_be_made_leaves_nothing(cluster: SmallCluster, what: str) -> None:
    cluster.faults.append(Fault("POST", f"/{what}", 403))
    with pytest.raises(LaunchError, match=r"does not let you create .* in namespace ml"):
        kubernetes.submit(KubernetesNamespace(), waiting_run(cluster))
    wait_until(lambda: nothing_left(cluster), "something is left")


def test_what_cannot_be_removed_again_is_named(cluster: SmallCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.faults += [Fault("POST", "/configmaps", 403), Fault("DELETE", "/jobs", 503, times=99)]
    with pytest.raises(LaunchError, match="does not let you create ConfigMap"):
        kubernetes.submit(KubernetesNamespace(patience=0.0), waiting_run(cluster))
    told = " ".join(capsys.readouterr().err.split())
    assert "To remove what may be left: kubectl -n ml delete job plait-test" in told


def test_a_name_that_is_taken_is_a_conflict_and_its_owner_stays(cluster: SmallCluster) -> None:
    kubernetes.submit(KubernetesNamespace(), waiting_run(cluster))
    cluster.store.patch("Job", "plait-test", {"metadata": {"labels": {"plait.dev/run": "somebody-elses"}}})
    with pytest.raises(LaunchError, match="already exists"):
        kubernetes.submit(KubernetesNamespace(), waiting_run(cluster))
    assert ("Job", "plait-test") in cluster.store.objects


@pytest.mark.parametrize("do, match", [
    (lambda cluster: None, "does not start.*ErrImagePull"),
    (lambda cluster: cluster.delete("Job", "plait-test", False, None), "was deleted by somebody else"),
])  # fmt: skip
def test_a_run_that_never_starts_is_ended_with_the_reason(
    cluster: SmallCluster, do: Callable[[SmallCluster], None], match: str
) -> None:
    api, run = KubernetesNamespace(), waiting_run(cluster, wait=1)
    kubernetes.submit(api, run)
    do(cluster)
    with pytest.raises(LaunchError, match=match):
        kubernetes.follow(api, run)
    wait_until(lambda: nothing_left(cluster), "something is left")


def test_ctrl_c_while_pods_wait_leaves_nothing(cluster: SmallCluster) -> None:
    api, run = KubernetesNamespace(), waiting_run(cluster, image="missing")
    kubernetes.submit(api, run)

    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.01)  # nobody has caught it yet: it would end the tests
        while not all(pod["spec"].get("nodeName") for pod in cluster.pods()) or len(cluster.pods()) < run.nodes:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert kubernetes.follow(api, run) == 128 + signal.SIGINT
    wait_until(lambda: nothing_left(cluster), "something is left")

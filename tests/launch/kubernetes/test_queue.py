"""Gated pods let in beside tainted nodes, by a cluster that answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from plait.api.admitting import AdmissionAction, AdmissionController, AdmitSettings
from plait.core.base.errors import JobError, LaunchError
from plait.formats.kubernetes.manifests import HOSTNAME
from plait.launch.kubernetes.queue import GATE, JCT, JOB, MARK, PREEMPTIBLE, KubernetesQueue
from plait.launch.live_queue import QueuedJob
from tests.support.kubernetes.in_memory import InMemory

TIER = "unit"
NOW, DUE = 1_000_000.0, 1_000_600.0
GATES = [{"name": GATE}]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    made = {"now": NOW}
    monkeypatch.setattr("plait.api.admitting.time.time", lambda: made["now"])
    return made


@pytest.fixture
def cluster() -> InMemory:
    """Two nodes of eight GPUs outside, two reserved."""
    found = InMemory()
    for name in ("a", "b", "y", "z"):
        node = found.add_node(name, gpus=8)
        if name in "yz":
            node["spec"]["taints"] = [{"key": "plait.dev/reserved", "value": "big", "effect": "NoSchedule"}]
    return found


def job(cluster: InMemory, name: str, *, pods: int = 1, gpus: int = 8, made: int = 0, **told: Any) -> None:
    """Its Job and its pods behind the gate."""
    kept = {JCT: told.pop("jct", ""), PREEMPTIBLE: str(told.pop("preemptible", False)).lower()}
    cluster.store.create({
        "kind": "Job", "spec": {"parallelism": pods},
        "metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:{made:02}Z"},
    })  # fmt: skip
    for at in range(pods):
        cluster.store.create({
            "kind": "Pod", "status": {"phase": "Pending"},
            "metadata": {"name": f"{name}-{at}", "labels": {JOB: name}, "annotations": dict(kept)},
            "spec": {"schedulingGates": list(GATES), "priority": told.get("priority", 0),
                     "containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]},
        })  # fmt: skip


def one_round(cluster: InMemory, **more: Any) -> list[tuple[str, str, str, tuple[str, ...]]]:
    done: list[AdmissionAction] = []
    queue = KubernetesQueue(cluster.api, {"big": DUE})
    AdmissionController(
        queue=queue, report=lambda one: done.append(one) if isinstance(one, AdmissionAction) else None, **more
    ).round()
    return [(one.what, one.job, one.where, one.nodes) for one in done]


def runs(cluster: InMemory, pod: str, node: str) -> None:
    """The scheduler has bound it."""
    cluster.store.get("Pod", pod)["spec"]["nodeName"] = node


def test_the_three_ways_in(cluster: InMemory) -> None:
    job(cluster, "long", pods=2, made=1)
    job(cluster, "other", made=2, jct="11m")
    job(cluster, "short", made=3, jct="10m")
    job(cluster, "spot", made=4, preemptible=True)
    assert one_round(cluster) == [
        ("start", "long", "outside", ("a", "b")), ("start", "short", "big", ("y",)), ("start", "spot", "big", ("z",)),
    ]  # fmt: skip
    pod = cluster.store.get("Pod", "short-0")
    assert pod["spec"]["schedulingGates"] == [] and pod["spec"]["nodeSelector"] == {HOSTNAME: "host-y"}
    assert pod["spec"]["activeDeadlineSeconds"] == 600
    assert pod["spec"]["tolerations"][0]["value"] == "big"
    outside = cluster.store.get("Pod", "long-1")
    assert "activeDeadlineSeconds" not in outside["spec"] and "tolerations" not in outside["spec"]
    assert cluster.store.get("Pod", "other-0")["spec"]["schedulingGates"] == GATES
    assert one_round(cluster) == [], "what was let in keeps its nodes until it runs"


def test_priorities_and_what_others_hold(cluster: InMemory) -> None:
    cluster.store.create({
        "kind": "Pod", "metadata": {"name": "foreign", "labels": {}}, "status": {"phase": "Running"},
        "spec": {"nodeName": "a", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "6"}}}]},
    })  # fmt: skip
    job(cluster, "early", gpus=4, pods=2, made=1)
    job(cluster, "urgent", gpus=8, made=2, priority=1000)
    assert one_round(cluster) == [("start", "urgent", "outside", ("b",))]


def test_pods_of_half_a_node_share_one(cluster: InMemory) -> None:
    job(cluster, "halves", gpus=4, pods=3)
    assert one_round(cluster) == [("start", "halves", "outside", ("a", "b"))]
    nodes = [cluster.store.get("Pod", f"halves-{at}")["spec"]["nodeSelector"][HOSTNAME] for at in range(3)]
    assert nodes == ["host-a", "host-a", "host-b"]


def test_who_is_there_when_the_planned_job_comes_is_sent_back(cluster: InMemory, clock: dict[str, float]) -> None:
    job(cluster, "outside", pods=2, made=1)
    job(cluster, "spot", made=2, preemptible=True)
    job(cluster, "late", made=3, jct="5m")
    assert len(one_round(cluster)) == 3
    for pod, node in (("outside-0", "a"), ("outside-1", "b"), ("spot-0", "y"), ("late-0", "z")):
        runs(cluster, pod, node)
    assert one_round(cluster) == []
    clock["now"] = DUE
    assert one_round(cluster, late_policy="wait", dry=True) == [("requeue", "spot", "", ())]
    assert one_round(cluster) == [("requeue", "late", "", ()), ("requeue", "spot", "", ())]
    deleted = {name for verb, kind, name, *_ in cluster.done if (verb, kind) == ("delete", "Pod")}
    assert deleted == {"spot-0", "late-0"}


def test_killed_half_way_it_begins_again(cluster: InMemory) -> None:
    """Between the two patches of a pod: it has its node and its gate; it is made anew."""

    def dies(verb: str, kind: str, name: str) -> None:
        if verb == "patch" and len([one for one in cluster.done if one[0] == "patch"]) == 1:
            raise KeyboardInterrupt

    job(cluster, "one", jct="1m")
    cluster.before = dies
    with pytest.raises(KeyboardInterrupt):
        one_round(cluster)
    cluster.before = lambda verb, kind, name: None
    assert MARK in cluster.store.get("Pod", "one-0")["metadata"]["annotations"]
    assert one_round(cluster)[0][:2] == ("restore", "one")
    assert not [pod for pod in cluster.pods() if pod["metadata"]["name"] == "one-0"]


def test_what_is_not_touched(cluster: InMemory) -> None:
    job(cluster, "part", pods=2)
    cluster.store.remove(cluster.store.get("Pod", "part-1"))
    job(cluster, "no-gpus", gpus=0)
    cluster.store.create({
        "kind": "Pod", "metadata": {"name": "other", "labels": {}}, "status": {"phase": "Pending"},
        "spec": {"schedulingGates": [{"name": "plait.dev/placement"}], "containers": []},
    })  # fmt: skip
    assert one_round(cluster) == [] and cluster.done == []
    view = KubernetesQueue(cluster.api, {"big": DUE}).look()
    assert view.passed == {"part": "1 of its 2 pods are there", "no-gpus": "not all of its pods ask for GPUs"}


def test_nodes_that_take_nobody(cluster: InMemory) -> None:
    cluster.node("a")["spec"]["unschedulable"] = True
    cluster.node("b")["spec"]["taints"] = [{"key": "plait.dev/reserved", "value": "else", "effect": "NoSchedule"}]
    job(cluster, "one")
    assert one_round(cluster) == []
    assert KubernetesQueue(cluster.api, {"big": DUE}).look().used == {"a": 8, "b": 8, "y": 0, "z": 0}
    with pytest.raises(LaunchError, match=r"plait\.dev/reserved=none"):
        KubernetesQueue(cluster.api, {"none": DUE}).look()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"reservation": ("big",)}, "Name the partition"),
        ({"partition": "p"}, "reservation=NAME"),
        ({"on": "kubernetes", "reservation": ("big",), "partition": "p"}, r"plait\.dev/admission"),
        ({"on": "kubernetes", "reservation": ("big",)}, "NAME@2030"),
    ],
)
def test_what_does_not_go_together(told: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        _ = AdmitSettings(**told).queue
    with pytest.raises(JobError, match="Give both"):
        _ = AdmitSettings(model="m").forecast


def test_who_does_not_say_how_long_it_runs_is_foreseen_once(cluster: InMemory) -> None:
    for name in ("a", "b"):
        cluster.node(name)["spec"]["unschedulable"] = True
    job(cluster, "told", made=1, jct="11m")
    job(cluster, "short", made=2)
    job(cluster, "long", made=3)
    asked: list[str] = []

    def forecast(jobs: Sequence[QueuedJob]) -> list[float]:
        asked.extend(one.name for one in jobs)
        return [500.0 if one.name == "short" else 700.0 for one in jobs]

    done: list[str] = []
    queue = KubernetesQueue(cluster.api, {"big": DUE})
    watched = AdmissionController(
        queue=queue,
        forecast=forecast,
        report=lambda one: done.append(one.job) if isinstance(one, AdmissionAction) else None,
    )
    watched.round()
    watched.round()
    assert (done, asked) == (["short"], ["long", "short"])

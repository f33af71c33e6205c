"""A run's own first pods look after its pods, where their service account may."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes import lost as kubernetes_fence
from plait.launch.kubernetes import pod
from plait.launch.kubernetes.pod import guarded
from tests.support.kubernetes.runs import small_cluster
from tests.support.kubernetes.server import Fault
from tests.support.lab import wait_until


def a_stuck_pod(cluster: object, name: str, run: str) -> None:
    cluster.store.create({  # type: ignore[attr-defined]
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"plait.dev/run": run}, "deletionTimestamp": "2026-01-01T00:00:00Z",
                     "deletionGracePeriodSeconds": 600, "ownerReferences": [{"uid": "gone", "kind": "Job"}]},
        "spec": {"nodeName": "n0", "hostname": name, "subdomain": run},
        "status": {"phase": "Running",
                   "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]},
    })  # fmt: skip


def guards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "guard"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "GUARD_LOOK", 0.02)
    monkeypatch.setattr(kubernetes_fence, "MARGIN", 0.1)


def test_a_pod_of_a_lost_node_is_freed_from_inside(tmp_path: Path) -> None:
    with small_cluster(tmp_path / "cluster", 1) as cluster:
        cluster.lost["n0"] = time.monotonic()
        a_stuck_pod(cluster, "ours", "plait-x")
        a_stuck_pod(cluster, "theirs", "plait-y")
        with guarded("plait-x", 1):
            wait_until(lambda: len(cluster.pods()) == 1, "it was not freed", seconds=30)
        assert [pod["metadata"]["name"] for pod in cluster.pods()] == ["theirs"]


@pytest.mark.parametrize("index", [2, 1000])
def test_two_pods_are_enough(tmp_path: Path, index: int) -> None:
    with small_cluster(tmp_path / "cluster", 1) as cluster, guarded("plait-x", index):
        assert not guards() and not cluster.asked


@pytest.mark.parametrize("why", ["no server", "no rights"])
def test_who_may_not_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    with small_cluster(tmp_path / "cluster", 1) as cluster:
        cluster.faults.append(Fault("GET", "/pods", 403, times=9))
        if why == "no server":

            def nobody(*_: object) -> None:
                raise LaunchError("No cluster of Kubernetes is known here.")

            monkeypatch.setattr("plait.launch.kubernetes.api.KubernetesNamespace.__init__", nobody)
        with guarded("plait-x", 0):
            wait_until(lambda: not guards(), "it looks on", seconds=30)
        assert len(cluster.asked) == (1 if why == "no rights" else 0)

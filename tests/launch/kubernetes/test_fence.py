"""Pods that do not end: which are deleted by force, when, and what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes import lost as kubernetes_fence
from plait.launch.kubernetes.api import Unavailable
from plait.launch.kubernetes.lost import LONG, MARGIN, LostPods
from tests.support.kubernetes.in_memory import InMemory, a_run

TIER = "unit"


class Scene:
    """Two pods, of which a test says what becomes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.now, self.said = InMemory(("n0", "n1")), 100.0, list[str]()
        monkeypatch.setattr(kubernetes_fence, "time", SimpleNamespace(monotonic=lambda: self.now))
        for index in range(2):
            self.cluster.add_pod(a_run(), index, phase="Running", nodeName=f"n{index}")
        self.fence = LostPods(self.cluster.api, self.said.append)

    def ends(self, reason: str = "DeletionByTaintManager", grace: int = 20) -> Any:
        pod = self.cluster.store.get("Pod", "plait-test-1")
        pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace}
        pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
        return pod

    def look_while_away(self, *verbs: str) -> None:
        """A look, later, while nobody answers requests of these verbs; without any, no request."""

        def before(verb: str, kind: str, name: str) -> None:
            if not verbs or verb in verbs:
                raise Unavailable("no answer.")

        self.cluster.before = before
        with pytest.raises(Unavailable):
            self.look(MARGIN + 1)
        self.cluster.before = lambda verb, kind, name: None

    def look(self, after: float = 0.0) -> list[tuple[Any, ...]]:
        self.now += after
        self.fence.look(self.cluster.pods())
        return [one for one in self.cluster.done if one[0] == "delete"]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


@pytest.mark.parametrize(
    ("reason", "grace", "bound"),
    [("DeletionByTaintManager", 600, MARGIN), ("DeletionByPodGC", 20, MARGIN), ("EvictionByEvictionAPI", 20, 20 + LONG),
     ("", 120, 120 + LONG)],
)  # fmt: skip
def test_a_pod_of_a_lost_node_is_deleted_by_force_and_any_other_much_later(
    scene: Scene, reason: str, grace: int, bound: float
) -> None:
    assert not scene.look(1e6)  # that it runs for long is no reason
    scene.ends(reason, grace)
    assert not scene.look()
    assert not scene.look(bound - 0.1)
    assert scene.look(0.2) == [("delete", "Pod", "plait-test-1", 0, False)]
    assert "its node n1 seems to be lost: it was given up and deleted by force, and another" in scene.said[0]
    assert [pod["metadata"]["name"] for pod in scene.cluster.pods()] == ["plait-test-0"]


def test_a_pod_that_ends_meanwhile_is_left_alone(scene: Scene) -> None:
    pod = scene.ends()
    scene.look()
    pod["status"]["phase"] = "Failed"
    assert not scene.look(1e6)


def test_a_pod_of_the_same_name_is_another(scene: Scene) -> None:
    scene.cluster.store.remove(scene.ends())
    scene.look()
    scene.cluster.add_pod(a_run(), 1, phase="Running", nodeName="n0")
    scene.ends()
    assert not scene.look(MARGIN + 1)
    assert scene.look(MARGIN + 1)


def test_who_may_not_is_told_so_and_not_without_end(scene: Scene) -> None:
    def refuse(verb: str, kind: str, name: str) -> None:
        raise LaunchError("pods is forbidden.")

    scene.ends()
    scene.look()
    scene.cluster.before = refuse
    for _ in range(100):
        scene.look(1.0)
    assert len(scene.said) == 10  # of a hundred looks
    assert scene.said[0] == "pod plait-test-1 on n1 does not end, and cannot be deleted by force: pods is forbidden."


def test_a_server_that_is_away_is_asked_by_who_follows(scene: Scene) -> None:
    scene.ends()
    scene.look()
    scene.look_while_away()
    scene.look()
    assert scene.look(MARGIN + 1)


def test_a_server_that_goes_away_before_the_second_request_is_asked_it_again(scene: Scene) -> None:
    """Set to Failed and not deleted, a pod of a lost node would keep its Job from ever being
    deleted."""
    scene.ends()
    scene.look()
    scene.look_while_away("delete")
    assert scene.cluster.store.get("Pod", "plait-test-1")["status"]["phase"] == "Failed"
    LostPods(scene.cluster.api, scene.said.append).look(scene.cluster.pods())  # whoever looks
    assert [pod["metadata"]["name"] for pod in scene.cluster.pods()] == ["plait-test-0"]

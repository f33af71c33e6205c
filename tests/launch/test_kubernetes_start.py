"""A run's start on Kubernetes: its objects, pods that do not start."""

from __future__ import annotations

import pytest

from plait.core.base.errors import LaunchError
from plait.formats.kubernetes.manifests import CONTAINER
from plait.launch.kubernetes import follow as kubernetes
from plait.launch.kubernetes.follow import Hopeless, removal, submit
from tests.support.kubernetes.in_memory import InMemory, a_run
from tests.support.kubernetes.scene import Scene

TIER = "unit"


def made(cluster: InMemory) -> list[str]:
    return [kind for verb, kind, *_ in cluster.done if verb == "create"]


def test_all_objects_of_a_run_are_made_the_workload_first() -> None:
    cluster, run = InMemory(), a_run()
    submit(cluster.api, run)
    assert made(cluster)[0] == "Job" and len(made(cluster)) == 1 + len(run.owned_objects())
    owner = cluster.store.get("Job", run.name)["metadata"]["uid"]
    for kind in made(cluster)[1:]:
        (one,) = cluster.store.of(kind)
        assert one["metadata"]["ownerReferences"][0]["uid"] == owner


@pytest.mark.parametrize("also", [False, True])
def test_what_is_refused_is_taken_back_or_named(monkeypatch: pytest.MonkeyPatch, also: bool) -> None:
    cluster, run, said = InMemory(), a_run(), list[str]()
    monkeypatch.setattr(kubernetes, "say", said.append)

    def refuse(verb: str, kind: str, name: str) -> None:
        if kind == "Secret" or (also and verb == "delete"):
            raise LaunchError(f"you may not {verb}.")

    cluster.before = refuse
    with pytest.raises(LaunchError, match="you may not create"):
        submit(cluster.api, run)
    assert (("Job", run.name) in cluster.store.objects) == also
    left = "you may not delete. To remove what may be left: kubectl -n ml delete job plait-test"
    assert said == ([left] if also else [])
    assert removal(cluster.api, run) == "kubectl -n ml delete job plait-test"


def starting(scene: Scene, reason: str | None, message: str | None = None) -> None:
    """Pod 1 has a node and waits."""
    scene.phase("Running", "Pending")
    waiting = {key: value for key, value in (("reason", reason), ("message", message)) if value}
    scene.pod(1)["status"]["containerStatuses"] = [{"name": CONTAINER, "state": {"waiting": waiting}}]


@pytest.mark.parametrize("reason", kubernetes.HOPELESS)
def test_a_pod_that_will_not_start_by_waiting_ends_the_run(scene: Scene, reason: str) -> None:
    starting(scene, reason, "no such image")
    with pytest.raises(Hopeless, match=f"Pod plait-test-1 does not start, .* ended: {reason}. no such image"):
        scene.follow()
    assert scene.deleted() == [("Job", "plait-test", None, False)]


@pytest.mark.parametrize(("reason", "said"), [("ImagePullBackOff", r"ImagePullBackOff\.$"), (None, "no reason given")])
def test_a_pod_that_waits_too_long_ends_the_run(scene: Scene, reason: str | None, said: str) -> None:
    starting(scene, reason)
    scene.then = [None] * 1000
    with pytest.raises(Hopeless, match=f"the run was ended: {said}"):
        scene.follow()
    assert sum(scene.slept) == 60.5  # more than kubernetes.wait


def test_pods_without_a_node_may_wait_for_ever_and_others_are_looked_at(scene: Scene) -> None:
    starting(scene, "ErrImageNeverPull")
    scene.phase("Pending", "Pending")
    del scene.pod(0)["spec"]["nodeName"]
    node = scene.pod(1)["spec"].pop("nodeName")
    scene.then = [*[None] * 150, lambda: scene.pod(1)["spec"].update(nodeName=node)]
    with pytest.raises(Hopeless, match="Pod plait-test-1"):
        scene.follow()
    assert len(scene.slept) == 151


def test_a_pod_of_the_same_name_waits_anew(scene: Scene) -> None:
    starting(scene, None)

    def anew() -> None:
        scene.cluster.store.remove(scene.pod(1))
        scene.cluster.add_pod(scene.run, 1, nodeName="n1")

    scene.then = [*[None] * 100, anew, *[None] * 200]
    with pytest.raises(Hopeless):
        scene.follow()
    assert sum(scene.slept) == 101 * 0.5 + 60.5


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        ({}, ""),
        ({"reason": "ContainerCreating"}, ""),
        ({"reason": "PodInitializing", "message": "x"}, ""),
        ({"reason": "ImagePullBackOff", "message": "no such image"}, "pod 1: ImagePullBackOff no such image"),
        ({"reason": "ImagePullBackOff"}, "pod 1: ImagePullBackOff"),
    ],
)
def test_why_a_pod_waits(scene: Scene, waiting: dict[str, str], said: str) -> None:
    starting(scene, waiting.get("reason"), waiting.get("message"))
    assert kubernetes.waiting(scene.pod(1)) == said

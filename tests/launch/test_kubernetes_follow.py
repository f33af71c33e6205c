"""Following a run on Kubernetes to its end: its status, its head's words, what is said of it
meanwhile."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from plait.core.base.errors import PlaitError
from plait.formats.kubernetes.manifests import CONTAINER
from plait.launch.kubernetes import follow as kubernetes
from plait.launch.kubernetes.api import NotFound
from plait.launch.kubernetes.follow import Failed
from tests.support.kubernetes.scene import Scene

TIER = "unit"


@pytest.mark.parametrize(("kind", "status"), [("Complete", 0), ("Completed", 0)])
def test_a_run_that_ends_well_has_status_0(scene: Scene, kind: str, status: int) -> None:
    scene.phase("Running", "Running")
    scene.then = [lambda: scene.ends("Suspended"), lambda: scene.ends(kind, "False"), lambda: scene.ends(kind)]
    scene.then += [lambda: scene.phase("Succeeded", "Succeeded")]
    scene.last_words(message="{}")
    assert scene.follow() == status
    assert set(scene.slept) == {kubernetes.LOOK} and len(scene.slept) == 4
    assert not scene.deleted()
    assert scene.said == ["plait-test: 2 of 2 pods run"]
    assert set(scene.followed) == {"plait-test-0"}


def test_the_head_has_a_while_for_its_last_words(scene: Scene) -> None:
    """Another pod may have ended the Job before."""
    scene.phase("Running", "Succeeded")
    scene.ends("Complete")
    scene.last_words()
    scene.then = [None] * 100
    assert scene.follow() == 0
    assert kubernetes.SETTLING <= sum(scene.slept) <= kubernetes.SETTLING + 2 * kubernetes.LOOK


@pytest.mark.parametrize("change", [
    lambda scene: scene.phase("Failed"),
    lambda scene: scene.phase("Succeeded"),
    lambda scene: scene.pod(0)["status"].pop("containerStatuses"),
    lambda scene: scene.cluster.store.remove(scene.pod(0)),
])  # fmt: skip
def test_nobody_waits_for_a_head_that_says_no_more(scene: Scene, change: Callable[[Scene], None]) -> None:
    scene.phase("Running", "Running")
    scene.last_words()
    scene.ends("Complete")
    change(scene)
    assert scene.follow() == 0
    assert not scene.slept


def words(status: int, message: str = "") -> str:
    return json.dumps({"status": status, "message": message} if message else {"status": status})


def test_a_run_that_fails_has_its_heads_error_once(scene: Scene) -> None:
    scene.phase("Failed", "Failed")
    scene.ends("Failed")
    scene.last_words(message=words(3, "the data are gone"))
    with pytest.raises(PlaitError, match=r"^the data are gone$") as failed:
        scene.follow()
    assert failed.value.exit_status == 3
    scene.shown = "plait: the data are gone\n"
    assert scene.follow() == 3
    scene.last_words(message=words(4))
    assert scene.follow() == 4


@pytest.mark.parametrize("message", [None, "{}", "no JSON", "[1]", "7", words(0)])
def test_a_run_that_fails_without_words_is_told_by_its_pods(scene: Scene, message: str | None) -> None:
    scene.phase("Failed", "Failed")
    scene.ends("Failed")
    scene.last_words(0, message=message, exitCode=93, reason="Error")
    scene.last_words(1, exitCode=137)
    scene.pod(1)["status"]["reason"] = "Evicted"
    with pytest.raises(Failed) as failed:
        scene.follow()
    assert str(failed.value) == (
        "The run plait-test has failed: pod 0 on n0: status 93 (not started again) Error; pod 1 on n1: status 137 "
        "Evicted."
    )
    assert not scene.deleted()


def test_of_pods_only_those_that_failed_are_named(scene: Scene) -> None:
    scene.phase("Succeeded", "Failed")
    scene.last_words(1, exitCode=1)
    del scene.pod(1)["spec"]["nodeName"]
    scene.ends("Failed")
    with pytest.raises(Failed, match=r"^The run plait-test has failed: pod 1 on no node: status 1\.$"):
        scene.follow()
    scene.phase("Succeeded", "Succeeded")
    with pytest.raises(Failed, match=r"^The run plait-test has failed\.$"):
        scene.follow()


def test_the_newest_head_is_asked_also_one_that_is_gone(scene: Scene) -> None:
    scene.phase("Failed", "Failed")
    scene.last_words(message=words(3, "old"))
    scene.ends("Failed")
    newer = scene.cluster.add_pod(scene.run, 0, name="newer", phase="Failed")
    newer["status"]["containerStatuses"] = [{"name": CONTAINER, "state": {"terminated": {"message": words(5, "new")}}}]
    newer["metadata"]["creationTimestamp"] = "2999-01-01T00:00:00Z"
    with pytest.raises(PlaitError, match="new"):
        scene.follow()
    scene.cluster.store.remove(newer)
    scene.gone = [newer]
    scene.followed.clear()
    with pytest.raises(PlaitError, match="new"):
        scene.follow()
    assert scene.followed[-1] == "newer"  # its log may not have been seen
    for one in (newer, scene.pod(0)):  # made in the same second
        one["metadata"]["creationTimestamp"] = "2000-01-01T00:00:00Z"
    newer["status"]["startTime"], scene.pod(0)["status"]["startTime"] = "1", "2"
    with pytest.raises(PlaitError, match="old"):
        scene.follow()


def test_a_run_that_somebody_else_deletes_is_said_so(scene: Scene) -> None:
    scene.then = [lambda: scene.cluster.store.remove(scene.cluster.store.get("Job", "plait-test"))]
    with pytest.raises(NotFound, match=r"The run plait-test was deleted by somebody else\."):
        scene.follow()


def test_what_runs_is_said_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, kueue_queue="team")

    def suspended(suspend: bool) -> None:
        scene.cluster.store.get("Job", "plait-test")["spec"]["suspend"] = suspend

    suspended(True)
    scene.phase("Pending", "Pending")
    waits = [{"reason": "Unschedulable", "message": "0 nodes fit"}]

    def no_room() -> None:
        suspended(False)
        scene.pod(1)["status"]["conditions"] = waits

    def one_runs() -> None:
        scene.phase("Running", "Pending")

    def over() -> None:
        scene.pod(1)["metadata"]["deletionTimestamp"] = "now"  # what it waits for is no news any more

    scene.then = [no_room, None, one_runs, over, lambda: scene.phase("Running", "Running"),
                  lambda: scene.phase("Running", "Succeeded"), lambda: scene.phase("Succeeded", "Succeeded"),
                  lambda: scene.ends("Complete")]  # fmt: skip
    assert scene.follow() == 0
    assert scene.said == [
        "plait-test: 0 of 2 pods run; it waits in the queue team",
        "plait-test: 0 of 2 pods run; pod 1: 0 nodes fit",
        "plait-test: 1 of 2 pods run; pod 1: 0 nodes fit",
        "plait-test: 1 of 2 pods run",
        "plait-test: 2 of 2 pods run",
    ]


def test_the_first_signal_ends_with_grace(scene: Scene) -> None:
    scene.phase("Running", "Running")

    def ended() -> None:
        scene.phase("Succeeded", "Succeeded")

    scene.then = [lambda: scene.signals.append(signal.SIGTERM), None, ended]
    assert scene.follow() == 128 + signal.SIGTERM
    assert scene.said[1:] == ["SIGTERM: ranks have 20 s to save the run (Ctrl-C to end it at once)"]
    assert scene.deleted() == [("Job", "plait-test", None, True)]  # told once
    assert len(scene.slept) == 3  # until the last pod is over


@pytest.mark.parametrize(
    ("message", "status"),
    [(words(0), 0), (words(3), 3), (words(128), 128), (words(129), 143), (words(137), 143), ("", 143)],
)
def test_a_run_that_was_asked_to_end_has_the_heads_status_if_that_ended_by_itself(
    scene: Scene, message: str, status: int
) -> None:
    scene.phase("Succeeded", "Succeeded")
    scene.last_words(message=message)
    scene.signals.append(signal.SIGTERM)
    assert scene.follow() == status


def test_the_second_signal_ends_all_pods_at_once(scene: Scene) -> None:
    scene.phase("Running", "Running")
    scene.then = [lambda: scene.signals.extend([signal.SIGINT, signal.SIGINT])]
    assert scene.follow() == 128 + signal.SIGINT
    assert scene.said[-1] == "ending all ranks at once; what was not saved is lost"
    assert [one for one in scene.deleted() if one[0] == "Pod"] == [
        ("Pod", "plait-test-0", 0, False), ("Pod", "plait-test-1", 0, False),
    ]  # fmt: skip
    assert [one for one in scene.deleted() if one[0] == "Job"] == [("Job", "plait-test", None, False)]


def test_a_run_that_is_ending_is_not_judged_or_told_of(scene: Scene) -> None:
    """Pods that wait are no news then, and a binder does nothing."""
    scene.phase("Running", "Running")
    kept = scene.cluster.store.get("Job", "plait-test")

    def stays() -> None:
        scene.signals.append(signal.SIGTERM)

    scene.then = [stays, lambda: scene.cluster.store.create(kept), lambda: scene.phase("Running", "Pending"),
                  lambda: scene.ends("Failed")]  # fmt: skip
    assert scene.follow() == 128 + signal.SIGTERM
    assert len(scene.said) == 2

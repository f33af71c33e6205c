"""When a Job lets failed pods wait for so long that another takes its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from plait.formats.kubernetes.manifests import RUN
from plait.launch.kubernetes import lost as kubernetes_renewal
from plait.launch.kubernetes.lost import LONGEST, RENEWAL_BACKOFF, Backoff, successor
from tests.support.kubernetes.in_memory import a_run

TIER = "unit"


class Scene:
    """Two pods of a Job, one of which fails again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: Literal["Job", "JobSet"] = "Job", **values: Any) -> None:
        self.now, self.gone, self.made = 1000.0, list[Any](), 0
        monkeypatch.setattr(kubernetes_renewal, "time", SimpleNamespace(monotonic=lambda: self.now))
        run = a_run(**values)
        self.backoff = Backoff(run if kind == "Job" else kubernetes_renewal.replace(run, kind=kind))
        self.pods = [self.pod(), self.pod()]

    def pod(self) -> Any:
        self.made += 1
        return {"metadata": {"uid": str(self.made)}, "status": {"phase": "Running"}}

    def left(self) -> float:
        return self.backoff.left(self.pods, self.gone)

    def fails(self) -> None:
        self.pods[1]["status"]["phase"] = "Failed"

    def again(self) -> None:
        self.pods[1] = self.pod()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_each_failed_pod_doubles_the_wait_as_the_controller_does(scene: Scene) -> None:
    """https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-backoff-failure-policy"""
    assert scene.left() == 0.0
    for wait in (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, LONGEST, LONGEST):
        scene.fails()
        assert scene.left() == wait
        assert (wait > RENEWAL_BACKOFF) == (wait >= 80.0)  # three failures are waited for, and the fourth is not
        scene.now += wait / 2
        assert scene.left() == wait / 2
        scene.again()
        assert scene.left() == 0.0  # nothing is missing, however many have failed


def test_a_pod_that_is_gone_has_failed_unless_it_succeeded(scene: Scene) -> None:
    ended = scene.pods.pop()
    ended["status"]["phase"] = "Succeeded"
    scene.gone.append(ended)
    assert scene.left() == 0.0
    ended["status"]["phase"] = "Running"
    assert scene.left() == 10.0
    scene.pods.append({**scene.pod(), "metadata": {"uid": "x", "deletionTimestamp": "now"}})
    assert scene.left() == 10.0  # one that is about to end is not there


def test_a_run_of_months_has_a_wait(scene: Scene) -> None:
    scene.gone = [scene.pod() for _ in range(5000)]
    scene.pods.pop()
    assert scene.left() == LONGEST


@pytest.mark.parametrize(
    ("kind", "values"), [("JobSet", {}), ("Job", {"kueue_queue": "team"}), ("Job", {"max_restarts": 0})]
)
def test_who_has_no_such_wait_keeps_its_workload(
    monkeypatch: pytest.MonkeyPatch, kind: Literal["Job", "JobSet"], values: dict[str, Any]
) -> None:
    scene = Scene(monkeypatch, kind, **values)
    scene.gone = [scene.pod() for _ in range(9)]
    scene.pods.pop()
    assert scene.left() == 0.0


def test_the_next_job_is_the_same_run_under_another_name() -> None:
    run = a_run()
    first = successor(run)
    second = successor(first)
    assert len({run.name, first.name, second.name}) == 3
    assert second.origin == first.origin == run.name
    for one in (run, first, second):
        env = {item["name"]: item.get("value") for item in one.template()["spec"]["containers"][0]["env"]}
        assert env["PLAIT_RUN"] == run.name
        assert one.template()["metadata"]["labels"][RUN] == one.name
        assert one.head.startswith(f"{one.name}-0.")

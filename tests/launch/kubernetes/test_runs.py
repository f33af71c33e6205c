"""Runs in a cluster that nobody follows: which there are, how they end, what pod 0 has printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from plait.api import stopping
from plait.api.logs import pod_log_lines
from plait.api.runs import cluster_runs
from plait.api.stopping import StopResult, stop_in_cluster
from plait.core.base.errors import LaunchError
from plait.formats.kubernetes.manifests import PodRun
from plait.launch.kubernetes.api import StreamBroken
from plait.launch.kubernetes.follow import submit
from plait.launch.kubernetes.lost import successor
from plait.launch.kubernetes.objects import ClusterRun, run_in, runs_in
from tests.support.kubernetes.in_memory import InMemory, a_run

TIER = "unit"


def sent(cluster: InMemory, run: PodRun, *phases: str) -> PodRun:
    """A run whose pods are in these phases."""
    submit(cluster.api, run)
    for index, phase in enumerate(phases):
        cluster.add_pod(run, index, phase=phase, **run.template()["spec"])
    return run


def named(name: str, **settings: Any) -> PodRun:
    return replace(a_run(**settings), name=name)


def ends(cluster: InMemory, kind: str, name: str, how: str) -> None:
    cluster.store.get(kind, name)["status"] = {"conditions": [{"type": how, "status": "True"}]}


def stop(cluster: InMemory, name: str, *, at_once: bool = False, wait: float = 0.0) -> tuple[StopResult, list[str]]:
    said = list[str]()
    return stop_in_cluster(cluster.api, name, at_once=at_once, wait=wait, say=said.append), said


# ---- which there are ----


def test_a_namespace_without_runs_says_so() -> None:
    cluster = InMemory()
    cluster.store.create({"kind": "Job", "metadata": {"name": "somebody-elses"}, "spec": {}})
    assert not runs_in(cluster.api)
    assert list(cluster_runs(cluster.api).parts()) == ["There are no runs in the namespace ml."]
    with pytest.raises(LaunchError, match=r"^No run x is in the namespace ml\. There is none\.$"):
        run_in(cluster.api, "x")


def test_each_state_is_told() -> None:
    cluster = InMemory()
    sent(cluster, named("queued"))
    sent(cluster, named("pending"), "Pending", "Pending")
    sent(cluster, named("half"), "Pending", "Running")
    sent(cluster, named("good"), "Succeeded", "Succeeded")
    sent(cluster, named("bad"), "Failed", "Running")
    ends(cluster, "Job", "good", "Complete")
    ends(cluster, "Job", "bad", "Failed")
    found = [(one.name, one.state, one.pods) for one in runs_in(cluster.api)]
    assert found == [("queued", "waiting", 0), ("pending", "waiting", 2), ("half", "running", 2),
                     ("good", "ended", 2), ("bad", "failed", 2)]  # fmt: skip
    runs = cluster_runs(cluster.api).to_dict()["runs"]
    assert runs[0]["started"] and {one["origin"] for one in runs} == {"queued", "pending", "half", "good", "bad"}
    with pytest.raises(LaunchError, match=r"There are queued, pending, half, good, bad\.$"):
        run_in(cluster.api, "x")


def test_a_jobset_is_one_run_and_not_asked_for_where_it_is_unknown() -> None:
    cluster, asked = InMemory(), list[str]()
    cluster.before = lambda verb, kind, name: asked.append(kind)
    assert not runs_in(cluster.api) and "JobSet" not in asked
    cluster.jobset = True
    run = sent(cluster, replace(a_run(), kind="JobSet"), "Running")
    child = run.workload()["spec"]["replicatedJobs"][0]["template"]
    metadata = {"name": f"{run.name}-ranks-0", "labels": run.labels}
    cluster.store.create({"kind": "Job", "metadata": metadata, "spec": child["spec"]})
    sent(cluster, named("other"))
    assert [(one.name, one.kind) for one in runs_in(cluster.api)] == [(run.name, "JobSet"), ("other", "Job")]


def test_a_run_is_found_by_the_job_that_it_began_as() -> None:
    """Its folder knows it by that."""
    cluster = InMemory()
    first = sent(cluster, a_run(), "Running")
    later = sent(cluster, successor(first), "Running")
    assert run_in(cluster.api, first.name).name == first.name  # while it is still there
    cluster.store.remove(cluster.store.get("Job", first.name))
    found = run_in(cluster.api, first.name)
    assert found == run_in(cluster.api, later.name)
    assert (found.name, found.origin) == (later.name, first.name)


# ---- how they end ----


@pytest.mark.parametrize("how", ["Complete", "Failed"])
def test_a_run_that_has_ended_is_left_as_it_is(how: str) -> None:
    cluster = InMemory()
    run = sent(cluster, a_run(), "Succeeded")
    ends(cluster, "Job", run.name, how)
    before = len(cluster.done)
    done, said = stop(cluster, run.name, at_once=True)
    state = "ended" if how == "Complete" else "failed"
    assert done == StopResult(f"{run.name} does not run: it has {state}; nothing was stopped", True)
    assert not said and len(cluster.done) == before


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_a_run_is_stopped_with_grace(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.001)
    cluster = InMemory()
    cluster.jobset = kind == "JobSet"
    run = sent(cluster, replace(a_run(), kind=kind), "Running", "Running")
    sent(cluster, named("other"), "Running")
    done, said = stop(cluster, run.name, wait=0.01)  # its pods save
    assert done == StopResult(f"{run.name} still runs after 0.01 s; plait stop {run.name} --on kubernetes:ml --kill "
                           "ends it at once, without what it has not saved", False)  # fmt: skip
    assert said == [f"asking {kind} {run.name} to save and end"]
    assert cluster.done[-1] == ("delete", kind, run.name, None, True)
    assert [one.name for one in runs_in(cluster.api)] == ["other"]


def test_what_still_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.001)
    cluster = InMemory()
    run, looks = sent(cluster, a_run(), "Running"), 0

    def before(verb: str, kind: str, name: str) -> None:
        nonlocal looks
        looks += verb == "list" and kind == "Pod" and "delete" in {one[0] for one in cluster.done}
        if looks == 3:
            looks += 1
            cluster.store.remove(cluster.store.get("Pod", f"{run.name}-0"))

    cluster.before = before
    done, _ = stop(cluster, run.name, wait=20)
    assert done == StopResult(f"{run.name} is stopped", True) and looks > 3
    with pytest.raises(LaunchError, match=f"No run {run.name} is in the namespace ml"):
        stop(cluster, run.name)


def test_a_run_is_killed_and_makes_no_pods_anew() -> None:
    cluster = InMemory()
    run = sent(cluster, a_run(), "Running", "Running")
    sent(cluster, named("other"), "Running")
    done, said = stop(cluster, run.name, at_once=True)
    assert done == StopResult(f"{run.name} is stopped", True) and said == [f"ending Job {run.name} at once"]
    deleted = [one[1:] for one in cluster.done if one[0] == "delete"]
    assert deleted == [("Job", run.name, None, False), ("Pod", f"{run.name}-0", 0, False),
                       ("Pod", f"{run.name}-1", 0, False)]  # fmt: skip
    assert [one.name for one in runs_in(cluster.api)] == ["other"]


# ---- what pod 0 has printed ----


class Talking(InMemory):
    """Whose pod 0 prints, until the connection breaks off with an HTTP status, if it does."""

    status: int | None = None

    def follow_log(self, pod: str) -> Iterator[bytes]:
        assert pod == "plait-test-0"
        if self.status in (400, 404):
            raise StreamBroken("refused", self.status)
        yield b"2026-01-01T00:00:00Z step 1  loss 2.5"
        yield b"2026-01-01T00:00:01Z \xff\x1b[31m"
        if self.status is not None:
            raise StreamBroken("reset by peer", self.status)


def test_the_log_of_pod_0_is_told_line_by_line() -> None:
    cluster = Talking()
    run = sent(cluster, a_run(), "Running", "Running")
    said = list(pod_log_lines(cluster.api, run.name))
    assert said == ["[pod 0] step 1  loss 2.5", "[pod 0] \N{REPLACEMENT CHARACTER}\x1b[31m"]
    with pytest.raises(LaunchError, match="No run x"):
        list(pod_log_lines(cluster.api, "x"))


@pytest.mark.parametrize(
    ("status", "told"),
    [(400, r"plait-test-0 has not begun\. pod 0: ImagePullBackOff no such image\.$"), (404, "plait-test-0 is gone"),
     (0, "breaks off: reset by peer"), (500, "breaks off: reset by peer")],
)  # fmt: skip
def test_a_log_that_is_not_told_says_why(status: int, told: str) -> None:
    cluster = Talking()
    cluster.status = status
    run = sent(cluster, a_run(), "Pending")
    why = {"reason": "ImagePullBackOff", "message": "no such image"}
    cluster.store.get("Pod", f"{run.name}-0")["status"]["containerStatuses"] = [
        {"name": "ranks", "state": {"waiting": why}}
    ]
    with pytest.raises(LaunchError, match=told):
        list(pod_log_lines(cluster.api, run.name))


def test_a_run_without_pods_says_what_it_does() -> None:
    cluster = InMemory()
    run = sent(cluster, a_run())
    with pytest.raises(LaunchError, match=rf"^{run.name} has no pod 0 \(any more\): it is waiting\.$"):
        list(pod_log_lines(cluster.api, run.name))
    assert isinstance(run_in(cluster.api, run.name), ClusterRun)

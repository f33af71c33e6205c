"""Runs in a cluster that nobody follows: listed, stopped, their pods' logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes_api import Dropped, KubernetesNamespace
from plait.launch.kubernetes_manifests import RUN, Object
from plait.launch.kubernetes_objects import ending, index_of, newest


@dataclass(frozen=True)
class ClusterRun:
    """A run, as its Job or JobSet says. state: waiting, running, ended or failed."""

    name: str
    kind: str
    state: str
    started: str
    pods: int


def runs_in(cluster: KubernetesNamespace) -> list[ClusterRun]:
    """All of the namespace, the newest last. Raises LaunchError."""
    kinds = ("Job", "JobSet") if cluster.has_jobset() else ("Job",)
    found, names = list[ClusterRun](), set[str]()
    for kind in reversed(kinds):  # a JobSet before the Jobs that it has made
        for one in cluster.list(kind, RUN)[0]:
            name = one["metadata"]["labels"][RUN]
            if name not in names:
                names.add(name)
                pods = cluster.list("Pod", f"{RUN}={name}")[0]
                found.append(ClusterRun(name, kind, _state(one, pods), one["metadata"].get("creationTimestamp", ""),
                                        len(pods)))  # fmt: skip
    return sorted(found, key=lambda one: one.started)


def _state(workload: Object, pods: list[Object]) -> str:
    well = ending(workload)
    if well is not None:
        return "ended" if well else "failed"
    return "running" if any(pod.get("status", {}).get("phase") == "Running" for pod in pods) else "waiting"


def run_in(cluster: KubernetesNamespace, name: str) -> ClusterRun:
    """Raises LaunchError for a run that is not there, with those that are."""
    found = {one.name: one for one in runs_in(cluster)}
    if name not in found:
        there = f"There {'are' if len(found) > 1 else 'is'} {', '.join(found)}" if found else "There is none"
        raise LaunchError(f"No run {name} is in the namespace {cluster.namespace}. {there}.")
    return found[name]


def end(cluster: KubernetesNamespace, run: ClusterRun, *, at_once: bool) -> None:
    """As the second Ctrl-C of who follows it does, if ``at_once``, else as the first."""
    if at_once:
        for pod in cluster.list("Pod", f"{RUN}={run.name}")[0]:
            cluster.delete("Pod", pod["metadata"]["name"], grace=0)
    cluster.delete(run.kind, run.name, wait_for_pods=not at_once)


def is_there(cluster: KubernetesNamespace, run: ClusterRun) -> bool:
    """Whether anything of it lives."""
    return bool(cluster.list(run.kind, f"{RUN}={run.name}")[0] or cluster.list("Pod", f"{RUN}={run.name}")[0])


def pod_lines(cluster: KubernetesNamespace, name: str) -> Iterator[tuple[int, bytes]]:
    """(the pod's index, a line) of pod 0, which prints what rank 0 prints, until it ends."""
    pod = newest(cluster.list("Pod", f"{RUN}={name}")[0])
    if pod is None:
        return
    try:
        for line in cluster.follow_log(pod["metadata"]["name"]):
            yield index_of(pod), line.partition(b" ")[2]
    except Dropped as dropped:
        if dropped.status not in (400, 404):
            raise LaunchError(f"The log of pod {pod['metadata']['name']} breaks off: {dropped}") from None

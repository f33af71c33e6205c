"""Runs in a cluster that nobody follows: listed, stopped, their pods' logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes_api import Dropped, KubernetesNamespace
from plait.launch.kubernetes_manifests import CONTAINER, RUN, Object
from plait.launch.kubernetes_objects import ending, index_of, newest, waiting


@dataclass(frozen=True)
class ClusterRun:
    """A run, as its Job or JobSet says. state: waiting, running, ended or failed. origin: the Job that it
    began as, by which its folder knows it; another, once one has taken its place."""

    name: str
    kind: str
    state: str
    started: str
    pods: int
    origin: str


def runs_in(cluster: KubernetesNamespace) -> list[ClusterRun]:
    """All of the namespace, the newest last. Raises LaunchError."""
    kinds = ("JobSet", "Job") if cluster.has_jobset() else ("Job",)  # a JobSet before the Jobs that it has made
    workloads, pods = dict[str, Object](), dict[str, list[Object]]()
    for kind in kinds:
        for one in cluster.list(kind, RUN)[0]:
            workloads.setdefault(_run_of(one), one | {"kind": kind})  # which items of a list need not say
    for pod in cluster.list("Pod", RUN)[0]:
        pods.setdefault(_run_of(pod), []).append(pod)
    found = [_seen(name, one, pods.get(name, [])) for name, one in workloads.items()]
    return sorted(found, key=lambda one: (one.started, one.name))


def _run_of(one: Object) -> str:
    return one["metadata"]["labels"][RUN]


def _seen(name: str, workload: Object, pods: list[Object]) -> ClusterRun:
    variables = {one["name"]: one.get("value") for pod in pods[:1] for one in _container(pod).get("env", [])}
    return ClusterRun(
        name=name, kind=workload["kind"], state=_state(workload, pods),
        started=workload["metadata"].get("creationTimestamp", ""), pods=len(pods),
        origin=variables.get("PLAIT_RUN") or name,
    )  # fmt: skip


def _container(pod: Object) -> Object:
    return next((one for one in pod["spec"].get("containers", []) if one["name"] == CONTAINER), {})


def _state(workload: Object, pods: list[Object]) -> str:
    well = ending(workload)
    if well is not None:
        return "ended" if well else "failed"
    return "running" if any(pod.get("status", {}).get("phase") == "Running" for pod in pods) else "waiting"


def run_in(cluster: KubernetesNamespace, name: str) -> ClusterRun:
    """By its name, or by that of the Job that it began as. Raises LaunchError for a run that is not there,
    with those that are."""
    runs = runs_in(cluster)
    found = {one.origin: one for one in runs} | {one.name: one for one in runs}
    if name not in found:
        names = [one.name for one in runs]
        there = f"There {'are' if len(names) > 1 else 'is'} {', '.join(names)}" if names else "There is none"
        raise LaunchError(f"No run {name} is in the namespace {cluster.namespace}. {there}.")
    return found[name]


def end(cluster: KubernetesNamespace, run: ClusterRun, *, at_once: bool) -> None:
    """Let ranks save and end, or kill them. Its Job goes first: it would make pods anew."""
    pods = cluster.list("Pod", f"{RUN}={run.name}")[0] if at_once else ()
    cluster.delete(run.kind, run.name, wait_for_pods=not at_once)
    for pod in pods:
        cluster.delete("Pod", pod["metadata"]["name"], grace=0)


def is_there(cluster: KubernetesNamespace, run: ClusterRun) -> bool:
    """Whether anything of it lives."""
    return bool(cluster.list(run.kind, f"{RUN}={run.name}")[0] or cluster.list("Pod", f"{RUN}={run.name}")[0])


def pod_lines(cluster: KubernetesNamespace, run: ClusterRun) -> Iterator[tuple[int, bytes]]:
    """(the pod's index, a line) of pod 0, which prints what rank 0 prints, until it ends. Raises LaunchError
    for a pod that has not begun, or is gone, and where the log breaks off."""
    pod = newest(cluster.list("Pod", f"{RUN}={run.name}")[0])
    if pod is None:
        raise LaunchError(f"{run.name} has no pod 0 (any more): it is {run.state}.")
    try:
        for line in cluster.follow_log(pod["metadata"]["name"]):
            yield index_of(pod), line.partition(b" ")[2]
    except Dropped as dropped:
        told = {400: f"has not begun. {waiting(pod)}".rstrip(), 404: "is gone"}
        why = told.get(dropped.status, f"breaks off: {dropped}")
        raise LaunchError(f"The log of pod {pod['metadata']['name']} {why}.") from None

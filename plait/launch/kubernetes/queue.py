"""Kubernetes' queue for admission: jobs whose pods wait behind a scheduling gate of Plait's.

===========  ===========================================================================================
known        pods of a namespace with the gate ``plait.dev/admission``, grouped by their Job; annotations
             ``plait.dev/jct`` (90m), ``plait.dev/preemptible`` ("true"); their priority, by its class; nodes
             with GPUs, and the GPUs that pods of all namespaces hold; the taint ``plait.dev/reserved``
passed over  Jobs with missing pods, or whose pods request no GPU
===========  ===========================================================================================

An admitted pod gets its node, a toleration for the reserved zones that it enters, and
``activeDeadlineSeconds`` until the first of these zones is due; then its gate is removed. None of
this can be undone: to hold or requeue a pod, it is deleted, and its Job creates another one behind
the gate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any

from plait.core.base.errors import LaunchError
from plait.core.topology.switches import RESERVED_TAINT
from plait.formats.kubernetes.manifests import HOSTNAME, Object
from plait.launch.kubernetes.api import Conflict, KubernetesNamespace, NotFound
from plait.launch.kubernetes.objects import over, uid
from plait.launch.live_queue import (
    AdmissionRecord,
    AdmissionTerms,
    LiveQueue,
    QueuedJob,
    QueueView,
    ReservedNodes,
    seconds_of,
)

GATE = "plait.dev/admission"
JCT, PREEMPTIBLE, MARK = "plait.dev/jct", "plait.dev/preemptible", "plait.dev/admitted"
JOB = "batch.kubernetes.io/job-name"
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
GRACE = 30
"""Seconds that a pod has to save when it is requeued."""


class KubernetesQueue(LiveQueue):
    """The queue of admission in a namespace: pods behind Plait's gate, and nodes that are tainted
    for planned jobs. due: the start of each planned job, in seconds since 1970, by the taint's
    value."""

    def __init__(self, cluster: KubernetesNamespace, due: Mapping[str, float]) -> None:
        self.cluster, self.due = cluster, due
        self._hosts: dict[str, str] = {}

    @property
    def closing_seconds(self) -> float:
        """Zero: pods may enter a zone until it is due, since deadlines have a resolution of
        seconds."""
        return 0.0

    def look(self) -> QueueView:
        nodes = [node for node in self.cluster.list("Node")[0] if _gpus_of_node(node)]
        counts = {_gpus_of_node(node) for node in nodes}
        if len(counts) != 1:
            told = ", ".join(map(str, sorted(counts))) or "no"
            raise LaunchError(f"Nodes have {told} GPUs: admission needs a cluster whose nodes have equally many.")
        size = counts.pop()
        used = {_name(node): 0 if _open(node, self.due) else size for node in nodes}
        for pod in self.cluster.everywhere("Pod"):
            node = pod["spec"].get("nodeName")
            if node in used and not over(pod):
                used[node] = min(size, used[node] + _gpus_of(pod))
        zones = [ReservedNodes(name=name, nodes=frozenset(_name(one) for one in nodes if _reserved(one) == name),
                               start=due) for name, due in self.due.items()]  # fmt: skip
        if empty := [zone.name for zone in zones if not zone.nodes]:
            taint = f"{RESERVED_TAINT}={empty[0]}:NoSchedule"
            raise LaunchError(f"No node has the taint {taint}. Set it: kubectl taint nodes NODE {taint}")
        self._hosts = {_name(node): node["metadata"]["labels"].get(HOSTNAME, _name(node)) for node in nodes}
        jobs, passed = self._jobs(size)
        return QueueView(jobs=jobs, used=used, size=size, reservations=tuple(zones), passed=passed)

    def _jobs(self, size: int) -> tuple[tuple[QueuedJob, ...], dict[str, str]]:
        by_job: dict[str, list[Object]] = defaultdict(list)
        for pod in self.cluster.list("Pod")[0]:
            own = _gated(pod) or MARK in pod["metadata"].get("annotations", {})
            if own and not over(pod) and not pod["metadata"].get("deletionTimestamp"):
                by_job[pod["metadata"].get("labels", {}).get(JOB) or _name(pod)].append(pod)
        jobs: list[QueuedJob] = []
        passed: dict[str, str] = {}
        for name, pods in sorted(by_job.items()):
            wanted, submit = self._of_job(pods[0])
            if len(pods) < wanted:
                passed[name] = f"{len(pods)} of its {wanted} pods are there"
            elif not all(map(_gpus_of, pods)):
                passed[name] = "not all of its pods ask for GPUs"
            else:
                jobs.append(_job(name, pods, submit, self._nodes_of(pods), size))
        return tuple(jobs), passed

    def _nodes_of(self, pods: Sequence[Object]) -> tuple[str, ...]:
        """Return the names of the nodes that pods were assigned; a selector holds the node's
        hostname label."""
        names = {host: name for name, host in self._hosts.items()}
        asked = (pod["spec"].get("nodeSelector", {}).get(HOSTNAME) for pod in pods)
        return tuple(names[host] if host in names else str(host) for host in asked if host)

    def _of_job(self, pod: Object) -> tuple[int, float]:
        """Return the number of pods that run at a time, and the creation time of the job (seconds
        since 1970)."""
        name = pod["metadata"].get("labels", {}).get(JOB)
        try:
            job = self.cluster.get("Job", name) if name else pod
        except NotFound:
            job = pod
        return job["spec"].get("parallelism", 1), _time(job["metadata"].get("creationTimestamp", ""))

    def hold(self, job: QueuedJob) -> None:
        self.send_back(job)

    def start(self, job: QueuedJob, how: AdmissionTerms) -> None:
        pods = {_name(pod): pod for pod in self.cluster.list("Pod")[0]}
        waiting = [pods[name] for name in job.parts if name in pods and _gated(pods[name])]
        if len(waiting) < len(job.parts):
            raise NotFound(f"Some pods of {job.name} are gone: the next round decides on it again.")
        each = job.gpus // len(job.parts)
        places = [node for node, gpus in zip(how.nodes, how.gpus, strict=True) for _ in range(gpus // each)]
        mark = AdmissionRecord(submit=job.submit, at=how.now, until=how.until, zones=tuple(how.zones)).text()
        for pod, node in zip(waiting, places, strict=True):
            self.cluster.patch("Pod", _name(pod), [*_same(pod), *_admission_patch(pod, self._hosts[node], mark, how)])
        for pod in waiting:
            gates = [gate["name"] for gate in pod["spec"]["schedulingGates"]]
            path = f"/spec/schedulingGates/{gates.index(GATE)}"
            gone = {"op": "test", "path": f"{path}/name", "value": GATE}, {"op": "remove", "path": path}
            self.cluster.patch("Pod", _name(pod), [*_same(pod), *gone])

    def settle(self, job: QueuedJob) -> None:
        """Do nothing: Kubernetes counts a pod's deadline from its start, so its time limit is
        right."""

    def send_back(self, job: QueuedJob) -> None:
        for name in job.parts:
            self.cluster.delete("Pod", name, grace=GRACE)

    def restore(self, job: QueuedJob) -> None:
        self.send_back(job)

    def job_changed(self, error: Exception) -> bool:
        return isinstance(error, (NotFound, Conflict))


def _job(name: str, pods: Sequence[Object], submit: float, assigned: tuple[str, ...], size: int) -> QueuedJob:
    """Return the queued job of these pods. assigned: the nodes that the pods were assigned. size:
    GPUs of a node."""
    told = pods[0]["metadata"].get("annotations", {})
    mark, each = AdmissionRecord.read(told.get(MARK, "")), max(map(_gpus_of, pods))
    each = each if size % each == 0 else size  # pods that cannot share a node evenly get whole nodes
    limit = pods[0]["spec"].get("activeDeadlineSeconds") if not mark else None
    nodes = [pod["spec"].get("nodeName") for pod in pods]
    held, known = any(map(_gated, pods)), seconds_of(told.get(JCT, ""), -1.0)
    return QueuedJob(
        name=name, state="running" if all(nodes) else "waiting", held=held,
        ready=all(one["name"] == GATE for pod in pods for one in pod["spec"].get("schedulingGates", ())),
        submit=submit, gpus=each * len(pods), nodes=tuple(filter(None, nodes)), requested_nodes=assigned,
        priority=pods[0]["spec"].get("priority", 0), preemptible=told.get(PREEMPTIBLE) == "true",
        jct=known if known >= 0 else inf if limit is None else float(limit), has_jct=known >= 0, mark=mark,
        known={"queue": pods[0]["metadata"].get("namespace", "")},
        parts=tuple(_name(pod) for pod in pods),
    )  # fmt: skip


def _admission_patch(pod: Object, node: str, mark: str, how: AdmissionTerms) -> list[Object]:
    """Return the JSON patch that admits a pod: node, tolerations, deadline, removal of the gate. A
    gated pod's node selector may be narrowed; any pod may get tolerations and a deadline. mark: the
    record of the admission, for an annotation."""
    spec, metadata = pod["spec"], pod["metadata"]
    tolerated = [
        {"key": RESERVED_TAINT, "operator": "Equal", "value": zone, "effect": "NoSchedule"} for zone in how.zones
    ]
    changes: dict[str, Any] = {
        "/spec/nodeSelector": {**spec.get("nodeSelector", {}), HOSTNAME: node},
        "/metadata/annotations": {**metadata.get("annotations", {}), MARK: mark},
    }
    if how.zones:
        own = spec.get("activeDeadlineSeconds")
        seconds = max(1, int(how.until - how.now))
        changes["/spec/tolerations"] = [*spec.get("tolerations", ()), *tolerated]
        changes["/spec/activeDeadlineSeconds"] = min(seconds, own) if own else seconds
    return [{"op": "add", "path": path, "value": value} for path, value in changes.items()]


def _same(pod: Object) -> list[Object]:
    return [{"op": "test", "path": "/metadata/uid", "value": uid(pod)}]


def _gated(pod: Object) -> bool:
    return any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates", ()))


def _open(node: Object, due: Mapping[str, float]) -> bool:
    """Return True if a node takes pods that request GPUs and tolerate the taints of watched
    jobs."""
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions", ()))
    taints = [one for one in node["spec"].get("taints", ()) if one["effect"] in ("NoSchedule", "NoExecute")]
    closed = [one for one in taints if one["key"] not in GPUS and one["key"] != RESERVED_TAINT]
    kept = _reserved(node)
    return ready and not node["spec"].get("unschedulable") and not closed and (not kept or kept in due)


def _reserved(node: Object) -> str:
    """Return the job that a node is tainted for; empty if there is none."""
    taints = node["spec"].get("taints", ())
    return next((one.get("value", "") for one in taints if one["key"] == RESERVED_TAINT), "")


def _gpus_of_node(node: Object) -> int:
    return _whole_gpus([node["status"].get("allocatable", {})])


def _gpus_of(pod: Object) -> int:
    containers = pod["spec"].get("containers", ())
    return _whole_gpus([one.get("resources", {}).get("limits") or {} for one in containers])


def _whole_gpus(resources: Iterable[Mapping[str, Any]]) -> int:
    return sum(int(one[kind]) for one in resources for kind in GPUS if str(one.get(kind, "")).isdecimal())


def _name(metadata_object: Object) -> str:
    return metadata_object["metadata"]["name"]


def _time(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0

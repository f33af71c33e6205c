"""Pods, Jobs and JobSets of runs: their states, the runs of a cluster, and how to stop them or read
their logs.

``Objects`` keeps a run's pods up to date, and ``PodLog`` copies pod 0's log; both survive broken
connections.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, BinaryIO, Self

from plait.core.base.codec.json_text import is_table
from plait.core.base.errors import LaunchError
from plait.formats.kubernetes.manifests import CONTAINER, INDEX, RUN, Object
from plait.launch.kubernetes.api import KubernetesNamespace, NotFound, StreamBroken, Unavailable
from plait.launch.run_folder import DO_NOT_RETRY

OVER = ("Succeeded", "Failed")


def uid(pod: Object) -> str:
    """Return a pod's uid, which distinguishes it from an earlier pod of the same name."""
    return pod["metadata"]["uid"]


def index_of(pod: Object) -> int:
    """Return a pod's completion index, its node rank; -1 if it has none."""
    metadata = pod["metadata"]
    return int(metadata.get("labels", {}).get(INDEX, metadata.get("annotations", {}).get(INDEX, -1)))


def over(pod: Object) -> bool:
    """Return True if the pod has ended or is terminating."""
    return bool(pod["metadata"].get("deletionTimestamp")) or pod.get("status", {}).get("phase") in OVER


def unschedulable(pod: Object) -> str:
    """Return the scheduler's message on a pod that it cannot place; empty if there is none."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((one.get("message", "") for one in conditions if one.get("reason") == "Unschedulable"), "")


def ending(workload: Object) -> bool | None:
    """Return True if a Job or JobSet has completed, False if it has failed, None while it runs."""
    for one in workload.get("status", {}).get("conditions", []):
        if one["status"] == "True" and one["type"] in ("Complete", "Completed", "Failed"):
            return one["type"] != "Failed"
    return None


def newest(pods: Iterable[Object]) -> Object | None:
    """Return the pod of index 0 that was created last; None if there is none."""
    heads = [pod for pod in pods if index_of(pod) == 0]
    return max(heads, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), _begun(pod)), default=None)


def _begun(pod: Object) -> str:
    return pod.get("status", {}).get("startTime", "")


def container_of(pod: Object) -> Object:
    """Return the status of Plait's container in a pod, a dictionary; empty if unknown."""
    found: list[Object] = pod.get("status", {}).get("containerStatuses") or []
    return next((one for one in found if one.get("name") == CONTAINER), Object())


def last_words(pod: Object | None) -> dict[str, Any]:
    """Return the values that the launcher wrote as pod 0's termination message (``status``,
    ``message``, ...); empty if there are none."""
    message = container_of(pod or {}).get("state", {}).get("terminated", {}).get("message", "")
    with suppress(ValueError):
        said = json.loads(message)
        return said if is_table(said) else {}
    return {}


def is_active(pod: Object) -> bool:
    """Return True unless all of the pod's containers have ended."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def failed(pod: Object) -> bool:
    """Return True if the pod's phase is Failed."""
    return pod.get("status", {}).get("phase") == "Failed"


def why_failed(pod: Object) -> str:
    """Return a phrase on how a pod ended: its index, node, exit status and reason."""
    ended = container_of(pod).get("state", {}).get("terminated", {})
    code = ended.get("exitCode")
    told = {DO_NOT_RETRY: " (not started again)"}.get(code, "")
    reason = pod.get("status", {}).get("reason") or ended.get("reason") or ""
    return f"pod {index_of(pod)} on {pod['spec'].get('nodeName', 'no node')}: status {code}{told} {reason}".rstrip()


def waiting(pod: Object) -> str:
    """Return a phrase with the reason why a pod does not run yet; empty if unknown."""
    reason = container_of(pod).get("state", {}).get("waiting", {})
    if reason.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"pod {index_of(pod)}: {reason['reason']} {reason.get('message', '')}".strip()
    return f"pod {index_of(pod)}: {message}" if (message := unschedulable(pod)) else ""


@dataclass(frozen=True)
class ClusterRun:
    """A run, by its Job or JobSet. state: waiting, running, ended or failed. origin: the name of
    the run's first Job, which the run's folder records; it differs from ``name`` once a new Job has
    replaced the first."""

    name: str
    kind: str
    state: str
    started: str
    pods: int
    origin: str


def runs_in(cluster: KubernetesNamespace) -> list[ClusterRun]:
    """Return all runs of the namespace, the newest last. Raises LaunchError."""
    kinds = ("JobSet", "Job") if cluster.has_jobset() else ("Job",)  # a JobSet before the Jobs that it has created
    workloads, pods = dict[str, Object](), dict[str, list[Object]]()
    for kind in kinds:
        for one in cluster.list(kind, RUN)[0]:
            workloads.setdefault(_run_of(one), one | {"kind": kind})  # items of a list may lack their kind
    for pod in cluster.list("Pod", RUN)[0]:
        pods.setdefault(_run_of(pod), []).append(pod)
    found = [_cluster_run(name, one, pods.get(name, [])) for name, one in workloads.items()]
    return sorted(found, key=lambda one: (one.started, one.name))


def _run_of(one: Object) -> str:
    return one["metadata"]["labels"][RUN]


def _cluster_run(name: str, workload: Object, pods: list[Object]) -> ClusterRun:
    variables = {one["name"]: one.get("value") for pod in pods[:1] for one in _container(pod).get("env", [])}
    return ClusterRun(
        name=name, kind=workload["kind"], state=_state(workload, pods),
        started=workload["metadata"].get("creationTimestamp", ""), pods=len(pods),
        origin=variables.get("PLAIT_RUN") or name,
    )  # fmt: skip


def _container(pod: Object) -> Object:
    return next((one for one in pod["spec"].get("containers", []) if one["name"] == CONTAINER), Object())


def _state(workload: Object, pods: list[Object]) -> str:
    well = ending(workload)
    if well is not None:
        return "ended" if well else "failed"
    return "running" if any(pod.get("status", {}).get("phase") == "Running" for pod in pods) else "waiting"


def run_in(cluster: KubernetesNamespace, name: str) -> ClusterRun:
    """Return the run of a name, or of a first Job's name. Raises LaunchError that lists the runs if
    there is none."""
    runs = runs_in(cluster)
    found = {one.origin: one for one in runs} | {one.name: one for one in runs}
    if name not in found:
        names = [one.name for one in runs]
        there = f"There {'are' if len(names) > 1 else 'is'} {', '.join(names)}" if names else "There is none"
        raise LaunchError(f"No run {name} is in the namespace {cluster.namespace}. {there}.")
    return found[name]


def end(cluster: KubernetesNamespace, run: ClusterRun, *, at_once: bool) -> None:
    """Stop a run: let ranks save and end, or kill them (``at_once``). The Job is deleted first: it
    would recreate its pods."""
    pods = cluster.list("Pod", f"{RUN}={run.name}")[0] if at_once else ()
    cluster.delete(run.kind, run.name, wait_for_pods=not at_once)
    for pod in pods:
        cluster.delete("Pod", pod["metadata"]["name"], grace=0)


def exists(cluster: KubernetesNamespace, run: ClusterRun) -> bool:
    """Return True if any object of the run exists."""
    return bool(cluster.list(run.kind, f"{RUN}={run.name}")[0] or cluster.list("Pod", f"{RUN}={run.name}")[0])


def pod_lines(cluster: KubernetesNamespace, run: ClusterRun) -> Iterator[tuple[int, bytes]]:
    """Yield (pod index, line) of pod 0's log, which holds rank 0's output, until the pod ends.
    Raises LaunchError if the pod has not started, is gone, or the log breaks off."""
    pod = newest(cluster.list("Pod", f"{RUN}={run.name}")[0])
    if pod is None:
        raise LaunchError(f"{run.name} has no pod 0 (any more): it is {run.state}.")
    try:
        for line in cluster.follow_log(pod["metadata"]["name"]):
            yield index_of(pod), line.partition(b" ")[2]
    except StreamBroken as dropped:
        told = {400: f"has not begun. {waiting(pod)}".rstrip(), 404: "is gone"}
        why = told.get(dropped.status, f"breaks off: {dropped}")
        raise LaunchError(f"The log of pod {pod['metadata']['name']} {why}.") from None


WATCH = 300
"""Duration of one watch, seconds; then objects are listed again, which bounds the time for which a
change is missed."""
LONGEST = 5.0
"""Seconds between two attempts to list while the server is unavailable, without the time of each
attempt."""
PAUSE = 0.5
"""Seconds before a broken connection is opened again."""
KEPT_LOG_BYTES = 16_384
"""Number of bytes kept of a log's end."""


class Objects:
    """The objects of a kind with some labels, kept up to date by a thread inside the ``with``
    block: it lists them, then watches for changes."""

    def __init__(self, cluster: KubernetesNamespace, kind: str, labels: str) -> None:
        self._cluster, self._kind, self._labels = cluster, kind, labels
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._found: dict[str, Object] = {}
        self._gone: dict[str, Object] = {}
        self._error: LaunchError | None = None
        self._away: Unavailable | None = None
        self.listed = False
        """True once the objects were listed for the first time."""
        self._thread = threading.Thread(target=self._run, name=kind, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()

    def now(self) -> list[Object]:
        """Return all objects in their last known state. Raises Unavailable while the server does
        not answer, LaunchError if listing is refused."""
        with self._lock:
            if problem := self._error or self._away:
                raise type(problem)(str(problem))
            return list(self._found.values())

    def gone(self) -> list[Object]:
        """Return the deleted objects in their last known state."""
        with self._lock:
            return list(self._gone.values())

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                found, version = self._cluster.list(self._kind, self._labels)
                self._replace({one["metadata"]["uid"]: one for one in found})
                for what, one in self._cluster.watch(self._kind, self._labels, version, WATCH):
                    self._take(what, one)
                    if self._ending.is_set():
                        return
            except Unavailable as away:
                with self._lock:
                    self._away = away
                self._ending.wait(LONGEST)
            except StreamBroken:
                self._ending.wait(PAUSE)
            except LaunchError as error:
                with self._lock:
                    self._error = error
                return

    def _replace(self, found: dict[str, Object]) -> None:
        with self._lock:
            self._gone |= {key: one for key, one in self._found.items() if key not in found}
            self._found, self._away, self.listed = found, None, True

    def _take(self, what: str, one: Object) -> None:
        key = one["metadata"]["uid"]
        with self._lock:
            if what == "DELETED":
                self._found.pop(key, None)
                self._gone[key] = one
            else:
                self._found[key] = one


class PodLog:
    """Copier of a pod's log to ``sink``; after a restart, of the log of the pod that replaces
    it."""

    def __init__(self, cluster: KubernetesNamespace, sink: BinaryIO) -> None:
        self._cluster, self._sink = cluster, sink
        self._ending = threading.Event()
        self._pod = ""
        self._thread: threading.Thread | None = None
        self._shown = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()

    def follow(self, pod: Object) -> None:
        """Follow this pod's log once its container has started."""
        began = pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
        if not began or pod["metadata"]["uid"] == self._pod or (self._thread and self._thread.is_alive()):
            return
        self._pod = pod["metadata"]["uid"]
        self._thread = threading.Thread(target=self._copy, args=(pod["metadata"]["name"],), name="log", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = 5.0) -> str:
        """Wait up to ``seconds`` for the rest of the log; return the end of the copied text."""
        if self._thread:
            self._thread.join(seconds)
        return self._shown.decode(errors="replace")

    def _copy(self, pod: str) -> None:
        last = ""
        while not self._ending.is_set():
            try:
                for line in self._cluster.follow_log(pod, _seconds_since(last)):
                    when, _, text = line.partition(b" ")
                    if (stamp := when.decode(errors="replace")) > last or not last:
                        last = stamp
                        self._show(text + b"\n")
                return
            except StreamBroken as dropped:
                if dropped.status in (400, 404):  # gone, or not started: the run's folder has the logs
                    return
                self._ending.wait(PAUSE)
            except (LaunchError, NotFound):
                return

    def _show(self, text: bytes) -> None:
        self._shown = (self._shown + text)[-KEPT_LOG_BYTES:]
        with suppress(OSError, ValueError):  # the reader has closed the output
            self._sink.write(text)
            self._sink.flush()


def _seconds_since(stamp: str) -> str:
    """Return the whole seconds since a timestamp of a log, plus one or two, as text; empty without
    a timestamp."""
    if not stamp:
        return ""
    then = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    return str(int((datetime.now(UTC) - then).total_seconds()) + 2)

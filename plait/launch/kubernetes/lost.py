"""Pods of lost nodes, which are forced to fail so that their Job replaces them; and replacements of
Jobs with a long backoff.

A node that dies, or loses its network, leaves its pods terminating. Its Job replaces failed pods
only (``podReplacementPolicy: Failed``), so it waits for ever
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-replacement-policy). Forced
deletion does not help: the Job's finalizer is removed from failed pods only (``canRemoveFinalizer``
in pkg/controller/job/job_controller.go). So the pod's phase is first set to Failed, as Kueue's
failure recovery and Kubernetes' garbage collector do
(https://kueue.sigs.k8s.io/docs/tasks/manage/setup_failure_recovery/, pkg/controller/podgc). Ranks
that still run there can write nothing any more (``core.runs.epoch``), so the run is safe.

A Job waits 10 s after a failed pod, then 20, 40, ... 360 s. The count restarts only when a pod
succeeds, which training pods never do before the end
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-backoff-failure-policy). So the
seventh lost node, weeks after the first, would cost six minutes. The follower replaces the Job as
soon as the backoff would take longer than a new Job; the new controller has counted no failures.

The run is in the cluster at every moment: the new Job is submitted before the old one is deleted.
No rank trains meanwhile, since a pod is missing; old pods are fenced (``core.runs.epoch``). The new
first pod takes over the run's lock, as a restart of the same run: the run keeps the first Job's
name in its folder, and its count of starts without progress. Jobs in a Kueue queue are left alone,
since another job could be admitted in between; JobSets have no such backoff.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from plait.core.base.errors import LaunchError
from plait.formats.kubernetes.manifests import RUN, Object, PodRun
from plait.launch.kubernetes.api import Conflict, KubernetesNamespace, NotFound, Unavailable
from plait.launch.kubernetes.objects import failed, is_active, over, uid

RBAC = "rbac.authorization.k8s.io"


def access(run: PodRun, namespace: str) -> list[Object]:
    """Return the objects that let pods delete the pods of lost nodes (``pod.guarded``), and that
    admit only the run's own pods to its network. The service account is the user's, if the job
    names one."""
    account, made = run.settings.service_account or run.name, list[Object]()
    if not run.settings.service_account:
        made.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(run)})
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    role = {"apiGroup": RBAC, "kind": "Role", "name": run.name}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    own = {"matchLabels": {RUN: run.name}}
    return [
        *made,
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": _metadata(run), "rules": rules},
        {"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding", "metadata": _metadata(run), "roleRef": role,
         "subjects": [subject]},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(run),
         "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}},
    ]  # fmt: skip


def _metadata(run: PodRun) -> Object:
    return {"name": run.name, "labels": run.labels}


MARGIN = 10.0
"""Seconds of grace for a pod on an unresponsive node: no process there learns that it has to
end."""
LONG = 300.0
"""Seconds beyond the grace period that a pod may take to end on a responsive node, whose kubelet
may be busy."""
LOST = ("DeletionByTaintManager", "DeletionByPodGC")
"""Reasons of a pod's deletion whose node does not respond."""
GIVEN_UP = "NodeLost"
"""The reason of a pod that was set to Failed by ``LostPods``, and is still to be deleted."""


class LostPods:
    """The watcher of a run's terminating pods, which forces the overdue ones to fail."""

    def __init__(self, cluster: KubernetesNamespace, say: Callable[[str], None]) -> None:
        self.cluster, self.say = cluster, say
        self._since: dict[str, float] = {}
        """The time (monotonic seconds) at which each pod was first observed terminating, by uid."""

    def look(self, pods: Iterable[Object]) -> None:
        """Force pods of lost nodes to fail, and delete them; to be called with the run's pods again
        and again. Raises Unavailable if the server does not answer; other refusals are printed, not
        too often."""
        now, ending = time.monotonic(), [pod for pod in pods if _terminating(pod)]
        self._since = {uid(pod): self._since.get(uid(pod), now) for pod in ending}
        for pod in ending:
            waited, name = now - self._since[uid(pod)], pod["metadata"]["name"]
            if waited < allowed(pod):
                continue
            node = pod["spec"].get("nodeName", "no node")
            self._since[uid(pod)] = now  # restart the wait, so that a refusal is not reported at every call
            try:
                self._give_up(pod, name)
                late = f"has not ended for {waited:.0f} s, its node {node} seems to be lost: it was given up and"
                why = late if is_active(pod) else "was given up, and is"
                self.say(f"pod {name} {why} deleted by force, and another takes its place")
            except Unavailable:
                del self._since[uid(pod)]
                raise
            except LaunchError as error:
                self.say(f"pod {name} on {node} does not end, and cannot be deleted by force: {error}")

    def _give_up(self, pod: Object, name: str) -> None:
        failed = {"phase": "Failed", "reason": GIVEN_UP, "message": "Its node does not answer."}
        if is_active(pod):
            with suppress(NotFound, Conflict):  # done by another process already, or a new pod has the name
                self.cluster.patch("Pod", name, {"metadata": {"uid": uid(pod)}, "status": failed}, status=True)
        self.cluster.delete("Pod", name, grace=0, uid=uid(pod))


def allowed(pod: Object) -> float:
    """Return the seconds that a terminating pod may take to end before it is forced."""
    if not is_active(pod):
        return 0.0  # the server became unavailable between the patch and the deletion
    grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    why = {
        one.get("reason")
        for one in pod.get("status", {}).get("conditions", [])
        if one.get("type") == "DisruptionTarget"
    }
    return MARGIN if why & set(LOST) else grace + LONG


def _terminating(pod: Object) -> bool:
    given_up = pod.get("status", {}).get("reason") == GIVEN_UP
    return bool(pod["metadata"].get("deletionTimestamp")) and (is_active(pod) or given_up)


FIRST, LONGEST = 10.0, 360.0
"""A Job's backoff after the first failed pod and at most, seconds."""
RENEWAL_BACKOFF = 45.0
"""Seconds of backoff that cost more than a new Job."""


def successor(run: PodRun) -> PodRun:
    """Return the same run under the name of a new Job."""
    name = f"{run.name.rpartition('-')[0]}-{secrets.token_hex(3)}"
    return replace(run, name=name, origin=run.origin or run.name)


class Backoff:
    """The backoff of a Job's controller, estimated from outside."""

    def __init__(self, run: PodRun) -> None:
        self._nodes = run.nodes
        self._counts = run.kind == "Job" and not run.settings.kueue_queue and run.settings.max_restarts > 0
        self._failed = set[str]()
        self._last = 0.0

    def give_up(self) -> None:
        """Stop estimating: ``left`` returns 0 from now on, since no other Job may be created."""
        self._counts = False

    def left(self, pods: Sequence[Object], gone: Iterable[Object]) -> float:
        """Return the seconds that the Job's controller still waits before it creates missing pods;
        0 if none is missing or delayed. gone: deleted pods."""
        ended = [*(pod for pod in pods if failed(pod)), *(pod for pod in gone if not _succeeded(pod))]
        if new := {uid(pod) for pod in ended} - self._failed:
            self._failed |= new
            self._last = time.monotonic()
        missing = sum(not over(pod) for pod in pods) < self._nodes
        if not (self._counts and missing and self._failed):
            return 0.0
        # bounded, or after months of failures the power would overflow a float
        wait = min(LONGEST, FIRST * 2.0 ** min(len(self._failed) - 1, 30))
        return max(0.0, self._last + wait - time.monotonic())


def _succeeded(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Succeeded"

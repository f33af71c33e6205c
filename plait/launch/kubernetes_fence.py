"""Pods of nodes that are lost: given up, so that others can be made in their place.

A node that dies, or loses its network, leaves its pods terminating: nobody can say that their processes have
ended, and a Job that replaces failed pods only (``podReplacementPolicy: Failed``) waits for ever
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-replacement-policy). Deleting such a pod
by force does not help: it has the finalizer by which its Job counts it, and that is taken away from failed
pods alone (``canRemoveFinalizer`` in pkg/controller/job/job_controller.go). So its phase is set to Failed
first, as Kueue's failure recovery and Kubernetes' own garbage collector do
(https://kueue.sigs.k8s.io/docs/tasks/manage/setup_failure_recovery/, pkg/controller/podgc). Ranks that go on
there all the same can write nothing any more (``core.runs.epoch``), so force does no harm to the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from plait.core.base.errors import LaunchError
from plait.launch.kubernetes_api import Away, Conflict, KubernetesNamespace, NotThere
from plait.launch.kubernetes_manifests import Object
from plait.launch.kubernetes_objects import lives, uid

MARGIN = 10.0
"""Seconds that a pod is given whose node does not answer: nobody there hears that it is to end."""
LONG = 300.0
"""Seconds beyond its grace where the node does: its kubelet may have much to do."""
LOST = ("DeletionByTaintManager", "DeletionByPodGC")
"""Why a pod was told to end whose node does not answer."""
GIVEN_UP = "NodeLost"
"""The reason of a pod that was set to Failed here, and is still to be deleted."""


class Fence:
    """Of one run's pods."""

    def __init__(self, cluster: KubernetesNamespace, say: Callable[[str], None]) -> None:
        self.cluster, self.say = cluster, say
        self._since: dict[str, float] = {}
        """When a pod was first seen to be ending, by its uid."""

    def look(self, pods: Iterable[Object]) -> None:
        """Give up what should have ended long ago. Raises Away; what may not be given up is said, not too
        often."""
        now, ending = time.monotonic(), [pod for pod in pods if _terminating(pod)]
        self._since = {uid(pod): self._since.get(uid(pod), now) for pod in ending}
        for pod in ending:
            waited, name = now - self._since[uid(pod)], pod["metadata"]["name"]
            if waited < allowed(pod):
                continue
            node = pod["spec"].get("nodeName", "no node")
            self._since[uid(pod)] = now  # of one that cannot be deleted nobody is told without end
            try:
                self._give_up(pod, name)
                late = f"has not ended for {waited:.0f} s, its node {node} seems to be lost: it was given up and"
                why = late if lives(pod) else "was given up, and is"
                self.say(f"pod {name} {why} deleted by force, and another takes its place")
            except Away:
                del self._since[uid(pod)]
                raise
            except LaunchError as error:
                self.say(f"pod {name} on {node} does not end, and cannot be given up: {error}")

    def _give_up(self, pod: Object, name: str) -> None:
        failed = {"phase": "Failed", "reason": GIVEN_UP, "message": "Its node does not answer."}
        if lives(pod):
            with suppress(NotThere, Conflict):  # somebody else was quicker, or it is another of the same name
                self.cluster.patch("Pod", name, {"metadata": {"uid": uid(pod)}, "status": failed}, status=True)
        self.cluster.delete("Pod", name, grace=0, uid=uid(pod))


def allowed(pod: Object) -> float:
    """Seconds that a pod may take to end."""
    if not lives(pod):
        return 0.0  # the server went away between the two requests that give it up
    grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    why = {
        one.get("reason")
        for one in pod.get("status", {}).get("conditions", [])
        if one.get("type") == "DisruptionTarget"
    }
    return MARGIN if why & set(LOST) else grace + LONG


def _terminating(pod: Object) -> bool:
    given_up = pod.get("status", {}).get("reason") == GIVEN_UP
    return bool(pod["metadata"].get("deletionTimestamp")) and (lives(pod) or given_up)

"""What pods, Jobs and JobSets say of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from plait.launch.kubernetes_manifests import CONTAINER, INDEX, Object
from plait.launch.run_folder import DO_NOT_RETRY

OVER = ("Succeeded", "Failed")


def uid(pod: Object) -> str:
    """Which tells a pod from an earlier one of the same name."""
    return pod["metadata"]["uid"]


def index_of(pod: Object) -> int:
    """Its completion index: its node rank."""
    metadata = pod["metadata"]
    return int(metadata.get("labels", {}).get(INDEX, metadata.get("annotations", {}).get(INDEX, -1)))


def over(pod: Object) -> bool:
    """Whether it has ended or is about to."""
    return bool(pod["metadata"].get("deletionTimestamp")) or pod.get("status", {}).get("phase") in OVER


def unschedulable(pod: Object) -> str:
    """What the scheduler says of it."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((one.get("message", "") for one in conditions if one.get("reason") == "Unschedulable"), "")


def ending(workload: Object) -> bool | None:
    """Whether a Job or JobSet has ended well; None while it goes on."""
    for one in workload.get("status", {}).get("conditions", []):
        if one["status"] == "True" and one["type"] in ("Complete", "Completed", "Failed"):
            return one["type"] != "Failed"
    return None


def newest(pods: Iterable[Object]) -> Object | None:
    """The pod 0 that was made last."""
    heads = [pod for pod in pods if index_of(pod) == 0]
    return max(heads, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), _begun(pod)), default=None)


def _begun(pod: Object) -> str:
    return pod.get("status", {}).get("startTime", "")


def container_of(pod: Object) -> Object:
    """What is said of our container."""
    found = pod.get("status", {}).get("containerStatuses") or []
    return next((one for one in found if one.get("name") == CONTAINER), {})


def last_words(pod: Object | None) -> dict[str, Any]:
    """What pod 0 has left as its last words."""
    message = container_of(pod or {}).get("state", {}).get("terminated", {}).get("message", "")
    with suppress(ValueError):
        said = json.loads(message)
        return said if isinstance(said, dict) else {}
    return {}


def lives(pod: Object) -> bool:
    """Whether its containers have not all ended."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def failed(pod: Object) -> bool:
    """Whether it has failed."""
    return pod.get("status", {}).get("phase") == "Failed"


def why_failed(pod: Object) -> str:
    """How it ended, and where, in words."""
    ended = container_of(pod).get("state", {}).get("terminated", {})
    code = ended.get("exitCode")
    told = {DO_NOT_RETRY: " (not started again)"}.get(code, "")
    reason = pod.get("status", {}).get("reason") or ended.get("reason") or ""
    return f"pod {index_of(pod)} on {pod['spec'].get('nodeName', 'no node')}: status {code}{told} {reason}".rstrip()


def waiting(pod: Object) -> str:
    """Why a pod does not run yet, if it says so."""
    reason = container_of(pod).get("state", {}).get("waiting", {})
    if reason.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"pod {index_of(pod)}: {reason['reason']} {reason.get('message', '')}".strip()
    return f"pod {index_of(pod)}: {message}" if (message := unschedulable(pod)) else ""

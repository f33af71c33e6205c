"""What pods hold: a node on which a pod has asked for GPUs, or parts of some, is busy; its holder is the
pod's job. Pods that have ended, or have no node yet, hold nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.base.text import printable
from plait.core.topology.switches import NodeState
from plait.place.readers.kubernetes_gpus import is_gpu
from plait.place.readers.states import worse

JOB_LABELS = ("jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-name", "job-name")
"""Labels that name a pod's job, the largest unit first."""


def at(item: Any, where: str, *keys: str) -> Any:
    """What stands below keys of an object of Kubernetes, None where one is missing. Raises JobError where
    something else than an object is above."""
    for number, key in enumerate(keys):
        if not isinstance(item, dict):
            raise JobError("not an object", key=".".join((where, *keys[:number])))
        item = item.get(key)
        if item is None:
            return None
    return item


def held(pods: Iterable[tuple[str, dict[str, Any]]], over: PassedOver) -> dict[str, NodeState]:
    """States of nodes that pods hold GPUs of. pods: where each stands in its list, and itself."""
    states: dict[str, NodeState] = {}
    for where, pod in pods:
        node, phase = at(pod, where, "spec", "nodeName"), at(pod, where, "status", "phase")
        if not isinstance(node, str) or phase in ("Succeeded", "Failed"):
            continue
        if not _asks_for_gpus(pod, where):
            if at(pod, where, "spec", "resourceClaims"):
                over.note("pods with resource claims, which may hold GPUs", _job(pod, where))
            continue
        state = NodeState(status="busy", holder=_job(pod, where))
        states[node] = worse(states[node], state) if node in states else state
    return states


def _asks_for_gpus(pod: dict[str, Any], where: str) -> bool:
    for kind in ("containers", "initContainers"):
        containers = at(pod, where, "spec", kind)
        if containers is None and kind == "initContainers":
            continue
        if not isinstance(containers, list):
            raise JobError("not a list", key=f"{where}.spec.{kind}")
        for container in cast("list[Any]", containers):
            if _container(container, f"{where}.spec.{kind}"):
                return True
    return False


def _container(container: Any, where: str) -> bool:
    for kind in ("requests", "limits"):
        asked = at(container, where, "resources", kind) or {}
        if not isinstance(asked, dict):
            raise JobError("not an object", key=f"{where}.resources.{kind}")
        if any(is_gpu(key) and str(amount or 0) != "0" for key, amount in cast("dict[str, Any]", asked).items()):
            return True
    return False


def _job(pod: dict[str, Any], where: str) -> str:
    labels = at(pod, where, "metadata", "labels") or {}
    name = next((found for label in JOB_LABELS if (found := at(labels, f"{where}.metadata.labels", label))), None)
    return printable(str(name or at(pod, where, "metadata", "name")))[:100]

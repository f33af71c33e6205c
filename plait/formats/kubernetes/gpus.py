"""The GPUs of Kubernetes nodes: whole GPUs, which a rank can use, and parts of GPUs, which it
cannot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import printable
from plait.core.topology.switches import Hardware, NodeState
from plait.formats.base.source import at, worse_state

WHOLE = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
"""Resources whose unit is one GPU, unless labels say that GPUs are partitioned or shared."""
_PART = re.compile(r"\S*/\S*gpu|nvidia\.com/mig-|amd\.com/[sdqc]px", re.IGNORECASE)
"""Resources that are parts of GPUs: MIG slices, time slices under another name, GPU memory,
partitions."""
_OTHER = re.compile(
    r"habana\.ai/|aws\.amazon\.com/neuron|google\.com/tpu|huawei\.com/Ascend|cambricon\.com/", re.IGNORECASE
)
_PRODUCT = ("nvidia.com/gpu.product", "amd.com/gpu.product-name")
_REPLICAS = "nvidia.com/gpu.replicas"
_COUNT = re.compile(r"[0-9]{1,4}")
UNALLOCATABLE = "GPUs that their nodes do not give away (capacity above allocatable)"
PARTS = "nodes with parts of GPUs (MIG slices, shared GPUs), which are no whole ones"
UNKNOWN = "nodes whose number of GPUs is no whole number: it is unknown, and they are not free"
OTHER_ACCELERATORS = "nodes with accelerators that are no GPUs"


def is_gpu(resource: str) -> bool:
    """True if a container that requests the resource holds a GPU or a part of a GPU."""
    return resource in WHOLE or bool(_PART.match(resource))


def hardware(resources: Mapping[str, Any], labels: Mapping[str, str], name: str, over: IgnoredInput) -> Hardware:
    """Return a node's number of whole GPUs and their type, by its labels and its resources
    ``resources`` (``allocatable``). The number is None if the resources name neither GPUs nor parts
    of GPUs, or if an amount is no whole number, which is noted."""
    device = next((labels[key] for key in _PRODUCT if key in labels), "")
    counts = {key: _amount(resources[key]) for key in WHOLE if key in resources}
    parts = [key for key, amount in resources.items() if key not in counts and _PART.match(key) and str(amount) != "0"]
    if any(counts.values()) and (why := _shared(labels, device)):
        parts += [why]
        counts = {}
    if parts:
        over.note(PARTS, f"{name}: {printable(parts[0])[:60]}")
    if any(_OTHER.match(key) and str(amount) != "0" for key, amount in resources.items()):
        over.note(OTHER_ACCELERATORS, name)
    if odd := [key for key, amount in counts.items() if amount is None]:
        over.note(UNKNOWN, f"{name}: {printable(str(resources[odd[0]]))[:60]!r} {odd[0]}")
        return Hardware(device=printable(device)[:60])
    gpus = sum(amount for amount in counts.values() if amount) if counts or parts else None
    return Hardware(gpus=gpus, device=printable(device)[:60])


def countable(resources: Mapping[str, Any]) -> bool:
    """True if all amounts of GPUs in a node's resources are whole numbers."""
    return all(_amount(resources[key]) is not None for key in WHOLE if key in resources)


def unallocatable(capacity: Mapping[str, Any], allocatable: Mapping[str, Any]) -> int:
    """Return a node's number of GPUs that are not allocatable, because they are unhealthy or
    reserved."""
    had, given = ([str(told.get(key, 0)) for key in WHOLE] for told in (capacity, allocatable))
    known = [(int(a), int(b)) for a, b in zip(had, given, strict=True) if _COUNT.fullmatch(a) and _COUNT.fullmatch(b)]
    return sum(max(0, has - gives) for has, gives in known)


def _shared(labels: Mapping[str, str], device: str) -> str:
    """Return why the resource's unit is less than one GPU; empty if it is one GPU."""
    if "-MIG-" in device:
        return f"GPUs of type {device}"
    if device.endswith("-SHARED") or labels.get(_REPLICAS, "1") not in ("0", "1"):
        return f"GPUs that {labels.get(_REPLICAS, 'several')} share"
    return ""


def _amount(value: object) -> int | None:
    return int(str(value)) if _COUNT.fullmatch(str(value)) else None


JOB_LABELS = ("jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-name", "job-name")
"""Labels that name a pod's job, the largest unit first."""


def busy_nodes(pods: Iterable[tuple[str, dict[str, Any]]], over: IgnoredInput) -> dict[str, NodeState]:
    """Return the states of nodes whose GPUs are held by pods. pods: each pod with its position in
    its list."""
    states: dict[str, NodeState] = {}
    for where, pod in pods:
        node, phase = at(pod, where, "spec", "nodeName"), at(pod, where, "status", "phase")
        if not isinstance(node, str) or phase in ("Succeeded", "Failed"):
            continue
        if not _requests_gpus(pod, where):
            if at(pod, where, "spec", "resourceClaims"):
                over.note("pods with resource claims, which may hold GPUs", _job(pod, where))
            continue
        state = NodeState(status="busy", holder=_job(pod, where))
        states[node] = worse_state(states[node], state) if node in states else state
    return states


def _requests_gpus(pod: dict[str, Any], where: str) -> bool:
    if at(pod, where, "spec", "containers", kind=list) is None:
        raise JobError("not a list", key=f"{where}.spec.containers")
    return any(
        is_gpu(key) and str(amount or 0) != "0"
        for kind in ("containers", "initContainers")
        for container in at(pod, where, "spec", kind, kind=list) or ()
        for asked in ("requests", "limits")
        for key, amount in (
            at(container, f"{where}.spec.{kind}", "resources", asked, kind=dict) or dict[str, Any]()
        ).items()
    )


def _job(pod: dict[str, Any], where: str) -> str:
    labels: dict[str, Any] = at(pod, where, "metadata", "labels") or {}
    name = next((found for label in JOB_LABELS if (found := at(labels, f"{where}.metadata.labels", label))), None)
    return printable(str(name or at(pod, where, "metadata", "name")))[:100]

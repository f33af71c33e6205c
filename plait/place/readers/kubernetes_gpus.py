"""The GPUs of Kubernetes nodes: whole ones, which a rank can have, and parts of some, which it cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plait.core.base.passed_over import PassedOver
from plait.core.base.text import printable
from plait.core.topology.switches import Hardware

WHOLE = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
"""Resources of which one is a GPU, unless labels say that GPUs are cut or shared."""
_PART = re.compile(r"\S*/\S*gpu|nvidia\.com/mig-|amd\.com/[sdqc]px", re.IGNORECASE)
"""Resources that are parts of GPUs: MIG slices, time slices under another name, memory, partitions."""
_OTHER = re.compile(
    r"habana\.ai/|aws\.amazon\.com/neuron|google\.com/tpu|huawei\.com/Ascend|cambricon\.com/", re.IGNORECASE
)
_PRODUCT = ("nvidia.com/gpu.product", "amd.com/gpu.product-name")
_REPLICAS = "nvidia.com/gpu.replicas"
_COUNT = re.compile(r"[0-9]{1,4}")
KEPT_BACK = "GPUs that their nodes do not give away (capacity above allocatable)"
PARTS = "nodes with parts of GPUs (MIG slices, shared GPUs), which are no whole ones"
UNKNOWN = "nodes whose number of GPUs is no whole number: it is unknown, and they are not free"
OTHERS = "nodes with accelerators that are no GPUs"


def is_gpu(resource: str) -> bool:
    """Whether a container that asks for it holds a GPU or a part of one."""
    return resource in WHOLE or bool(_PART.match(resource))


def hardware(found: Mapping[str, Any], labels: Mapping[str, str], name: str, over: PassedOver) -> Hardware:
    """Of a node's resources (``allocatable``) and labels: how many whole GPUs, None where the resources name
    neither GPUs nor parts of some, or an amount that is no whole number, which is noted."""
    device = next((labels[key] for key in _PRODUCT if key in labels), "")
    counts = {key: _amount(found[key]) for key in WHOLE if key in found}
    parts = [key for key, amount in found.items() if key not in counts and _PART.match(key) and str(amount) != "0"]
    if any(counts.values()) and (why := _shared(labels, device)):
        parts += [why]
        counts = {}
    if parts:
        over.note(PARTS, f"{name}: {printable(parts[0])[:60]}")
    if any(_OTHER.match(key) and str(amount) != "0" for key, amount in found.items()):
        over.note(OTHERS, name)
    if odd := [key for key, amount in counts.items() if amount is None]:
        over.note(UNKNOWN, f"{name}: {printable(str(found[odd[0]]))[:60]!r} {odd[0]}")
        return Hardware(device=printable(device)[:60])
    gpus = sum(amount for amount in counts.values() if amount) if counts or parts else None
    return Hardware(gpus=gpus, device=printable(device)[:60])


def countable(found: Mapping[str, Any]) -> bool:
    """Whether all amounts of whole GPUs in a node's resources are whole numbers."""
    return all(_amount(found[key]) is not None for key in WHOLE if key in found)


def kept_back(capacity: Mapping[str, Any], allocatable: Mapping[str, Any]) -> int:
    """GPUs that a node has and does not give away: they are sick, or kept for something."""
    had, given = ([str(told.get(key, 0)) for key in WHOLE] for told in (capacity, allocatable))
    known = [(int(a), int(b)) for a, b in zip(had, given, strict=True) if _COUNT.fullmatch(a) and _COUNT.fullmatch(b)]
    return sum(max(0, has - gives) for has, gives in known)


def _shared(labels: Mapping[str, str], device: str) -> str:
    """Why one of the resource is less than a GPU; empty where it is one."""
    if "-MIG-" in device:
        return f"GPUs of type {device}"
    if device.endswith("-SHARED") or labels.get(_REPLICAS, "1") not in ("0", "1"):
        return f"GPUs that {labels.get(_REPLICAS, 'several')} share"
    return ""


def _amount(value: object) -> int | None:
    return int(str(value)) if _COUNT.fullmatch(str(value)) else None

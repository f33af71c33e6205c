"""What Kubernetes nodes are doing, by their conditions, taints and cordons.

A node is down that is not ready, under pressure, cordoned, being deleted, or tainted so that pods are kept
away (NoSchedule, NoExecute). Taints that say no more than that there are GPUs keep no job away, nor do those
whose keys the user says that jobs tolerate. Plait's own taint means a reservation: busy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.base.text import printable
from plait.core.topology.switches import DOWN, FREE, RESERVED_TAINT, NodeState
from plait.place.readers.kubernetes_gpus import WHOLE
from plait.place.readers.kubernetes_pods import at

BAD = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
"""Conditions of Kubernetes' own that are bad where they are true."""
EFFECTS = ("NoSchedule", "NoExecute")
TAINTED = "tainted "


def state_of(item: dict[str, Any], name: str, tolerated: Collection[str]) -> NodeState:
    """Of a node. tolerated: keys of taints. Raises JobError naming the node and the key."""
    taints = _list(item, name, "spec", "taints")
    conditions = _list(item, name, "status", "conditions")
    if why := _unready(conditions, name):
        return NodeState(status="down", holder=printable(why)[:200])
    if at(item, name, "metadata", "deletionTimestamp"):
        return NodeState(status="down", holder="being deleted")
    if at(item, name, "spec", "unschedulable"):
        return NodeState(status="down", holder="cordoned")
    reserved = None
    for taint in taints:
        key, effect = (at(taint, f"{name}.spec.taints", word) for word in ("key", "effect"))
        if key == RESERVED_TAINT:
            reserved = NodeState(status="busy", holder=printable(str(taint.get("value") or "reserved"))[:200])
        elif effect in EFFECTS and key not in WHOLE and key not in tolerated:
            value = f"={taint['value']}" if taint.get("value") else ""
            return NodeState(status="down", holder=TAINTED + printable(f"{key}{value}:{effect}")[:200])
    return reserved or (FREE if conditions else DOWN)  # a node that never reported


def _unready(conditions: list[Any], name: str) -> str:
    ready = False
    for condition in conditions:
        kind, status = (at(condition, f"{name}.status.conditions", key) for key in ("type", "status"))
        if kind == "Ready":
            ready = True
            if status != "True":
                return f"not ready: {condition.get('reason') or 'unknown'}"
        elif kind in BAD and status == "True":
            return str(kind)
    return "" if ready or not conditions else "not ready: unknown"


def _list(item: dict[str, Any], name: str, *keys: str) -> list[Any]:
    found = at(item, name, *keys)
    if found is None:
        return []
    if not isinstance(found, list):
        raise JobError("not a list", key=".".join((name, *keys)))
    return cast("list[Any]", found)

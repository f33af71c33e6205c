"""Topograph's graph: ``instances`` with their ``network_layers``, the switch next to the instance first.

Its engine ``graph`` writes it. Instances are placed by their accelerator domains where none has layers. Its
other engines write what other readers read: node labels and NodeFeatures (``kubernetes``), topology.conf,
topology.yaml, and a ConfigMap with one of them (``config_map``).

===========  =================================================================================
known        of instances: id, type, network_layers, attributes.nvlink, labels of a GPU's type
             and an accelerator domain
passed over  instances without layers where others have some; other keys
refused      an instance without an id or told of twice, layers that are no list of texts
===========  =================================================================================
"""

from __future__ import annotations

from typing import Any, cast

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.base.text import printable
from plait.core.topology.hostlist import MOST_HOSTS
from plait.core.topology.switches import Hardware
from plait.place.readers.chains import from_chains
from plait.place.readers.source import Asked, Found, Source


def looks(source: Source) -> bool:
    """Whether a file is such a graph."""
    return source.is_json and isinstance(source.json, dict) and "instances" in source.json


def read(source: Source, asked: Asked) -> Found:
    """Raises JobError naming the instance."""
    del asked
    told: Any = source.json.get("instances") if isinstance(source.json, dict) else None
    if not isinstance(told, list):
        raise JobError("not a list", key="instances")
    if len(cast("list[Any]", told)) > MOST_HOSTS:
        raise JobError(f"more than {MOST_HOSTS} instances", key="instances")
    layers: dict[str, tuple[str, ...]] = {}
    domains: dict[str, tuple[str, ...]] = {}
    hardware: dict[str, Hardware] = {}
    names: list[str] = []
    for number, one in enumerate(cast("list[Any]", told)):
        where = f"instances[{number}]"
        if not isinstance(one, dict) or not isinstance(one.get("id"), str):
            raise JobError("no id", key=where)
        name = cast("str", one["id"])
        if name in hardware:
            raise JobError(f"the instance '{name[:60]}' stands twice", key=where)
        names.append(name)
        labels = _object(one, "labels", where)
        kind = _text(one.get("type") or labels.get("nvidia.com/gpu.product") or "", f"{where}.type")
        hardware[name] = Hardware(device=printable(kind)[:60])
        above = one.get("network_layers") or []
        if not isinstance(above, list):
            raise JobError("not a list", key=f"{where}.network_layers")
        if above:
            layers[name] = tuple(_text(switch, f"{where}.network_layers") for switch in reversed(above))
        domain = labels.get("accelerator.topograph.run/domain") or _object(one, "attributes", where).get("nvlink")
        if domain:
            domains[name] = (_text(domain, f"{where}.attributes.nvlink"),)
    chains = layers or domains
    left = [name for name in names if name not in chains]
    over = PassedOver()
    over.note("instances without layers", left[0] if left else "", len(left))
    topology = from_chains(chains, top=not layers)
    return Found(topology=topology, hardware={name: hardware[name] for name in chains}, over=over)


def _object(one: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = one.get(key) or {}
    if not isinstance(value, dict):
        raise JobError("not an object", key=f"{where}.{key}")
    return cast("dict[str, Any]", value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise JobError("not a text", key=where)
    return value

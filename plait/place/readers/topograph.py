"""Topograph's graph: ``instances`` with their ``network_layers``, the switch next to the instance first.

Written by its engine ``graph``; instances without layers are placed by their accelerator domain, if all are.
"""

from __future__ import annotations

from typing import Any, cast

from plait.core.errors import JobError
from plait.core.text import printable
from plait.core.topology import Hardware
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
        hardware[name] = Hardware(device=printable(_text(one.get("type", ""), f"{where}.type"))[:60])
        above = one.get("network_layers") or []
        if not isinstance(above, list):
            raise JobError("not a list", key=f"{where}.network_layers")
        if above:
            layers[name] = tuple(_text(switch, f"{where}.network_layers") for switch in reversed(above))
        attributes = one.get("attributes") or {}
        if isinstance(attributes, dict) and attributes.get("nvlink"):
            domains[name] = (_text(attributes["nvlink"], f"{where}.attributes.nvlink"),)
    chains = layers or domains
    left = [name for name in names if name not in chains]
    notes = (
        (f"{source.where}: {len(left)} instances without layers are left out, the first {left[0]}.",) if left else ()
    )
    topology = from_chains(chains, top=not layers)
    return Found(topology=topology, hardware={name: hardware[name] for name in chains}, notes=notes)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise JobError("not a text", key=where)
    return value

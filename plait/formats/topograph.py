"""Reader of Topograph's graph: ``instances`` with ``network_layers``, the switch next to the
instance first.

Topograph's engine ``graph`` writes it. If no instance has layers, accelerator domains place the
instances. The files of Topograph's other engines have readers of their own: node labels and
NodeFeatures (``kubernetes``), topology.conf, topology.yaml, and a ConfigMap with one of these two
(``config_map``).

===========  =================================================================================
read         of instances: id, type, network_layers, attributes.nvlink, the labels of the GPU's
             type and of the accelerator domain
ignored      instances without layers if other instances have some; other keys
refused      an instance without an id or listed twice, layers that are no list of texts
===========  =================================================================================
"""

from __future__ import annotations

from plait.core.base.codec.json_text import is_table
from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import printable
from plait.core.topology.hostlist import MOST_HOSTS
from plait.core.topology.switches import Hardware
from plait.formats.base.source import ReadOptions, ReadResult, Source, at, from_chains


def is_graph(source: Source) -> bool:
    """True if the file is Topograph's graph."""
    return source.is_json and is_table(source.json) and "instances" in source.json


def read(source: Source, options: ReadOptions) -> ReadResult:
    """Return the topology and hardware of a graph. Raises JobError naming the instance."""
    del options
    told = at(source.json, "", "instances", kind=list)
    if told is None:
        raise JobError("not a list", key="instances")
    if len(told) > MOST_HOSTS:
        raise JobError(f"more than {MOST_HOSTS} instances", key="instances")
    layers: dict[str, tuple[str, ...]] = {}
    domains: dict[str, tuple[str, ...]] = {}
    hardware: dict[str, Hardware] = {}
    names: list[str] = []
    for number, one in enumerate(told):
        where = f"instances[{number}]"
        name = at(one, where, "id")
        if not isinstance(name, str):
            raise JobError("no id", key=where)
        if name in hardware:
            raise JobError(f"the instance '{name[:60]}' is listed twice", key=where)
        names.append(name)
        product, domain = (
            at(one, where, "labels", key, kind=str)
            for key in ("nvidia.com/gpu.product", "accelerator.topograph.run/domain")
        )
        kind = at(one, where, "type", kind=str) or product or ""
        hardware[name] = Hardware(device=printable(kind)[:60])
        if above := at(one, where, "network_layers", kind=list):
            layers[name] = tuple(at({"switch": switch}, where, "switch", kind=str) for switch in reversed(above))
        if domain := domain or at(one, where, "attributes", "nvlink", kind=str):
            domains[name] = (domain,)
    chains = layers or domains
    left = [name for name in names if name not in chains]
    over = IgnoredInput()
    over.note("instances without layers", left[0] if left else "", len(left))
    topology = from_chains(chains, top=not layers)
    return ReadResult(topology=topology, hardware={name: hardware[name] for name in chains}, over=over)

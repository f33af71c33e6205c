"""Zones of a replay: the nodes that a placement has chosen, as numbers of a replayed cluster's nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from plait.api.topologies import read_topology
from plait.core.base.codec.json_text import read_json
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.place.readers import Remarks


def zone_of(file: Path, places: dict[str, int]) -> list[int]:
    """The node numbers of a file: a JSON list of them, or of names, or a rank table or placement with its
    ``hosts``. places: numbers of names, by a topology. Raises JobError for anything else."""

    def refuse(why: str | Exception) -> JobError:
        fix = "Write [0, 1, 2], or give a rank table and its topology"
        why = why if isinstance(why, str) else reason_of(why)
        return JobError(f"no JSON list of node numbers: {why}", file=str(file), key="zone", fix=fix)

    try:
        value: Any = read_json(file)
    except (OSError, ValueError) as error:
        raise refuse(error) from None
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("hosts")
    if not isinstance(value, list):
        raise refuse("it is no list, and has no hosts")
    return [_number(node, places, refuse) for node in cast("list[Any]", value)]


def places_in(topology: str, remark: Callable[[Remarks], None]) -> dict[str, int]:
    """Numbers of a topology's nodes: minipod after minipod, as the nodes of a replay lie. remark: takes what
    is to be said of it."""
    tree, remarks = read_topology(topology)
    remark(remarks)
    return {node.name: number for number, node in enumerate(tree.nodes)}


def _number(node: Any, places: dict[str, int], refuse: Any) -> int:
    if isinstance(node, str) and places:
        if node not in places:
            raise refuse(f"the topology has no node '{node[:40]}'")
        return places[node]
    if not isinstance(node, int) or isinstance(node, bool):
        why = "is a name: say with topology where it is" if isinstance(node, str) else "is no number of a node"
        raise refuse(f"{json.dumps(node)[:40]} {why}")
    return node

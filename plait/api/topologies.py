"""Topologies: read in any form and from labs, generated, shown, drawn and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import JobError
from plait.core.base.text import Part, Shown, Table
from plait.core.topology.switches import Topology
from plait.place.topologies import MinipodSizes
from plait.place.topologies import generate as generate_topology

if TYPE_CHECKING:
    from plait.place.topologies import Remarks

__all__ = [
    "MinipodSizes", "TopologyAnswer", "generate_topology", "read_groups", "read_topology",
]  # fmt: skip

LAB = "lab:"
ENDINGS = {".toml": "toml", ".json": "json", ".conf": "topology.conf", ".yaml": "topology.yaml"}
"""Formats of topology files, by the ending of a file's name."""


@dataclass(frozen=True)
class TopologyAnswer(Shown):
    """A topology: switches, nodes and the nodes' states.

    level: the lowest level of switches that is shown, a name or a depth; empty: by size. groups:
    the group of each placed node. remarks: on the reading; None for a generated cluster. Raises
    JobError for an unknown level.
    """

    topology: Topology
    level: str = ""
    groups: Mapping[str, str] = field(default_factory=dict[str, str])
    remarks: Remarks | None = None

    def __post_init__(self) -> None:
        self.topology.depth_of(self.level or None)

    def to_dict(self) -> dict[str, Any]:
        """Return the topology in Plait's own form, with minipods and free nodes counted."""
        from plait.core.topology.form import to_dict
        from plait.place.outline import spreads

        topology, level = self.topology, self.level or None
        free = topology.free(level)
        pods = {
            name: {"nodes": len(nodes), "free": sum(map(len, free[name].values())),
                   "leaves": {leaf: len(names) for leaf, names in free[name].items()}}
            for name, nodes in topology.minipods(level).items()
        }  # fmt: skip
        said = self.remarks
        return {
            "topology": to_dict(topology),
            "key": topology.key,
            "fabric_key": topology.fabric_key,
            "counts": {status: topology.count(status) for status in ("free", "busy", "down")},
            "minipods": pods,
            **({"spread": spreads(topology, self.groups, level)} if self.groups else {}),
            **({"notes": said.notes, "passed_over": said.over.rows()} if said else {}),
        }

    def parts(self) -> Iterator[Part]:
        """Yield a tree that stays short: subtrees that are alike share a row."""
        from plait.place.outline import HEADER, down_nodes, outline, spreads

        topology, level = self.topology, self.level or None
        depths, last = Counter[int](), len(topology.levels) - 1
        inner = {switch.parent for switch in topology.switches}
        for index, switch in enumerate(topology.switches):  # leaves count as leaves at any depth
            depths[switch.depth if index in inner else last] += 1
        levels = ", ".join(f"{name} {depths[depth]}" for depth, name in enumerate(topology.levels))
        rows = outline(topology, level)
        yield Table(f"{topology.name}: {levels}" if topology.name else levels, HEADER, [row.cells for row in rows])
        if any(low != high for row in rows for low, high in (row.free, row.busy, row.down)):
            yield f"Ranges are the least and the most of one; --level {topology.levels[-1]} shows each."
        if down := down_nodes(topology):
            yield f"down: {down}"
        if self.groups:
            spread = spreads(topology, self.groups, level)
            worst = max(spread, key=lambda group: spread[group])
            yield f"{len(spread)} groups; the widest, {worst}, touches {spread[worst]} minipods"

    def draw(self, file: Path) -> None:
        """Draw the topology, with a colour for every group, into a file. Raises DataError for a
        file ending that names no picture format, OSError if the file cannot be written."""
        from plait.api.pictures import draw_topology

        draw_topology(self.topology, file, groups=self.groups, level=self.level or None, title=self.topology.name)

    def to_text(self, form: str) -> str:
        """Return the topology in a format: ``toml``, ``json``, ``topology.conf`` or
        ``topology.yaml``. Raises JobError for any other."""
        from plait.place.outline import written

        return written(self.topology, form)

    def write(self, file: Path, form: str = "") -> None:
        """Write the topology to a file. form: its format; "": by the ending of the file's name.
        Raises JobError for an unknown format, OSError if the file cannot be written."""
        from plait.core.base.files import replacing

        form = form or ENDINGS.get(file.suffix.lower(), "")
        if not form:
            problem = f"{file.suffix or 'no ending'} names no form"
            raise JobError(problem, key="--out", fix="Add --as toml, or end in .toml")
        text = self.to_text(form)
        with replacing(file) as partial:
            partial.write_text(text)


def read_groups(file: Path) -> dict[str, str]:
    """Return the group of each node, from a JSON object of node to group. Raises JobError."""
    from plait.core.base.codec.json_text import is_table
    from plait.formats.base.source import Source

    try:
        told = Source.read(str(file)).json
    except JobError as error:
        raise error if error.file else error.in_file(str(file)) from None
    if not is_table(told) or not told or not all(isinstance(group, (str, int)) for group in told.values()):
        raise JobError("is not an object of node to group", file=str(file), fix='Write {"n1": "group 0", ...}')
    return {node: str(group) for node, group in told.items()}


def read_topology(
    path: str,
    *,
    form: str = "",
    name: str = "",
    levels: Sequence[str] = (),
    states: Sequence[str] = (),
    tolerated: Sequence[str] = (),
) -> tuple[Topology, Remarks]:
    """Return (a topology, remarks on it), as ``plait.place.topologies.read_topology``; also for
    ``lab:4x1@1gbit,2pods@300mbit``, that lab's switches and hosts. Raises JobError for a source
    that cannot be read."""
    from plait.place import topologies as readers

    if path.startswith(LAB):
        from plait.lab.spec import LabSpec

        if form or name or levels or states:
            raise JobError("a lab has no formats, names or states", key="--topology", fix="Leave them out")
        return LabSpec.parse(path.removeprefix(LAB)).as_topology, readers.Remarks()
    return readers.read_topology(path, form=form, name=name, levels=levels, states=states, tolerated=tolerated)

"""Where ``--topology`` may point: whatever ``plait.place.readers`` reads, and labs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.core.topology.switches import Topology
    from plait.place.readers import Remarks

LAB = "lab:"


def read_topology(
    path: str,
    *,
    form: str = "",
    name: str = "",
    levels: Sequence[str] = (),
    states: Sequence[str] = (),
    tolerated: Sequence[str] = (),
) -> tuple[Topology, Remarks]:
    """As ``plait.place.readers.read_topology``; ``lab:4x1@1gbit,2pods@300mbit`` is that lab's switches and
    hosts."""
    from plait.place import readers

    if path.startswith(LAB):
        from plait.core.base.errors import JobError
        from plait.lab.spec import LabSpec

        if form or name or levels or states:
            raise JobError("a lab has no formats, names or states", key="--topology", fix="Leave them out")
        return LabSpec.parse(path.removeprefix(LAB)).as_topology, readers.Remarks()
    return readers.read_topology(path, form=form, name=name, levels=levels, states=states, tolerated=tolerated)

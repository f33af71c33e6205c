"""Places where ranks run, by name. To add one, write a class like ``lab.InLab`` and give it a line in
``PLACES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget

LOCAL = "local"


def _in_lab(where: str) -> LaunchTarget:
    from plait.api.places.lab import InLab
    from plait.lab import LabSpec

    return InLab(LabSpec.parse(where))


def _in_slurm(where: str) -> LaunchTarget:
    from plait.api.places.slurm import InSlurm

    return InSlurm(where)


def _in_kubernetes(where: str) -> LaunchTarget:
    from plait.api.places.kubernetes import InKubernetes

    return InKubernetes(where)


PLACES: Mapping[str, Callable[[str], LaunchTarget]] = {"lab": _in_lab, "slurm": _in_slurm, "kubernetes": _in_kubernetes}
"""Makers of places, by the word before the colon; they read the rest."""


def place_of(on: str) -> LaunchTarget:
    """The place that a name such as ``local``, ``slurm:PARTITION`` or ``lab:2x1@1gbit`` stands for. Raises
    JobError for other names."""
    from plait.api.places.here import Here
    from plait.core.base.errors import JobError

    if on == LOCAL:
        return Here()
    kind, _, where = on.partition(":")
    if kind not in PLACES:
        fix = (
            "Use local, slurm or slurm:PARTITION, kubernetes or kubernetes:NAMESPACE, or lab:HOSTSxRANKS@RATE such as "
            "lab:2x1@1gbit"
        )
        raise JobError(f"'{on}' is no place to run", key="--on", fix=fix)
    return PLACES[kind](where)


def with_table(place: LaunchTarget, rank_table: Path | None) -> LaunchTarget:
    """The place with its ranks ordered by a rank table. Raises JobError for a place without hosts to
    order."""
    from dataclasses import replace

    from plait.api.places.base import Managed
    from plait.api.places.lab import InLab
    from plait.core.base.errors import JobError
    from plait.core.topology.rank_table import RankTable

    if isinstance(place, Managed):
        return replace(place, table=rank_table)
    if rank_table and isinstance(place, InLab):
        return replace(place, table=RankTable.read(rank_table))
    if rank_table:
        fix = "Use it with --on slurm, kubernetes or lab:..."
        raise JobError("orders the nodes of a cluster", key="--rank-table", fix=fix)
    return place

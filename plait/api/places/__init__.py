"""Launch targets, where ranks run, by name. To add a target, write a class like ``lab.LabTarget``
and give it a line in ``PLACES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget

LOCAL = "local"


def _in_lab(where: str) -> LaunchTarget:
    from plait.api.places.lab import LabTarget
    from plait.lab import LabSpec

    return LabTarget(LabSpec.parse(where))


def _in_slurm(where: str) -> LaunchTarget:
    from plait.api.places.slurm import SlurmTarget

    return SlurmTarget(where)


def _in_kubernetes(where: str) -> LaunchTarget:
    from plait.api.places.kubernetes import KubernetesTarget

    return KubernetesTarget(where)


PLACES: Mapping[str, Callable[[str], LaunchTarget]] = {"lab": _in_lab, "slurm": _in_slurm, "kubernetes": _in_kubernetes}
"""Functions that make launch targets, by the word before the colon; they read the text after it."""


def place_of(on: str) -> LaunchTarget:
    """Return the launch target for a name such as ``local``, ``slurm:PARTITION`` or
    ``lab:2x1@1gbit``. Raises JobError for other names."""
    from plait.api.places.base import LocalTarget
    from plait.core.base.errors import JobError

    if on == LOCAL:
        return LocalTarget()
    kind, _, where = on.partition(":")
    if kind not in PLACES:
        fix = (
            "Use local, slurm or slurm:PARTITION, kubernetes or kubernetes:NAMESPACE, or lab:HOSTSxRANKS@RATE such as "
            "lab:2x1@1gbit"
        )
        raise JobError(f"'{on}' is no place to run", key="--on", fix=fix)
    return PLACES[kind](where)


def with_table(place: LaunchTarget, rank_table: Path | None) -> LaunchTarget:
    """Return the launch target with its ranks ordered by a rank table. Raises JobError for a target
    without hosts to order."""
    from dataclasses import replace

    from plait.api.places.base import ManagedTarget
    from plait.api.places.lab import LabTarget
    from plait.core.base.errors import JobError
    from plait.core.topology.rank_table import RankTable

    if isinstance(place, ManagedTarget):
        return replace(place, table=rank_table)
    if rank_table and isinstance(place, LabTarget):
        return replace(place, table=RankTable.read(rank_table))
    if rank_table:
        fix = "Use it with --on slurm, kubernetes or lab:..."
        raise JobError("orders the nodes of a cluster", key="--rank-table", fix=fix)
    return place

"""Planned jobs, and the nodes that are kept for each until it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plait.core.base.errors import PlacementError
from plait.core.base.text import counted
from plait.place.workload import JobTrace
from plait.place.zone import check_zone


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job that is known before it comes: nodes, when it arrives, how long before it is announced, how
    long it runs; seconds from the replay's start. zone: its nodes, if a placement has chosen them."""

    nodes: int
    arrival: float
    notice: float
    duration: float = 12 * 3600.0
    zone: Sequence[int] | None = None

    @property
    def announced(self) -> float:
        """When it becomes known."""
        return self.arrival - self.notice


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """nodes of so many GPUs each; minipod: how many of them one has, numbered one after the other."""

    nodes: int
    gpus_per_node: int = 8
    minipod: int = 50


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What came of one planned job. zone: the nodes kept for it, in the end; moved: how many were exchanged
    for others meanwhile. admitted: jobs let into the zone, flexible: the preemptible ones of them. late: jobs
    let in by a prediction that were still there when the planned job came; spared: preemptible ones that
    were; held: those that nobody let in. announced, before, at: share of the zone that others held when it
    was announced, just before the planned arrival, and just after. start, end: when the planned job ran."""

    zone: tuple[int, ...] = ()
    moved: int = 0
    admitted: int = 0
    flexible: int = 0
    late: int = 0
    spared: int = 0
    held: int = 0
    announced: float | None = None
    before: float | None = None
    at: float | None = None
    start: float | None = None
    end: float | None = None


@dataclass(kw_only=True)
class Reservation:
    """One under way. number: of its nodes in the pool, from 1. closed: the planned job waits, or runs, in its
    zone, and nobody else is let in."""

    number: int
    planned: Planned
    zone: list[int] = field(default_factory=list[int])
    closed: bool = False
    kept: Kept = field(default_factory=Kept)

    @property
    def open(self) -> bool:
        """Whether jobs may be let in that end before it is due."""
        return bool(self.zone) and not self.closed

    @property
    def due(self) -> float:
        """When the zone must be empty."""
        return self.planned.arrival

    def note(self, **values: object) -> None:
        """Set fields of what came of it."""
        self.kept = replace(self.kept, **values)  # type: ignore[arg-type]

    def count(self, name: str, more: int = 1) -> None:
        """Add to one of its counts."""
        self.note(**{name: getattr(self.kept, name) + more})


def check_planned(planned: Sequence[Planned], cluster: ClusterShape) -> None:
    """Raise PlacementError for planned jobs that no cluster of this shape can take, alone or together."""
    for one in planned:
        if not 0 < one.nodes <= cluster.nodes:
            raise PlacementError(
                f"The planned job wants {counted(one.nodes, 'node')}; the cluster has {cluster.nodes:,}. Reserve from "
                "1 to as many."
            )
        if one.notice < 0 or one.announced < 0:
            raise PlacementError(
                f"The planned job arrives {one.arrival / 3600:g} h after the replay's start and is announced "
                f"{one.notice / 3600:g} h before that. Let it arrive later, or be announced later."
            )
        if one.zone is not None:
            check_zone(one.zone, cluster.nodes, one.nodes)
    for one in planned:
        beside = [other for other in planned if other.announced <= one.announced < other.arrival + other.duration]
        asked = sum(other.nodes for other in beside)
        if asked > cluster.nodes:
            raise PlacementError(
                f"{counted(len(beside), 'planned job')} want {counted(asked, 'node')} at one time, "
                f"{one.announced / 3600:g} h after the replay's start, when one of them is announced; the cluster has "
                f"{cluster.nodes:,}. Let one arrive when another has ended."
            )
        taken = [node for other in beside for node in other.zone or ()]
        if len(set(taken)) < len(taken):
            raise PlacementError("The zones of two planned jobs share nodes at one time. Choose others.")


def queued(jobs: JobTrace, planned: Sequence[Planned], cluster: ClusterShape) -> JobTrace:
    """Planned jobs as ones that queue when they come, behind those that came at the same time. Their numbers
    are -1, -2, ..."""
    order = sorted(range(len(planned)), key=lambda at: planned[at].arrival)
    values = {
        "submit": [planned[at].arrival for at in order],
        "duration": [planned[at].duration for at in order],
        "gpus": [planned[at].nodes * cluster.gpus_per_node for at in order],
        "mean": [np.inf] * len(order),
        "upper": [np.inf] * len(order),
        "preemptible": [False] * len(order),
        "job": [-1 - at for at in order],
    }
    where = np.searchsorted(jobs.submit, values["submit"], side="right")
    return replace(jobs, **{name: np.insert(getattr(jobs, name), where, own) for name, own in values.items()})

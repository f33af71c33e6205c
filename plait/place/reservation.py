"""Planned jobs, and the nodes that are kept for each until it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plait.core.base.errors import PlacementError
from plait.core.base.text import counted
from plait.place.workload import JobTrace
from plait.place.zone import JobShape, Zone, check_zone


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job that is known before it comes: nodes, when it arrives, how long before it is announced, how
    long it runs; seconds from the replay's start. spares: nodes kept beside its own, which are lent to
    preemptible jobs while it runs. shape: its groups, if they are to be placed when it is announced.
    zone: its nodes, then its spares, if a placement has chosen them."""

    nodes: int
    arrival: float
    notice: float
    duration: float = 12 * 3600.0
    spares: int = 0
    shape: JobShape | None = None
    zone: Sequence[int] | None = None
    closes: float = 0.0

    @property
    def kept(self) -> int:
        """Nodes that are reserved."""
        return self.nodes + self.spares

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
class KeptZone:
    """What came of one planned job. zone: the nodes kept for it, in the end, spares: those beside them;
    pp_spread, dp_spread: minipods of its most spread PP group and DP group, if it was placed; moved: how
    many nodes were exchanged for others meanwhile. lent: starts of preemptible jobs on the spares.
    admitted: jobs let into the zone, flexible: the preemptible ones of them. late: jobs let in by a
    prediction that were still there when the planned job came; spared: preemptible ones that were; held:
    those that nobody let in. announced, before, at: share of the zone that others held when it was
    announced, just before the planned arrival, and just after. start, end: when the planned job ran."""

    zone: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    pp_spread: int | None = None
    dp_spread: int | None = None
    moved: int = 0
    lent: int = 0
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


NOTHING = Zone(nodes=[], spares=[])
"""Of a planned job that has none."""


@dataclass(kw_only=True)
class Reservation:
    """One under way. number: from 1. zone: its nodes; empty before it is announced and when it has ended.
    closed: the planned job waits, or runs, in its zone, and nobody else is let in."""

    number: int
    planned: Planned
    zone: Zone = NOTHING
    closed: bool = False
    kept: KeptZone = field(default_factory=KeptZone)

    @property
    def part(self) -> int:
        """Of its nodes in the pool; until it comes, of its spares, too."""
        return 2 * self.number - 1

    @property
    def spare_part(self) -> int:
        """Of its spares once it has come."""
        return 2 * self.number

    @property
    def nodes(self) -> list[int]:
        """All that are reserved, the spares behind its own."""
        return [*self.zone.nodes, *self.zone.spares]

    @property
    def open(self) -> bool:
        """Whether jobs may be let in that end before it is due."""
        return bool(self.zone.nodes) and not self.closed

    @property
    def lends(self) -> bool:
        """Whether preemptible jobs may start on its spares."""
        return self.closed and bool(self.zone.spares)

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
        if not 0 < one.nodes <= one.kept <= cluster.nodes:
            spare = f" and {one.spares} spare" if one.spares else ""
            raise PlacementError(
                f"The planned job wants {counted(one.nodes, 'node')}{spare}; the cluster has {cluster.nodes:,}. "
                "Reserve from 1 to as many."
            )
        if (shape := one.shape) and shape.rows * shape.columns != one.nodes:
            raise PlacementError(
                f"The planned job has {counted(one.nodes, 'node')}, and its shape of {shape.rows} PP groups and "
                f"{counted(shape.columns, 'stage')} has {shape.rows * shape.columns}. Let them agree."
            )
        if one.notice < 0 or one.announced < 0:
            raise PlacementError(
                f"The planned job arrives {one.arrival / 3600:g} h after the replay's start and is announced "
                f"{one.notice / 3600:g} h before that. Let it arrive later, or be announced later."
            )
        if one.zone is not None:
            check_zone(one.zone, cluster.nodes, one.kept)
    for one in planned:
        beside = [other for other in planned if other.announced <= one.announced < other.arrival + other.duration]
        asked = sum(other.kept for other in beside)
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
    """Planned jobs as ones that queue when they come, with the highest priority that any job has, behind
    those that came at the same time. Their numbers are -1, -2, ..."""
    order = sorted(range(len(planned)), key=lambda at: planned[at].arrival)
    values = {
        "submit": [planned[at].arrival for at in order],
        "duration": [planned[at].duration for at in order],
        "gpus": [planned[at].nodes * cluster.gpus_per_node for at in order],
        "mean": [np.inf] * len(order),
        "upper": [np.inf] * len(order),
        "preemptible": [False] * len(order),
        "priority": [jobs.priority.max(initial=0)] * len(order),
        "job": [-1 - at for at in order],
    }
    where = np.searchsorted(jobs.submit, values["submit"], side="right")
    return replace(jobs, **{name: np.insert(getattr(jobs, name), where, own) for name, own in values.items()})

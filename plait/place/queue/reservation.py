"""Planned jobs, and the nodes that are reserved for each until it arrives.

Choice of the nodes, unless a placement is given. For a job of known shape they are its placement:
the spreads of its groups over minipods, weighted by alpha (eq. 2 of Arnold), against the number of
nodes that other jobs will still hold when it arrives. For any other job they are whole minipods,
those with the most nodes that will be empty in time, so that the job lies in few of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import PlacementError
from plait.core.base.text import counted
from plait.place.placing import arranged, hosts_of
from plait.place.queue.workload import JobTrace
from plait.place.solve.exact import exact
from plait.place.solve.problem import Pool, Problem, Spares, spread_of


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """Shape of a planned job. rows, columns: number of PP groups and of stages; each cell is one
    node. alpha: weight of the DP groups' spread. price: of a node that another job has to leave, in
    units of the score; 0: 1 / nodes of a minipod, so that emptying one minipod costs as much as one
    more minipod of spread."""

    rows: int
    columns: int
    alpha: float = 0.3
    price: float = 0.0

    def price_in(self, minipod: int) -> float:
        """Return the price of a node that another job has to leave, in units of the score, for
        minipods of ``minipod`` nodes."""
        return self.price or 1.0 / minipod


@dataclass(frozen=True, kw_only=True)
class Zone:
    """Nodes reserved for a planned job. nodes: the job's own, by node rank if its shape is known.
    spares: additional nodes. pp_spread, dp_spread: minipods of the most spread PP group and DP
    group; None for a job without shape. worth: the score of these spreads, converted to a number of
    nodes to empty."""

    nodes: list[int]
    spares: list[int]
    pp_spread: int | None = None
    dp_spread: int | None = None
    worth: float = 0.0

    def cost(self, stays: Sequence[float]) -> float:
        """Return the cost of a zone in nodes: those that other jobs will still hold (stays: the
        share of each node), plus the score of the spreads."""
        return self.worth + sum(stays[node] for node in (*self.nodes, *self.spares))


def make_zone(stays: Sequence[float], nodes: int, spares: int, minipod: int, shape: JobShape | None) -> Zone:
    """Return the zone of a planned job: ``nodes`` nodes and ``spares`` more. stays: for each node
    of the cluster, the share of it that is not free in time (0: all free; inf: not available).
    minipod: number of nodes of a minipod, which are numbered consecutively. shape: its groups,
    which are placed; None: whole minipods are preferred."""
    own = choose_zone(stays, nodes + spares, minipod)
    if shape is None:
        return Zone(nodes=own[:nodes], spares=own[nodes:])
    cost = np.asarray(stays, float)
    fewest = np.full(len(cost), np.inf)
    fewest[own] = cost[own]
    levels = [np.where(cost <= most, cost, np.inf) for most in np.unique(cost[np.isfinite(cost)])]
    enough = [usable for usable in levels if np.isfinite(usable).sum() >= nodes + spares]
    placed = [_placed(usable, spares, minipod, shape) for usable in (fewest, *enough)]
    return min(placed, key=lambda zone: zone.cost(stays))


def _placed(cost: NDArray[np.float64], spares: int, minipod: int, shape: JobShape) -> Zone:
    """Return the zone on nodes of finite cost, in each minipod on the cheapest ones, with the
    groups of ``shape`` placed."""
    pools: list[Pool] = []
    for first in range(0, len(cost), minipod):
        own = cost[first : first + minipod]
        order = [at for at in np.argsort(own, kind="stable").tolist() if own[at] < np.inf]
        pools.append(Pool(minipod=str(first), leaves=(tuple(str(first + at) for at in order),) if order else ()))
    problem = Problem(
        heights=(shape.rows,) * shape.columns, pools=tuple(pools), alpha=shape.alpha, spares=Spares(total=spares),
        limit=0.0,
    )  # fmt: skip
    cells = arranged(problem, exact(problem).cells)
    hosts, spread = hosts_of(problem, cells), spread_of(problem, cells)
    return Zone(
        nodes=list(map(int, hosts.nodes)), spares=list(map(int, hosts.spares)), pp_spread=spread.rows,
        dp_spread=spread.columns, worth=problem.score(spread.rows, spread.columns) / shape.price_in(minipod),
    )  # fmt: skip


def choose_zone(stays: Sequence[float], nodes: int, minipod: int) -> list[int]:
    """Return the numbers of ``nodes`` nodes of the cluster, minipod after minipod: the one first
    whose nodes are the most free on average. stays: for each node, the share of it that is not free
    in time. minipod: nodes of a minipod.

    >>> choose_zone([1, 1, 0, 0, 0, 1], nodes=3, minipod=2)
    [2, 3, 4]
    """
    cost = np.asarray(stays, float)
    assert 0 < nodes <= np.isfinite(cost).sum()
    pods = [
        first + np.flatnonzero(np.isfinite(cost[first : first + minipod])) for first in range(0, len(cost), minipod)
    ]
    pods = [pod for pod in pods if len(pod)]
    chosen: list[int] = []
    open_pods = list(range(len(pods)))
    while len(chosen) < nodes:
        missing = nodes - len(chosen)

        def price(pod: int, missing: int = missing) -> tuple[float, int]:
            best = np.sort(cost[pods[pod]])[:missing]
            return (float(best.sum()) / len(best), pod)

        pod = min(open_pods, key=price)
        open_pods.remove(pod)
        own = pods[pod][np.argsort(cost[pods[pod]], kind="stable")][:missing]
        chosen.extend(own.tolist())
    return sorted(chosen)


def check_zone(zone: Iterable[int], nodes: int, wanted: int) -> list[int]:
    """Return the zone of a placement, without duplicates. Raises PlacementError unless it has
    ``wanted`` different nodes of the cluster."""
    found = list(dict.fromkeys(zone))
    if len(found) != wanted or not 0 <= min(found) <= max(found) < nodes:
        raise PlacementError(
            f"The zone given has {len(found)} nodes; {wanted} different ones from 0 to {nodes - 1} are needed."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job that is known before it arrives.

    nodes; arrival: seconds from the replay's start; notice: seconds between announcement and
    arrival; duration: seconds that it runs. spares: additional nodes, which are lent to preemptible
    jobs while it runs. shape: its groups, if it is to be placed when it is announced. zone: its
    nodes, then its spares, if a placement has chosen them. closes: seconds before the arrival from
    which no job may enter the zone.
    """

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
        """Number of reserved nodes."""
        return self.nodes + self.spares

    @property
    def announced(self) -> float:
        """Time of the announcement, in seconds from the replay's start."""
        return self.arrival - self.notice


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """Size of a cluster. nodes: number of nodes, each with ``gpus_per_node`` GPUs. minipod: nodes
    per minipod, numbered consecutively."""

    nodes: int
    gpus_per_node: int = 8
    minipod: int = 50


@dataclass(frozen=True, kw_only=True)
class KeptZone:
    """Result of one planned job.

    zone: its nodes in the end; spares: additional nodes; pp_spread, dp_spread: minipods of its most
    spread PP group and DP group, if it was placed; moved: nodes exchanged for others in the
    meantime. lent: starts of preemptible jobs on the spares. admitted: jobs let into the zone;
    flexible: the preemptible ones of them. late: jobs admitted by a prediction that were still
    there when the planned job arrived; spared: preemptible ones that were; held: jobs that were
    there without admission. announced, before, at: share of the zone that other jobs held when it
    was announced, just before the planned arrival, and just after. start, end: times of the planned
    job's run.
    """

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


NO_ZONE = Zone(nodes=[], spares=[])
"""The zone of a planned job without reserved nodes: before the announcement and after the end."""


@dataclass(kw_only=True)
class Reservation:
    """A reservation in progress. number: from 1. zone: its nodes; empty before the announcement and
    after the end. closed: True once the planned job waits, or runs, in its zone, and no other job
    is admitted."""

    number: int
    planned: Planned
    zone: Zone = NO_ZONE
    closed: bool = False
    kept: KeptZone = field(default_factory=KeptZone)

    @property
    def part(self) -> int:
        """Number of the part of the pool that holds the planned job's nodes, and its spares until
        it arrives."""
        return 2 * self.number - 1

    @property
    def spare_part(self) -> int:
        """Number of the part of the pool that holds the planned job's spares after it has
        arrived."""
        return 2 * self.number

    @property
    def nodes(self) -> list[int]:
        """Numbers of all reserved nodes, the spares last."""
        return [*self.zone.nodes, *self.zone.spares]

    @property
    def open(self) -> bool:
        """True if jobs that end before the zone is due may enter."""
        return bool(self.zone.nodes) and not self.closed

    @property
    def lends(self) -> bool:
        """True if preemptible jobs may start on the spares."""
        return self.closed and bool(self.zone.spares)

    @property
    def due(self) -> float:
        """Time at which the zone must be empty, in seconds of the replay: the planned arrival."""
        return self.planned.arrival

    def note(self, **values: object) -> None:
        """Set fields of ``kept``, the planned job's result. values: by field of ``KeptZone``."""
        self.kept = replace(self.kept, **values)  # type: ignore[arg-type]

    def count(self, name: str, more: int = 1) -> None:
        """Add ``more`` to the field ``name`` of ``kept``, the planned job's result."""
        self.note(**{name: getattr(self.kept, name) + more})


def check_planned(planned: Sequence[Planned], cluster: ClusterShape) -> None:
    """Raise PlacementError for planned jobs that do not fit a cluster of this shape, alone or
    together."""
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
    """Return the workload with planned jobs as ordinary ones that queue when they arrive, with the
    highest priority of any job, behind jobs that arrived at the same time. Their numbers are -1,
    -2, ..."""
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

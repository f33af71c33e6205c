"""Which nodes to reserve for a planned job, where no placement has been given.

Of a job whose shape is known they are its placement: the spreads of its groups over minipods, weighted by
alpha (eq. 2 of Arnold), are traded for nodes that other jobs will still have when it comes. Of any other,
whole minipods, of which the most will be empty in time, so that the job lies in few of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import PlacementError
from plait.place.exact import exact
from plait.place.hosts import arranged, hosts_of
from plait.place.problem import Pool, Problem, Spares, spread_of


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """rows, columns: PP groups and stages, a node each cell. alpha: weight of the DP groups' spread. price:
    of a node that another job has to leave, in units of the score; 0: a minipod's share of one, so that one
    minipod less of spread is worth emptying one."""

    rows: int
    columns: int
    alpha: float = 0.3
    price: float = 0.0

    def price_in(self, minipod: int) -> float:
        """Of a node, where minipods have so many."""
        return self.price or 1.0 / minipod


@dataclass(frozen=True, kw_only=True)
class Zone:
    """nodes: of a planned job, by node rank where its shape is known. spares: nodes kept beside them.
    pp_spread, dp_spread: minipods of its most spread PP group and DP group; None for a job of no shape.
    worth: nodes to empty that its score weighs as much as."""

    nodes: list[int]
    spares: list[int]
    pp_spread: int | None = None
    dp_spread: int | None = None
    worth: float = 0.0

    def cost(self, stays: Sequence[float]) -> float:
        """Nodes that others will still have, by share of each, and what the spread weighs."""
        return self.worth + sum(stays[node] for node in (*self.nodes, *self.spares))


def make_zone(stays: Sequence[float], nodes: int, spares: int, minipod: int, shape: JobShape | None) -> Zone:
    """For a planned job. stays: for each node of the cluster the share of it that costs to empty (0: free in
    time; inf: it may not be taken). minipod: nodes of one, numbered one after the other."""
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
    """The placement on the nodes of finite cost, in each minipod on those that cost least."""
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
    """``nodes`` of the cluster, packed by minipod; the rest as for ``make_zone``.

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
    """A zone given by a placement: as many different nodes of the cluster as are wanted, in its order."""
    found = list(dict.fromkeys(zone))
    if len(found) != wanted or not 0 <= min(found) <= max(found) < nodes:
        raise PlacementError(
            f"The zone given has {len(found)} nodes; {wanted} different ones from 0 to {nodes - 1} are needed."
        )
    return found

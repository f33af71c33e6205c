"""Which nodes to reserve for a planned job, where no placement has been given: whole minipods, of which the
most will be empty in time, so that the job lies in few of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def choose_zone(stays: Sequence[float], nodes: int, minipod: int) -> list[int]:
    """``nodes`` of the cluster, packed by minipod. stays: for each node of the cluster what it costs to
    empty it (0: free in time; inf: it may not be taken). minipod: nodes of one, numbered one after the other.

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
    """A zone given by a placement: as many different nodes of the cluster as are wanted."""
    from plait.core.base.errors import PlacementError

    found = sorted(set(zone))
    if len(found) != wanted or not 0 <= found[0] <= found[-1] < nodes:
        raise PlacementError(
            f"The zone given has {len(found)} nodes; {wanted} different ones from 0 to {nodes - 1} are needed."
        )
    return found

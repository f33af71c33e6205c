"""``place``: the one contract of all methods, and what every answer gets: hosts, spreads, bound, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from plait.core.base.errors import PlacementError, nearest
from plait.core.topology.placement import Placement
from plait.place.answer import Assignment
from plait.place.baselines import best_fit, gpu_packing, random_fit
from plait.place.bipartition import topology_aware
from plait.place.bounds import lower_bound
from plait.place.brute import brute_force
from plait.place.cpsat import cpsat
from plait.place.exact import exact
from plait.place.hosts import arranged, hosts_of
from plait.place.mip import mip
from plait.place.problem import Problem, check_legal, seconds_of, spread_of

Method = Callable[[Problem], Assignment]
METHODS: Mapping[str, Method] = {"exact": exact, "mip": mip, "cpsat": cpsat}
BASELINES: Mapping[str, Method] = {
    "best-fit": best_fit,
    "random-fit": random_fit,
    "gpu-packing": gpu_packing,
    "topology-aware": topology_aware,
}


class PlacementMethod(Protocol):
    """What places."""

    def __call__(self, problem: Problem) -> Placement: ...


def place(problem: Problem, method: str = "exact") -> Placement:
    """Raises PlacementError for too few nodes, or for what a method cannot say."""
    known = {**METHODS, **BASELINES, "brute-force": brute_force}
    if method not in known:
        raise PlacementError(f"No method '{method}'{nearest(method, known)}. Use one of {', '.join(known)}.")
    problem.check_room()
    begun = time.perf_counter()
    answer = known[method](problem)
    cells = arranged(problem, answer.cells)
    check_legal(problem, cells)
    bound = max(lower_bound(problem), answer.bound)
    hosts = hosts_of(problem, cells, answer.row_spares)
    spread = spread_of(problem, cells)
    took = time.perf_counter() - begun
    pods = [problem.minipod_of[pool] for pool in cells]
    dp, pp, ep = seconds_of(problem, pods, spread.rows) or (None, None, None)
    return Placement(
        hosts=hosts.nodes,
        minipods=tuple(problem.minipods[pod] for pod in pods for _ in range(problem.nodes_per_cell)),
        heights=problem.heights,
        nodes_per_cell=problem.nodes_per_cell,
        ranks_per_node=problem.ranks_per_node,
        spares=hosts.spares,
        preempted=hosts.preempted,
        row_spread=spread.rows,
        column_spread=spread.columns,
        used=spread.used,
        crossings=spread.crossings,
        alpha=problem.alpha,
        by=problem.by,
        score=problem.score(spread.rows, spread.columns) + (problem.price or 0.0) * len(hosts.preempted),
        bound=bound,
        method=method,
        note=answer.note,
        dp_seconds=dp,
        pp_seconds=pp,
        ep_seconds=ep,
        plan=problem.plan,
        topology=problem.topology,
        solved_in=took,
    )

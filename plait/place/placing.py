"""``place``: the one contract of all methods, and what every answer gets: hosts, spreads, bound, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from plait.core.base.errors import PlacementError, nearest
from plait.core.topology.placement import Placement
from plait.place.answer import Assignment
from plait.place.bounds import lower_bound
from plait.place.cpsat import cpsat
from plait.place.exact import exact
from plait.place.hosts import arranged, hosts_of
from plait.place.problem import Problem, check_legal, seconds_of, spread_of
from plait.place.program import mip

Method = Callable[[Problem], Assignment]
METHODS: Mapping[str, Method] = {"exact": exact, "cpsat": cpsat, "program": mip}


def place(problem: Problem, method: str = "exact") -> Placement:
    """Raises PlacementError for too few nodes, or for what a method cannot say."""
    if method not in METHODS:
        raise PlacementError(f"No method '{method}'{nearest(method, METHODS)}. Use one of {', '.join(METHODS)}.")
    return placed_by(problem, METHODS[method], method)


def placed_by(problem: Problem, method: Method, name: str) -> Placement:
    """What a method of any name answers, checked. Raises PlacementError as ``place`` does."""
    problem.check_room()
    begun = time.perf_counter()
    answer = method(problem)
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
        row_leaves=hosts.row_leaves,
        column_leaves=hosts.column_leaves,
        used=spread.used,
        crossings=spread.crossings,
        alpha=problem.alpha,
        by=problem.by,
        score=problem.score(spread.rows, spread.columns) + (problem.price or 0.0) * len(hosts.preempted),
        bound=bound,
        method=name,
        note=answer.note,
        dp_seconds=dp,
        pp_seconds=pp,
        ep_seconds=ep,
        plan=problem.plan,
        topology=problem.topology,
        solved_in=took,
    )

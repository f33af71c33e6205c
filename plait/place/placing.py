"""``place``: the one contract of all methods, and what every answer gets: hosts, spreads, bound, seconds.

What is chosen inside a minipod changes little (0.3 % at most, Arnold, section 4), so leaves are kept whole
for the jobs that come next: as few as can be are touched, and the last one is the fullest by what is taken.
Inside, rows stay contiguous: cells are filled row by row, leaf by leaf, so that a ring along a column leaves
each leaf and each minipod once.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from plait.core.base.errors import PlacementError, nearest
from plait.core.topology.placement import Placement
from plait.place.answer import Assignment
from plait.place.bounds import lower_bound
from plait.place.cpsat import cpsat
from plait.place.exact import exact
from plait.place.problem import Cells, Pool, Problem, check_legal, seconds_of, spread_of

Method = Callable[[Problem], Assignment]
METHODS: Mapping[str, Method] = {"exact": exact, "cpsat": cpsat}


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


# ---- from pools to hosts ----


class PlacedHosts(NamedTuple):
    """nodes: by node rank. spares, preempted: beside them, and among them."""

    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    preempted: tuple[str, ...]


def hosts_of(problem: Problem, cells: Cells, row_spares: Sequence[int] = ()) -> PlacedHosts:
    """Of an answer. row_spares: pools of the spare nodes of rows. Raises PlacementError if spares cannot be
    kept."""
    order = sorted(range(len(cells)), key=lambda cell: _row_major(problem, cell))
    own: dict[int, list[int]] = {}
    for cell in order:
        own.setdefault(cells[cell], []).append(cell)
    each = problem.nodes_per_cell
    nodes = [""] * (len(cells) * each)
    preempted: list[str] = []
    left: dict[int, list[str]] = {}
    for at, pool in enumerate(problem.pools):
        count, kept = len(own.get(at, ())) * each, problem.spares.per_minipod + row_spares.count(at)
        free = min(count, max(0, pool.free - kept))
        chosen, left[at] = _chosen(pool, free, each)
        chosen += pool.held[: count - free]
        preempted += chosen[free:]
        for number, cell in enumerate(own.get(at, ())):
            nodes[cell * each : (cell + 1) * each] = chosen[number * each : (number + 1) * each]
    return PlacedHosts(tuple(nodes), tuple(_spares(problem, cells, left, row_spares)), tuple(preempted))


def arranged(problem: Problem, cells: Cells) -> Cells:
    """The same spreads with rows in the order that leaves fewest crossings: rows are alike."""
    if problem.shape is None:
        return cells
    rows, columns = problem.shape
    patterns = [cells[row::rows] for row in range(rows)]
    ordered = sorted(patterns)

    def crossings(found: Sequence[Cells]) -> int:
        return sum(a != b for one, two in itertools.pairwise(found) for a, b in zip(one, two, strict=True))

    best = ordered if crossings(ordered) < crossings(patterns) else patterns
    return tuple(best[row][column] for column in range(columns) for row in range(rows))


def _row_major(problem: Problem, cell: int) -> tuple[float, int]:
    """Where a cell's row begins, as a share of its column, and its column."""
    column, at = 0, cell
    while at >= problem.heights[column]:
        at -= problem.heights[column]
        column += 1
    return at / problem.heights[column], column


def _chosen(pool: Pool, count: int, each: int) -> tuple[list[str], list[str]]:
    """``count`` free hosts of a pool in the order of its leaves, and those that are left."""
    rest, taken = count, [0] * len(pool.leaves)
    open_leaves = sorted(range(len(pool.leaves)), key=lambda leaf: -len(pool.leaves[leaf]))
    while rest:
        fits = [leaf for leaf in open_leaves if len(pool.leaves[leaf]) >= rest]
        leaf = fits[-1] if fits else open_leaves[0]
        size = len(pool.leaves[leaf])
        whole = min(rest, size // each * each)
        taken[leaf] = whole or min(rest, size)  # a block that no leaf can hold whole is cut after all
        open_leaves.remove(leaf)
        rest -= taken[leaf]
        if not open_leaves:  # what blocks have left over
            for at, names in enumerate(pool.leaves):
                more = min(rest, len(names) - taken[at])
                taken[at] += more
                rest -= more
    chosen = [name for leaf, number in zip(pool.leaves, taken, strict=True) for name in leaf[:number]]
    left = [name for leaf, number in zip(pool.leaves, taken, strict=True) if number for name in leaf[number:]]
    left += [name for leaf, number in zip(pool.leaves, taken, strict=True) if not number for name in leaf]
    return chosen, left


def _spares(problem: Problem, cells: Cells, left: dict[int, list[str]], row_spares: Sequence[int]) -> list[str]:
    """Beside the job's own leaves first."""
    found: list[str] = []
    used = Counter(cells)

    wanted = [pool for pool in sorted(used) for _ in range(problem.spares.per_minipod)] + list(row_spares)
    for pool in wanted:
        if not left[pool]:
            raise PlacementError(
                f"{problem.pools[pool].minipod} has no node left to be a spare. Keep fewer spares, or use "
                "place.method=cpsat."
            )
        found.append(left[pool].pop(0))
    for _ in range(problem.spares.total):
        pool = max(left, key=lambda at: (used[at] > 0 and bool(left[at]), len(left[at])))
        if not left[pool]:
            raise PlacementError("No node is left to be a spare. Keep fewer.")
        found.append(left[pool].pop(0))
    return found

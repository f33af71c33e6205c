"""Hosts of a placement inside its minipods, by leaf switch.

Leaves are kept whole for the jobs that come next: as few as can be are touched, and the last one is the
fullest by what is taken. How far groups spread over leaves is the second term of a placement, after their
spread over minipods: inside one the choice changed throughput by 0.3 % at most (Arnold, section 4), but
nodes that exchange much data belong under one switch, where their flows meet no others (MegaScale, arXiv
2402.15627, section 3.6). Cells are filled in bands of columns, row by row within one: bands as wide as
the job keep rows on few leaves, of one column keep columns there. The band is taken whose leaves,
weighted by alpha as minipods are, are fewest; at a tie the widest, so that a ring along a column leaves
each leaf once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plait.core.base.errors import PlacementError
from plait.place.problem import Cells, Pool, Problem


class PlacedHosts(NamedTuple):
    """nodes: by node rank. spares, preempted: beside them, and among them. row_leaves, column_leaves: leaves
    of the most spread PP group and DP group."""

    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    preempted: tuple[str, ...]
    row_leaves: int
    column_leaves: int


def hosts_of(problem: Problem, cells: Cells, row_spares: Sequence[int] = ()) -> PlacedHosts:
    """Of an answer. row_spares: pools of the spare nodes of rows. Raises PlacementError if spares cannot be
    kept."""
    columns = len(problem.heights)
    widths = [columns]
    if any(len(pool.leaves) > 1 for pool in problem.pools):
        widths += [1 << at for at in range((columns - 1).bit_length())]
    leaf_of = {
        name: (pod, at)
        for pod, pool in enumerate(problem.pools)
        for at, leaf in enumerate(pool.leaves)
        for name in leaf
    }
    return min(
        (_filled(problem, cells, row_spares, width, leaf_of) for width in widths),
        key=lambda found: problem.alpha * found.column_leaves + (1 - problem.alpha) * found.row_leaves,
    )


def leaf_spread(problem: Problem, nodes: Sequence[str], leaf_of: Mapping[str, object]) -> tuple[int, int]:
    """Leaves of the most spread row and column. nodes: hosts by node rank; one whose leaf is not known, since
    another job holds it, counts as one of its own."""
    each = problem.nodes_per_cell
    leaves = [{leaf_of.get(host, host) for host in nodes[at : at + each]} for at in range(0, len(nodes), each)]
    rows, columns = (
        max(len(set().union(*(leaves[cell] for cell in group))) for group in groups)
        for groups in (problem.rows, problem.columns)
    )
    return rows, columns


def _filled(
    problem: Problem, cells: Cells, row_spares: Sequence[int], width: int, leaf_of: Mapping[str, object]
) -> PlacedHosts:
    """Leaves filled in bands of so many columns."""
    places = {
        cell: (at / len(own), column) for column, own in enumerate(problem.columns) for at, cell in enumerate(own)
    }

    def in_bands(cell: int) -> tuple[int, float, int]:
        row, column = places[cell]
        return column // width, row, column

    order = sorted(range(len(cells)), key=in_bands)
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
    spares = tuple(_spares(problem, cells, left, row_spares))
    return PlacedHosts(tuple(nodes), spares, tuple(preempted), *leaf_spread(problem, nodes, leaf_of))


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

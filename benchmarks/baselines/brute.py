"""Enumeration of small problems, as the paper does for comparison: all multisets of ways to place one row,
since rows are alike. C(K^U + R - 1, R) of them for R rows of U cells over K minipods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, product
from math import comb, inf

from plait.core.base.errors import PlacementError
from plait.place.solve.problem import Assignment, Problem

MOST = 5_000_000


def brute_force(problem: Problem) -> Assignment:
    """Raises PlacementError for what would take too long, or is no matrix of equal columns."""
    if not problem.is_plain or problem.spares.per_row:
        raise PlacementError("Enumeration is for plain matrices of equal columns: set place.method=cpsat.")
    assert problem.shape is not None
    rows, columns = problem.shape
    free = problem.capacity
    ways = comb(len(free) ** columns + rows - 1, rows)
    if ways > MOST:
        raise PlacementError(f"There are {ways:.1e} ways to place this job, too many to try. Place it otherwise.")
    best, found = inf, None
    for chosen in combinations_with_replacement(product(range(len(free)), repeat=columns), rows):
        score = problem.score(_widest(chosen), _widest(list(zip(*chosen, strict=True))))
        if score < best and _fits(chosen, free):
            best, found = score, chosen
    if found is None:
        raise PlacementError("No placement has room for all nodes.")
    return Assignment(
        tuple(row[column] for column in range(columns) for row in found), bound=best, note="all were tried"
    )


def _widest(groups: Sequence[Sequence[int]]) -> int:
    return max(len(set(group)) for group in groups)


def _fits(rows: Sequence[Sequence[int]], free: Sequence[int]) -> bool:
    counts = [0] * len(free)
    for row in rows:
        for pod in row:
            counts[pod] += 1
    return all(count <= room for count, room in zip(counts, free, strict=True))

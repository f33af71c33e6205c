"""What schedulers do that know nothing of a job's groups: for comparison.

As Arnold names them (arXiv 2509.15940, figure 7), each after the scheduler it stands for. All take cells
in a fixed order, row by row unless ``by_column``; on row order their PP groups come out best.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from plait.place.solve.problem import Assignment, Problem

SEED = 0


def best_fit(problem: Problem, *, by_column: bool = False) -> Assignment:
    """Each next node in the minipod with the fewest free nodes (Panigrahy et al.)."""
    free = list(problem.capacity)

    def pods() -> Iterator[int]:
        while True:
            yield min((pod for pod in range(len(free)) if free[pod]), key=lambda pod: free[pod])

    return _filled(problem, free, pods(), by_column)


def random_fit(problem: Problem, *, by_column: bool = False, seed: int = SEED) -> Assignment:
    """Each next node in any minipod with a free one, all with the same chance (HiveD's balanced baseline)."""
    free, chance = list(problem.capacity), random.Random(seed)

    def pods() -> Iterator[int]:
        while True:
            yield chance.choice([pod for pod in range(len(free)) if free[pod]])

    return _filled(problem, free, pods(), by_column)


def gpu_packing(problem: Problem, *, by_column: bool = False) -> Assignment:
    """The rest in the tightest minipod that holds all of it, if one does; else the emptiest is filled first
    (MLaaS in the wild; Gandiva)."""
    free, rest = list(problem.capacity), problem.num_cells

    def pods() -> Iterator[int]:
        nonlocal rest
        while rest:
            holding = [pod for pod in range(len(free)) if free[pod] >= rest]
            pod = min(holding, key=lambda at: free[at]) if holding else max(range(len(free)), key=lambda at: free[at])
            count = min(free[pod], rest)
            rest -= count
            yield from [pod] * count

    return _filled(problem, free, pods(), by_column)


def _filled(problem: Problem, free: list[int], pods: Iterator[int], by_column: bool) -> Assignment:
    cells = [-1] * problem.num_cells
    for cell in cell_order(problem, by_column):
        pod = next(pods)
        free[pod] -= 1
        cells[cell] = pod
    return Assignment(tuple(cells), note="column by column" if by_column else "row by row")


def cell_order(problem: Problem, by_column: bool) -> list[int]:
    """Cells column by column, or row by row."""
    if by_column:
        return list(range(problem.num_cells))
    return list(dict.fromkeys(cell for row in problem.rows for cell in row))

"""The paper's own program (Arnold, arXiv 2509.15940, eq. 4-10), by HiGHS through scipy.

A unit is one PP group, or one DP group. It minimises weight x minipods used + (1 - weight) x T, where T is
the largest spread of a unit: the number of minipods only bounds the spread of the other groups from above,
which is why bands beat it. Shares of a unit are whole nodes here; as printed they are real numbers, which
need not be any.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from plait.core.base.errors import PlacementError
from plait.place.answer import Assignment
from plait.place.problem import Problem


def mip(problem: Problem) -> Assignment:
    """Units are PP groups unless the problem says DP. Raises PlacementError where the program cannot say what
    is asked for, or no plan is found in time."""
    if not problem.plain_enough or problem.spares.per_row or problem.by != "spread":
        raise PlacementError(
            "The paper's program knows equal groups only, and neither forbidden pairs, nodes to be preempted, "
            "several types of GPU, spares for each group nor seconds: set place.method=cpsat."
        )
    assert problem.shape is not None
    rows, columns = problem.shape
    by_column = problem.unit == "dp"
    units, size = (columns, rows) if by_column else (rows, columns)
    weight = 1 - problem.alpha if by_column else problem.alpha
    solved = _solved(problem, units, size, weight)
    if solved.x is None:
        raise PlacementError(f"The program found no plan in {problem.limit:g} s. Allow more with place.limit.")
    pods = len(problem.capacity)
    sequences: list[list[int]] = []
    for unit in range(units):
        counts = [round(value) for value in solved.x[pods + 1 + unit * pods : pods + 1 + (unit + 1) * pods]]
        sequences.append([pod for pod, count in enumerate(counts) for _ in range(count)])
    if by_column:
        cells = [pod for sequence in sequences for pod in sequence]
    else:
        cells = [sequence[column] for column in range(columns) for sequence in sequences]
    note = f"program: {solved.fun:.3g}, bound {solved.mip_dual_bound:.3g}, gap {solved.mip_gap:.1%}"
    return Assignment(tuple(cells), note=note)


def _solved(problem: Problem, units: int, size: int, weight: float) -> Any:
    """Variables: y of every minipod, T, n of every (unit, minipod) in nodes, s likewise."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, hstack, kron

    free = np.array(problem.capacity, dtype=float)
    pods, pairs = len(free), units * len(free)
    most = np.minimum(free, size)
    each_unit, each_pod = eye_array(units), eye_array(pods)
    ones_units, ones_pods = csr_array(np.ones((1, units))), csr_array(np.ones((1, pods)))

    def none(height: int, width: int) -> Any:
        return csr_array((height, width))

    of_unit, of_pod = kron(each_unit, ones_pods), kron(ones_units, each_pod)
    over_t = csr_array(np.ones((units, 1)))
    spread = hstack([none(units, pods), -over_t, none(units, pairs), of_unit])  # (5) sum_j s_ij <= T
    room = hstack([-csr_array(np.diag(free)), none(pods, 1), of_pod, none(pods, pairs)])  # (6)
    whole = hstack([none(units, pods + 1), of_unit, none(units, pairs)])  # (7)
    chosen = hstack([none(pairs, pods + 1), eye_array(pairs), -kron(each_unit, csr_array(np.diag(most)))])  # (8)
    constraints = [
        LinearConstraint(csr_array(spread), ub=0),
        LinearConstraint(csr_array(room), ub=0),
        LinearConstraint(csr_array(whole), size, size),
        LinearConstraint(csr_array(chosen), ub=0),
    ]
    cost = np.concatenate([np.full(pods, weight), [1 - weight], np.zeros(2 * pairs)])
    upper = np.concatenate([np.ones(pods), [pods], np.tile(most, units), np.ones(pairs)])
    lower = np.zeros_like(cost)
    lower[pods] = 1
    options = {"time_limit": problem.limit}
    limits: Any = Bounds(lower, upper)  # type: ignore[arg-type]
    with _aside():
        return milp(cost, integrality=np.ones_like(cost), bounds=limits, constraints=constraints, options=options)


@contextmanager
def _aside() -> Generator[None]:
    """What the solver's own code prints, here and there, goes to standard error: programs read the output."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)

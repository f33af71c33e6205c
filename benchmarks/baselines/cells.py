"""Eq. 2 as a plain program of cells for CP-SAT, to compare with: it knows nothing of the package's bounds,
constructions and symmetries. A variable for every cell and minipod, and one for every group and minipod."""

from __future__ import annotations

from typing import Any, NamedTuple

from plait.place.solve.problem import Problem

SCALE = 1000
"""Whole numbers in a unit of the score: alpha has three digits at most."""


class Solved(NamedTuple):
    """score: of the best placement that was found, None if none was. bound: below which there is nothing.
    proven: whether the two are one."""

    score: float | None
    bound: float
    proven: bool


def cell_program(problem: Problem, *, limit: float = 60.0, workers: int = 1) -> Solved:
    """What CP-SAT knows of a problem without extras after so many seconds."""
    from ortools.sat.python import cp_model

    alpha = round(problem.alpha * SCALE)
    assert abs(alpha - problem.alpha * SCALE) < 1e-6, "digits of alpha"
    model: Any = cp_model.CpModel()
    pods = range(len(problem.capacity))
    x = [[model.new_bool_var("") for _ in pods] for _ in range(problem.num_cells)]
    for cell in x:
        model.add_exactly_one(cell)
    for pod in pods:
        model.add(sum(cell[pod] for cell in x) <= problem.capacity[pod])
    mosts: list[Any] = []
    for groups in (problem.columns, problem.rows):
        most = model.new_int_var(1, len(pods), "")
        for group in groups:
            there = [model.new_bool_var("") for _ in pods]
            for cell in group:
                for pod in pods:
                    model.add_implication(x[cell][pod], there[pod])
            model.add(sum(there) <= most)
        mosts.append(most)
    model.minimize(alpha * mosts[0] + (SCALE - alpha) * mosts[1])
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.max_time_in_seconds = limit
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    score = solver.objective_value / SCALE if found else None
    return Solved(score, solver.best_objective_bound / SCALE, status == cp_model.OPTIMAL)

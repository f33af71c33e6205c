"""The optimum of small problems by a model that knows nothing of the package's bounds."""

from __future__ import annotations

from typing import Any

from plait.place.problem import Problem


def cell_model(problem: Problem) -> float:
    """By CP-SAT, a variable for every cell and minipod."""
    from ortools.sat.python import cp_model

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
    model.minimize(round(problem.alpha * 1000) * mosts[0] + round((1 - problem.alpha) * 1000) * mosts[1])
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value / 1000

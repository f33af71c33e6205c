"""Small matrices that closed forms and the search leave open: CP-SAT decides which spreads can be had.

Rows are alike and so are columns, so only the sets of minipods that they touch matter: rows are ordered by
their sets, and columns by theirs. A minipod that rho rows and gamma columns touch holds at most rho * gamma
cells, which says in one constraint what the solver would otherwise find out cell by cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from plait.place.answer import Assignment
from plait.place.problem import Cells, Problem

MOST_CELLS = 64
"""Above them the solver proves little in the time."""
LIMIT = 5.0
"""Seconds, at most."""
WORKERS = 2
MOST_PODS = 50
"""Above them sets of minipods are not written as numbers, which must fit 64 bits."""

Spreads = tuple[int, int]
"""Of rows and of columns."""


def settle(problem: Problem, targets: Sequence[Spreads], known: Assignment) -> Assignment:
    """The best of ``targets`` that can be had, or ``known`` if none can. targets: spreads with a better score
    than ``known`` has, best first. The bound is the score below which nothing is left."""
    from ortools.sat.python import cp_model

    model = _Matrix(cp_model.CpModel(), problem, targets)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = min(problem.limit, LIMIT)
    solver.parameters.num_workers = WORKERS
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return known
    left = problem.score(*targets[max(0, round(solver.best_objective_bound))])
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return known._replace(bound=left)
    return Assignment(model.cells(solver), bound=left, note="solved")


class _Matrix:
    """x: whether the cell of a row and a column lies in a minipod."""

    def __init__(self, model: Any, problem: Problem, targets: Sequence[Spreads]) -> None:
        assert problem.shape is not None
        self.model, (self.rows, self.columns) = model, problem.shape
        self.pods = [pod for pod, room in enumerate(problem.capacity) if room]
        each = range(len(self.pods))
        self.x = [[[model.new_bool_var("") for _ in each] for _ in range(self.columns)] for _ in range(self.rows)]
        for row in self.x:
            for cell in row:
                model.add_exactly_one(cell)
        by_row = self._touched(self.x)
        by_column = self._touched([[row[column] for row in self.x] for column in range(self.columns)])
        for at, pod in enumerate(self.pods):
            self._fill(at, problem.capacity[pod], by_row, by_column)
        which = model.new_int_var(0, len(targets) - 1, "")
        for groups, axis in ((by_row, 0), (by_column, 1)):
            allowed = [target[axis] for target in targets]
            most = model.new_int_var(min(allowed), max(allowed), "")
            model.add_element(which, allowed, most)
            for touched in groups:
                model.add(sum(touched) <= most)
            if len(self.pods) > MOST_PODS:
                continue
            codes = [sum(there * (1 << at) for at, there in enumerate(touched)) for touched in groups]
            for one, other in pairwise(codes):
                model.add(one >= other)
        model.minimize(which)

    def _touched(self, groups: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
        """Of every group and minipod, whether one of its cells lies there."""
        found: list[list[Any]] = []
        for group in groups:
            there = [self.model.new_bool_var("") for _ in self.pods]
            for at, one in enumerate(there):
                self.model.add_max_equality(one, [cell[at] for cell in group])
            found.append(there)
        return found

    def _fill(self, at: int, room: int, by_row: Sequence[Sequence[Any]], by_column: Sequence[Sequence[Any]]) -> None:
        """The cells of a minipod."""
        model, cells = self.model, sum(cell[at] for row in self.x for cell in row)
        rho, gamma = model.new_int_var(0, self.rows, ""), model.new_int_var(0, self.columns, "")
        model.add(rho == sum(touched[at] for touched in by_row))
        model.add(gamma == sum(touched[at] for touched in by_column))
        held = model.new_int_var(0, self.rows * self.columns, "")
        model.add_multiplication_equality(held, [rho, gamma])
        model.add(cells <= held)
        model.add(cells <= room)

    def cells(self, solver: Any) -> Cells:
        """Of a solution, column by column."""
        return tuple(
            next(pod for pod, one in zip(self.pods, self.x[row][column], strict=True) if solver.boolean_value(one))
            for column in range(self.columns)
            for row in range(self.rows)
        )

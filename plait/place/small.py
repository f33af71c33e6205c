"""Small matrices that closed forms and the search leave open: CP-SAT decides which spreads can be had.

It is asked twice. First as it stands, which finds what there is. What is open then is asked again with rows
in the order of the minipods that they touch, and columns in the order of theirs: rows are alike and so are
columns, so nothing is lost, and that there is nothing is proven sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from plait.place.answer import Assignment
from plait.place.problem import Cells, Problem

MOST_CELLS = 64
"""Above them the solver proves little in the time."""
LIMIT, FIRST = 5.0, 0.3
"""Seconds, at most; the share of them in which it is asked as it stands."""
MOST_PODS = 50
"""Above them sets of minipods are not written as numbers, which must fit 64 bits."""

Spreads = tuple[int, int]
"""Of rows and of columns."""


def settle(problem: Problem, targets: Sequence[Spreads], known: Assignment) -> Assignment:
    """The best of ``targets`` that can be had, or ``known`` if none can. targets: spreads with a better score
    than ``known`` has, best first. The bound is the score below which nothing is left."""
    limit, best, left = min(problem.limit, LIMIT), known, list(targets)
    for ordered, share in ((False, FIRST), (True, 1 - FIRST)):
        cells, at, open_from = _asked(problem, left, share * limit, ordered=ordered)
        if cells:
            best = Assignment(cells, bound=problem.score(*left[at]), note="solved")
        left = left[open_from:at]
        if not left:
            return best
    return best._replace(bound=problem.score(*left[0]))


def _asked(
    problem: Problem, targets: Sequence[Spreads], seconds: float, *, ordered: bool
) -> tuple[Cells | None, int, int]:
    """Cells of the best target that was found, if one was; its number, or how many there are; and the first
    that may be had for all that is known."""
    from ortools.sat.python import cp_model

    model = _Matrix(cp_model.CpModel(), problem, targets, ordered=ordered)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1  # equal problems get equal answers
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return None, len(targets), len(targets)
    least = max(0, round(solver.best_objective_bound))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return model.cells(solver), round(solver.objective_value), least
    return None, len(targets), least


class _Matrix:
    """x: whether the cell of a row and a column lies in a minipod."""

    def __init__(self, model: Any, problem: Problem, targets: Sequence[Spreads], *, ordered: bool) -> None:
        assert problem.shape is not None
        self.model, (self.rows, self.columns) = model, problem.shape
        self.pods = [pod for pod, room in enumerate(problem.capacity) if room]
        each = range(len(self.pods))
        self.x = [[[model.new_bool_var("") for _ in each] for _ in range(self.columns)] for _ in range(self.rows)]
        for row in self.x:
            for cell in row:
                model.add_exactly_one(cell)
        for at, pod in enumerate(self.pods):
            model.add(sum(cell[at] for row in self.x for cell in row) <= problem.capacity[pod])
        by_column = [[row[column] for row in self.x] for column in range(self.columns)]
        which = model.new_int_var(0, len(targets) - 1, "")
        for groups, axis in ((self.x, 0), (by_column, 1)):
            allowed = [target[axis] for target in targets]
            most = model.new_int_var(min(allowed), max(allowed), "")
            model.add_element(which, allowed, most)
            touched = [self._touched(group) for group in groups]
            for there in touched:
                model.add(sum(there) <= most)
            if ordered and len(self.pods) <= MOST_PODS:
                codes = [sum(one * (1 << at) for at, one in enumerate(there)) for there in touched]
                for one, other in pairwise(codes):
                    model.add(one >= other)
        model.minimize(which)

    def _touched(self, group: Sequence[Sequence[Any]]) -> list[Any]:
        """Of every minipod, whether a cell of the group lies there."""
        there = [self.model.new_bool_var("") for _ in self.pods]
        for at, one in enumerate(there):
            self.model.add_max_equality(one, [cell[at] for cell in group])
        return there

    def cells(self, solver: Any) -> Cells:
        """Of a solution, column by column."""
        return tuple(
            next(pod for pod, one in zip(self.pods, self.x[row][column], strict=True) if solver.boolean_value(one))
            for column in range(self.columns)
            for row in range(self.rows)
        )

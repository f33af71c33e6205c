"""Small matrices that closed forms leave open: CP-SAT decides which pairs of spreads a placement
can have.

All pairs with a better score go into one model, the best first. Each pair that stays open is tried
by simulated annealing (Kirkpatrick et al., Science 220, 1983). The time limit counts the solver's
deterministic work. So equal problems get equal answers, unless the machine is so slow that the
problem's limit comes first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp
from typing import Any, NamedTuple

from plait.place.solve.problem import Assignment, Cells, Problem

MOST_CELLS = 64
"""Maximum number of cells: above, the solver proves little in the time."""
LIMIT = 5.0
"""Maximum seconds of work of one core; ``place.limit`` is wall-clock time."""
WORK = 0.8
"""Units of the solver's deterministic time per second of a core: one unit takes about 1.2 s."""
MOVES, TRIES = 100_000, 4
"""Moves of a try, which take at most 0.3 s of a core; and number of tries, each from a new
start."""
HOT, COLD = 1.0, 0.15
"""First and last temperature of the annealing. A move that touches one more minipod is accepted in
37 % of cases at first, and in 0.1 % at the end."""

Spreads = tuple[int, int]
"""(minipods of the most spread PP group, minipods of the most spread DP group)."""


def solve_small(problem: Problem, targets: Sequence[Spreads], known: Assignment) -> Assignment:
    """Return the best of ``targets`` that can be reached, or ``known`` if none can. targets: pairs
    of spreads with a better score than ``known``, best first. The bound is the score of the best
    target that remains open."""
    assert problem.shape is not None
    solved, best = _solved(problem, targets), known
    if solved.cells:
        best = Assignment(solved.cells, bound=problem.score(*targets[solved.target]), note="solved")
    left = targets[solved.open_from : solved.target]
    for one in left:
        if cells := annealed(problem.capacity, problem.shape, one):
            best = Assignment(cells, note="annealed")
            break
    return best._replace(bound=problem.score(*left[0])) if left else best


class _Solved(NamedTuple):
    """Result of CP-SAT. cells: of the best target found, or None. target: index of that target, or
    the number of targets. open_from: index of the first target that is not excluded."""

    cells: Cells | None
    target: int
    open_from: int


def _solved(problem: Problem, targets: Sequence[Spreads]) -> _Solved:
    from ortools.sat.python import cp_model

    model, free = cp_model.CpModel(), problem.capacity
    pods = sorted((pod for pod, room in enumerate(free) if room), key=lambda pod: -free[pod])
    x = _model(model, problem, [free[pod] for pod in pods], targets)
    solver = cp_model.CpSolver()
    parameters: Any = solver.parameters
    parameters.linearization_level = 0  # finds several times as many placements in the same time
    parameters.max_deterministic_time = WORK * min(problem.limit, LIMIT)
    parameters.max_time_in_seconds = problem.limit
    parameters.num_workers = 1  # equal problems get equal answers
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return _Solved(None, len(targets), len(targets))
    least = max(0, round(solver.best_objective_bound))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _Solved(None, len(targets), least)
    cells = tuple(next(pod for pod, one in zip(pods, cell, strict=True) if solver.boolean_value(one)) for cell in x)
    return _Solved(cells, round(solver.objective_value), least)


def _model(model: Any, problem: Problem, free: Sequence[int], targets: Sequence[Spreads]) -> list[list[Any]]:
    """Add the cells' variables to a CP-SAT model, to minimise the index of the reached target;
    return a variable for every cell and minipod, true if the cell lies there. free: free cells of
    every minipod."""
    x = [[model.new_bool_var("") for _ in free] for _ in range(problem.num_cells)]
    for cell in x:
        model.add_exactly_one(cell)
    which = model.new_int_var(0, len(targets) - 1, "")
    for groups, spreads in zip((problem.rows, problem.columns), zip(*targets, strict=True), strict=True):
        most = model.new_int_var(min(spreads), max(spreads), "")
        model.add_element(which, spreads, most)
        counts = [_counts(model, [x[cell] for cell in group], free, most) for group in groups]
        for room, here in zip(free, zip(*counts, strict=True), strict=True):
            model.add(sum(here) <= room)
    model.minimize(which)
    return x


def _counts(model: Any, group: Sequence[Sequence[Any]], free: Sequence[int], most: Any) -> list[Any]:
    """Return variables for the number of a group's cells in each minipod, of which the group
    touches at most ``most``. These are separate variables, so that bounds need not decide on single
    cells."""
    there = [model.new_bool_var("") for _ in free]
    counts = [model.new_int_var(0, min(room, len(group)), "") for room in free]
    model.add(sum(counts) == len(group))
    model.add(sum(there) <= most)
    for at, (one, count) in enumerate(zip(there, counts, strict=True)):
        for cell in group:
            model.add_implication(cell[at], one)
        model.add(count == sum(cell[at] for cell in group))
        model.add(count <= min(free[at], len(group)) * one)
    return counts


def annealed(free: Sequence[int], shape: tuple[int, int], spreads: tuple[int, int]) -> Cells | None:
    """Return the minipod of every cell, column by column, such that rows and columns touch at most
    ``spreads`` minipods; None if none was found. Equal arguments give equal answers.

    >>> annealed([3, 3], (2, 3), (1, 2))
    (0, 1, 0, 1, 0, 1)
    """
    for seed in range(TRIES):
        made = _Slots(free, shape, spreads)
        if made.cooled(random.Random(seed)):
            return tuple(made.slots[: shape[0] * shape[1]])
    return None


class _Slots:
    """All room as a list of slots: the first ones are the matrix, the others idle. A move exchanges
    two slots. The objective is the number of minipods by which rows and columns exceed their
    allowed spreads."""

    def __init__(self, free: Sequence[int], shape: tuple[int, int], spreads: tuple[int, int]) -> None:
        self.rows, self.most = shape[0], spreads
        self.cells = shape[0] * shape[1]
        largest = sorted(range(len(free)), key=lambda pod: -free[pod])
        self.slots = [pod for pod in largest for _ in range(free[pod])]
        self.held = [[[0] * len(free) for _ in range(lines)] for lines in shape]
        """Number of cells in each minipod, for each row and for each column."""
        for at in range(self.cells):
            for lines, line in zip(self.held, self._lines(at), strict=True):
                lines[line][self.slots[at]] += 1
        self.touched = [[sum(map(bool, line)) for line in lines] for lines in self.held]
        self.excess = sum(
            max(0, one - most) for lines, most in zip(self.touched, spreads, strict=True) for one in lines
        )

    def cooled(self, chance: random.Random) -> bool:
        """Run the annealing; return True if no row or column exceeds its allowed spread at
        the end."""
        fall, temperature = (COLD / HOT) ** (1 / MOVES), HOT
        for _ in range(MOVES):
            if not self.excess:
                return True
            temperature *= fall
            one, other = int(chance.random() * self.cells), int(chance.random() * len(self.slots))
            if self.slots[one] == self.slots[other]:
                continue
            worse = self._exchange(one, other)
            if worse > 0 and chance.random() >= exp(-worse / temperature):
                self._exchange(one, other)
        return not self.excess

    def _lines(self, at: int) -> tuple[int, int]:
        """Return (row, column) of the cell ``at``."""
        column, row = divmod(at, self.rows)
        return row, column

    def _exchange(self, first: int, second: int) -> int:
        """Exchange two slots; return by how many minipods rows and columns exceed their spreads
        more than before."""
        slots, before = self.slots, self.excess
        slots[first], slots[second] = slots[second], slots[first]
        for at, left, taken in ((first, slots[second], slots[first]), (second, slots[first], slots[second])):
            if at < self.cells:
                for which, line in enumerate(self._lines(at)):
                    self._moved(which, line, left, taken)
        return self.excess - before

    def _moved(self, which: int, line: int, left: int, taken: int) -> None:
        """Record that one of a line's cells has left minipod ``left`` for minipod ``taken``."""
        held, touched, most = self.held[which][line], self.touched[which], self.most[which]
        before = touched[line]
        held[left] -= 1
        held[taken] += 1
        after = touched[line] = before - (not held[left]) + (held[taken] == 1)
        self.excess += max(0, after - most) - max(0, before - most)

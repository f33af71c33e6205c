"""Small matrices that closed forms and the search leave open: CP-SAT says of each pair of spreads whether a
placement has it.

Rows are alike and so are columns, and whatever a program says of each of them it says as often as there are
orders. So the longer side is counted: an integer for every pattern, which is the minipods of the cells of one
row (or column), that says how many have it. Where there are too many patterns a variable says of each cell
in which minipod it lies, with rows and columns in the order of the minipods that they touch.

What there is is sought first, of all pairs together; then each that is left is asked for by itself, and what
is left then is annealed. Time is the work that the solver counts, so that equal problems get equal answers,
unless the machine is so slow that the problem's limit comes first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import comb
from typing import Any, NamedTuple

from plait.place.anneal import annealed
from plait.place.answer import Assignment
from plait.place.problem import Cells, Problem

MOST_CELLS = 64
"""Above them the solver proves little in the time."""
LIMIT = 5.0
"""Seconds of a core's work, at most; ``place.limit`` is of the clock."""
TURNS = ((False, 0.3), (False, 0.45), (True, 1.0))
"""Whether rows and columns are ordered, and the share of the time after which it is the next one's turn: all
pairs together, to find what there is; each that is open by itself; each once more, for a proof."""
WORK = 0.8
"""What the solver counts as a second of its work is about 1.2 s of a core."""
MOST_PODS = 50
"""Above them sets of minipods are not written as numbers, which must fit 64 bits."""
MOST_PATTERNS = 3000

Spreads = tuple[int, int]
"""Of rows and of columns."""


def settle(problem: Problem, targets: Sequence[Spreads], known: Assignment) -> Assignment:
    """The best of ``targets`` that can be had, or ``known`` if none can. targets: spreads with a better score
    than ``known`` has, best first. The bound is the score below which nothing is left."""
    work = WORK * min(problem.limit, LIMIT)
    best, left, spent, begun = known, list(targets), 0.0, time.perf_counter()
    for ordered, share in TURNS:
        together = not spent
        asked = [left] if together else [[one] for one in left]
        left = []
        for at, some in enumerate(asked):
            seconds = problem.limit - (time.perf_counter() - begun)
            allowed = (share * work - spent) / (len(asked) - at), seconds
            cells, found, open_from, used = _asked(problem, some, allowed, ordered=ordered, together=together)
            spent += used
            left += some[open_from:found]
            if cells:
                best = Assignment(cells, bound=problem.score(*some[found]), note="solved")
                break  # those that come after it are no better
        if not left:
            return best
    assert problem.shape is not None
    found = ((one, annealed(problem.capacity, problem.shape, one)) for one in left)
    better = next(((one, cells) for one, cells in found if cells), None)
    if better:
        best = Assignment(better[1], bound=problem.score(*better[0]), note="annealed")
    return best._replace(bound=problem.score(*left[0]))


class _Solved(NamedTuple):
    """cells: of the best target that was found, if one was; its number, or how many there are; the first that
    may be had for all that is known; work that the solver did."""

    cells: Cells | None
    found: int
    open_from: int
    used: float


def _asked(
    problem: Problem, targets: Sequence[Spreads], allowed: tuple[float, float], *, ordered: bool, together: bool
) -> _Solved:
    """The best of some targets. allowed: work and seconds, at most. ordered: rows and columns are. together:
    patterns, of which each target has its own, are not counted."""
    from ortools.sat.python import cp_model

    if min(allowed) <= 0:
        return _Solved(None, len(targets), 0, 0.0)
    wanted, solver = _wanted(problem, targets), cp_model.CpSolver()
    parameters: Any = solver.parameters
    down = max(down for _, down in wanted.targets)
    if not together and patterns_of(len(wanted.pods), wanted.rows, down) <= MOST_PATTERNS:
        made = _Patterns(cp_model.CpModel(), wanted, ordered=ordered)
    else:
        made = _Cells(cp_model.CpModel(), wanted, ordered=ordered, strict=not together)
        parameters.linearization_level = 0  # placements are found several times as often in the same time
    parameters.max_deterministic_time, parameters.max_time_in_seconds = allowed
    parameters.num_workers = 1  # equal problems get equal answers
    status = solver.solve(made.model)
    used = solver.response_proto.deterministic_time
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        at = round(solver.objective_value) if len(targets) > 1 else 0
        least = max(0, round(solver.best_objective_bound)) if len(targets) > 1 else 0
        return _Solved(made.cells(solver), at, least, used)
    if status == cp_model.INFEASIBLE:
        return _Solved(None, len(targets), len(targets), used)
    return _Solved(None, len(targets), max(0, round(solver.best_objective_bound)) if len(targets) > 1 else 0, used)


def _wanted(problem: Problem, targets: Sequence[Spreads]) -> _Wanted:
    """The matrix, or the transposed one, which has no more rows than columns."""
    assert problem.shape is not None
    pods = sorted((pod for pod, room in enumerate(problem.capacity) if room), key=lambda pod: -problem.capacity[pod])
    (rows, columns), free = problem.shape, [problem.capacity[pod] for pod in pods]
    if rows <= columns:
        return _Wanted(rows, columns, targets, pods, free, turned=False)
    return _Wanted(columns, rows, [(down, across) for across, down in targets], pods, free, turned=True)


def patterns_of(pods: int, cells: int, spread: int) -> int:
    """Ways to place so many cells in at most ``spread`` of the minipods.

    >>> patterns_of(3, 2, 1), patterns_of(3, 2, 2)
    (3, 9)
    """

    def onto(size: int) -> int:
        return sum((-1) ** (size - one) * comb(size, one) * one**cells for one in range(size + 1))

    return sum(comb(pods, size) * onto(size) for size in range(1, min(spread, pods) + 1))


class _Wanted(NamedTuple):
    """A matrix with no more rows than columns. targets: what a row and a column may touch at most, the best
    first. pods: numbers of the minipods with room, the largest first; free: their room. turned: rows are the
    problem's columns."""

    rows: int
    columns: int
    targets: Sequence[Spreads]
    pods: list[int]
    free: list[int]
    turned: bool

    def cells(self, matrix: Sequence[Sequence[int]]) -> Cells:
        """As problems have them, column by column. matrix: of each row, which of ``pods`` its cells have."""
        ordered = matrix if self.turned else zip(*matrix, strict=True)
        return tuple(self.pods[at] for line in ordered for at in line)


def _order(model: Any, groups: Sequence[Sequence[Any]]) -> None:
    """Groups in the order of what they touch, the largest minipods first."""
    if len(groups[0]) <= MOST_PODS:
        codes = [sum(one * (1 << at) for at, one in enumerate(reversed(there))) for there in groups]
        for one, other in pairwise(codes):
            model.add(one >= other)


class _Patterns:
    """Of one target. counts: of each pattern, how many columns have it. touched: whether a row has cells in a
    minipod."""

    def __init__(self, model: Any, wanted: _Wanted, *, ordered: bool) -> None:
        self.model, self.wanted = model, wanted
        rows, columns, free, ((across, down),) = wanted.rows, wanted.columns, wanted.free, wanted.targets
        self.counts = {
            pattern: model.new_int_var(0, most, "")
            for pattern in patterns(len(free), rows, down)
            if (most := min(columns, *(free[pod] // pattern.count(pod) for pod in set(pattern))))
        }
        model.add(sum(self.counts.values()) == columns)
        touched = [[model.new_bool_var("") for _ in free] for _ in range(rows)]
        for pod, room in enumerate(free):
            here = [(pattern, count) for pattern, count in self.counts.items() if pod in pattern]
            model.add(sum(pattern.count(pod) * count for pattern, count in here) <= room)
            for row, there in enumerate(touched):
                own = sum(count for pattern, count in here if pattern[row] == pod)
                model.add(own <= min(room, columns) * there[pod])
        for there in touched:
            model.add(sum(there) <= across)
            model.add(sum(min(room, columns) * one for room, one in zip(free, there, strict=True)) >= columns)
        if ordered:
            _order(model, touched)

    def cells(self, solver: Any) -> Cells:
        """Of a solution."""
        found = [pattern for pattern, count in self.counts.items() for _ in range(solver.value(count))]
        return self.wanted.cells(list(zip(*found, strict=True)))


def patterns(pods: int, cells: int, spread: int) -> Iterator[tuple[int, ...]]:
    """Ways to place so many cells in at most ``spread`` of the minipods: which minipod each has."""
    for size in range(1, min(spread, pods, cells) + 1):
        for chosen in combinations(range(pods), size):
            yield from (one for one in product(chosen, repeat=cells) if len(set(one)) == size)


class _Cells:
    """x: whether the cell of a row and a column lies in a minipod. strict: what is said to be touched is."""

    def __init__(self, model: Any, wanted: _Wanted, *, ordered: bool, strict: bool) -> None:
        self.model, self.wanted, self.strict = model, wanted, strict
        each = range(len(wanted.free))
        self.x = [[[model.new_bool_var("") for _ in each] for _ in range(wanted.columns)] for _ in range(wanted.rows)]
        for row in self.x:
            for cell in row:
                model.add_exactly_one(cell)
        for at, room in enumerate(wanted.free):
            model.add(sum(cell[at] for row in self.x for cell in row) <= room)
        by_column = [[row[column] for row in self.x] for column in range(wanted.columns)]
        which = model.new_int_var(0, len(wanted.targets) - 1, "")
        for groups, spreads in zip((self.x, by_column), zip(*wanted.targets, strict=True), strict=True):
            most = model.new_int_var(min(spreads), max(spreads), "")
            model.add_element(which, spreads, most)
            touched, counts = zip(*(self._touched(group, most) for group in groups), strict=True)
            for room, here in zip(wanted.free, zip(*counts, strict=True), strict=True):
                model.add(sum(here) <= room)
            if ordered:
                _order(model, touched)
        if len(wanted.targets) > 1:
            model.minimize(which)

    def _touched(self, group: Sequence[Sequence[Any]], most: Any) -> tuple[list[Any], list[Any]]:
        """Of every minipod, whether the group has cells there, and how many: variables of their own, to bound
        without asking which cells."""
        model, free = self.model, self.wanted.free
        there = [model.new_bool_var("") for _ in free]
        counts = [model.new_int_var(0, min(room, len(group)), "") for room in free]
        model.add(sum(counts) == len(group))
        model.add(sum(there) <= most)
        for at, (one, count) in enumerate(zip(there, counts, strict=True)):
            cells = [cell[at] for cell in group]
            for cell in cells:
                model.add_implication(cell, one)
            if self.strict:
                model.add_bool_or([*cells, one.negated()])
            model.add(count == sum(cells))
            model.add(count <= min(free[at], len(group)) * one)
        return there, counts

    def cells(self, solver: Any) -> Cells:
        """Of a solution."""
        return self.wanted.cells(
            [[next(at for at, one in enumerate(cell) if solver.boolean_value(one)) for cell in row] for row in self.x]
        )

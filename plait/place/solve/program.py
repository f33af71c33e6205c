"""Placements by solvers of mixed-integer programs, HiGHS and CP-SAT.

``mip`` is the paper's own program (Arnold, arXiv 2509.15940, eq. 4-10), by HiGHS through scipy. A
unit is one PP group, or one DP group. It minimises weight x minipods used + (1 - weight) x T, where
T is the largest spread of a unit. The number of minipods is only an upper bound on the spread of
the other groups, which is why bands beat it. Shares of a unit are whole nodes here; in the paper
they are real numbers, which need not be whole nodes.

``cpsat`` is the general case by OR-Tools' CP-SAT: unequal groups, spare nodes for each group, the
price of nodes of other jobs, forbidden pairs, several GPU types. It has a variable for every cell
and pool. It starts from the default's answer and gets the default's lower bound; without that bound
it finds good answers but proves little. If there are too many variables, neighbouring rows are
placed as one: legal, but perhaps not optimal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any, cast

from plait.core.base.errors import PlacementError
from plait.core.parallel.strategy import slice_sizes
from plait.place.solve.bounds import EPSILON, lower_bound
from plait.place.solve.exact import exact
from plait.place.solve.problem import Assignment, Cells, Problem, spread_of


def mip(problem: Problem) -> Assignment:
    """Return the assignment of the paper's program; PP groups are kept together unless
    ``keep_together`` is ``dp``. Raises PlacementError if the program does not support the problem,
    or finds no placement within the problem's ``limit``."""
    if not problem.is_plain or problem.spares.per_row or problem.by != "spread":
        raise PlacementError(
            "The paper's program knows equal groups only, and neither forbidden pairs, nodes to be preempted, "
            "several types of GPU, spares for each group nor seconds: set place.method=cpsat."
        )
    assert problem.shape is not None
    rows, columns = problem.shape
    by_column = problem.keep_together == "dp"
    groups, size = (columns, rows) if by_column else (rows, columns)
    weight = 1 - problem.alpha if by_column else problem.alpha
    solved = _solved(problem, groups, size, weight)
    if solved.x is None:
        raise PlacementError(f"The program found no placement in {problem.limit:g} s. Allow more with place.limit.")
    pods = len(problem.capacity)
    sequences: list[list[int]] = []
    for group in range(groups):
        counts = [round(value) for value in solved.x[pods + 1 + group * pods : pods + 1 + (group + 1) * pods]]
        sequences.append([pod for pod, count in enumerate(counts) for _ in range(count)])
    if by_column:
        cells = [pod for sequence in sequences for pod in sequence]
    else:
        cells = [sequence[column] for column in range(columns) for sequence in sequences]
    note = f"program: {solved.fun:.3g}, bound {solved.mip_dual_bound:.3g}, gap {solved.mip_gap:.1%}"
    return Assignment(tuple(cells), note=note)


def _solved(problem: Problem, groups: int, size: int, weight: float) -> Any:
    """Return HiGHS's result of the paper's program for ``groups`` groups of ``size`` nodes. weight:
    of the number of minipods used. Variables: y of every minipod, T, n of every (group, minipod) in
    nodes, s of every (group, minipod)."""
    import numpy as np
    from scipy import optimize, sparse  # pyright: ignore[reportMissingTypeStubs]

    optimize, sparse = cast("tuple[Any, Any]", (optimize, sparse))
    csr_array, eye_array, hstack, kron = sparse.csr_array, sparse.eye_array, sparse.hstack, sparse.kron
    free = np.array(problem.capacity, dtype=float)
    pods, pairs = len(free), groups * len(free)
    most = np.minimum(free, size)
    each_group, each_pod = eye_array(groups), eye_array(pods)
    ones_groups, ones_pods = csr_array(np.ones((1, groups))), csr_array(np.ones((1, pods)))

    def none(height: int, width: int) -> Any:
        return csr_array((height, width))

    of_group, of_pod = kron(each_group, ones_pods), kron(ones_groups, each_pod)
    over_t = csr_array(np.ones((groups, 1)))
    spread = hstack([none(groups, pods), -over_t, none(groups, pairs), of_group])  # (5) sum_j s_ij <= T
    room = hstack([-csr_array(np.diag(free)), none(pods, 1), of_pod, none(pods, pairs)])  # (6)
    whole = hstack([none(groups, pods + 1), of_group, none(groups, pairs)])  # (7)
    chosen = hstack([none(pairs, pods + 1), eye_array(pairs), -kron(each_group, csr_array(np.diag(most)))])  # (8)
    constraints = [
        optimize.LinearConstraint(csr_array(spread), ub=0),
        optimize.LinearConstraint(csr_array(room), ub=0),
        optimize.LinearConstraint(csr_array(whole), size, size),
        optimize.LinearConstraint(csr_array(chosen), ub=0),
    ]
    cost = np.concatenate([np.full(pods, weight), [1 - weight], np.zeros(2 * pairs)])
    upper = np.concatenate([np.ones(pods), [pods], np.tile(most, groups), np.ones(pairs)])
    lower = np.zeros_like(cost)
    lower[pods] = 1
    options = {"time_limit": problem.limit}
    limits = optimize.Bounds(lower, upper)
    with _aside():
        return optimize.milp(
            cost, integrality=np.ones_like(cost), bounds=limits, constraints=constraints, options=options
        )


@contextmanager
def _aside() -> Generator[None]:
    """Redirect the solver's native output to standard error, since programs read standard
    output."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


SCALE = 1_000_000
MOST_VARIABLES = 60_000


def cpsat(problem: Problem) -> Assignment:
    """Return the assignment by CP-SAT. Raises PlacementError if there is no placement, or none is
    found within the problem's ``limit``."""
    from ortools.sat.python import cp_model

    merged = _merged(problem)
    start, bound = _start(problem), lower_bound(problem)
    if start and _is_free_of_extras(problem) and _value(problem, start.cells) <= bound + EPSILON:
        return start
    model = _Model(cp_model.CpModel(), problem, merged)
    model.minimise(bound)
    if start:
        model.hint(start.cells)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = problem.limit
    solver.parameters.num_workers = 2
    status = solver.solve(model.model)
    legal = start if start and _is_free_of_extras(problem) else None
    if status == cp_model.INFEASIBLE and not legal:
        if merged > 1:
            raise PlacementError(f"No placement keeps {merged} neighbouring PP groups together. Free more nodes.")
        raise PlacementError(
            "There is no placement: the free nodes, the types of GPU, spares and forbidden pairs leave none. Free "
            "nodes, keep fewer spares or forbid less."
        )
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if legal:
            return legal
        raise PlacementError(f"No placement was found in {problem.limit:g} s. Allow more with place.limit.")
    proven = (solver.best_objective_bound - 2) / _scale(problem) if merged == 1 else bound
    note = "optimal" if status == cp_model.OPTIMAL and merged == 1 else f"stopped after {problem.limit:g} s"
    if merged > 1:
        note = f"{merged} rows placed as one"
    return Assignment(model.cells(solver), bound=proven, row_spares=model.row_spares(solver), note=note)


def _value(problem: Problem, cells: Cells) -> float:
    spread = spread_of(problem, cells)
    return problem.score(spread.rows, spread.columns)


def _scale(problem: Problem) -> float:
    """Return the factor by which the score is multiplied to become the solver's integer
    objective."""
    return SCALE if problem.by == "spread" else SCALE / max(problem.score(1, 1), 1e-12)


def _is_free_of_extras(problem: Problem) -> bool:
    return problem.is_plain and not problem.spares.per_row


def _merged(problem: Problem) -> int:
    """Return the number of neighbouring PP groups (rows) that the solver places as one, so that it
    has few enough variables; 1: each by itself. Raises PlacementError if that is needed and columns
    differ."""
    variables = problem.num_cells * len(problem.pools)
    if variables <= MOST_VARIABLES:
        return 1
    if problem.shape is None:
        raise PlacementError(
            f"Stages of unequal size, {problem.num_cells} blocks of nodes and {len(problem.pools)} pools of free nodes "
            "are more than CP-SAT can take. Leave minipods out with place.avoid."
        )
    return -(-variables // MOST_VARIABLES)


def _start(problem: Problem) -> Assignment | None:
    """Return the default method's assignment for the problem without the parts that only CP-SAT
    supports, as a start; None if there is none."""
    pools = problem.pools
    if len(problem.minipods) != len(pools) or problem.shape is None:
        return None
    if problem.price is not None:
        pools = tuple(replace(pool, leaves=(*pool.leaves, pool.held), held=()) for pool in pools)
    try:
        return exact(
            replace(problem, pools=pools, price=None, forbidden=frozenset(), gpus=(), keep_together="both", limit=0.0)
        )
    except PlacementError:
        return None


@dataclass
class _Model:
    """The CP-SAT model of a problem. x: for every bundle (cells that are placed as one) and pool,
    the variable that the bundle lies there. weights: number of cells in each bundle."""

    model: Any
    problem: Problem
    merged: int
    x: list[list[Any]] = field(default_factory=list[list[Any]])
    spare: list[list[Any]] = field(default_factory=list[list[Any]])
    weights: list[int] = field(default_factory=list[int])
    members: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def __post_init__(self) -> None:
        problem, model = self.problem, self.model
        rows, columns = self._bundled()
        pools = range(len(problem.pools))
        for bundle in range(len(self.members)):
            allowed = [self._allowed(columns, bundle, pool) for pool in pools]
            self.x.append([model.new_bool_var("") if fits else 0 for fits in allowed])
            if not any(allowed):
                raise PlacementError("A stage has no minipod that it may lie in: forbid less, or free other nodes.")
            model.add_exactly_one(one for one in self.x[-1] if not isinstance(one, int))
        self.rows, self.columns = self._touched(rows), self._touched(columns)
        self._spares(rows)
        self.taken = self._rooms()

    def _bundled(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return (PP groups, DP groups), each as a list of the indices of its bundles."""
        if self.merged == 1:
            self.members = [(cell,) for cell in range(self.problem.num_cells)]
            self.weights = [1] * len(self.members)
            return [list(row) for row in self.problem.rows], [list(column) for column in self.problem.columns]
        assert self.problem.shape is not None
        height, width = self.problem.shape
        sizes = slice_sizes(height, -(-height // self.merged))
        for column in range(width):
            at = column * height
            for size in sizes:
                self.members.append(tuple(range(at, at + size)))
                self.weights.append(size)
                at += size
        count = len(sizes)
        rows = [[column * count + row for column in range(width)] for row in range(count)]
        return rows, [list(range(column * count, (column + 1) * count)) for column in range(width)]

    def _allowed(self, columns: Sequence[Sequence[int]], bundle: int, pool: int) -> bool:
        problem = self.problem
        column = next(at for at, own in enumerate(columns) if own[0] <= bundle <= own[-1])
        needs = problem.gpus[column] if problem.gpus else ""
        one = problem.pools[pool]
        return (column, one.minipod) not in problem.forbidden and needs in ("", one.gpu)

    def _touched(self, groups: Sequence[Sequence[int]]) -> list[list[Any]]:
        """Return a variable for every group and minipod, which is true if the group touches the
        minipod."""
        found: list[list[Any]] = []
        for group in groups:
            there = [self.model.new_bool_var("") for _ in self.problem.minipods]
            here: list[list[Any]] = [[] for _ in there]
            for bundle in group:
                for pool, one in enumerate(self.x[bundle]):
                    if not isinstance(one, int):
                        self.model.add_implication(one, there[self.problem.minipod_of[pool]])
                        here[self.problem.minipod_of[pool]].append(one)
            for one, cells in zip(there, here, strict=True) if self.problem.spares.per_row else ():
                self.model.add_bool_or(cells).only_enforce_if(one)  # no spare in a minipod without the row
            found.append(there)
        return found

    def _spares(self, rows: Sequence[Sequence[int]]) -> None:
        each = self.problem.spares.per_row
        for row, there in zip(rows, self.rows, strict=True) if each else ():
            count = each * self.weights[row[0]]
            kept = [self.model.new_int_var(0, count, "") for _ in self.problem.pools]
            self.model.add(sum(kept) == count)
            for pool, one in enumerate(kept):
                self.model.add(one == 0).only_enforce_if(there[self.problem.minipod_of[pool]].negated())
            self.spare.append(kept)

    def _rooms(self) -> list[Any]:
        """Return a variable for every pool: the number of nodes that other jobs give up there."""
        problem, taken = self.problem, list[Any]()
        for pool, one in enumerate(problem.pools):
            held = len(one.held) if problem.price is not None else 0
            taken.append(self.model.new_int_var(0, held, ""))
            cells = sum(
                weight * problem.nodes_per_cell * x[pool] for weight, x in zip(self.weights, self.x, strict=True)
            )
            spare = sum(kept[pool] for kept in self.spare)
            self.model.add(cells + spare <= max(0, one.free - problem.spares.per_minipod) + taken[pool])
        return taken

    def minimise(self, bound: float) -> None:
        """Minimise the score, with the constraint that it is at least ``bound``."""
        problem, model, scale = self.problem, self.model, _scale(self.problem)
        terms: list[Any] = []
        for groups, scored in ((self.columns, problem.column_score), (self.rows, problem.row_score)):
            most = model.new_int_var(0, len(problem.minipods), "")
            for there in groups:
                model.add(sum(there) <= most)
            costs = [round(scored(max(1, spread)) * scale) for spread in range(len(problem.minipods) + 1)]
            cost = model.new_int_var(min(costs), max(costs), "")
            model.add_element(most, costs, cost)
            terms.append(cost)
        price = round((problem.price or 0.0) * scale)
        total = sum(terms) + price * sum(self.taken)
        model.add(total >= floor(bound * scale) - 2)
        model.minimize(total)

    def hint(self, cells: Cells) -> None:
        """Set the solution from which the solver starts. cells: the pool of every cell."""
        for bundle, own in enumerate(self.members):
            for pool, one in enumerate(self.x[bundle]):
                if not isinstance(one, int):
                    self.model.add_hint(one, cells[own[0]] == pool)

    def cells(self, solver: Any) -> Cells:
        """Return the pool of every cell in the solver's solution."""
        found = [0] * self.problem.num_cells
        for own, x in zip(self.members, self.x, strict=True):
            pool = next(at for at, one in enumerate(x) if not isinstance(one, int) and solver.boolean_value(one))
            for cell in own:
                found[cell] = pool
        return tuple(found)

    def row_spares(self, solver: Any) -> tuple[int, ...]:
        """Return the pools of the PP groups' spare nodes in the solver's solution."""
        return tuple(pool for kept in self.spare for pool, one in enumerate(kept) for _ in range(solver.value(one)))

"""What every way of placing owes: every cell once, no minipod over its room, never below the
bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.bipartition import topology_aware
from benchmarks.baselines.brute import brute_force
from benchmarks.baselines.fits import best_fit, gpu_packing, random_fit
from plait.core.base.errors import PlacementError
from plait.place import placing
from plait.place.placing import METHODS, place, placed_by
from plait.place.solve.exact import exact
from plait.place.solve.problem import Assignment, Pool, Problem, Spares
from plait.place.solve.program import cpsat, mip
from tests.place.cases import problems

FAST = {
    "exact": exact, "brute-force": brute_force, "best-fit": best_fit, "random-fit": random_fit,
    "gpu-packing": gpu_packing, "topology-aware": topology_aware,
}  # fmt: skip
SOLVERS = {"mip": mip, "cpsat": cpsat}


def check(problem: Problem, method: str) -> None:
    placed = placed_by(problem, {**FAST, **SOLVERS}[method], method)
    count = problem.num_cells * problem.nodes_per_cell
    home = {name: pool.minipod for pool in problem.pools for leaf in pool.leaves for name in leaf}
    assert len(placed.hosts) == count == len(set(placed.hosts))
    assert tuple(home[host] for host in placed.hosts) == placed.minipods
    assert not set(placed.spares) & set(placed.hosts)
    rows = [{placed.minipods[cell] for cell in row} for row in problem.rows]
    columns = [{placed.minipods[cell] for cell in column} for column in problem.columns]
    assert (placed.row_spread, placed.column_spread) == (max(map(len, rows)), max(map(len, columns)))
    assert placed.score == pytest.approx(problem.score(placed.row_spread, placed.column_spread))
    assert placed.bound <= placed.score + 1e-9
    assert list(placed.rank_table.ranks_of(placed.hosts[-1]))[-1] == count * placed.ranks_per_node - 1


@pytest.mark.parametrize("method", FAST)
@settings(max_examples=25)
@given(problem=problems())
def test_legal(method: str, problem: Problem) -> None:
    check(problem, method)


@pytest.mark.parametrize("method", SOLVERS)
@settings(max_examples=8, deadline=None)
@given(problem=problems())
def test_solvers_are_legal(method: str, problem: Problem) -> None:
    check(problem, method)


@pytest.mark.parametrize("method", [*FAST, *SOLVERS])
def test_blocks_of_nodes_stay_in_a_minipod(method: str) -> None:
    problem = replace(Problem.plain(2, 2, [5, 5, 3]), nodes_per_cell=2)
    placed = placed_by(problem, {**FAST, **SOLVERS}[method], method)
    assert all(placed.minipods[at] == placed.minipods[at + 1] for at in range(0, 8, 2))


@pytest.mark.parametrize("method", METHODS)
def test_too_few_nodes_says_how_many_are_missing(method: str) -> None:
    with pytest.raises(PlacementError, match=r"needs 12 nodes; 10 are free: 2 are missing\. Free some"):
        place(Problem.plain(6, 2, [6, 4]), method)
    with pytest.raises(PlacementError, match="12 nodes and 2 spare"):
        place(Problem.plain(6, 2, [6, 6], spares=Spares(total=2)), method)


def test_too_few_blocks() -> None:
    with pytest.raises(PlacementError, match="8 are free, but only 6 of them in that form: 2 are missing"):
        place(replace(Problem.plain(2, 2, [3, 3, 2]), nodes_per_cell=2))


def test_unknown_methods_and_weights() -> None:
    with pytest.raises(PlacementError, match="did you mean 'exact'"):
        place(Problem.plain(1, 1, [1]), "exakt")
    with pytest.raises(PlacementError, match="no weight"):
        Problem.plain(1, 1, [1], alpha=1.5)
    with pytest.raises(PlacementError, match="no scheduling unit"):
        Problem.plain(1, 1, [1], keep_together="tp")


def test_a_node_in_two_pools_is_refused() -> None:
    pools = (Pool(minipod="a", leaves=(("n1", "n2"),)), Pool(minipod="b", leaves=(("n2",),)))
    with pytest.raises(PlacementError, match=r"^n2: a node can be bound once, and is listed more often"):
        place(Problem(heights=(1,), pools=pools))


@given(problem=problems(), chance=st.randoms())
def test_the_order_of_minipods_changes_nothing(problem: Problem, chance: object) -> None:
    pools = list(problem.pools)
    chance.shuffle(pools)  # type: ignore[attr-defined]
    assert place(replace(problem, pools=tuple(pools))).score == pytest.approx(place(problem).score)


def test_an_answer_that_is_not_legal_is_a_fault_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "METHODS", {"wrong": lambda problem: Assignment((0,) * problem.num_cells)})
    assert place(Problem.plain(2, 2, [4, 4]), "wrong").used == 1
    with pytest.raises(AssertionError, match="4 cells in m000, which has 3 nodes"):
        place(Problem.plain(2, 2, [3, 4]), "wrong")

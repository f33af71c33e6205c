"""The paper's program, and what only CP-SAT can say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from plait.core.base.errors import PlacementError
from plait.core.cluster.network import Network
from plait.core.job.communication import Volume
from plait.place.placing import place
from plait.place.solve.bounds import fewest_minipods
from plait.place.solve.problem import Pool, Problem, Spares, spread_of
from plait.place.solve.program import cpsat, mip


def program_optimum(free: Sequence[int], groups: int, size: int, weight: float) -> float:
    """What ``weight`` x minipods + (1 - weight) x T of the paper's program (eq. 4-10, in whole
    nodes) is at least, for ``groups`` units of ``size`` nodes: with T = 1 whole units; else
    capacity alone."""
    whole = fewest_minipods(free, groups, size)
    split = fewest_minipods(free, groups * size, 1)
    aligned = inf if whole is None else weight * whole + 1 - weight
    return min(aligned, inf if split is None else weight * split + 2 * (1 - weight))


@pytest.mark.parametrize("free", [[6, 6, 6], [6, 5, 4], [3, 3, 3, 3], [9, 2, 2, 1]])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_program_reaches_its_closed_form(free: list[int], alpha: float) -> None:
    problem = Problem.plain(6, 2, free, alpha=alpha)
    answer = mip(problem)
    spread = spread_of(problem, answer.cells)
    assert alpha * spread.used + (1 - alpha) * spread.rows == pytest.approx(program_optimum(free, 6, 2, alpha))


@pytest.mark.parametrize("free", [[6, 6, 6], [6, 5, 4], [3, 3, 3, 3], [9, 2, 2, 1]])
@pytest.mark.parametrize(("alpha", "unit"), [(0.0, "pp"), (0.3, "pp"), (0.7, "dp"), (1.0, "dp")])
def test_the_program_keeps_units_together_and_is_never_better_than_the_default(
    free: list[int], alpha: float, unit: str
) -> None:
    problem = Problem.plain(6, 2, free, alpha=alpha, keep_together=unit)
    own, program = place(replace(problem, keep_together="both")), place(problem, "program")
    assert program.score >= own.score - 1e-9 >= program.bound - 2e-9
    if alpha in (0.0, 1.0):
        assert program.score == pytest.approx(own.score), "all weight on the units: both are optimal"


def test_units_of_columns() -> None:
    problem = Problem.plain(4, 3, [4, 4, 4, 4], alpha=0.9, keep_together="dp")
    spread = spread_of(problem, mip(problem).cells)
    assert spread.columns == 1


def test_the_program_refuses_what_it_cannot_say() -> None:
    with pytest.raises(PlacementError, match="cpsat"):
        mip(Problem(heights=(2, 3), pools=Problem.plain(1, 1, [9]).pools))
    with pytest.raises(PlacementError, match="Allow more"):
        mip(Problem.plain(75, 16, [(37 * at) % 55 + 8 for at in range(40)], alpha=0.3, limit=0.01))


def test_unequal_groups() -> None:
    """4 and 2 nodes: three minipods of two, so rows of two cells lie in one where the halves
    meet."""
    problem = Problem(heights=(4, 2), pools=Problem.plain(1, 1, [3, 3]).pools, edges=((0, 1),), alpha=0.3)
    placed = place(problem, "cpsat")
    assert (placed.row_spread, placed.column_spread) == (1, 2)
    assert placed.gap == pytest.approx(0)


def test_forbidden_pairs_are_kept_apart() -> None:
    free = Problem.plain(3, 2, [6, 6], alpha=0.5)
    assert place(free, "cpsat").score == pytest.approx(1)
    problem = Problem(heights=(3, 3), pools=free.pools, alpha=0.5, forbidden=frozenset({(0, "m000"), (1, "m001")}))
    placed = place(problem, "cpsat")
    assert set(placed.minipods[:3]) == {"m001"}
    assert set(placed.minipods[3:]) == {"m000"}
    with pytest.raises(PlacementError, match="no minipod that it may lie in"):
        place(Problem(heights=(3, 3), pools=free.pools, forbidden=frozenset({(0, "m000"), (0, "m001")})), "cpsat")


def test_the_price_of_preempting_decides() -> None:
    def pools(*counts: tuple[int, int]) -> tuple[Pool, ...]:
        return tuple(
            Pool(
                minipod=f"m{at}",
                leaves=(tuple(f"m{at}f{n}" for n in range(free)),),
                held=tuple(f"m{at}h{n}" for n in range(held)),
            )
            for at, (free, held) in enumerate(counts)
        )

    cheap = place(Problem(heights=(4, 4), pools=pools((6, 2), (4, 0)), alpha=0.5, price=0.01), "cpsat")
    assert (cheap.score, len(cheap.preempted)) == (pytest.approx(1.02), 2)
    assert all(host.startswith("m0h") for host in cheap.preempted)
    dear = place(Problem(heights=(4, 4), pools=pools((6, 2), (4, 0)), alpha=0.5, price=10.0), "cpsat")
    assert dear.preempted == ()
    assert dear.score > 1
    with pytest.raises(PlacementError, match="allow preempting some of the 2 nodes"):
        place(Problem(heights=(4, 4), pools=pools((6, 2))))


def test_stages_on_their_types_of_gpu() -> None:
    pools = tuple(
        Pool(minipod=pod, leaves=((f"{pod}-{gpu}-0", f"{pod}-{gpu}-1"),), gpu=gpu)
        for pod in ("a", "b")
        for gpu in ("h100", "a100")
    )
    placed = place(Problem(heights=(2, 2), pools=pools, gpus=("h100", "a100"), alpha=0.5), "cpsat")
    assert all("h100" in host for host in placed.hosts[:2])
    assert all("a100" in host for host in placed.hosts[2:])
    assert placed.used == 1


def test_spares_of_rows_lie_where_the_rows_do() -> None:
    problem = Problem.plain(2, 2, [3, 3], alpha=0.3, spares=Spares(per_row=1))
    placed = place(problem, "cpsat")
    assert placed.row_spread == 1
    assert sorted(host[:4] for host in placed.spares) == ["m000", "m001"]


@pytest.mark.parametrize("free", [[4, 1], [2, 4], [4, 2], [1, 4]])
def test_a_row_is_spread_if_its_spare_asks_for_that(free: list[int]) -> None:
    """Four of the nodes lie together, and the fifth would not be where the row is."""
    problem = Problem.plain(1, 4, free, alpha=0.3, spares=Spares(per_row=1))
    placed = place(problem, "cpsat")
    assert (placed.row_spread, placed.score) == (2, pytest.approx(1.7))
    assert placed.bound <= placed.score
    (spare,) = placed.spares
    assert spare[:4] in placed.minipods
    together = place(Problem.plain(1, 4, [5, 4], alpha=0.3, spares=Spares(per_row=1)), "cpsat")
    assert (together.row_spread, together.spares[0][:4]) == (1, "m000")


def test_spares_are_free_nodes_also_where_others_are_preempted() -> None:
    pool = Pool(minipod="a", leaves=(tuple(f"f{at}" for at in range(4)),), held=("h0", "h1", "h2"))
    problem = Problem(heights=(2, 2), pools=(pool,), price=0.1, spares=Spares(per_minipod=1))
    placed = place(problem, "cpsat")
    assert (placed.preempted, len(placed.spares)) == (("h0",), 1)
    assert placed.spares[0].startswith("f")


def test_bundles_of_rows_are_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.place.solve.program.MOST_VARIABLES", 40)
    problem = Problem.plain(9, 2, [7, 7, 7], alpha=0.3, spares=Spares(per_row=0), price=1.0)
    placed = place(problem, "cpsat")
    assert "rows placed as one" in placed.note
    assert placed.bound <= placed.score


@pytest.mark.parametrize(("dp", "pp"), [(1000.0, 1.0), (1.0, 1000.0), (3e-9, 3e-9)])
def test_seconds_with_what_only_cpsat_can_say(dp: float, pp: float) -> None:
    """The first column may not lie in the third minipod; compared with all ways to place the
    job."""
    network = Network(rate=1.0, collective_loss=0.17, p2p_loss=0.7)
    volumes = (Volume(dp=dp, pp=pp), Volume(dp=dp / 2, pp=pp))
    problem = Problem.plain(
        3, 2, [2, 2, 3], by="seconds", volumes=volumes, network=network, forbidden=frozenset({(0, "m002")})
    )
    placed = place(problem, "cpsat")
    ways = (
        cells for cells in itertools.product(range(3), repeat=6)
        if 2 not in cells[:3] and cells.count(0) <= 2 and cells.count(1) <= 2 and cells.count(2) <= 3
    )  # fmt: skip
    spreads = {(one.rows, one.columns) for one in (spread_of(problem, cells) for cells in ways)}
    assert placed.score == pytest.approx(min(problem.score(*spread) for spread in spreads))
    assert placed.gap == pytest.approx(0, abs=1e-4)


def test_where_rows_placed_as_one_find_no_room_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.plain(6, 2, [2] * 6, price=1.0)
    assert cpsat(problem).note == "optimal"
    monkeypatch.setattr("plait.place.solve.program.MOST_VARIABLES", 24)
    with pytest.raises(PlacementError, match=r"No placement keeps 3 neighbouring PP groups together\. Free more nodes"):
        cpsat(problem)

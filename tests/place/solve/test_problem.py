"""A problem's own numbers: what a placement is scored by, how much room there is, which answers are
legal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.base.errors import PlacementError
from plait.core.cluster.network import Network
from plait.core.job.communication import Volume
from plait.place.solve.problem import Pool, Problem, Spares, check_legal, seconds_of, spread_of

NETWORK = Network(rate=2.0, collective_loss=0.5, p2p_loss=0.75)
VOLUMES = (Volume(dp=6.0, pp=1.0, ep=2.0), Volume(dp=4.0, pp=8.0, ep=12.0))


def pools(*free: int, held: int = 0) -> tuple[Pool, ...]:
    return tuple(
        replace(Pool.plain(f"m{at}", count), held=tuple(f"h{at}-{n}" for n in range(held)))
        for at, count in enumerate(free)
    )


def test_spreads_are_scored_by_eq_2() -> None:
    plain = Problem(heights=(4, 4), pools=pools(8), alpha=0.25)
    assert (plain.row_score(2), plain.column_score(3), plain.score(2, 3)) == (1.5, 0.75, 2.25)
    assert plain.score(1, 1) == 1.0


def test_spreads_are_scored_by_the_seconds_of_whoever_sends_most() -> None:
    """Of a rate of 2 half is lost at most along DP, three quarters along PP; half of that over
    two."""
    told = Problem(
        heights=(4, 4), pools=pools(8), by="seconds", volumes=VOLUMES, network=NETWORK, expert_cells=2, alpha=0.25
    )
    assert told.row_score(1) == 8 / 2
    assert told.row_score(2) == 8 / (2 * (1 - 0.75 / 2))
    assert told.column_score(1) == 6 / 2 + 12 / 2
    assert told.column_score(2) == pytest.approx((6 + 12) / (2 * 0.75))
    assert told.column_score(3) == pytest.approx(6 / (2 * (1 - 0.5 * 2 / 3)) + 12 / (2 * 0.75)), "experts are of two"
    assert told.score(2, 3) == told.row_score(2) + told.column_score(3)


def test_seconds_of_a_placement_are_those_of_the_slowest_group_of_each_kind() -> None:
    problem = Problem(heights=(2, 2), pools=pools(4, 4), volumes=VOLUMES, network=NETWORK, expert_cells=2)
    assert seconds_of(problem, (0, 0, 0, 0), 1) == (3.0, 4.0, 6.0)
    assert seconds_of(problem, (0, 1, 0, 0), 2) == (6 / 1.5, 8 / 1.25, 6.0), "the first column: 4 s; experts 12 / 2"
    assert seconds_of(problem, (0, 0, 0, 1), 2) == (3.0, 8 / 1.25, 12 / 1.5)
    alone = replace(problem, expert_cells=1)
    assert seconds_of(alone, (0, 1, 0, 1), 1) == (4.0, 4.0, 6.0)
    assert seconds_of(replace(problem, volumes=()), (0, 0, 0, 0), 1) is None
    assert seconds_of(replace(problem, network=None), (0, 0, 0, 0), 1) is None


def test_room_without_spares_and_in_whole_cells() -> None:
    problem = Problem(heights=(2, 2), pools=pools(7, 4, 1), nodes_per_cell=2, spares=Spares(per_minipod=1))
    assert problem.capacity == (3, 1, 0)
    assert replace(problem, spares=Spares()).capacity == (3, 2, 0)
    assert replace(problem, spares=Spares(per_minipod=3)).capacity == (2, 0, 0)


def test_when_only_the_shape_matters() -> None:
    plain = Problem(heights=(2, 2), pools=pools(4, 4))
    assert plain.is_plain and plain.shape == (2, 2)
    assert replace(plain, heights=(2, 3)).shape is None
    for more in (
        {"heights": (2, 3)}, {"price": 0.0}, {"forbidden": frozenset({(0, "m0")})}, {"gpus": ("", "h100")},
        {"pools": (*plain.pools, replace(plain.pools[0], gpu="x"))},
    ):  # fmt: skip
        assert not replace(plain, **more).is_plain, more
    assert replace(plain, gpus=("", "")).is_plain


def test_nodes_that_share_experts_kept_together() -> None:
    problem = Problem(heights=(4, 8), pools=pools(9), nodes_per_cell=2, expert_cells=4)
    whole = problem.together
    assert whole is not None
    assert (whole.heights, whole.nodes_per_cell, whole.expert_cells) == ((1, 2), 8, 1)
    assert replace(problem, expert_cells=1).together is None
    assert replace(problem, heights=(4, 6)).together is None


@pytest.mark.parametrize(
    ("free", "more", "says"),
    [
        ((4,), {}, ""), ((3,), {}, "needs 4 nodes; 3 are free: 1 is missing"),
        ((4,), {"spares": Spares(total=1)}, "needs 4 nodes and 1 spare; 4 are free: 1 is missing"),
        ((5,), {"spares": Spares(total=1)}, ""), ((5,), {"spares": Spares(per_row=1)}, "and 2 spare; 5 are free: 1"),
        ((6,), {"spares": Spares(per_row=1)}, ""),
        ((3, 3), {"spares": Spares(per_minipod=1)}, ""),
        ((3, 2), {"spares": Spares(per_minipod=1)}, "with 1 spare in each minipod; 5 are free, but only 3 of them"),
        ((3, 3), {"nodes_per_cell": 2}, "needs 8 nodes; 6 are free: 2 are missing"),
        ((5, 3), {"nodes_per_cell": 2}, "needs 8 nodes as 4 blocks of 2 of one minipod; 8 are free, but only 6"),
        ((4, 4), {"nodes_per_cell": 2}, ""),
    ],
)  # fmt: skip
def test_nodes_that_do_not_suffice(free: tuple[int, ...], more: dict[str, Any], says: str) -> None:
    problem = Problem(heights=(2, 2), pools=pools(*free), **more)
    if not says:
        problem.check_room()
        return
    with pytest.raises(PlacementError, match=says) as caught:
        problem.check_room()
    kept = "spares" in more
    assert ("eep fewer spares" in str(caught.value)) == kept


def test_nodes_of_others_count_where_they_may_be_taken() -> None:
    short = Problem(heights=(2, 2), pools=pools(1, 1, held=1))
    with pytest.raises(PlacementError, match="or allow preempting some of the 2 nodes that other jobs hold"):
        short.check_room()
    replace(short, price=1.0).check_room()
    with pytest.raises(PlacementError, match="needs 5 nodes; 4 are free: 1 is missing"):
        replace(short, heights=(2, 3), price=1.0).check_room()


def legal(problem: Problem, cells: tuple[int, ...]) -> bool:
    try:
        check_legal(problem, cells)
    except AssertionError:
        return False
    return True


def test_answers_that_are_legal_and_those_that_are_not() -> None:
    problem = Problem(heights=(2, 2), pools=pools(3, 2, held=1))
    assert legal(problem, (0, 0, 0, 1)) and legal(problem, (0, 0, 1, 1))
    assert not legal(problem, (0, 0, 0, 0)) and not legal(problem, (0, 1, 1, 1)) and not legal(problem, (0, 0, 1))
    assert legal(replace(problem, price=1.0), (0, 0, 0, 0)) and legal(replace(problem, price=1.0), (0, 1, 1, 1))
    assert not legal(replace(problem, price=1.0), (1, 1, 1, 1))
    spare = replace(problem, spares=Spares(per_minipod=1))
    assert legal(replace(spare, heights=(2,)), (0, 0)) and not legal(spare, (0, 0, 0, 1))
    assert legal(replace(spare, heights=(2,), pools=pools(3, 0)), (0, 0)), "none is kept where the job is not"
    assert not legal(replace(problem, heights=(2,), nodes_per_cell=2), (0, 0))
    assert legal(replace(problem, heights=(2,), nodes_per_cell=2), (0, 1))
    assert not legal(replace(problem, forbidden=frozenset({(1, "m0")})), (0, 0, 0, 1))
    assert legal(replace(problem, forbidden=frozenset({(0, "m1")})), (0, 0, 0, 1))
    typed = replace(problem, pools=(replace(problem.pools[0], gpu="a"), replace(problem.pools[1], gpu="b")))
    assert legal(replace(typed, gpus=("a", "")), (0, 0, 0, 1)) and legal(replace(typed, gpus=("a", "b")), (0, 0, 1, 1))
    assert not legal(replace(typed, gpus=("a", "b")), (0, 0, 0, 1))


def test_the_most_spread_row_and_column_count() -> None:
    problem = Problem(heights=(2, 2), pools=pools(4, 4, 4), edges=((0, 1),))
    assert spread_of(problem, (0, 1, 0, 0)).columns == 2 and spread_of(problem, (0, 0, 0, 1)).columns == 2
    assert spread_of(problem, (0, 0, 1, 0)).rows == 2 and spread_of(problem, (0, 0, 0, 1)).rows == 2
    assert spread_of(problem, (2, 2, 2, 2)) == spread_of(problem, (0, 0, 0, 0))
    two = Problem(heights=(2, 2), pools=(Pool.plain("a", 4), replace(Pool.plain("a", 4), gpu="x")), edges=((0, 1),))
    assert spread_of(two, (0, 1, 0, 1)).used == 1, "two pools of one minipod"

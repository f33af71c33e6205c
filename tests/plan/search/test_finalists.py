"""Finalists: which points of a ranking are predicted: as many as may be the best, then what is one
choice away from the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, StrategyTable
from plait.plan.search.finalists import CLOSE, DOUBT, NEAR, ROUNDS, TRIED, Finalists
from plait.plan.search.search import Ranked

Row = dict[str, int]
Point = Mapping[str, int]
FULL = RECOMPUTES.index("full")
HERE: Row = {"pp": 2, "dp": 4, "tp": 2, "micro": 4, "num_micro": 16}
"""At the best: no slices, and nothing that is computed again."""


@dataclass(frozen=True)
class Timed:
    """A finalist."""

    seconds: float
    closed_form: float | None = None


class Tried:
    """Finalists of a space. rows: all points; said: seconds of each in closed form; found: of a
    point when it is predicted, None of one that is none. ranked: numbers of those that stand in the
    ranking; large: of those that do not fit in closed form."""

    def __init__(
        self, rows: Sequence[Row], said: Sequence[float], found: Callable[[Point], float | None],
        ranked: Sequence[int], large: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.rounds = list[list[int]]()
        space, seconds = StrategyTable.of(rows), np.array(said)
        self.rows, which = [space.row(at) for at in range(len(rows))], np.array(ranked)

        def predict(points: Sequence[Point]) -> list[Timed | None]:
            self.rounds.append([self.rows.index(dict(point)) for point in points])
            each = [found(point) for point in points]
            return [None if one is None else Timed(one) for one in each]

        def fit(points: StrategyTable) -> np.ndarray:
            return np.array([self.rows.index(points.row(at)) not in large for at in range(len(points))], dtype=bool)

        points = space.take(which)
        ranking = Ranked(points, seconds[which], np.zeros(len(which)), space, seconds)
        self.finalists = Finalists(ranking, predict, fit)

    @property
    def predicted(self) -> list[int]:
        """Numbers of the points, in the order in which they were."""
        return [at for each in self.rounds for at in each]


def walked(said: Sequence[float], found: Sequence[float | None]) -> Tried:
    """A ranking whose points differ in the number of their micro-batches; two are shown, and two
    more may be faster."""
    rows = [HERE | {"num_micro": 1 + at} for at in range(len(said))]
    tried = Tried(rows, said, lambda point: found[point["num_micro"] - 1], range(len(said)))
    tried.finalists.first(2, 4)
    return tried


# ---- the first ----


@pytest.mark.parametrize(
    ("said", "found", "rounds"),
    [
        # As level 1 says: two are enough, since no other is near the best.
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1.0, 1.1, 1.2, 1.3, 1.4], [[0, 1]]),
        # Two more that level 1 has within 2 % of the best of them.
        ([1.0, 1.01, 1.019, DOUBT, 1.03], [1.0] * 5, [[0, 1], [2, 3]]),
        ([1.0, 1.01, DOUBT, DOUBT + 1e-4], [1.0] * 4, [[0, 1], [2]]),
        # All of which level 1 says that they are faster than the best so far, but no more than six.
        ([1.0] * 10, [5.0] * 10, [[0, 1], [2, 3], [4, 5]]),
        ([1.0, 1.0, 1.0, 1.0, 2.0, 6.0], [5.0, 4.0, 3.0, 4.0, 2.5, 1.0], [[0, 1], [2, 3], [4]]),
        ([1.0, 1.0, 1.0, 1.0, 5.0, 5.1], [5.0] * 6, [[0, 1], [2, 3], [4]]),
        ([1.0], [1.0], [[0]]),
        # What a rule forbids or does not fit takes nobody's place.
        ([1.0, 1.1, 1.2, 1.3, 1.4], [None, 1.1, None, 1.3, 1.4], [[0, 1], [2], [3]]),
        ([1.0, 1.1, 1.2], [None, None, None], [[0, 1], [2]]),
    ],
)
def test_as_many_are_predicted_as_may_be_among_the_best(
    said: list[float], found: list[float | None], rounds: list[list[int]]
) -> None:
    tried = walked(said, found)
    assert tried.rounds == rounds
    refused = [at for at in tried.predicted if found[at] is None]
    assert tried.finalists.refused == [tried.rows[at] for at in refused]
    kept = [at for at in tried.predicted if found[at] is not None]
    assert tried.finalists.predicted == [(tried.rows[at], Timed(found[at] or 0.0)) for at in kept]


def test_the_first_of_equal_ones_is_the_best() -> None:
    tried = walked([1.0, 1.0, 1.0, 1.0], [2.0, 1.5, 1.5, 3.0])
    assert tried.finalists.best == (tried.rows[1], Timed(1.5))


def test_what_finalists_took_corrects_what_is_said_of_others_that_are_like_them() -> None:
    """Of zb-v the closed form is 10 % too dear, of the first schedule 5 %: so the next of zb-v is
    predicted, although two others stand before it. Each may be 2 % faster, since all have another
    micro-batch."""
    first, split = (SCHEDULES.index(name) for name in ("1f1b", "zb-v"))
    kinds = [first, split, first, first, split, first, split]
    said = [1.0, 1.01, 1.02, 1.025, 1.03, 1.05, 1.2]
    points = StrategyTable.of([HERE | {"schedule": schedule, "micro": 1 << at} for at, schedule in enumerate(kinds)])
    rounds = list[list[int]]()

    def predict(some: Sequence[Point]) -> list[Timed]:
        rounds.append([int(point["micro"]).bit_length() - 1 for point in some])
        return [Timed(said[at] * (0.9 if kinds[at] == split else 0.95), said[at]) for at in rounds[-1]]

    ranking = Ranked(points, np.array(said), np.zeros(len(said)), points, np.array(said))
    Finalists(ranking, predict, lambda points: np.ones(len(points), bool)).first(2, 4)
    assert rounds == [[0, 1], [4]]


# ---- neighbours ----


def climbed(
    more: Sequence[Row], said: Sequence[float] | None = None,
    found: Callable[[Point], float | None] = lambda _: 2.0, large: Sequence[int] = (),
) -> Tried:  # fmt: skip
    """Neighbours of the only point in a ranking, of which level 1 says 1 second, the simulation
    1.5."""
    rows = [HERE, *(HERE | row for row in more)]

    def predicted(point: Point) -> float | None:
        return (
            1.5
            if all(point[name] == value for name, value in StrategyTable.of([HERE]).row(0).items())
            else found(point)
        )

    tried = Tried(rows, [1.0, *(said or [1.0] * len(more))], predicted, [0], large)
    tried.finalists.first(1, 1)
    tried.finalists.climb()
    return tried


ONE_CHOICE: list[Row] = [
    {"micro": 2, "num_micro": 32}, {"p1": 2}, {"p1": 2, "p2": 4, "overlap": OVERLAPS.index("sync")},
    {"schedule": SCHEDULES.index("interleaved"), "virtual": 2}, {"recompute": FULL},
    {"recompute": FULL, "recompute_layers": 3}, {"params": 4, "grads": 4, "optim": 4}, {"optim": 2, "secondary": 2},
    {"sequence_parallel": 1}, {"pp": 1, "dp": 8}, {"pp": 4, "dp": 2, "num_micro": 32}, {"tp": 4, "dp": 2},
    {"cp": 2, "ring": 2, "dp": 2}, {"ep": 4},
]  # fmt: skip
OTHERS: list[Row] = [
    {"micro": 2, "num_micro": 32, "p1": 2}, {"recompute": FULL, "p2": 2}, {"tp": 4, "dp": 2, "sequence_parallel": 1},
    {"tp": 4, "dp": 2, "micro": 8, "num_micro": 8}, {"optim": 2, "schedule": SCHEDULES.index("zb-h1")},
    {"graphs": 1}, {"shard_overlap": 0},
]  # fmt: skip


def test_neighbours_that_do_not_fit_take_nobodys_place() -> None:
    assert climbed(ONE_CHOICE, large=[1, 2, 5]).predicted == [0, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("row", ONE_CHOICE, ids=str)
def test_what_differs_in_one_choice_is_a_neighbour(row: Row) -> None:
    assert climbed([row, *OTHERS]).predicted == [0, 1]


@pytest.mark.parametrize("row", OTHERS, ids=str)
def test_what_differs_in_two_or_in_none_is_not(row: Row) -> None:
    assert climbed([row]).predicted == [0]


def test_neighbours_are_near_what_level_1_says_of_the_best_and_the_fastest_come_first() -> None:
    said = [NEAR, 1.05, NEAR + 1e-6, 0.9, 1.05, 3.0]
    tried = climbed(ONE_CHOICE[: len(said)], said)
    assert tried.rounds == [[0], [4, 2, 5, 1]]


def test_so_many_are_tried_at_once_and_no_more_where_none_is_better() -> None:
    said = [1.0 + at / 1000 for at in range(len(ONE_CHOICE))]
    tried = climbed(ONE_CHOICE, said)
    assert tried.rounds == [[0], list(range(1, 1 + TRIED))]


def test_a_plain_strategy_is_tried_whatever_level_1_says_of_it() -> None:
    """First, and even if it is no neighbour."""
    best = {"p1": 4, "recompute": FULL, "recompute_layers": 2}
    rows = [HERE | best, *(HERE | best | {"optim": 1 << at} for at in range(1, 9)), HERE]
    tried = Tried(rows, [1.0, *[1.01] * 8, 50.0], lambda _: 2.0, [0])
    tried.finalists.first(1, 1)
    tried.finalists.climb()
    assert tried.rounds == [[0], [9, 1, 2, 3, 4, 5]]


def test_a_plain_strategy_of_other_ranks_is_not_meant() -> None:
    assert climbed([{"pp": 4, "dp": 2, "p1": 2}], [5.0]).predicted == [0]


def test_a_better_neighbour_has_neighbours_of_its_own() -> None:
    """Each finds the next; four times, then it ends."""
    rows: list[Row] = [{"p1": 2}, {"p1": 2, "optim": 2}, {"p1": 2, "optim": 2, "sequence_parallel": 1}]
    tried = climbed(rows, found=lambda point: 1.4 - point["optim"] / 10 - point["sequence_parallel"] / 10)
    assert tried.rounds[:4] == [[0], [1], [2], [3]]
    assert tried.finalists.best == (tried.rows[3], Timed(1.4 - 0.2 - 0.1))
    steps = [HERE | {"p1": 1 + (at + 1) // 2, "optim": 1 + at // 2} for at in range(9)]
    longer = Tried(steps, [1.0] * 9, lambda point: 9.0 - point["p1"] - point["optim"], [0])
    longer.finalists.first(1, 1)
    longer.finalists.climb()
    assert len(longer.rounds) == 1 + ROUNDS


def test_neighbours_that_are_no_finalists_end_nothing_that_goes_on() -> None:
    """One that is refused is not asked again."""
    rows: list[Row] = [{"p1": 2}, {"optim": 2}, {"optim": 2, "p1": 2}]
    tried = climbed(rows, found=lambda point: None if point["p1"] > 1 else 1.0)
    assert tried.predicted == [0, 1, 2, 3]
    assert tried.finalists.refused == [tried.rows[1], tried.rows[3]]
    assert climbed(rows, found=lambda _: None).predicted == [0, 1, 2]


def test_a_point_is_predicted_once_however_often_a_space_has_it() -> None:
    """A search looks at the best arrangements of ranks again in full."""
    tried = climbed([{"p1": 2}, {"p1": 4}, {"p1": 2}, {"p1": 4}])
    assert sorted(tried.predicted) == [0, 1, 2]
    assert len({tuple(point.values()) for point, _ in tried.finalists.predicted}) == len(tried.finalists.predicted)


# ---- neighbours of equals ----


def test_other_slices_of_those_that_take_as_long_as_the_best_may_be_better_than_it() -> None:
    """By what the closed form says that they differ from these: 4 from 1, but not 5 or, with other
    owners, 6; none from 2, which takes too long, or of the best, whose neighbours ``climb``
    predicts. Such a find has neighbours of its own."""
    other = {"pp": 4, "dp": 2}
    rows: list[Row] = [{}, other, {"pp": 1, "dp": 8}, {"p1": 2}, {**other, "p1": 2}, {**other, "p2": 2},
                       {**other, "optim": 2}, {"pp": 1, "dp": 8, "p1": 2}]  # fmt: skip
    said = [1.0, 1.1, 1.2, 1.001, 1.1 * 1.003, 1.1 * 1.02, 1.1 * 1.001, 1.2 * 0.999]
    found = {0: 1.0, 1: 1.001, 2: CLOSE + 1e-3, 4: 0.99}
    space = StrategyTable.of([HERE | row for row in rows])
    points = [space.row(at) for at in range(len(rows))]
    tried = Tried(points, said, lambda point: found.get(points.index(dict(point)), 2.0), [0, 1, 2])
    tried.finalists.first(3, 3)
    tried.finalists.around_equals()
    assert tried.rounds == [[0, 1, 2], [4], [3, 5, 7]]
    assert tried.finalists.best[1] == Timed(0.99)


# ---- other schedules ----


def test_the_fastest_of_every_schedule_that_no_finalist_has_is_predicted() -> None:
    """If it fits, and may be the best; what is so found counts."""
    first, split, far, held = (SCHEDULES.index(name) for name in ("1f1b", "zb-v", "interleaved", "zb-h1"))
    schedules = [first, first, split, split, split, far, held]
    rows = [HERE | {"schedule": schedule, "num_micro": 1 + at} for at, schedule in enumerate(schedules)]
    said = [1.0, 1.01, 1.03, 1.05, 1.06, NEAR + 0.01, 1.02]
    tried = Tried(rows, said, lambda point: 0.9 if point["schedule"] == split else 1.0, [0, 1], large=[2, 6])
    tried.finalists.first(2, 4)
    tried.finalists.other_schedules()
    assert tried.rounds == [[0, 1], [3]]  # the second of zb-v fits, the only one of zb-h1 does not
    assert tried.finalists.best[0]["schedule"] == split
    tried.finalists.other_schedules()
    assert tried.predicted == [0, 1, 3]

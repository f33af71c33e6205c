"""Finalists of the closed form, and their neighbours: selects the strategies of a ranking that are
predicted in full.

The closed form errs by a few percent; by more if the host limits a step or few micro-batches fill a
pipeline. It errs alike for similar strategies, so each full prediction corrects the closed form's
seconds of others. The best of each family are predicted as long as they may be the best; then
strategies that differ from the best in one choice, as long as that finds a better one. A strategy
without slices and recomputation is always included, whatever the closed form predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.core.step.columns.points import RECOMPUTES, Ints, StrategyTable
from plait.plan.search.search import Ranked, map_with_fork

DOUBT = 1.02
"""Default limit of finalists beyond the shown ones: they are predicted while the closed form's
seconds are at most this factor times the best finalist's."""
NEAR = 1.1
"""Limit of neighbours: they are predicted while the closed form's seconds are at most this factor
times its seconds for the best."""
LIKENESS, UNLIKE = 4, 0.02
"""LIKENESS: factor by which a prediction's weight falls for every choice in which the corrected
strategy differs from the predicted one. UNLIKE: fraction by which a strategy may be faster than
expected, for every choice in which it differs from all predicted ones. For 20 random jobs with
fully simulated rankings, this found a plan within 0.5 % of the best in all but two."""
CLOSE = 1.01
"""Limit of finalists, relative to the best, that may have a neighbour with other slices that beats
it. The closed form errs by this much between slices, and by less between other choices."""
TRIED, ROUNDS = 6, 4
"""TRIED: largest number of strategies predicted at once. ROUNDS: number of times that neighbours
are predicted."""
LOOKED_AT = 64
"""Number of the fastest strategies checked for memory, for each schedule that no finalist has."""
SLICES = ("p1", "p2", "overlap")
GROUPS: tuple[tuple[str, ...], ...] = (
    ("micro", "num_micro"),
    SLICES,
    ("schedule", "virtual"),
    ("recompute", "recompute_layers"),
    ("params", "grads", "optim", "secondary"),
    ("sequence_parallel",),
    ("pp", "dp", "cp", "ring", "tp", "ep", "num_micro"),
)
"""Columns of ``StrategyTable`` that make up each choice; a neighbour differs in the columns of one
choice."""
PLAIN = {"p1": 1, "p2": 1, "recompute": RECOMPUTES.index("none"), "recompute_layers": -1}
"""Columns of a strategy without slices and recomputation."""
LISTS = (
    "pp", "virtual", "tp", "sequence_parallel", "micro", "schedule", "recompute", "recompute_layers", "overlap", "p1",
    "p2",
)  # fmt: skip
"""Columns that instruction lists depend on."""
Point = Mapping[str, int]


class FinalistPrediction(Protocol):
    """The prediction of a strategy: simulated, or in closed form with traced memory."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        ...

    @property
    def closed_form(self) -> float | None:
        """Seconds of a step in closed form; None if the closed form does not apply."""
        ...


R = TypeVar("R")
T = TypeVar("T", bound=FinalistPrediction)


def shared_by_lists(work: Callable[[Point], R], points: Sequence[Point]) -> list[R]:
    """Return ``work`` of every strategy in ``points``, in order, computed by this process and a
    forked one. Strategies with the same instruction lists run one after the other: lists take
    longest to compute."""
    alike = dict[tuple[int, ...], list[int]]()
    for at, point in enumerate(points):
        alike.setdefault(tuple(point[name] for name in LISTS), []).append(at)
    pieces = sorted(alike.values(), key=len, reverse=True)
    done = map_with_fork(lambda piece: [work(points[at]) for at in piece], pieces)
    found = {at: one for piece, each in zip(pieces, done, strict=True) for at, one in zip(piece, each, strict=True)}
    return [found[at] for at in range(len(points))]


@dataclass
class Finalists(Generic[T]):
    """Strategies of a ranking that are predicted in full.

    ranked: the strategies in closed form. predict: returns a prediction for each strategy, None if
    it cannot be planned. fit: returns True for strategies that fit into memory in closed form.
    doubt: factor as in ``DOUBT``. corrects: True if predictions correct the closed form of other
    strategies; without corrections its errors remain, so more are predicted. predicted: strategies
    with their predictions. refused: strategies without one."""

    ranked: Ranked
    predict: Callable[[Sequence[Point]], Sequence[T | None]]
    fit: Callable[[StrategyTable], NDArray[np.bool_]]
    doubt: float = DOUBT
    corrects: bool = True
    predicted: list[tuple[Point, T]] = field(default_factory=list[tuple[Point, T]])
    refused: list[Point] = field(default_factory=list[Point])
    _known: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def first(self, sure: int, count: int) -> None:
        """Predict the ``sure`` strategies that will be shown; then, up to ``count`` in total, those
        that may be faster. Then predict half as many again (as many again without corrections),
        while the closed form puts them ahead of the best."""
        left, most = np.arange(len(self.ranked.seconds)), count + (count // 2 if self.corrects else count)
        while len(left) and len(self.predicted) < most:
            best = self.best[1].seconds if self.predicted else math.inf
            had, said = len(self.predicted), self._corrected(left)
            limit = math.inf if had < sure else self.doubt * best if had < count else best
            enough = min(TRIED, next(some for some in (sure, count, most) if some > had) - had)
            some = np.argsort(said, kind="stable")
            some = left[some[said[some] <= limit][:enough]]
            if not len(some):
                return
            self._predict([self.ranked.points.row(one) for one in some.tolist()])
            left = np.setdiff1d(left, some)

    def _corrected(self, which: Ints) -> NDArray[np.float64]:
        """Return the likely seconds of the strategies at indices ``which`` of the ranking: the
        closed form, times its error for predicted strategies. Similar strategies weigh more; the
        result is lower if none is similar."""
        points, said = self.ranked.points.take(which), self.ranked.seconds[which]
        known = [(point, one.seconds / one.closed_form) for point, one in self.predicted if one.closed_form]
        if not self.corrects or all(factor == 1 for _, factor in known):  # no predictions, or only closed-form ones
            return said
        columns = points.columns()
        apart = np.array([[~_like(columns, point, group) for group in GROUPS] for point, _ in known]).sum(axis=1)
        likeness = LIKENESS ** -apart.astype(float)
        factors = np.array([factor for _, factor in known]) @ likeness / likeness.sum(axis=0)
        return said * factors * (1 - UNLIKE * apart.min(axis=0))

    @property
    def best(self) -> tuple[Point, T]:
        """The predicted strategy with the fewest seconds, and its prediction; the first among
        equals."""
        return min(self.predicted, key=lambda one: one[1].seconds)

    def climb(self) -> None:
        """Predict strategies that differ from the best in one choice; if one is faster, repeat from
        it."""
        self.improve_best(
            lambda point: list(islice((row for row, _ in self._near(point) if not self._knows(row)), TRIED))
        )

    def around_equals(self) -> None:
        """Predict other slices of strategies that take hardly longer than the best, if they may
        beat it. If one does, predict the strategies that differ from it in one choice."""
        best, limit = self.best, CLOSE * self.best[1].seconds
        expected = dict[tuple[int, ...], tuple[float, Point]]()
        for point, one in self.predicted:
            most = limit / one.seconds
            for row, ratio in self._near(point, most, [SLICES]) if point is not best[0] and most >= 1 else ():
                if 0 < ratio <= most and not self._knows(row):
                    expected.setdefault(_key(row), (ratio * one.seconds, row))
        self._predict([row for _, row in sorted(expected.values(), key=lambda each: each[0])[:TRIED]])
        if self.best is not best:
            self.climb()

    def other_schedules(self) -> None:
        """Predict the fastest strategy of every schedule that no finalist has, if it may be the
        best: the closed form errs by more between schedules than within one."""
        space, said = self.ranked.space, self.ranked.closed_form_seconds
        had, rows = {point["schedule"] for point, _ in self.predicted}, list[Point]()
        for schedule in sorted(set(space.schedule.tolist()) - had):
            among = np.flatnonzero((space.schedule == schedule) & (said <= NEAR * self.ranked.seconds[0]))
            fastest = among[np.argsort(said[among], kind="stable")][:LOOKED_AT]
            rows += [space.row(at) for at in fastest[self.fit(space.take(fastest))][:1].tolist()]
        self._predict([row for row in rows if not self._knows(row)])

    def improve_best(self, alternatives: Callable[[Point], Sequence[Point]]) -> None:
        """Predict the strategies that ``alternatives`` returns for the best; if one is faster,
        repeat from it."""
        for _ in range(ROUNDS):
            best = self.best
            self._predict(list({_key(one): one for one in alternatives(best[0]) if not self._knows(one)}.values()))
            if self.best is best:
                return

    def predict_near_best(self, alternatives: Callable[[Point], Sequence[Point]]) -> None:
        """Predict the strategies that ``alternatives`` returns for each strategy that takes hardly
        longer than the best, as they may beat it."""
        limit = DOUBT * self.best[1].seconds
        near = [point for point, one in self.predicted if one.seconds <= limit]
        rows = {_key(one): one for point in near for one in alternatives(point) if not self._knows(one)}
        self._predict(list(rows.values()))

    def _near(
        self, point: Point, most: float = NEAR, groups: Sequence[tuple[str, ...]] = GROUPS
    ) -> Iterator[tuple[Point, float]]:
        """Yield (strategy that differs from ``point`` in one choice, its closed-form seconds
        relative to ``point``): first the one without slices and recomputation, then the fastest, up
        to a ratio of ``most``. groups: the choices that may differ."""
        space, said = self.ranked.space, self.ranked.closed_form_seconds
        columns = space.columns()
        here = _like(columns, point, columns)
        own = said[here].min() if here.any() else math.inf
        plain = _like(columns, dict(point) | PLAIN, columns)
        first = np.flatnonzero(plain)[:1]
        near = np.zeros(len(space), dtype=bool)
        for group in groups:
            near |= _like(columns, point, columns.keys() - set(group))
        numbers = np.flatnonzero(near & (said <= most * own))
        order = np.concatenate([first, numbers[np.argsort(said[numbers], kind="stable")]])
        order = order[self.fit(space.take(order))]
        seen = set[tuple[int, ...]]()  # a space that was searched twice has points twice
        for at in order.tolist():
            row = space.row(at)
            if _key(row) not in seen:
                seen.add(_key(row))
                yield row, float(said[at] / own)

    def _knows(self, point: Point) -> bool:
        return _key(point) in self._known

    def _predict(self, points: Sequence[Point]) -> None:
        """Predict strategies together; record them in ``predicted`` and ``refused``."""
        self._known.update(map(_key, points))
        for point, one in zip(points, self.predict(points) if points else (), strict=True):
            if one is None:
                self.refused.append(point)
            else:
                self.predicted.append((point, one))


def _key(point: Point) -> tuple[int, ...]:
    return tuple(point.values())


def _like(columns: Mapping[str, Ints], point: Point, names: Iterable[str]) -> NDArray[np.bool_]:
    """Return True for strategies equal to ``point`` in the columns ``names``: an array. columns:
    values of all strategies."""
    found = np.ones(len(next(iter(columns.values()))), dtype=bool)
    for name in names:
        found &= columns[name] == point[name]
    return found

"""Finalists of the closed form, and their neighbours: which points of a ranking are predicted in full.

The closed form errs by a few percent, by more where the host limits a step or few micro-batches fill a
pipeline. It errs alike for strategies that are alike, so each that is predicted corrects what it says of
others. So the best of each family are predicted as long as they may be the best; then what differs from the
best in one choice, as long as that finds a better one. A strategy without slices and without recomputation is
always among these, whatever the closed form says of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.core.step.columns.distinct import Ints
from plait.core.step.columns.points import RECOMPUTES, Points
from plait.plan.forked import shared
from plait.plan.search import Ranked

DOUBT = 1.02
"""Finalists beyond those that are shown are predicted as long as the closed form says no more than so many
times what the best of them takes, unless said otherwise ..."""
NEAR = 1.1
"""... and neighbours as long as it says no more than so many times what it says of the best."""
LIKENESS, UNLIKE = 4, 0.02
"""For every choice in which a strategy differs from one that was predicted, what is known of that one counts
so many times less; for every one in which it differs from all, it may be faster than expected by such a part.
Of 20 drawn jobs whose rankings were simulated in full, the best of all but two was so found within 0.5 %."""
CLOSE = 1.01
"""Finalists that take no more than so many times what the best does may have a neighbour with other slices
that is better than it: the closed form errs by so much between slices, and by less between others."""
TRIED, ROUNDS = 6, 4
"""Points that are predicted at once at most, and how often neighbours are."""
LOOKED_AT = 64
"""Of a schedule that no finalist has, so many of the fastest are asked whether they fit."""
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
"""Columns of one choice; a neighbour differs in those of one."""
PLAIN = {"p1": 1, "p2": 1, "recompute": RECOMPUTES.index("none"), "recompute_layers": -1}
"""What a strategy does that neither slices nor computes again."""
LISTS = (
    "pp", "virtual", "tp", "sequence_parallel", "micro", "schedule", "recompute", "recompute_layers", "overlap", "p1",
    "p2",
)  # fmt: skip
"""Columns that lists of ops depend on."""
Point = Mapping[str, int]


class Timed(Protocol):
    """A point that was predicted."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        ...

    @property
    def closed_form(self) -> float | None:
        """What the closed form says of it; None where it says nothing."""
        ...


R = TypeVar("R")
T = TypeVar("T", bound=Timed)


def shared_by_lists(work: Callable[[Point], R], points: Sequence[Point]) -> list[R]:
    """``work`` of every point, shared with a copy of this process; those with the same lists of ops one after
    the other: lists take longest to find."""
    alike = dict[tuple[int, ...], list[int]]()
    for at, point in enumerate(points):
        alike.setdefault(tuple(point[name] for name in LISTS), []).append(at)
    pieces = sorted(alike.values(), key=len, reverse=True)
    done = shared(lambda piece: [work(points[at]) for at in piece], pieces)
    found = {at: one for piece, each in zip(pieces, done, strict=True) for at, one in zip(piece, each, strict=True)}
    return [found[at] for at in range(len(points))]


@dataclass
class Finalists(Generic[T]):
    """Points of a ranking that are predicted.

    predict: of several points, what they are as finalists, None for those that are none. fit: which of
    several points fit in closed form. corrects: whether those that were predicted correct what is said of the
    others; else, since that errs too, more are predicted. found: with their points. refused: those that are
    none.
    """

    ranked: Ranked
    predict: Callable[[Sequence[Point]], Sequence[T | None]]
    fit: Callable[[Points], NDArray[np.bool_]]
    doubt: float = DOUBT
    corrects: bool = True
    found: list[tuple[Point, T]] = field(default_factory=list[tuple[Point, T]])
    refused: list[Point] = field(default_factory=list[Point])
    _known: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def first(self, sure: int, count: int) -> None:
        """Predict so many that are ``sure`` to be shown, ``count`` of those that may be faster, and half as
        many again, or as many where nothing is corrected, while the closed form says that they are."""
        left, most = np.arange(len(self.ranked.seconds)), count + (count // 2 if self.corrects else count)
        while len(left) and len(self.found) < most:
            best = self.best[1].seconds if self.found else math.inf
            had, said = len(self.found), self._corrected(left)
            limit = math.inf if had < sure else self.doubt * best if had < count else best
            enough = min(TRIED, next(some for some in (sure, count, most) if some > had) - had)
            some = np.argsort(said, kind="stable")
            some = left[some[said[some] <= limit][:enough]]
            if not len(some):
                return
            self._predict([self.ranked.points.row(one) for one in some.tolist()])
            left = np.setdiff1d(left, some)

    def _corrected(self, which: Ints) -> NDArray[np.float64]:
        """Seconds that some of the ranking may well take: the closed form, times what it was wrong by for
        those that were predicted, the more alike the more; less where none is quite alike."""
        points, said = self.ranked.points.take(which), self.ranked.seconds[which]
        known = [(point, one.seconds / one.closed_form) for point, one in self.found if one.closed_form]
        if not self.corrects or all(factor == 1 for _, factor in known):  # none, or of the closed form alone
            return said
        columns = points.columns()
        apart = np.array([[~_like(columns, point, group) for group in GROUPS] for point, _ in known]).sum(axis=1)
        likeness = LIKENESS ** -apart.astype(float)
        factors = np.array([factor for _, factor in known]) @ likeness / likeness.sum(axis=0)
        return said * factors * (1 - UNLIKE * apart.min(axis=0))

    @property
    def best(self) -> tuple[Point, T]:
        """The fastest, the first of equal ones."""
        return min(self.found, key=lambda one: one[1].seconds)

    def climb(self) -> None:
        """Predict neighbours of the best, of a better one its own, and so on."""
        self.instead(lambda point: list(islice((row for row, _ in self._near(point) if not self._knows(row)), TRIED)))

    def around_equals(self) -> None:
        """Predict other slices of finalists that take hardly longer than the best, where they may be better
        than it; of a better one its neighbours."""
        best, limit = self.best, CLOSE * self.best[1].seconds
        expected = dict[tuple[int, ...], tuple[float, Point]]()
        for point, one in self.found:
            most = limit / one.seconds
            for row, ratio in self._near(point, most, [SLICES]) if point is not best[0] and most >= 1 else ():
                if 0 < ratio <= most and not self._knows(row):
                    expected.setdefault(_key(row), (ratio * one.seconds, row))
        self._predict([row for _, row in sorted(expected.values(), key=lambda each: each[0])[:TRIED]])
        if self.best is not best:
            self.climb()

    def other_schedules(self) -> None:
        """Predict the fastest of every schedule that no finalist has, if it may be the best: the closed form
        errs by more between schedules than within one."""
        space, said = self.ranked.space, self.ranked.said
        had, rows = {point["schedule"] for point, _ in self.found}, list[Point]()
        for schedule in sorted(set(space.schedule.tolist()) - had):
            among = np.flatnonzero((space.schedule == schedule) & (said <= NEAR * self.ranked.seconds[0]))
            fastest = among[np.argsort(said[among], kind="stable")][:LOOKED_AT]
            rows += [space.row(at) for at in fastest[self.fit(space.take(fastest))][:1].tolist()]
        self._predict([row for row in rows if not self._knows(row)])

    def instead(self, others: Callable[[Point], Sequence[Point]]) -> None:
        """Predict others than the best, of a better one its own, and so on."""
        for _ in range(ROUNDS):
            best = self.best
            self._predict(list({_key(one): one for one in others(best[0]) if not self._knows(one)}.values()))
            if self.best is best:
                return

    def beside(self, others: Callable[[Point], Sequence[Point]]) -> None:
        """Predict others than those that take hardly longer than the best, as they may be faster than it."""
        limit = DOUBT * self.best[1].seconds
        near = [point for point, one in self.found if one.seconds <= limit]
        rows = {_key(one): one for point in near for one in others(point) if not self._knows(one)}
        self._predict(list(rows.values()))

    def _near(
        self, point: Point, most: float = NEAR, groups: Sequence[tuple[str, ...]] = GROUPS
    ) -> Iterator[tuple[Point, float]]:
        """Plain ones, then the fastest in closed form, to ``most`` times the seconds of the point; each with
        how many times. groups: choices of which one may differ."""
        space, said = self.ranked.space, self.ranked.said
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
        seen = set[tuple[int, ...]]()  # a space that was looked at twice has points twice
        for at in order.tolist():
            row = space.row(at)
            if _key(row) not in seen:
                seen.add(_key(row))
                yield row, float(said[at] / own)

    def _knows(self, point: Point) -> bool:
        return _key(point) in self._known

    def _predict(self, points: Sequence[Point]) -> None:
        """Predict points together, and keep what they are."""
        self._known.update(map(_key, points))
        for point, one in zip(points, self.predict(points) if points else (), strict=True):
            if one is None:
                self.refused.append(point)
            else:
                self.found.append((point, one))


def _key(point: Point) -> tuple[int, ...]:
    return tuple(point.values())


def _like(columns: Mapping[str, Ints], point: Point, names: Iterable[str]) -> NDArray[np.bool_]:
    """Which points are equal to ``point`` in some columns."""
    found = np.ones(len(next(iter(columns.values()))), dtype=bool)
    for name in names:
        found &= columns[name] == point[name]
    return found

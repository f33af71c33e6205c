"""The best strategies of a space, by time in closed form among those that fit into memory (levels 0 and 1 of
the planner).

Time is an expression over columns; memory needs every kind of structure walked once. So all points are timed,
and memory is asked of the fastest first, until enough are found that fit: the answer is that of asking all.
What micro-batches keep is the same for all slices, and mostly decides. The rest is walked, and lists are made
in which domino keeps something longer, of those points only that would fit without and come first of their
family.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import InfeasiblePlan
from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.step.columns.distinct import Ints, distinct
from plait.core.step.columns.points import RECOMPUTES, Degrees, Points
from plait.core.step.memory.closed_memory import MemoryColumns, device_overhead, step_memory, usable
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.choices import LAST_RESORT
from plait.plan.fits import KINDS, by_kind
from plait.plan.forked import shared
from plait.plan.needs import Needs
from plait.plan.relax import Relaxing
from plait.plan.space import MOST, Cell, SearchRequest, enumerate_around, enumerate_space

FIRST, BLOCK = 1 << 10, 1 << 15
"""Points whose memory is asked at once, the fastest first: few in the beginning, since often they are enough,
then eight times as many each time up to the second number. Not fewer: kinds of structures are walked for all
that are asked together."""
WALKED = 1 << 5
"""As ``FIRST``, for models of which every kind of point is walked on its own."""
SURE = 1 << 5
"""Of the points that may fit, so many of the fastest are asked first what they need; then twice as many each
time."""
SHARED = 1 << 17
"""Points of a space that one process times: of fewer at once more would be found twice."""
FAMILY = ("pp", "dp", "cp", "ring", "tp", "ep", "sequence_parallel", "micro", "schedule", "virtual", "recompute")
"""Columns in which strategies differ that a person would call different. The rest is tuning: of all that
agree in these, the fastest stands for all."""
ROOMS = (2, 8)
"""Such parts of the most points of a space may be around the best of its arrangements of ranks, and then
around those that were found so."""


@dataclass(frozen=True)
class Ranked:
    """The fastest point that fits of each family, the fastest first. space: all points that were searched;
    said: seconds of each in closed form."""

    points: Points
    seconds: NDArray[np.float64]
    memory: NDArray[np.float64]
    space: Points
    said: NDArray[np.float64]


def search(asked: SearchRequest, cluster: Cluster, precision: Precision, *, keep: int = 64, most: int = MOST) -> Ranked:
    """The ``keep`` fastest families.

    Where the space had to be made coarser, what is around the best of its arrangements of ranks is looked at
    in full, twice. Where nothing fits, recomputation of the last resort is tried. Raises JobError for a
    space without a strategy, InfeasiblePlan where nothing fits, with advice that was tried.
    """
    space = enumerate_space(asked, most=most)
    if not len(space):
        raise _Search(asked, cluster, precision, keep).relaxing.empty()
    try:
        first, short = _Search(asked, cluster, precision, keep).run(space)
    except InfeasiblePlan:
        last = _last_resort(asked)
        if last is None or not _Search(last, cluster, precision, keep).may_fit(enumerate_space(last, most=most)):
            raise
        with contextlib.suppress(InfeasiblePlan):
            return search(last, cluster, precision, keep=keep, most=most)
        raise
    found = [first]
    for part in ROOMS:
        best = _joined(found, keep).points
        more, short = _Search(asked, cluster, precision, keep).run(_around(asked, best, short, most // part))
        found.append(more)
    return _joined(found, keep)


def _joined(found: Sequence[Ranked], keep: int) -> Ranked:
    """The ``keep`` fastest families of several spaces."""
    points = Points.joined([each.points for each in found])
    seconds, memory = (np.concatenate([getattr(each, name) for each in found]) for name in ("seconds", "memory"))
    order = np.argsort(seconds, kind="stable")
    order = order[first_of_family(points.take(order))][:keep]
    space, said = Points.joined([each.space for each in found]), np.concatenate([each.said for each in found])
    return Ranked(points.take(order), seconds[order], memory[order], space, said)


def _last_resort(asked: SearchRequest) -> SearchRequest | None:
    """The same with the recomputation that keeps least, unless somebody says which there is."""
    kind = RECOMPUTES.index(LAST_RESORT)
    said = "recompute" in asked.fixed or "recompute" in asked.has or not asked.allows("recompute", kind)
    return None if said else replace(asked, has={**asked.has, "recompute": [kind]})


def _around(asked: SearchRequest, best: Points, short: Points, most: int) -> Points:
    """What is around the best of every arrangement of ranks. short: points that lack memory, which a choice
    that was left out may save; they take no room from those that fit."""
    bases = [(_of_each_cell(best), most), (_of_each_cell(short), most // 2)]
    return Points.joined([enumerate_around(asked, some, most=room) for some, room in bases if len(some)])


def _of_each_cell(points: Points) -> Points:
    """The first of every arrangement of ranks."""
    return points.take(np.sort(distinct([getattr(points, one.name) for one in fields(Cell)])[0]))


@dataclass(frozen=True)
class _Search:
    asked: SearchRequest
    cluster: Cluster
    precision: Precision
    keep: int

    @property
    def limit(self) -> float:
        """Bytes of a device that a plan may fill."""
        return usable(self.cluster.device, self.cluster.overhead)

    @property
    def walked(self) -> bool:
        """Whether every kind of point of the model is walked on its own, so that no bound is any cheaper."""
        return self.asked.model.levels > 0

    def may_fit(self, space: Points) -> bool:
        """Whether what points need at least is there for one of them."""
        return len(space) > 0 and bool(self.relaxing.within(self._rough(space, space.degrees()[0]).least).any())

    def run(self, space: Points) -> tuple[Ranked, Points]:
        """Of the points of a space; and those that fit by what they need at least, and do not."""
        seconds = self._seconds(space)
        order, rough = np.argsort(seconds, kind="stable"), list[_Rough]()
        found, memory = np.zeros(0, dtype=np.int64), np.zeros(0)  # numbers of points, the first of their families
        nearly = np.zeros(0, dtype=np.int64)
        start, size, among = 0, WALKED if self.walked else FIRST, space.degrees()[0]
        while start < len(order) and len(found) < self.keep:
            here = order[start : start + size]
            rough.append(self._rough(space.take(here), among))
            _, family = distinct(_families(space.take(np.concatenate([found, here]))))
            more, sizes, short = self._first_fitting(rough[-1], family[len(found) :], family[: len(found)])
            found, memory = np.concatenate([found, here[more]]), np.concatenate([memory, sizes])
            nearly = np.concatenate([nearly, here[short]])
            start, size = start + size, min(8 * size, BLOCK)
        if not len(found):
            everything = _Rough(space.take(order), Needs.joined([each.least for each in rough]))
            at, smallest = self._smallest(everything)
            fitting = self.relaxing.within(smallest)[0]  # yet a constraint on memory is not met
            needs = self._exact(everything, np.arange(len(order))) if fitting else smallest
            raise self.relaxing.short(everything.points, at, needs, self._by_kind(everything.points, at))
        best = found[: self.keep]
        return Ranked(space.take(best), seconds[best], memory[: self.keep], space, seconds), space.take(nearly)

    def _seconds(self, space: Points) -> NDArray[np.float64]:
        """In closed form, of every point of a space; of many a copy of this process times half."""
        asked, count = self.asked, len(space)
        size = -(-count // (2 * -(-count // (2 * SHARED)))) if count > SHARED else count
        pieces = [space.take(slice(at, at + size)) for at in range(0, count, size)]

        def timed(points: Points) -> NDArray[np.float64]:
            return total_seconds(
                asked.model, points, self.cluster, sequence=asked.sequence, precision=self.precision,
                options=asked.options,
            )  # fmt: skip

        return np.concatenate(shared(timed, pieces))

    def _by_kind(self, points: Points, at: int) -> str:
        """What fills the device of a point, in words."""
        found = self._columns(points.take(slice(at, at + 1)))
        return by_kind({kind: int(getattr(found, kind)[0]) for kind in KINDS if np.isfinite(found.allocated[0])})

    def needs(self, points: Points) -> Needs:
        """Bytes of the fullest rank."""
        return Needs.of(self._columns(points), self.asked.margin, self.cluster)

    def _columns(self, points: Points, among: Sequence[Degrees] | None = None) -> MemoryColumns:
        asked = self.asked
        return step_memory(
            asked.model, points, sequence=asked.sequence, precision=self.precision,
            options=asked.options, overhead=self.cluster.overhead, among=among,
        )  # fmt: skip

    def _rough(self, points: Points, among: Sequence[Degrees]) -> _Rough:
        """What memory points of a space need at least; of a model that is ``walked`` all that they need.
        among: the degrees of the space."""
        found, margin = self._columns(points, among), self.asked.margin
        if self.walked:
            return _Rough(points, Needs.of(found, margin, self.cluster))
        least = device_overhead(self.cluster.overhead, points, np.zeros(len(points)))
        return _Rough(points, Needs.beside(found, least, margin, self.cluster))

    def _exact(self, rough: _Rough, which: Ints) -> Needs:
        """Memory of some of the points."""
        return rough.least.take(which) if self.walked else self.needs(rough.points.take(which))

    def _smallest(self, rough: _Rough) -> tuple[int, Needs]:
        """The number of the point that needs least memory, the fastest of equal ones, and what it needs."""
        least = rough.least.all
        order, best, ask = np.argsort(least, kind="stable"), (np.inf, 0), SURE
        while len(order) and least[order[0]] <= best[0]:
            some, order, ask = order[:ask], order[ask:], 2 * ask
            best = min(best, *zip(self._exact(rough, some).all.tolist(), some.tolist(), strict=True))
        return int(best[1]), self._exact(rough, np.array([best[1]], dtype=np.int64))

    def _first_fitting(self, rough: _Rough, family: Ints, known: Ints) -> tuple[Ints, NDArray[np.float64], Ints]:
        """Numbers of the points that are the first of their family to fit, and their memory: of so many
        families that there are enough of them with those that are known. Then numbers of those that would fit
        by what they need at least, and do not."""
        found, sizes, missing, ask = list[int](), list[float](), self.keep - len(known), SURE
        nearly = list[int]()
        left = np.flatnonzero(self.relaxing.within(rough.least) & ~np.isin(family, known))
        while len(left) and len(found) < missing:
            some = left[:ask]
            needs = self._exact(rough, some)
            memory, fit = needs.total, self._fits(needs)
            nearly += some[~fit].tolist()
            fits = np.flatnonzero(fit)
            first, _ = distinct([family[some[fits]]])
            new = np.sort(fits[first])
            found, sizes = [*found, *some[new].tolist()], [*sizes, *memory[new].tolist()]
            left, ask = left[ask:], 2 * ask
            left = left[~np.isin(family[left], family[some[new]])]
        return np.array(found, dtype=np.int64), np.array(sizes), np.array(nearly, dtype=np.int64)

    @property
    def relaxing(self) -> Relaxing:
        """The same search with conditions relaxed, where it finds nothing."""
        return Relaxing(self.asked, self.needs, self.limit)

    def _fits(self, needs: Needs) -> NDArray[np.bool_]:
        fits = needs.fits()
        for one in self.asked.constraints:
            if one.quantity == "memory":
                fits &= one.holds(needs.total)
        return fits


@dataclass(frozen=True)
class _Rough:
    """Points, and the memory that they need at least."""

    points: Points
    least: Needs


def _families(points: Points) -> list[Ints]:
    return [getattr(points, name) for name in FAMILY]


def first_of_family(points: Points) -> Ints:
    """Numbers of the points that are the first of their family, in order."""
    return np.sort(distinct(_families(points))[0])

"""The fastest strategies of a space that fit into memory, by closed-form time (levels 0 and 1 of
the planner).

Time is an expression over arrays; memory needs one trace per structure. So all strategies are
timed, and memory is computed for the fastest first, until enough fit: the result equals that of
computing all. A lower bound, the memory that micro-batches keep, is equal for all slices and mostly
decides. The full memory is traced only for strategies that fit by this bound and come first in
their family. ``map_with_fork`` splits work with a forked process if a core is free.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import InfeasiblePlan
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import Margin
from plait.core.model.precision import Precision
from plait.core.step.columns.points import RECOMPUTES, Degrees, Ints, StrategyTable, distinct
from plait.core.step.memory.closed_memory import MemoryColumns, device_overhead, step_memory, usable
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.explain.relax import InfeasibilityDiagnosis
from plait.plan.search.choices import LAST_RESORT
from plait.plan.search.fits import MEMORY_KINDS, by_kind
from plait.plan.search.needs import Needs
from plait.plan.search.space import MOST, Cell, SearchRequest, enumerate_around, enumerate_space

T = TypeVar("T")
R = TypeVar("R")


def can_fork() -> bool:
    """Return True if this process may fork: a core is free, and no other thread can hold a lock
    that the fork needs."""
    alone = threading.active_count() == 1 and multiprocessing.parent_process() is None
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


def map_with_fork(work: Callable[[T], R], pieces: Sequence[T]) -> list[R]:
    """Return ``work`` of every piece, computed by this process and a forked one. Both take the next
    piece when they finish one, so the longest pieces should come first.

    A fork starts with all data of this process; a new process would import for most of a second,
    about as long as its half takes. Results do not depend on the fork: if it is killed or raises,
    this process does its pieces.
    """
    if len(pieces) < 2 or not can_fork():
        return [work(piece) for piece in pieces]
    try:
        context = multiprocessing.get_context("fork")
        taken, (ours, theirs) = context.Value("q", 0), context.Pipe(duplex=False)
        copy = context.Process(target=_hand_back, args=(work, pieces, taken, theirs), daemon=True)
        copy.start()
    except OSError:  # no resources for another process
        return [work(piece) for piece in pieces]
    theirs.close()
    try:
        found = _take(work, pieces, taken)
        with suppress(EOFError):
            found |= ours.recv()
    finally:
        copy.kill()
        copy.join()
    return [found[at] if at in found else work(piece) for at, piece in enumerate(pieces)]


def _take(work: Callable[[T], R], pieces: Sequence[T], taken: Any) -> dict[int, R]:
    """Return the results, by number, of the pieces that the other process does not take."""
    found = dict[int, R]()
    while True:
        with taken:
            at: int = taken.value
            taken.value = at + 1
        if at >= len(pieces):
            return found
        found[at] = work(pieces[at])


def _hand_back(work: Callable[[T], R], pieces: Sequence[T], taken: Any, answer: Any) -> None:
    """Run the forked process. An error ends it silently: the parent repeats the work and raises the
    error there."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    with suppress(Exception):
        answer.send(_take(work, pieces, taken))


FIRST, BLOCK = 1 << 10, 1 << 15
"""FIRST, BLOCK: number of strategies whose memory is computed at once, fastest first. It starts at
FIRST, since often these are enough, and grows by a factor of 8 up to BLOCK. It does not start
lower: memory is traced once for all strategies of a block."""
FIRST_TRACED = 1 << 5
"""Number of strategies whose memory is computed at first, in place of ``FIRST``, for models in
which every kind of strategy needs a memory trace of its own."""
SURE = 1 << 5
"""Number of strategies whose full memory is computed first: the fastest that fit by the lower
bound. It doubles each time."""
SHARED = 1 << 17
"""Number of strategies that one process times at once: with fewer, more shared results would be
computed twice."""
FAMILY = ("pp", "dp", "cp", "ring", "tp", "ep", "sequence_parallel", "micro", "schedule", "virtual", "recompute")
"""Columns of ``StrategyTable`` that a user would call different strategies; other columns are
tuning. Strategies equal in these columns are a family, which its fastest member represents."""
AROUND_DIVISORS = (2, 8)
"""Divisors of the space's size ``most``. They give the number of strategies searched around the
best arrangements of ranks: first around the best of the space, then around the best of that search.
"""


@dataclass(frozen=True)
class Ranked:
    """The fastest strategies that fit, fastest first, one of each family (``FAMILY``). points,
    seconds, memory: the strategies, their closed-form seconds of a step and bytes of the fullest
    device. space: all strategies that were searched; closed_form_seconds: the closed form's seconds
    for each."""

    points: StrategyTable
    seconds: NDArray[np.float64]
    memory: NDArray[np.float64]
    space: StrategyTable
    closed_form_seconds: NDArray[np.float64]


def search(
    request: SearchRequest, cluster: Cluster, precision: Precision, *, keep: int = 64, most: int = MOST
) -> Ranked:
    """Return the ``keep`` fastest strategies that fit, one of each family (``FAMILY``).

    most: largest number of strategies in the space. If the space had to be made coarser, the
    surroundings of its best arrangements of ranks are searched in full, twice. If nothing fits, the
    recomputation ``LAST_RESORT`` is tried. Raises JobError for a space without a strategy. Raises
    InfeasiblePlan with tested advice if nothing fits."""
    space = enumerate_space(request, most=most)
    if not len(space):
        raise _Search(request, cluster, precision, keep).relaxing.no_strategy_error()
    try:
        first, short = _Search(request, cluster, precision, keep).run(space)
    except InfeasiblePlan:
        last = _last_resort(request)
        if last is None or not _Search(last, cluster, precision, keep).may_fit(enumerate_space(last, most=most)):
            raise
        with contextlib.suppress(InfeasiblePlan):
            return search(last, cluster, precision, keep=keep, most=most)
        raise
    found = [first]
    for part in AROUND_DIVISORS:
        best = _joined(found, keep).points
        more, short = _Search(request, cluster, precision, keep).run(_around(request, best, short, most // part))
        found.append(more)
    return _joined(found, keep)


def _joined(rankings: Sequence[Ranked], keep: int) -> Ranked:
    """Return one ranking of several spaces, with the ``keep`` fastest strategies of different
    families."""
    points = StrategyTable.joined([each.points for each in rankings])
    seconds, memory = (np.concatenate([getattr(each, name) for each in rankings]) for name in ("seconds", "memory"))
    order = np.argsort(seconds, kind="stable")
    order = order[first_of_family(points.take(order))][:keep]
    space, said = (
        StrategyTable.joined([each.space for each in rankings]),
        np.concatenate([each.closed_form_seconds for each in rankings]),
    )
    return Ranked(points.take(order), seconds[order], memory[order], space, said)


def _last_resort(request: SearchRequest) -> SearchRequest | None:
    """Return the request with the recomputation that keeps least; None if the job file or the
    framework fixes recomputation."""
    kind = RECOMPUTES.index(LAST_RESORT)
    said = "recompute" in request.fixed or "recompute" in request.has or not request.allows("recompute", kind)
    return None if said else replace(request, has={**request.has, "recompute": [kind]})


def _around(request: SearchRequest, best: StrategyTable, short: StrategyTable, most: int) -> StrategyTable:
    """Return the strategies near the best of every arrangement of ranks, at most ``most`` and half
    as many near ``short``. short: strategies that lack memory, which a choice left out so far may
    save."""
    bases = [(_of_each_cell(best), most), (_of_each_cell(short), most // 2)]
    return StrategyTable.joined([enumerate_around(request, some, most=room) for some, room in bases if len(some)])


def _of_each_cell(points: StrategyTable) -> StrategyTable:
    """Return the first strategy of every arrangement of ranks."""
    return points.take(np.sort(distinct([getattr(points, one.name) for one in fields(Cell)])[0]))


@dataclass(frozen=True)
class _Search:
    request: SearchRequest
    cluster: Cluster
    precision: Precision
    keep: int

    @property
    def limit(self) -> float:
        """Bytes of a device that a plan may fill."""
        return usable(self.cluster.device, self.cluster.overhead)

    @property
    def walked(self) -> bool:
        """True if every kind of strategy of the model needs a memory trace of its own, so that no
        lower bound is cheaper."""
        return self.request.model.levels > 0

    def may_fit(self, space: StrategyTable) -> bool:
        """Return True if the memory lower bound of at least one strategy fits."""
        return len(space) > 0 and bool(self.relaxing.within(self._rough(space, space.degrees()[0]).least).any())

    def run(self, space: StrategyTable) -> tuple[Ranked, StrategyTable]:
        """Return (ranking of a space; strategies that fit by the memory lower bound but not in
        full). Raises InfeasiblePlan if nothing fits."""
        seconds = self._seconds(space)
        order, rough = np.argsort(seconds, kind="stable"), list[_Rough]()
        found, memory = np.zeros(0, dtype=np.int64), np.zeros(0)  # indices of strategies, the first of their families
        nearly = np.zeros(0, dtype=np.int64)
        start, size, among = 0, FIRST_TRACED if self.walked else FIRST, space.degrees()[0]
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
            fitting = self.relaxing.within(smallest)[0]  # but a constraint on memory is violated
            needs = self._exact(everything, np.arange(len(order))) if fitting else smallest
            raise self.relaxing.too_large_error(everything.points, at, needs, self._by_kind(everything.points, at))
        best = found[: self.keep]
        return Ranked(space.take(best), seconds[best], memory[: self.keep], space, seconds), space.take(nearly)

    def _seconds(self, space: StrategyTable) -> NDArray[np.float64]:
        """Return the closed-form seconds of every strategy of a space; in a large space a forked
        process times half."""
        asked, count = self.request, len(space)
        size = -(-count // (2 * -(-count // (2 * SHARED)))) if count > SHARED else count
        pieces = [space.take(slice(at, at + size)) for at in range(0, count, size)]

        def timed(points: StrategyTable) -> NDArray[np.float64]:
            return total_seconds(
                asked.model, points, self.cluster, sequence=asked.sequence, precision=self.precision,
                options=asked.options,
            )  # fmt: skip

        return np.concatenate(map_with_fork(timed, pieces))

    def _by_kind(self, points: StrategyTable, at: int) -> str:
        """Return the bytes on the device of the strategy at index ``at``, by kind, as text."""
        found = self._columns(points.take(slice(at, at + 1)))
        return by_kind({kind: int(getattr(found, kind)[0]) for kind in MEMORY_KINDS if np.isfinite(found.allocated[0])})

    def needs(self, points: StrategyTable) -> Needs:
        """Return the bytes on the fullest device of each strategy, with the request's margin."""
        return Needs.of(self._columns(points), self.request.margin, self.cluster)

    def _columns(self, points: StrategyTable, among: Sequence[Degrees] | None = None) -> MemoryColumns:
        asked = self.request
        return step_memory(
            asked.model, points, sequence=asked.sequence, precision=self.precision,
            options=asked.options, overhead=self.cluster.overhead, among=among,
        )  # fmt: skip

    def _rough(self, points: StrategyTable, among: Sequence[Degrees]) -> _Rough:
        """Return the memory lower bound of strategies; for a ``walked`` model the full memory.
        among: the degrees of the space."""
        found, margin = self._columns(points, among), self.request.margin
        if self.walked:
            return _Rough(points, Needs.of(found, margin, self.cluster))
        least = device_overhead(self.cluster.overhead, points, np.zeros(len(points)))
        return _Rough(points, Needs.with_overhead(found, least, margin, self.cluster))

    def _exact(self, rough: _Rough, which: Ints) -> Needs:
        """Return the full memory of the strategies at indices ``which``."""
        return rough.least.take(which) if self.walked else self.needs(rough.points.take(which))

    def _smallest(self, rough: _Rough) -> tuple[int, Needs]:
        """Return (index of the strategy that needs least memory, its memory); the fastest one among
        equals."""
        least = rough.least.all
        order, best, ask = np.argsort(least, kind="stable"), (np.inf, 0), SURE
        while len(order) and least[order[0]] <= best[0]:
            some, order, ask = order[:ask], order[ask:], 2 * ask
            best = min(best, *zip(self._exact(rough, some).all.tolist(), some.tolist(), strict=True))
        return int(best[1]), self._exact(rough, np.array([best[1]], dtype=np.int64))

    def _first_fitting(self, rough: _Rough, family: Ints, known: Ints) -> tuple[Ints, NDArray[np.float64], Ints]:
        """Return three arrays: indices of the first strategy of each family that fits; their bytes;
        indices of strategies that fit by their lower bound but not in full. family: each strategy's
        family, ``known``: families found before.

        The search stops once the new and the known families are enough."""
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
    def relaxing(self) -> InfeasibilityDiagnosis:
        """The same request with relaxed conditions, for advice if the search finds nothing."""
        return InfeasibilityDiagnosis(self.request, self.needs, self.limit)

    def _fits(self, needs: Needs) -> NDArray[np.bool_]:
        fits = needs.fits()
        for one in self.request.constraints:
            if one.quantity == "memory":
                fits &= one.holds(needs.total)
        return fits


@dataclass(frozen=True)
class _Rough:
    """Strategies with their memory lower bound."""

    points: StrategyTable
    least: Needs


def _families(points: StrategyTable) -> list[Ints]:
    return [getattr(points, name) for name in FAMILY]


def first_of_family(points: StrategyTable) -> Ints:
    """Return the indices of strategies that are the first of their family (``FAMILY``) in the
    table, in order."""
    return np.sort(distinct(_families(points))[0])


# ---- plans with the most free memory ----

LONGER = 1.05
"""Largest step time of the safest plan, relative to the fastest, as in docs/job.md."""
SURELY = 0.999
"""Probability of fitting that counts as certain."""
ROOMIEST = 6
"""Number of strategies most certain to fit that are predicted in full."""


def safest(
    request: SearchRequest, cluster: Cluster, precision: Precision, *, seconds: float, keep: int, most: int
) -> StrategyTable:
    """Return strategies that take at most ``seconds`` in closed form: first those certain to fit
    (``SURELY``), fastest first, then the others by their bytes, smallest first. At most ``keep``,
    one of each family. most: largest number of strategies in the space."""
    space = enumerate_space(request, most=most)
    taken = total_seconds(
        request.model, space, cluster, sequence=request.sequence, precision=precision, options=request.options
    )
    near = np.flatnonzero(taken <= seconds)
    points, taken = space.take(near), taken[near]
    found = step_memory(
        request.model, points, sequence=request.sequence, precision=precision, options=request.options,
        overhead=cluster.overhead,
    )  # fmt: skip
    needs = Needs.of(found, request.margin, cluster)
    held = needs.fits()
    for one in request.constraints:
        if one.quantity == "memory":
            held &= one.holds(needs.total)
    sure = Needs.of(found, Margin(confidence=SURELY), cluster).fits()
    order = np.lexsort((np.where(sure, taken, needs.all), ~sure))
    points = points.take(order[held[order]])
    return points.take(first_of_family(points)[:keep])

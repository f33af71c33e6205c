"""The strategy space of a job on a number of ranks, enumerated as arrays (InternEvo, arXiv
2401.09149, generalised).

A *cell* fixes the arrangement of ranks (pp, dp, cp with its rings, tp, ep) and whether the residual
stream is sequence-parallel; ``Strategy.check`` decides whether it is valid, as at run time. Within
a cell everything else is a product. A space of more than ``most`` strategies is made coarser, step
by step (``Coarseness``), starting with the choices that cost least to leave out. ``search.search``
then searches the best cells in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import JobError
from plait.core.job.constraint import NO_MARGIN, Constraint, Margin
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import WORDS, StrategyTable
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.plan.search.choices import CellChoices, Choice, divisors_of

MOST = 250_000
"""Largest number of strategies in a space, unless the job file sets another."""
DEEPEST = 64
"""Largest number of pp ranks, and of stages per pp rank, that is tried if the job file fixes
none."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """Search request: the fixed and open settings of a job.

    ranks: of the job. domain: neighbouring ranks within the innermost links, inside which tensor
    parallelism is tried. fixed: allowed values from the job file, by column of ``StrategyTable``.
    shard: a named sharding from the job file. margin: memory that must stay free. options: how
    ranks compute.

    Properties of the framework that runs the job: has, the allowed values of columns; can, a
    function that returns True for strategies it supports; ends, the number of stages that embedding
    and head may have to themselves."""

    model: ModelSpec
    ranks: int
    domain: int
    global_batch: int
    sequence: int
    fixed: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    shard: str | None = None
    options: MemoryOptions = PLAIT
    constraints: Sequence[Constraint] = ()
    has: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    can: Callable[[StrategyTable], NDArray[np.bool_]] | None = None
    ends: int = 0
    margin: Margin = NO_MARGIN
    shared: int = 0
    """Sequences that replicas and micro-batches must divide, if fewer than the whole batch since
    the batch ramps up; 0: the whole batch."""

    @property
    def divisible_batch(self) -> int:
        """Sequences that replicas and micro-batches must divide."""
        return self.shared or self.global_batch

    def allows(self, name: str, value: int) -> bool:
        """Return True if neither the job file, nor a constraint on this column alone, nor the
        framework excludes a column's value. name: column of ``StrategyTable``."""
        if any(name in some and value not in some[name] for some in (self.fixed, self.has)):
            return False
        quantity = QUANTITIES.get(name, name)
        return all(one.holds(value) for one in self.constraints if one.quantity == quantity)

    def values_to_try(self, name: str, values: Sequence[int]) -> list[int]:
        """Return the allowed values of a column to try. Values fixed by the job file replace
        ``values``."""
        return [value for value in self.fixed.get(name, self.has.get(name, values)) if self.allows(name, value)]


@dataclass(frozen=True)
class Coarseness:
    """Choices that a large space leaves out. level: 0 leaves out none; every level leaves out those
    of lower levels and one kind more."""

    level: int = 0

    parts = property(lambda self: self.level < 1, doc="Whether to recompute some of a stage's layers.")
    all_rings = property(lambda self: self.level < 2, doc="Whether to try every size of a ring.")
    short = property(
        lambda self: self.level < 3, doc="Whether to try many degrees of cp with short sequences per rank."
    )
    odd = property(lambda self: self.level < 4, doc="Whether to try micro-batches that are no power of two, nor all "
                   "that a replica has of a step.")  # fmt: skip
    factors = property(lambda self: self.level < 5, doc="Whether to try all shard factors.")
    slices = property(lambda self: self.level < 6, doc="Whether to try eight slices, and columns.")
    both_streams = property(lambda self: self.level < 7, doc="Whether to try tp without sequence parallelism.")
    deep = property(lambda self: self.level < 8, doc="Whether to try all numbers of virtual stages.")
    between = property(lambda self: self.level < 9, doc="Whether to try shard factors between both ends.")


COARSEST, SPARSE = 8, 9
SHORT, SHORTER, SHORTEST = 2048, 1024, 512
"""Tokens of a rank with context parallelism. A coarse space has few strategies below SHORT and none
below SHORTER; no space has any below SHORTEST."""
QUANTITIES = {
    "micro": "micro_batch_size", "num_micro": "num_micro_batches", "virtual": "virtual_stages", "p1": "batch_slices",
    "p2": "column_slices",
}  # fmt: skip
"""Names of quantities in constraints, by column of ``StrategyTable``, for columns with another
name."""
COLUMNS = {quantity: column for column, quantity in QUANTITIES.items()}


def column_of(constraint: Constraint) -> str:
    """Return the column of ``StrategyTable`` that a constraint refers to."""
    return COLUMNS.get(constraint.quantity, constraint.quantity)


def spelled(name: str, value: int) -> str:
    """Return the value of a column, or of a constraint's quantity, as spelled in a job file."""
    if name in ("sequence_parallel", "graphs"):
        return "true" if value else "false"
    return WORDS[name][value] if name in WORDS else f"{value}"


@dataclass(frozen=True)
class Cell:
    """One arrangement of the ranks."""

    pp: int
    dp: int
    cp: int
    ring: int
    tp: int
    sequence_parallel: int
    ep: int

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights."""
        return self.dp * self.cp


def enumerate_space(request: SearchRequest, *, most: int = MOST) -> StrategyTable:
    """Return every valid strategy, whether it fits into memory or not. A space of more than
    ``most`` strategies is made coarser."""
    known = CellChoices(request)
    cells, choices = list[Cell](), list[dict[tuple[str, ...], list[Choice]]]()
    for level in range(COARSEST + 1):
        here = list(cells_of(request, Coarseness(level)))
        found = [known.choices(cell, coarseness_of(request, cell, level)) for cell in here]
        total = sum(map(_count, found))
        if level and not total:  # every strategy that the job file allows would be left out
            break
        cells, choices = here, found
        if total <= most:
            break
    return _some(request, points_of(request, cells, choices))


def coarseness_of(request: SearchRequest, cell: Cell, level: int) -> Coarseness:
    """Return which choices are left out for an arrangement of ranks in a space of a coarseness
    level; more for arrangements with short sequences per rank. No arrangement is left out, since
    its surroundings may contain the best strategy."""
    coarse, short = Coarseness(level), cell.cp > 1 and request.sequence // cell.cp < SHORT
    return Coarseness(SPARSE) if short and not coarse.short else coarse


def enumerate_around(request: SearchRequest, points: StrategyTable, *, most: int = MOST) -> StrategyTable:
    """Return the strategies near each of ``points``. All combinations of two of three kinds of
    choices (micro-batches with slices, stages, sharding factors) are tried, with and without
    sequence parallelism. Points are taken in order until the result exceeds ``most``. It can
    contain duplicates."""
    known, found, size = CellChoices(request), list[tuple[Cell, Mapping[tuple[str, ...], Sequence[Choice]]]](), 0
    for row in map(points.row, range(len(points))):
        cell = Cell(*(row[one.name] for one in fields(Cell)))
        full = known.choices(cell, Coarseness())
        several = [names for names, each in full.items() if len(each) > 1]
        stays: list[dict[tuple[str, ...], list[Choice]]] = (
            [{names: [tuple(row[name] for name in names)]} for names in several] if len(several) > 2 else [{}]
        )
        around = [(one, full | own) for one in (cell, other_stream(request, cell)) if one for own in stays]
        size += sum(_count(each) for _, each in around)
        if found and size > most:
            break
        found += around
    return _some(request, points_of(request, *zip(*found, strict=True)))


def _count(choices: Mapping[tuple[str, ...], Sequence[Choice]]) -> int:
    return math.prod(map(len, choices.values()))


def _some(request: SearchRequest, points: StrategyTable) -> StrategyTable:
    """Return the strategies of ``points`` that the framework supports and that meet all constraints
    decided without a prediction."""
    columns = {QUANTITIES.get(name, name): column for name, column in points.columns().items()}
    columns["ulysses"] = points.cp // points.ring
    telling = [one for one in request.constraints if one.quantity in columns]
    held = np.ones(len(points), dtype=bool) if request.can is None else request.can(points)
    for one in telling:
        held &= one.holds(columns[one.quantity])
    return points.take(held) if telling or request.can else points


def any_point(request: SearchRequest) -> bool:
    """Return True if the space has any strategy, whether it fits into memory or not."""
    return next(arrangements(request), None) is not None


def cells_of(request: SearchRequest, coarse: Coarseness) -> Iterator[Cell]:
    """Yield the valid arrangements of the ranks."""
    model, ranks = request.model, request.ranks
    valid = cache(partial(_valid, request))
    for pp, tp in product(
        request.values_to_try("pp", divisors_of(ranks)), request.values_to_try("tp", divisors_of(ranks))
    ):
        if ranks % (pp * tp) or pp > model.num_layers or (tp > request.domain and "tp" not in request.fixed):
            continue
        if pp > DEEPEST and "pp" not in request.fixed:
            continue
        for cp in request.values_to_try("cp", divisors_of(ranks // (pp * tp))):
            least = SHORTEST if coarse.short else SHORTER
            if ranks % (pp * tp * cp) or (cp > 1 and "cp" not in request.fixed and request.sequence // cp < least):
                continue
            dp = ranks // (pp * tp * cp)
            if request.divisible_batch % dp or not request.allows("dp", dp):
                continue
            whole = bool(request.options.experts_whole)
            flats = (0, 1) if (coarse.both_streams and not whole) or tp == 1 else (1,)
            streams = request.values_to_try("sequence_parallel", flats)
            for ring, flat, ep in product(
                _rings(request, cp, tp, coarse), streams, _shares(request, dp * cp * (tp if whole else 1))
            ):
                ulysses_held = all(one.holds(cp // ring) for one in request.constraints if one.quantity == "ulysses")
                if cp % ring == 0 and ulysses_held and valid(tp, cp, ring, flat):
                    yield Cell(pp, dp, cp, ring, tp, flat, ep)


def _shares(request: SearchRequest, replicas: int) -> list[int]:
    """Return the expert-parallel degrees to try."""
    count = math.gcd(request.model.experts.count, replicas) if request.model.experts else 1
    return [ep for ep in request.values_to_try("ep", divisors_of(count)) if count % ep == 0]


def _rings(request: SearchRequest, cp: int, tp: int, coarse: Coarseness) -> list[int]:
    """Return the ring degrees to try: exchange of heads works best within the innermost links."""
    tried = divisors_of(cp)
    if not coarse.all_rings:
        inside = max(d for d in tried if d <= max(1, request.domain // tp))
        tried = tuple(sorted({1, cp // inside, cp}))
    return request.values_to_try("ring", tried)


def _valid(request: SearchRequest, tp: int, cp: int, ring: int, sequence_parallel: int) -> bool:
    if sequence_parallel and tp == 1:
        return False
    strategy = Strategy(tp=tp, cp=cp, ring=ring, sequence_parallel=bool(sequence_parallel))
    try:
        strategy.check(request.model, batch=1, sequence=request.sequence)
    except JobError:
        return False
    return True


def other_stream(request: SearchRequest, cell: Cell) -> Cell | None:
    """Return the same cell with sequence parallelism switched; None if that is not allowed."""
    flat = 1 - cell.sequence_parallel
    allowed = request.allows("sequence_parallel", flat) and cell.tp > 1
    return (
        replace(cell, sequence_parallel=flat)
        if allowed and _valid(request, cell.tp, cell.cp, cell.ring, flat)
        else None
    )


def points_of(
    request: SearchRequest, cells: Sequence[Cell], choices: Sequence[Mapping[tuple[str, ...], Sequence[Choice]]]
) -> StrategyTable:
    """Return the strategies of all cells: for each cell, the product of its choices. choices: for
    each cell, the values of columns by tuple of columns."""
    total = sum(map(_count, choices))
    columns = {one.name: np.empty(total, dtype=np.int64) for one in fields(StrategyTable)}
    start = 0
    for cell, each in zip(cells, choices, strict=True):
        here = slice(start, start := start + _count(each))
        sizes = tuple(map(len, each.values()))
        for axis, (names, values) in enumerate(each.items()):
            along = [1] * axis + [len(values)] + [1] * (len(sizes) - axis - 1)
            for at, name in enumerate(names):
                columns[name][here].reshape(sizes)[:] = np.array([value[at] for value in values]).reshape(along)
        for name in (one.name for one in fields(Cell)):
            columns[name][here] = getattr(cell, name)
    return StrategyTable(**columns)


def arrangements(request: SearchRequest) -> Iterator[dict[str, set[int]]]:
    """Yield, for every arrangement of ranks with at least one strategy, the set of values of each
    column."""
    known = CellChoices(request)
    for cell in cells_of(request, Coarseness()):
        choices = known.choices(cell, Coarseness())
        if _count(choices):
            values = {name: {getattr(cell, name)} for name in (one.name for one in fields(Cell))}
            for names, tuples in choices.items():
                values |= {name: {one[at] for one in tuples} for at, name in enumerate(names)}
            values["ulysses"] = {cell.cp // cell.ring}
            telling = [(one, column_of(one)) for one in request.constraints if column_of(one) in values]
            if all(any(one.holds(value) for value in values[name]) for one, name in telling):
                yield values

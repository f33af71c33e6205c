"""The strategy space of a job on a number of ranks, enumerated as columns (InternEvo, arXiv 2401.09149,
generalised).

A *cell* fixes how ranks are arranged (pp, dp, cp with its rings, tp, ep) and whether the residual stream is
sequence-parallel; whether it is valid is asked of ``Strategy.check``, as the runtime does. Within a cell
everything else is a product. Where there would be more than ``most`` points the space is made coarser, step
by step (``Coarseness``), from what costs least to leave out; ``plait.plan.search`` then looks at the best
cells in full.
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
from plait.core.step.columns.points import Points
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.plan.choices import CellChoices, Choice, divisors_of

MOST = 250_000
"""Points of a space, unless a job says otherwise."""
DEEPEST = 64
"""Places of a pipeline, and stages a rank, that are tried unasked are at most so many."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What a job leaves open, and for what. ranks: of the job. domain: neighbouring ranks of the innermost
    links, within which tensor parallelism is tried. fixed: what the job says, by column of ``Points``: a
    value, or several. shard: a named sharding that the job asks for. margin: memory that is to stay free.
    options: how ranks compute.

    Of the framework that is to run it, has: values of columns; can: which points; ends: stages that embedding
    and head may have to themselves.
    """

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
    can: Callable[[Points], NDArray[np.bool_]] | None = None
    ends: int = 0
    margin: Margin = NO_MARGIN
    shared: int = 0
    """What replicas and micro-batches share out evenly, where that is not the whole batch: it ramps up."""

    @property
    def evenly(self) -> int:
        """What replicas and micro-batches divide."""
        return self.shared or self.global_batch

    def allows(self, name: str, value: int) -> bool:
        """Whether a value of a column is excluded neither by the job, nor by a constraint on it alone, nor by
        the framework."""
        if any(name in some and value not in some[name] for some in (self.fixed, self.has)):
            return False
        quantity = QUANTITIES.get(name, name)
        return all(one.holds(value) for one in self.constraints if one.quantity == quantity)

    def among(self, name: str, values: Sequence[int]) -> list[int]:
        """Values of a column to try: those the job fixes even where nobody would try them."""
        return [value for value in self.fixed.get(name, self.has.get(name, values)) if self.allows(name, value)]


@dataclass(frozen=True)
class Coarseness:
    """What is left out at a level: everything that an earlier level leaves out, too."""

    level: int = 0

    parts = property(lambda self: self.level < 1, doc="Whether to recompute some of a stage's layers.")
    all_rings = property(lambda self: self.level < 2, doc="Whether to try every size of a ring.")
    short = property(lambda self: self.level < 3, doc="Whether to try more than a few of short sequences.")
    odd = property(lambda self: self.level < 4, doc="Whether to try micro-batches that are no power of two, nor all "
                   "that a replica has of a step.")  # fmt: skip
    factors = property(lambda self: self.level < 5, doc="Whether to try all shard factors.")
    slices = property(lambda self: self.level < 6, doc="Whether to try eight slices, and columns.")
    both_streams = property(lambda self: self.level < 7, doc="Whether to try tp without sequence parallelism.")
    deep = property(lambda self: self.level < 8, doc="Whether to try all numbers of virtual stages.")
    between = property(lambda self: self.level < 9, doc="Whether to try shard factors between both ends.")


COARSEST, SPARSE = 8, 9
SHORT, SHORTER, SHORTEST = 2048, 1024, 512
"""Tokens of a rank whose sequence is cut: below the first a coarse space has few strategies, below the second
none; below the last no space has any."""
QUANTITIES = {
    "micro": "micro_batch_size", "num_micro": "num_micro_batches", "virtual": "virtual_stages", "p1": "batch_slices",
    "p2": "column_slices",
}  # fmt: skip
"""Columns whose constraints have another name."""
COLUMNS = {quantity: column for column, quantity in QUANTITIES.items()}


def column_of(one: Constraint) -> str:
    """The column that a constraint is about."""
    return COLUMNS.get(one.quantity, one.quantity)


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
        """Ranks that hold the same weights."""
        return self.dp * self.cp


def enumerate_space(asked: SearchRequest, *, most: int = MOST) -> Points:
    """Every point that is valid, memory aside."""
    known = CellChoices(asked)
    cells, choices = list[Cell](), list[dict[tuple[str, ...], list[Choice]]]()
    for level in range(COARSEST + 1):
        here = list(cells_of(asked, Coarseness(level)))
        found = [known.choices(cell, coarseness_of(asked, cell, level)) for cell in here]
        total = sum(map(_count, found))
        if level and not total:  # all that the job asks for would be left out
            break
        cells, choices = here, found
        if total <= most:
            break
    return _some(asked, points_of(asked, cells, choices))


def coarseness_of(asked: SearchRequest, cell: Cell, level: int) -> Coarseness:
    """Of an arrangement, in a space of a level: none is left out, since what is around it may be the best."""
    coarse, short = Coarseness(level), cell.cp > 1 and asked.sequence // cell.cp < SHORT
    return Coarseness(SPARSE) if short and not coarse.short else coarse


def enumerate_around(asked: SearchRequest, points: Points, *, most: int = MOST) -> Points:
    """What differs from each point in two kinds of choices (micro-batches and slices, stages, shard factors),
    both in full, with sequence parallelism and without: of all points, or, from the last on, of as many as
    have ``most`` together. Some are there twice."""
    known, found, size = CellChoices(asked), list[tuple[Cell, Mapping[tuple[str, ...], Sequence[Choice]]]](), 0
    for row in map(points.row, range(len(points))):
        cell = Cell(*(row[one.name] for one in fields(Cell)))
        full = known.choices(cell, Coarseness())
        several = [names for names, each in full.items() if len(each) > 1]
        stays = [{names: [tuple(row[name] for name in names)]} for names in several] if len(several) > 2 else [{}]
        around = [(one, full | own) for one in (cell, other_stream(asked, cell)) if one for own in stays]
        size += sum(_count(each) for _, each in around)
        if found and size > most:
            break
        found += around
    return _some(asked, points_of(asked, *zip(*found, strict=True)))


def _count(choices: Mapping[tuple[str, ...], Sequence[Choice]]) -> int:
    return math.prod(map(len, choices.values()))


def _some(asked: SearchRequest, points: Points) -> Points:
    """Those that the framework has and that meet the constraints that can be told without a prediction."""
    columns = {QUANTITIES.get(name, name): column for name, column in points.columns().items()}
    columns["ulysses"] = points.cp // points.ring
    telling = [one for one in asked.constraints if one.quantity in columns]
    held = np.ones(len(points), dtype=bool) if asked.can is None else asked.can(points)
    for one in telling:
        held &= one.holds(columns[one.quantity])
    return points.take(held) if telling or asked.can else points


def any_point(asked: SearchRequest) -> bool:
    """Whether there is a strategy at all."""
    return next(arrangements(asked), None) is not None


def cells_of(asked: SearchRequest, coarse: Coarseness) -> Iterator[Cell]:
    """Valid arrangements of the ranks."""
    model, ranks = asked.model, asked.ranks
    valid = cache(partial(_valid, asked))
    for pp, tp in product(asked.among("pp", divisors_of(ranks)), asked.among("tp", divisors_of(ranks))):
        if ranks % (pp * tp) or pp > model.num_layers or (tp > asked.domain and "tp" not in asked.fixed):
            continue
        if pp > DEEPEST and "pp" not in asked.fixed:
            continue
        for cp in asked.among("cp", divisors_of(ranks // (pp * tp))):
            least = SHORTEST if coarse.short else SHORTER
            if ranks % (pp * tp * cp) or (cp > 1 and "cp" not in asked.fixed and asked.sequence // cp < least):
                continue
            dp = ranks // (pp * tp * cp)
            if asked.evenly % dp or not asked.allows("dp", dp):
                continue
            whole = bool(asked.options.experts_whole)
            flats = (0, 1) if (coarse.both_streams and not whole) or tp == 1 else (1,)
            streams = asked.among("sequence_parallel", flats)
            for ring, flat, ep in product(
                _rings(asked, cp, tp, coarse), streams, _shares(asked, dp * cp * (tp if whole else 1))
            ):
                ulysses_held = all(one.holds(cp // ring) for one in asked.constraints if one.quantity == "ulysses")
                if cp % ring == 0 and ulysses_held and valid(tp, cp, ring, flat):
                    yield Cell(pp, dp, cp, ring, tp, flat, ep)


def _shares(asked: SearchRequest, replicas: int) -> list[int]:
    """Ranks that share out experts."""
    count = math.gcd(asked.model.experts.count, replicas) if asked.model.experts else 1
    return [ep for ep in asked.among("ep", divisors_of(count)) if count % ep == 0]


def _rings(asked: SearchRequest, cp: int, tp: int, coarse: Coarseness) -> list[int]:
    """Ranks of a ring: heads are exchanged best within the innermost links."""
    tried = divisors_of(cp)
    if not coarse.all_rings:
        inside = max(d for d in tried if d <= max(1, asked.domain // tp))
        tried = tuple(sorted({1, cp // inside, cp}))
    return asked.among("ring", tried)


def _valid(asked: SearchRequest, tp: int, cp: int, ring: int, sequence_parallel: int) -> bool:
    if sequence_parallel and tp == 1:
        return False
    strategy = Strategy(tp=tp, cp=cp, ring=ring, sequence_parallel=bool(sequence_parallel))
    try:
        strategy.check(asked.model, batch=1, sequence=asked.sequence)
    except JobError:
        return False
    return True


def other_stream(asked: SearchRequest, cell: Cell) -> Cell | None:
    """The same ranks with sequence parallelism, or without; None where that is not allowed."""
    flat = 1 - cell.sequence_parallel
    allowed = asked.allows("sequence_parallel", flat) and cell.tp > 1
    return (
        replace(cell, sequence_parallel=flat) if allowed and _valid(asked, cell.tp, cell.cp, cell.ring, flat) else None
    )


def points_of(
    asked: SearchRequest, cells: Sequence[Cell], choices: Sequence[Mapping[tuple[str, ...], Sequence[Choice]]]
) -> Points:
    """The products of cells, one after the other."""
    total = sum(map(_count, choices))
    columns = {one.name: np.empty(total, dtype=np.int64) for one in fields(Points)}
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
    return Points(**columns)


def arrangements(asked: SearchRequest) -> Iterator[dict[str, set[int]]]:
    """Of every arrangement of ranks with any point, the values of its columns."""
    known = CellChoices(asked)
    for cell in cells_of(asked, Coarseness()):
        choices = known.choices(cell, Coarseness())
        if _count(choices):
            values = {name: {getattr(cell, name)} for name in (one.name for one in fields(Cell))}
            for names, tuples in choices.items():
                values |= {name: {one[at] for one in tuples} for at, name in enumerate(names)}
            values["ulysses"] = {cell.cp // cell.ring}
            telling = [(one, column_of(one)) for one in asked.constraints if column_of(one) in values]
            if all(any(one.holds(value) for value in values[name]) for one, name in telling):
                yield values

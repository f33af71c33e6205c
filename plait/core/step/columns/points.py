"""Candidates of the strategy space, as arrays: the input of levels 0 and 1 of the planner.

A candidate is one strategy for one job. All quantities that depend on it are expressions over
arrays (numpy), so that a million candidates take seconds. The fields match those of a ``Strategy``,
a ``Layout``, a ``Sharding`` and a schedule; ``plait.plan.search.search`` turns the best candidates
into these objects.

The planner's properties of a schedule (``ScheduleProperties``) are found by running a short
pipeline of it. So a generator of ``core.step.schedules`` is searched without being named anywhere
else, and so is a schedule in a file. A file's pipeline has its own length. For a generator, the pp
ranks of a short pipeline represent those of a long one: the first two and the last two, or all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import ScheduleError
from plait.core.parallel import strategy
from plait.core.step.schedule import Op, Schedule
from plait.core.step.schedules import GENERATORS, Shape, find_schedule, own_chunks, planned_shape, takes_chunks

SCHEDULES = tuple(GENERATORS)
NAMES = list(SCHEDULES)
"""Schedule names; their indices are the numbers in arrays. Searched schedule files are appended."""
SHORT_PP, MOST_ROUNDS = 6, 6
"""Pp ranks of the short pipeline, and its maximum rounds; a round has as many micro-batches as pp
ranks."""
LEAST = 8
"""Minimum number of micro-batches of the short pipelines that are run to find a schedule's
properties."""
HELD_RATIOS = (0.0, 0.5, 1.0, 1.25)
"""Ratios for which a schedule's fullest pp rank is determined: activation bytes held between the
two parts of a split backward, relative to the bytes held before it."""
_FILES: dict[str, Schedule] = {}


def number_of(name: str) -> int:
    """Return the number of a schedule, or of a schedule file. Raises ScheduleError for a file that
    does not train equally many stages on every pp rank."""
    if name not in NAMES:
        schedule, _ = find_schedule(name, Shape(ranks=1, micro_batches=1))
        counts = {len(schedule.stages_of(rank)) for rank in range(len(schedule.ranks))}
        if schedule.whole or not schedule.trains or len(counts) != 1:
            raise ScheduleError(
                f"{name}: the planner searches only training schedules with equally many stages on every rank"
            )
        _FILES[name] = schedule
        NAMES.append(name)
    return NAMES.index(name)


def written(name: str) -> Schedule | None:
    """Return the schedule of a searched schedule file; None if ``name`` is no such file."""
    return _FILES.get(name)


def pp_rank_ops(name: str, shape: Shape, pp_rank: int) -> list[Op]:
    """Return the computations of one pp rank."""
    if name in _FILES:
        return [op for op in _FILES[name].ranks[pp_rank] if op.computes and op.micro_batch < shape.micro_batches]
    return next(iter(GENERATORS[name].lists(shape, (pp_rank,))))


@dataclass(frozen=True)
class ScheduleProperties:
    """Properties of a schedule. chunks: stages per pp rank, 0 for any number. splits: True if its
    backward has two parts. turns: True if the first pp rank holds the last stage. apart: forwards
    before its first backward that a pp rank runs more than the next one. collects: True if a pp
    rank runs all forwards before its first backward. rounds: memory is full from rounds x pp
    micro-batches on; 0: no such number is known. uneven: True if that holds only when the
    micro-batches are a multiple of pp. fullest: which of the first, second, last but one and last
    pp rank can need the most memory; inner: True if the others can, too. plain: True if stage s is
    on pp rank s modulo pp."""

    chunks: int
    splits: bool
    turns: bool
    apart: int
    collects: bool
    rounds: int
    uneven: bool
    fullest: tuple[bool, bool, bool, bool]
    inner: bool
    plain: bool

    @property
    def circles(self) -> bool:
        """True if micro-batches pass through all pp ranks more than once."""
        return self.chunks != 1 and not self.turns

    def enough(self, pp: int, num_micro: int) -> int:
        """Return a number of micro-batches that fills a pp rank's memory as much as ``num_micro``
        do."""
        if not self.rounds or (self.uneven and num_micro % pp):
            return num_micro
        return min(num_micro, max(self.rounds, -(-LEAST // pp)) * pp)

    def fullest_pp_ranks(self, pp: int) -> list[int]:
        """Return the indices of the pp ranks that can need the most memory in a pipeline of ``pp``
        ranks."""
        if self.inner:
            return list(range(pp))
        ends = (0, min(1, pp - 1), max(0, pp - 2), pp - 1)
        return sorted({pp_rank for pp_rank, holds in zip(ends, self.fullest, strict=True) if holds})


@cache
def schedule_properties(name: str) -> ScheduleProperties:
    """Return the properties of a schedule."""
    file = _FILES.get(name)
    pp = len(file.ranks) if file else SHORT_PP
    chunks = file.num_stages // pp if file else 0 if takes_chunks(name) else own_chunks(name)
    some = chunks or 2

    def lists(count: int) -> list[list[Op]]:
        shape = planned_shape(name, pp, count, some)
        return [pp_rank_ops(name, shape, pp_rank) for pp_rank in range(pp)]

    longest = file.num_micro_batches if file else MOST_ROUNDS * pp + 1

    @cache
    def most(count: int) -> NDArray[np.float64]:
        return np.array([_most(ops) for ops in lists(min(count, longest))])

    rounds = next((k for k in range(2, MOST_ROUNDS) if np.array_equal(most(k * pp), most((k + 1) * pp))), 0)
    whole = lists(min(longest, MOST_ROUNDS * pp))
    held = [{op.stage for op in ops} for ops in whole]
    ahead = [next((at for at, op in enumerate(ops) if not op.forward), len(ops)) for ops in whole]
    collects = ahead[0] == min(longest, MOST_ROUNDS * pp) * some
    each = most((rounds or 2) * pp)
    between, ends = each[1 : pp - 1], each[[min(1, pp - 1), max(0, pp - 2)]]
    return ScheduleProperties(
        chunks=chunks,
        splits=any(op.kind == "I" for ops in whole for op in ops),
        turns=pp > 1 and pp * some - 1 in held[0],
        apart=0 if collects or pp == 1 else ahead[0] - ahead[1],
        collects=collects,
        rounds=0 if file else rounds,
        uneven=rounds > 0 and not np.array_equal(most(rounds * pp), most(rounds * pp + 1)),
        fullest=(True, True, bool((ends[1] > ends[0]).any()), True),
        inner=bool((between > ends.max(axis=0)).any()),
        plain=all(stages == set(range(pp_rank, pp * some, pp)) for pp_rank, stages in enumerate(held)),
    )  # fmt: skip


def _most(ops: Sequence[Op]) -> NDArray[np.float64]:
    """Return the maximum activation memory of a pp rank, relative to one stage's, for several
    distributions of sizes over its stages and for each ratio in ``HELD_RATIOS``."""
    order = {stage: at for at, stage in enumerate(sorted({op.stage for op in ops}))}
    now, found = [0] * (2 * len(order)), list[list[int]]()
    for op in ops:
        at, work = order[op.stage], op.work
        now[at] += work.forward
        found.append(now.copy())
        now[at] -= work.input_gradient
        now[at + len(order)] += work.input_gradient - work.weight_gradient
        found.append(now.copy())
    rising = np.linspace(0.5, 1, len(order))
    stages = np.stack([np.ones(len(order)), rising, rising[::-1]])
    kept, held = (part @ stages.T for part in np.split(np.array(found), 2, axis=1))
    return np.concatenate([(kept + share * held).max(axis=0) for share in HELD_RATIOS])


@cache
def stages_of(name: str, pp: int, virtual: int, pp_rank: int) -> tuple[int, ...]:
    """Return the stages of a pp rank, ascending."""
    if schedule_properties(name).plain:
        return tuple(range(pp_rank, num_stages(name, pp, virtual), pp))
    ops = pp_rank_ops(name, planned_shape(name, pp, 1, virtual), pp_rank)
    return tuple(sorted({op.stage for op in ops}))


def num_stages(name: str, pp: int, virtual: int) -> int:
    """Return the number of stages of a schedule; ``virtual`` stages per pp rank if it accepts any
    number."""
    return pp * (schedule_properties(name).chunks or virtual)


def column(fact: str, schedules: NDArray[np.int64] | Any) -> NDArray[Any]:
    """Return one field of ``ScheduleProperties`` for every candidate's schedule, as an array.
    schedules: their numbers."""
    return _table(fact, len(NAMES))[schedules]


@cache
def _table(fact: str, count: int) -> NDArray[Any]:
    return np.array([getattr(schedule_properties(name), fact) for name in NAMES[:count]])


WORDS: Mapping[str, Sequence[str]] = {"schedule": NAMES, **strategy.WORDS}
"""Settings of a strategy that are words, with their values."""
RECOMPUTES = WORDS["recompute"]
OVERLAPS = WORDS["overlap"]
SHARD_OVERLAPS = WORDS["shard_overlap"]

Ints = NDArray[np.int64]
Degrees = tuple[int, int, int, int]
"""(tp, cp, ring, sequences of a micro-batch): the values that determine tensor sizes, apart from
which tensors exist."""


@dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """Candidates as arrays of equal length.

    pp, dp, cp, tp: degrees; ring: ranks of a ring within cp (cp / ring ranks exchange heads). ep:
    expert-parallel degree, over neighbours of dp x cp; 1 for dense models. micro: sequences of a
    micro-batch of one replica. num_micro: micro-batches of a step. virtual: stages per pp rank.
    schedule, recompute, overlap, shard_overlap: indices into the tuples above. recompute_layers:
    recomputed layers of every stage;
    -1 for all. params, grads, optim, secondary: sharding factors over dp x cp. graphs: whether CUDA
    graphs are captured (0 or 1).
    """

    pp: Ints
    dp: Ints
    cp: Ints
    ring: Ints
    tp: Ints
    ep: Ints
    micro: Ints
    num_micro: Ints
    schedule: Ints
    virtual: Ints
    recompute: Ints
    recompute_layers: Ints
    sequence_parallel: Ints
    params: Ints
    grads: Ints
    optim: Ints
    secondary: Ints
    overlap: Ints
    shard_overlap: Ints
    p1: Ints
    p2: Ints
    graphs: Ints

    def __len__(self) -> int:
        return len(self.pp)

    def degrees(self) -> tuple[list[Degrees], Ints]:
        """Return the distinct ``Degrees``, and each candidate's index among them."""
        columns = self.tp, self.cp, self.ring, self.micro
        first, each = distinct(columns)
        return cast("list[Degrees]", list(zip(*(column[first].tolist() for column in columns), strict=True))), each

    @property
    def replicas(self) -> Ints:
        """Ranks that hold the same weights."""
        return self.dp * self.cp

    @property
    def ranks(self) -> Ints:
        """Ranks of the whole job."""
        return self.pp * self.dp * self.cp * self.tp

    def take(self, which: NDArray[Any] | slice) -> StrategyTable:
        """Return a subset: by a mask or by indices."""
        return StrategyTable(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def columns(self) -> dict[str, Ints]:
        """Return the arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def joined(parts: Sequence[StrategyTable]) -> StrategyTable:
        """Return the concatenation of ``parts``."""
        names = [field.name for field in fields(StrategyTable)]
        return StrategyTable(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def row(self, at: int) -> dict[str, int]:
        """Return the values of candidate number ``at``, by column name."""
        return {field.name: int(getattr(self, field.name)[at]) for field in fields(self)}

    @staticmethod
    def of(rows: Sequence[Mapping[str, int]]) -> StrategyTable:
        """Return candidates from rows; a missing field is 1, or its value in ``DEFAULTS``."""
        columns = {
            field.name: [row.get(field.name, DEFAULTS.get(field.name, 1)) for row in rows]
            for field in fields(StrategyTable)
        }
        return StrategyTable(**{name: np.array(values, dtype=np.int64) for name, values in columns.items()})


DEFAULTS = {
    "schedule": SCHEDULES.index("1f1b"),
    "recompute": 0,
    "recompute_layers": -1,
    "sequence_parallel": 0,
    "secondary": 0,
    "overlap": OVERLAPS.index("domino"),
    "shard_overlap": SHARD_OVERLAPS.index("both"),
    "graphs": 0,
}
JOB_DEFAULTS = {
    "graphs": 0, "dp": 1, "recompute": 0, "recompute_layers": -1, "pp": 1,
    "schedule": SCHEDULES.index("eager-1f1b"), "virtual": 1, "cp": 1, "ring": 1, "tp": 1,
    "sequence_parallel": 0, "ep": 1,
    "overlap": OVERLAPS.index("domino"), "shard_overlap": SHARD_OVERLAPS.index("both"),
}  # fmt: skip
"""Values that a job with a ``[strategy]`` table fixes without naming them, in the order in which
they are relaxed."""


_ROOM = 8
"""Maximum size of the table with which ``distinct`` counts, as a multiple of the number of rows.
Counting is several times as fast as sorting."""
_LEAST = 1 << 12
"""Entries that the table of ``distinct`` may have however few the rows are."""


def distinct(columns: Sequence[NDArray[Any]]) -> tuple[Ints, Ints]:
    """Return (index of the first row of every kind, kind of every row); rows that agree in all
    columns are one kind.

    >>> distinct([np.array([7, 7, 5]), np.array([1, 1, 1])])
    (array([2, 0]), array([1, 1, 0]))
    """
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        numbers, count = _numbered(column)
        if count < 2:
            continue
        if size * count > _table_size(code):
            code, size = _numbered(code)
        code, size = code * count + numbers, size * count
    kind, count = _numbered(code)
    first = np.empty(count, np.int64)
    first[kind[::-1]] = np.arange(len(kind) - 1, -1, -1)  # of several rows of a kind the last write remains
    return first, kind


def groups(kind: Ints) -> Iterator[Ints]:
    """Yield the indices of the rows of every kind, kind by kind. kind: each row's kind."""
    order = np.argsort(kind, kind="stable")
    yield from np.split(order, np.cumsum(np.bincount(kind))[:-1]) if len(kind) else ()


def _table_size(values: Ints) -> int:
    """Return how many entries a counting table for these values may have."""
    return max(_LEAST, _ROOM * len(values))


def _numbered(column: NDArray[Any]) -> tuple[Ints, int]:
    """Return numbers from 0 for the distinct values of an array, and how many there are."""
    values = column.astype(np.int64, copy=False)
    if not len(values):
        return values, 0
    low, high = int(values.min()), int(values.max())
    if low == high:
        return values - low, 1
    if high - low < _table_size(values):
        there = np.zeros(high - low + 1, np.int64)
        there[values - low] = 1
        return (np.cumsum(there) - 1)[values - low], int(there.sum())
    found, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1), len(found)

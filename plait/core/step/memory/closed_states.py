"""Bytes that last from step to step, for many strategies at once: ``step.memory.states`` on columns.

A place's units are found as for one strategy (``unit_sizes``), without padding; few differ in size, so
factors of sharding are columns over these few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import master_size
from plait.core.model.spec import ModelSpec
from plait.core.parallel.optimizers import OptimizerName
from plait.core.parallel.sharding import WHOLE, Sharding, buffer_counts
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.memory_options import MatrixBytes, MemoryOptions
from plait.core.step.memory.states import WORKSPACE, position_tables
from plait.core.step.segments import LAYERS
from plait.core.step.stages import Stage
from plait.core.step.traffic import replicated_numbers
from plait.core.step.unit_traffic import unit_sizes

Column = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = ("parameters", "gradients", "optimizer", "buffers", "ends")
"""Kinds of bytes that ``place_states`` gives. ends: buffers of the sums at the end of a step, which reuse the
memory of its activations."""
EXPERTS = "experts"
"""Kind of the units that are one layer's routed experts."""


@dataclass(frozen=True)
class Factors:
    """Columns: of sharding."""

    params: Ints
    grads: Ints
    optim: Ints
    secondary: Ints


FACTORS = tuple(each.name for each in fields(Factors))


@dataclass(frozen=True)
class HeldStates:
    """What a place holds. units: how many there are by kind and numbers. copies: numbers that tensor-parallel
    ranks hold alike; tied: numbers of tied embeddings that the first and the last stage both hold. tables:
    bytes of tables of positions. rounds: how many stages it holds. experts: it is a place's routed experts,
    and what is fixed is counted with the rest."""

    units: Mapping[tuple[str, int], int]
    copies: int = 0
    tied: int = 0
    tables: int = 0
    rounds: int = 1
    experts: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((frozenset(self.units.items()), self.copies, self.tied, self.tables, self.rounds, self.experts))

    @cached_property
    def matrices(self) -> Mapping[tuple[str, int], int]:
        """Of the units, those of layers' matrices."""
        return {one: count for one, count in self.units.items() if one[0] in (*LAYERS, EXPERTS)}


@cache
def held_by(
    model: ModelSpec, strategy: Strategy, stages: tuple[Stage, ...], *, sequence: int, itemsize: int,
    ends_shared: bool = False,
) -> HeldStates:  # fmt: skip
    """What a place with these stages holds. ends_shared: of embedding and head as much as every other
    stage."""
    num_stages = stages[0].num_stages
    shared = ends_shared and num_stages > 1
    if shared:  # stages as they are between two others
        stages = tuple(Stage(1, 3, stage.first_layer, stage.num_layers) for stage in stages)
    units: dict[tuple[str, int], int] = {}
    for stage in stages:
        units |= unit_sizes(model, strategy, stage, Sharding())
    ends = any(stage.embeds or stage.heads for stage in stages)
    sizes = Counter((unit[0], numel) for unit, numel in units.items())
    if shared:
        words = -(-model.vocab // (strategy.tp * num_stages)) * model.hidden
        for kind in ("embedding",) if model.tied_embeddings else ("embedding", "head"):
            sizes[kind, words] += len(stages)
    return HeldStates(
        sizes,
        sum(replicated_numbers(model, strategy, stage) for stage in stages) if strategy.tp > 1 else 0,
        -(-model.vocab // strategy.tp) * model.hidden if model.tied_embeddings and num_stages > 1 and ends else 0,
        len(stages) * position_tables(model, strategy, sequence=sequence, itemsize=itemsize),
        len(stages),
    )


class StateTables:
    """``place_states`` of one model, remembered: for every place a table over all factors that were asked of
    any place, which takes hardly longer than those of one."""

    def __init__(self, itemsize: int, options: MemoryOptions) -> None:
        self.itemsize, self.options = itemsize, options
        self._numbers: dict[tuple[int, ...], int] = {}
        self._tables: dict[HeldStates, Column] = {}

    @staticmethod
    @cache
    def of(_model: ModelSpec, itemsize: int, options: MemoryOptions) -> StateTables:
        """Those of a model."""
        return StateTables(itemsize, options)

    def numbered(self, factors: Factors) -> Ints:
        """Each point's column in the tables."""
        known, rows = self._numbers, zip(*(getattr(factors, name).tolist() for name in FACTORS), strict=True)
        return np.array([known.setdefault(row, len(known)) for row in rows], dtype=np.int64)

    def states(self, place: HeldStates, which: Ints) -> Column:
        """[KINDS, points], of columns."""
        table = self._tables.get(place)
        done = 0 if table is None else table.shape[1]
        if table is None or which.max(initial=0) >= done:
            rows = np.array(list(self._numbers)[done:], dtype=np.int64)
            more = place_states(place, Factors(*rows.T), itemsize=self.itemsize, options=self.options)
            table = self._tables[place] = more if table is None else np.concatenate([table, more], axis=1)
        return table[:, which]


def place_states(place: HeldStates, factors: Factors, *, itemsize: int, options: MemoryOptions) -> Column:
    """[KINDS, points]."""
    master = master_size(itemsize)
    moment = master if options.moment_bytes is None else options.moment_bytes
    reduced = master if options.reduced_bytes is None else options.reduced_bytes
    each = (
        itemsize if options.parameter_bytes is None else options.parameter_bytes,
        master if options.main_gradient_bytes is None else options.main_gradient_bytes,
        2 * moment + master * (master != itemsize) if options.optimizer_bytes is None else options.optimizer_bytes,
        itemsize if options.gathered_bytes is None else options.gathered_bytes,
    )
    params, grads, optim, second = factors.params, factors.grads, factors.optim, factors.secondary
    step, copy = optim * np.maximum(1, second), np.maximum(1, second)
    found = np.zeros((len(KINDS), len(params)))
    for (kind, numel), count in place.units.items():
        whole = kind in WHOLE
        padded = -(-numel // step) * step
        p, g = (1, 1) if whole else (params, grads)
        stays = (p == 1) & (optim > 1) & options.gathers_stay
        kept = np.where(stays, padded // optim * each[0] + padded * each[3], padded // p * each[0])
        found[0] += count * (kept + (0 if whole else padded // copy * (second > 0) * each[0]))
        own = (g == 1) & (optim > 1) & options.rounds_reduce
        found[1] += count * np.where(own, padded // optim + padded / place.rounds, padded // g) * each[1]
        found[2] += count * (padded // optim * each[2])
    found[2] -= _fewer(place, factors, options.optimizer) * moment
    if options.matrices is not None:
        masters = options.gathers_stay  # shards of parameters are masters, which no format makes smaller
        found += _quantised(place.matrices, factors, options.matrices, kept=each[0], gathered=each[3], masters=masters)
    for numel, count in _buffers(place.units).items():
        found[3] += count * (-(-numel // step) * step) * ((params > 1) * each[3] + (grads > 1) * each[1])
    found[3] += place.tables
    if not options.gpu:
        found[3] += _reductions(place.units, factors) * reduced
    if options.reduced_bytes is not None:
        found[3] += _roundings(place.units, factors) * reduced
    found[3] += 0 if place.experts else options.fixed_bytes + WORKSPACE * options.gpu
    if not options.sums_in_place:
        tied = np.minimum(-(-place.tied // step) * step // optim, place.tied)  # what an optimizer has of it
        found[4] = np.maximum(-(-place.copies // optim) * master * 2, tied * master)
    owned = sum(count * numel for (_, numel), count in place.units.items()) / optim
    found[4] = np.maximum(found[4], owned * options.update_bytes)
    return found


def _buffers(units: Mapping[tuple[str, int], int]) -> Counter[int]:
    """How many buffers there are of each size."""
    return buffer_counts(one for one, count in units.items() if one[0] not in WHOLE for _ in range(count))


def _fewer(place: HeldStates, factors: Factors, optimizer: OptimizerName) -> Column:
    """Numbers that an optimizer keeps fewer of than AdamW."""
    step, found = factors.optim * np.maximum(1, factors.secondary), np.zeros(len(factors.optim))
    fewer: Mapping[OptimizerName, Mapping[tuple[str, int], int]] = {"muon": place.matrices, "sgd": place.units}
    for (_, numel), count in fewer.get(optimizer, {}).items():
        found += count * (-(-numel // step) * step // factors.optim)
    return found


def _quantised(
    matrices: Mapping[tuple[str, int], int], factors: Factors, own: MatrixBytes, *, kept: float, gathered: float,
    masters: bool,
) -> Column:  # fmt: skip
    """[KINDS, points] that layers' matrices take more than other parameters, of whose numbers ``kept`` bytes
    are kept, and ``gathered``; fewer are negative. masters: what is kept are masters, and of parameters that
    stay gathered what is gathered has the format."""
    params, second = factors.params, factors.secondary
    step, copy = factors.optim * np.maximum(1, second), np.maximum(1, second)
    found = np.zeros((len(KINDS), len(params)))
    for (_, numel), count in matrices.items():
        padded = -(-numel // step) * step
        if masters:
            found[0] += count * padded * ((params == 1) & (factors.optim > 1)) * (own.whole - gathered)
            continue
        each = np.where(params > 1, own.share, own.whole) - kept
        found[0] += count * (padded // params * each + padded // copy * (second > 0) * (own.share - kept))
    for numel, count in _buffers(matrices).items():
        found[3] += count * (-(-numel // step) * step) * (params > 1) * (own.gathered - gathered)
    return found


def _roundings(units: Mapping[tuple[str, int], int], factors: Factors) -> Column:
    """Numbers of what gradients are rounded in, and their sums come in: as ``rounding_buffers``, of ranks
    that all share the optimizer's states."""
    params, grads, optim = factors.params, factors.grads, factors.optim
    step, given, come = optim * np.maximum(1, factors.secondary), np.zeros(len(params)), np.zeros(len(params))
    for kind, numel in units:
        padded = -(-numel // step) * step
        reduces = np.full(len(params), kind in WHOLE) | (grads > 1)
        levels = [(padded, params * reduces), (padded // params, grads // params * reduces)]
        for size, ranks in (*levels, (padded // grads, optim // grads)):
            given = np.maximum(given, np.where(ranks > 1, size, 0))
            come = np.maximum(come, np.where(ranks > 1, size // np.maximum(1, ranks), 0))
        given = np.maximum(given, padded // optim)
    return given + come


def _reductions(units: Mapping[tuple[str, int], int], factors: Factors) -> Column:
    """Numbers of what gloo's reduce-scatters keep: as ``reduction_buffers``."""
    params, grads, optim = factors.params, factors.grads, factors.optim
    step = optim * np.maximum(1, factors.secondary)
    levels: Sequence[tuple[Ints | int, Ints]] = ((1, params), (params, grads // params), (grads, optim // grads))
    sizes = sorted({numel for _, numel in units})
    found = np.zeros(len(params))
    for inner, ranks in levels:
        before = np.zeros(len(params), np.int64)
        for numel in sizes:
            size = -(-numel // step) * step // inner
            found += np.where((ranks > 1) & (size != before), size, 0)  # one for every size
            before = size
    return found

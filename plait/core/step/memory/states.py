"""Bytes of a rank that last from the first step to the last: parameters, gradients, optimizer
states, buffers of sharded data parallelism. For one strategy or for many at once.

A pp rank's units are computed without padding. Few differ in size, so sharding factors are arrays
over these few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import master_size
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import EXPERTS, WHOLE, Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.shapes import LooseModel, Shapes
from plait.core.step.memory.memory_options import MatrixBytes, MemoryOptions
from plait.core.step.seconds.shard_traffic import expert_factor
from plait.core.step.segments import LAYERS
from plait.core.step.stages import Stage
from plait.core.step.traffic import Unit, replicated_numbers, unit_sizes

Column = NDArray[np.float64]
Ints = NDArray[np.int64]

STATE_KINDS = ("parameters", "gradients", "optimizer", "buffers", "ends")
"""Kinds of bytes that ``pp_rank_states`` returns. ends: buffers of the reductions at a step's end,
which reuse the memory of the step's activations."""
WORKSPACE = 32 << 20
"""Bytes of a GPU's allocator that cuBLAS takes for each stream with matrix products, and separately
for a CUDA graph. Valid for Hopper and later, 8 MiB before (torch 2.11, getChosenWorkspaceSize in
ATen/cuda/CublasHandlePool.cpp)."""


@dataclass(frozen=True)
class Factors:
    """Sharding factors of many strategies, as arrays: over how many ranks parameters, gradients,
    optimizer states and secondary parameter copies are divided."""

    params: Ints
    grads: Ints
    optim: Ints
    secondary: Ints

    @property
    def copies(self) -> Ints:
        """Ranks that share a secondary copy of parameters; 1 if there is none."""
        return np.maximum(1, self.secondary)

    def padded(self, numbers: Any) -> Any:
        """Return ``numbers`` padded so that every factor divides it."""
        step = self.optim * self.copies
        return -(-numbers // step) * step

    @staticmethod
    def of(sharding: Sharding) -> Factors:
        """Return the arrays of one strategy."""
        return Factors(*(np.array([getattr(sharding, name)]) for name in FACTORS))


FACTORS = tuple(each.name for each in fields(Factors))


@dataclass(frozen=True)
class HeldStates:
    """Units and tables that a pp rank holds.

    units: number of units by kind and size. copies: numbers that tensor-parallel ranks replicate.
    tied: numbers of tied embeddings that the first and the last stage both hold. tables: bytes of
    rotary tables. rounds: number of stages. bare: only units count.
    """

    units: Mapping[tuple[str, int], int]
    copies: int = 0
    tied: int = 0
    tables: int = 0
    rounds: int = 1
    bare: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((frozenset(self.units.items()), self.copies, self.tied, self.tables, self.rounds, self.bare))


def unit_counts(units: Mapping[Unit, int]) -> Counter[tuple[str, int]]:
    """Return the number of units of each kind and size. units: numbers in each unit."""
    return Counter((kind, numel) for (kind, _), numel in units.items())


@cache
def held_by(
    model: ModelSpec, strategy: Strategy, stages: tuple[Stage, ...], *, sequence: int, itemsize: int,
    ends_shared: bool = False,
) -> HeldStates:  # fmt: skip
    """Return the units and tables that a pp rank with these stages holds. ends_shared: the pp rank
    holds an equal share of embedding and head, like every other."""
    num_stages = stages[0].num_stages
    shared = ends_shared and num_stages > 1
    if shared:  # inner stages, without the model's ends
        stages = tuple(Stage(1, 3, stage.first_layer, stage.num_layers) for stage in stages)
    units: dict[Unit, int] = {}
    for stage in stages:
        units |= unit_sizes(model, strategy, stage, Sharding())
    ends = any(stage.embeds or stage.heads for stage in stages)
    sizes = unit_counts(units)
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


@dataclass(frozen=True)
class States:
    """Bytes that last from step to step. buffers: of gathered parameters and of gradients not yet
    reduced."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int


def states_of_pp_rank(held: HeldStates, sharding: Sharding, *, itemsize: int, options: MemoryOptions) -> States:
    """Return the states of a pp rank under one strategy."""
    found = pp_rank_states(held, Factors.of(sharding), itemsize=itemsize, options=options)
    return States(*(int(kind) for kind in found[:4, 0]))


def position_tables(spec: ModelSpec, strategy: Strategy, *, sequence: int, itemsize: int) -> int:
    """Return the bytes of the cosines and sines of rotary positions, which all layers share. The
    table covers every position if a rank's positions are scattered (context parallelism)."""
    positions = spec.max_sequence if strategy.cp > 1 else sequence
    return 0 if spec.learned_positions else 2 * positions * spec.letters.D * itemsize


class StateTables:
    """Cache of ``pp_rank_states`` for one model: one table per pp rank, over all factors requested
    for any pp rank. It takes hardly longer to compute than a table over one pp rank's factors."""

    def __init__(self, itemsize: int, options: MemoryOptions) -> None:
        self.itemsize, self.options = itemsize, options
        self._numbers: dict[tuple[int, ...], int] = {}
        self._tables: dict[HeldStates, Column] = {}

    @staticmethod
    @cache
    def of(_model: ModelSpec, itemsize: int, options: MemoryOptions) -> StateTables:
        """Return the cache of a model."""
        return StateTables(itemsize, options)

    def numbered(self, factors: Factors) -> Ints:
        """Return each strategy's column in the tables."""
        known, rows = self._numbers, zip(*(getattr(factors, name).tolist() for name in FACTORS), strict=True)
        return np.array([known.setdefault(row, len(known)) for row in rows], dtype=np.int64)

    def states(self, held: HeldStates, which: Ints) -> Column:
        """Return [STATE_KINDS, points]: the columns ``which`` of a pp rank's table."""
        table = self._tables.get(held)
        done = 0 if table is None else table.shape[1]
        if table is None or which.max(initial=0) >= done:
            rows = np.array(list(self._numbers)[done:], dtype=np.int64)
            more = pp_rank_states(held, Factors(*rows.T), itemsize=self.itemsize, options=self.options)
            table = self._tables[held] = more if table is None else np.concatenate([table, more], axis=1)
        return table[:, which]


def pp_rank_states(held: HeldStates, factors: Factors, *, itemsize: int, options: MemoryOptions) -> Column:
    """Return the bytes of a pp rank, [STATE_KINDS, points]."""
    master, rows = master_size(itemsize), _Units.of(held.units, factors)
    moment = master if options.moment_bytes is None else options.moment_bytes
    each = (
        itemsize if options.parameter_bytes is None else options.parameter_bytes,
        master if options.main_gradient_bytes is None else options.main_gradient_bytes,
        2 * moment + master * (master != itemsize) if options.optimizer_bytes is None else options.optimizer_bytes,
        itemsize if options.gathered_bytes is None else options.gathered_bytes,
    )
    params, grads, optim, second = factors.params, factors.grads, factors.optim, factors.secondary
    numbers, whole, shares = rows.padded, rows.whole, rows.padded // optim
    p, g = np.where(whole, 1, params), np.where(whole, 1, grads)
    stays, own = ((one == 1) & (optim > 1) for one in (p, g))
    kept = np.where(stays & options.gathers_stay, shares * each[0] + numbers * each[3], numbers // p * each[0])
    kept = kept + ~whole * (numbers // factors.copies * (second > 0) * each[0])
    added = np.where(own & options.rounds_reduce, shares + numbers / held.rounds, numbers // g) * each[1]
    fewer = {"muon": rows.matrix, "sgd": True}.get(options.optimizer, False)  # moments than AdamW
    found = np.zeros((len(STATE_KINDS), len(params)))
    for at, one in enumerate((kept, added, shares * each[2] - fewer * shares * moment)):
        found[at] = (rows.times * one).sum(axis=0)
    found[3] = rows.buffers.sum(axis=0) * ((params > 1) * each[3] + (grads > 1) * each[1]) + held.tables
    if options.matrices is not None:
        found += _quantised(
            rows, factors, options.matrices, kept=each[0], gathered=each[3], masters=options.gathers_stay
        )
    if not options.gpu:
        found[3] += rows.reductions() * (master if options.reduced_bytes is None else options.reduced_bytes)
    if options.reduced_bytes is not None:
        found[3] += rows.roundings() * options.reduced_bytes
    found[3] += 0 if held.bare else options.fixed_bytes + WORKSPACE * options.gpu
    if not options.sums_in_place:
        tied = np.minimum(factors.padded(held.tied) // optim, held.tied)  # the optimizer's share
        found[4] = np.maximum(-(-held.copies // optim) * master * 2, tied * master)
    found[4] = np.maximum(found[4], (rows.times * rows.numel).sum() / optim * options.update_bytes)
    return found


def _quantised(
    rows: _Units, factors: Factors, own: MatrixBytes, *, kept: float, gathered: float, masters: bool
) -> Column:
    """Return [STATE_KINDS, points]: additional bytes of layers' matrices compared with other
    parameters; negative if they are smaller. kept, gathered: bytes of one number of other
    parameters. masters: what a rank keeps are master copies, which no format makes smaller; only
    parameters that stay gathered have the format."""
    params, numbers, found = factors.params, rows.padded, np.zeros((len(STATE_KINDS), len(factors.params)))
    more = np.where(params > 1, own.share, own.whole) - kept
    more = numbers // params * more + numbers // factors.copies * (factors.secondary > 0) * (own.share - kept)
    if masters:
        more = numbers * ((params == 1) & (factors.optim > 1)) * (own.whole - gathered)
    found[0] = (rows.times * rows.matrix * more).sum(axis=0)
    found[3] = (rows.buffers * rows.matrix).sum(axis=0) * (params > 1) * (own.gathered - gathered)
    return found


class _Units(NamedTuple):
    """Sharded units of a pp rank, grouped by kind and size; arrays are [units, 1] unless noted.
    numel: numbers in a unit. times: number of units. whole: only optimizer states are sharded.
    matrix: True for matrices of layers. padded: [units, points]."""

    numel: Ints
    times: Ints
    whole: NDArray[np.bool_]
    matrix: NDArray[np.bool_]
    padded: Ints
    factors: Factors

    @staticmethod
    def of(units: Mapping[tuple[str, int], int], factors: Factors) -> _Units:
        rows = [(numel, count, kind in WHOLE, kind in (*LAYERS, EXPERTS)) for (kind, numel), count in units.items()]
        numel, times, whole, matrix = np.array(rows, dtype=np.int64).reshape(-1, 4, 1).swapaxes(0, 1)
        return _Units(numel, times, whole > 0, matrix > 0, factors.padded(numel), factors)

    @property
    def buffers(self) -> Ints:
        """Numbers in the buffers of each kind and size (``parallel.sharding.buffer_counts``)."""
        return np.minimum(2, self.times) * ~self.whole * self.padded

    def _levels(self) -> list[tuple[Ints, Ints]]:
        """Return (numbers that are reduced, ranks) for each level of reduction."""
        params, grads, optim = self.factors.params, self.factors.grads, self.factors.optim
        return [(self.padded, params), (self.padded // params, grads // params), (self.padded // grads, optim // grads)]

    def roundings(self) -> Column:
        """Return the numbers in the buffers in which gradients are rounded and their sums received:
        the largest of each."""
        reduces, found = self.whole | (self.factors.grads > 1), np.zeros((2, len(self.factors.params)))
        for at, (size, ranks) in enumerate(self._levels()):
            sends = (ranks > 1) & (reduces | (at == 2))
            for one, numbers in zip(found, (size, size // np.maximum(1, ranks)), strict=True):
                one[:] = np.maximum(one, np.where(sends, numbers, 0).max(axis=0, initial=0))
        return np.maximum(found[0], (self.padded // self.factors.optim).max(axis=0, initial=0)) + found[1]

    def reductions(self) -> Column:
        """Return the numbers that gloo's reduce-scatters keep: one buffer for every size that a
        level reduces."""
        _, first = np.unique(self.numel, return_index=True)
        found = np.zeros(len(self.factors.params))
        for size, ranks in self._levels():
            each = size[first]
            new = np.diff(each, axis=0, prepend=0) != 0  # one buffer per size
            found += np.where(new & (ranks > 1), each, 0).sum(axis=0)
        return found


# ---- experts ----


@cache
def without_routed_experts(model: ModelSpec) -> ModelSpec:
    """Return a model without experts whose MLP has as many parameters as those every rank holds,
    routers included; a dense model as it is."""
    shapes = Shapes.of(model)
    return dense_model(model, shapes.whole_ffn + shapes.expert_share * shapes.experts / (2 + shapes.gated))


def dense_model(model: ModelSpec, width: float, changed: dict[str, Any] | None = None) -> ModelSpec:
    """Return the model without experts, with an MLP of ``width``. A dense model is returned as it
    is, unless ``changed`` changes fields."""
    changed = {name: value for name, value in (changed or {}).items() if getattr(model, name) != value}
    if model.experts is None and not changed:
        return model
    values: dict[str, Any] = {field.name: getattr(model, field.name) for field in fields(ModelSpec)}
    values |= {"experts": None, "ffn_hidden": round(width), **changed}
    return LooseModel(**values, gated_mlp=model.gated, trained_positions=model.learned_positions)


def held_experts(model: ModelSpec, stages: tuple[Stage, ...], *, tp: int, ep: int) -> HeldStates:
    """Return the routed experts of a pp rank with these stages: each layer's are one unit."""
    layers = sum(model.experts.at(layer) for stage in stages for layer in stage.layers) if model.experts else 0
    each = model.routed_parameters // (ep * tp)
    return HeldStates({(EXPERTS, each): layers} if layers else {}, bare=True)


def expert_factors(factors: Factors, ep: int, among: int = 1) -> Factors:
    """Return the sharding factors over the ranks that hold the same experts, given those over dp x
    cp. among: tensor-parallel ranks that hold different experts."""
    return Factors(*(expert_factor(getattr(factors, name), ep, among) for name in FACTORS))

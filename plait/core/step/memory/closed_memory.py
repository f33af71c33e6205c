"""Level 0 of the planner: the memory of every strategy in the space, on its fullest device.

This is the result of ``step.memory.estimate``, which traces the instruction lists of one strategy,
as arrays over a million strategies. They share their ingredients: states depend on how the model is
cut (``states``), bytes of activations on the segments' structure (``size_rows``), their number
alive on the schedule. Each is computed once per distinct combination of columns, by the code that
traces lists, and multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.efficiency import Overhead
from plait.core.cluster.hardware import Device
from plait.core.model.precision import ITEMSIZE, Precision, unquantised
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import (
    NAMES,
    RECOMPUTES,
    Degrees,
    StrategyTable,
    column,
    distinct,
    groups,
    num_stages,
    schedule_properties,
    stages_of,
)
from plait.core.step.columns.shapes import Shapes, model_of
from plait.core.step.memory.estimate import WalkedWork, traced_peaks
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.core.step.memory.pipeline_memory import STREAM, TYPES, Counts, Layers, Pipe, SizeRow, moments
from plait.core.step.memory.size_rows import size_rows
from plait.core.step.memory.states import (
    FACTORS,
    STATE_KINDS,
    Factors,
    StateTables,
    expert_factors,
    held_by,
    held_experts,
    without_routed_experts,
)
from plait.core.step.stages import crossing_bytes

Column = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK = 1 << 16
"""Number of strategies whose memory is computed at once."""


@dataclass(frozen=True, kw_only=True)
class MemoryColumns:
    """Predicted bytes on every strategy's fullest device, by kind.

    activations: the peak within a step. logits: the logits and their gradients among the
    activations, if that pp rank computes the loss. overhead: bytes on the device besides tensors;
    slack: more of it, held until memory runs short. pp_rank: the device's. doubted: standard
    deviation of what the framework's pipelines may keep in addition.
    """

    parameters: Column
    gradients: Column
    optimizer: Column
    buffers: Column
    activations: Column
    logits: Column
    overhead: Column
    slack: Column
    pp_rank: Ints
    doubted: Column

    @property
    def lasting(self) -> Column:
        """Bytes of tensors that last from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def moving(self) -> Column:
        """Bytes of tensors that are allocated and freed within a step."""
        return self.buffers + self.activations

    @property
    def allocated(self) -> Column:
        """Bytes of all tensors: the peak that an allocator reports."""
        return self.lasting + self.moving

    @property
    def total(self) -> Column:
        """Bytes of memory that the device must have: tensors and overhead."""
        return self.allocated + self.overhead

    @property
    def shown(self) -> Column:
        """Bytes that tools such as nvidia-smi show if the device has more memory than ``total``."""
        return self.total + self.slack


def usable(device: Device, overhead: Overhead) -> float:
    """Return the bytes of a device's memory that a plan may fill."""
    return device.memory.value * (1 - overhead.reserve.value)


def plait_on(device: Device) -> MemoryOptions:
    """Return the memory options of Plait's own runs on a device."""
    return replace(PLAIT, gpu=device.kind == "cuda")


def device_overhead(overhead: Overhead, points: StrategyTable, moving: Column) -> Column:
    """Return the bytes that a device holds besides tensors. moving: bytes of tensors allocated and
    freed within a step."""
    groups = overhead.communicator.value * communicators(points)
    return overhead.context.value + groups + overhead.stuck.value * moving


def spare_slack(overhead: Overhead, moving: Column) -> Column:
    """Return the additional bytes that the allocator holds until memory runs short."""
    return max(0.0, overhead.slack.value - overhead.stuck.value) * moving


def communicators(points: StrategyTable) -> Ints:
    """Return the number of process groups with buffers of their own that a rank belongs to."""
    several = (
        points.ranks > 1, points.tp > 1, points.pp > 1, points.cp > points.ring, points.ring > 1, points.params > 1,
        points.grads > points.params, points.optim > points.grads, points.replicas > points.optim,
        points.secondary > 1,
    )  # fmt: skip
    return np.stack(several).sum(axis=0, dtype=np.int64)


def step_memory(
    model: ModelSpec | Shapes,
    points: StrategyTable,
    *,
    sequence: int,
    precision: Precision = "bf16-mixed",
    options: MemoryOptions = PLAIT,
    overhead: Overhead | None = None,
    among: Sequence[Degrees] | None = None,
) -> MemoryColumns:
    """Return the memory of every strategy; infinite if there are more stages than layers. sequence:
    tokens.

    Strategies must be valid (``Strategy.check``, ``Sharding.check``). among: the degrees of the
    space that they are a part of. With ``among`` only what micro-batches keep is counted, not the
    working memory of ops, which takes a fraction of the time: a trace for one part serves all other
    parts.
    """
    model, overhead = model_of(model), overhead or Overhead()
    step = _StepMemory(model, points, sequence, precision, options, among)
    possible = step.num_stages <= options.most_stages(model.num_layers)
    if possible.all():
        return step.columns(overhead)
    found = replace(step, points=points.take(possible)).columns(overhead)
    return MemoryColumns(**{field.name: _spread(getattr(found, field.name), possible) for field in fields(found)})


def _spread(column: NDArray[Any], possible: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the column expanded to all strategies; strategies that are not possible get infinite
    bytes. possible: mask of all strategies."""
    found = np.full(len(possible), np.inf if column.dtype == np.float64 else 0, column.dtype)
    found[possible] = column
    return found


Alive = tuple[Ints, int, int, Column]
"""Peak activations of some strategies on one pp rank: (indices of the strategies, slot of the pp
rank among those that can be fullest, its index, peak bytes by strategy)."""


@dataclass(frozen=True)
class _StepMemory:
    model: ModelSpec
    points: StrategyTable
    sequence: int
    precision: Precision
    options: MemoryOptions
    among: Sequence[Degrees] | None

    def columns(self, overhead: Overhead) -> MemoryColumns:
        """Return the memory of each strategy's fullest pp rank."""
        points, count = self.points, len(self.points)
        states, state_of = self._states()
        most, pp_rank = np.full(count, -1.0), np.zeros(count, np.int64)
        activations, slot_of = np.zeros(count), np.zeros(count, np.int64)
        for part, slot, at, live_bytes in self._walked() if self.model.levels else self._multiplied():
            held = states[slot][:, state_of[part]]
            live_bytes = np.maximum(live_bytes, held[STATE_KINDS.index("ends")])
            total = held[: STATE_KINDS.index("ends")].sum(axis=0) + live_bytes
            more = total > most[part]
            better = part[more]
            most[better], pp_rank[better], slot_of[better] = total[more], at, slot
            activations[better] = live_bytes[more]
        lasting = states[slot_of, :, state_of]
        parameters, gradients, optimizer, buffers = (lasting[:, at] for at in range(len(STATE_KINDS) - 1))
        return MemoryColumns(
            parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=buffers,
            activations=activations, logits=self._logits(pp_rank),
            overhead=device_overhead(overhead, points, activations + buffers),
            slack=spare_slack(overhead, activations + buffers), pp_rank=pp_rank,
            doubted=np.where(points.pp > 1, self.options.pipeline_doubt * most, 0.0),
        )  # fmt: skip

    def _walked(self) -> Iterator[Alive]:
        """Yield the peak activations of a U-Transformer, from a memory trace of every pp rank."""
        short = replace(self.points, num_micro=filled(self.points))
        work = WalkedWork(self.sequence, unquantised(self.precision))
        for which, peaks in traced_peaks(self.model, short, work, gpu=self.options.gpu):
            for pp_rank, peak in enumerate(peaks):
                yield which, pp_rank, pp_rank, np.full(len(which), float(peak))

    def _multiplied(self) -> Iterator[Alive]:
        """Yield the peak activations as sizes times the number of each that is alive."""
        points, stream = self.points, self._stream
        sizes, size_of = size_rows(
            self.model, points, sequence=self.sequence, itemsize=self.itemsize, options=self.options,
            among=self.among,
        )  # fmt: skip
        for which, slots in self._moments():
            for part in (which[at : at + BLOCK] for at in range(0, len(which), BLOCK)):
                mine = self._elsewhere(sizes[size_of[part]], points.pp[part])
                for slot, (at, rows) in slots.items():
                    counts = rows[:, :STREAM]
                    kept = np.einsum("ps,ms->pm", mine, counts)  # a BLAS product would occupy all cores
                    live_bytes = (kept + stream[part, None] * rows[:, STREAM]).max(axis=1)
                    if self.options.more_alive:
                        layers = np.ceil(self.model.num_layers / self.num_stages[part])
                        live_bytes = live_bytes + self.options.more_alive * layers * SizeRow.of(mine).kept_layer[:, 0]
                    yield part, slot, at, live_bytes

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's compute precision."""
        return ITEMSIZE[self.precision]

    def _pp_ranks(self, name: str, pp: int) -> Sequence[int]:
        """Return the pp ranks that may need the most memory; the index in the result is the pp
        rank's slot."""
        ends = (0, min(1, pp - 1), max(0, pp - 2), pp - 1)
        return range(pp) if self.model.levels or schedule_properties(name).inner else ends

    def _elsewhere(self, sizes: Column, pp: Ints) -> Column:
        """Return the sizes [points, STREAM] with the part of embedding and head that all stages
        share (``ends_shared``), and without activations kept on the host. Activations of two layers
        are in transit to or from the host, and still count."""
        options, row = self.options, SizeRow.of(sizes)
        if options.ends_shared:
            middle, embeds, heads = (TYPES.index(name) for name in ("middle", "embeds", "heads"))
            for of in (
                row.kept,
                row.held,
                row.forward,
                row.backward,
                row.weight,
                row.plain_forward,
                row.plain_backward,
            ):
                share = of[:, middle] + np.maximum(0, of[:, embeds] + of[:, heads] - 2 * of[:, middle]) / pp
                of[:] = np.where((pp > 1)[:, None], share[:, None], of)
        if options.kept_on_host:
            moving = 2 * options.kept_on_host * np.maximum(row.kept_layer, row.plain_kept_layer)
            for of in (row.kept_layer, row.plain_kept_layer):
                of *= 1 - options.kept_on_host
            for of in (row.forward, row.backward, row.plain_forward, row.plain_backward):
                of += moving * (of > 0)
        return sizes

    @property
    def num_stages(self) -> Ints:
        chunks = column("chunks", self.points.schedule)
        return self.points.pp * np.where(chunks > 0, chunks, self.points.virtual)

    @property
    def _stream(self) -> Column:
        """Bytes of the activations that one micro-batch sends between stages, by strategy."""
        points = self.points
        cut = points.cp * np.where(points.sequence_parallel > 0, points.tp, 1)
        return crossing_bytes(self.sequence, points.micro, self.model.hidden, cut=cut, itemsize=self.itemsize).astype(
            np.float64
        )

    def _logits(self, pp_rank: Ints) -> Column:
        points, options = self.points, self.options
        last = pp_rank == np.where(column("turns", points.schedule), 0, points.pp - 1)
        vocab, each = -(-self.model.vocab // points.tp), options.logits(self.itemsize, points.tp)
        return last * (points.micro * (self.sequence // points.cp) * vocab * each).astype(np.float64)

    def _states(self) -> tuple[Column, Ints]:
        """Return (bytes that last from step to step, [slots, kinds, rows]; each strategy's index
        among the rows). Slots are pp ranks that may be fullest, kinds are those of
        ``STATE_KINDS``."""
        points, count = self.points, self.num_stages
        lies = np.where(column("plain", points.schedule), -1, points.schedule)  # by which stages lie on which pp ranks
        cut = [points.pp, points.tp, count, lies, points.sequence_parallel, points.cp > 1]
        cut.append(points.ep)
        first, row_of = distinct([*cut, points.params, points.grads, points.optim, points.secondary])
        some = points.take(first)
        inner = self.model.levels or column("inner", some.schedule).any()
        slots = max(4, int(some.pp.max(initial=1))) if inner else 4
        found = np.zeros((slots, len(STATE_KINDS), len(first)))
        _, cut_of = distinct([column[first] for column in cut])
        tables = StateTables.of(self.model, self.itemsize, self.options)
        for which in groups(cut_of):
            at = some.row(int(which[0]))
            pp, stages = at["pp"], self.options.stages(self.model.num_layers, int(count[first[which[0]]]))
            name = NAMES[at["schedule"]]
            strategy = Strategy(
                tp=at["tp"], sequence_parallel=bool(at["sequence_parallel"]), cp=2 if at["cp"] > 1 else 1
            )
            factors = Factors(*(getattr(some, name)[which] for name in FACTORS))
            among = at["tp"] if self.options.experts_whole else 1
            own = tables.numbered(expert_factors(factors, at["ep"], among)) if self.model.experts else None
            columns = tables.numbered(factors)
            for slot, pp_rank in enumerate(self._pp_ranks(name, pp)):
                mine = tuple(stages[each] for each in stages_of(name, pp, len(stages) // pp, pp_rank))
                held = held_by(
                    without_routed_experts(self.model), strategy, mine, sequence=self.sequence, itemsize=self.itemsize,
                    ends_shared=bool(self.options.ends_shared),
                )  # fmt: skip
                found[slot][:, which] = tables.states(held, columns)
                if own is not None:
                    routed = held_experts(self.model, mine, tp=at["tp"] // among, ep=at["ep"])
                    found[slot][:, which] += tables.states(routed, own)
        return found, row_of

    def _moments(self) -> Iterator[tuple[Ints, dict[int, tuple[int, Counts]]]]:
        """Yield strategies that share a pipeline, with (pp rank, counts of live sizes at each
        moment) by slot, the index among the pp ranks that may be fullest."""
        points = self.points
        limit = np.where((points.recompute == RECOMPUTES.index("none")), -1, points.recompute_layers)
        _, kind_of = distinct([points.schedule, points.pp, self.num_stages, filled(points), limit])
        kinds = [(which, self._pipes(points.row(int(which[0])), int(limit[which[0]]))) for which in groups(kind_of)]
        found = iter(moments([each for _, pipes in kinds for each in pipes.values()]))
        for which, pipes in kinds:
            yield which, {slot: (pipe.pp_rank, next(found)) for slot, (pipe, _) in pipes.items()}

    def _pipes(self, at: Mapping[str, int], again: int) -> dict[int, tuple[Pipe, Layers]]:
        """Return the pp ranks of a pipeline that can be the fullest, by slot. again: number of
        layers that each stage recomputes; negative: all layers have one size."""
        name, pp = NAMES[at["schedule"]], at["pp"]
        virtual, facts = num_stages(name, pp, at["virtual"]) // pp, schedule_properties(name)
        stages = self.options.stages(self.model.num_layers, pp * virtual)
        num_micro, fullest = facts.enough(pp, at["num_micro"]), facts.fullest_pp_ranks(pp)
        found = dict[int, tuple[Pipe, Layers]]()
        for slot, pp_rank in enumerate(self._pp_ranks(name, pp)):
            if pp_rank not in fullest or pp_rank in (known.pp_rank for known, _ in found.values()):
                continue
            sizes = [stages[each].num_layers for each in stages_of(name, pp, virtual, pp_rank)]
            layers = tuple((size, 0) if again < 0 else (min(again, size), max(0, size - again)) for size in sizes)
            found[slot] = Pipe(name, pp, virtual, num_micro, pp_rank), layers
        return found


def filled(points: StrategyTable) -> Ints:
    """Return the smallest number of micro-batches that fills each pp rank as far as all of the
    strategy's micro-batches do."""
    found = np.empty_like(points.num_micro)
    _, kind_of = distinct([points.schedule, points.pp, points.num_micro])
    for which in groups(kind_of):
        at = points.row(int(which[0]))
        found[which] = schedule_properties(NAMES[at["schedule"]]).enough(at["pp"], at["num_micro"])
    return found

"""Level 0 of the planner: the memory of every point of the strategy space, on its fullest device.

What ``step.memory.estimate`` finds for one strategy by walking its lists, as columns over a million. Points
share what they are made of: states depend on how the model is cut (``closed_states``), bytes of activations
on the segments' structure (``activation_columns``), how many are alive on the schedule (``live``). Each is
found once for every kind of point, from the code that walks lists, and multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.hardware import Device
from plait.core.cluster.overhead import Overhead
from plait.core.model.precision import ITEMSIZE, Precision, unquantised
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.distinct import distinct, groups
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, Degrees, Points
from plait.core.step.columns.shapes import Shapes, model_of
from plait.core.step.memory import live
from plait.core.step.memory.closed_activations import size_rows
from plait.core.step.memory.closed_states import FACTORS, KINDS, Factors, StateTables, held_by
from plait.core.step.memory.experts_memory import expert_factors, held_experts, resident
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.core.step.memory.walked_memory import WalkedWork, walked_memory
from plait.core.step.seconds.options import Options
from plait.core.step.stages import crossing_bytes

Column = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK = 1 << 16
"""Points that are multiplied at once."""
SLOTS = 4
"""Places that may be the fullest, at most."""
_INTERLEAVED, _ZB_V = SCHEDULES.index("interleaved"), SCHEDULES.index("zb-v")


@dataclass(frozen=True, kw_only=True)
class MemoryColumns:
    """Bytes of every point's fullest device, by kind; activations: the most at any moment of a step, with
    ``logits`` of them logits and their gradients, if that place has the loss. overhead: what the device
    holds besides tensors; slack: more of it, until memory runs short. place: which of the pipeline. doubted:
    standard deviation of what its framework's pipelines may keep besides."""

    parameters: Column
    gradients: Column
    optimizer: Column
    buffers: Column
    activations: Column
    logits: Column
    overhead: Column
    slack: Column
    place: Ints
    doubted: Column

    @property
    def lasting(self) -> Column:
        """Of tensors that last from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def moving(self) -> Column:
        """Of tensors that come and go."""
        return self.buffers + self.activations

    @property
    def allocated(self) -> Column:
        """Of all tensors: what an allocator reports as its peak."""
        return self.lasting + self.moving

    @property
    def total(self) -> Column:
        """What the device must have."""
        return self.allocated + self.overhead

    @property
    def shown(self) -> Column:
        """What the device's own tools show where there is more."""
        return self.total + self.slack


def usable(device: Device, overhead: Overhead) -> float:
    """Bytes of a device's memory that a plan may fill."""
    return device.memory.value * (1 - overhead.reserve.value)


def plait_on(device: Device) -> MemoryOptions:
    """What Plait's own runs keep there."""
    return replace(PLAIT, gpu=device.kind == "cuda")


def device_overhead(overhead: Overhead, points: Points, moving: Column) -> Column:
    """Bytes that a device holds besides tensors. moving: of tensors that come and go."""
    groups = overhead.communicator.value * communicators(points)
    return overhead.context.value + groups + overhead.stuck.value * moving


def spare_slack(overhead: Overhead, moving: Column) -> Column:
    """Bytes that the allocator holds besides until memory runs short."""
    return max(0.0, overhead.slack.value - overhead.stuck.value) * moving


def communicators(points: Points) -> Ints:
    """How many groups with buffers of their own a rank belongs to."""
    several = (
        points.ranks > 1, points.tp > 1, points.pp > 1, points.cp > points.ring, points.ring > 1, points.params > 1,
        points.grads > points.params, points.optim > points.grads, points.replicas > points.optim,
        points.secondary > 1,
    )  # fmt: skip
    return np.stack(several).sum(axis=0, dtype=np.int64)


def step_memory(
    model: ModelSpec | Shapes,
    points: Points,
    *,
    sequence: int,
    precision: Precision = "bf16-mixed",
    options: Options = PLAIT,
    overhead: Overhead | None = None,
    among: Sequence[Degrees] | None = None,
) -> MemoryColumns:
    """Of every point. sequence: tokens. Points must be valid (``Strategy.check``, ``Sharding.check``);
    where there are more stages than layers, no memory is enough. A utransformer's, whose layers work
    at different lengths, are walked, each kind once. among: the degrees of the space that they are a part
    of; then no more than what micro-batches keep, which takes a fraction of the time: what is walked for one
    part is walked for all others."""
    told, model, overhead = MemoryOptions.of(options), model_of(model), overhead or Overhead()
    if model.levels:
        kinds, place = walked_memory(
            model, points, filled(points), WalkedWork(sequence, unquantised(precision), told.optimizer), gpu=told.gpu
        )
        moving = kinds["activations"] + kinds["buffers"]
        extra, slack = device_overhead(overhead, points, moving), spare_slack(overhead, moving)
        none = np.zeros(len(points))
        return MemoryColumns(**kinds, logits=none, overhead=extra, slack=slack, place=place, doubted=none)
    step = _StepMemory(model, points, sequence, ITEMSIZE[precision], told, among)
    possible = step.num_stages <= told.most_stages(model.num_layers)
    if possible.all():
        return step.columns(overhead)
    found = replace(step, points=points.take(possible)).columns(overhead)
    return MemoryColumns(**{field.name: _spread(getattr(found, field.name), possible) for field in fields(found)})


def _spread(column: NDArray[Any], possible: NDArray[np.bool_]) -> NDArray[Any]:
    """What was left out takes more than there is anywhere."""
    found = np.full(len(possible), np.inf if column.dtype == np.float64 else 0, column.dtype)
    found[possible] = column
    return found


@dataclass(frozen=True)
class _StepMemory:
    model: ModelSpec
    points: Points
    sequence: int
    itemsize: int
    options: MemoryOptions
    among: Sequence[Degrees] | None

    def columns(self, overhead: Overhead) -> MemoryColumns:
        """Of the fullest of the places that can be."""
        points, count = self.points, len(self.points)
        states, state_of = self._states()
        sizes, size_of = size_rows(
            self.model, points, sequence=self.sequence, itemsize=self.itemsize, options=self.options,
            among=self.among,
        )  # fmt: skip
        stream = self._stream
        most, place = np.full(count, -1.0), np.zeros(count, np.int64)
        activations, slot_of = np.zeros(count), np.zeros(count, np.int64)
        for which, slots in self._moments():
            for part in (which[at : at + BLOCK] for at in range(0, len(which), BLOCK)):
                mine = self._elsewhere(sizes[size_of[part]], points.pp[part])
                for slot, (at, rows) in slots.items():
                    counts = rows[:, : live.STREAM]
                    kept = np.einsum("ps,ms->pm", mine, counts)  # a product of BLAS would keep all processors busy
                    live_bytes = (kept + stream[part, None] * rows[:, live.STREAM]).max(axis=1)
                    if self.options.more_alive:
                        layers = np.ceil(self.model.num_layers / self.num_stages[part])
                        live_bytes = live_bytes + self.options.more_alive * layers * mine[:, live.KEPT_LAYER]
                    held = states[slot][:, state_of[part]]
                    live_bytes = np.maximum(live_bytes, held[KINDS.index("ends")])
                    total = held[: KINDS.index("ends")].sum(axis=0) + live_bytes
                    more = total > most[part]
                    better = part[more]
                    most[better], place[better], slot_of[better] = total[more], at, slot
                    activations[better] = live_bytes[more]
        lasting = states[slot_of, :, state_of]
        parameters, gradients, optimizer, buffers = (lasting[:, at] for at in range(len(KINDS) - 1))
        return MemoryColumns(
            parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=buffers,
            activations=activations, logits=self._logits(place),
            overhead=device_overhead(overhead, points, activations + buffers),
            slack=spare_slack(overhead, activations + buffers), place=place,
            doubted=np.where(points.pp > 1, self.options.pipeline_doubt * most, 0.0),
        )  # fmt: skip

    def _elsewhere(self, sizes: Column, pp: Ints) -> Column:
        """[points, STREAM], with what all stages share of the model's ends, and without what is on the host:
        two layers of that are on their way."""
        options = self.options
        if options.ends_shared:
            middle, embeds, heads = (live.TYPES.index(name) for name in ("middle", "embeds", "heads"))
            for base in (live.KEPT, live.HELD, live.FORWARD, live.BACKWARD, live.WEIGHT, *live.PLAIN_PEAKS):
                of = sizes[:, base : base + len(live.TYPES)].copy()
                share = of[:, middle] + np.maximum(0, of[:, embeds] + of[:, heads] - 2 * of[:, middle]) / pp
                sizes[:, base : base + len(live.TYPES)] = np.where((pp > 1)[:, None], share[:, None], of)
        if options.kept_on_host:
            layers = [live.KEPT_LAYER, live.PLAIN_KEPT_LAYER]
            moving = 2 * options.kept_on_host * sizes[:, layers].max(axis=1, keepdims=True)
            sizes[:, layers] *= 1 - options.kept_on_host
            for base in (live.FORWARD, live.BACKWARD, *live.PLAIN_PEAKS):
                sizes[:, base : base + len(live.TYPES)] += moving * (sizes[:, base : base + len(live.TYPES)] > 0)
        return sizes

    @property
    def num_stages(self) -> Ints:
        points = self.points
        chunks = np.where(points.schedule == _INTERLEAVED, points.virtual, np.where(points.schedule == _ZB_V, 2, 1))
        return points.pp * chunks

    @property
    def _stream(self) -> Column:
        """Of what goes from stage to stage, for one micro-batch."""
        points = self.points
        cut = points.cp * np.where(points.sequence_parallel > 0, points.tp, 1)
        return crossing_bytes(self.sequence, points.micro, self.model.hidden, cut=cut, itemsize=self.itemsize).astype(
            np.float64
        )

    def _logits(self, place: Ints) -> Column:
        points, options = self.points, self.options
        last = (place == points.pp - 1) & ((points.schedule != _ZB_V) | (points.pp == 1))
        last |= (place == 0) & (points.schedule == _ZB_V)
        vocab = -(-self.model.vocab // points.tp) * (points.tp if options.logits_whole else 1)
        each = options.bytes_of_logit(self.itemsize, points.tp)
        return last * (points.micro * (self.sequence // points.cp) * vocab * each).astype(np.float64)

    def _states(self) -> tuple[Column, Ints]:
        """[slots, kinds, rows], and each point's row."""
        points, count = self.points, self.num_stages
        cut = [points.pp, points.tp, count, points.schedule == _ZB_V, points.sequence_parallel, points.cp > 1]
        cut.append(points.ep)
        first, row_of = distinct([*cut, points.params, points.grads, points.optim, points.secondary])
        some = points.take(first)
        found = np.zeros((SLOTS, len(KINDS), len(first)))
        _, cut_of = distinct([column[first] for column in cut])
        tables = StateTables.of(self.model, self.itemsize, self.options)
        for which in groups(cut_of):
            at = some.row(int(which[0]))
            pp, stages = at["pp"], self.options.stages(self.model.num_layers, int(count[first[which[0]]]))
            order = "zb-v" if at["schedule"] == _ZB_V else "interleaved"
            strategy = Strategy(
                tp=at["tp"], sequence_parallel=bool(at["sequence_parallel"]), cp=2 if at["cp"] > 1 else 1
            )
            factors = Factors(*(getattr(some, name)[which] for name in FACTORS))
            among = at["tp"] if self.options.experts_whole else 1
            own = tables.numbered(expert_factors(factors, at["ep"], among)) if self.model.experts else None
            columns = tables.numbered(factors)
            for slot, place in enumerate(_places(pp)):
                mine = tuple(stages[each] for each in live.stages_of(order, pp, len(stages) // pp, place))
                held = held_by(
                    resident(self.model), strategy, mine, sequence=self.sequence, itemsize=self.itemsize,
                    ends_shared=bool(self.options.ends_shared),
                )  # fmt: skip
                found[slot][:, which] = tables.states(held, columns)
                if own is not None:
                    routed = held_experts(self.model, mine, tp=at["tp"] // among, ep=at["ep"])
                    found[slot][:, which] += tables.states(routed, own)
        return found, row_of

    def _moments(self) -> Iterator[tuple[Ints, dict[int, tuple[int, live.Counts]]]]:
        """Points of one pipeline, and by slot its place and the moments there."""
        points = self.points
        limit = np.where((points.recompute == RECOMPUTES.index("none")), -1, points.recompute_layers)
        _, kind_of = distinct([points.schedule, points.pp, self.num_stages, filled(points), limit])
        kinds = [(which, self._pipes(points.row(int(which[0])), int(limit[which[0]]))) for which in groups(kind_of)]
        found = iter(live.moments([each for _, pipes in kinds for each in pipes.values()]))
        for which, pipes in kinds:
            yield which, {slot: (pipe.place, next(found)) for slot, (pipe, _) in pipes.items()}

    def _pipes(self, at: Mapping[str, int], again: int) -> dict[int, tuple[live.Pipe, live.Layers]]:
        """By slot, the places of a pipeline that can be the fullest. again: layers that are recomputed of
        every stage; negative: one size for all."""
        name, pp = SCHEDULES[at["schedule"]], at["pp"]
        virtual = live.num_stages(name, pp, at["virtual"]) // pp
        stages = self.options.stages(self.model.num_layers, pp * virtual)
        num_micro = live.enough(name, pp, at["num_micro"])
        found, places = dict[int, tuple[live.Pipe, live.Layers]](), live.fullest_places(name, pp)
        for slot, place in enumerate(_places(pp)):
            if place not in places or place in (known.place for known, _ in found.values()):
                continue
            sizes = [stages[each].num_layers for each in live.stages_of(name, pp, virtual, place)]
            layers = tuple((size, 0) if again < 0 else (min(again, size), max(0, size - again)) for size in sizes)
            found[slot] = live.Pipe(name, pp, virtual, num_micro, place), layers
        return found


def _places(pp: int) -> Sequence[int]:
    """By slot."""
    return 0, min(1, pp - 1), max(0, pp - 2), pp - 1


def filled(points: Points) -> Ints:
    """Micro-batches that matter: kinds that ``live.enough`` need not tell apart are told apart no further."""
    most = np.where(points.schedule == _ZB_V, 4 * points.pp, 2 * points.pp + 8)
    most = np.where(points.schedule == SCHEDULES.index("gpipe"), points.num_micro, most)
    whole = points.num_micro % points.pp == 0
    interleaved = np.where(whole, 3 * points.pp, points.num_micro)
    return np.minimum(points.num_micro, np.where(points.schedule == _INTERLEAVED, interleaved, most))

"""Activation memory of a rank over a pipeline step: a trace of its pipeline ops, with the sizes of
each stage's phases (``plait.core.step.memory.activations``) and of the tensors sent between stages.

A send keeps its tensor until the rank sends again; a receive takes memory as soon as it is posted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy
from plait.core.step.columns.points import num_stages, pp_rank_ops, schedule_properties, stages_of
from plait.core.step.memory.activations import Activations, TracedBatch, activations
from plait.core.step.schedule import Edge, Op, Schedule, Transfer, ends
from plait.core.step.schedules import planned_shape
from plait.core.step.stages import Stage

TRACED_LAYERS = 10
"""Largest number of a stage's layers that are traced one by one; further layers equal the last
one."""
TRACED_RECOMPUTED = 4
"""Largest number of recomputed layers of a stage that are traced one by one, if its other layers
are not recomputed."""


@dataclass(frozen=True)
class Peak:
    """Peak of a rank's activations. when: e.g. ``backward of stage 2``. alive: micro-batches alive
    then, over all stages of the rank."""

    bytes: int
    when: str
    alive: int


@cache
def stage_activations(model: ModelSpec, strategy: Strategy, stage: Stage, micro: TracedBatch) -> Activations:
    """Return ``activations`` for any number of layers: the first layers are traced, and each
    further, equal layer adds the same bytes."""

    def walked(again: int, plain: int, overlap: Overlap = strategy.overlap) -> Activations:
        some = None if strategy.recompute_layers is None else again
        told = replace(strategy, overlap=overlap, recompute_layers=some)
        return activations(model, told, replace(stage, num_layers=again + plain), micro)

    count, limit = stage.num_layers, strategy.recompute_layers
    again = count if limit is None else min(limit, count)
    plain = count - again
    few = min(again, TRACED_RECOMPUTED if plain else TRACED_LAYERS), min(plain, TRACED_LAYERS)
    if not model.uniform_layers or (again, plain) == few:
        return walked(again, plain)
    # Bytes that a layer keeps do not depend on the order of ops.
    found, base = walked(*few), walked(*few, "sync")
    one_again = _Layer.between(base, walked(few[0] + 1, few[1], "sync")) if again > few[0] else _Layer()
    one_plain = _Layer.between(base, walked(few[0], few[1] + 1, "sync")) if plain > few[1] else _Layer()
    return _longer(found, [(one_again, few[0], again), (one_plain, few[1], plain)])


@dataclass(frozen=True)
class _Layer:
    """Bytes that one more layer adds. kept: after a forward; held: after the first part of a
    backward; forward: to the forward's peak."""

    kept: int = 0
    held: int = 0
    forward: int = 0

    @staticmethod
    def between(base: Activations, more: Activations) -> _Layer:
        """Return the bytes that one layer adds: the difference of a stage with (``more``) and
        without (``base``) it."""
        return _Layer(more.kept - base.kept, more.held - base.held, more.forward_peak - base.forward_peak)


def _longer(base: Activations, layers: Sequence[tuple[_Layer, int, int]]) -> Activations:
    """Return the activations of a stage with more layers than the traced ``base``. layers: for each
    kind of layer, in the stage's order, (bytes that one adds, traced layers, actual layers)."""
    kept, held, forward = (
        sum(getattr(one, name) * (there - walked) for one, walked, there in layers)
        for name in ("kept", "held", "forward")
    )

    def most(count: int) -> int:
        """Return the peak within a backward, which goes from the last layer to the first and turns
        kept bytes into held ones."""
        (first, *n), (last, *m) = layers
        begin, end = first.kept * n[count] + last.kept * m[count], first.held * n[count] + last.held * m[count]
        return max(begin, first.kept * n[count] + last.held * m[count], end)

    return Activations(
        base.kept + kept,
        base.forward_peak + forward,
        base.backward_peak + most(1) - most(0) if base.backward_peak else 0,
        base.held + held,
        base.weight_peak + held if base.weight_peak else 0,
        base.staging,
    )


class _Computation(NamedTuple):
    """Changes of live bytes by an op. above: while it runs; after: after it. begins, ends: True if
    a micro-batch's activations begin or end with it."""

    above: int
    after: int
    name: str
    begins: bool
    ends: bool


class PipelineMemoryTrace:
    """Memory trace of one pp rank's pipeline ops. sizes: activations of its stages; tiles: bytes of
    the tensor sent over an edge, on this pp rank's ranks."""

    def __init__(self, schedule: Schedule, sizes: Mapping[int, Activations], tiles: Mapping[Edge, int]) -> None:
        self.schedule, self.sizes, self.tiles = schedule, sizes, tiles
        self.live = self.alive = self._leaving = 0
        self.peak = Peak(0, "", 0)
        self._known: dict[tuple[int, str], _Computation] = {}

    def run(self, ops: Sequence[Op]) -> Peak:
        """Run these ops in order and return the peak so far."""
        for op in ops:
            if op.computes:
                self._compute(op)
            elif op.sends:
                self.live -= self._leaving
                self._leaving = self._tile(op.stage, op.peer)
            else:
                self._hold(self._tile(op.peer, op.stage), f"receive on stage {op.stage}")
        return self.peak

    def _tile(self, a: int, b: int) -> int:
        return self.tiles[min(a, b), max(a, b)]

    def _compute(self, op: Op) -> None:
        known = self._known.get((op.stage, op.kind))
        if known is None:
            known = self._known[op.stage, op.kind] = self._computation(op)
        self.alive += known.begins
        self._mark(self.live + known.above, known.name)
        self.live += known.after
        self.alive -= known.ends

    def _computation(self, op: Op) -> _Computation:
        sizes, stage, work = self.sizes[op.stage], op.stage, op.work
        read, given = self.schedule.producers[stage], self.schedule.consumers[stage]
        if work.forward:
            before, top, after = 0, sizes.forward_peak, sizes.kept
        elif work.input_gradient:
            read, given = given, read
            before, top, after = sizes.kept, sizes.backward_peak, sizes.held
        else:
            read = given = []
            before, top, after = sizes.held, sizes.weight_peak, 0
        if work.weight_gradient:
            after = 0
        arrived = sum(self._tile(stage, other) for other in read)  # the phase's own sizes count it from now on
        goes = sum(self._tile(stage, other) for other in given)
        above, left = top - arrived - before, after - before - arrived + goes
        return _Computation(above, left, f"{work.name} of stage {stage}", work.forward, work.weight_gradient)

    def _hold(self, size: int, when: str) -> None:
        self.live += size
        self._mark(self.live, when)

    def _mark(self, size: int, when: str) -> None:
        if size > self.peak.bytes:
            self.peak = Peak(size, when, self.alive)


# ---- counts of live tensors ----


Counts = NDArray[np.int64]

TYPES = ("whole", "embeds", "middle", "heads")
"""Types of stages, by the ends of the model that they hold."""


class SizeRow(NamedTuple):
    """Rows of sizes, or of counts of sizes, by category: views, [rows, types] or [rows, 1].

    kept_layer, held_layer: bytes that a recomputed layer adds, or any layer if none is recomputed;
    plain_*: of layers without recomputation, next to others with it. stream: tensors between
    stages; rows of sizes lack this column.
    """

    kept: Any
    held: Any
    forward: Any
    backward: Any
    weight: Any
    kept_layer: Any
    held_layer: Any
    plain_forward: Any
    plain_backward: Any
    plain_kept_layer: Any
    plain_held_layer: Any
    stream: Any

    @staticmethod
    def of(rows: NDArray[Any]) -> SizeRow:
        """Return views of the categories."""
        return SizeRow(*(rows[..., first:last] for first, last in _PARTS))


_WIDTHS = (4, 4, 4, 4, 4, 1, 1, 4, 4, 1, 1, 1)
_PARTS = tuple(pairwise(accumulate(_WIDTHS, initial=0)))
OWN, STREAM, WIDTH = _PARTS[6][1], _PARTS[11][0], _PARTS[11][1]
"""Numbers of columns. OWN: of one kind of layers; STREAM: of all sizes; WIDTH: of all sizes and the
stream."""

_OF_STAGE = 5  # kept, forward peak, backward peak, held, weight peak


@dataclass(frozen=True)
class Pipe:
    """Properties that decide which activations are alive together on a pp rank: a schedule of
    ``pp`` ranks, with ``virtual`` stages each, for ``num_micro`` micro-batches."""

    name: str
    pp: int
    virtual: int
    num_micro: int
    pp_rank: int


Layers = tuple[tuple[int, int], ...]
"""(number of recomputed layers, number of other layers) of every stage on a pp rank."""


def moments(requests: Sequence[tuple[Pipe, Layers]]) -> list[Counts]:
    """Return, for each (pipeline, layers) request, how many of each size are alive at each moment
    that can be the peak, [moments, WIDTH]. Results are cached."""
    for pipe, layers in dict.fromkeys(requests):
        if layers not in _known(pipe):
            _known(pipe)[layers] = _moments(pipe, layers)
    return [_known(pipe)[layers] for pipe, layers in requests]


@cache
def _known(_pipe: Pipe) -> dict[Layers, Counts]:
    return {}


def _moments(pipe: Pipe, layers: Layers) -> Counts:
    name, pp, virtual, _, pp_rank = astuple(pipe)
    stages, count = stages_of(name, pp, virtual, pp_rank), num_stages(name, pp, virtual)
    split, found = schedule_properties(name).splits, _walked(pipe)
    rows = [found @ _sizes(stages, count, layers, split, turn) for turn in range(3 if split else 2)]
    return _largest(np.concatenate(rows))


@cache
def _walked(pipe: Pipe) -> Counts:
    """Return rows of counts of live sizes, one for each moment: the columns are every stage's sizes
    separately, then the tensors between stages."""
    name, pp, virtual, num_micro, pp_rank = astuple(pipe)
    if schedule_properties(name).collects and virtual == 1 and num_micro > 3:  # each further micro-batch stays alive
        rows = _walked(replace(pipe, num_micro=3)).copy()
        rows[:, 0] += num_micro - 3
        return rows
    stages = stages_of(name, pp, virtual, pp_rank)
    ops, here = pp_rank_ops(name, planned_shape(name, pp, num_micro, virtual), pp_rank), set(stages)
    walk = _Counting(_chain(num_stages(name, pp, virtual)), stages)
    walk.run(_lowered(ops, here, num_stages(name, pp, virtual)))
    return _largest(np.stack(list(walk.rows.values())).astype(np.int64))


@cache
def _chain(count: int) -> Schedule:
    return Schedule("chain", count, ())


def _lowered(ops: Sequence[Op], here: set[int], count: int, ahead: int = 2) -> list[Op]:
    """Return the ops of one pp rank with transfers, like ``core.step.schedule.with_transfers`` for
    a chain of stages."""
    posted: list[list[Op]] = [[] for _ in ops]
    sent: list[list[Op]] = [[] for _ in ops]
    for at, op in enumerate(ops):
        if not (op.work.forward or op.work.input_gradient):
            continue
        way = 1 if op.forward else -1
        before, after = op.stage - way, op.stage + way
        if 0 <= before < count and before not in here:
            posted[max(0, at - ahead)].append(ends(Transfer(before, op.stage, op.direction, op.micro_batch))[1])
        if 0 <= after < count and after not in here:
            sent[at].append(ends(Transfer(op.stage, after, op.direction, op.micro_batch))[0])
    return [one for at, op in enumerate(ops) for one in (*posted[at], op, *sent[at])]


class _Counting(PipelineMemoryTrace):
    """A memory trace of pipeline ops that keeps the live counts of every moment instead of the
    peak."""

    def __init__(self, schedule: Schedule, stages: Sequence[int]) -> None:
        one_hot = np.eye(_OF_STAGE * len(stages) + 1, dtype=np.int32)
        sizes = {
            stage: Activations(*cast("Any", one_hot[_OF_STAGE * at : _OF_STAGE * (at + 1)]))
            for at, stage in enumerate(stages)
        }
        super().__init__(schedule, sizes, {})
        self.rows: dict[bytes, Any] = {}
        self.live = cast("int", np.zeros(len(one_hot), np.int32))
        self._stream = cast("int", one_hot[-1])

    def _tile(self, a: int, b: int) -> int:
        return self._stream

    def _mark(self, size: int, when: str) -> None:
        row = np.array(size)
        self.rows[row.tobytes()] = row


def _sizes(stages: Sequence[int], count: int, layers: Sequence[tuple[int, int]], split: bool, turn: int) -> Counts:
    """Return which categories of ``SizeRow`` add up to each size of every stage, and to the tensors
    between stages: [sizes, WIDTH].

    A backward goes from the last layer to the first and turns kept bytes into held ones. turn: the
    moment of its peak: 0 its start, 1 the end of the layers without recomputation, 2 its end.
    """
    made = np.zeros((_OF_STAGE * len(stages) + 1, WIDTH), np.int64)
    for at, (stage, (again, plain)) in enumerate(zip(stages, layers, strict=True)):
        kind = {(True, True): 0, (True, False): 1, (False, False): 2, (False, True): 3}[stage == 0, stage == count - 1]
        kept, forward, backward, held, weight = map(SizeRow.of, made[_OF_STAGE * at : _OF_STAGE * (at + 1)])
        kept.kept[kind] = held.held[kind] = weight.weight[kind] = 1
        (forward.plain_forward if plain else forward.forward)[kind] = 1
        for row in (kept, forward):
            row.kept_layer[:], row.plain_kept_layer[:] = again, plain
        for row in (held, weight):
            row.held_layer[:], row.plain_held_layer[:] = again, plain
        in_plain = plain and (turn == 0 or not again)
        (backward.plain_backward if in_plain else backward.backward)[kind] = 1
        (backward.kept_layer if turn < 2 else backward.held_layer)[:] = again
        if in_plain:
            backward.plain_kept_layer[:] = plain
        elif split:
            backward.plain_held_layer[:] = plain
    made[-1, STREAM] = 1
    return made


def _largest(rows: Counts) -> Counts:
    """Return the rows without those that another row equals or exceeds in every count."""
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    small = rows.astype(np.int16) if rows.max(initial=0) < 1 << 15 else rows  # four times as fast to compare
    kept, left = list[int](), np.arange(len(rows))
    while len(left):
        kept.append(int(left[0]))  # no later row exceeds it: its sum is the largest
        left = left[(small[left] > small[left[0]]).any(axis=1)]
    return rows[kept]

"""When in a step a rank's activations take the most memory: its list of pipeline ops, walked with the sizes
of each stage's phases (``plait.core.step.memory.activations``) and of what crosses between stages.

A send keeps its tensor until the rank sends again; a receive takes memory as soon as it is posted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Strategy
from plait.core.step.memory.activations import Activations, WalkedBatch, activations
from plait.core.step.schedule import Edge, Op, Schedule
from plait.core.step.stages import Stage

WALKED = 10
"""Layers of a stage that are walked one by one; more of them are as the last one."""
SOME = 4
"""Likewise, where others of the stage are not recomputed."""


@dataclass(frozen=True)
class Peak:
    """The most that activations take, and when: ``backward of stage 2``. alive: micro-batches alive then,
    over all stages of the rank."""

    bytes: int
    when: str
    alive: int


@cache
def stage_activations(model: ModelSpec, strategy: Strategy, stage: Stage, micro: WalkedBatch) -> Activations:
    """As ``activations``, whatever the number of layers: what the first do is found by walking, and equal
    layers more keep as much more each."""

    def walked(again: int, plain: int, overlap: Overlap = strategy.overlap) -> Activations:
        some = None if strategy.recompute_layers is None else again
        told = replace(strategy, overlap=overlap, recompute_layers=some)
        return activations(model, told, replace(stage, num_layers=again + plain), micro)

    count, limit = stage.num_layers, strategy.recompute_layers
    again = count if limit is None else min(limit, count)
    plain = count - again
    few = min(again, SOME if plain else WALKED), min(plain, WALKED)
    if model.levels or (again, plain) == few:
        return walked(again, plain)
    # What a layer keeps does not depend on the order of ops.
    found, base = walked(*few), walked(*few, "sync")
    one_again = _Layer.between(base, walked(few[0] + 1, few[1], "sync")) if again > few[0] else _Layer()
    one_plain = _Layer.between(base, walked(few[0], few[1] + 1, "sync")) if plain > few[1] else _Layer()
    return _longer(found, [(one_again, few[0], again), (one_plain, few[1], plain)])


@dataclass(frozen=True)
class _Layer:
    """What a layer more adds: after a forward, after the first part of a backward, to the forward's most."""

    kept: int = 0
    held: int = 0
    forward: int = 0

    @staticmethod
    def between(base: Activations, more: Activations) -> _Layer:
        """From a stage with and one without it."""
        return _Layer(more.kept - base.kept, more.held - base.held, more.forward_peak - base.forward_peak)


def _longer(found: Activations, layers: Sequence[tuple[_Layer, int, int]]) -> Activations:
    """With more layers of each kind, in the stage's order: (what one adds, walked, there are)."""
    kept, held, forward = (
        sum(getattr(one, name) * (there - walked) for one, walked, there in layers)
        for name in ("kept", "held", "forward")
    )

    def most(count: int) -> int:
        """While a backward goes from the last layer to the first, what is kept becomes what is held."""
        (first, *n), (last, *m) = layers
        begin, end = first.kept * n[count] + last.kept * m[count], first.held * n[count] + last.held * m[count]
        return max(begin, first.kept * n[count] + last.held * m[count], end)

    return Activations(
        found.kept + kept,
        found.forward_peak + forward,
        found.backward_peak + most(1) - most(0) if found.backward_peak else 0,
        found.held + held,
        found.weight_peak + held if found.weight_peak else 0,
        found.staging,
    )


class _Computation(NamedTuple):
    """The change of an op to live bytes: while it runs, and after it. begins, ends: a micro-batch's
    activations."""

    above: int
    after: int
    name: str
    begins: bool
    ends: bool


class PlaceWalk:
    """A walk along one place's list. sizes: of its stages, each; tiles: bytes of what crosses an edge, on
    this place's ranks."""

    def __init__(self, schedule: Schedule, sizes: Mapping[int, Activations], tiles: Mapping[Edge, int]) -> None:
        self.schedule, self.sizes, self.tiles = schedule, sizes, tiles
        self.live = self.alive = self._leaving = 0
        self.peak = Peak(0, "", 0)
        self._known: dict[tuple[int, str], _Computation] = {}

    def run(self, ops: Sequence[Op]) -> Peak:
        """Run these ops in order; the peak until then."""
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
        arrived = sum(self._tile(stage, other) for other in read)  # is among what the phase counts from now on
        goes = sum(self._tile(stage, other) for other in given)
        above, left = top - arrived - before, after - before - arrived + goes
        return _Computation(above, left, f"{work.name} of stage {stage}", work.forward, work.weight_gradient)

    def _hold(self, size: int, when: str) -> None:
        self.live += size
        self._mark(self.live, when)

    def _mark(self, size: int, when: str) -> None:
        if size > self.peak.bytes:
            self.peak = Peak(size, when, self.alive)

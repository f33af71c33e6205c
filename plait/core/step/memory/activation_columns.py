"""Bytes of activations of many strategies: the walk of ``step.memory.activations`` on columns of sizes.

Which tensors are made, kept and let go of depends on few things (``Structure``); how large they are, on
degrees and sequences. So every structure is walked once, with a column of degrees and micro-batches, for two
numbers of layers; all that follows is linear in these. Orders are those without overlap: what is kept
does not depend on them. What domino's lists keep longer is found by walking one of them (``deferred``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Recompute, Strategy
from plait.core.step.memory.activations import Walk
from plait.core.step.memory.live import (
    BACKWARD,
    FORWARD,
    HELD,
    HELD_LAYER,
    KEPT,
    KEPT_LAYER,
    PLAIN_FORWARD,
    TYPES,
    WEIGHT,
)
from plait.core.step.memory.pipeline_memory import stage_activations
from plait.core.step.memory.segment_sizes import Core, Shared, Sizes
from plait.core.step.orders.segment_lists import sync_order
from plait.core.step.segments import Action, Phase, SegmentGraph, SegmentOp, SharedAttention
from plait.core.step.stages import Stage

Bytes = NDArray[np.float64]
Ints = NDArray[np.int64]
Degrees = tuple[int, int, int, int]
"""tp, cp, ring; sequences of a micro-batch."""

ROUND = 3
"""Ranks of a ring from which on no more tensors exist at once."""
FEW = 2
"""Layers that are walked, and one more: what a layer more adds does not change from there on."""
OWN = PLAIN_FORWARD
"""Columns of one kind of layers (``plait.core.step.memory.live``)."""
OVERLAPPED: tuple[Overlap, Overlap] = ("sync", "domino")
"""Without and with deferred weight gradients."""


@dataclass(frozen=True)
class Structure:
    """What decides which tensors exist. communicates: over tp; split: the backward is in two parts.
    attention: as the graph has it; what differs only in size is one (``shared_degrees``)."""

    recompute: Recompute
    communicates: bool
    sequence_parallel: bool
    p1: int
    split: bool
    attention: SharedAttention | None = None


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Bytes of one micro-batch on a stage: columns. kept, held, forward, backward, weight: as
    ``Activations``; 0 for phases that were not walked."""

    kept: Bytes
    held: Bytes
    forward: Bytes
    backward: Bytes
    weight: Bytes


@dataclass(frozen=True)
class Load:
    """What sizes depend on besides. whole: some stages are the whole model. gpu: as for
    ``activations``."""

    sequence: int
    itemsize: int
    gpu: bool
    whole: bool


def stage_tables(model: ModelSpec, asked: Sequence[tuple[Structure, Sequence[Degrees], Load]]) -> list[Bytes]:
    """Of each that is asked [degrees, OWN]: bytes of each size of ``step.memory.live``. What was asked before
    is remembered."""
    known = [_known_tables(model, structure, load) for structure, _, load in asked]
    for tables, (structure, degrees, load) in zip(known, asked, strict=True):
        if missing := [one for one in degrees if one not in tables]:
            tables.update(zip(missing, _walked_table(model, structure, missing, load), strict=True))
    return [np.stack([tables[one] for one in degrees]) for tables, (_, degrees, _) in zip(known, asked, strict=True)]


def shared_degrees(cp: Ints, ring: Ints) -> tuple[Ints, Ints]:
    """Ulysses' and the ring's, as far as they decide which tensors exist."""
    return np.minimum(2, cp // ring), np.minimum(ROUND, ring)


def deferred(model: ModelSpec, asked: Sequence[tuple[Structure, int, Load]]) -> list[tuple[float, float]]:
    """Of each structure and tp, bytes by which the most of a forward and of a backward grows where weight
    gradients wait until the processor would idle (``domino``), for a whole sequence of a micro-batch.
    Remembered, too."""
    known = _known_deferred(model)
    known.update({one: _deferred(model, *one) for one in dict.fromkeys(asked) if one not in known})
    return [known[one] for one in asked]


@cache
def _known_deferred(_model: ModelSpec) -> dict[tuple[Structure, int, Load], tuple[float, float]]:
    return {}


def _deferred(model: ModelSpec, structure: Structure, tp: int, load: Load) -> tuple[float, float]:
    """Walked for the smallest slices: neither their size nor more layers change it (of more slices, from
    three layers on)."""
    layers = FEW if structure.p1 <= FEW else FEW + 1
    model, shared = replace(model, num_layers=FEW + 3), structure.attention
    cp = shared.ulysses * shared.ring if shared else 1
    strategy = Strategy(
        tp=tp,
        cp=cp,
        ring=shared.ring if shared else 1,
        sequence_parallel=structure.sequence_parallel,
        recompute=structure.recompute,
        p1=structure.p1,
    )
    at_once, later = (
        stage_activations(
            model, replace(strategy, overlap=overlap), Stage(1, 3, 1, layers), batch=structure.p1,
            sequence=load.sequence, itemsize=load.itemsize, phases=("F", "B"), gpu=load.gpu,
        )
        for overlap in OVERLAPPED
    )  # fmt: skip
    forward, backward = later.forward_peak - at_once.forward_peak, later.backward_peak - at_once.backward_peak
    return forward * cp / structure.p1, backward * cp / structure.p1


@cache
def _known_tables(_model: ModelSpec, _structure: Structure, _load: Load) -> dict[Degrees, Bytes]:
    return {}


def _walked_table(model: ModelSpec, structure: Structure, degrees: Sequence[Degrees], load: Load) -> Bytes:
    model = replace(model, num_layers=FEW + 2)  # as many as are walked at most, the one before a stage included
    columns = _Columns.of(model, structure, degrees, load.sequence, load.itemsize, load.gpu)
    found = np.zeros((len(degrees), OWN))
    names = [name for name in TYPES if name != "whole" or load.whole]
    few = {name: _walked(model, columns, name, structure, FEW) for name in names}
    # What a layer more keeps does not depend on what else the stage has.
    more = _walked(model, columns, "middle", structure, FEW + 1, ("F", "I"))
    kept_layer, held_layer = more.kept - few["middle"].kept, more.held - few["middle"].held
    for name, one in few.items():
        kind = TYPES.index(name)
        found[:, KEPT + kind] = one.kept - FEW * kept_layer
        found[:, HELD + kind] = one.held - FEW * held_layer
        found[:, FORWARD + kind] = one.forward - FEW * kept_layer
        found[:, BACKWARD + kind] = one.backward - FEW * np.maximum(kept_layer, held_layer)
        found[:, WEIGHT + kind] = one.weight - FEW * held_layer
    found[:, KEPT_LAYER], found[:, HELD_LAYER] = kept_layer, held_layer
    return found


def _walked(
    model: ModelSpec,
    columns: _Columns,
    name: str,
    structure: Structure,
    layers: int,
    only: Sequence[Phase] = ("F", "I", "B", "W"),
) -> Activity:
    """A micro-batch's phases, or some of them, on a stage of so many layers."""
    embeds, heads = name in ("whole", "embeds"), name in ("whole", "heads")
    first = 0 if embeds else 1
    stage = Stage(first, 3 - embeds - heads, first, layers)
    strategy = Strategy(
        tp=2 if structure.communicates else 1,
        sequence_parallel=structure.sequence_parallel,
        recompute=structure.recompute,
        p1=structure.p1,
    )
    graph = replace(SegmentGraph.of(model, strategy, stage), attention=structure.attention)
    walk, nothing = _Walk(columns.under(graph)), np.zeros(columns.count)
    phases: tuple[Phase, ...] = ("F", "I", "W") if structure.split else ("F", "B")
    peaks, left = dict[str, Bytes](), dict[str, Bytes]()
    for phase in phases:
        if phase not in only:
            break
        peaks[phase] = cast("Bytes", walk.run(_order(replace(graph, phase=phase))))
        walk.hand_over()
        left[phase] = cast("Bytes", walk.now)
    back = "I" if structure.split else "B"
    return Activity(
        kept=left["F"], held=left.get("I", nothing), forward=peaks["F"], backward=peaks.get(back, nothing),
        weight=peaks.get("W", nothing),
    )  # fmt: skip


@cache
def _order(graph: SegmentGraph) -> list[Action]:
    return sync_order(graph)


class _Walk(Walk):
    """On columns. What gloo keeps from step to step is counted elsewhere."""

    _most = staticmethod(np.maximum)

    def _fly(self, op: SegmentOp, change: int) -> None:
        pass


class _Columns(Sizes):
    """Every size as a column: of all degrees."""

    @staticmethod
    def of(
        model: ModelSpec,
        structure: Structure,
        degrees: Sequence[Degrees],
        sequence: int,
        itemsize: int,
        gpu: bool,
    ) -> _Columns:
        """For one structure."""
        graph = SegmentGraph(
            num_layers=1, first_layer=1, p1=structure.p1, sequence_parallel=structure.sequence_parallel,
            attention=structure.attention,
        )  # fmt: skip
        each = [
            Sizes(
                model,
                Strategy(tp=tp, cp=cp, ring=ring, p1=structure.p1, sequence_parallel=structure.sequence_parallel),
                graph, micro, sequence, itemsize, gpu,
            )
            for tp, cp, ring, micro in degrees
        ]  # fmt: skip
        made = _Columns(model, each[0].strategy, graph, structure.p1, sequence, itemsize, gpu)
        made.each, made.count, made.known = each, len(each), {}
        made.shares = cast("Any", [_column(one.shares[at] for one in each) for at in range(structure.p1)])
        made.tokens = cast("Any", _column(one.tokens for one in each))
        made.sharded = max(one.sharded for one in each)
        return made

    each: Sequence[Sizes]
    count: int
    known: dict[Any, Any]

    def under(self, graph: SegmentGraph) -> _Columns:
        """The same sizes for another graph of the same structure."""
        other = copy(self)
        other.graph = graph
        return other

    def _known(self, name: str, op: SegmentOp, make: Callable[[], Any]) -> Any:
        key = name, op.site, op.slice
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _sizes(self, name: str, op: SegmentOp) -> Any:
        return self._known(name, op, lambda: _column(getattr(one, name)(op) for one in self.each))

    def rows(self, op: SegmentOp) -> int:
        return self._sizes("rows", op)

    def full(self, op: SegmentOp) -> int:
        return self._sizes("full", op)

    def stream(self, op: SegmentOp) -> int:
        return self._sizes("stream", op)

    def looked_up(self, op: SegmentOp) -> int:
        return self._sizes("looked_up", op)

    def head(self, op: SegmentOp, itemsize: int) -> int:
        return self._known(f"head{itemsize}", op, lambda: _column(one.head(op, itemsize) for one in self.each))

    def loss(self, op: SegmentOp) -> int:
        return self._sizes("loss", op)

    def normed(self, op: SegmentOp) -> int:
        return self._sizes("normed", op)

    def widened(self, op: SegmentOp) -> int:
        return self._sizes("widened", op)

    def hashed(self, op: SegmentOp) -> int:
        return self._sizes("hashed", op)

    def product(self, op: SegmentOp) -> int:
        return self._known(f"product{op.part}", op, lambda: _column(one.product(op) for one in self.each))

    def shared(self, op: SegmentOp) -> Shared:
        return self._known("shared", op, lambda: self._shared([one.shared(op) for one in self.each]))

    def _shared(self, every: Sequence[Shared]) -> Shared:
        return Shared(
            **{one.name: cast("Any", _column(getattr(each, one.name) for each in every)) for one in fields(Shared)}
        )

    def larger(self, a: int, b: int) -> int:
        return cast("int", np.maximum(a, b))

    def branches(self, op: SegmentOp) -> list[Core]:
        return self._known("branches", op, lambda: self._branches(op))

    def _branches(self, op: SegmentOp) -> list[Core]:
        every = [one.branches(op) for one in self.each]
        return [self._core(cores) for cores in zip(*every, strict=True)]

    def _core(self, cores: Sequence[Core]) -> Core:
        names = ("z", "o", "saved", "forward", "backward")
        sizes: dict[str, Any] = {name: _column(getattr(core, name) for core in cores) for name in names}
        return Core(**sizes, cheap=cores[0].cheap)


def _column(values: Any) -> Bytes:
    return np.fromiter(values, np.float64)

"""Bytes of activations of many strategies: the walk of ``step.memory.activations`` on columns of sizes.

Which tensors are made, kept and let go of depends on few things (``Structure``); how large they are, on
degrees and sequences. So every structure is walked once, with a column of degrees and micro-batches, for two
numbers of layers; all that follows is linear in these. Orders are those without overlap: what is kept
does not depend on them. What domino's lists keep longer is found by walking one of them (``deferred``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Recompute, Strategy, slice_sizes
from plait.core.step.columns.points import Degrees
from plait.core.step.memory.activations import Activations, Walk, WalkedBatch
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
from plait.core.step.memory.sizes import RankLoad, Sizes
from plait.core.step.orders.segment_lists import sync_order
from plait.core.step.segments import Action, Phase, SegmentGraph, SharedAttention
from plait.core.step.stages import Stage

Bytes = NDArray[np.float64]
Ints = NDArray[np.int64]
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

    def has(self, degrees: Degrees) -> bool:
        """Whether ranks of these degrees have the structure."""
        tp, cp, ring, micro = degrees
        own = self.attention or SharedAttention(1, 1)
        shared = min(2, cp // ring), min(ROUND, ring)
        return (tp > 1) == self.communicates and (own.ulysses, own.ring) == shared and micro % self.p1 == 0


@dataclass(frozen=True)
class SizeLoad:
    """What sizes depend on besides. whole: some stages are the whole model. gpu: as for
    ``activations``."""

    sequence: int
    itemsize: int
    gpu: bool
    whole: bool


Asked = tuple[Structure, Sequence[Degrees], SizeLoad]


def stage_tables(model: ModelSpec, asked: Sequence[Asked], later: Sequence[Degrees] = ()) -> list[Bytes]:
    """Of each that is asked [degrees, OWN]: bytes of each size of ``step.memory.live``. What was asked before
    is remembered. later: what may be asked next. A walk of many degrees takes hardly longer than that of one,
    so what is missing is walked for all degrees that were asked of any structure."""
    _known_degrees(model).update(dict.fromkeys(chain(later, *(degrees for _, degrees, _ in asked))))
    return [np.stack(_rows(model, structure, degrees, load)) for structure, degrees, load in asked]


@cache
def _known_degrees(_model: ModelSpec) -> dict[Degrees, None]:
    return {}


def _rows(model: ModelSpec, structure: Structure, degrees: Sequence[Degrees], load: SizeLoad) -> list[Bytes]:
    """A row of each; what is missing is walked."""
    known = _known_tables(model, structure, load)
    if missing := [one for one in degrees if one not in known]:
        others = (one for one in _known_degrees(model) if structure.has(one) and one not in known)
        missing = list(dict.fromkeys([*missing, *others]))
        known.update(zip(missing, _walked_table(model, structure, missing, load), strict=True))
    return [known[one] for one in degrees]


def shared_degrees(cp: Ints, ring: Ints) -> tuple[Ints, Ints]:
    """Ulysses' and the ring's, as far as they decide which tensors exist."""
    return np.minimum(2, cp // ring), np.minimum(ROUND, ring)


def deferred(model: ModelSpec, asked: Sequence[tuple[Structure, int, SizeLoad]]) -> list[tuple[float, float]]:
    """Of each structure and tp, bytes by which the most of a forward and of a backward grows where weight
    gradients wait until the processor would idle (``domino``), for a whole sequence of a micro-batch.
    Remembered, too."""
    known = _known_deferred(model)
    known.update({one: _deferred(model, *one) for one in dict.fromkeys(asked) if one not in known})
    return [known[one] for one in asked]


@cache
def _known_deferred(_model: ModelSpec) -> dict[tuple[Structure, int, SizeLoad], tuple[float, float]]:
    return {}


def _deferred(model: ModelSpec, structure: Structure, tp: int, load: SizeLoad) -> tuple[float, float]:
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
    micro = WalkedBatch(batch=structure.p1, sequence=load.sequence, itemsize=load.itemsize, gpu=load.gpu)
    at_once, later = (
        stage_activations(model, replace(strategy, overlap=overlap), Stage(1, 3, 1, layers), micro)
        for overlap in OVERLAPPED
    )
    forward, backward = later.forward_peak - at_once.forward_peak, later.backward_peak - at_once.backward_peak
    return forward * cp / structure.p1, backward * cp / structure.p1


@cache
def _known_tables(_model: ModelSpec, _structure: Structure, _load: SizeLoad) -> dict[Degrees, Bytes]:
    return {}


def _walked_table(model: ModelSpec, structure: Structure, degrees: Sequence[Degrees], load: SizeLoad) -> Bytes:
    """[degrees, OWN]. Stages that are the whole model are walked beside what is known of the others."""
    sizes = Sizes(
        replace(model, num_layers=FEW + 2),  # as many as are walked at most, the one before a stage included
        _rank(structure, degrees, load.sequence), load.itemsize, gpu=load.gpu,
    )  # fmt: skip
    phases: tuple[Phase, ...] = ("F", "I", "W") if structure.split else ("F", "B")
    if load.whole:
        found = np.stack(_rows(model, structure, degrees, replace(load, whole=False)))
        _put(found, "whole", _walked(sizes, structure, "whole", FEW, phases))
        return found
    few = {name: _walked(sizes, structure, name, FEW, phases) for name in TYPES if name != "whole"}
    # What a layer more keeps does not depend on what else the stage has.
    more = _walked(sizes, structure, "middle", FEW + 1, phases[:-1])
    found = np.zeros((len(degrees), OWN))
    found[:, KEPT_LAYER], found[:, HELD_LAYER] = more.kept - few["middle"].kept, more.held - few["middle"].held
    for name, one in few.items():
        _put(found, name, one)
    return found


def _put(found: Bytes, name: str, one: Activations) -> None:
    """What stages of a kind take, less their layers, whose sizes are known."""
    kind, kept_layer, held_layer = TYPES.index(name), found[:, KEPT_LAYER], found[:, HELD_LAYER]
    found[:, KEPT + kind] = one.kept - FEW * kept_layer
    found[:, HELD + kind] = one.held - FEW * held_layer
    found[:, FORWARD + kind] = one.forward_peak - FEW * kept_layer
    found[:, BACKWARD + kind] = one.backward_peak - FEW * np.maximum(kept_layer, held_layer)
    found[:, WEIGHT + kind] = one.weight_peak - FEW * held_layer


def _rank(structure: Structure, degrees: Sequence[Degrees], sequence: int) -> RankLoad:
    """Columns of degrees."""
    tp, cp, ring, micro = np.array(degrees, dtype=np.int64).T
    return RankLoad(
        tp=tp, cp=cp, ring=ring, tokens=sequence // cp, shares=slice_sizes(micro, structure.p1),
        sharded=tp if structure.sequence_parallel else 1,
    )  # fmt: skip


def _walked(sizes: Sizes, structure: Structure, name: str, layers: int, phases: Sequence[Phase]) -> Activations:
    """These phases of a micro-batch on a stage of so many layers; 0 of what no phase ends with."""
    embeds, heads = name in ("whole", "embeds"), name in ("whole", "heads")
    first = 0 if embeds else 1
    stage = Stage(first, 3 - embeds - heads, first, layers)
    strategy = Strategy(
        tp=2 if structure.communicates else 1,
        sequence_parallel=structure.sequence_parallel,
        recompute=structure.recompute,
        p1=structure.p1,
    )
    graph = replace(SegmentGraph.of(sizes.spec, strategy, stage), attention=structure.attention)
    found = Activations.of(Walk(sizes, graph).phases(_order(replace(graph, phase=phase)) for phase in phases))
    return found if structure.split else replace(found, held=0)


@cache
def _order(graph: SegmentGraph) -> list[Action]:
    return sync_order(graph)

"""Sizes of everything that a micro-batch keeps or works with, for many strategies at once: one row
of sizes (``step.memory.pipeline_memory``) per kind of strategy, from the memory traces of
``step.memory.activations`` on arrays, adjusted by options.

Few things decide which tensors are made, kept and released (``Structure``); degrees and sequences
decide their sizes. So every structure is traced once, with arrays of degrees and micro-batches, for
two numbers of layers; the remainder is linear in these. Orders are those without overlap, on which
kept tensors do not depend. Tensors that domino's instruction lists keep longer come from a trace of
one such list (``deferred``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import MASTER
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Overlap, Recompute, Strategy, slice_sizes
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, Degrees, StrategyTable, column, distinct, groups
from plait.core.step.columns.shapes import Shapes
from plait.core.step.memory.activations import Activations, MemoryTrace, TracedBatch
from plait.core.step.memory.memory_options import NONE, MemoryOptions, SizedPoints
from plait.core.step.memory.pipeline_memory import OWN, STREAM, TYPES, SizeRow, stage_activations
from plait.core.step.memory.sizes import RankLoad, Sizes
from plait.core.step.memory.states import dense_model
from plait.core.step.orders.overlap import sync_order
from plait.core.step.segments import Action, Phase, SegmentGraph, SharedAttention
from plait.core.step.stages import Stage

Bytes = NDArray[np.float64]
Ints = NDArray[np.int64]
LARGEST_RING = 3
"""Degree of ring attention from which on the number of live tensors no longer grows with it."""
TRACED_LAYERS = 2
"""Number of layers that are traced, and once more with one added: from there on each further layer
adds the same."""
OVERLAPPED: tuple[Overlap, Overlap] = ("sync", "domino")
"""Overlaps without and with deferred weight gradients."""
DOMINO = OVERLAPS.index("domino")
STREAMS = [RECOMPUTES.index(name) for name in ("full", "layer")]
SCORE_BYTES = 2 * MASTER
"""Bytes that a layer keeps for a token's score for one expert: logit and probability in fp32."""


def size_rows(
    model: ModelSpec,
    points: StrategyTable,
    *,
    sequence: int,
    itemsize: int,
    options: MemoryOptions,
    among: Sequence[Degrees] | None = None,
) -> tuple[Bytes, Ints]:
    """Return (sizes, [rows, STREAM]; each strategy's row). among: the degrees of the space that the
    strategies are a part of; with it, only what micro-batches keep is counted."""
    mixed = (points.recompute != NONE) & (points.recompute_layers >= 0)
    own = [
        points.recompute,
        points.sequence_parallel,
        points.p1,
        column("splits", points.schedule),
        points.tp,
        points.cp,
        points.ring,
    ]
    own.append((points.overlap == DOMINO) & options.defers)
    whole = points.pp == 1
    first, row_of = distinct([*own, mixed, points.micro, whole])
    rows = _Rows(dense_equivalent(model), points.take(first), sequence, itemsize, options, among)
    found = np.zeros((len(first), STREAM))
    found[:, :OWN] = rows.sizes(rows.points.recompute)
    if mixed.any():  # layers that are not recomputed, next to those that are
        own, plain, some = SizeRow.of(found), SizeRow.of(rows.sizes(np.zeros_like(first))), mixed[first, None]
        own.plain_forward[:], own.plain_backward[:] = plain.forward * some, plain.backward * some
        own.plain_kept_layer[:], own.plain_held_layer[:] = plain.kept_layer * some, plain.held_layer * some
    if model.experts:
        found += routed_sizes(
            model, rows.points, mixed[first], sequence=sequence, itemsize=itemsize, whole=bool(options.experts_whole)
        )
    if model.kv_lora_rank:
        found += latent_sizes(model, rows.points, sequence=sequence, itemsize=itemsize)
    return found, row_of


@dataclass(frozen=True)
class _Rows:
    """Computation of the sizes of strategies. points: one strategy for each row of the result."""

    model: ModelSpec
    points: StrategyTable
    sequence: int
    itemsize: int
    options: MemoryOptions
    among: Sequence[Degrees] | None

    @property
    def split(self) -> NDArray[np.bool_]:
        """True for strategies with a split backward."""
        return column("splits", self.points.schedule)

    def sizes(self, recompute: Ints) -> Bytes:
        """Return [rows, OWN]: bytes of each size of ``SizeRow``, if each row uses its mode of
        ``recompute``."""
        found = self._walked(self.options.traced_recompute(recompute))
        rows = SizedPoints(self.model, replace(self.points, recompute=recompute), self.sequence, self.itemsize)
        self.options.change(rows, SizeRow.of(found))
        return found

    def _walked(self, recompute: Ints) -> Bytes:
        """Return [rows, OWN]: bytes of each size of ``SizeRow``, traced with Plait's own
        instruction lists."""
        points = self.points
        ulysses, ring = shared_degrees(points.cp, points.ring)
        p1 = np.ones_like(points.p1) if self.among is not None else points.p1  # slices keep as much as one batch
        _, kind = distinct([recompute, points.tp > 1, points.sequence_parallel, p1, self.split, ulysses, ring])
        found, kinds, degrees_of = np.zeros((len(points), OWN)), list(groups(kind)), list[Ints]()
        asked = list[tuple[Structure, list[Degrees], SizeLoad]]()
        for which in kinds:
            at = int(which[0])
            structure = Structure(
                cast("Recompute", RECOMPUTES[int(recompute[at])]),
                bool(points.tp[at] > 1),
                bool(points.sequence_parallel[at]),
                int(p1[at]),
                bool(self.split[at]),
                SharedAttention(int(ulysses[at]), int(ring[at])) if points.cp[at] > 1 else None,
            )
            degrees, each = points.take(which).degrees()
            load = SizeLoad(self.sequence, self.itemsize, self.options.gpu, bool((points.pp[which] == 1).any()))
            asked.append((structure, degrees, load))
            degrees_of.append(each)
        for which, at, table in zip(kinds, degrees_of, stage_tables(self.model, asked, self.among or ()), strict=True):
            found[which] = table[at]
        if self.among is not None:  # kept tensors are alive at the end of a forward and the start of a backward
            row = SizeRow.of(found)
            row.forward[:], row.backward[:], row.weight[:] = row.kept, row.kept, row.held
        else:
            self._defer(found, {one[0]: which for one, which in zip(asked, kinds, strict=True)})
        return found

    def _defer(self, sizes: Bytes, kinds: Mapping[Structure, Ints]) -> None:
        """Add, in place, the bytes of tensors that the instruction lists of ``domino`` keep longer.
        It is little, unless activations are recomputed and weight gradients are in the same list.
        kinds: the strategies of each structure."""
        again = [
            (structure, which[self.points.overlap[which] == DOMINO])
            for structure, which in kinds.items()
            if self.options.defers
            and (structure.communicates or structure.attention)
            and not structure.split
            and structure.recompute != "none"
        ]
        load = SizeLoad(self.sequence, self.itemsize, self.options.gpu, whole=False)
        asked = [(one, tp, load) for one, which in again for tp in self.points.tp[which].tolist()]
        longer = np.array(deferred(self.model, asked)).reshape(-1, 2)
        which = np.concatenate([np.zeros(0, np.int64), *(which for _, which in again)])
        self._grow(sizes, which, longer)

    def _grow(self, sizes: Bytes, which: Ints, longer: Bytes) -> None:
        """Add bytes to the forward and backward peaks of the strategies ``which``, in place.
        longer: bytes for the forward and for the backward of each."""
        points, row = self.points, SizeRow.of(sizes)
        forward, backward = (longer * (points.micro[which] / points.cp[which])[:, None]).T
        middle = row.backward[which, TYPES.index("middle")] + backward
        for kind, name in enumerate(TYPES):
            row.forward[which, kind] += forward
            longest = row.backward[which, kind] + (backward if name == "embeds" else 0)
            row.backward[which, kind] = np.maximum(longest, middle)


@dataclass(frozen=True)
class Structure:
    """Properties that decide which tensors exist. communicates: tensor parallelism has collectives.
    split: the backward is in two parts. attention: as in the segment graph; degrees that differ
    only in tensor sizes share one structure (``shared_degrees``)."""

    recompute: Recompute
    communicates: bool
    sequence_parallel: bool
    p1: int
    split: bool
    attention: SharedAttention | None = None

    def has(self, degrees: Degrees) -> bool:
        """Return True if ranks of these degrees have the structure."""
        tp, cp, ring, micro = degrees
        own = self.attention or SharedAttention(1, 1)
        shared = min(2, cp // ring), min(LARGEST_RING, ring)
        return (tp > 1) == self.communicates and (own.ulysses, own.ring) == shared and micro % self.p1 == 0


@dataclass(frozen=True)
class SizeLoad:
    """Other properties that sizes depend on. whole: some stages are the whole model. gpu: as for
    ``activations``."""

    sequence: int
    itemsize: int
    gpu: bool
    whole: bool


TableRequest = tuple[Structure, Sequence[Degrees], SizeLoad]


def stage_tables(model: ModelSpec, requests: Sequence[TableRequest], later: Sequence[Degrees] = ()) -> list[Bytes]:
    """Return [degrees, OWN] for each item of ``requests``: bytes of each size of ``SizeRow``.
    Results are cached.

    later: degrees that may be requested next. A trace of many degrees takes hardly longer than a
    trace of one. So missing tables are traced for all degrees that were requested of any structure.
    """
    _known_degrees(model).update(dict.fromkeys(chain(later, *(degrees for _, degrees, _ in requests))))
    return [np.stack(_rows(model, structure, degrees, load)) for structure, degrees, load in requests]


@cache
def _known_degrees(_model: ModelSpec) -> dict[Degrees, None]:
    return {}


def _rows(model: ModelSpec, structure: Structure, degrees: Sequence[Degrees], load: SizeLoad) -> list[Bytes]:
    """Return [OWN] bytes of each size of ``SizeRow`` for each of the degrees; missing ones are
    traced."""
    known = _known_tables(model, structure, load)
    if missing := [one for one in degrees if one not in known]:
        others = (one for one in _known_degrees(model) if structure.has(one) and one not in known)
        missing = list(dict.fromkeys([*missing, *others]))
        known.update(zip(missing, _walked_table(model, structure, missing, load), strict=True))
    return [known[one] for one in degrees]


def shared_degrees(cp: Ints, ring: Ints) -> tuple[Ints, Ints]:
    """Return the degrees of Ulysses and ring, capped where they no longer decide which tensors
    exist."""
    return np.minimum(2, cp // ring), np.minimum(LARGEST_RING, ring)


def deferred(model: ModelSpec, requests: Sequence[tuple[Structure, int, SizeLoad]]) -> list[tuple[float, float]]:
    """Return, for each structure and tp, (bytes by which the forward's peak grows, bytes by which
    the backward's grows) if weight gradients wait until the processor would idle (``domino``).
    Bytes are for a whole sequence of a micro-batch. Results are cached."""
    known = _known_deferred(model)
    known.update({one: _deferred(model, *one) for one in dict.fromkeys(requests) if one not in known})
    return [known[one] for one in requests]


@cache
def _known_deferred(_model: ModelSpec) -> dict[tuple[Structure, int, SizeLoad], tuple[float, float]]:
    return {}


def _deferred(model: ModelSpec, structure: Structure, tp: int, load: SizeLoad) -> tuple[float, float]:
    """Trace the smallest slices: neither their size nor further layers change the result (for more
    slices, from three layers on)."""
    layers = TRACED_LAYERS if structure.p1 <= TRACED_LAYERS else TRACED_LAYERS + 1
    model, shared = replace(model, num_layers=TRACED_LAYERS + 3), structure.attention
    cp = shared.ulysses * shared.ring if shared else 1
    strategy = Strategy(
        tp=tp,
        cp=cp,
        ring=shared.ring if shared else 1,
        sequence_parallel=structure.sequence_parallel,
        recompute=structure.recompute,
        p1=structure.p1,
    )
    micro = TracedBatch(batch=structure.p1, sequence=load.sequence, itemsize=load.itemsize, gpu=load.gpu)
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
    """Return [degrees, OWN]: bytes of each size of ``SizeRow``, by traces. Stages that are the
    whole model are traced in addition to the cached sizes of other stages."""
    sizes = Sizes(
        replace(model, num_layers=TRACED_LAYERS + 2),  # the most that is traced, including one layer before the stage
        _rank(structure, degrees, load.sequence), load.itemsize, gpu=load.gpu,
    )  # fmt: skip
    phases: tuple[Phase, ...] = ("F", "I", "W") if structure.split else ("F", "B")
    if load.whole:
        found = np.stack(_rows(model, structure, degrees, replace(load, whole=False)))
        _put(found, "whole", _walked(sizes, structure, "whole", TRACED_LAYERS, phases))
        return found
    few = {name: _walked(sizes, structure, name, TRACED_LAYERS, phases) for name in TYPES if name != "whole"}
    # One more layer adds the same kept bytes, whatever else the stage has.
    more = _walked(sizes, structure, "middle", TRACED_LAYERS + 1, phases[:-1])
    found = np.zeros((len(degrees), OWN))
    row = SizeRow.of(found)
    row.kept_layer[:, 0], row.held_layer[:, 0] = more.kept - few["middle"].kept, more.held - few["middle"].held
    for name, one in few.items():
        _put(found, name, one)
    return found


def _put(sizes: Bytes, name: str, stage_bytes: Activations) -> None:
    """Write the sizes of a type of stage (``name``) into ``sizes``, minus the known bytes of its
    layers."""
    kind, row = TYPES.index(name), SizeRow.of(sizes)
    kept, held = TRACED_LAYERS * row.kept_layer[:, 0], TRACED_LAYERS * row.held_layer[:, 0]
    row.kept[:, kind], row.held[:, kind] = stage_bytes.kept - kept, stage_bytes.held - held
    row.forward[:, kind], row.weight[:, kind] = stage_bytes.forward_peak - kept, stage_bytes.weight_peak - held
    row.backward[:, kind] = stage_bytes.backward_peak - np.maximum(kept, held)


def _rank(structure: Structure, degrees: Sequence[Degrees], sequence: int) -> RankLoad:
    tp, cp, ring, micro = np.array(degrees, dtype=np.int64).T
    return RankLoad(
        tp=tp, cp=cp, ring=ring, tokens=sequence // cp, shares=slice_sizes(micro, structure.p1),
        sharded=tp if structure.sequence_parallel else 1,
    )  # fmt: skip


def _walked(sizes: Sizes, structure: Structure, name: str, layers: int, phases: Sequence[Phase]) -> Activations:
    """Trace these phases of a micro-batch on a stage with ``layers`` layers; values of phases that
    do not run are 0."""
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
    found = Activations.of(MemoryTrace(sizes, graph).phases(_order(replace(graph, phase=phase)) for phase in phases))
    return found if structure.split else replace(found, held=0)


@cache
def _order(graph: SegmentGraph) -> list[Action]:
    return sync_order(graph)


# ---- experts and latent attention: traced as a model without them; their bytes are added ----


@cache
def dense_equivalent(model: ModelSpec) -> ModelSpec:
    """Return the model with an MLP as wide as one token passes through, and without latent
    attention; unchanged if it has neither experts nor latent attention."""
    shapes = Shapes.of(model)
    plain: dict[str, Any] = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), 0)
    return dense_model(model, shapes.whole_ffn + shapes.expert_share * shapes.routed * shapes.expert_ffn, plain)


def latent_sizes(model: ModelSpec, points: StrategyTable, *, sequence: int, itemsize: int) -> NDArray[np.float64]:
    """Return [points, STREAM] bytes to add to ``size_rows`` for latent attention. A layer keeps
    latent queries, keys and values for its own tokens, and the rotated parts of its heads' queries
    and keys."""
    tokens = (points.micro * (sequence // points.cp)).astype(np.float64)
    here = tokens / np.where(points.sequence_parallel > 0, points.tp, 1)
    letters = model.letters
    rotated = 2 * model.num_heads * model.qk_rope_head_dim / points.tp
    kept = itemsize * (here * (letters.A + letters.B + letters.R) + tokens * rotated)
    found, again = np.zeros((len(points), STREAM)), np.isin(points.recompute, STREAMS)
    row = SizeRow.of(found)
    row.kept_layer[:, 0] = kept * ~again
    row.forward[:] = row.backward[:] = (kept * again)[:, None]
    return found


def routed_sizes(
    model: ModelSpec,
    points: StrategyTable,
    mixed: NDArray[np.bool_],
    *,
    sequence: int,
    itemsize: int,
    whole: bool = False,
) -> NDArray[np.float64]:
    """Return [points, STREAM] bytes to add to ``size_rows`` for experts: rows that experts receive
    and return, and the router's scores. mixed: strategies in which only some layers are recomputed.
    whole: no expert is cut."""
    shapes = Shapes.of(model)
    tokens = (points.micro * (sequence // points.cp)).astype(np.float64)
    here = tokens / np.where(points.sequence_parallel > 0, points.tp, 1)
    rows = shapes.expert_share * shapes.routed * model.hidden * itemsize
    # Inputs (of all tokens of the tensor-parallel group unless experts are whole); outputs, which the
    # router's gradient needs.
    kept = rows * ((here if whole else tokens) + here) + shapes.expert_share * shapes.experts * here * SCORE_BYTES
    working = rows * 2 * here  # in transit, sent and received
    found, again = np.zeros((len(points), STREAM)), np.isin(points.recompute, STREAMS)
    row = SizeRow.of(found)
    row.kept_layer[:, 0], row.plain_kept_layer[:, 0] = kept * ~again, kept * mixed
    row.forward[:] = row.backward[:] = (working + kept * again)[:, None]
    row.plain_forward[:] = row.plain_backward[:] = (working * mixed)[:, None]
    return found

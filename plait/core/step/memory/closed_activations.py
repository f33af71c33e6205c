"""The size of everything that a micro-batch keeps or works with, for many strategies at once: a row of sizes
(``plait.core.step.memory.live``) for every kind of point, and what other frameworks keep beyond Plait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import MASTER
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Recompute
from plait.core.step.columns.distinct import distinct, groups
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, Degrees, Points
from plait.core.step.memory.activation_columns import (
    OWN,
    Bytes,
    SizeLoad,
    Structure,
    deferred,
    shared_degrees,
    stage_tables,
)
from plait.core.step.memory.experts_memory import activated, latent_sizes, routed_sizes
from plait.core.step.memory.live import (
    BACKWARD,
    FORWARD,
    HELD,
    HELD_LAYER,
    KEPT,
    KEPT_LAYER,
    PLAIN_BACKWARD,
    PLAIN_FORWARD,
    PLAIN_HELD_LAYER,
    PLAIN_KEPT_LAYER,
    STREAM,
    TYPES,
    WEIGHT,
)  # fmt: skip
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.seconds.pipeline_time import SPLIT
from plait.core.step.segments import SharedAttention

Ints = NDArray[np.int64]
DOMINO = OVERLAPS.index("domino")
NONE, SELECTIVE, FULL, LAYER = (RECOMPUTES.index(name) for name in ("none", "selective", "full", "layer"))
BOTH_PASSES = 1.8
"""Unfused attention's working set in a backward, of what it keeps: scores, and gradients as large as four
fifths of it (Korthikanti 2022: 5 bytes a weight are 2 of scores, 1 of a mask, 2 of their product)."""


def size_rows(
    model: ModelSpec,
    points: Points,
    *,
    sequence: int,
    itemsize: int,
    options: MemoryOptions,
    among: Sequence[Degrees] | None = None,
) -> tuple[Bytes, Ints]:
    """[rows, STREAM], and each point's row. among: the degrees of the space that they are a part of; then no
    more than what micro-batches keep."""
    mixed = (points.recompute != NONE) & (points.recompute_layers >= 0)
    own = [
        points.recompute,
        points.sequence_parallel,
        points.p1,
        SPLIT[points.schedule],
        points.tp,
        points.cp,
        points.ring,
    ]
    own.append((points.overlap == DOMINO) & options.defers)
    whole = points.pp == 1
    first, row_of = distinct([*own, mixed, points.micro, whole])
    rows = _Rows(activated(model), points.take(first), sequence, itemsize, options, among)
    found = np.zeros((len(first), STREAM))
    found[:, :OWN] = rows.sizes(rows.points.recompute)
    if mixed.any():  # layers beside those that are recomputed
        plain, some = rows.sizes(np.zeros_like(first)), mixed[first, None]
        for at, source, wide in (
            (PLAIN_FORWARD, FORWARD, len(TYPES)), (PLAIN_BACKWARD, BACKWARD, len(TYPES)),
            (PLAIN_KEPT_LAYER, KEPT_LAYER, 1), (PLAIN_HELD_LAYER, HELD_LAYER, 1),
        ):  # fmt: skip
            found[:, at : at + wide] = plain[:, source : source + wide] * some
    if model.experts:
        found += routed_sizes(
            model, rows.points, mixed[first], sequence=sequence, itemsize=itemsize, whole=bool(options.experts_whole)
        )
    if model.kv_lora_rank:
        found += latent_sizes(model, rows.points, sequence=sequence, itemsize=itemsize)
    return found, row_of


@dataclass(frozen=True)
class _Rows:
    """points: one of every kind."""

    model: ModelSpec
    points: Points
    sequence: int
    itemsize: int
    options: MemoryOptions
    among: Sequence[Degrees] | None

    @property
    def split(self) -> NDArray[np.bool_]:
        """Whose backward is in two parts."""
        return SPLIT[self.points.schedule]

    def sizes(self, recompute: Ints) -> Bytes:
        """[rows, OWN], with each row's ``recompute``."""
        walked = recompute
        if self.options.recompute_attention:
            walked = np.where(recompute == SELECTIVE, NONE, walked)
        if self.options.whole_layers:
            walked = np.where(recompute == FULL, NONE, walked)
        return self._adjusted(self._walked(walked), recompute)

    def _walked(self, recompute: Ints) -> Bytes:
        """As Plait's own lists have it."""
        points = self.points
        ulysses, ring = shared_degrees(points.cp, points.ring)
        p1 = np.ones_like(points.p1) if self.among is not None else points.p1  # slices keep together what a whole keeps
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
        if self.among is not None:  # what is kept is there at the end of a forward and at the beginning of a backward
            for peak, lasting in ((FORWARD, KEPT), (BACKWARD, KEPT), (WEIGHT, HELD)):
                found[:, peak : peak + len(TYPES)] = found[:, lasting : lasting + len(TYPES)]
        else:
            self._defer(found, {one[0]: which for one, which in zip(asked, kinds, strict=True)})
        return found

    def _defer(self, found: Bytes, kinds: Mapping[Structure, Ints]) -> None:
        """What domino's lists keep longer: little, unless activations are computed again and weight gradients
        stand in the same list. kinds: the points of each structure."""
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
        self._grow(found, which, longer)

    def _grow(self, found: Bytes, which: Ints, longer: Bytes) -> None:
        """longer: bytes of a forward and of a backward for each of these points."""
        points = self.points
        forward, backward = (longer * (points.micro[which] / points.cp[which])[:, None]).T
        middle = found[which, BACKWARD + TYPES.index("middle")] + backward
        for kind, name in enumerate(TYPES):
            found[which, FORWARD + kind] += forward
            longest = found[which, BACKWARD + kind] + (backward if name == "embeds" else 0)
            found[which, BACKWARD + kind] = np.maximum(longest, middle)

    def _adjusted(self, found: Bytes, recompute: Ints) -> Bytes:
        """With what other frameworks keep."""
        options = self.options
        points, model = self.points, self.model
        tokens = (points.micro * (self.sequence // points.cp)).astype(np.float64)
        shared = np.where(points.sequence_parallel > 0, points.tp, 1)
        stream = tokens * model.hidden / shared
        more = options.stream_bytes * stream - self._left_out(tokens)
        more = more - self._quantised(tokens, stream) * (recompute == NONE)
        gathered = tokens * model.hidden * self.itemsize * ((shared > 1) & options.regathers)
        score_bytes = 0.0 if options.fused_attention else options.score_bytes
        scores = tokens * self.sequence * model.num_heads / points.tp * score_bytes
        full = (recompute == FULL) | (recompute == LAYER)
        whole, attention_again = (
            (recompute == FULL) & options.whole_layers,
            full | ((recompute == SELECTIVE) & options.recompute_attention),
        )
        layer = found[:, KEPT_LAYER] + (more - 2 * gathered) * (~full | whole)
        working = (
            scores * np.where(attention_again, BOTH_PASSES, BOTH_PASSES - 1) + gathered + np.where(whole, layer, 0)
        )
        kept = np.where(whole, stream * options.kept_bytes, layer + scores * ~attention_again)
        found[:, HELD_LAYER] += np.minimum(0, more - 2 * gathered) * self.split
        found[:, KEPT_LAYER] = kept
        if options.frees_inputs:
            for name in ("middle", "heads"):
                found[:, KEPT + TYPES.index(name)] -= stream * self.itemsize * ~full
        found[:, FORWARD : FORWARD + len(TYPES)] += (working - gathered)[:, None] * attention_again[:, None]
        found[:, BACKWARD : BACKWARD + len(TYPES)] += working[:, None]
        if options.logit_bytes is not None or options.whole_layers:
            self._loss(found, tokens, scores * attention_again)
        return found

    def _quantised(self, tokens: Bytes, stream: Bytes) -> Bytes:
        """What a layer keeps less where products' inputs are quantised: normalised streams, and what the
        MLP's second weight reads. Attention's gradient needs its output as it is: it is kept twice."""
        model, told, tp = self.model, self.options.input_bytes, self.points.tp
        if told is None:
            return np.zeros_like(tokens)
        normed = stream / model.hidden if self.options.regathers else tokens
        streams = (1 if model.parallel_block else 2) * normed * model.hidden
        return (self.itemsize - told) * (streams + tokens * model.letters.F / tp) - told * tokens * model.letters.Q / tp

    def _left_out(self, tokens: Bytes) -> Bytes:
        """What a layer of Plait's keeps and others need not."""
        model, each = self.model, tokens * self.itemsize / self.points.tp
        gate = model.letters.F if model.gated and self.options.fused_gate else 0
        rotary = self.options.rotary_in_place and not model.learned_positions
        copies = (model.letters.Q + model.letters.K) * rotary
        return each * (gate + copies * (self.points.cp == self.points.ring))

    def _loss(self, found: Bytes, tokens: Bytes, freed: Bytes) -> None:
        """A stage with the head is fullest at the loss or in a layer's backward. freed: bytes of the last
        layer's scores: of these blocks, as large as they are, an allocator makes no logits."""
        tp = self.points.tp
        numbers = tokens * (-(-self.model.vocab // tp))
        each = self.options.bytes_of_logit(self.itemsize, tp) * (tp if self.options.logits_whole else 1)
        more = numbers * (each - self.itemsize)  # their gradient is what Plait's own lists keep
        more = more + tokens * self.model.hidden * MASTER * (self.options.loss_chunks > 1)
        middle = found[:, BACKWARD + TYPES.index("middle")]
        for name, without in (("whole", "embeds"), ("heads", "middle")):
            kind = TYPES.index(name)
            at_loss = found[:, KEPT + kind] + more + freed
            found[:, FORWARD + kind] = np.maximum(found[:, FORWARD + TYPES.index(without)], at_loss)
            found[:, BACKWARD + kind] = np.maximum(middle, at_loss)

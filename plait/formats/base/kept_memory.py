"""Activation memory of other frameworks' runs: bytes per element, and functions on rows of sizes
(docs/adr/0014)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from plait.core.model.precision import MASTER
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.columns.points import RECOMPUTES, Ints, column
from plait.core.step.memory.memory_options import Bytes, MemoryOptions, SizedPoints
from plait.core.step.memory.pipeline_memory import TYPES, SizeRow
from plait.core.step.stages import Stage, split_layers

NONE, SELECTIVE, FULL, LAYER = (RECOMPUTES.index(name) for name in ("none", "selective", "full", "layer"))
SCORE_BYTES = 5.0
"""Bytes that unfused attention keeps per attention weight: 2 for the score, 1 for dropout's mask, 2
for their product (Korthikanti 2022, arXiv 2205.05198)."""
BOTH_PASSES = 1.8
"""Unfused attention's working set in the backward pass, relative to its kept bytes: these bytes
themselves, and gradients of four fifths of their size (Korthikanti 2022: of 5 bytes per weight, 1
is the mask's)."""


@dataclass(frozen=True, kw_only=True)
class FrameworkMemory(MemoryOptions):
    """A framework's memory options and the bytes of its activations.

    score_bytes: bytes per attention weight if attention is not fused. stream_bytes: bytes of masks
    and the like that a layer keeps per token and hidden element. fused_gate: a gated MLP does not
    keep the gate's activation. rotary_in_place: only rotated queries and keys are kept. regathers:
    with sequence parallelism no layer keeps its gathered inputs. whole_layers: full recomputation
    keeps ``kept_bytes`` per token and hidden element, and repeats a whole layer (Plait keeps two
    streams, and repeats half a layer at a time).

    logit_bytes: bytes per logit of all its copies while the loss is computed; shared_logit_bytes:
    the same if tensor-parallel ranks share the vocabulary, None for ``logit_bytes``. loss_chunks:
    parts of a sequence for which head, loss and their backward run one after the other, while the
    stream's gradient is collected in fp32. logits_whole: every tensor-parallel rank has all logits.
    ends_count: stages are balanced with embedding and head counted as one layer each; ends_fill:
    the same, but only where this alone makes stages equal. frees_inputs: a stage frees its received
    input once the first norm has read it.
    """

    defers: bool = False
    score_bytes: float = SCORE_BYTES
    stream_bytes: float = 0.0
    fused_gate: bool = False
    rotary_in_place: bool = False
    regathers: bool = False
    whole_layers: bool = True
    kept_bytes: float = 2.0
    logit_bytes: float = 10.0
    shared_logit_bytes: float | None = None
    loss_chunks: int = 1
    logits_whole: bool = False
    ends_count: bool = False
    ends_fill: bool = False
    frees_inputs: bool = False

    def traced_recompute(self, recompute: Ints) -> Ints:
        """Return the recomputation kinds for the memory trace: attention or whole layers that are
        recomputed have no instruction list of Plait's, and count as ``NONE``."""
        found = np.where(recompute == SELECTIVE, NONE, recompute) if self.recompute_attention else recompute
        return np.where(recompute == FULL, NONE, found) if self.whole_layers else found

    def change(self, rows: SizedPoints, sizes: SizeRow) -> None:
        """Change, in place, the bytes in ``sizes`` that Plait's own runs have to this framework's:
        a layer's kept bytes, working sets of both passes, and the loss."""
        points, model, tokens, stream = rows.points, rows.model, rows.tokens, rows.stream
        recompute, flat = points.recompute, points.sequence_parallel > 0
        more = self.stream_bytes * stream - self._left_out(rows)
        if self.input_bytes is not None:
            normed = stream / model.hidden if self.regathers else tokens
            more = more - rows.quantised(self.input_bytes, normed) * (recompute == NONE)
        gathered = tokens * model.hidden * rows.itemsize * (flat & (points.tp > 1) & self.regathers)
        score_bytes = 0.0 if self.fused_attention else self.score_bytes
        scores = tokens * rows.sequence * model.num_heads / points.tp * score_bytes
        full = (recompute == FULL) | (recompute == LAYER)
        whole = (recompute == FULL) & self.whole_layers
        again = full | ((recompute == SELECTIVE) & self.recompute_attention)
        layer = sizes.kept_layer[:, 0] + (more - 2 * gathered) * (~full | whole)
        working = scores * np.where(again, BOTH_PASSES, BOTH_PASSES - 1) + gathered + np.where(whole, layer, 0)
        sizes.held_layer[:, 0] += np.minimum(0, more - 2 * gathered) * column("splits", points.schedule)
        sizes.kept_layer[:, 0] = np.where(whole, stream * self.kept_bytes, layer + scores * ~again)
        if self.frees_inputs:
            for name in ("middle", "heads"):
                sizes.kept[:, TYPES.index(name)] -= stream * rows.itemsize * ~full
        sizes.forward[:] += ((working - gathered) * again)[:, None]
        sizes.backward[:] += working[:, None]
        self._loss(rows, sizes, scores * again)

    def _left_out(self, rows: SizedPoints) -> Bytes:
        """Return the bytes that Plait's layer keeps and this framework's does not."""
        model, points = rows.model, rows.points
        gate = model.letters.F if model.gated and self.fused_gate else 0
        rotary = self.rotary_in_place and not model.learned_positions
        copies = (model.letters.Q + model.letters.K) * rotary
        return rows.tokens * rows.itemsize / points.tp * (gate + copies * (points.cp == points.ring))

    def _loss(self, rows: SizedPoints, sizes: SizeRow, freed_bytes: Bytes) -> None:
        """Set the peak of a stage with the head: at the loss, or in a layer's backward pass.
        freed_bytes: bytes of the last layer's scores; blocks of that size are not reused by the
        allocator for logits."""
        tp = rows.points.tp
        numbers = rows.tokens * (-(-rows.model.vocab // tp))
        more = numbers * (self.logits(rows.itemsize, tp) - rows.itemsize)  # Plait's instruction lists have the gradient
        more = more + rows.tokens * rows.model.hidden * MASTER * (self.loss_chunks > 1)
        middle = sizes.backward[:, TYPES.index("middle")]
        for name, without in (("whole", "embeds"), ("heads", "middle")):
            kind = TYPES.index(name)
            at_loss = sizes.kept[:, kind] + more + freed_bytes
            sizes.forward[:, kind] = np.maximum(sizes.forward[:, TYPES.index(without)], at_loss)
            sizes.backward[:, kind] = np.maximum(middle, at_loss)

    def logits(self, itemsize: int, tp: Any = 1) -> Any:
        """Return the bytes per logit while the loss is computed, from ``logit_bytes``,
        ``shared_logit_bytes``, ``loss_chunks`` and ``logits_whole``."""
        shared = self.logit_bytes if self.shared_logit_bytes is None else self.shared_logit_bytes
        each = (self.logit_bytes + (shared - self.logit_bytes) * (tp > 1)) / self.loss_chunks
        return each * (tp if self.logits_whole else 1)

    def stages(self, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
        """Return the stages, with embedding and head in place of one layer each if ``ends_count``
        or ``ends_fill`` says so."""
        fill = self.ends_fill and num_layers % num_stages and not (num_layers + 2) % num_stages
        if not (self.ends_count or fill) or num_stages == 1:
            return split_layers(num_layers, num_stages)
        sizes = list(slice_sizes(num_layers + 2, num_stages))
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
        firsts = accumulate(sizes, initial=0)
        return tuple(
            Stage(i, num_stages, first, size) for i, (first, size) in enumerate(zip(firsts, sizes, strict=False))
        )

    def most_stages(self, num_layers: int) -> int:
        """Return the largest number of stages: one per layer, and two more if embedding and head
        count."""
        return num_layers + 2 * (self.ends_count or self.ends_fill)

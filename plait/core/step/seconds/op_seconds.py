"""Seconds of segment ops and of their collectives on a described cluster: the one price list, which closed
form and simulation share.

An op is put together from the operations of ``step.seconds.rates``, by the rows of ``step.ops``: products of
the slice and the part that it works on, attention block by block, passes over memory. Which ops and
collectives there are is the graph's to say; how often each runs are columns (slices p1, parts p2, blocks of a
ring). So a strategy and a column of a million strategies of one structure are priced by the same lines, with
the launches that runs have. docs/adr/0044 says what this replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import ITEMSIZE, Precision, unquantised
from plait.core.model.spec import keys_seen
from plait.core.model.weights import Letters, widths
from plait.core.parallel.strategy import Recompute
from plait.core.step.columns.distinct import distinct, groups
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.ops import (
    Branch,
    Dims,
    Kind,
    Number,
    OpStep,
    SendSizes,
    branches_of,
    exchanged,
    parts_of,
    send_of,
    steps_of,
)  # fmt: skip
from plait.core.step.seconds import rates
from plait.core.step.seconds.options import Options
from plait.core.step.seconds.rates import Seconds
from plait.core.step.segments import LAYERS, Collective, SegmentGraph, SegmentOp, SharedAttention, Site

SECONDS = (Kind.SECOND, Kind.SECOND_GRAD)
ROW_BYTES = 4
"""Moved for each number of a row of the embedding."""
NO_COLLECTIVES = OVERLAPS.index("no-communication")


class Work(NamedTuple):
    """Seconds of computation by what it is, and launches: kernels that the host has to submit, as a row of
    the table counts one."""

    products: Any = 0.0
    attention: Any = 0.0
    passes: Any = 0.0
    launches: Any = 0.0

    @property
    def seconds(self) -> Seconds:
        """Of everything."""
        return self.products + self.attention + self.passes

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Priced:
    """Strategies of one model on one cluster. Shapes, sequence and options are numbers, or columns as long as
    ``points``. sequence: tokens."""

    model: Shapes
    points: Points
    cluster: Cluster
    sequence: Any
    precision: Precision
    options: Options

    @cached_property
    def tokens(self) -> Seconds:
        """That a rank's layers see of a micro-batch; its tensor-parallel neighbours see the same."""
        return self.points.micro * self.sequence / self.points.cp

    @property
    def listed(self) -> Any:
        """Whether stages run lists, which have all that the model computes."""
        beside = np.asarray(self.model.experts) + np.asarray(self.model.kv_lora_rank)
        return np.asarray(self.options.in_lists) & (beside == 0)

    @property
    def itemsize(self) -> int:
        """Bytes of a number as the model computes."""
        return ITEMSIZE[self.precision]

    def take(self, which: Any) -> Priced:
        """Some of them, by numbers."""
        told: dict[str, Any] = {name: _cut(getattr(self, name), which) for name in ("model", "sequence", "options")}
        return replace(self, points=self.points.take(which), **told)

    def structures(self) -> Iterator[tuple[Any, OpSeconds]]:
        """Points of one structure of ops, by number, and their prices."""
        points = self.points
        block = np.broadcast_to(np.asarray(self.model.parallel_block), len(points))
        columns: list[Any] = [
            points.sequence_parallel > 0, points.recompute, points.tp > 1, points.ring > 1,
            points.cp > points.ring, block > 0,
        ]  # fmt: skip
        _, kind = distinct([np.asarray(column) for column in columns])
        for which in groups(kind):
            flat, recompute, sends, ring, heads, side = (column[which[0]] for column in columns)
            graph = SegmentGraph(
                num_layers=1, sequence_parallel=bool(flat), communicates=bool(sends), parallel_block=bool(side),
                recompute=cast("Recompute", RECOMPUTES[int(recompute)]),
                attention=SharedAttention(1 + bool(heads), 1 + bool(ring)) if ring or heads else None,
            )  # fmt: skip
            yield which, OpSeconds(graph, self.take(which))


def _cut(value: Any, which: Any) -> Any:
    """A part of a column, or of a record's columns; numbers as they are."""
    if isinstance(value, Shapes | Options):
        return replace(value, **{f.name: _cut(getattr(value, f.name), which) for f in fields(value)})
    return value[which] if np.ndim(value) else value


@dataclass(frozen=True)
class OpSeconds:
    """Prices of the ops of one micro-batch, slices and parts together.

    graph: one layer and both ends of the model, of the structure that all of ``priced`` have. How many
    slices, parts and ranks there are say the columns.
    """

    graph: SegmentGraph
    priced: Priced

    def compute(self, site: Site, kind: Kind) -> Work:
        """Of the ops of one kind."""
        found, parts = Work(), self.parts(site, kind)
        added = kind == Kind.NORM_AGAIN and self.graph.rejoins(site, 0)  # M is then all of N
        for branch in ("", *branches_of(site)):
            for step in self._steps(branch, Kind.NORM if added else kind):
                found = found.plus(self._step(step, site, kind, parts))
        return found

    def sent(self, site: Site, kind: Kind) -> Seconds:
        """Of their collectives, one after the other; 0 where they have none."""
        priced, points, collective = self.priced, self.priced.points, self._collective(site, kind)
        if collective is None:
            return np.zeros(len(points))
        send, ulysses = send_of(site, kind), points.cp // points.ring
        whole = send.nbytes(self._sizes(site, kind))
        if collective == "rotate":
            each = rates.collective(priced.cluster, "send", whole, points.ring, points.tp * ulysses)
        elif collective == "all_to_all":
            each = rates.collective(priced.cluster, collective, whole * ulysses, ulysses, points.tp)
        else:
            each = rates.collective(priced.cluster, collective, whole, points.tp, 1)
        return self.calls(site, kind) * np.where(points.overlap == NO_COLLECTIVES, 0.0, each)

    def calls(self, site: Site, kind: Kind) -> Number:
        """How many collectives they have."""
        collective = self._collective(site, kind)
        if collective is None:
            return 0
        return self.priced.points.p1 * (1 if collective == "all_to_all" else self.parts(site, kind))

    def _collective(self, site: Site, kind: Kind) -> Collective | None:
        """That follows an op, or the last of its parts."""
        last = self.graph.parts(site, kind) - 1
        return self.graph.collective(SegmentOp(site, 0, kind, 0, last))

    # ---- computation ----

    def parts(self, site: Site, kind: Kind) -> Number:
        """Parts of an op."""
        points = self.priced.points
        ring = points.ring if self.graph.shared(site) else 1
        return parts_of(site, kind, p2=points.p2, flat=points.sequence_parallel, ring=ring)

    def _steps(self, branch: Branch, kind: Kind) -> tuple[OpStep, ...]:
        """What ops of the kind compute."""
        shared = self.graph.attention
        if kind == Kind.CORE_AGAIN and shared and shared.ring > 1:  # what came round a ring is kept
            return ()
        return steps_of(branch, kind, shared=shared is not None, selective=self.graph.recompute == "selective")

    def _step(self, step: OpStep, site: Site, kind: Kind, parts: Number) -> Work:
        points = self.priced.points
        cut = parts if step.cut else 1
        if step.product:
            there = self._there(step)
            product = there * points.p1 * cut * self._product(step, cut)
            return Work(products=product, launches=points.p1 * cut)
        if step.attends:
            return Work(attention=self._attention(step), launches=points.p1 * points.ring)
        dims = self._dims(step.branch, routed=True)
        return Work(passes=self._moved(points.p1 * dims.moved(step) * self._bytes(step)), launches=points.p1)

    def _product(self, step: OpStep, parts: Number) -> Seconds:
        """Of one slice and part. A head is computed in 16 bits, which recipes of fewer leave as it is."""
        priced = self.priced
        precision = unquantised(priced.precision) if step.branch == "head" else priced.precision
        return rates.matmul(priced.cluster, precision, *self._dims(step.branch).product(step, parts))

    def _attention(self, step: OpStep) -> Seconds:
        """Of the own block, and of those that come round a ring, of which the mask leaves half."""
        priced, points, model = self.priced, self.priced.points, self.priced.model
        keys = keys_seen(priced.sequence, model.window, model.windowed) / points.ring
        own = rates.AttentionShape(
            batch=points.micro / points.p1, heads=model.num_heads / points.tp / (points.cp / points.ring),
            queries=priced.sequence / points.ring, keys=keys, head_size=model.core_size,
        )  # fmt: skip
        fused = np.asarray(priced.options.fused_attention) & (np.asarray(model.attention_dropout) == 0)
        backward = step.attends == "backward"

        def seconds(shape: rates.AttentionShape) -> Seconds:
            return rates.attention(priced.cluster, priced.precision, shape, backward=backward, fused=fused)

        blocks = seconds(own)
        if self.graph.attention and self.graph.attention.ring > 1:
            blocks = blocks + (points.ring - 1) * seconds(replace(own, keys=keys / 2, causal=False))
        return points.p1 * blocks * priced.options.attention_work

    def _bytes(self, step: OpStep) -> float:
        """Moved for each number: by a fused kernel, each is read or written once."""
        told = self.priced.cluster.efficiency
        ends = {"embed": ROW_BYTES, "head": told.logit_bytes.value}
        return ends.get(step.branch, self.priced.itemsize * told.elementwise.value)

    def _moved(self, nbytes: Any) -> Seconds:
        return rates.memory_bound(self.priced.cluster, nbytes)

    # ---- sizes ----

    def _there(self, step: OpStep) -> Number:
        """0 where all of the MLP's width is routed experts', or attention's first weights are latent, which
        are priced apart; else 1."""
        model, second = self.priced.model, step.kind in SECONDS or (step.kind == Kind.WEIGHT_GRAD and not step.weight)
        if step.branch == "mlp":
            return np.asarray(model.whole_ffn) > 0
        return 1 if second or step.branch != "attn" else np.asarray(model.kv_lora_rank) == 0

    def _dims(self, branch: Branch, *, routed: bool = False) -> Dims:
        """Of one slice. routed: with the rows that go to experts, for what is computed of each row."""
        key = (branch, routed)
        if key not in self._known:
            self._known[key] = self._find_dims(branch, routed=routed)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Branch, bool], Dims]:
        return {}

    def _find_dims(self, branch: Branch, *, routed: bool) -> Dims:
        priced, points, model = self.priced, self.priced.points, self.priced.model
        stream = model.hidden / np.where(points.sequence_parallel > 0, points.tp, 1)
        found = Dims(
            T=priced.tokens / points.p1, H=model.hidden, S=stream, R=stream * priced.options.norm_work,
            V=np.ceil(model.vocab / points.tp), N=model.normed_within / points.tp,
        )  # fmt: skip
        if branch not in ("attn", "mlp"):
            return found
        letters = self._routed if routed and branch == "mlp" else model.letters
        first, last = widths(branch, letters, points.tp, model.kv_ranks(points.tp))
        return replace(found, Z=np.maximum(1, first), O=np.maximum(1, last))

    @property
    def _routed(self) -> Letters:
        """Letters of a model whose MLP is as wide as what a token passes."""
        model = self.priced.model
        return replace(model.letters, F=model.whole_ffn + model.expert_share * model.routed * model.expert_ffn)

    @property
    def _heads(self) -> Letters:
        """Letters of a model whose queries, keys and values are as wide as attention's core has them."""
        model, size = self.priced.model, self.priced.model.core_size
        return replace(model.letters, D=size, Q=model.num_heads * size, K=model.num_kv_heads * size)

    def _sizes(self, site: Site, kind: Kind) -> SendSizes:
        """Of one op of one slice."""
        priced, points, model = self.priced, self.priced.points, self.priced.model
        tokens, parts = priced.tokens / points.p1, self.parts(site, kind)
        ulysses = points.cp // points.ring
        there, back, block = exchanged(self._heads, tokens * priced.itemsize, tp=points.tp, ulysses=ulysses)
        return SendSizes(
            tokens=tokens, rows=tokens / parts if kind == Kind.FIRST_GRAD else tokens,
            row=model.hidden * priced.itemsize, columns=points.p2 if site in LAYERS else 1, tp=points.tp,
            words=np.ceil(model.vocab / points.tp), number=max(4, priced.itemsize), there=there, back=back,
            block=block,
        )  # fmt: skip

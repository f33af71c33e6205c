"""Seconds of segment ops and their collectives on a described cluster, for the closed form and the
simulation.

An op's price is the sum of its rows in ``step.ops``, at the rates of ``step.seconds.rates``: matrix
products of its slice and part, attention block by block, memory passes. The segment graph defines
which ops and collectives exist. Arrays define how often each runs (slices p1, parts p2, blocks of a
ring). So the same code prices one strategy or a million of one structure, with the launches of real
runs (docs/adr/0044).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import ITEMSIZE, QUANTISED, Precision, unquantised
from plait.core.model.spec import mean_keys
from plait.core.model.weights import Dimensions, widths
from plait.core.parallel.strategy import Recompute
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, StrategyTable, distinct, groups
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.ops import (
    UNLISTED_PATHS,
    Dims,
    Kind,
    Number,
    OpStep,
    Path,
    SendSizes,
    exchanged,
    parts_of,
    paths_of,
    send_of,
    steps_of,
)  # fmt: skip
from plait.core.step.seconds import rates
from plait.core.step.seconds.rates import Seconds
from plait.core.step.segments import LAYERS, Collective, SegmentGraph, SegmentOp, SharedAttention, Site

SECONDS = (Kind.ROW_FORWARD, Kind.ROW_DGRAD)
ROW_BYTES = 4
"""Bytes moved for each number in a row of the embedding."""
LATENT: tuple[Literal["A", "B", "B+R", "Q+R", "2Q"], ...] = ("A", "B", "B+R", "Q+R", "2Q")
"""Widths of multi-head latent attention; the last two are divided among heads."""
TILE = 128
"""Rows in a tile of a matrix product (CUTLASS's usual): the last tile of each expert is half empty
on average."""
SORT_PASSES = 3, 5
"""Reads and writes of each number of a routed row, as a third of a step's total: level 1 counts a
forward three times. First value: a token is sent once (``dispatch_once``); second: a token is sent
to each of its experts. Second case: the forward sorts rows by expert before sending and by owner on
arrival, undoes both sorts, and adds the rows up (6). The backward does the same, and the router's
gradient reads the summed rows (8). First case: no sort before sending (4, 5)."""
GROUPED_NARROW = 0.85
"""Efficiency of grouped products in fp8, mxfp8 and nvfp4, as a fraction of the dense layers'
efficiency: each expert's rows are quantised separately. Derived from 14 steps of Grok-1 in fp8
(NVIDIA dgxc-benchmarking, H100). Without this factor they are predicted 7 % too fast on average,
while 14 steps in bf16 are predicted 3 % too slow."""
ROUTER_BYTES = 32
"""Bytes moved for each router score of a token: logits and softmax in fp32, the top-k selection,
the mask."""
NO_COLLECTIVES = OVERLAPS.index("no-communication")


class Work(NamedTuple):
    """Seconds of computation by category, and launches: the number of kernels the host submits (one
    per row of ``step.ops.STEPS``)."""

    products: Any = 0.0
    attention: Any = 0.0
    passes: Any = 0.0
    launches: Any = 0.0

    @property
    def seconds(self) -> Seconds:
        """Total seconds of computation."""
        return self.products + self.attention + self.passes

    def plus(self, other: Work) -> Work:
        """Return the sum of both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Priced:
    """Strategies of one model on one cluster. Shapes, sequence and options are numbers, or arrays
    as long as ``points``. sequence: tokens."""

    model: Shapes
    points: StrategyTable
    cluster: Cluster
    sequence: Any
    precision: Precision
    options: Options

    @cached_property
    def tokens(self) -> Seconds:
        """Tokens of a micro-batch that a rank's layers process; ranks of one tensor-parallel group
        process the same tokens."""
        return self.points.micro * self.sequence / self.points.cp

    @property
    def listed(self) -> Any:
        """True if stages run instruction lists that cover all of the model's computation."""
        beside = np.asarray(self.model.experts) + np.asarray(self.model.kv_lora_rank)
        return np.asarray(self.options.in_lists) & (beside == 0)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's compute precision."""
        return ITEMSIZE[self.precision]

    def take(self, which: Any) -> Priced:
        """Return the strategies at indices ``which``."""
        told: dict[str, Any] = {name: _cut(getattr(self, name), which) for name in ("model", "sequence", "options")}
        return replace(self, points=self.points.take(which), **told)

    def structures(self) -> Iterator[tuple[Any, OpSeconds]]:
        """Yield (indices, prices) for each group of strategies whose segment graphs have the same
        structure."""
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
    """Return the selected part of an array, or of a record's arrays; return a number unchanged."""
    if isinstance(value, Shapes | Options):
        return replace(value, **{f.name: _cut(getattr(value, f.name), which) for f in fields(value)})
    return value[which] if np.ndim(value) else value


@dataclass(frozen=True)
class OpSeconds:
    """Prices of the ops of one micro-batch, summed over slices and parts.

    graph: one layer and both ends of the model, with the structure that all of ``priced`` share.
    The arrays of ``priced`` define the numbers of slices, parts and ranks.
    """

    graph: SegmentGraph
    priced: Priced

    def compute(self, site: Site, kind: Kind) -> Work:
        """Return the computation of all ops of one kind at a site."""
        found, parts = Work(), self.parts(site, kind)
        added = kind == Kind.NORM_RECOMPUTE and self.graph.readds_stream(site, 0)  # M then repeats all of N
        for branch in ("", *paths_of(site)):
            for step in self._steps(branch, Kind.NORM if added else kind):
                found = found.plus(self._step(step, site, kind, parts))
        return found

    def sent(self, site: Site, kind: Kind) -> Seconds:
        """Return the seconds of these ops' collectives, run one after the other; 0 if they have
        none."""
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
        """Return the number of collectives of these ops."""
        collective = self._collective(site, kind)
        if collective is None:
            return 0
        return self.priced.points.p1 * (1 if collective == "all_to_all" else self.parts(site, kind))

    def _collective(self, site: Site, kind: Kind) -> Collective | None:
        """Return the collective that follows the op, or the last of its parts; None if there is
        none."""
        last = self.graph.parts(site, kind) - 1
        return self.graph.collective(SegmentOp(site, 0, kind, 0, last))

    # ---- work outside instruction lists: latent attention's first weights, and experts ----

    def unlisted(self, *kinds: Kind, branches: Sequence[Path] = UNLISTED_PATHS) -> Work:
        """Return the computation of latent attention's first weights and of experts, as the mean
        over all layers."""
        rows = [step for kind in kinds for branch in branches for step in steps_of(branch, kind)]
        return reduce(Work.plus, map(self._unlisted_step, rows), Work())

    def _unlisted_step(self, step: OpStep) -> Work:
        priced, model = self.priced, self.priced.model
        routes = step.branch in ("router", "experts")
        there = model.expert_share if routes else np.asarray(model.kv_lora_rank) > 0
        if not np.any(there):
            return Work()
        if step.product:
            return Work(products=there * self._unlisted_product(step))
        each = ROUTER_BYTES if step.branch == "router" else 2 * np.where(priced.options.dispatch_once, *SORT_PASSES)
        return Work(passes=there * self._moved(self._dims(step.branch).moved(step) * each))

    def _unlisted_product(self, step: OpStep) -> Seconds:
        """Return the seconds of a product for all slices.

        Grouped products of experts fill the device with the tiles of all experts; each expert's
        last tile is half full. They are never faster than reading and writing their matrices.
        """
        priced, dims = self.priced, self._dims(step.branch)
        if step.branch != "experts":
            precision = "bf16-mixed" if step.branch == "router" else priced.precision
            return rates.matmul(priced.cluster, precision, *dims.product(step))
        m, k, n = dims.product(step)
        moved = self._moved(2 * dims.groups * (m * k + k * n + m * n))
        m, k, n = replace(dims, X=dims.X + TILE / 2).product(step)
        found = np.maximum(rates.matmul(priced.cluster, priced.precision, dims.groups * m, k, n), moved)
        return found / (GROUPED_NARROW if priced.precision in QUANTISED else 1)

    def exchange(self) -> Seconds:
        """Return the seconds of sending tokens to their experts, or of returning the results: one
        direction.

        Without ``dispatch_once`` (NCCL) a rank sends each routed row to its expert's owner, except
        rows for its own experts. With ``dispatch_once`` a token is sent once to each node and to
        each rank that holds one of its experts.
        """
        priced, points, model = self.priced, self.priced.points, self.priced.model
        if not model.has_experts:
            return np.zeros(len(points))
        row, cut = self._own * model.hidden * 2, np.where(priced.options.experts_whole, 1, points.tp)
        rows = send_of("mlp", Kind.ROUTER).nbytes(self._sizes("mlp", Kind.ROUTER))
        sent = rates.collective(priced.cluster, "all_to_all", rows * points.ep, points.ep, cut)
        told = {"experts": np.maximum(1, model.experts), "per_token": model.routed}
        once = rates.dispatch(priced.cluster, row, points.ep, cut, **told)
        return model.expert_share * np.where(priced.options.dispatch_once, once, sent)

    @property
    def _own(self) -> Seconds:
        """Tokens of the residual stream that a rank's norms process."""
        points = self.priced.points
        return self.priced.tokens / np.where(points.sequence_parallel > 0, points.tp, 1)

    def _unlisted_dims(self, branch: Path) -> Dims:
        priced, points, model = self.priced, self.priced.points, self.priced.model
        whole, groups = priced.options.experts_whole, np.maximum(1, model.experts / points.ep)
        inner = model.expert_ffn / np.where(whole, 1, points.tp)
        letters = {name: np.maximum(1, model.letters.size(name)) for name in LATENT}
        wide = {name: np.maximum(1, letters[name] / points.tp) for name in LATENT[3:]}
        tokens = priced.tokens if branch == "expand" else self._own * (model.routed if branch == "experts" else 1)
        rows = priced.tokens / np.where(whole, points.tp, 1) * model.routed / groups
        return Dims(
            T=tokens, H=model.hidden, E=np.maximum(1, model.experts), groups=groups, X=np.maximum(1, rows),
            Z=np.maximum(1, inner * (1 + model.gated)), O=np.maximum(1, inner), latent=letters | wide,
        )  # fmt: skip

    # ---- computation ----

    def parts(self, site: Site, kind: Kind) -> Number:
        """Return the number of parts of an op."""
        points = self.priced.points
        ring = points.ring if self.graph.shared(site) else 1
        return parts_of(site, kind, p2=points.p2, flat=points.sequence_parallel, ring=ring)

    def _steps(self, branch: Path, kind: Kind) -> tuple[OpStep, ...]:
        """Return the rows of ``step.ops.STEPS`` that ops of this kind compute."""
        shared = self.graph.attention
        if kind == Kind.CORE_RECOMPUTE and shared and shared.ring > 1:  # results of ring attention are kept
            return ()
        return steps_of(branch, kind, shared=shared is not None, selective=self.graph.recompute == "selective")

    def _step(self, step: OpStep, site: Site, kind: Kind, parts: Number) -> Work:
        points = self.priced.points
        cut = parts if step.cut else 1
        if step.product:
            there = self._listed_factor(step)
            product = there * points.p1 * cut * self._product(step, cut)
            return Work(products=product, launches=points.p1 * cut)
        if step.attends:
            return Work(attention=self._attention(step), launches=points.p1 * points.ring)
        dims = self._dims(step.branch, routed=True)
        return Work(passes=self._moved(points.p1 * dims.moved(step) * self._bytes(step)), launches=points.p1)

    def _product(self, step: OpStep, parts: Number) -> Seconds:
        """Return the seconds of a product for one slice and part. The head runs in 16 bits:
        quantised recipes leave it unquantised."""
        priced = self.priced
        precision = unquantised(priced.precision) if step.branch == "head" else priced.precision
        return rates.matmul(priced.cluster, precision, *self._dims(step.branch).product(step, parts))

    def _attention(self, step: OpStep) -> Seconds:
        """Return the seconds of attention to the rank's own block and to blocks that arrive along
        the ring, half of which the causal mask removes."""
        priced, points, model = self.priced, self.priced.points, self.priced.model
        keys = mean_keys(priced.sequence, model.window, model.window_share) / points.ring
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
        """Return the bytes moved for each number; a fused kernel reads or writes each number
        once."""
        told = self.priced.cluster.efficiency
        ends = {"embed": ROW_BYTES, "head": told.logit_bytes.value}
        return ends.get(step.branch, self.priced.itemsize * told.elementwise.value)

    def _moved(self, nbytes: Any) -> Seconds:
        return rates.memory_bound(self.priced.cluster, nbytes)

    # ---- sizes ----

    def _listed_factor(self, step: OpStep) -> Number:
        """Return 0 for products that ``unlisted`` prices instead, else 1: those of an MLP whose
        full width is routed experts, and of latent attention's first weights."""
        model, second = self.priced.model, step.kind in SECONDS or (step.kind == Kind.WGRAD and not step.weight)
        if step.branch == "mlp":
            return np.asarray(model.whole_ffn) > 0
        return 1 if second or step.branch != "attn" else np.asarray(model.kv_lora_rank) == 0

    def _dims(self, branch: Path, *, routed: bool = False) -> Dims:
        """Return the dimensions of one slice. routed: include rows for experts, for elementwise
        work done on each row."""
        key = (branch, routed)
        if key not in self._known:
            self._known[key] = self._find_dims(branch, routed=routed)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Path, bool], Dims]:
        return {}

    def _find_dims(self, branch: Path, *, routed: bool) -> Dims:
        priced, points, model = self.priced, self.priced.points, self.priced.model
        stream = model.hidden / np.where(points.sequence_parallel > 0, points.tp, 1)
        found = Dims(
            T=priced.tokens / points.p1, H=model.hidden, S=stream, R=stream * priced.options.norm_work,
            V=np.ceil(model.vocab / points.tp), N=model.normed_within / points.tp,
        )  # fmt: skip
        if branch not in ("attn", "mlp"):
            return self._unlisted_dims(branch) if branch in UNLISTED_PATHS else found
        letters = self._routed if routed and branch == "mlp" else model.letters
        first, last = widths(branch, letters, points.tp, model.kv_ranks(points.tp))
        return replace(found, Z=np.maximum(1, first), O=np.maximum(1, last))

    @property
    def _routed(self) -> Dimensions:
        """Sizes of the model by letter, with an MLP as wide as the dense and expert width that one
        token passes through."""
        model = self.priced.model
        return replace(model.letters, F=model.whole_ffn + model.expert_share * model.routed * model.expert_ffn)

    @property
    def _heads(self) -> Dimensions:
        """Sizes of the model by letter, with queries, keys and values as wide as the attention core
        uses them."""
        model, size = self.priced.model, self.priced.model.core_size
        return replace(model.letters, D=size, Q=model.num_heads * size, K=model.num_kv_heads * size)

    def _sizes(self, site: Site, kind: Kind) -> SendSizes:
        """Return the message sizes of one op of one slice."""
        priced, points, model = self.priced, self.priced.points, self.priced.model
        tokens, parts = priced.tokens / points.p1, self.parts(site, kind)
        ulysses = points.cp // points.ring
        there, back, block = exchanged(self._heads, tokens * priced.itemsize, tp=points.tp, ulysses=ulysses)
        return SendSizes(
            tokens=tokens, rows=tokens / parts if kind == Kind.COLUMN_DGRAD else tokens,
            row=model.hidden * priced.itemsize, columns=points.p2 if site in LAYERS else 1, tp=points.tp,
            words=np.ceil(model.vocab / points.tp), number=max(4, priced.itemsize), qkv_bytes=there,
            attention_bytes=back,
            kv_bytes=block, routed=self._own * model.hidden * 2 * model.routed,
        )  # fmt: skip

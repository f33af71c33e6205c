"""The inside of a stage as data: its ops per slice, their dependencies, and the collectives that
their results need.

A transformer is a chain of *segments*: ``embed``, then ``attn0, mlp0, attn1, ...``, then ``head``.
A parallel block has attention and MLP side by side: segments ``block0, block1, ...`` contain both,
with half the collectives. A pipeline stage is a part of the chain. It begins with ``enter`` if the
residual stream comes from another stage, and ends with ``leave`` if the stream goes to another
stage. A U-Transformer has ``down0, down1, ...`` and ``up1, up0`` between layers, which change the
sequence's length; the input of a down is added in the up of the same number (a skip connection).

Segments are cut into ops by hand (activations are detached). An op exists once for every slice of
the batch:

    N  norm       add the previous segment's output to the residual stream, normalise (or, in down and up,
                  change its length)
    F  forward    first weight (column-parallel) and what follows it: attention core, activation, vocabulary
                  softmax
    R  row        second weight (row-parallel), one op per column part; its partial sum is reduced
    L  loss       combine the softmax statistics of the vocabulary shards (head only)
    M  norm recomputed, if the forward did not keep its output (recomputation)
    A  first weight and core recomputed ("again"); with selective recomputation only the activation function
    Y  R of attention recomputed, if only the stream before every layer is kept; the MLP's M then adds up
    D  input gradient through the second weight and the core
    C  input gradient of the first weight, one op per part; its partial sum is reduced
    W  weight gradient: part 0 of the second weight, part 1 of the first (embed and head: part 0 only; block:
       parts 2 and 3 of the MLP's)
    J  backward of N ("join")

With context parallelism, attention has more kinds and collectives of its own: ``attention_ops``.

With all-reduce tensor parallelism R and C have collectives (the embedding's R gathers rows
instead). With sequence parallelism N, M and J have all-gathers, and R and C have reduce-scatters. R
is recomputed only if one stream per layer is kept; otherwise the result of its collective is kept
as part of the residual stream. M and A may run as soon as the backward of the following segment has
released its own activations, so that they overlap that segment's collective.

A micro-batch runs whole (phase ``step``), or in the phases of a pipeline schedule: ``F`` forward,
``B`` backward; or, instead of ``B``, ``I`` for the gradients that other stages wait for and ``W``
for the weight gradients. The order is a list of actions (``orders.overlap``), the same on every
rank, so collectives run in the same order everywhere. Any legal order adds into each weight's
gradient slice by slice: results do not depend on the order.

Text form, one action per word: ``attn3.R0.1`` runs part 1 of R of slice 0 in layer 3's attention,
``>attn3.R0.1`` starts the collective of its result, ``<attn3.R0.1`` waits for that collective.

>>> print(*SegmentGraph(num_layers=1, communicates=False).ops()[:4])
embed.R0 attn0.N0 attn0.F0 attn0.R0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, cast

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Recompute, Strategy
from plait.core.step.attention_ops import SharedAttention as SharedAttention
from plait.core.step.expert_ops import NEEDS, ExpertOps
from plait.core.step.ops import AGAIN_KINDS, ATTENDS, FORWARD_KINDS, orders_of, parts_of
from plait.core.step.ops import LAYERS as LAYERS
from plait.core.step.ops import Kind as Kind
from plait.core.step.schedule import Phase as Phase
from plait.core.step.stages import Stage

Site = Literal["embed", "enter", "attn", "mlp", "moe", "block", "down", "up", "head", "leave"]
Verb = Literal["run", "start", "wait"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "rotate"]

SIGNS: dict[Verb, str] = {"run": "", "start": ">", "wait": "<"}
"""Prefix of an op's name for each verb."""


class SegmentOp(NamedTuple):
    """One computation of one slice in one segment. layer: counted from the model's first; the level
    for down and up; 0 at the ends."""

    site: Site
    layer: int
    kind: Kind
    slice: int
    part: int = 0

    @property
    def forward(self) -> bool:
        """True if the op belongs to the forward pass."""
        return self.kind in FORWARD_KINDS

    def __str__(self) -> str:
        segment = self.site if self.site in _ENDS else f"{self.site}{self.layer}"
        return f"{segment}.{self.kind}{self.slice}" + (f".{self.part}" if self.part else "")


class Action(NamedTuple):
    """Run an op, start the collective of its result, or wait for that collective."""

    verb: Verb
    op: SegmentOp

    def __str__(self) -> str:
        return SIGNS[self.verb] + str(self.op)


class Need(NamedTuple):
    """An op that must run first. collective: True if its collective must be awaited first too."""

    op: SegmentOp
    collective: bool = False


@dataclass(frozen=True, kw_only=True)
class SegmentGraph:
    """All ops of one micro-batch on one stage in one phase, and their dependencies. Ops of other
    phases and other stages count as done.

    communicates: False if tp = 1: no tensor-parallel collectives. backward: False for evaluation.
    first_layer, num_layers: the stage's layers. embeds, heads: True if the stage has the model's
    beginning or end. resampling, parallel_block: as in the model. recompute: which activations are
    recomputed, in the stage's first ``recomputed`` layers (None: in all). attention: its context
    parallelism, or None.
    """

    num_layers: int
    p1: int = 1
    p2: int = 1
    sequence_parallel: bool = False
    communicates: bool = True
    backward: bool = True
    first_layer: int = 0
    embeds: bool = True
    heads: bool = True
    resampling: tuple[tuple[int, Literal["down", "up"], int], ...] = ()
    recompute: Recompute = "none"
    recomputed: int | None = None
    parallel_block: bool = False
    phase: Phase = "step"
    attention: SharedAttention | None = None
    experts: ExpertOps | None = None

    @staticmethod
    def of(model: ModelSpec, strategy: Strategy, stage: Stage, *, backward: bool = True) -> SegmentGraph:
        """Return the graph of a stage of a model under a strategy."""
        return SegmentGraph(
            first_layer=stage.first_layer,
            num_layers=stage.num_layers,
            embeds=stage.embeds,
            heads=stage.heads,
            backward=backward,
            resampling=model.resampling,
            parallel_block=model.parallel_block,
            p1=strategy.p1,
            p2=strategy.p2,
            sequence_parallel=strategy.sequence_parallel,
            communicates=strategy.tp > 1,
            recompute=strategy.recompute,
            recomputed=strategy.recompute_layers,
            attention=SharedAttention(strategy.cp // strategy.ring, strategy.ring) if strategy.cp > 1 else None,
            experts=expert_ops(model, strategy, stage),
        )

    def moved(self, layers: int) -> SegmentGraph:
        """Return the same graph with layers whose numbers are higher by ``layers``."""
        routed = self.experts and replace(self.experts, layers=tuple(at + layers for at in self.experts.layers))
        return replace(self, first_layer=self.first_layer + layers, experts=routed)

    @property
    def sends(self) -> bool:
        """True if any op of the stage communicates."""
        return self.communicates or self.attention is not None or bool(self.experts and self.experts.ep > 1)

    def shared(self, site: str) -> SharedAttention | None:
        """Return the context parallelism of a segment's attention, or None."""
        return self.attention if site in ATTENDS else None

    @property
    def last_layer(self) -> int:
        """The stage's last layer."""
        return self.first_layer + self.num_layers - 1

    def level(self, model: ModelSpec, site: str, layer: int) -> int:
        """Return how often the sequence has been halved in a segment: for a down its input, for an
        up its output."""
        match site:
            case "embed" | "head":
                return 0
            case "down" | "up":
                return layer
            case "enter":
                return model.level(self.first_layer - 1)
            case "leave":
                return model.level(self.last_layer)
            case _:
                return model.level(layer)

    @cached_property
    def segments(self) -> tuple[tuple[Site, int], ...]:
        """The stage's segments (site, layer) in forward order."""
        inner: list[tuple[str, int]] = []
        for layer in range(self.first_layer, self.first_layer + self.num_layers):
            inner += [(site, level) for before, site, level in self.resampling if before == layer]
            second = "moe" if self.experts and layer in self.experts.layers else "mlp"
            inner += [("block", layer)] if self.parallel_block else [("attn", layer), (second, layer)]
        ends = ("embed" if self.embeds else "enter", 0), ("head" if self.heads else "leave", 0)
        return cast("tuple[tuple[Site, int], ...]", (ends[0], *inner, ends[1]))

    def parts(self, site: Site, kind: Kind) -> int:
        """Return the number of parts of an op."""
        if site == "moe" and kind == Kind.WGRAD and self.experts:
            return self.experts.weights
        shared = self.shared(site)
        return parts_of(site, kind, p2=self.p2, flat=int(self.sequence_parallel), ring=shared.ring if shared else 1)

    def kinds(self, site: Site, layer: int) -> tuple[Kind, ...]:
        """Return the op kinds of a segment in this phase, in the order in which a single slice
        would run them."""
        forward, backward = _KINDS[site]
        if site == "moe" and self.experts:
            forward, backward = self.experts.forward, self.experts.backward
        if shared := self.shared(site):
            forward, backward = (*forward[:1], *shared.forward, *forward[2:]), (*shared.backward, *backward[1:])
        every = forward + (self.recomputed_kinds(site, layer) + backward) * self.backward
        return tuple(kind for kind in every if kind in _PHASES[self.phase])

    def recomputed_kinds(self, site: Site, layer: int) -> tuple[Kind, ...]:
        """Return the recomputation kinds that run before a segment's backward, because only their
        inputs are kept.

        Selective recomputation runs only kinds without a matrix product or a collective. It never
        recomputes attention, whose kernels keep little.
        """
        exempt = self.recomputed is not None and layer - self.first_layer >= self.recomputed
        if not self.backward or site not in LAYERS or exempt:
            return ()
        if self.recompute == "selective":
            return (Kind.NORM_RECOMPUTE,) * (not self.sequence_parallel) + (Kind.COLUMN_RECOMPUTE,) * (site != "attn")
        if self.recompute == "none":
            return ()
        if site == "moe":
            return Kind.NORM_RECOMPUTE, Kind.DISPATCH_RECOMPUTE, Kind.COLUMN_RECOMPUTE
        core = (Kind.CORE_RECOMPUTE,) if self.shared(site) else ()
        second = (Kind.ROW_RECOMPUTE,) if self.recompute == "layer" and site == "attn" else ()
        return Kind.NORM_RECOMPUTE, Kind.COLUMN_RECOMPUTE, *core, *second

    def readds_stream(self, site: Site, layer: int) -> bool:
        """True if a segment's M also adds up its residual stream again, which was not kept: an MLP
        after attention whose R is recomputed."""
        return site in ("mlp", "moe") and Kind.ROW_RECOMPUTE in self.recomputed_kinds("attn", layer)

    def collective(self, op: SegmentOp) -> Collective | None:
        """Return the collective on the result of ``op``, or None."""
        if (shared := self.shared(op.site)) and (
            found := shared.collective(
                op.kind, op.part, again=Kind.CORE_RECOMPUTE in self.recomputed_kinds(op.site, op.layer)
            )
        ):
            return found
        if op.site == "moe" and self.experts and (exchange := self.experts.collective(op.kind)):
            return exchange
        if not self.communicates:
            return None
        if op.kind in _REDUCED:
            if op.site == "embed":  # the distinct rows of the slice's tokens: at most half of a reduction's bytes
                return "all_gather"
            return "reduce_scatter" if self.sequence_parallel else "all_reduce"
        if op.site == "head" and op.kind == Kind.COLUMN_FORWARD:
            return "all_gather"  # per token: maximum, sum of exponentials, the target's logit
        # At a stage's end each rank passes on its own shard of the sequence.
        reads = op.kind in _READS and op.site != "leave"
        if not self.sequence_parallel or not (reads or op.kind == Kind.NORM_BACKWARD):
            return None
        return "all_gather" if reads or self.before(op)[0] != "enter" else None

    def ops(self) -> list[SegmentOp]:
        """Return every op once, in a legal order (segment by segment, slice by slice)."""
        inside: list[tuple[Site, int, list[tuple[Kind, int]]]] = []
        for site, layer in self.segments:
            kinds = self.kinds(site, layer)
            chain: list[tuple[Kind, int]] = [(kind, part) for kind in kinds for part in range(self.parts(site, kind))]
            if shared := self.shared(site):
                chain = shared.sorted(chain)
            inside.append((site, layer, chain))
        back = list[tuple[Site, int, list[tuple[Kind, int]]]]()
        for index in reversed(range(len(inside))):
            site, layer, chain = inside[index]
            if self.readds_stream(site, layer):  # the whole layer is recomputed, then its backward runs
                first = inside[index - 1]
                back.append((first[0], first[1], [one for one in first[2] if one[0] in AGAIN_KINDS]))
            whole = Kind.ROW_RECOMPUTE in self.recomputed_kinds(site, layer)
            back.append((site, layer, [one for one in chain if not whole or one[0] not in AGAIN_KINDS]))
        return [
            SegmentOp(site, layer, kind, at, part)
            for forward, chains in ((True, inside), (False, back))
            for site, layer, kinds in chains
            for at in range(self.p1)
            for kind, part in kinds
            if (kind in FORWARD_KINDS) == forward
        ]

    def before(self, op: SegmentOp) -> tuple[Site, int]:
        """Return (site, layer) of the segment whose output ``op``'s segment reads."""
        return self.segments[self._index(op) - 1]

    def after(self, op: SegmentOp) -> tuple[Site, int]:
        """Return (site, layer) of the segment that reads the output of ``op``'s segment."""
        return self.segments[self._index(op) + 1]

    def _whole_layer(self, op: SegmentOp) -> bool:
        """True if the op is recomputed for the following MLP too (whole-layer recomputation)."""
        return op.kind != Kind.RING_SEND_BACKWARD and Kind.ROW_RECOMPUTE in self.recomputed_kinds(op.site, op.layer)

    def _index(self, op: SegmentOp) -> int:
        return self.segment_index[op.site, op.layer]

    @cached_property
    def segment_index(self) -> dict[tuple[Site, int], int]:
        """Index of each segment in the chain."""
        return {segment: index for index, segment in enumerate(self.segments)}

    def needs(self, op: SegmentOp) -> list[Need]:
        """Return the dependencies of ``op``: the data that it reads, and the constraints of
        ``AFTER``."""
        at = op.slice
        needs: list[Need] = []

        def need(segment: tuple[Site, int], kind: Kind) -> None:
            exists = segment in self.segment_index and kind in self.kinds(*segment)
            for part in range(self.parts(segment[0], kind)) if exists else ():
                source = SegmentOp(*segment, kind, at, part)
                needs.append(Need(source, self.collective(source) is not None))

        here = (op.site, op.layer)
        if shared := self.shared(op.site):
            again = Kind.CORE_RECOMPUTE in self.recomputed_kinds(*here)
            for kind, part, awaited in shared.needs(op.kind, op.part, again=again):
                source = op._replace(kind=kind, part=part)
                if kind in self.kinds(*here):
                    needs.append(Need(source, awaited and self.collective(source) is not None))
        if op.site == "moe":
            self._need_of_experts(op, need, needs)
        match op.kind:
            case Kind.NORM:
                before = self.before(op)
                need(before, Kind.ROW_FORWARD if Kind.ROW_FORWARD in _KINDS[before[0]][0] else Kind.NORM)
                if op.site == "up":
                    need(("down", op.layer), Kind.NORM)
            case Kind.COLUMN_FORWARD:
                need(here, Kind.NORM)
            case Kind.ROW_FORWARD if op.site != "embed" and not shared:
                need(here, Kind.COLUMN_FORWARD)
            case Kind.LOSS:
                need(here, Kind.COLUMN_FORWARD)
            case Kind.NORM_RECOMPUTE if self.readds_stream(*here):
                need(self.before(op), Kind.ROW_RECOMPUTE)
            case Kind.COLUMN_RECOMPUTE:
                need(here, Kind.NORM_RECOMPUTE)
            case Kind.ROW_RECOMPUTE if not shared:
                need(here, Kind.COLUMN_RECOMPUTE)
            case Kind.ROW_DGRAD:
                need(here, Kind.NORM_RECOMPUTE)
                need(here, Kind.COLUMN_RECOMPUTE)
                need(here, Kind.ROW_RECOMPUTE)
                need(self.after(op), Kind.NORM_BACKWARD)
            case Kind.COLUMN_DGRAD if not shared:
                need(here, Kind.LOSS if op.site == "head" else Kind.ROW_DGRAD)
            case Kind.NORM_BACKWARD if op.site in ("down", "up"):
                need(self.after(op), Kind.NORM_BACKWARD)
                if op.site == "down":
                    need(("up", op.layer), Kind.NORM_BACKWARD)
            case Kind.NORM_BACKWARD:
                need(here, Kind.COLUMN_DGRAD)
            case Kind.WGRAD if op.site == "head":
                need(here, Kind.LOSS)
            case Kind.WGRAD if op.site == "embed":
                need(self.after(op), Kind.NORM_BACKWARD)
            case Kind.WGRAD if not shared:
                need(here, Kind.ROW_DGRAD)
            case _:
                pass
        for of in orders_of(op.site, op.kind):
            if of == "behind":
                behind = self.segments[self._index(op) + 1 + self._whole_layer(op)]
                ends = Kind.CORE_BACKWARD if self.shared(behind[0]) else Kind.ROW_DGRAD
                ends = Kind.EXPERTS_BACKWARD if behind[0] == "moe" else ends
                other = Kind.LOSS if behind[0] == "head" else Kind.NORM_BACKWARD
                need(behind, ends if Kind.ROW_DGRAD in _KINDS[behind[0]][1] else other)
            elif of == "part" and op.part:
                needs.append(Need(op._replace(part=op.part - 1)))
            elif of == "slice" and at:
                needs.append(Need(op._replace(slice=at - 1)))
            elif of == "look-up" and self.embeds:
                needs.append(Need(SegmentOp("embed", 0, Kind.ROW_FORWARD, self.p1 - 1)))
            elif of == "head" and self.heads:
                needs.append(Need(SegmentOp("head", 0, Kind.WGRAD, self.p1 - 1)))
        return needs

    def _need_of_experts(
        self, op: SegmentOp, need: Callable[[tuple[Site, int], Kind], None], needs: list[Need]
    ) -> None:
        """Add the dependencies of an expert layer's op on ops of the same layer."""
        here = (op.site, op.layer)
        for kind in NEEDS.get(op.kind, ()):
            need(here, kind)
        if op.kind == Kind.WGRAD and op.part < 2:
            need(here, Kind.EXPERTS_BACKWARD)
        counts = Kind.ROUTE_COUNTS
        if op.kind == Kind.ROUTER_BACKWARD and self.experts and self.experts.waits and counts in self.kinds(*here):
            every = [op._replace(kind=counts, slice=at) for at in range(self.p1)]
            needs += [Need(one, self.collective(one) is not None) for one in every]


def expert_ops(model: ModelSpec, strategy: Strategy, stage: Stage) -> ExpertOps | None:
    """Return the ops of a stage's expert layers; None for a model without experts."""
    if model.experts is None:
        return None
    experts = model.experts
    return ExpertOps(
        layers=tuple(filter(experts.at, stage.layers)),
        ep=strategy.ep,
        counted=strategy.ep > 1 or (experts.balance == "dp" and experts.balance_loss > 0),
        split=strategy.sequence_ranks > 1 and (experts.capacity > 0 or experts.balance_loss > 0),
        shared=experts.shared > 0,
        waits=experts.balance != "sequence" and experts.balance_loss > 0,
        awaited=strategy.awaits_experts,
    )


_GRADS = (Kind.COLUMN_DGRAD, Kind.WGRAD, Kind.NORM_BACKWARD)
_KINDS: dict[Site, tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    "embed": ((Kind.ROW_FORWARD,), (Kind.WGRAD,)),
    "enter": ((), ()),
    **dict.fromkeys(LAYERS, ((Kind.NORM, Kind.COLUMN_FORWARD, Kind.ROW_FORWARD), (Kind.ROW_DGRAD, *_GRADS))),
    "head": ((Kind.NORM, Kind.COLUMN_FORWARD, Kind.LOSS), _GRADS),
    **dict.fromkeys(("down", "up", "leave"), ((Kind.NORM,), (Kind.NORM_BACKWARD,))),
}
_REDUCED, _READS = (
    frozenset((Kind.ROW_FORWARD, Kind.ROW_RECOMPUTE, Kind.COLUMN_DGRAD)),
    frozenset((Kind.NORM, Kind.NORM_RECOMPUTE)),
)
_ENDS = ("embed", "enter", "head", "leave")
_PHASES: dict[Phase, frozenset[Kind]] = {
    "step": frozenset(Kind), "F": FORWARD_KINDS, "B": frozenset(Kind) - FORWARD_KINDS,
    "I": frozenset(Kind) - FORWARD_KINDS - {Kind.WGRAD}, "W": frozenset((Kind.WGRAD,)),
}  # fmt: skip


@cache
def needs_table(graph: SegmentGraph) -> dict[SegmentOp, tuple[Need, ...]]:
    """Return ``needs`` of every op of the graph."""
    ops = graph.ops()
    needs = numbered_needs(graph, ops)
    return {
        op: tuple([Need(ops[i], collective) for i, collective in each]) for op, each in zip(ops, needs, strict=True)
    }


def numbered_needs(graph: SegmentGraph, ops: Sequence[SegmentOp]) -> list[list[tuple[int, bool]]]:
    """Return ``needs`` of each of ``graph.ops()`` as (number of the op that must run first, True if
    its collective must be awaited first).

    The needs of an op in a layer are computed once for all layers whose neighbours have the same
    kinds of op: the needed ops stand equally far before it.
    """
    shapes = [(site, graph.kinds(site, layer)) for site, layer in graph.segments]
    around = [(shapes[index], *shapes[max(0, index - 1) : index + 3]) for index in range(len(shapes))]
    alike = {each: number for number, each in enumerate(dict.fromkeys(around))}
    like = {segment: alike[each] for segment, each in zip(graph.segments, around, strict=True)}
    number, found = {op: i for i, op in enumerate(ops)}, list[list[tuple[int, bool]]]()
    known: dict[tuple[int, Kind, int, int], list[tuple[int, bool]]] = {}
    for i, op in enumerate(ops):
        site, layer, kind, at, part = op
        key = like[site, layer], kind, at, part
        if site not in LAYERS or key not in known:  # other segments may need ops far away
            known[key] = [(i - number[need.op], need.collective) for need in graph.needs(op)]
        found.append([(i - back, collective) for back, collective in known[key]])
    return found

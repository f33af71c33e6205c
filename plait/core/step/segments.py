"""The inside of a stage as data: which op of which slice can run when, and which collectives its results
need.

A transformer is a chain of *segments*: ``embed``, then ``attn0, mlp0, attn1, ...``, then ``head``. In a
parallel block attention and MLP stand side by side: ``block0, block1, ...`` have both, and half the
collectives. A pipeline stage is a part of the chain. It begins with ``enter`` where the residual stream comes
from another stage, and ends with ``leave`` where it goes to one. A U-Transformer has ``down0, down1, ...``
and ``up1, up0`` between layers, which change the sequence's length; what enters a down is added in the up of
its number (a skip connection).

Segments are cut into ops by hand (activations are detached), and an op exists once for every slice of the
batch:

    N  norm       add the previous segment's output to the residual stream, normalise (or, in down and up,
                  change its length)
    F  forward    first weight (column-parallel) and what follows it: attention core, activation, vocabulary
                  softmax
    R  row        second weight (row-parallel), one op per column part; its partial sum is reduced
    L  loss       combine the softmax statistics of the vocabulary shards (head only)
    M  norm again, where the forward did not keep what it normalised (recomputation)
    A  first weight and core again, likewise ("again"); an activation alone if recomputation is selective
    Y  R of attention again, where only the stream before every layer is kept; the MLP's M then adds up
    D  input gradient through the second weight and the core
    C  input gradient of the first weight, one op per part; its partial sum is reduced
    W  weight gradient: part 0 of the second weight, part 1 of the first (embed and head: part 0 only; block:
       2 and 3 of the MLP's)
    J  backward of N ("join")

Where ranks share a sequence, attention has more kinds and collectives of its own: ``attention_ops``.

With all-reduce tensor parallelism R and C have collectives (the embedding's R gathers rows instead). With
sequence parallelism N, M and J have all-gathers, and R and C have reduce-scatters. R runs again only where
one stream a layer is kept: else what it sent over the network is, as the residual stream. M and A may run as
soon as the segment behind is done with its own activations, so that they overlap that segment's collective.

A micro-batch is run whole (phase ``step``), or in the phases that a pipeline schedule calls for: ``F``
forward, ``B`` backward; or, instead of ``B``, ``I`` for the gradients that other stages wait for and ``W``
for those of weights. What runs in which order is a list of actions (``segment_lists``), the same on every
rank; hence so is the order of collectives. Any legal order adds into each weight's gradient slice by slice:
results do not depend on the order.

Text form, one action a word: ``attn3.R0.1`` runs part 1 of R of slice 0 in layer 3's attention,
``>attn3.R0.1`` starts the collective of its result, ``<attn3.R0.1`` waits for it.

>>> print(*SegmentGraph(num_layers=1, communicates=False).ops()[:4])
embed.R0 attn0.N0 attn0.F0 attn0.R0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple, cast

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Recompute, Strategy
from plait.core.step.attention_ops import SharedAttention as SharedAttention
from plait.core.step.ops import AGAIN_KINDS, ATTENDS, FORWARD_KINDS, orders_of, parts_of
from plait.core.step.ops import LAYERS as LAYERS
from plait.core.step.ops import Kind as Kind
from plait.core.step.schedule import Phase as Phase
from plait.core.step.stages import Stage

Site = Literal["embed", "enter", "attn", "mlp", "block", "down", "up", "head", "leave"]
Verb = Literal["run", "start", "wait"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "rotate"]

SIGNS: dict[Verb, str] = {"run": "", "start": ">", "wait": "<"}
"""What a verb puts before an op's name."""


class SegmentOp(NamedTuple):
    """One computation of one slice in one segment; ``layer`` counts from the model's first (down, up: is the
    level), 0 at the ends."""

    site: Site
    layer: int
    kind: Kind
    slice: int
    part: int = 0

    @property
    def forward(self) -> bool:
        """Whether it belongs to the forward pass."""
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
    """An op that must have run before; ``collective`` says that its collective must have been awaited too."""

    op: SegmentOp
    collective: bool = False


@dataclass(frozen=True, kw_only=True)
class SegmentGraph:
    """All ops of one micro-batch on one stage in one phase, and what each needs. What another phase or
    another stage computes counts as done.

    communicates: False where tp = 1: it has no collectives. backward: False to evaluate. first_layer,
    num_layers: of the stage. embeds, heads: whether the stage has the model's beginning and end. resampling,
    parallel_block: the model's. recompute: what is not kept for the backward, in the stage's first
    ``recomputed`` layers (None: in all). attention: with whom it is shared, if with anybody.
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

    @staticmethod
    def of(model: ModelSpec, strategy: Strategy, stage: Stage, *, backward: bool = True) -> SegmentGraph:
        """The graph of a stage of a model under a strategy."""
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
        )

    @property
    def sends(self) -> bool:
        """Whether anything crosses the network inside the stage."""
        return self.communicates or self.attention is not None

    def shared(self, site: str) -> SharedAttention | None:
        """How a segment's attention is shared, if it is."""
        return self.attention if site in ATTENDS else None

    @property
    def last_layer(self) -> int:
        """The stage's last."""
        return self.first_layer + self.num_layers - 1

    def level(self, model: ModelSpec, site: str, layer: int) -> int:
        """How often the sequence has been halved where a segment works; in a down before it does so, in an up
        after."""
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
        """(site, layer) from one end of the stage to the other."""
        inner: list[tuple[str, int]] = []
        for layer in range(self.first_layer, self.first_layer + self.num_layers):
            inner += [(site, level) for before, site, level in self.resampling if before == layer]
            inner += [("block", layer)] if self.parallel_block else [("attn", layer), ("mlp", layer)]
        ends = ("embed" if self.embeds else "enter", 0), ("head" if self.heads else "leave", 0)
        return cast("tuple[tuple[Site, int], ...]", (ends[0], *inner, ends[1]))

    def parts(self, site: Site, kind: Kind) -> int:
        """How many parts an op has."""
        shared = self.shared(site)
        return parts_of(site, kind, p2=self.p2, flat=int(self.sequence_parallel), ring=shared.ring if shared else 1)

    def kinds(self, site: Site, layer: int) -> tuple[Kind, ...]:
        """The kinds of op that a segment has in this phase, in the order in which one slice alone would run
        them."""
        forward, backward = _KINDS[site]
        if shared := self.shared(site):
            forward, backward = (*forward[:1], *shared.forward, *forward[2:]), (*shared.backward, *backward[1:])
        every = forward + (self.again(site, layer) + backward) * self.backward
        return tuple(kind for kind in every if kind in _PHASES[self.phase])

    def again(self, site: Site, layer: int) -> tuple[Kind, ...]:
        """The kinds that run again before a segment's backward, because only their inputs are kept.

        Selective recomputation: those that cost neither a matrix product nor a collective. Attention never
        runs again: its kernels keep little.
        """
        exempt = self.recomputed is not None and layer - self.first_layer >= self.recomputed
        if not self.backward or site not in LAYERS or exempt:
            return ()
        if self.recompute == "selective":
            return (Kind.NORM_AGAIN,) * (not self.sequence_parallel) + (Kind.FIRST_AGAIN,) * (site != "attn")
        if self.recompute == "none":
            return ()
        core = (Kind.CORE_AGAIN,) if self.shared(site) else ()
        second = (Kind.SECOND_AGAIN,) if self.recompute == "layer" and site == "attn" else ()
        return Kind.NORM_AGAIN, Kind.FIRST_AGAIN, *core, *second

    def rejoins(self, site: Site, layer: int) -> bool:
        """Whether a segment's M adds up its stream again, which it does not keep: an MLP's behind attention
        whose R runs again."""
        return site == "mlp" and Kind.SECOND_AGAIN in self.again("attn", layer)

    def collective(self, op: SegmentOp) -> Collective | None:
        """What crosses the network with the result of ``op``, if anything does."""
        if (shared := self.shared(op.site)) and (
            found := shared.collective(op.kind, op.part, again=Kind.CORE_AGAIN in self.again(op.site, op.layer))
        ):
            return found
        if not self.communicates:
            return None
        if op.kind in _REDUCED:
            if op.site == "embed":  # the distinct rows that the slice's tokens name: at most half of a reduction
                return "all_gather"
            return "reduce_scatter" if self.sequence_parallel else "all_reduce"
        if op.site == "head" and op.kind == Kind.FIRST:
            return "all_gather"  # three numbers a token: maximum, sum of exponentials, the target's logit
        # A stage's end passes on what each rank has: its shard of the sequence.
        reads = op.kind in _READS and op.site != "leave"
        if not self.sequence_parallel or not (reads or op.kind == Kind.NORM_GRAD):
            return None
        return "all_gather" if reads or self.before(op)[0] != "enter" else None

    def ops(self) -> list[SegmentOp]:
        """Every op once, in an order that satisfies every need (segment by segment, slice by slice)."""
        inside: list[tuple[Site, int, list[tuple[Kind, int]]]] = []
        for site, layer in self.segments:
            kinds = self.kinds(site, layer)
            chain: list[tuple[Kind, int]] = [(kind, part) for kind in kinds for part in range(self.parts(site, kind))]
            if shared := self.shared(site):
                chain = shared.sorted(chain)
            inside.append((site, layer, chain))
        back = list[tuple[Site, int, list[tuple[Kind, int]]]]()
        for place in reversed(range(len(inside))):
            site, layer, chain = inside[place]
            if self.rejoins(site, layer):  # all of the layer runs again, then its backward
                first = inside[place - 1]
                back.append((first[0], first[1], [one for one in first[2] if one[0] in AGAIN_KINDS]))
            whole = Kind.SECOND_AGAIN in self.again(site, layer)
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
        """The segment that feeds ``op``'s segment."""
        return self.segments[self._index(op) - 1]

    def after(self, op: SegmentOp) -> tuple[Site, int]:
        """The segment that ``op``'s segment feeds."""
        return self.segments[self._index(op) + 1]

    def _whole_layer(self, op: SegmentOp) -> bool:
        """Whether an op runs again for the MLP after its segment, too."""
        return op.kind != Kind.ROTATE_AGAIN and Kind.SECOND_AGAIN in self.again(op.site, op.layer)

    def _index(self, op: SegmentOp) -> int:
        return self.places[op.site, op.layer]

    @cached_property
    def places(self) -> dict[tuple[Site, int], int]:
        """Where in the chain each segment stands."""
        return {segment: place for place, segment in enumerate(self.segments)}

    def needs(self, op: SegmentOp) -> list[Need]:
        """What must precede ``op``: the data that it reads, and what ``AFTER`` has."""
        at = op.slice
        needs: list[Need] = []

        def need(segment: tuple[Site, int], kind: Kind) -> None:
            exists = segment in self.places and kind in self.kinds(*segment)
            for part in range(self.parts(segment[0], kind)) if exists else ():
                source = SegmentOp(*segment, kind, at, part)
                needs.append(Need(source, self.collective(source) is not None))

        here = (op.site, op.layer)
        if shared := self.shared(op.site):
            again = Kind.CORE_AGAIN in self.again(*here)
            for kind, part, awaited in shared.needs(op.kind, op.part, again=again):
                source = op._replace(kind=kind, part=part)
                if kind in self.kinds(*here):
                    needs.append(Need(source, awaited and self.collective(source) is not None))
        match op.kind:
            case Kind.NORM:
                before = self.before(op)
                need(before, Kind.SECOND if Kind.SECOND in _KINDS[before[0]][0] else Kind.NORM)
                if op.site == "up":
                    need(("down", op.layer), Kind.NORM)
            case Kind.FIRST:
                need(here, Kind.NORM)
            case Kind.SECOND if op.site != "embed" and not shared:
                need(here, Kind.FIRST)
            case Kind.LOSS:
                need(here, Kind.FIRST)
            case Kind.NORM_AGAIN if self.rejoins(*here):
                need(self.before(op), Kind.SECOND_AGAIN)
            case Kind.FIRST_AGAIN:
                need(here, Kind.NORM_AGAIN)
            case Kind.SECOND_AGAIN if not shared:
                need(here, Kind.FIRST_AGAIN)
            case Kind.SECOND_GRAD:
                need(here, Kind.NORM_AGAIN)
                need(here, Kind.FIRST_AGAIN)
                need(here, Kind.SECOND_AGAIN)
                need(self.after(op), Kind.NORM_GRAD)
            case Kind.FIRST_GRAD if not shared:
                need(here, Kind.LOSS if op.site == "head" else Kind.SECOND_GRAD)
            case Kind.NORM_GRAD if op.site in ("down", "up"):
                need(self.after(op), Kind.NORM_GRAD)
                if op.site == "down":
                    need(("up", op.layer), Kind.NORM_GRAD)
            case Kind.NORM_GRAD:
                need(here, Kind.FIRST_GRAD)
            case Kind.WEIGHT_GRAD if op.site == "head":
                need(here, Kind.LOSS)
            case Kind.WEIGHT_GRAD if op.site == "embed":
                need(self.after(op), Kind.NORM_GRAD)
            case Kind.WEIGHT_GRAD if not shared:
                need(here, Kind.SECOND_GRAD)
            case _:
                pass
        for of in orders_of(op.site, op.kind):
            if of == "behind":
                behind = self.segments[self._index(op) + 1 + self._whole_layer(op)]
                ends = Kind.CORE_GRAD if self.shared(behind[0]) else Kind.SECOND_GRAD
                other = Kind.LOSS if behind[0] == "head" else Kind.NORM_GRAD
                need(behind, ends if Kind.SECOND_GRAD in _KINDS[behind[0]][1] else other)
            elif of == "part" and op.part:
                needs.append(Need(op._replace(part=op.part - 1)))
            elif of == "slice" and at:
                needs.append(Need(op._replace(slice=at - 1)))
            elif of == "look-up" and self.embeds:
                needs.append(Need(SegmentOp("embed", 0, Kind.SECOND, self.p1 - 1)))
            elif of == "head" and self.heads:
                needs.append(Need(SegmentOp("head", 0, Kind.WEIGHT_GRAD, self.p1 - 1)))
        return needs


_GRADS = (Kind.FIRST_GRAD, Kind.WEIGHT_GRAD, Kind.NORM_GRAD)
_KINDS: dict[Site, tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    "embed": ((Kind.SECOND,), (Kind.WEIGHT_GRAD,)),
    "enter": ((), ()),
    **dict.fromkeys(LAYERS, ((Kind.NORM, Kind.FIRST, Kind.SECOND), (Kind.SECOND_GRAD, *_GRADS))),
    "head": ((Kind.NORM, Kind.FIRST, Kind.LOSS), _GRADS),
    **dict.fromkeys(("down", "up", "leave"), ((Kind.NORM,), (Kind.NORM_GRAD,))),
}
_REDUCED, _READS = frozenset((Kind.SECOND, Kind.SECOND_AGAIN, Kind.FIRST_GRAD)), frozenset((Kind.NORM, Kind.NORM_AGAIN))
_ENDS = ("embed", "enter", "head", "leave")
_PHASES: dict[Phase, frozenset[Kind]] = {
    "step": frozenset(Kind), "F": FORWARD_KINDS, "B": frozenset(Kind) - FORWARD_KINDS,
    "I": frozenset(Kind) - FORWARD_KINDS - {Kind.WEIGHT_GRAD}, "W": frozenset((Kind.WEIGHT_GRAD,)),
}  # fmt: skip


@cache
def needs_table(graph: SegmentGraph) -> dict[SegmentOp, tuple[Need, ...]]:
    """``needs`` of every op of the graph."""
    ops = graph.ops()
    needs = numbered_needs(graph, ops)
    return {
        op: tuple([Need(ops[i], collective) for i, collective in each]) for op, each in zip(ops, needs, strict=True)
    }


def numbered_needs(graph: SegmentGraph, ops: Sequence[SegmentOp]) -> list[list[tuple[int, bool]]]:
    """``needs`` of every one of ``graph.ops()``: (number of the op that must have run, whether its collective
    must have been awaited).

    What an op of a layer needs is found once for all layers whose neighbours have the same kinds of op: these
    stand equally far before it.
    """
    shapes = [(site, graph.kinds(site, layer)) for site, layer in graph.segments]
    around = [(shapes[place], *shapes[max(0, place - 1) : place + 3]) for place in range(len(shapes))]
    alike = {each: number for number, each in enumerate(dict.fromkeys(around))}
    like = {segment: alike[each] for segment, each in zip(graph.segments, around, strict=True)}
    number, found = {op: i for i, op in enumerate(ops)}, list[list[tuple[int, bool]]]()
    known: dict[tuple[int, Kind, int, int], list[tuple[int, bool]]] = {}
    for i, op in enumerate(ops):
        site, layer, kind, at, part = op
        key = like[site, layer], kind, at, part
        if site not in LAYERS or key not in known:  # what is no layer may need something far away
            known[key] = [(i - number[need.op], need.collective) for need in graph.needs(op)]
        found.append([(i - back, collective) for back, collective in known[key]])
    return found

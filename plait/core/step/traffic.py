"""Bytes that ranks send, in closed form: the counterpart of the runtime's byte counters. Covers the
collectives of instruction lists and of sharded units, and when each unit is gathered and reduced
(``with_units``)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Sublayer
from plait.core.parallel.sharding import EXPERTS, VECTORS, WHOLE, Sharding, Unit, unit_of
from plait.core.parallel.strategy import Strategy, slice_sizes
from plait.core.record.records import sent_bytes
from plait.core.step.ops import SendSizes, exchanged, send_of
from plait.core.step.segments import LAYERS, Action, Collective, Kind, SegmentGraph, SegmentOp
from plait.core.step.stages import PlacedSublayer, Stage, placed_sites, rows_of


@dataclass(frozen=True, kw_only=True)
class SegmentTraffic:
    """The collectives of a stage's instruction list, one by one.

    shares: sequences of every slice. sequence: tokens of a sequence on a context-parallel rank.
    itemsize: bytes of an activation. loss_itemsize: bytes of a loss statistic (8 for fp64 models).
    """

    model: ModelSpec
    strategy: Strategy
    graph: SegmentGraph
    shares: Sequence[int]
    sequence: int
    itemsize: int
    loss_itemsize: int = 4

    def tokens(self, op: SegmentOp) -> int:
        """Return the tokens of an op's slice, at its segment's sequence length."""
        return self.shares[op.slice] * (self.sequence >> self.graph.level(self.model, op.site, op.layer))

    def _routed(self, tokens: int) -> dict[str, int]:
        """Return the sizes of experts' exchanges, if tokens are spread evenly over experts."""
        experts, strategy = self.model.experts, self.strategy
        if experts is None:
            return {}
        own = tokens // (strategy.tp if strategy.whole_experts else 1)
        row = self.model.hidden * self.itemsize + EXTRA_BYTES
        return {
            "routed": round(own * experts.load) * row,
            "routes": own * (experts.per_token + 1) * 4 * strategy.sequence_ranks,
            "counts": 2 * experts.count * 8 * strategy.ep,
        }

    def whole(self, op: SegmentOp) -> int:
        """Return the bytes that an op's collective gathers or reduces; for attention's exchanges,
        the bytes that a rank holds."""
        tokens, parts = self.tokens(op), self.graph.parts(op.site, Kind.COLUMN_DGRAD)
        tp, ulysses = self.strategy.tp, self.strategy.cp // self.strategy.ring
        there, back, block = exchanged(self.model.letters, tokens * self.itemsize, tp=tp, ulysses=ulysses)
        return send_of(op.site, op.kind).nbytes(
            SendSizes(
                tokens=tokens, rows=slice_sizes(tokens, parts)[op.part] if op.kind == Kind.COLUMN_DGRAD else tokens,
                row=self.model.hidden * self.itemsize, columns=self.graph.p2 if op.site in LAYERS else 1,
                tp=tp, words=self.strategy.padded_vocab(self.model) // tp,
                number=self.loss_itemsize, qkv_bytes=there, attention_bytes=back, kv_bytes=block,
                **self._routed(tokens),
            )
        )  # fmt: skip

    def sent(self, op: SegmentOp) -> int:
        """Return the bytes that one rank sends for an op's collective, with ring algorithms; 0 if
        there is no collective."""
        kind = self.graph.collective(op)
        if kind is None:
            return 0
        if op.site == "moe" and send_of(op.site, op.kind).axis == "ep":
            among = self.strategy.sequence_ranks if op.kind == Kind.ROUTER else self.strategy.ep
            return sent_bytes(kind, self.whole(op), among)
        shared = kind in ("all_to_all", "rotate")
        ranks = self.strategy.cp // self.strategy.ring if shared else self.strategy.tp
        return sent_bytes(kind, self.whole(op), ranks)


def micro_batch_bytes(traffic: SegmentTraffic) -> dict[str, int]:
    """Return the bytes that one rank of a stage sends for a micro-batch, by axis, with ring
    algorithms.

    tp: the tensor-parallel collectives without ``rows``. rows: upper bound for the exchange of
    embedding rows, which depends on the tokens. ulysses, ring: attention's exchanges. ep: experts'
    exchanges, of tokens that are spread evenly.
    """
    sent: Counter[str] = Counter(dict.fromkeys(("tp", "rows", "ulysses", "ring"), 0))
    for op in traffic.graph.ops():
        if traffic.graph.collective(op):
            sent[send_of(op.site, op.kind).axis] += traffic.sent(op)
    return dict(sent)


def replicated_numbers(model: ModelSpec, strategy: Strategy, stage: Stage) -> int:
    """Return the size of the buffer, in numbers, in which a tensor-parallel group sums gradients at
    the end of a step. The buffer has one slot for every set of ranks that hold the same weight.
    These weights are key/value heads that several ranks hold, and norms of heads; with sequence
    parallelism also norms, and biases that are added after a reduction."""
    copies, letters = {"kv": strategy.kv_replicas(model), "": strategy.tp}, model.letters
    cut = strategy.sequence_parallel and strategy.tp > 1
    times: Counter[Sublayer] = Counter(at.site for at in placed_sites(model, stage))
    return sum(
        times[site] * row.numel(letters)
        for site, rows in rows_of(model, embeds=stage.embeds).items()
        for row in rows
        if (row.grad_reduction == "always" and copies[row.cut] > 1) or (row.grad_reduction == "cut" and cut)
    )


# ---- units of sharded data parallelism ----


def unit_sizes(model: ModelSpec, strategy: Strategy, stage: Stage, sharding: Sharding) -> dict[Unit, int]:
    """Return how many parameters of a stage each sharded unit has on one tensor-parallel rank,
    padding included."""
    sizes, vectors = dict[Unit, int](), 0
    shares = _shares(model, strategy, stage.embeds)
    for at in placed_sites(model, stage):
        for kind, numel in shares[at.site].items():
            if kind == VECTORS[0]:
                vectors += numel
            else:
                sizes[kind, at.number] = numel
    sizes["vectors", stage.index] = vectors
    own = sharding.of_experts(strategy.ep, strategy.tp if strategy.whole_experts else 1)
    return {unit: (own if unit[0] == EXPERTS else sharding).padded(numel) for unit, numel in sizes.items() if numel}


@cache
def _shares(model: ModelSpec, strategy: Strategy, embeds: bool) -> dict[Sublayer, Counter[str]]:
    """Return the numbers on one rank by sublayer and kind of unit, the same in every stage that has
    the sublayer. embeds: True if the stage has the embedding."""
    found = dict[Sublayer, Counter[str]]()
    for site, rows in rows_of(model, embeds=embeds).items():
        found[site] = Counter()
        for weight in rows if site != EXPERTS else ():
            kind, _ = unit_of(PlacedSublayer(site).prefix + weight.name, len(weight.shape))
            found[site][kind] += strategy.share(model, weight)
    if model.experts:
        one = sum(strategy.share(model, weight) for weight in rows_of(model, embeds=embeds)["experts"])
        found["moe"][EXPERTS] = one * (model.experts.count // strategy.ep)
    return found


class Sent(NamedTuple):
    """One collective. axis: the runtime's name of the traffic. whole: bytes that are gathered or
    reduced. stride: distance between neighbours of the group, in replicas."""

    axis: str
    kind: Collective
    whole: int
    ranks: int
    stride: int

    @property
    def bytes(self) -> int:
        """Bytes that a rank sends."""
        return sent_bytes(self.kind, self.whole, self.ranks)


@dataclass(frozen=True)
class UnitTraffic:
    """The collectives of one unit of ``numel`` numbers, padding included, over ``ranks`` replicas.
    Collectives over one rank are left out. itemsize: bytes of a parameter. gradient: bytes of one
    number of the gradient."""

    unit: Unit
    numel: int
    sharding: Sharding
    ranks: int
    itemsize: int
    gradient: int = 4

    @property
    def params(self) -> int:
        """Sharding factor of the unit's parameters during computation."""
        return 1 if self.whole else self.sharding.params

    @property
    def grads(self) -> int:
        """Sharding factor of the unit's gradients during accumulation."""
        return 1 if self.whole else self.sharding.grads

    @property
    def publishes(self) -> bool:
        """True if the optimizers of some ranks update parameters that other ranks compute with, so
        that the new parameters must be gathered."""
        return self.sharding.optim > self.params

    @property
    def whole(self) -> bool:
        """True if only the unit's optimizer states are sharded."""
        return self.unit[0] in WHOLE

    def gather(self, *, forward: bool) -> list[Sent]:
        """Return the collectives that gather parameters for the forward or backward."""
        if self.params == 1:
            return []
        if self.sharding.secondary and not forward:
            return self._sent(Sent("secondary", "all_gather", self.numel * self.itemsize, self.sharding.secondary, 1))
        return self._sent(Sent("params", "all_gather", self.numel * self.itemsize, self.params, 1))

    def reduce(self, *, last: bool) -> list[Sent]:
        """Return the collectives that reduce the gradient. Each micro-batch's gradient is reduced
        to the accumulated shard; the step's ``last`` also to the shard that an optimizer owns, and
        over replicas."""
        p, g, o = self.sharding.params, self.sharding.grads, self.sharding.optim
        numel, size = self.numel, self.gradient
        found: list[Sent] = []
        if self.grads > 1 or self.whole:
            found += [Sent("params", "reduce_scatter", numel * size, p, 1)]
            found += [Sent("grads", "reduce_scatter", numel // p * size, g // p, p)]
        if last:
            found += [Sent("optim", "reduce_scatter", numel // g * size, o // g, g)]
            found += [Sent("replicas", "all_reduce", numel // o * size, self.ranks // o, o)]
        return self._sent(*found)

    def publish(self) -> list[Sent]:
        """Return the collectives that gather the parameters that optimizers have updated."""
        if not self.publishes:
            return []
        p, g, o = self.sharding.params, self.sharding.grads, self.sharding.optim
        numel, size = self.numel, self.itemsize
        found = [Sent("optim", "all_gather", numel // g * size, o // g, g)]
        found += [Sent("grads", "all_gather", numel // p * size, g // p, p)]
        if self.whole:
            found += [Sent("params", "all_gather", numel * size, p, 1)]
        return self._sent(*found)

    def _sent(self, *found: Sent) -> list[Sent]:
        return [one for one in found if one.ranks > 1]


EXTRA_BYTES = 16
"""Bytes behind a token's row that is sent to an expert: the expert's weight, padded."""


def unit_traffic(
    units: Mapping[Unit, int], sharding: Sharding, ranks: int, *, itemsize: int, gradient_itemsize: int = 4
) -> list[UnitTraffic]:
    """Return the traffic of every unit, in order. units: numbers in each, padding included."""
    return [UnitTraffic(unit, numel, sharding, ranks, itemsize, gradient_itemsize) for unit, numel in units.items()]


def step_bytes(units: Sequence[UnitTraffic], *, micro_batches: int, tied: bool = False) -> dict[str, int]:
    """Return the bytes that one rank sends in a step, by axis, with ring algorithms (over s ranks
    (s-1)/s of the whole, an all-reduce twice that).

    units: one rank's share of the model. tied: True if the embedding is also the head of the same
    stage. For every micro-batch a unit is gathered forward and backward, and its gradient is
    reduced to the accumulated shard. After the last micro-batch the sum is reduced to the shard
    that an optimizer owns, and summed over replicas. The new parameters are gathered over the same
    groups in reverse.
    """
    sent: dict[str, int] = dict.fromkeys(("params", "grads", "optim", "replicas", "secondary"), 0)

    def add(found: Sequence[Sent], times: int = 1) -> None:
        for one in found:
            sent[one.axis] += one.bytes * times

    for each in units:
        kind = each.unit[0]
        add(each.gather(forward=True), micro_batches * (2 if kind == "embedding" and tied else 1))
        # No backward op reads embedding rows, except as the head's weight.
        read_backward = kind not in ("embedding", "positions") or (kind == "embedding" and tied)
        add(each.gather(forward=False), micro_batches * read_backward)
        if not each.whole:  # whole on every rank until the step's end
            add(each.reduce(last=False), micro_batches - 1)
        add(each.reduce(last=True))
        add(each.publish())
    return sent


# ---- when units are gathered and reduced ----


MATRIX_KINDS = (
    Kind.COLUMN_FORWARD, Kind.ROW_FORWARD, Kind.COLUMN_RECOMPUTE, Kind.ROW_RECOMPUTE, Kind.ROW_DGRAD, Kind.COLUMN_DGRAD,
    Kind.EXPERTS, Kind.EXPERTS_BACKWARD,
)  # fmt: skip
"""Op kinds that read a weight matrix."""
ROUTED_KINDS = (Kind.EXPERTS, Kind.EXPERTS_BACKWARD)
"""Op kinds that read the matrices of routed experts alone."""
UnitVerb = Literal[
    "gather", "need", "drop", "next", "open", "close", "settle", "reduce", "publish", "exchange", "await"
]


def read_by(graph: SegmentGraph, op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    """Return the units whose matrices an op reads. head: the unit that holds the head's weight."""
    if op.kind == Kind.NORM and graph.before(op)[0] == "embed":
        return (("positions", 0),)
    kinds = MATRIX_KINDS if op.site in (*LAYERS, "embed", "head") else ()
    if op.site == "moe" and op.kind == Kind.COLUMN_RECOMPUTE:
        return (EXPERTS, op.layer), (op.site, op.layer)
    return _own(op, head) if op.kind in kinds else ()


def gradient_units(graph: SegmentGraph, op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    """Return the units into whose gradients an op adds."""
    if op.kind == Kind.NORM_BACKWARD and graph.before(op)[0] == "embed":
        return (("positions", 0),)
    if op.kind == Kind.WGRAD and op.site == "block":
        return (_own(op, head)[op.part // 2],)
    if op.kind == Kind.WGRAD and op.site == "moe" and op.part < 2:
        return ((EXPERTS, op.layer),)
    return _own(op, head) if op.kind == Kind.WGRAD else ()


def _own(op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    if op.site == "block":
        return ("attn", op.layer), ("mlp", op.layer)
    if op.site == "moe" and op.kind in ROUTED_KINDS:
        return ((EXPERTS, op.layer),)
    return ({"embed": ("embedding", 0), "head": head}.get(op.site, (op.site, op.layer)),)


class UnitOp(NamedTuple):
    """An action on a unit.

    gather: start to gather its parameters. need: wait until they have arrived. drop: free them
    after their last reader. open: allocate its gradient. close: start to reduce the gradient
    (``reduce`` in recordings). settle: wait for reductions. publish: start to gather the parameters
    that optimizers updated. next: gather the first units that the following list reads. exchange:
    send parts of matrices to the ranks that orthogonalise them, or back; await: wait for that
    exchange. Units of exchange and await are rounds of ``core.parallel.sharding``.
    """

    verb: UnitVerb
    unit: Unit
    forward: bool

    slice = 0

    @property
    def site(self) -> str:
        """Kind of the sharded unit, as recordings name it."""
        return self.unit[0]

    @property
    def layer(self) -> int:
        """Layer of the sharded unit."""
        return self.unit[1]

    def __str__(self) -> str:
        return f"{self.verb} {self.unit[0]}{self.unit[1]}"


class UnitAction(NamedTuple):
    """An action on a unit in a list of segment actions. op: the action and the unit."""

    verb: Literal["unit"]
    op: UnitOp


class Window(NamedTuple):
    """A sharded unit, and the range of actions of a list that need its parameters. first, last:
    indices in the list, inclusive. forward: True for a window of the forward pass."""

    unit: Unit
    first: int
    last: int
    forward: bool


_TOGETHER = {("attn", "mlp"), ("attn", "moe"), ("attn", EXPERTS), ("moe", EXPERTS), (EXPERTS, "moe")}
"""Kinds of units of a layer of which the second is gathered with the first."""


def reading(graph: SegmentGraph, actions: Sequence[Action], units: Iterable[Unit]) -> list[list[Window]]:
    """Return when the list of one phase reads ``units``: groups of windows, ordered by their first
    actions.

    A group is gathered together: in the forward a layer's attention and MLP, in the backward one
    module. A unit that is read at both ends of a forward (tied embeddings) has a window for each.
    """
    exist, found = set(units), dict[tuple[Unit, bool], Window]()
    head = _head(exist)
    for at, (verb, op) in enumerate(actions):
        for unit in read_by(graph, op, head) if verb == "run" else ():
            if unit in exist:
                key = unit, op.site == "head"
                found[key] = Window(unit, found[key].first if key in found else at, at, op.forward)
    groups: list[list[Window]] = []
    for window in sorted(found.values(), key=lambda one: (one.first, one.unit)):
        before = groups[-1][-1].unit if groups else ("", -1)
        follows = before[1] == window.unit[1] and (before[0], window.unit[0]) in _TOGETHER
        if follows and (window.forward or graph.parallel_block):
            groups[-1].append(window)
        else:
            groups.append([window])
    return groups


def adding(graph: SegmentGraph, actions: Sequence[Action], units: Iterable[Unit]) -> list[Window]:
    """Return when the list of one phase adds to the gradients of ``units``."""
    exist, found = set(units), dict[Unit, Window]()
    head = _head(exist)
    for at, (verb, op) in enumerate(actions):
        for unit in gradient_units(graph, op, head) if verb == "run" else ():
            if unit in exist:
                found[unit] = Window(unit, found[unit].first if unit in found else at, at, False)
    return sorted(found.values(), key=lambda one: one.first)


def _head(units: set[Unit]) -> Unit:
    return ("head", 0) if ("head", 0) in units else ("embedding", 0)


def with_units(
    graph: SegmentGraph, actions: Sequence[Action], units: Iterable[Unit], strategy: Strategy
) -> list[Action | UnitAction]:
    """Return the list of one phase, with the unit ops inserted.

    The list reads units group by group (``reading``). When a group's first reader runs, the group
    is gathered, unless it is already. If gathers overlap computation, the following group is
    gathered then too. A unit is needed just before its first reader and dropped after its last.
    While the list's last group is read, ``next`` gathers the first group of the following list. A
    unit's gradient is opened before the first op that adds to it, and closed after the last, which
    starts its reduction. The reduction is settled at once if it does not overlap computation.
    """
    units = list(units)
    before, after = defaultdict[int, list[UnitOp]](list), defaultdict[int, list[UnitOp]](list)
    groups = reading(graph, actions, units)
    if not groups:
        before[0].append(UnitOp("next", VECTORS, False))
    for group, following in zip(groups, [*groups[1:], []], strict=False):
        begin = group[0].first
        before[begin] += [UnitOp("gather", one.unit, one.forward) for one in group]
        for one in group:
            before[one.first].append(UnitOp("need", one.unit, one.forward))
            after[one.last].append(UnitOp("drop", one.unit, one.forward))
        if not following:
            before[begin].append(UnitOp("next", VECTORS, group[0].forward))
        elif strategy.hides_shards(forward=following[0].forward):
            before[begin] += [UnitOp("gather", one.unit, one.forward) for one in following]
    for one in adding(graph, actions, units):
        before[one.first].append(UnitOp("open", one.unit, False))
        after[one.last].append(UnitOp("close", one.unit, False))
        if not strategy.hides_shards(forward=False):
            after[one.last].append(UnitOp("settle", one.unit, False))
    merged: list[Action | UnitAction] = []
    for at, action in enumerate(actions):
        if at in before:
            merged += [UnitAction("unit", op) for op in before[at]]
        merged.append(action)
        if at in after:
            merged += [UnitAction("unit", op) for op in after[at]]
    return merged

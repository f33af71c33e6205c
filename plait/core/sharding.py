"""Sharded data parallelism as data: factors, groups of ranks, and when each unit is gathered and reduced.

A model's weights are replicated over R = dp x cp ranks. Parameters, gradients and optimizer states are each
sharded by a factor of their own: 1 <= params <= grads <= optim <= R, each dividing the next (InternEvo, arXiv
2401.09149; AMSP, arXiv 2311.00257). A factor's group is made of neighbouring ranks. Shards are nested: what a
rank's optimizer updates is a part of the gradient it accumulates, which is a part of the parameters it keeps.
Named points:

    ddp          (1, 1, 1)      hsdp, mics         (k, k, k)
    zero1        (1, 1, R)      hierarchical FSDP  (k, k, R)
    zero2        (1, R, R)      hpz                (R, R, R) with ``secondary`` = k (ZeRO++, arXiv 2306.10209)
    zero3, fsdp  (R, R, R)

A *unit* is the matrices of one segment. They are gathered together, and their gradients are reduced together.
Vectors (norms, biases) are a unit too, of which only the optimizer states are sharded: they are small, and
every segment reads some. So are the few matrices with which a U-Transformer changes the sequence's length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from plait.core.errors import JobError
from plait.core.numbers import divisors
from plait.core.segments import LAYERS, Action, SegmentGraph, SegmentOp
from plait.core.strategy import Strategy

Level = Literal["params", "grads", "optim", "replicas"]
LEVELS: tuple[Level, ...] = ("params", "grads", "optim", "replicas")
UnitVerb = Literal["gather", "need", "drop", "next", "open", "close", "settle", "reduce", "publish"]
Unit = tuple[str, int]
VECTORS: Unit = ("vectors", 0)
WHOLE = ("vectors", "down", "up")
"""Kinds of units that are cut for the optimizer only."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Factors of parameters, gradients and optimizer states.

    secondary: so many neighbours keep a second copy of the parameters between forward and backward, sharded
    among them, so that backward gathers stay within these ranks. 0: there is no second copy.

    >>> Sharding(params=2, grads=2, optim=4).shard(3, "optim", 80)
    (60, 80)
    """

    params: int = 1
    grads: int = 1
    optim: int = 1
    secondary: int = 0

    @staticmethod
    def named(point: str, ranks: int) -> Sharding:
        """A named point for R = ``ranks``. Raises JobError for an unknown name."""
        factors = {
            "ddp": (1, 1, 1),
            "zero1": (1, 1, ranks),
            "zero2": (1, ranks, ranks),
            "zero3": (ranks,) * 3,
            "fsdp": (ranks,) * 3,
        }
        if point not in factors:
            raise JobError(f"'{point}' is no named sharding", key="strategy.shard",
                           changes=[{"strategy.shard": one} for one in factors])  # fmt: skip
        params, grads, optim = factors[point]
        return Sharding(params=params, grads=grads, optim=optim)

    def check(self, ranks: int) -> None:
        """Raise JobError, naming the key, if R = ``ranks`` cannot be cut like this."""
        chain = [("params", self.params), ("grads", self.grads), ("optim", self.optim), ("", ranks)]
        for (name, factor), (wider, limit) in pairwise(chain):
            if factor < 1 or limit % factor:
                what = f"shard.{wider} = {limit}" if wider else f"the {ranks} ranks that hold the same weights"
                key = f"strategy.shard.{name}"
                raise JobError(
                    f"{factor} does not divide {what}",
                    key=key,
                    changes=[{key: one} for one in divisors(limit, factor)],
                )
        if self.secondary and (self.secondary < 2 or self.secondary >= self.params or self.params % self.secondary):
            raise JobError(
                f"{self.secondary} is no proper divisor above 1 of shard.params = {self.params}",
                key="strategy.shard.secondary",
                changes=[
                    *({"strategy.shard.secondary": one} for one in divisors(self.params, 2) if 1 < one < self.params),
                    {"strategy.shard.secondary": 0},
                ],
            )

    @property
    def stays(self) -> bool:
        """Whether weights and gradients are whole on every rank, each always in one place in memory."""
        return self.params == self.grads == 1

    def factors(self, ranks: int) -> tuple[int, int, int, int]:
        """params, grads, optim and R, level by level."""
        return self.params, self.grads, self.optim, ranks

    def group(self, rank: int, level: Level, ranks: int) -> tuple[int, ...]:
        """``rank``'s group of a level: the ranks, of 0 .. R-1, over which it is sharded further than the
        level before. Only ``rank`` where it is not sharded further.

        >>> Sharding(params=2, grads=2, optim=4).group(5, "optim", 8)
        (5, 7)
        """
        factors = (1, *self.factors(ranks))
        inner, outer = factors[LEVELS.index(level)], factors[LEVELS.index(level) + 1]
        first = rank // outer * outer + rank % inner
        return tuple(range(first, first + outer, inner))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Who keeps the other parts of ``rank``'s secondary copy."""
        k = max(1, self.secondary)
        return tuple(range(rank // k * k, rank // k * k + k))

    def shard(self, rank: int, level: Level, numel: int) -> tuple[int, int]:
        """(first, last + 1) of what ``rank`` holds of a unit of ``numel`` numbers, a multiple of
        ``optim``."""
        start, inner = 0, 1
        for at, factor in zip(LEVELS, (self.params, self.grads, self.optim), strict=False):
            start += rank % factor // inner * (numel // factor)
            inner = factor
            if at == level:
                break
        return start, start + numel // inner

    def padded(self, numel: int) -> int:
        """``numel`` rounded up so that every factor divides it."""
        step = self.optim * max(1, self.secondary)
        return -(-numel // step) * step


def unit_of(parameter: str, ndim: int) -> Unit:
    """The unit of a parameter, by its name (``layers.3.attn.column.weight``)."""
    if ndim == 1:
        return VECTORS
    words = parameter.split(".")
    if words[0] == "layers":
        return words[2], int(words[1])
    return (words[0], int(words[1])) if words[0] in ("down", "up") else (words[0], 0)


def read_by(graph: SegmentGraph, op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    """The units whose matrices an op reads. head: which one holds the head's weight."""
    if op.kind == "N" and graph.before(op)[0] == "embed":
        return (("positions", 0),)
    kinds = "FRADC" if op.site in LAYERS else {"embed": "R", "head": "FC"}.get(op.site, "")
    return _own(op, head) if op.kind in kinds else ()


def added_to_by(graph: SegmentGraph, op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    """The units into whose gradients an op adds."""
    if op.kind == "J" and graph.before(op)[0] == "embed":
        return (("positions", 0),)
    if op.kind == "W" and op.site == "block":
        return (_own(op, head)[op.part // 2],)
    return _own(op, head) if op.kind == "W" else ()


def _own(op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    if op.site == "block":
        return ("attn", op.layer), ("mlp", op.layer)
    return ({"embed": ("embedding", 0), "head": head}.get(op.site, (op.site, op.layer)),)


class UnitOp(NamedTuple):
    """Something that happens to a unit.

    gather: start to gather its parameters. need: wait until they are here. drop: nobody reads them any more.
    open: make place for its gradient. close: start to reduce that (``reduce`` in recordings). settle: wait
    for reductions. publish: start to gather what optimizers changed. next: gather what the list that runs
    afterwards reads first.
    """

    verb: UnitVerb
    unit: Unit
    forward: bool

    slice = 0

    @property
    def site(self) -> str:
        """The unit's kind."""
        return self.unit[0]

    @property
    def layer(self) -> int:
        """Of the unit."""
        return self.unit[1]

    def __str__(self) -> str:
        return f"{self.verb} {self.unit[0]}{self.unit[1]}"


class UnitAction(NamedTuple):
    """Stands in a list of segment actions; its op says what to do."""

    verb: Literal["unit"]
    op: UnitOp


class Window(NamedTuple):
    """Actions ``first`` to ``last`` of a list need the unit."""

    unit: Unit
    first: int
    last: int
    forward: bool


def reading(graph: SegmentGraph, actions: Sequence[Action], units: Iterable[Unit]) -> list[list[Window]]:
    """When the list of one phase reads ``units``: groups of windows, ordered by their first actions.

    A group is gathered together: in the forward a layer's attention and MLP, in the backward one module. A
    unit that is read at both ends of a forward (tied embeddings) has a window for each.
    """
    exist, found = set(units), dict[tuple[Unit, bool], Window]()
    for at, (verb, op) in enumerate(actions):
        for unit in exist.intersection(read_by(graph, op, _head(exist)) if verb == "run" else ()):
            key = unit, op.site == "head"
            found[key] = Window(unit, found[key].first if key in found else at, at, op.forward)
    groups: list[list[Window]] = []
    for window in sorted(found.values(), key=lambda one: (one.first, one.unit)):
        follows = bool(groups) and groups[-1][-1].unit == ("attn", window.unit[1]) and window.unit[0] == "mlp"
        if follows and (window.forward or graph.parallel_block):
            groups[-1].append(window)
        else:
            groups.append([window])
    return groups


def adding(graph: SegmentGraph, actions: Sequence[Action], units: Iterable[Unit]) -> list[Window]:
    """When the list of one phase adds to the gradients of ``units``."""
    exist, found = set(units), dict[Unit, Window]()
    for at, (verb, op) in enumerate(actions):
        for unit in exist.intersection(added_to_by(graph, op, _head(exist)) if verb == "run" else ()):
            found[unit] = Window(unit, found[unit].first if unit in found else at, at, False)
    return sorted(found.values(), key=lambda one: one.first)


def _head(units: set[Unit]) -> Unit:
    return ("head", 0) if ("head", 0) in units else ("embedding", 0)


def with_units(
    graph: SegmentGraph, actions: Sequence[Action], units: Iterable[Unit], strategy: Strategy
) -> list[Action | UnitAction]:
    """The list of one phase, with the unit ops inserted.

    The list reads units group by group (``reading``). When a group's first reader runs, the group is
    gathered, if it is not yet; where gathers overlap computation, so is the group after it. A unit is needed
    just before its first reader and dropped after its last. While the list's last group is read, ``next``
    gathers the first group of the list that runs afterwards. A unit's gradient is opened before the first op
    that adds to it, and closed after the last: that starts its reduction, which is settled at once where it
    does not overlap computation.
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
        merged += [UnitAction("unit", op) for op in before[at]]
        merged.append(action)
        merged += [UnitAction("unit", op) for op in after[at]]
    return merged

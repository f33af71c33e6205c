"""When each sharded unit is gathered and reduced: unit ops, woven into lists of segment actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from plait.core.parallel.sharding import VECTORS, Unit
from plait.core.parallel.strategy import Strategy
from plait.core.step.segments import LAYERS, Action, Kind, SegmentGraph, SegmentOp

MATRIX_KINDS = (
    Kind.FIRST, Kind.SECOND, Kind.FIRST_AGAIN, Kind.SECOND_AGAIN, Kind.SECOND_GRAD, Kind.FIRST_GRAD
)  # fmt: skip
"""Ops that read a matrix."""
UnitVerb = Literal[
    "gather", "need", "drop", "next", "open", "close", "settle", "reduce", "publish", "exchange", "await"
]


def read_by(graph: SegmentGraph, op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    """The units whose matrices an op reads. head: which one holds the head's weight."""
    if op.kind == Kind.NORM and graph.before(op)[0] == "embed":
        return (("positions", 0),)
    kinds = MATRIX_KINDS if op.site in (*LAYERS, "embed", "head") else ()
    return _own(op, head) if op.kind in kinds else ()


def added_to_by(graph: SegmentGraph, op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    """The units into whose gradients an op adds."""
    if op.kind == Kind.NORM_GRAD and graph.before(op)[0] == "embed":
        return (("positions", 0),)
    if op.kind == Kind.WEIGHT_GRAD and op.site == "block":
        return (_own(op, head)[op.part // 2],)
    return _own(op, head) if op.kind == Kind.WEIGHT_GRAD else ()


def _own(op: SegmentOp, head: Unit) -> tuple[Unit, ...]:
    if op.site == "block":
        return ("attn", op.layer), ("mlp", op.layer)
    return ({"embed": ("embedding", 0), "head": head}.get(op.site, (op.site, op.layer)),)


class UnitOp(NamedTuple):
    """Something that happens to a unit.

    gather: start to gather its parameters. need: wait until they are here. drop: nobody reads them any more.
    open: make place for its gradient. close: start to reduce that (``reduce`` in recordings). settle: wait
    for reductions. publish: start to gather what optimizers changed. next: gather what the list that runs
    afterwards reads first. exchange: parts of matrices go to the ranks that orthogonalise them, or back;
    await: until they are there. Their units are rounds of ``core.parallel.matrices``.
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
    head = _head(exist)
    for at, (verb, op) in enumerate(actions):
        for unit in read_by(graph, op, head) if verb == "run" else ():
            if unit in exist:
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
    head = _head(exist)
    for at, (verb, op) in enumerate(actions):
        for unit in added_to_by(graph, op, head) if verb == "run" else ():
            if unit in exist:
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
        if at in before:
            merged += [UnitAction("unit", op) for op in before[at]]
        merged.append(action)
        if at in after:
            merged += [UnitAction("unit", op) for op in after[at]]
    return merged

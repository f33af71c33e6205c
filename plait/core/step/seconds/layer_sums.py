"""A layer and the ends of a stage as sums over their ops (``op_seconds``): computation, collectives and
launches of every pass, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from plait.core.step.ops import AGAIN_KINDS, FORWARD_KINDS, Kind, branches_of, send_of, steps_of
from plait.core.step.schedule import PHASES, Phase
from plait.core.step.seconds.host_time import Late
from plait.core.step.seconds.op_seconds import OpSeconds, Priced
from plait.core.step.seconds.rates import Seconds
from plait.core.step.segments import SegmentGraph, Site

_NAMED = (Kind.SECOND, Kind.WEIGHT_GRAD)
_WEIGHTS = frozenset((Kind.WEIGHT_GRAD,))
ENDS: tuple[Site, ...] = ("embed", "head")
LISTED: tuple[Phase, ...] = ("F", "B", "I", "W")
"""Phases of a layer in lists."""
REPEATING: tuple[Phase, ...] = ("B", "I")
"""Those in which activations are computed again."""


class Pass(NamedTuple):
    """One pass of a micro-batch. products, attention, elementwise: computation. rows: of the table that the
    host launches; calls: collectives. tp, heads, ring: collectives by axis, one after the other; home: of
    rings, gradients on their way back. second: products of second weights; weights: those of weight
    gradients."""

    products: Any = 0.0
    attention: Any = 0.0
    elementwise: Any = 0.0
    rows: Any = 0.0
    calls: Any = 0.0
    tp: Any = 0.0
    heads: Any = 0.0
    ring: Any = 0.0
    home: Any = 0.0
    second: Any = 0.0
    weights: Any = 0.0

    @property
    def seconds(self) -> Seconds:
        """Of computation."""
        return self.products + self.attention + self.elementwise


class Waits(NamedTuple):
    """What the host is late in a phase of a layer: beside collectives that nothing hides, and beside none."""

    sent: Late
    bare: Late


class LayerSums(NamedTuple):
    """Of one layer: forward; backward without what is computed again; that. Of the ends, both passes of what
    a stage has that begins with the embedding, ends with the head, or hands on what it computed; and of the
    head's, the backward alone. late: by phase, without what is computed again; late_again: with it, of phases
    that have it."""

    forward: Pass
    backward: Pass
    again: Pass
    embed: Pass
    head: Pass
    leave: Pass
    head_backward: Pass
    late: Mapping[Phase, Waits]
    late_again: Mapping[Phase, Waits]

    @staticmethod
    def of(priced: Priced) -> LayerSums:
        """Of every point."""
        count = len(priced.points)
        sums = np.zeros((7, len(Pass._fields), count))
        shape = (2, len(Late._fields), count)
        late, late_again = ({phase: np.zeros(shape) for phase in each} for each in (LISTED, REPEATING))
        for which, ops in priced.structures():
            passes = _Passes(ops)
            for at, one in enumerate(passes.sums()):
                _put(sums[at], which, one)
            for phase, sends in product(LISTED, (0, 1)):
                plain = passes.late(phase, again=False, sends=sends)
                _put(late[phase][1 - sends], which, plain)
                if phase in REPEATING:
                    whole = passes.late(phase, again=True, sends=sends) if passes.again else plain
                    _put(late_again[phase][1 - sends], which, whole)
        forward, backward, again, *ends = (Pass(*each) for each in sums)
        embed, head, leave, head_backward = ends
        return LayerSums(forward, backward, again, embed, head, leave, head_backward, _waits(late), _waits(late_again))


def _put(columns: Any, which: Any, values: Iterable[Any]) -> None:
    """Write the values of some points into their columns."""
    for column, value in zip(columns, values, strict=True):
        column[which] = value


def _waits(columns: Mapping[Any, Any]) -> Mapping[Phase, Waits]:
    """columns: by phase, [sent and bare, net and most, points]."""
    return {phase: Waits(*(Late(*each) for each in both)) for phase, both in columns.items()}


class _Passes:
    """Ops of the points of one structure."""

    def __init__(self, ops: OpSeconds) -> None:
        self.ops = ops
        self.layers: tuple[Site, ...] = ("block",) if ops.graph.parallel_block else ("attn", "mlp")
        self.kinds: dict[Site, Sequence[Kind]] = {site: ops.graph.kinds(site, 0) for site in (*self.layers, *ENDS)}
        self.lates: dict[tuple[Site, Kind, int], Late] = {}
        self.known = {(site, kind): _pass(ops, site, kind) for site, kinds in self.kinds.items() for kind in kinds}

    @property
    def again(self) -> bool:
        """Whether a layer computes anything again."""
        return any(kind in AGAIN_KINDS for site in self.layers for kind in self.kinds[site])

    def total(self, sites: Iterable[Site], wanted: frozenset[Kind]) -> Pass:
        each = (self.known[site, kind] for site in sites for kind in self.kinds[site] if kind in wanted)
        return reduce(_both, each, Pass())

    def sums(self) -> Iterable[Pass]:
        """As ``LayerSums`` has them."""
        ops, total = self.ops, self.total
        yield total(self.layers, FORWARD_KINDS)
        yield total(self.layers, frozenset(Kind) - FORWARD_KINDS - AGAIN_KINDS)
        yield total(self.layers, AGAIN_KINDS)
        # A stage's last join gathers, its first one only behind an embedding: so beside one for each of its
        # layers' joins a stage with an embedding has one more.
        join = ops.sent("head", Kind.NORM_GRAD)
        embed, head = (total((site,), frozenset(Kind)) for site in ENDS)
        yield embed._replace(tp=embed.tp + join)
        yield head._replace(tp=head.tp - join)
        norms = (ops.compute("leave", kind) for kind in (Kind.NORM, Kind.NORM_GRAD))
        yield Pass(elementwise=sum(work.passes for work in norms))
        yield total(("head",), frozenset(Kind) - FORWARD_KINDS)

    def late(self, phase: Phase, *, again: bool, sends: int) -> Late:
        """Of a layer, slice by slice of each segment. again: with what is computed again. sends: how often
        collectives are waited for."""
        forward, found = PHASES[phase].forward, Late()
        for site in self.layers if forward else reversed(self.layers):
            segment = Late()
            kinds = (kind for kind in self.kinds[site] if again or kind not in AGAIN_KINDS)
            for kind in (kind for kind in kinds if _in_phase(kind, phase)):
                asked = site, kind, sends
                if asked not in self.lates:
                    self.lates[asked] = self._late(*asked)
                segment = segment.then(self.lates[asked])
            found = found.then(segment.times(self.ops.priced.points.p1))
        return found

    def _late(self, site: Site, kind: Kind, sends: int) -> Late:
        """Of an op and its collectives, of one slice."""
        one, parts, slices = self.known[site, kind], self.ops.parts(site, kind), self.ops.priced.points.p1
        host = self.ops.priced.cluster.efficiency
        launch = launch_seconds(self.ops.priced, kind) * one.rows / slices
        sent = sends * (one.tp + one.heads + one.ring + one.home) / slices
        work = Late.of(launch, one.seconds / slices, parts)
        return work.then(Late.of(host.host_collective.value * one.calls / slices, sent))


def _in_phase(kind: Kind, phase: Phase) -> bool:
    """Whether ops of a kind are in a list of a phase."""
    work = PHASES[phase]
    if kind in FORWARD_KINDS:
        return work.forward
    return work.weight_gradient if kind in _WEIGHTS else work.input_gradient


def launch_seconds(priced: Priced, kind: Kind) -> Any:
    """Seconds in which the host launches a row of an op; 0 where graphs are captured."""
    rows = FORWARD_ROWS if kind in FORWARD_KINDS or kind in AGAIN_KINDS else BACKWARD_ROWS
    return np.where(priced.points.graphs > 0, 0.0, priced.cluster.efficiency.host_layer.value / rows)


def _both(one: Pass, other: Pass) -> Pass:
    return Pass(*(a + b for a, b in zip(one, other, strict=True)))


def _pass(ops: OpSeconds, site: Site, kind: Kind) -> Pass:
    work, sent = ops.compute(site, kind), ops.sent(site, kind)
    axis = send_of(site, kind).axis if np.any(sent) else "tp"
    where = "home" if kind == Kind.ROTATE_GRAD else {"rows": "tp", "ulysses": "heads"}.get(axis, axis)
    more = {"second" if kind == Kind.SECOND else "weights": work.products} if kind in _NAMED else {}
    one = Pass(work.products, work.attention, work.passes, work.launches, ops.calls(site, kind), **more)
    return one._replace(**{where: sent})


def _rows(wanted: frozenset[Kind]) -> int:
    """Rows of the table in one pass of a layer whose attention is not shared."""
    graph = SegmentGraph(num_layers=1)
    return sum(
        len(steps_of(branch, kind))
        for site in ("attn", "mlp")
        for kind in graph.kinds(site, 0)
        if kind in wanted
        for branch in ("", *branches_of(site))
    )


FORWARD_ROWS, BACKWARD_ROWS = _rows(FORWARD_KINDS), _rows(frozenset(Kind) - FORWARD_KINDS)

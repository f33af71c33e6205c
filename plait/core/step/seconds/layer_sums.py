"""Sums over the ops of a layer and of a stage's ends (``op_seconds``): computation, collectives and
launches of every pass, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from plait.core.step.ops import AGAIN_KINDS, FORWARD_KINDS, Kind, paths_of, send_of, steps_of
from plait.core.step.schedule import PHASES, Phase
from plait.core.step.seconds.op_seconds import OpSeconds, Priced
from plait.core.step.seconds.rates import Seconds
from plait.core.step.segments import SegmentGraph, Site

_NAMED = (Kind.ROW_FORWARD, Kind.WGRAD)
_WEIGHTS = frozenset((Kind.WGRAD,))
UNLISTED_BACKWARD_KINDS = Kind.COLUMN_DGRAD, Kind.ROUTER_BACKWARD, Kind.EXPERTS_BACKWARD
"""Backward kinds outside instruction lists."""
ENDS: tuple[Site, ...] = ("embed", "head")
LISTED_PHASES: tuple[Phase, ...] = ("F", "B", "I", "W")
"""Phases of a layer in instruction lists."""
RECOMPUTING_PHASES: tuple[Phase, ...] = ("B", "I")
"""Phases that recompute activations."""


class Pass(NamedTuple):
    """One pass of a micro-batch.

    products, attention, elementwise: computation, in seconds. rows: op rows that the host launches;
    calls: collectives. tp, heads, ring: seconds of collectives by axis, one after the other; home:
    of ring attention, gradients on their way back. second: seconds of products with second weights;
    weights: of weight gradients. ep: seconds of sending tokens to their experts and back.
    """

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
    ep: Any = 0.0

    @property
    def seconds(self) -> Seconds:
        """Seconds of computation."""
        return self.products + self.attention + self.elementwise


class Waits(NamedTuple):
    """Host lateness in a phase of a layer: how far the host's kernel launches fall behind the
    device. sent: if all collectives are exposed; bare: if none are."""

    sent: LaunchLag
    bare: LaunchLag


class LayerSums(NamedTuple):
    """Sums over one layer and the ends of a stage.

    forward; backward, without recomputation; again: recomputation. embed, head, leave: both passes
    of a stage's end that begins with the embedding, ends with the head, or sends its result on.
    head_backward: the head's backward alone. unlisted, unlisted_backward: a layer's ops outside
    instruction lists. late: host lateness by phase, without recomputation; late_again: with
    recomputation, for phases that have it.
    """

    forward: Pass
    backward: Pass
    again: Pass
    embed: Pass
    head: Pass
    leave: Pass
    head_backward: Pass
    unlisted: Pass
    unlisted_backward: Pass
    late: Mapping[Phase, Waits]
    late_again: Mapping[Phase, Waits]

    @staticmethod
    def of(priced: Priced) -> LayerSums:
        """Return the sums of every strategy."""
        count = len(priced.points)
        sums = np.zeros((9, len(Pass._fields), count))
        shape = (2, len(LaunchLag._fields), count)
        late, late_again = ({phase: np.zeros(shape) for phase in each} for each in (LISTED_PHASES, RECOMPUTING_PHASES))
        for which, ops in priced.structures():
            passes = _Passes(ops)
            for at, one in enumerate(passes.sums()):
                _put(sums[at], which, one)
            for phase, sends in product(LISTED_PHASES, (0, 1)):
                plain = passes.late(phase, again=False, sends=sends)
                _put(late[phase][1 - sends], which, plain)
                if phase in RECOMPUTING_PHASES:
                    whole = passes.late(phase, again=True, sends=sends) if passes.again else plain
                    _put(late_again[phase][1 - sends], which, whole)
        fields = dict(zip(LayerSums._fields, (Pass(*each) for each in sums), strict=False))
        return LayerSums(**fields, late=_waits(late), late_again=_waits(late_again))


def _put(columns: Any, which: Any, values: Iterable[Any]) -> None:
    """Write the values of the strategies ``which`` into their columns."""
    for column, value in zip(columns, values, strict=True):
        column[which] = value


def _waits(columns: Mapping[Any, Any]) -> Mapping[Phase, Waits]:
    """Return host lateness by phase. columns: by phase, [sent and bare, net and most, points]."""
    return {phase: Waits(*(LaunchLag(*each) for each in both)) for phase, both in columns.items()}


class _Passes:
    """Sums of op seconds for strategies whose segment graphs have the same structure."""

    def __init__(self, ops: OpSeconds) -> None:
        self.ops = ops
        self.layers: tuple[Site, ...] = ("block",) if ops.graph.parallel_block else ("attn", "mlp")
        self.kinds: dict[Site, Sequence[Kind]] = {site: ops.graph.kinds(site, 0) for site in (*self.layers, *ENDS)}
        self.lates: dict[tuple[Site, Kind, int], LaunchLag] = {}
        self.known = {(site, kind): _pass(ops, site, kind) for site, kinds in self.kinds.items() for kind in kinds}

    @property
    def again(self) -> bool:
        """True if a layer recomputes anything."""
        return any(kind in AGAIN_KINDS for site in self.layers for kind in self.kinds[site])

    def total(self, sites: Iterable[Site], wanted: frozenset[Kind]) -> Pass:
        each = (self.known[site, kind] for site in sites for kind in self.kinds[site] if kind in wanted)
        return reduce(_add, each, Pass())

    def sums(self) -> Iterable[Pass]:
        """Yield the passes in the order of the fields of ``LayerSums``."""
        ops, total = self.ops, self.total
        yield total(self.layers, FORWARD_KINDS)
        yield total(self.layers, frozenset(Kind) - FORWARD_KINDS - AGAIN_KINDS)
        yield total(self.layers, AGAIN_KINDS)
        # A stage's last join gathers, its first one only after an embedding: so besides one for each of its
        # layers' joins a stage with an embedding has one more.
        join = ops.sent("head", Kind.NORM_BACKWARD)
        embed, head = (total((site,), frozenset(Kind)) for site in ENDS)
        yield embed._replace(tp=embed.tp + join)
        yield head._replace(tp=head.tp - join)
        norms = (ops.compute("leave", kind) for kind in (Kind.NORM, Kind.NORM_BACKWARD))
        yield Pass(elementwise=sum(work.passes for work in norms))
        yield total(("head",), frozenset(Kind) - FORWARD_KINDS)
        ep, forward = ops.exchange(), ops.unlisted(Kind.COLUMN_FORWARD, Kind.ROUTER, Kind.EXPERTS)
        yield Pass(forward.products, elementwise=forward.passes, ep=2 * ep)
        backward = ops.unlisted(*UNLISTED_BACKWARD_KINDS)
        routed = ops.unlisted(*UNLISTED_BACKWARD_KINDS, branches=("router", "experts"))
        yield Pass(backward.products, elementwise=backward.passes, ep=2 * ep, weights=routed.products / 2)

    def late(self, phase: Phase, *, again: bool, sends: int) -> LaunchLag:
        """Return the host lateness of a layer, slice by slice of each segment. again: with
        recomputation. sends: how often collectives are waited for."""
        forward, found = PHASES[phase].forward, LaunchLag()
        for site in self.layers if forward else reversed(self.layers):
            segment = LaunchLag()
            kinds = (kind for kind in self.kinds[site] if again or kind not in AGAIN_KINDS)
            for kind in (kind for kind in kinds if _in_phase(kind, phase)):
                asked = site, kind, sends
                if asked not in self.lates:
                    self.lates[asked] = self._late(*asked)
                segment = segment.then(self.lates[asked])
            found = found.then(segment.times(self.ops.priced.points.p1))
        return found

    def _late(self, site: Site, kind: Kind, sends: int) -> LaunchLag:
        """Return the host lateness of an op and its collectives, for one slice."""
        one, parts, slices = self.known[site, kind], self.ops.parts(site, kind), self.ops.priced.points.p1
        host = self.ops.priced.cluster.efficiency
        launch = launch_seconds(self.ops.priced, kind) * one.rows / slices
        sent = sends * (one.tp + one.heads + one.ring + one.home) / slices
        work = LaunchLag.of(launch, one.seconds / slices, parts)
        return work.then(LaunchLag.of(host.host_collective.value * one.calls / slices, sent))


def _in_phase(kind: Kind, phase: Phase) -> bool:
    """Return True if ops of a kind belong to the instruction list of a phase."""
    work = PHASES[phase]
    if kind in FORWARD_KINDS:
        return work.forward
    return work.weight_gradient if kind in _WEIGHTS else work.input_gradient


def launch_seconds(priced: Priced, kind: Kind) -> Any:
    """Return the host's seconds of launching one row of an op; 0 with CUDA graphs."""
    rows = FORWARD_ROWS if kind in FORWARD_KINDS or kind in AGAIN_KINDS else BACKWARD_ROWS
    return np.where(priced.points.graphs > 0, 0.0, priced.cluster.efficiency.host_layer.value / rows)


def _add(first: Pass, second: Pass) -> Pass:
    return Pass(*(a + b for a, b in zip(first, second, strict=True)))


def _pass(ops: OpSeconds, site: Site, kind: Kind) -> Pass:
    work, sent = ops.compute(site, kind), ops.sent(site, kind)
    axis = send_of(site, kind).axis if np.any(sent) else "tp"
    where = "home" if kind == Kind.RING_SEND_GRAD else {"rows": "tp", "ulysses": "heads"}.get(axis, axis)
    more = {"second" if kind == Kind.ROW_FORWARD else "weights": work.products} if kind in _NAMED else {}
    one = Pass(work.products, work.attention, work.passes, work.launches, ops.calls(site, kind), **more)
    return one._replace(**{where: sent})


def _rows(wanted: frozenset[Kind]) -> int:
    """Return the number of op rows in one pass of a layer whose attention is not shared between
    ranks."""
    graph = SegmentGraph(num_layers=1)
    return sum(
        len(steps_of(branch, kind))
        for site in ("attn", "mlp")
        for kind in graph.kinds(site, 0)
        if kind in wanted
        for branch in ("", *paths_of(site))
    )


FORWARD_ROWS, BACKWARD_ROWS = _rows(FORWARD_KINDS), _rows(frozenset(Kind) - FORWARD_KINDS)


class LaunchLag(NamedTuple):
    """Host lateness of ops that run one after the other. net: seconds of launching them minus
    seconds of running them; negative if the host gets ahead. most: the same difference just before
    the last op runs, or before an earlier op, whichever is largest. These are the seconds that ops
    wait for a host that starts with them."""

    net: Any = 0.0
    most: Any = 0.0

    @staticmethod
    def of(launch: Any, busy: Any, count: Any = 1) -> LaunchLag:
        """Return the lateness of an op that is launched in ``count`` equal parts."""
        if isinstance(count, int) and count == 1:  # the common case: five passes over arrays fewer
            return LaunchLag(launch - busy, launch)
        return LaunchLag(launch / count - busy / count, launch / count).times(count)

    def then(self, other: LaunchLag) -> LaunchLag:
        """Return the lateness of these ops followed by others."""
        return LaunchLag(self.net + other.net, np.maximum(self.most, self.net + other.most))

    def times(self, count: Any) -> LaunchLag:
        """Return the lateness of these ops run ``count`` times in succession."""
        first = self.most * np.minimum(1, count)
        return LaunchLag(self.net * count, first + np.maximum(0, count - 1) * np.maximum(0, self.net))

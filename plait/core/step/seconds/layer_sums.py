"""A layer and the ends of a stage as sums over their ops (``op_seconds``): computation, collectives and
launches of every pass, as columns."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from plait.core.step.ops import AGAIN_KINDS, FORWARD_KINDS, Kind, branches_of, send_of, steps_of
from plait.core.step.seconds.op_seconds import OpSeconds, Priced
from plait.core.step.seconds.rates import Seconds
from plait.core.step.segments import SegmentGraph, Site

_NAMED = (Kind.SECOND, Kind.WEIGHT_GRAD)


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


class LayerSums(NamedTuple):
    """Of one layer: forward; backward without what is computed again; that. Of the ends, both passes of what
    a stage has that begins with the embedding, ends with the head, or hands on what it computed; and of the
    head's, the backward alone."""

    forward: Pass
    backward: Pass
    again: Pass
    embed: Pass
    head: Pass
    leave: Pass
    head_backward: Pass

    @staticmethod
    def of(priced: Priced) -> LayerSums:
        """Of every point."""
        count, fields = len(priced.points), len(Pass._fields)
        columns = np.zeros((len(LayerSums._fields), fields, count))
        for which, ops in priced.structures():
            for at, one in enumerate(_sums(ops)):
                for number, value in enumerate(one):
                    columns[at, number, which] = value
        return LayerSums(*(Pass(*each) for each in columns))


def _sums(ops: OpSeconds) -> Iterable[Pass]:
    """Of the points of one structure."""
    layers: tuple[Site, ...] = ("block",) if ops.graph.parallel_block else ("attn", "mlp")
    ends: tuple[Site, ...] = ("embed", "head")
    kinds = {site: ops.graph.kinds(site, 0) for site in (*layers, *ends)}

    def total(sites: Iterable[Site], wanted: frozenset[Kind]) -> Pass:
        each = (_pass(ops, site, kind) for site in sites for kind in kinds[site] if kind in wanted)
        return reduce(_both, each, Pass())

    yield total(layers, FORWARD_KINDS)
    yield total(layers, frozenset(Kind) - FORWARD_KINDS - AGAIN_KINDS)
    yield total(layers, AGAIN_KINDS)
    # A stage's last join gathers, its first one only behind an embedding: so beside one for each of its
    # layers' joins a stage with an embedding has one more.
    join = ops.sent("head", Kind.NORM_GRAD)
    embed, head = (total((site,), frozenset(Kind)) for site in ends)
    yield embed._replace(tp=embed.tp + join)
    yield head._replace(tp=head.tp - join)
    norms = (ops.compute("leave", kind) for kind in (Kind.NORM, Kind.NORM_GRAD))
    yield Pass(elementwise=sum(work.passes for work in norms))
    yield total(("head",), frozenset(Kind) - FORWARD_KINDS)


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

"""Lists of segment ops, each found once: many strategies of a job have the same, to be walked and to be
timed, and finding one takes longer than either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import frexp, ldexp

from plait.core.parallel.strategy import Overlap, slice_sizes
from plait.core.step.orders.overlap import segment_order
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.core.step.segments import LAYERS, Action, SegmentGraph

Told = tuple[tuple[str, float], ...]


def known_order(graph: SegmentGraph, overlap: Overlap, costs: SegmentCosts, batch: int) -> Sequence[Action]:
    """The list of ``segment_order``. Where layers are equal, so are the lists of stages that hold others; and
    those of costs that are all twice as large, or any power of two, are the same."""
    first = 0 if graph.resampling else graph.first_layer
    sizes = slice_sizes(batch, graph.p1)
    alike = graph.p1 if len(set(sizes)) == 1 else batch  # equal slices are so whatever their size
    ordered = _ordered(replace(graph, first_layer=graph.first_layer - first), overlap, *_scaled(costs), alike)
    return [later(one, first) for one in ordered] if first else ordered


@lru_cache(maxsize=256)
def _ordered(
    graph: SegmentGraph, overlap: Overlap, compute: Told, collective: Told, latency: float, batch: int
) -> Sequence[Action]:
    return segment_order(graph, overlap, SegmentCosts(dict(compute), dict(collective), latency), batch)


def later(action: Action, layers: int) -> Action:
    """The same in a stage that begins so many layers later."""
    verb, op = action
    return Action(verb, op._replace(layer=op.layer + layers)) if layers and op.site in LAYERS else action


def _scaled(costs: SegmentCosts) -> tuple[Told, Told, float]:
    """In units of a power of two, by which numbers are divided without error."""
    largest = max([*costs.compute.values(), *costs.collective.values(), costs.latency], default=0.0)
    power = -frexp(largest)[1]

    def told(seconds: dict[str, float]) -> Told:
        return tuple((key, ldexp(value, power)) for key, value in seconds.items())

    return told(costs.compute), told(costs.collective), ldexp(costs.latency, power)

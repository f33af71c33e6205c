"""A predicted step as a picture shows it: what a rank of every place does when, and what its memory holds
then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from plait.core.base.pictures import Bar, PlotCurve
from plait.core.record.timeline import Span
from plait.core.step.clock.pipeline import Simulated
from plait.core.step.memory.estimate import MemoryOfPlace
from plait.core.step.memory.pipeline_memory import Peak
from plait.core.step.step import Step
from plait.plan.memory_report import MemoryReport

CELLS = 1_000
"""Moments that a picture tells apart: whatever takes most of one is what it shows."""
MOST_PLACES = 8
"""Of more, some are shown: the first, the last, and others between at equal distances."""


def shown_places(count: int) -> list[int]:
    """Numbers of the places that a picture shows.

    >>> shown_places(3), shown_places(15)
    ([0, 1, 2], [0, 2, 4, 6, 8, 10, 12, 14])
    """
    if count <= MOST_PLACES:
        return list(range(count))
    return sorted({round(at * (count - 1) / (MOST_PLACES - 1)) for at in range(MOST_PLACES)})


def step_bars(simulated: Simulated) -> list[Bar]:
    """What the first rank of every shown place does in a step in the middle of a run, and what its network
    does."""
    meshes = simulated.simulation.step.layout.meshes
    places = {meshes[place].first: place for place in shown_places(len(meshes))}
    spans = defaultdict[tuple[int, str], list[Span]](list)
    for span in simulated.timeline((1,), tuple(places)).spans:
        spans[span.rank, span.lane].append(span)
    return [
        bar
        for rank, place in places.items()
        for lane, name in (("processor", f"place {place}"), ("network", f"place {place}, network"))
        for bar in _runs(spans[rank, lane], name, simulated.seconds)
    ]


def _runs(spans: Sequence[Span], row: str, seconds: float) -> Iterator[Bar]:
    """Cells of one kind in a row are one bar."""
    each, busy = seconds / CELLS, [defaultdict[str, float](float) for _ in range(CELLS)]
    for span in spans:
        first, last = (min(CELLS - 1, int(at / each)) for at in (span.start, span.end))
        for cell in range(first, last + 1):
            shared = min(span.end, (cell + 1) * each) - max(span.start, cell * each)
            busy[cell][_kind(span)] += max(0.0, shared)
    sums = [sum(cell.values()) for cell in busy]
    least = min(each / 2, 0.99 * max(sums))  # a row of short spans keeps its longest
    told = [
        max(cell, key=lambda kind: cell[kind]) if some > least else "" for cell, some in zip(busy, sums, strict=True)
    ]
    at = 0
    for kind, cells in groupby(told):
        count = len(list(cells))
        if kind:
            yield Bar(row, at * each, (at + count) * each, "", kind)
        at += count


def _kind(span: Span) -> str:
    match span.kind:
        case "compute":
            return span.direction
        case "wait" | "idle":
            return "waiting"
        case "comm":
            return "collective"
        case _:
            return "transfer"


def memory_curves(simulated: Simulated, step: Step, report: MemoryReport, *, gpu: bool) -> list[PlotCurve]:
    """Bytes of a rank of every shown place over a step, with what its device holds besides tensors: before,
    at the fullest moment of, and after every computation of the schedule."""
    run = simulated.simulation.run()
    found = list[PlotCurve]()
    for place in shown_places(len(report.places)):
        memory = report.places[place].place.memory
        lasting = memory.total - memory.activations + report.places[place].overhead
        walk, turns = MemoryOfPlace(step, place, gpu).walk(), iter(run.courses[place].turns)
        points = [(0.0, float(lasting))]
        for op in step.listed.ranks[place]:
            before, walk.peak = walk.live, Peak(0, "", 0)
            walk.run([op])
            if op.computes:
                turn = next(turns)
                end = turn.start + turn.outcome.seconds * turn.scale
                points += [
                    (turn.start, float(lasting + before)),
                    ((turn.start + end) / 2, float(lasting + walk.peak.bytes)),
                    (end, float(lasting + walk.live)),
                ]
        points.append((simulated.seconds, float(lasting)))
        found.append(PlotCurve(f"place {place}", points))
    return found

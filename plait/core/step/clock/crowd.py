"""Ranks that share processors: how much faster some compute while others wait.

A cluster's seconds are of ranks that all compute at once (``Cluster.crowd`` of them want each processor).
While fewer do, each has a larger part of a processor, up to a whole one; all of those that compute are then
equally faster. So a step in which nothing is sent is the same step with its time stretched: what takes dt
while k of n ranks compute takes dt max(k, processors) / n. Where ranks wait for links as well, the mean of
that factor over all moments at which any rank computes stands for all of them, since links do not become
faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.core.step.clock.course import Course


def shared_pace(courses: Sequence[Course], crowd: float) -> float:
    """What computation takes in a step that was simulated as if all ranks computed all the time, as a
    multiple of that; 1 / crowd at least."""
    changes = sorted(change for course in courses for change in _changes(course))
    ranks = sum(len(course.place.step.layout.meshes[course.place.index].ranks) for course in courses)
    computing, before, whole, taken = 0, 0.0, 0.0, 0.0
    for moment, change in changes:
        if computing:
            whole += moment - before
            taken += (moment - before) * max(computing / ranks, 1 / crowd)
        computing, before = computing + change, moment
    return taken / whole if whole else 1.0


def _changes(course: Course) -> Iterator[tuple[float, int]]:
    """When the ranks of a place begin and end to compute, and how many they are."""
    count = len(course.place.step.layout.meshes[course.place.index].ranks)
    for turn in course.turns:
        for _, kind, start, end in turn.outcome.done:
            if kind == "compute" and end > start:
                yield turn.start + start * turn.scale, count
                yield turn.start + end * turn.scale, -count

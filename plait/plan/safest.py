"""The strategies that leave most memory free among those that take hardly longer than the fastest."""

from __future__ import annotations

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.step.columns.points import Points
from plait.core.step.memory.closed_memory import step_memory
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.needs import Needs
from plait.plan.search import first_of_family
from plait.plan.space import SearchRequest, enumerate_space

LONGER = 1.05
"""So many times as long as the fastest a step may take, as docs/job.md says."""


def roomiest(
    asked: SearchRequest, cluster: Cluster, precision: Precision, *, seconds: float, keep: int, most: int
) -> Points:
    """Points that take no longer than ``seconds`` in closed form, by what they need of a device, the least
    first: one of each family, at most ``keep``. most: points of the space."""
    space = enumerate_space(asked, most=most)
    taken = total_seconds(
        asked.model, space, cluster, sequence=asked.sequence, precision=precision, options=asked.options
    )
    near = np.flatnonzero(taken <= seconds)
    points, taken = space.take(near), taken[near]
    found = step_memory(
        asked.model, points, sequence=asked.sequence, precision=precision, options=asked.options,
        overhead=cluster.overhead,
    )  # fmt: skip
    needs = Needs.of(found, asked.margin, cluster)
    held = needs.fits()
    for one in asked.constraints:
        if one.quantity == "memory":
            held &= one.holds(needs.total)
    order = np.lexsort((taken, needs.all))
    points = points.take(order[held[order]])
    return points.take(first_of_family(points)[:keep])

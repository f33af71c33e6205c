"""The strategies that are most sure to fit among those that take hardly longer than the fastest. Those that
are as good as sure are as good as each other: the faster are better.
"""

from __future__ import annotations

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import Margin
from plait.core.model.precision import Precision
from plait.core.step.columns.points import Points
from plait.core.step.memory.closed_memory import step_memory
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.needs import Needs
from plait.plan.search import first_of_family
from plait.plan.space import SearchRequest, enumerate_space

LONGER = 1.05
"""So many times as long as the fastest a step may take, as docs/job.md says."""
SURELY = 0.999
"""How likely to fit is as good as sure."""
ROOMIEST = 6
"""Of the most sure ones, so many are predicted."""


def roomiest(
    asked: SearchRequest, cluster: Cluster, precision: Precision, *, seconds: float, keep: int, most: int
) -> Points:
    """Points that take no longer than ``seconds`` in closed form: first those that are as good as sure, the
    fastest first, then by what they need of a device; one of each family, at most ``keep``. most: points of
    the space."""
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
    sure = Needs.of(found, Margin(sure=SURELY), cluster).fits()
    order = np.lexsort((np.where(sure, taken, needs.all), ~sure))
    points = points.take(order[held[order]])
    return points.take(first_of_family(points)[:keep])

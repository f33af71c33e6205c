"""Who may start where while nodes are reserved for a planned job: one row a policy.

Arnold's Algorithm 1 (arXiv 2509.15940): jobs start outside the reserved zone where they fit; inside it a job
starts if it may be preempted, or if it is predicted to end before the planned job arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import JobError, nearest
from plait.place.workload import JobTrace

Floats = NDArray[np.float64]


def _never(jobs: JobTrace) -> Floats:
    return np.full(len(jobs), np.inf)


def _at_once(jobs: JobTrace) -> Floats:
    return np.zeros(len(jobs))


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """jct: the seconds that each job is believed to run, by which it is let into the zone until it is due;
    inf: never, 0: always. reserves: whether a zone is kept; else the planned job queues when it comes.
    strict: no job starts before one that waits longer. evicts: whether what is in the zone when the planned
    job comes makes room; else the planned job waits. foresees: whether the choice of the zone uses ``jct``.
    """

    name: str
    says: str
    jct: Callable[[JobTrace], Floats] = _never
    reserves: bool = True
    strict: bool = False
    evicts: bool = True
    foresees: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        QueuePolicy(name="fifo", says="in order; the planned job queues like any", reserves=False, strict=True),
        QueuePolicy(name="reserve-and-pack", says="the zone is filled last, and nobody has to go", jct=_at_once,
               evicts=False),
        QueuePolicy(name="no-jct", says="nobody enters the zone who cannot be preempted"),
        QueuePolicy(name="jct-mean", says="who should end in time, by the mean, enters", jct=lambda jobs: jobs.mean,
               foresees=True),
        QueuePolicy(name="jct-quantile", says="who ends in time nine times of ten enters", jct=lambda jobs: jobs.upper,
               foresees=True),
        QueuePolicy(name="oracle", says="who will end in time enters", jct=lambda jobs: jobs.duration, foresees=True),
    )
}  # fmt: skip
ALIASES = {"arnold": "jct-mean"}
"""The paper predicts the 10-minute interval that a job falls into, and compares that with the arrival."""


def find_policies(names: str) -> list[QueuePolicy]:
    """``fifo,arnold`` or ``all``.

    >>> [policy.name for policy in find_policies("arnold,fifo")]
    ['jct-mean', 'fifo']
    """
    if names.strip() == "all":
        return list(POLICIES.values())
    found: dict[str, QueuePolicy] = {}
    for name in (word.strip() for word in names.split(",")):
        known = POLICIES.get(ALIASES.get(name, name))
        if known is None:
            raise JobError(
                f"there is no policy '{name}'{nearest(name, [*POLICIES, *ALIASES])}",
                key="policy",
                fix=f"Policies are {', '.join([*POLICIES, *ALIASES])} and all",
            )
        found[known.name] = known
    return list(found.values())

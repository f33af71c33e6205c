"""How long a pipeline takes, in closed form: stages of unequal length, transfers, eight schedules.

w_i = f_i + b_i: forward and backward of stage i for one micro-batch; m micro-batches; c: one transfer.
Without transfers stage i of 1F1B computes m w_i, waits for the stages before it, sum w_j (j < i), and for
those behind it, D = sum w_j (j > i), once until its first backward, of which it has k = pp - 1 - i forwards
more to do, and once before its last, with k backwards to do: max(0, D - k f_i) + max(0, D - k b_i). The stage
that takes longest decides. If that is the last one, as with a head, the step is exactly m max(w) + sum of the
others; else this is a bound, missed by 5 % at most where places differ sixfold. A transfer is hidden by
nothing in 1F1B: stages i to j hold one micro-batch each while one goes there and back, so a micro-batch takes
at least (sum w + 2 c (j - i)) / (j - i + 1) in the steady state (``core.step.schedules``).
With all w equal but one, the longest such range is either one stage or the whole pipeline.

Interleaved and zero-bubble schedules (arXiv 2104.04473, 2401.10241) take as long as their longest chain of
ops (``pipeline_chains``). Tests compare all with ``core.step.clock.dry_run``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.core.step.columns.points import Points
from plait.core.step.seconds.pipeline_chains import (
    BESIDE,
    EAGER,
    GPIPE,
    INTERLEAVED,
    SPLIT,
    ZB_H2,
    ZB_V,
    Stages,
    rounds_seconds,
    split_seconds,
    v_seconds,
    where,
)  # fmt: skip
from plait.core.step.seconds.rates import Seconds

__all__ = ["BESIDE", "INTERLEAVED", "SPLIT", "ZB_V", "Pipeline", "Stages", "pipeline"]


@dataclass(frozen=True)
class Pipeline:
    """Seconds of a step's micro-batches: of the slowest place's own work; waiting to be filled and drained,
    and for slower places; waiting for transfers."""

    work: Seconds
    bubble: Seconds
    transfers: Seconds


def pipeline(stages: Stages, points: Points, *, transfer: Any, hidden: Any, steps_overlap: Any = False) -> Pipeline:
    """Seconds of all micro-batches of each point. transfer: seconds of one, one way. hidden: transfers run
    beside computation, so that only those that fill and drain the pipeline count."""
    schedule, pp, m = points.schedule, points.pp, points.num_micro
    longest = stages.longest(pp)
    v = where((schedule == INTERLEAVED) | (schedule == ZB_V), np.maximum(points.virtual, 1), 1)
    found = _waiting(stages, schedule, pp, m)
    for which, seconds in (
        (schedule == INTERLEAVED, rounds_seconds),
        (SPLIT[schedule] & (schedule != ZB_V), split_seconds),
        (schedule == ZB_V, v_seconds),
    ):
        at = np.flatnonzero(which & (pp > 1))
        if len(at):
            found[at] = seconds(stages.take(at, len(pp)), points.take(at))
    staggered = np.asarray(steps_overlap) & SPLIT[schedule]
    bubble = where(staggered, _staggered(stages, schedule, pp), found - m * longest)
    hops = 2 * transfer * (pp - 1)
    beside = np.asarray(hidden) | BESIDE[schedule]
    mean = stages.all(pp) / pp
    several = where(pp > 1, 1, 0)
    waits = np.maximum(0, mean + hops / pp - longest) * several
    # Where transfers are hidden, all hops of one micro-batch are not.
    chunks = where(schedule == INTERLEAVED, 2 * transfer * (pp * v - 1) * several, hops)
    chunks = where((schedule == ZB_V) & (m < 2 * pp), 2 * hops, chunks)
    once = where(beside, chunks, hops - np.minimum(2 * transfer / pp, waits))
    every = where(v > 1, 2 * transfer * v * several, waits)
    return Pipeline(m * longest, bubble, once + where(beside, 0, every) * (m - 1))


def _staggered(stages: Stages, schedule: Any, pp: Any) -> Seconds:
    """What a place waits for between its own first and last op, where places begin a step one after the
    other, and end it so: what weight gradients, as many as a schedule holds back, do not fill (arXiv
    2401.10241)."""
    rest = np.maximum(0, 1 - where(schedule == ZB_H2, 3, 2) * stages.weight_gradient)
    return where(schedule == ZB_V, 0, rest * (stages.all(pp) - stages.longest(pp)))


def _waiting(stages: Stages, schedule: Any, pp: Any, m: Any) -> Seconds:
    """Seconds of a step of 1F1B, or of GPipe: of the stage for which it takes longest."""
    whole = stages.all(pp)
    decided = m * stages.last + whole - stages.last
    apart = where(schedule == GPIPE, 0, where(schedule == EAGER, 2, 1))
    inner = where(pp > 2, stages.inner, 0)
    for at, own, ahead in ((0, stages.first, 0.0), (1, inner, stages.first),
                           (pp - 2, inner, stages.first + np.maximum(pp - 3, 0) * inner)):  # fmt: skip
        after, more = whole - ahead - own, np.minimum(apart * (pp - 1 - at), m - 1)
        forwards, backwards = more * own * stages.forward, more * own * (1 - stages.forward)
        waits = np.maximum(0, after - forwards) + np.maximum(0, after - backwards)
        alone = where(apart > 0, np.minimum(waits, after), after)
        decided = np.maximum(decided, where(own > 0, m * own + ahead + alone, 0) * where(pp > 1, 1, 0))
    return decided

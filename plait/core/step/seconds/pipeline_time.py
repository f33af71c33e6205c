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

A rank of an interleaved schedule has v chunks, which divides the filling; zero-bubble schedules fill it with
weight gradients (Qi 2023, arXiv 2401.10241). Tests compare these with ``core.step.clock.dry_run``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.core.step import schedules
from plait.core.step.columns.points import SCHEDULES, Points
from plait.core.step.seconds.rates import Seconds

GPIPE, EAGER, INTERLEAVED, ZB_H1, ZB_H2, ZB_V = (
    SCHEDULES.index(name) for name in ("gpipe", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
)
SPLIT, BESIDE = (
    np.array([name in some for name in SCHEDULES])
    for some in (schedules.SPLIT, ("gpipe", "eager-1f1b", "slack-1f1b", "zb-h2"))
)
"""By schedule: whether its backward is in two parts; whether transfers run beside computation."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds of one micro-batch on a rank of the first, of the last and of any other place of the pipeline;
    a pipeline of one place has only a last. forward and weight_gradient: the share of a stage's seconds.
    first_chunk: of zb-v's two stages at a place, the first one's share."""

    first: Seconds
    inner: Seconds
    last: Seconds
    forward: Seconds
    weight_gradient: Seconds
    first_chunk: Any = 0.5

    def longest(self, pp: Any) -> Seconds:
        """Of the slowest place."""
        outer = np.where(pp > 1, np.maximum(self.first, self.last), self.last)
        return np.where(pp > 2, np.maximum(outer, self.inner), outer)

    def all(self, pp: Any) -> Seconds:
        """Of one micro-batch, through the whole pipeline and back."""
        return np.where(pp > 1, self.first + self.last + np.maximum(pp - 2, 0) * self.inner, self.last)


@dataclass(frozen=True)
class Pipeline:
    """Seconds of a step's micro-batches: of the slowest place's own work; waiting to be filled and drained,
    and for slower places; waiting for transfers."""

    work: Seconds
    bubble: Seconds
    transfers: Seconds


def _where(condition: Any, yes: Any, no: Any) -> Seconds:
    """``np.where``, whose type a checker does not find."""
    found: Any = np.where(np.asarray(condition), np.asarray(yes), np.asarray(no))
    return found


def pipeline(stages: Stages, points: Points, *, transfer: Any, hidden: Any, steps_overlap: Any = False) -> Pipeline:
    """Seconds of all micro-batches of each point. transfer: seconds of one, one way. hidden: transfers run
    beside computation, so that only those that fill and drain the pipeline count."""
    schedule, pp, m = points.schedule, points.pp, points.num_micro
    longest = stages.longest(pp)
    others = _waiting(stages, schedule, pp, m) - m * longest
    v = _where((schedule == INTERLEAVED) | (schedule == ZB_V), np.maximum(points.virtual, 1), 1)
    filled = _filling(stages, schedule, np.asarray(steps_overlap)) / v
    # Fewer micro-batches than places: each of the first v - 1 rounds of chunks waits for them to come round.
    rounds = _where(schedule == INTERLEAVED, (v - 1) / v * np.maximum(0, pp - m), 0) * longest
    bubble = _where(schedule == ZB_V, _v_seconds(stages, pp, m, steps_overlap) - m * longest, others * filled + rounds)
    way = SPLIT[schedule] & ((schedule != ZB_V) | (m < pp))
    bubble = _where(way, np.maximum(bubble, _way(stages, pp, m) - m * longest), bubble)
    hops = 2 * transfer * (pp - 1)
    beside = np.asarray(hidden) | BESIDE[schedule]
    mean = stages.all(pp) / pp
    several = _where(pp > 1, 1, 0)
    waits = np.maximum(0, mean + hops / pp - longest) * several
    # Where transfers are hidden, all hops of one micro-batch are not.
    chunks = _where(schedule == INTERLEAVED, 2 * transfer * (pp * v - 1) * several, hops)
    chunks = _where((schedule == ZB_V) & (m < 2 * pp), 2 * hops, chunks)
    once = _where(beside, chunks, hops - np.minimum(2 * transfer / pp, waits))
    every = _where(v > 1, 2 * transfer * v * several, waits)
    return Pipeline(m * longest, bubble, once + _where(beside, 0, every) * (m - 1))


def _waiting(stages: Stages, schedule: Any, pp: Any, m: Any) -> Seconds:
    """Seconds of a step of 1F1B, or of GPipe: of the stage for which it takes longest."""
    whole = stages.all(pp)
    decided = m * stages.last + whole - stages.last
    apart = _where(schedule == GPIPE, 0, _where((schedule == EAGER) | (schedule == ZB_H2), 2, 1))
    inner = _where(pp > 2, stages.inner, 0)
    for at, own, ahead in ((0, stages.first, 0.0), (1, inner, stages.first),
                           (pp - 2, inner, stages.first + np.maximum(pp - 3, 0) * inner)):  # fmt: skip
        after, more = whole - ahead - own, np.minimum(apart * (pp - 1 - at), m - 1)
        forwards, backwards = more * own * stages.forward, more * own * (1 - stages.forward)
        waits = np.maximum(0, after - forwards) + np.maximum(0, after - backwards)
        alone = _where(apart > 0, np.minimum(waits, after), after)
        decided = np.maximum(decided, _where(own > 0, m * own + ahead + alone, 0) * _where(pp > 1, 1, 0))
    return decided


def _way(stages: Stages, pp: Any, m: Any) -> Seconds:
    """Seconds of a step of a split backward in which weight gradients hide: one micro-batch there and back,
    the forwards and input gradients of the others, one weight gradient."""
    back = 1 - stages.weight_gradient
    return _where(pp > 1, back * (stages.all(pp) + (m - 1) * stages.longest(pp)) + stages.longest(pp) * (1 - back), 0)


def _v_seconds(stages: Stages, pp: Any, m: Any, steps_overlap: Any) -> Seconds:
    """Seconds of a step of zb-v, found by simulating it. The last place waits for a forward and an input
    gradient of one stage at each other place, less the shortest of these and of one and a half weight
    gradients, once micro-batches are many. A first place that takes longer waits for half a weight gradient
    of each, less what makes the first stages longer than the second ones; where micro-batches are few, it
    begins with its last stage after all forwards, and ends after all input gradients."""
    share, other, part = stages.weight_gradient, _where(pp > 2, stages.inner, stages.last), stages.first_chunk
    shortest = np.minimum(np.minimum(stages.forward, 1 - share - stages.forward), 1.5 * share)
    hidden = shortest * np.clip(m / pp - 1, 0, 1)
    ahead = np.maximum(0, share / 2 - (part - 0.5))
    filling = _where(steps_overlap, 0.0, (pp - 1) * other)
    alike = m * np.maximum(other, stages.last) + filling * (1 - share - hidden) * part
    few = m * (stages.first - part * other) + other * ((1 - share) * (pp - 1 + part) + share * part)
    first = np.maximum(m * stages.first + filling * ahead, _where(steps_overlap, 0.0, few))
    return _where(pp > 1, np.maximum(alike, first), m * stages.last)


def _filling(stages: Stages, schedule: Any, steps_overlap: Any) -> Seconds:
    """How much of the other places' work the slowest one waits for while the pipeline fills and drains."""
    start = _where(steps_overlap, 0.0, stages.forward)  # places begin one after the other, and end so
    one, two = (np.maximum(start, 1 - times * stages.weight_gradient) for times in (2, 3))
    return _where(schedule == ZB_H1, one, _where(schedule == ZB_H2, two, 1.0))

"""Interleaved and zero-bubble pipelines in closed form: the seconds of their longest chain of ops.

Each place's order is fixed, so a step takes as long as the longest chain of ops of which each waits for the
one before it, at its place or by its data. For p places and m micro-batches few chains can be the longest
whatever ops take; which those are, and how many ops of each kind they have, was found from dry runs of all
kinds of costs. Every chain is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from plait.core.step import schedules
from plait.core.step.columns.distinct import Ints
from plait.core.step.columns.points import SCHEDULES, Points
from plait.core.step.seconds.rates import Seconds

GPIPE, EAGER, INTERLEAVED, ZB_H2, ZB_V = (
    SCHEDULES.index(name) for name in ("gpipe", "eager-1f1b", "interleaved", "zb-h2", "zb-v")
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
    head_weight: of what the place with the head has beside its layers, the share of weight gradients.
    first_sums, other_sums: of zb-v, what weight gradients of the last micro-batch take longer at the first
    place and at another; what the first place has of these is no part of the pipeline's seconds."""

    first: Seconds
    inner: Seconds
    last: Seconds
    forward: Seconds
    weight_gradient: Seconds
    head_weight: Any = 1 / 3
    first_sums: Any = 0.0
    other_sums: Any = 0.0

    def longest(self, pp: Any) -> Seconds:
        """Of the slowest place."""
        outer = np.where(pp > 1, np.maximum(self.first, self.last), self.last)
        return np.where(pp > 2, np.maximum(outer, self.inner), outer)

    def all(self, pp: Any) -> Seconds:
        """Of one micro-batch, through the whole pipeline and back."""
        return np.where(pp > 1, self.first + self.last + np.maximum(pp - 2, 0) * self.inner, self.last)

    def take(self, which: Ints, count: int) -> Stages:
        """Those of some of ``count`` points."""
        columns = {one.name: np.broadcast_to(getattr(self, one.name), (count,)) for one in fields(self)}
        return Stages(**{name: column[which] for name, column in columns.items()})

    def layers(self, pp: Any) -> Seconds:
        """Of a place that has nothing beside its layers."""
        return np.where(pp > 2, self.inner, np.minimum(self.inner, np.minimum(self.first, self.last)))

    def parts(self, own: Any, layers: Any, weight: Any) -> tuple[Seconds, Seconds, Seconds]:
        """A place's forward, input gradient and weight gradient. weight: the share of the latter in what it
        has beside its layers; the others have as much each."""
        more, share = (own - layers) * (1 - weight) / 2, self.weight_gradient
        back = layers * (1 - share - self.forward) + more
        return layers * self.forward + more, back, layers * share + (own - layers) * weight


def where(condition: Any, yes: Any, no: Any) -> Seconds:
    """``np.where``, whose type a checker does not find."""
    found: Any = np.where(np.asarray(condition), np.asarray(yes), np.asarray(no))
    return found


def _longest(chains: Sequence[Any]) -> Seconds:
    found: Seconds = np.maximum.reduce(np.broadcast_arrays(*chains))
    return found


def rounds_seconds(stages: Stages, points: Points) -> Seconds:
    """Seconds of a step of interleaved stages, on several places. A first place that takes longer than others
    is waited for by each micro-batch of the first round, or by all of them."""
    p, m, v, inner = points.pp, points.num_micro, points.virtual, stages.layers(points.pp)
    first, last = (np.maximum(0, own - inner) for own in (stages.first, stages.last))
    # Fewer micro-batches than places: each of the first v - 1 rounds of chunks waits for them to come round.
    ops = (v * m + p - 1 + (v - 1) * np.maximum(0, p - m)) * inner / v
    group, two = where(m < p, (m + 1) / 2, m / np.maximum(1, m // p)), np.minimum(m, 2 * p)
    forwards = (2 * inner / v + first) * (p - 1) * stages.forward
    return _longest([
        ops + m * last + group * first,
        where(m > p, ops + last + m * first - forwards, 0),
        where(m > p, ops - inner / v + two * last + (m + p - two) * first, 0),
        m * (inner + first),
    ])  # fmt: skip


def split_seconds(stages: Stages, points: Points) -> Seconds:
    """Seconds of a step of zb-h1 or zb-h2, on several places: of chains through the first, the second, the
    last but one or the last. A place has ``apart`` forwards for each place behind it ahead of its input
    gradients, and so many weight gradients behind them for each before it."""
    p, m, layers = points.pp, points.num_micro, stages.layers(points.pp)
    apart = np.where(points.schedule == ZB_H2, 2, 1)
    first, inner, last = (
        stages.parts(own, layers, weight)
        for own, weight in ((stages.first, 1 / 3), (layers, 0.0), (stages.last, stages.head_weight))
    )
    chains = list[Any]()
    for at, (forward, back, weight) in ((0, first), (1, inner), (p - 2, inner), (p - 1, last)):
        begins, ends = np.asarray(at) == 0, at == p - 1
        # Forwards, and input gradients, of the places before; then both of those behind.
        ahead, home = (where(begins, 0, first[part] + np.maximum(0, at - 1) * inner[part]) for part in (0, 1))
        behind = where(ends, 0, last[0] + last[1] + np.maximum(0, p - 2 - at) * (inner[0] + inner[1]))
        forwards = np.maximum(1, m - apart * (p - 1 - at)) * forward
        weights = np.maximum(0, m - apart * at - 1 * ~begins) * weight + where(begins, 0, first[2])
        own = [m * (forward + back + weight), behind + forwards + m * (back + weight),
               behind + forwards + m * back + home + weights]  # fmt: skip
        chains += [where(begins | ends | (p > 2), ahead + one, 0) for one in own]
    return _longest(chains)


def v_seconds(stages: Stages, points: Points) -> Seconds:
    """Seconds of a step of zb-v, on several places. A place's two stages are taken as equal, but for what the
    first place has beside its layers: at the head."""
    p, m, layers, share = points.pp, points.num_micro, stages.layers(points.pp), stages.weight_gradient
    parts = stages.forward, 1 - share - stages.forward, share
    head, weight = stages.first - layers, stages.head_weight
    shorter = (layers - np.minimum(layers, stages.last)) / 2 * (1 - share)  # of a stage, where layers do not divide
    return _longest([
        layers / 2 * sum(count * part for count, part in zip(one.ops, parts, strict=True))
        + head * ((1 - weight) * one.head[0] + weight * one.head[1])
        + (one.sums[0] / 2 - 1) * stages.first_sums + one.sums[1] / 2 * stages.other_sums
        - one.through * shorter
        for one in _v_chains(p, m)
    ])  # fmt: skip


class _Chain(NamedTuple):
    """Ops that wait for each other. ops: forwards, input and weight gradients of a stage; head: of the head,
    both of the former, and weight gradients; sums: last weight gradients of a stage at the first place, and
    at others; through: so many stages, of all places, it goes through forwards and back."""

    ops: tuple[Any, Any, Any]
    head: tuple[Any, Any]
    sums: tuple[Any, Any]
    through: Any = 0


def _v_chains(p: Any, m: Any) -> list[_Chain]:
    """Chains of zb-v's order on p places, found as the longest ones of dry runs. Where micro-batches are more
    than places and fewer than twice as many, some are missing that are longer by up to 3 %."""
    many, more = 1 * (m >= 2 * p - 1), 1 * (m > p)
    fills, few, behind = np.maximum(0, 2 * p - 1 - m), more * np.maximum(1, 2 * p - m), np.clip(m - p, 1, p - 1)
    late = where(many, p - 2, np.maximum(0, m - p - 1))
    back, f = np.maximum(p - 1, 2 * p - 1 - m), np.maximum(2 * m, 2 * p)
    rest = np.maximum(np.minimum(2 * m, 2 * p), 2 * m - 2 * p + 2)
    ahead, full = many * (2 * p - 3), (1 - more) * (2 * p + m - 1)
    return [
        _Chain((f, 2 * m + 2 * p - 2, rest), (1, 0), (1, 1 - many), 2 * p),
        _Chain((2 * m + fills, 2 * m, 2 * m), (m, m), (2, 0)),
        _Chain((2 * m, 2 * m, 2 * m + many * (p - 2)), (m, m - 1), (0, 2)),
        _Chain((2 * m + fills, 2 * m + back, np.maximum(2 * m - p, m + 1)), (m, m - 1), (1, 1 - many)),
        _Chain((full, full, (1 - more) * 2 * m), (0, 0), (1, 1)),
        _Chain((2 * m, 2 * m + p - 1, 2 * m), (1, 0), (0, 2)),
        _Chain((2 * m, 2 * m + few, 2 * m + late), (behind, behind - 1), (0, 2)),
        _Chain((more * (2 * m - np.minimum(p - 1, m - p - 1)), more * (2 * m + 2 * p - 2), more * (2 * m - 2 * p + 1)),
               (more * (m - p + 1), more * (m - p - 1)), (1, 0)),
        _Chain((2 * m, 2 * m + more * (2 * p - 3), 2 * m - more * (2 * p - 4)), (1, 0), (0, 2)),
        _Chain((2 * m, 2 * m + more * (p - 1), 2 * m - more * (p - 1)), (2, 1), (2, 0)),
        _Chain((2 * m + ahead, 2 * m - p + 2, 2 * m), (0, 0), (0, 2)),
        _Chain((2 * m + ahead, 2 * m + 1, 2 * m - 2 * p + 2), (0, 0), (1, 0)),
        _Chain((2 * m + many, 2 * m, 2 * m + many * (p - 2)), (0, 0), (0, 2)),
    ]  # fmt: skip

"""What would have to be true for the runner-up to be the faster one: by how much links, products, attention,
memory or the host would have to be other than the cluster's file says, each alone.

The closed form proposes: a rate is tried at 2 and 4 times and at a half and a quarter. Where that turns the
order, bisection finds the least change that does. The simulation decides: both strategies are predicted again
with the nearest changes, which are enlarged while they do not suffice. Only what it confirms is told: of the
three that are nearest for 7B on 64 H100, one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from plait.core.cluster.efficiency import QUANTISED
from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import Points
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.answer import Planner
from plait.plan.candidate import Candidate
from plait.plan.job_options import options_of
from plait.plan.reasons import ALIKE
from plait.plan.what_if import changed_cluster, scaled

TRIED = (2.0, 4.0)
"""Factors, and one over them."""
NEAR = 1.005
"""Bisection ends at factors that differ by less than this."""
SIMULATED, PUSHES, BEYOND = 3, 3, 1.1
"""Changes that are simulated, how often each, and by how much further than a straight line says."""
MATMUL = ("matmul", *(f"matmul_{name}" for name in QUANTISED))
ATTENTION = ("attention_forward", "attention_backward")
HOST = ("host_layer", "host_collective")


def _reached(*names: str, times: bool = False) -> Callable[[Cluster, float], Cluster]:
    """A cluster with constants of its efficiency multiplied; ``times``: they are seconds, so divided."""

    def changed(cluster: Cluster, factor: float) -> Cluster:
        reached = cluster.efficiency
        other = {name: scaled(getattr(reached, name), 1 / factor if times else factor) for name in names}
        return cluster.model_copy(update={"efficiency": reached.model_copy(update=other)})

    return changed


def _memory(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    rate = scaled(device.memory_rate, factor)
    return cluster.model_copy(update={"device": device.model_copy(update={"memory_rate": rate})})


RATES: Mapping[str, Callable[[Cluster, float], Cluster]] = {
    "links between nodes": lambda cluster, factor: changed_cluster(cluster, {"nic": factor}),
    "links within nodes": lambda cluster, factor: changed_cluster(cluster, {"link": factor, "nic": 1 / factor}),
    "matrix products": _reached(*MATMUL),
    "attention": _reached(*ATTENTION),
    "the devices' memory": _memory,
    "the host": _reached(*HOST, times=True),
}
"""What may be faster or slower than the cluster's file says, and the cluster then."""


@dataclass(frozen=True)
class TurningPoint:
    """A rate so many times as high as it is, with which the other strategy is as fast."""

    rate: str
    factor: float

    @property
    def told(self) -> str:
        """In words, after "if"."""
        if self.factor > 1:
            return f"{self.rate} were {self.factor:.3g} times as fast"
        return f"{self.rate} were {1 / self.factor:.3g} times as slow"

    @property
    def size(self) -> float:
        """How far it is from 1, as a factor."""
        return max(self.factor, 1 / self.factor)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Sensitivity:
    """Changes with which the runner-up is the faster one, the least first. proposed: how many of the closed
    form's were simulated. how: they were confirmed; of jobs that are never simulated, in closed form."""

    turns: Sequence[TurningPoint]
    proposed: int
    how: str = "simulated"

    def told(self, slower: str = "the runner-up") -> str:
        """In a sentence."""
        if self.turns:
            changes = ", or ".join(turn.told for turn in self.turns)
            return f"{slower.capitalize()} would be the faster one if {changes} (each alone, {self.how})."
        if self.proposed:
            return f"What in closed form would make {slower} the faster one does not when it is simulated."
        return (
            f"Nothing up to {TRIED[-1]:g} times as fast or slow would in closed form make {slower} the faster "
            f"one: not {', '.join(RATES)}, each alone."
        )


def sensitivity(planner: Planner, best: Candidate, other: Candidate) -> Sensitivity | None:
    """With what ``other`` would be faster than ``best``, of the planner's job. None where the closed form
    knows nothing of one of them, or they take as long."""
    longer = other.seconds / best.seconds - 1
    if best.closed_form is None or other.closed_form is None or longer < ALIKE:
        return None
    proposed = sorted(_proposed(planner, best, other), key=lambda turn: turn.size)[:SIMULATED]
    held = [one for turn in proposed if (one := _confirmed(planner, best, other, turn))]
    how = "in closed form" if planner.closed else "simulated"
    return Sensitivity(sorted(held, key=lambda turn: turn.size), len(proposed), how)


def _proposed(planner: Planner, best: Candidate, other: Candidate) -> Iterator[TurningPoint]:
    """In closed form, scaled to what is predicted of each as things are."""
    job, cluster, pair = best.job, planner.cluster, Points.of([dict(one.point) for one in (best, other)])
    options = options_of(job, cluster.device, planner.framework)
    scale = [one.seconds / one.closed_form for one in (best, other) if one.closed_form]

    def lost(changed: Cluster) -> float:
        seconds = total_seconds(
            planner.model, pair, changed,
            sequence=job.data.sequence_length, precision=job.train.precision, options=options,
        )  # fmt: skip
        return float(seconds[1]) * scale[1] - float(seconds[0]) * scale[0]

    for name, changed in RATES.items():
        for factor in _turning(lambda factor, changed=changed: lost(changed(cluster, factor)), _most(name, cluster)):
            yield TurningPoint(name, factor)


def _confirmed(planner: Planner, best: Candidate, other: Candidate, turn: TurningPoint) -> TurningPoint | None:
    """A change with which the other is faster when both are predicted anew: the one proposed, or a larger
    one. None if none within ``TRIED`` is found."""
    limit = math.log(min(_most(turn.rate, planner.cluster), TRIED[-1]) if turn.factor > 1 else TRIED[-1])
    sign, at, before = math.copysign(1.0, math.log(turn.factor)), abs(math.log(turn.factor)), 0.0
    loss = other.seconds - best.seconds
    for _ in range(PUSHES):
        factor = math.exp(sign * at)
        there = replace(planner, cluster=RATES[turn.rate](planner.cluster, factor))
        now = there.seconds(other.job) - there.seconds(best.job)
        if now < 0:
            return TurningPoint(turn.rate, factor)
        if now >= loss or at >= limit:
            return None
        at, before, loss = min(limit, at + BEYOND * now * (at - before) / (loss - now)), at, now
    return None


def _most(name: str, cluster: Cluster) -> float:
    """The largest factor that leaves shares of a peak at most 1."""
    names = {"matrix products": MATMUL, "attention": ATTENTION}.get(name, ())
    return min((1 / getattr(cluster.efficiency, one).value for one in names), default=TRIED[-1])


def _turning(lost: Callable[[float], float], most: float) -> Iterator[float]:
    """Of factors above and below 1, those nearest to it at which nothing is lost any more."""
    for up in (True, False):
        held = 1.0
        for tried in TRIED:
            factor = min(tried, most) if up else 1 / tried
            if lost(factor) < 0:
                yield _bisected(lost, held, factor)
                break
            held = factor


def _bisected(lost: Callable[[float], float], held: float, turned: float) -> float:
    """The factor between one that holds and one that turns; it turns."""
    while max(turned / held, held / turned) > NEAR:
        middle = (held * turned) ** 0.5
        held, turned = (held, middle) if lost(middle) < 0 else (middle, turned)
    return turned

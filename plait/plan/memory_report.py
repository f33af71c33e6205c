"""What fills each device under one strategy, when in a step, and how sure it is to fit.

Exact where ``step.memory.estimate`` is: the chosen strategy is walked place by place. Changes are tried
all at once, in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from plait.core.base.errors import InfeasiblePlan
from plait.core.base.text import in_bytes
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.overhead import Overhead
from plait.core.job.constraint import NO_MARGIN, Margin
from plait.core.job.spec import Job
from plait.core.parallel.sharding import Sharding
from plait.core.step.columns.points import Points
from plait.core.step.memory.closed_memory import device_overhead, usable
from plait.core.step.memory.estimate import Estimate, PlaceEstimate, estimate
from plait.core.step.step import Step
from plait.plan.band import P90, memory_deviation
from plait.plan.fits import KINDS, advice, by_kind
from plait.plan.make import job_step


@dataclass(frozen=True)
class PlaceMemory:
    """Of the ranks of one place of the pipeline: bytes of tensors by kind, and of what the device holds
    besides; deviation: standard deviation of their sum, in bytes."""

    place: PlaceEstimate
    overhead: int
    deviation: float = 0.0

    @staticmethod
    def of(place: PlaceEstimate, beside: int, overhead: Overhead, doubted: float = 0.0) -> PlaceMemory:
        """With its deviation. beside: bytes that are no tensors; doubted: as of ``MemoryColumns``."""
        moving = place.memory.activations + place.memory.buffers
        lasting = place.memory.total - moving
        sizes = (np.array(float(size)) for size in (lasting, moving, beside, doubted))
        return PlaceMemory(place, beside, float(memory_deviation(overhead, *sizes)))

    @property
    def total(self) -> int:
        """All of it."""
        return self.place.memory.total + self.overhead

    @property
    def band(self) -> tuple[int, int]:
        """p10 and p90 of it."""
        return int(self.total - P90 * self.deviation), int(self.total + P90 * self.deviation)


@dataclass(frozen=True)
class MemoryReport:
    """Of every place. usable: bytes of a device that a plan may fill. margin: what of them is to stay
    free."""

    places: tuple[PlaceMemory, ...]
    usable: int
    margin: Margin = NO_MARGIN

    @property
    def fullest(self) -> PlaceMemory:
        """The first, if equal."""
        return max(self.places, key=lambda place: place.total)

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must, if it is as predicted."""
        return self.fullest.total <= self.usable

    @property
    def safe(self) -> bool:
        """Whether every device has as much free as is to stay so."""
        return all(place.total + self.kept(place) <= self.usable for place in self.places)

    def kept(self, place: PlaceMemory) -> int:
        """Bytes of its devices that are to stay free."""
        return int(self.margin.kept(place.deviation, self.usable))

    @property
    def likely(self) -> float:
        """Probability that it fits: the least of all places, whose errors are taken to go together."""
        return min(_probability(self.usable - place.total, place.deviation) for place in self.places)

    @property
    def told(self) -> str:
        """How full the fullest device is, what is free, and how sure that is to be enough."""
        full, margin = self.fullest, self.margin
        room, kept = self.usable - full.total, in_bytes(self.kept(full))
        free = f"{in_bytes(room)} stay free" if room >= 0 else f"{in_bytes(-room)} too much"
        told = f"fills {in_bytes(full.total)} of {in_bytes(self.usable)}, {free}: {percent(self.likely)} sure to fit"
        if margin.kept(1.0, 1.0):
            return f"{told} ({kept} are to stay free, {margin.why}{'' if self.safe else ': more than do'})"
        return f"{told}, {percent(1 - self.likely)} to run out of memory"

    @property
    def told_crowded(self) -> str:
        """A sentence on what fits and leaves less free than the margin asks for."""
        kept = f"{in_bytes(self.kept(self.fullest))} are to stay free, {self.margin.why}"
        return f"The strategy leaves too little memory free: it {self.told}: {kept}"

    def told_too_large(self, device: str) -> str:
        """A sentence on what is too much for a device of this name."""
        fullest = self.fullest
        more = f"{in_bytes(fullest.total - self.usable)} more than the {in_bytes(self.usable)} of {device}"
        what = by_kind(asdict(fullest.place.memory))
        return (
            f"The strategy does not fit: a rank of place {fullest.place.index} of the pipeline needs "
            f"{in_bytes(fullest.total)} ({what}, beside tensors {in_bytes(fullest.overhead)}), {more} that a plan may "
            "fill."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        low, high = self.fullest.band
        return {
            "usable_memory": self.usable,
            "memory_p10": low,
            "memory_p90": high,
            "memory_kept_free": self.kept(self.fullest),
            "probability_to_fit": self.likely,
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A table: its head, then a row a place."""
        yield "place", "layers", *KINDS, "overhead", "total", "p10-p90", "of device", "fullest"
        for each in self.places:
            memory, place = each.place.memory, each.place
            sizes = [getattr(memory, kind) for kind in KINDS]
            layers = "+".join(str(count) for count in place.layers.values())
            alive = f", {memory.alive} micro-batches alive" if memory.alive > 1 else ""
            share = f"{each.total / self.usable:.0%}"
            words = [in_bytes(size) for size in (*sizes, each.overhead, each.total)]
            words.append("-".join(map(in_bytes, each.band)))
            yield str(place.index), layers, *words, share, memory.when + alive


def estimate_on(step: Step, cluster: Cluster, *, traffic: bool = True) -> Estimate:
    """Memory and traffic of a step on a cluster's devices. traffic: as of ``estimate``."""
    return estimate(step, gpu=cluster.device.kind == "cuda", traffic=traffic)


def memory_report(
    step: Step, cluster: Cluster, margin: Margin = NO_MARGIN, found: Estimate | None = None
) -> MemoryReport:
    """Memory of a strategy on a cluster's devices. The rank with the largest share stands for a place.

    found: the step's ``estimate_on`` the cluster, where it is there already.
    """
    found, overhead = found or estimate_on(step, cluster, traffic=False), cluster.overhead
    moving = [place.memory.activations + place.memory.buffers for place in found.places]
    strategy, pp = step.strategy, len(found.places)
    points = Points.of([
        {"pp": pp, "dp": place.dp, "cp": place.cp, "ring": strategy.ring, "tp": place.tp, **_factors(sharding)}
        for place, sharding in zip(found.places, step.shardings, strict=True)
    ])  # fmt: skip
    extra = device_overhead(overhead, points, np.array(moving, dtype=np.float64))
    places = tuple(PlaceMemory.of(place, int(more), overhead) for place, more in zip(found.places, extra, strict=True))
    return MemoryReport(places, int(usable(cluster.device, overhead)), margin)


def check_fits_on(job: Job, report: MemoryReport, vocab: int, cluster: Cluster) -> None:
    """Raise InfeasiblePlan if the job's ranks need more than the cluster's devices have: how much, and the
    nearest change that would fit."""

    def fits(other: Job) -> bool:
        return memory_report(job_step(other, vocab), cluster).fits

    if not report.fits:
        instead = advice(job, vocab, fits, own_devices=True)
        raise InfeasiblePlan(f"{report.told_too_large(cluster.device.name)} {instead}")


def _probability(room: float, deviation: float) -> float:
    """That an error is no larger than the room there is."""
    return NormalDist().cdf(room / deviation) if deviation > 0 else float(room >= 0)


def percent(share: float) -> str:
    """A probability in words; what is nearly sure is not said to be so.

    >>> percent(0.9), percent(0.9996), percent(0.0004)
    ('90%', 'over 99.9%', 'under 0.1%')
    """
    if share > 0.999:
        return "over 99.9%"
    if share < 0.001:
        return "under 0.1%"
    return f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.1%}"


def _factors(sharding: Sharding) -> dict[str, int]:
    return {name: getattr(sharding, name) for name in ("params", "grads", "optim", "secondary")}

"""What fills each device under one strategy, and when in a step.

Exact where ``step.memory.estimate`` is: the chosen strategy is walked place by place. Changes are tried
all at once, in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plait.core.base.text import in_bytes
from plait.core.cluster.hardware import Cluster
from plait.core.parallel.sharding import Sharding
from plait.core.step.columns.points import Points
from plait.core.step.memory.closed_memory import device_overhead, usable
from plait.core.step.memory.estimate import PlaceEstimate, estimate
from plait.core.step.step import Step
from plait.plan.fits import KINDS


@dataclass(frozen=True)
class PlaceMemory:
    """Of the ranks of one place of the pipeline: bytes of tensors by kind, and of what the device holds
    besides."""

    place: PlaceEstimate
    overhead: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.place.memory.total + self.overhead


@dataclass(frozen=True)
class MemoryReport:
    """Of every place. usable: bytes of a device that a plan may fill."""

    places: tuple[PlaceMemory, ...]
    usable: int

    @property
    def fullest(self) -> PlaceMemory:
        """The first, if equal."""
        return max(self.places, key=lambda place: place.total)

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must."""
        return self.fullest.total <= self.usable

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A table: its head, then a row a place."""
        yield "place", "layers", *KINDS, "overhead", "total", "of device", "fullest"
        for each in self.places:
            memory, place = each.place.memory, each.place
            sizes = [getattr(memory, kind) for kind in KINDS]
            layers = "+".join(str(count) for count in place.layers.values())
            alive = f", {memory.alive} micro-batches alive" if memory.alive > 1 else ""
            share = f"{each.total / self.usable:.0%}"
            words = [in_bytes(size) for size in (*sizes, each.overhead, each.total)]
            yield str(place.index), layers, *words, share, memory.when + alive


def memory_report(step: Step, cluster: Cluster) -> MemoryReport:
    """Of a strategy that was chosen. The rank with the largest share stands for a place, and what it sends is
    not counted."""
    found, overhead = estimate(step, gpu=cluster.device.kind == "cuda", traffic=False), cluster.overhead
    moving = [place.memory.activations + place.memory.buffers for place in found.places]
    strategy, pp = step.strategy, len(found.places)
    points = Points.of([
        {"pp": pp, "dp": place.dp, "cp": place.cp, "ring": strategy.ring, "tp": place.tp, **_factors(sharding)}
        for place, sharding in zip(found.places, step.shardings, strict=True)
    ])  # fmt: skip
    extra = device_overhead(overhead, points, np.array(moving, dtype=np.float64))
    places = tuple(PlaceMemory(place, int(more)) for place, more in zip(found.places, extra, strict=True))
    return MemoryReport(places, int(usable(cluster.device, overhead)))


def _factors(sharding: Sharding) -> dict[str, int]:
    return {name: getattr(sharding, name) for name in ("params", "grads", "optim", "secondary")}

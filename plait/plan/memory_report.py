"""What fills each device under one strategy, and when in a step; and the nearest change with which what does
not fit would.

Exact where ``step.memory.estimate`` is: the chosen strategy is walked place by place. Changes are tried
all at once, in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from plait.core.base.errors import JobError
from plait.core.base.text import in_bytes
from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.columns.points import RECOMPUTES, Points
from plait.core.step.memory.closed_memory import device_overhead, plait_on, step_memory, usable
from plait.core.step.memory.estimate import PlaceEstimate, estimate
from plait.core.step.stages import split_layers
from plait.core.step.step import Step
from plait.plan.fits import KINDS
from plait.plan.nearest import Adjustable, changes, more_ranks, trades


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


def fitting_changes(
    model: ModelSpec,
    point: Mapping[str, int],
    cluster: Cluster,
    *,
    sequence: int,
    precision: Precision,
    ranks: bool = False,
) -> Iterator[dict[str, Any]]:
    """Changes, as keys of a job file with values, with which a point of the strategy space fits, the nearest
    first; an empty one where it fits as it is.

    They keep the number of ranks (ranks: those that do not come last) and the batch; a change that a rule
    forbids is left out."""
    tried = [({}, dict(point)), *_allowed(model, point, sequence, ranks)]
    points = Points.of([row for _, row in tried])
    found = step_memory(
        model,
        points,
        sequence=sequence,
        precision=precision,
        options=plait_on(cluster.device),
        overhead=cluster.overhead,
    )
    for at in np.flatnonzero(found.total <= usable(cluster.device, cluster.overhead)):
        yield tried[int(at)][0]


def _short(key: str) -> str:
    return key.partition(".")[2]


def _allowed(
    model: ModelSpec, point: Mapping[str, int], sequence: int, ranks: bool
) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    asked = Adjustable(
        recompute=RECOMPUTES[point["recompute"]],
        each=point["micro"],
        replicas=point["dp"] * point["cp"],
        tp=point["tp"],
        cp=point["cp"],
        pp=point["pp"],
        dp=point["dp"],
        sequence_parallel=bool(point["sequence_parallel"]),
    )
    for change in chain(changes(asked), trades(asked), more_ranks(asked) if ranks else ()):
        row = _changed(point, change)
        try:
            _check(model, row, sequence)
        except JobError:
            continue
        yield change, row


def _changed(point: Mapping[str, int], change: Mapping[str, Any]) -> dict[str, int]:
    """The point with keys of a job file changed. The batch of a step stays."""
    row = dict(point)
    batch = row["micro"] * row["num_micro"] * row["dp"]
    for key, value in change.items():
        name = _short(key)
        if name == "recompute":
            row |= {"recompute": RECOMPUTES.index(value), "recompute_layers": -1}
        elif name == "micro_batch_size":
            row["micro"] = value
        elif name == "cp":  # of the same kind: rings, or groups that exchange heads
            row |= {"cp": value, "ring": value if 1 < row["ring"] == row["cp"] else row["ring"]}
        elif name != "shard":
            row[name] = int(value)
    replicas = row["dp"] * row["cp"]
    shard = change.get("strategy.shard")
    if shard:
        row |= _factors(Sharding.named(shard, replicas))
    else:
        for name in ("optim", "grads", "params"):
            row[name] = int(np.gcd(row[name], replicas if name == "optim" else row["optim"]))
    row["ep"] = int(np.gcd(row["ep"], replicas))
    row["p1"] = min(row["p1"], row["micro"])
    row["num_micro"] = max(1, batch // (row["micro"] * row["dp"]))
    return row


def _check(model: ModelSpec, row: Mapping[str, int], sequence: int) -> None:
    """Raises JobError."""
    strategy = Strategy(
        tp=row["tp"], p1=row["p1"], p2=row["p2"], cp=row["cp"], ring=row["ring"],
        sequence_parallel=bool(row["sequence_parallel"]),
    )  # fmt: skip
    strategy.check(model, batch=row["micro"], sequence=sequence)
    split_layers(model.num_layers, row["pp"] * max(1, row["virtual"]))

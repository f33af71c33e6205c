"""How long collectives take, by kind, group layout and size, through the wires and lanes that train.

All groups of a layout communicate at once, as they do in training. Sizes grow by a factor of four until the
time is up; every kind and layout gets its small sizes before any gets a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

import torch
import torch.distributed as dist

from plait.core.cluster.profile import CollectiveKind, Curve, Group, Point
from plait.core.reshard.layouts import TensorLayout, unit_tasks
from plait.core.reshard.plan import Chain, ReshardPlan, ReshardStep
from plait.core.step.segments import Collective
from plait.train.comm.lanes import Lane
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.machine.device import AsyncWork, RankDevice
from plait.train.profile.clock import FEWEST, Clock

SMALLEST, GROWTH = 1 << 12, 4
LARGEST = {"gloo": 1 << 26, "staged": 1 << 26, "nccl": 1 << 30}
"""Bytes of the whole tensor."""
ALWAYS = 3
"""Sizes of every curve, whatever they take: fewer say nothing of its shape."""
CHUNK = 1 << 22
"""Bytes of one message of a send, at most; the same for resharding's."""
BROADCAST_CHUNK = 1 << 20
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class EqualGroups:
    """Equal groups of ranks that cover the world."""

    groups: tuple[tuple[int, ...], ...]
    group: Group


def layouts(world: int, per_node: int, nodes_per_minipod: int = 0) -> list[EqualGroups]:
    """Groups inside a node, across nodes, across minipods, and of several of these at once: pairs, fours, and
    as many as there are.

    >>> [str(one.group) for one in layouts(4, 2)]
    ['2 ranks, in a node', '2 ranks, one on each of 2 nodes', '4 ranks, on 2 nodes']
    """
    spans = sorted({1, min(per_node, world), min(per_node * (nodes_per_minipod or world), world), world})
    shapes: list[tuple[int, int]] = []  # ranks of a group, stride
    for inner, outer in pairwise(spans):
        shapes += [(count, inner) for count in (2, 4, outer // inner) if outer % (count * inner) == 0]
        shapes += [(outer, 1)]
    found: list[EqualGroups] = []
    for count, stride in dict.fromkeys(shapes):
        if world % (count * stride) == 0:
            blocks = range(0, world, count * stride)
            groups = tuple(
                tuple(range(first + at, first + count * stride, stride)) for first in blocks for at in range(stride)
            )
            group = Group.of(groups[0], per_node, nodes_per_minipod=nodes_per_minipod, at_once=len(groups))
            found.append(EqualGroups(groups, group))
    return found


class Lines:
    """What one rank communicates through: its wire of every layout, and one lane. Made by all ranks at the
    same point."""

    def __init__(self, device: RankDevice, rank: int, found: Sequence[EqualGroups], per_node: int) -> None:
        self.device, self.rank, self.layouts, self.per_node = device, rank, list(found), per_node
        self.wires = [self._open(layout) for layout in self.layouts]
        self.lane = Lane(device)

    def _open(self, layout: EqualGroups) -> Wire:
        """This rank's."""
        mine = (group for group in layout.groups if self.rank in group)
        return next((open_wire(self.device.backend, group) for group in mine), NullWire())

    def close(self) -> None:
        """End the lane's thread."""
        self.lane.close()

    def operation(self, kind: CollectiveKind, at: int, nbytes: int, dtype: torch.dtype) -> Operation:
        """A collective of a layout, of about ``nbytes``."""
        if kind in ("send", "broadcast"):
            return self._moved(kind, self.layouts[at].groups, nbytes)
        return operation(kind, self.wires[at], nbytes, dtype, self.device)

    def _moved(self, kind: CollectiveKind, groups: Sequence[Sequence[int]], nbytes: int) -> Operation:
        plan = transfer(kind, groups, nbytes, dist.get_world_size(), self.per_node)
        self.lane.prepare(plan)
        tiles = [
            torch.zeros(1, nbytes, dtype=torch.uint8, device=self.device.torch_device)
            if self.rank in layout.ranks
            else None
            for layout in (plan.source, plan.destination)
        ]
        return Operation(nbytes, lambda: self.lane.start(plan, *tiles).wait())


@dataclass(frozen=True)
class Operation:
    """bytes: of the whole tensor. run: does it once. start: begins it, where a wire carries it."""

    bytes: int
    run: Callable[[], object]
    start: Callable[[], AsyncWork] | None = None


def operation(kind: Collective, wire: Wire, nbytes: int, dtype: torch.dtype, device: RankDevice) -> Operation:
    """A collective of a tensor of about ``nbytes``, such that every rank has as much of it."""
    n = wire.size
    share = -(-nbytes // (dtype.itemsize * n * n)) * n  # elements of a rank's part, of which each gets as many
    whole, part = (torch.zeros(size, dtype=dtype, device=device.torch_device) for size in (share * n, share))
    result, source = {
        "all_reduce": (whole, whole),
        "all_gather": (whole, part),
        "reduce_scatter": (part, whole),
        "all_to_all": (torch.zeros_like(part), part),
    }[kind]

    def start() -> AsyncWork:
        return wire.start(kind, result, source)

    return Operation(whole.nbytes, lambda: start().wait(), start)


def transfer(
    kind: CollectiveKind, groups: Sequence[Sequence[int]], nbytes: int, world: int, per_node: int
) -> ReshardPlan:
    """The first rank of each group sends ``nbytes`` to the second (send), or to all others (broadcast), as
    between stages of a pipeline."""
    others = len(groups[0]) - 1
    source = TensorLayout((len(groups),), tuple(group[0] for group in groups), ((0,), ()))
    receivers = tuple(rank for group in groups for rank in group[1:])
    destination = TensorLayout((len(groups), others), receivers, ((0,), ()))
    shape = (len(groups), nbytes)
    way, chunk = ("send_recv", CHUNK) if kind == "send" else ("broadcast", BROADCAST_CHUNK)
    steps = tuple(
        ReshardStep(task, way, (Chain(task.holders[0], task.receivers),), -(-nbytes // chunk), 0, 0)
        for task in unit_tasks(source, destination, shape)
    )
    hosts = tuple(rank // per_node for rank in range(world))
    return ReshardPlan(
        source=source, destination=destination, shape=shape, itemsize=1, hosts=hosts, steps=steps, order="list",
        lower_bound=0,
    )  # fmt: skip


@dataclass
class _Curve:
    """A curve while it grows. ended: larger messages would take too long."""

    kind: CollectiveKind
    at: int
    points: list[Point] = field(default_factory=list)
    ended: bool = False


def measure_collectives(
    lines: Lines,
    clock: Clock,
    dtype: torch.dtype,
    say: Callable[[str], object],
    *,
    kinds: Sequence[CollectiveKind] = KINDS,
) -> list[Curve]:
    """The curves of every kind and layout; sends of pairs only. say: what is measured now."""
    curves = [
        _Curve(kind, at)
        for at, layout in enumerate(lines.layouts)
        for kind in kinds
        if kind != "send" or layout.group.ranks == 2
    ]
    sizes = list(_sizes(lines.device.backend))
    for number, size in enumerate(sizes):
        for curve in [each for each in curves if not each.ended]:
            say(f"{curve.kind} of {size >> 10} KiB, {lines.layouts[curve.at].group}")
            waiting = sum(not each.ended for each in curves) * (len(sizes) - number)
            budget = 2 * clock.left() / waiting
            expected = curve.points[-1].seconds * GROWTH if number else 0.0
            if number >= ALWAYS and (FEWEST + 1) * expected > max(2 * budget, clock.left() / 4):
                curve.ended = True
                continue
            found = lines.operation(curve.kind, curve.at, size, dtype)
            timed = clock.sample(found.run, budget, together=True)
            curve.points.append(Point(bytes=found.bytes, seconds=timed.seconds, spread=timed.spread))
    return [Curve(kind=one.kind, group=lines.layouts[one.at].group, points=tuple(one.points)) for one in curves]


def _sizes(backend: str) -> Iterator[int]:
    size = SMALLEST
    while size <= LARGEST[backend]:
        yield size
        size *= GROWTH

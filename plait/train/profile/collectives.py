"""Measure collectives by kind, group layout and size, through the same wires and lanes as training.

All groups of a layout communicate at once, as in training. Sizes grow by a factor of four until the
time is up; every kind and layout gets its small sizes before any gets a large one.

Computation and communication slow each other down. Products run alone, collectives run alone, then
both run concurrently for about as long. Whichever ends first, the other goes on alone at its own
speed; so both factors follow from the two end times (the model of
``plait.core.step.seconds.rates.overlapped``). If ranks share cores, a collective costs computation
the CPU time of its threads, summed over all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist

from plait.core.cluster.profile import CollectiveKind, Curve, Group, Overlap, Point, Product
from plait.core.model.precision import Precision
from plait.core.reshard.layouts import TensorLayout, unit_tasks
from plait.core.reshard.plan import Chain, ReshardPlan, ReshardStep
from plait.core.step.segments import Collective
from plait.train.comm.lanes import Lane
from plait.train.comm.tree import largest
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.machine.device import AsyncWork, Mark, RankDevice, torch_dtype
from plait.train.tune.timing import FEWEST, Clock

SMALLEST, GROWTH = 1 << 12, 4
LARGEST = {"gloo": 1 << 26, "staged": 1 << 26, "nccl": 1 << 30}
"""Largest size of a measured collective, in bytes of the whole tensor, by backend."""
ALWAYS = 3
"""The number of sizes in every curve, whatever their time: fewer do not show the curve's shape."""
CHUNK = 1 << 22
"""Bytes of one message of a send, at most; the same as in resharding."""
BROADCAST_CHUNK = 1 << 20
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class EqualGroups:
    """Disjoint groups of equal size that cover the world."""

    groups: tuple[tuple[int, ...], ...]
    group: Group


def layouts(world: int, per_node: int, nodes_per_minipod: int = 0) -> list[EqualGroups]:
    """Return groups inside a node, across nodes, across minipods, and over several of these levels
    at once: pairs, groups of four, and groups of all.

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


class Channels:
    """One rank's channels: its wire of every layout, and one lane. Created by all ranks at the same
    point."""

    def __init__(self, device: RankDevice, rank: int, group_layouts: Sequence[EqualGroups], per_node: int) -> None:
        self.device, self.rank, self.layouts, self.per_node = device, rank, list(group_layouts), per_node
        self.wires = [self._open(layout) for layout in self.layouts]
        self.lane = Lane(device)

    def _open(self, layout: EqualGroups) -> Wire:
        """Return this rank's wire of a layout."""
        mine = (group for group in layout.groups if self.rank in group)
        return next((open_wire(self.device.backend, group) for group in mine), NullWire())

    def close(self) -> None:
        """End the lane's thread."""
        self.lane.close()

    def operation(self, kind: CollectiveKind, at: int, nbytes: int, dtype: torch.dtype) -> Operation:
        """Return a collective of layout number ``at``, of about ``nbytes`` bytes."""
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
    """A collective to measure. bytes: of the whole tensor. run: performs it once. start: begins it
    asynchronously, if it runs on a wire."""

    bytes: int
    run: Callable[[], object]
    start: Callable[[], AsyncWork] | None = None


def operation(kind: Collective, wire: Wire, nbytes: int, dtype: torch.dtype, device: RankDevice) -> Operation:
    """Return a collective of a tensor of about ``nbytes`` bytes, rounded so that all ranks have
    equal shares."""
    n = wire.size
    share = -(-nbytes // (dtype.itemsize * n * n)) * n  # elements of a rank's part, divisible by the ranks
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
    """Return the plan in which the first rank of each group sends ``nbytes`` bytes to the second
    rank (send), or to all other ranks (broadcast), as between pipeline stages."""
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
    """A curve while it is measured. ended: larger messages would take too long."""

    kind: CollectiveKind
    at: int
    points: list[Point] = field(default_factory=list)
    ended: bool = False


def measure_collectives(
    lines: Channels,
    clock: Clock,
    dtype: torch.dtype,
    say: Callable[[str], object],
    *,
    kinds: Sequence[CollectiveKind] = COLLECTIVE_KINDS,
) -> list[Curve]:
    """Measure the curves of every kind and layout; sends for pairs only. say: receives a
    description of the current measurement."""
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


OVERLAPPED_KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather")
BYTES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
LEAST = 2e-2
"""The shortest useful duration of a collective in seconds; shorter ones are dominated by
latency."""
TIMES = 5
"""Repetitions of a concurrent measurement."""
LARGEST_SHARE = 0.8
"""The largest share of its cores that computation loses to communication; larger values are
noise."""
LEAST_FACTOR = 0.05
"""The least share of an operation's solo time that counts as done while both run; noise can make it
smaller, or negative."""


class Ends(NamedTuple):
    """Seconds until computation and communication end, alone or from a common start."""

    computation: float
    communication: float


def factors(alone: Ends, concurrent: Ends) -> tuple[float, float]:
    """Return the slowdown of computation and of communication while the other runs.

    >>> factors(Ends(1.0, 1.0), Ends(1.25, 1.5))
    (1.25, 1.6666666666666667)
    """
    both = min(concurrent)  # from then on the remainder runs alone
    left = concurrent.computation - both, concurrent.communication - both
    done = (max(own - rest, own * LEAST_FACTOR) for own, rest in zip(alone, left, strict=True))
    computation, communication = (both / part for part in done)
    return computation, communication


def crowded(share: float) -> float:
    """Return the slowdown of computation when a concurrent operation takes this share of its cores.

    >>> crowded(0.2)
    1.25
    """
    return 1 / (1 - min(share, LARGEST_SHARE))


def measure_overlaps(
    lines: Channels, products: list[Product], precision: Precision, clock: Clock, say: Callable[[str], object]
) -> list[Overlap]:
    """Measure every kind and layout: a collective concurrent with as many products as take about as
    long."""
    device = lines.device
    chosen = max(
        (product for product in products if product.seconds < LEAST / 2),
        key=lambda product: product.m * product.k * product.n,
        default=min(products, key=lambda product: product.seconds),
    )
    a, b = (
        torch.randn(shape, device=device.torch_device).to(torch_dtype(precision))
        for shape in ((chosen.m, chosen.k), (chosen.k, chosen.n))
    )
    out = a.new_empty(chosen.m, chosen.n)
    cases: list[tuple[CollectiveKind, int]] = [
        (kind, at) for at in range(len(lines.layouts)) for kind in OVERLAPPED_KINDS
    ]
    found: list[Overlap] = []
    for (kind, at), budget in clock.shares(cases):
        layout = lines.layouts[at]
        say(f"{kind} beside products, {layout.group}")
        own = clock.of(budget)
        operation, seconds = _long_enough(lines, kind, at, precision, own)
        count = max(1, round(seconds / chosen.seconds))

        def compute(count: int = count) -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)

        pairs: list[tuple[float, float]] = []
        while len(pairs) < TIMES and (not pairs or own.left() > 5 * seconds):
            alone = Ends(own.once(compute), own.once(operation.run))
            pairs.append(factors(alone, _run_concurrently(device, compute, operation, own)))
        computation, communication = (statistics.median(each) for each in zip(*pairs, strict=True))
        if own.crowd > 1:
            computation = crowded(own.carried(operation.run, TIMES) * own.crowd / (seconds * communication))
        shape = {"m": chosen.m, "k": chosen.k, "n": chosen.n, "precision": precision}
        slow = {"computation": computation, "communication": communication}
        found.append(
            Overlap.model_validate({"kind": kind, "group": layout.group, "bytes": operation.bytes, **shape, **slow})
        )
    return found


def _long_enough(
    lines: Channels, kind: CollectiveKind, at: int, precision: Precision, clock: Clock
) -> tuple[Operation, float]:
    """Return a collective that takes at least ``LEAST`` seconds, if the time allows, and its
    seconds."""
    assert not isinstance(lines.wires[at], NullWire), "every rank is in a group"
    for size in BYTES:
        operation = lines.operation(kind, at, size, torch_dtype(precision))
        clock.once(operation.run)
        seconds = clock.once(operation.run)
        if seconds > LEAST or 4 * 5 * TIMES * seconds > clock.left():
            break
    return operation, seconds  # type: ignore[possibly-undefined]


def _run_concurrently(device: RankDevice, compute: Callable[[], object], operation: Operation, clock: Clock) -> Ends:
    """Return the seconds from a common start to the ends of computation and of communication, each
    of the slowest rank."""
    ended: list[Mark] = []
    begun: list[Mark] = []
    computed: list[Mark] = []
    start = operation.start
    assert start is not None, "wires carry these kinds"

    def both() -> None:
        begun.append(device.mark())
        work = start()
        device.mark_when_done(work, lambda mark, _: ended.append(mark))
        compute()
        computed.append(device.mark())
        work.wait()

    clock.once(both)
    while not ended:  # another thread appends the mark
        time.sleep(1e-4)
    origin, *ends = (device.nanoseconds(each[0]) for each in (begun, computed, ended))
    return Ends(*largest([(end - origin) / 1e9 for end in ends]))

"""How much computation and communication slow each other down: matrix products beside collectives.

Both run alone, then side by side for about as long. Whichever ends first, the other goes on alone at its own
speed; so both factors follow from the two ends (the model of ``plait.core.step.seconds.rates.together``).

Where ranks share cores, when a rank's products end depends on which other ranks have the core meanwhile. What
a collective takes from computation there is the processor time of the threads that carry it, of all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from plait.core.cluster.profile import CollectiveKind, Overlap, Product
from plait.core.model.precision import Precision
from plait.train.comm.wire import NullWire
from plait.train.machine.device import Mark, RankDevice, torch_dtype
from plait.train.profile.clock import Clock, slowest
from plait.train.profile.collectives import Lines, Operation

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather")
BYTES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
LEAST = 2e-2
"""Seconds of a collective that is worth while; shorter ones are all latency."""
TIMES = 5
"""Side by side."""
LARGEST_SHARE = 0.8
"""Of its cores that computation loses to communication; more is noise."""
LEAST_FACTOR = 0.05
"""Noise can make a factor look smaller than that, or negative."""


class Ends(NamedTuple):
    """Seconds of computation and of communication, alone, or from a common start."""

    computation: float
    communication: float


def factors(alone: Ends, beside: Ends) -> tuple[float, float]:
    """How many times as long each takes while the other runs.

    >>> factors(Ends(1.0, 1.0), Ends(1.25, 1.5))
    (1.25, 1.6666666666666667)
    """
    both = min(beside)  # from then on what is left runs alone
    left = beside.computation - both, beside.communication - both
    done = (max(own - rest, own * LEAST_FACTOR) for own, rest in zip(alone, left, strict=True))
    computation, communication = (both / part for part in done)
    return computation, communication


def crowded(share: float) -> float:
    """How many times as long computation takes beside what takes such a share of its cores.

    >>> crowded(0.2)
    1.25
    """
    return 1 / (1 - min(share, LARGEST_SHARE))


def measure_overlaps(
    lines: Lines, products: list[Product], precision: Precision, clock: Clock, say: Callable[[str], object]
) -> list[Overlap]:
    """For every kind and layout: a collective beside as many products as take about as long."""
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
    cases: list[tuple[CollectiveKind, int]] = [(kind, at) for at in range(len(lines.layouts)) for kind in KINDS]
    found: list[Overlap] = []
    for number, (kind, at) in enumerate(cases):
        layout = lines.layouts[at]
        say(f"{kind} beside products, {layout.group}")
        own = clock.part(1 / (len(cases) - number))
        operation, seconds = _long_enough(lines, kind, at, precision, own)
        count = max(1, round(seconds / chosen.seconds))

        def compute(count: int = count) -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)

        pairs: list[tuple[float, float]] = []
        while len(pairs) < TIMES and (not pairs or own.left() > 5 * seconds):
            alone = Ends(own.once(compute), own.once(operation.run))
            pairs.append(factors(alone, _beside(device, compute, operation, own)))
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
    lines: Lines, kind: CollectiveKind, at: int, precision: Precision, clock: Clock
) -> tuple[Operation, float]:
    """A collective that takes a while and still leaves time for others, and its seconds."""
    assert not isinstance(lines.wires[at], NullWire), "every rank is in a group"
    for size in BYTES:
        operation = lines.operation(kind, at, size, torch_dtype(precision))
        clock.once(operation.run)
        seconds = clock.once(operation.run)
        if seconds > LEAST or 4 * 5 * TIMES * seconds > clock.left():
            break
    return operation, seconds  # type: ignore[possibly-undefined]


def _beside(device: RankDevice, compute: Callable[[], object], operation: Operation, clock: Clock) -> Ends:
    """When both have ended, from a common start; of the slowest rank."""
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
    while not ended:  # it is noted by another thread
        time.sleep(1e-4)
    origin, *ends = (device.nanoseconds(each[0]) for each in (begun, computed, ended))
    return Ends(*slowest([(end - origin) / 1e9 for end in ends]))

"""Collectives by how many minipods their groups spread over, and what groups lose to each other that share
the way between minipods."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from importlib.metadata import version

from plait import __version__
from plait.core.base.env import RankEnv
from plait.core.base.errors import JobError
from plait.core.cluster.placement_profile import Interference, PlacementProfile
from plait.core.cluster.profile import CollectiveKind, Group
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.profile.clock import Clock
from plait.train.profile.collectives import EqualGroups, Lines, Operation, measure_collectives
from plait.train.profile.measure import machine_of

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
SHARE = 0.75
"""Of the time, for collectives; interference has the rest."""


def spread_layouts(world: int, per_node: int, nodes_per_minipod: int) -> list[EqualGroups]:
    """Groups of 2, 4, 8, ... ranks that lie evenly in 1, 2, 4, ... minipods and cover the world; neighbours
    of a group are on different nodes, as those of a DP group are.

    >>> [(one.groups, one.group.minipods) for one in spread_layouts(4, 1, 2)][:2]
    [(((0, 1), (2, 3)), 1), (((0, 2), (1, 3)), 2)]
    """
    each = per_node * nodes_per_minipod
    pods = world // each
    # Ranks of a minipod, those with one local number after each other.
    inside = [
        [pod * each + node * per_node + local for local in range(per_node) for node in range(nodes_per_minipod)]
        for pod in range(pods)
    ]
    found: list[EqualGroups] = []
    ranks = 2
    while ranks <= world:
        spread = 1
        while spread <= min(ranks, pods):
            part = ranks // spread
            if pods % spread == 0 and each % part == 0:
                groups = tuple(
                    tuple(sorted(r for pod in range(first, first + spread) for r in inside[pod][at : at + part]))
                    for first in range(0, pods, spread)
                    for at in range(0, each, part)
                )
                group = Group.of(groups[0], per_node, nodes_per_minipod=nodes_per_minipod, at_once=len(groups))
                found.append(EqualGroups(groups, group))
            spread *= 2
        ranks *= 2
    return found


def measure_spreads(
    nodes_per_minipod: int,
    rank: RankEnv,
    device: RankDevice,
    *,
    deadline: float,
    cores: int,
    say: Callable[[str], object],
) -> PlacementProfile:
    """Called by all ranks at the same point; the same on all. Raises JobError where the world is no whole
    number of minipods, or one."""
    nodes = rank.world_size // rank.local_world_size
    if nodes_per_minipod < 1 or nodes % nodes_per_minipod or nodes == nodes_per_minipod:
        raise JobError(
            f"{nodes} nodes are not several minipods of {nodes_per_minipod}", key="--nodes-per-minipod",
            fix="Use a divisor of the nodes, smaller than they are",
        )  # fmt: skip
    clock = Clock(device, deadline)
    found = spread_layouts(rank.world_size, rank.local_world_size, nodes_per_minipod)
    lines = Lines(device, rank.rank, found, rank.local_world_size)
    dtype = torch_dtype("fp32" if device.torch_device.type == "cpu" else "bf16-mixed")
    curves = measure_collectives(lines, clock.part(SHARE), dtype, say, kinds=KINDS)
    sides = _interference(lines, clock, say, {(one.kind, str(one.group)): one.points[-1].bytes for one in curves})
    lines.close()
    return PlacementProfile(
        machine=machine_of(rank, device, cores),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={"plait": __version__, "python": platform.python_version(), "torch": version("torch")}
        | device.versions,
        nodes_per_minipod=nodes_per_minipod,
        collectives=tuple(curves),
        interference=tuple(sides),
    )


def _interference(
    lines: Lines, clock: Clock, say: Callable[[str], object], sizes: dict[tuple[str, str], int]
) -> list[Interference]:
    """Every other group of a layout alone, then all: of pairs, which fill links best."""
    wanted = [
        (at, layout)
        for at, layout in enumerate(lines.layouts)
        if layout.group.ranks == 2 and layout.group.nodes > 1 and len(layout.groups) > 1
    ]
    found: list[Interference] = []
    for number, (at, layout) in enumerate(wanted):
        size = sizes["all_reduce", str(layout.group)]
        say(f"two jobs side by side, all_reduce of {size >> 10} KiB, {layout.group}")
        own = lines.operation("all_reduce", at, size, torch_dtype("fp32"))
        first = any(lines.rank in group for group in layout.groups[::2])
        quiet = Operation(own.bytes, lambda: None)
        budget = clock.left() / (2 * (len(wanted) - number))
        alone = clock.sample((own if first else quiet).run, budget, together=True)
        both = clock.sample(own.run, budget, together=True)
        found.append(
            Interference(
                kind="all_reduce", group=layout.group, bytes=own.bytes, alone=alone.seconds, together=both.seconds
            )
        )
    return found

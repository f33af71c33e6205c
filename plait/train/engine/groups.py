"""Who a rank speaks with: its tensor-parallel, data-parallel and pipeline neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from plait.core.layout import Layout, Mesh, SequenceCut
from plait.core.plan import Plan
from plait.core.sharding import Level, Sharding
from plait.train.comm.log import Log
from plait.train.comm.wire import Wire, open_wire
from plait.train.engine.shards import Axis
from plait.train.model.sequence import ALONE, SequenceGroup

AXES: tuple[Axis, ...] = (*get_args(Level), "secondary")


@dataclass(frozen=True)
class Groups:
    """One rank's place in the layout, and its wires.

    place: which mesh. replica, tp_rank: where in it. tp, world: sums over its tensor-parallel group, all
    ranks. sharding: of the ranks that hold the same weights as this one; shards: its groups, by axis.
    sequence: of those that share its sequences. tied: the places of the first and the last stage, which sum
    the gradient of tied embeddings.
    """

    layout: Layout
    place: int
    replica: int
    tp_rank: int
    tp: Wire
    world: Wire
    tied: Wire
    sharding: Sharding = field(default_factory=Sharding)
    sequence: SequenceGroup = ALONE
    shards: Mapping[Axis, Wire] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """This rank's own."""
        return self.layout.meshes[self.place]


def open_groups(plan: Plan, rank: int, backend: str, log: Log | None = None) -> Groups:
    """This rank's groups, recorded in ``log``. Called by all ranks at the same point."""
    layout, cut = plan.layout, plan.sequence_cut
    place = layout.place_of(rank)
    own, last = layout.meshes[place], plan.schedule.rank_of[len(plan.stages) - 1]

    def open_one(group: Sequence[int], label: str) -> Wire:
        """A group, whether or not this rank is in it."""
        wire = open_wire(backend, group)
        return log.over(wire, group, label) if log and wire.size > 1 else wire

    def open_all(groups: Iterable[tuple[int, ...]], label: str) -> Wire:
        """Every rank opens every group, in one order; this rank's."""
        found = {rank in group: open_one(group, label) for group in sorted(set(groups))}
        return found[True]

    everybody = tuple(range(layout.world_size))
    tp = open_all((mesh.group_of(member, "tp") for mesh in layout.meshes for member in mesh.ranks), "tp")
    shards: dict[Axis, Wire] = {axis: open_all(_shard_groups(layout, plan.shardings, axis), axis) for axis in AXES}
    heads, ring = (open_all(_sequence_groups(layout, cut, kind), kind) for kind in ("ulysses", "ring"))
    ends = sorted({*layout.meshes[0].ranks, *layout.meshes[last].ranks}) if plan.tied else [rank]
    return Groups(
        layout,
        place,
        own.replica(rank),
        own.coordinates(rank)["tp"],
        tp,
        # One tensor-parallel group of everybody sums for everybody: nothing of its own is under way between
        # lists.
        tp if own.group_of(rank, "tp") == everybody else open_one(everybody, "world"),
        open_one(ends, "tied"),
        plan.shardings[place],
        SequenceGroup(heads, ring),
        shards,
    )


def _sequence_groups(layout: Layout, cut: SequenceCut, kind: str) -> Iterator[tuple[int, ...]]:
    """Everybody's group along a way of sharing sequences."""
    for mesh in layout.meshes:
        for member in mesh.ranks:
            along, at = mesh.group_of(member, "cp"), mesh.coordinates(member)["cp"]
            yield tuple(along[i] for i in (cut.ulysses_group(at) if kind == "ulysses" else cut.ring_group(at)))


def _shard_groups(layout: Layout, shardings: Sequence[Sharding], axis: Axis) -> Iterator[tuple[int, ...]]:
    """Everybody's group along an axis of sharding."""
    for mesh, sharding in zip(layout.meshes, shardings, strict=True):
        for member in mesh.ranks:
            replicas, at = mesh.group_of(member, "replicas"), mesh.replica(member)
            group = sharding.neighbours(at) if axis == "secondary" else sharding.group(at, axis, mesh.replicas)
            yield tuple(replicas[i] for i in group)

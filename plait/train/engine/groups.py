"""Who a rank speaks with: its tensor-parallel, data-parallel and pipeline neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

import torch

from plait.core.job.plan import Plan
from plait.core.parallel.layout import Layout, Mesh, SequenceCut
from plait.core.parallel.matrices import sharing
from plait.core.parallel.sharding import Level, Sharding
from plait.core.step.stages import Tie
from plait.train.comm.log import Log
from plait.train.comm.tree import FAN, TreeWire
from plait.train.comm.wire import Exchanger, NullWire, Wire, open_wire, sum_over
from plait.train.engine.shards import Axis
from plait.train.machine.device import RankDevice
from plait.train.model.sequence import ALONE, SequenceGroup

UNTIED = Tie((), 0, 0, True)
AXES: tuple[Axis, ...] = (*get_args(Level), "secondary")


@dataclass(frozen=True)
class Groups:
    """One rank's place in the layout, and its wires.

    place: which mesh. replica, tp_rank: where in it. tp, world: sums over its tensor-parallel group, all
    ranks. sharding: of the ranks that hold the same weights as this one; shards: its groups, by axis.
    sequence: of those that share its sequences. tied: of those in the first and the last stage with whom it
    sums the gradient of tied embeddings; tie: which part. matrices: of those with whom it shares matrices
    that an optimizer needs whole."""

    layout: Layout
    place: int
    replica: int
    tp_rank: int
    tp: Wire
    world: Wire
    tied: Wire
    sharding: Sharding = field(default_factory=Sharding)
    matrices: Exchanger = field(default_factory=NullWire)
    sequence: SequenceGroup = ALONE
    shards: Mapping[Axis, Wire] = field(default_factory=dict)
    tie: Tie = UNTIED

    @property
    def mesh(self) -> Mesh:
        """This rank's own."""
        return self.layout.meshes[self.place]


def open_groups(plan: Plan, rank: int, device: RankDevice, log: Log | None = None) -> Groups:
    """This rank's groups, recorded in ``log``. Called by all ranks at the same point.

    A rank opens the groups that it is in, and no other. Kinds of groups come in one order, and of each kind a
    rank is in one: so no two ranks open two groups that they share in different orders.

    gloo gets no group of more ranks than a tree's star has: what concerns all of them goes over the tree.
    """
    layout, cut = plan.layout, plan.sequence_cut
    place = layout.place_of(rank)
    own, tie = layout.meshes[place], plan.tie(rank)

    def open_one(group: Sequence[int], label: str) -> Wire:
        """A group that this rank is in."""
        if label == "world" and device.backend == "gloo" and len(group) > FAN + 1:
            wire: Wire = TreeWire()
        else:
            wire = _connected(open_wire(device.backend, group, urgent=label == "tp"), device)
        return log.over(wire, group, label) if log and wire.size > 1 else wire

    everybody, muon = tuple(range(layout.world_size)), plan.workload.optimizer == "muon"
    tp = open_one(own.group_of(rank, "tp"), "tp")
    shards: dict[Axis, Wire] = {
        axis: open_one(_shard_group(own, rank, plan.shardings[place], axis), axis) for axis in AXES
    }
    heads, ring = (open_one(_sequence_group(own, rank, cut, kind), kind) for kind in ("ulysses", "ring"))
    return Groups(
        layout,
        place,
        own.replica(rank),
        own.coordinates(rank)["tp"],
        tp,
        # One tensor-parallel group of everybody sums for everybody: nothing of its own is under way between
        # lists.
        tp if own.group_of(rank, "tp") == everybody else open_one(everybody, "world"),
        open_one(tie.ranks, "tied"),
        plan.shardings[place],
        cast("Exchanger", open_one(sharing(own, plan.shardings[place], rank) if muon else (rank,), "matrices")),
        SequenceGroup(heads, ring),
        shards,
        tie,
    )


def _connected(wire: Wire, device: RankDevice) -> Wire:
    """The wire, over which a first number has gone. NCCL connects ranks by their first collective, and may
    wait for the whole device meanwhile, hence for a message that is posted; gloo connects when it opens."""
    if wire.size > 1 and device.backend != "gloo":
        sum_over(wire, torch.zeros(1, device=device.torch_device))
        device.synchronize()
    return wire


def _sequence_group(mesh: Mesh, rank: int, cut: SequenceCut, kind: str) -> tuple[int, ...]:
    """A rank's along a way of sharing sequences."""
    along, at = mesh.group_of(rank, "cp"), mesh.coordinates(rank)["cp"]
    return tuple(along[i] for i in (cut.ulysses_group(at) if kind == "ulysses" else cut.ring_group(at)))


def _shard_group(mesh: Mesh, rank: int, sharding: Sharding, axis: Axis) -> tuple[int, ...]:
    """A rank's along an axis of sharding."""
    replicas, at = mesh.group_of(rank, "replicas"), mesh.replica(rank)
    group = sharding.neighbours(at) if axis == "secondary" else sharding.group(at, axis, mesh.replicas)
    return tuple(replicas[i] for i in group)

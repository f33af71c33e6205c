"""Process groups of a rank: tensor-parallel, data-parallel, sequence-parallel, and the world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch

from plait.core.job.plan import Plan
from plait.core.parallel.layout import ContextSplit, ExpertMesh, Layout, Mesh
from plait.core.parallel.sharding import EXPERTS, Level, Sharding, sharing
from plait.core.step.stages import TiedGradient
from plait.train.comm.log import Log
from plait.train.comm.tree import FAN, TreeWire
from plait.train.comm.wire import Exchanger, NullWire, Wire, open_wire, sum_over
from plait.train.engine.shards import Axis
from plait.train.machine.device import RankDevice
from plait.train.model.expert_layer import ALL_EXPERTS, ExpertGroup
from plait.train.model.sequence import ALONE, SequenceGroup

UNTIED = TiedGradient((), 0, 0, True)
AXES: tuple[Axis, ...] = (*get_args(Level), "secondary")


@dataclass(frozen=True)
class Groups:
    """One rank's coordinates in the layout, and its process groups.

    pp_rank: index of its mesh (pipeline rank). replica, tp_rank: coordinates in the mesh. tp,
    world: sums over its tensor-parallel group, and over all ranks. sharding: sizes of the sharding
    levels over ranks that hold the same weights; shards: the groups, by axis. sequence: groups that
    share its sequences. tied: the ranks of first and last stage with which it sums the gradient of
    tied embeddings; tie: which part. matrices: the ranks with which it shares matrices that Muon
    needs whole. experts: the groups in which experts are shared out; expert_sharding,
    expert_shards, expert_rank: of routed experts, as ``sharding``, ``shards`` and ``replica`` are of
    other parameters.
    """

    layout: Layout
    pp_rank: int
    replica: int
    tp_rank: int
    tp: Wire
    world: Wire
    tied: Wire
    sharding: Sharding = field(default_factory=Sharding)
    matrices: Exchanger = field(default_factory=NullWire)
    sequence: SequenceGroup = ALONE
    shards: Mapping[Axis, Wire] = field(default_factory=dict)
    tie: TiedGradient = UNTIED
    experts: ExpertGroup = ALL_EXPERTS
    expert_sharding: Sharding = field(default_factory=Sharding)
    expert_shards: Mapping[Axis, Wire] = field(default_factory=dict)
    expert_mesh: ExpertMesh = field(default_factory=lambda: ExpertMesh(Mesh(0)))
    expert_rank: int = 0

    @property
    def expert_factor(self) -> float:
        """Copies of other parameters on ranks, over those of routed experts."""
        own = self.expert_sharding.optim / self.expert_mesh.replicas
        return own / (self.sharding.optim / self.mesh.replicas)

    @property
    def wires(self) -> dict[str, Mapping[Axis, Wire]]:
        """The groups of every axis of sharding, by kind of unit; "" for all kinds but experts."""
        return {"": self.shards, EXPERTS: self.expert_shards}

    @property
    def mesh(self) -> Mesh:
        """The mesh of this rank."""
        return self.layout.meshes[self.pp_rank]


def open_groups(plan: Plan, rank: int, device: RankDevice, log: Log | None = None) -> Groups:
    """Open this rank's process groups, recorded in ``log``. Called by all ranks at the same point.

    A rank opens only the groups that it belongs to. Kinds of groups come in one order, and a rank
    is in one group of each kind. So no two ranks open two shared groups in different orders.

    gloo gets no group of more ranks than a tree's star has: collectives of the world use the tree.
    """
    layout, cut = plan.layout, plan.sequence_cut
    pp_rank = layout.pp_rank_of(rank)
    own, tie = layout.meshes[pp_rank], plan.tie(rank)

    def open_group(group: Sequence[int], label: str) -> Wire:
        if label == "world" and device.backend == "gloo" and len(group) > FAN + 1:
            wire: Wire = TreeWire()
        else:
            wire = _connected(open_wire(device.backend, group, urgent=label == "tp"), device)
        return log.over(wire, group, label) if log and wire.size > 1 else wire

    everybody, muon = tuple(range(layout.world_size)), plan.workload.optimizer == "muon"
    tp = open_group(own.group_of(rank, "tp"), "tp")
    shards: dict[Axis, Wire] = {
        axis: open_group(_shard_group(own, rank, plan.shardings[pp_rank], axis), axis) for axis in AXES
    }
    heads, ring = (open_group(_sequence_group(own, rank, cut, kind), kind) for kind in ("ulysses", "ring"))
    experts = _expert_groups(plan, own, rank, open_group) if plan.model.experts else {}
    return Groups(
        layout,
        pp_rank,
        own.replica(rank),
        own.coordinates(rank)["tp"],
        tp,
        # A tensor-parallel group of all ranks is also the world: between lists it runs no collective.
        tp if own.group_of(rank, "tp") == everybody else open_group(everybody, "world"),
        open_group(tie.ranks, "tied"),
        plan.shardings[pp_rank],
        cast("Exchanger", open_group(sharing(own, plan.shardings[pp_rank], rank) if muon else (rank,), "matrices")),
        SequenceGroup(heads, ring),
        shards,
        tie,
        **experts,
    )


def _expert_groups(
    plan: Plan, own: Mesh, rank: int, open_group: Callable[[Sequence[int], str], Wire]
) -> dict[str, Any]:
    """Return the fields of ``Groups`` about experts."""
    settings, strategy = plan.model.experts, plan.strategy
    assert settings is not None
    mesh = ExpertMesh(own, strategy.ep, strategy.whole_experts)
    sharding = plan.shardings[plan.layout.pp_rank_of(rank)].of_experts(
        strategy.ep, own.tp if strategy.whole_experts else 1
    )
    ep, replicas, at = mesh.group_of(rank), mesh.replicas_of(rank), mesh.replica(rank)
    counted = mesh.everyone(rank) if settings.balance == "dp" and settings.balance_loss else ep

    def shards(axis: Axis) -> tuple[int, ...]:
        found = sharding.neighbours(at) if axis == "secondary" else sharding.group(at, axis, len(replicas))
        return tuple(replicas[i] for i in found)

    exchanged, routes = open_group(ep, "ep"), open_group(mesh.sequence_of(rank), "routes")
    counts = exchanged if counted == ep else open_group(counted, "counts")
    held = mesh.experts(rank, settings.count)
    return {
        "experts": ExpertGroup(cast("Exchanger", exchanged), counts, routes, counted.index(ep[0]), held),
        "expert_sharding": sharding,
        "expert_shards": {axis: open_group(shards(axis), f"experts {axis}") for axis in AXES},
        "expert_mesh": mesh,
        "expert_rank": at,
    }


def _connected(wire: Wire, device: RankDevice) -> Wire:
    """Return the wire after a first sum over it. NCCL connects ranks at their first collective, and
    may wait for the whole device, hence for a message that is posted; gloo connects when it
    opens."""
    if wire.size > 1 and device.backend != "gloo":
        sum_over(wire, torch.zeros(1, device=device.torch_device))
        device.synchronize()
    return wire


def _sequence_group(mesh: Mesh, rank: int, cut: ContextSplit, kind: str) -> tuple[int, ...]:
    """Return the ranks with which a rank shares sequences, of one kind: ``ulysses`` or ``ring``."""
    along, at = mesh.group_of(rank, "cp"), mesh.coordinates(rank)["cp"]
    return tuple(along[i] for i in (cut.ulysses_group(at) if kind == "ulysses" else cut.ring_group(at)))


def _shard_group(mesh: Mesh, rank: int, sharding: Sharding, axis: Axis) -> tuple[int, ...]:
    """Return the ranks of a rank's group along one axis of sharding (``params``, ``grads``,
    ...)."""
    replicas, at = mesh.group_of(rank, "replicas"), mesh.replica(rank)
    group = sharding.neighbours(at) if axis == "secondary" else sharding.group(at, axis, mesh.replicas)
    return tuple(replicas[i] for i in group)

"""Who a rank speaks with, and what is completed with whom: tensor-parallel, data-parallel and pipeline
neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from plait.core.layout import Layout, Mesh, SequenceCut
from plait.core.plan import Plan
from plait.core.sharding import Level, Sharding
from plait.train.comm.wire import NullWire, Wire, open_wire, sum_over
from plait.train.engine.gradients import Gradients
from plait.train.engine.shards import Axis, Shards
from plait.train.model.sequence import ALONE, SequenceGroup

TIED = "embedding.weight"
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

    def complete(self, gradients: Gradients, shards: Shards | None, *, sequence_parallel: bool) -> None:
        """Sum what several ranks have seen parts of; afterwards every optimizer has the whole gradient of
        what it updates."""
        if shards:
            shards.complete()
        gradients.finish(self.tp, sequence_parallel=sequence_parallel)
        ties = self.tied.size > 1 or any(held.piece.copy for held, _ in gradients.held)
        copies = [(held, view) for held, view in gradients.held if held.piece.name == TIED] if ties else []
        if copies or self.tied.size > 1:
            total = gradients.flat.new_zeros((gradients.model.spec.vocab, gradients.model.spec.hidden))
            # Places may cut the vocabulary differently: every range at its place in the whole, each once.
            if self.replica < self.sharding.optim:
                for held, view in copies:
                    total[held.box.slices] += view
            sum_over(self.tied, total)
            for held, view in copies:
                view.copy_(total[held.box.slices])

    def sum_loss(self, loss: Tensor) -> float:
        """The job's loss from each rank's, 0 without a head; the same on every rank."""
        return sum_over(self.world, loss.double() * (self.tp_rank == 0)).item()

    def totals(self, gradients: Gradients, loss: Tensor, wish: bool) -> tuple[float, float, bool]:
        """(loss, squared gradient norm, whether any rank wishes to stop) of the whole job. loss: this rank's,
        0 without a head."""
        square = gradients.norm_square() * self.sharding.optim / self.mesh.replicas
        mine = torch.stack((loss.double() * (self.tp_rank == 0), square, torch.full_like(square, float(wish))))
        total, norm_square, wishes = sum_over(self.world, mine).tolist()
        return total, norm_square, wishes > 0


def alone(tp: Wire) -> Groups:
    """A model that is not cut into stages, over one tensor-parallel group: for programs that have no plan."""
    return Groups(Layout.of(tp=tp.size), 0, 0, tp.rank, tp, tp, NullWire())


def open_groups(plan: Plan, rank: int, backend: str) -> Groups:
    """This rank's groups. Called by all ranks at the same point."""
    layout, cut = plan.layout, plan.sequence_cut
    place = layout.place_of(rank)
    own, last = layout.meshes[place], plan.schedule.rank_of[len(plan.stages) - 1]

    def open_all(groups: Iterable[tuple[int, ...]]) -> Wire:
        """Every rank opens every group, in one order; this rank's."""
        found = {rank in group: open_wire(backend, group) for group in sorted(set(groups))}
        return found[True]

    everybody = tuple(range(layout.world_size))
    tp = open_all(mesh.group_of(member, "tp") for mesh in layout.meshes for member in mesh.ranks)
    shards: dict[Axis, Wire] = {axis: open_all(_shard_groups(layout, plan.shardings, axis)) for axis in AXES}
    heads, ring = (open_all(_sequence_groups(layout, cut, kind)) for kind in ("ulysses", "ring"))
    ends = sorted({*layout.meshes[0].ranks, *layout.meshes[last].ranks}) if plan.tied else [rank]
    return Groups(
        layout,
        place,
        own.replica(rank),
        own.coordinates(rank)["tp"],
        tp,
        # One tensor-parallel group of everybody sums for everybody: nothing of its own is under way between
        # lists.
        tp if own.group_of(rank, "tp") == everybody else open_wire(backend, everybody),
        open_wire(backend, ends),
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

"""Who a rank speaks with, and what is completed with whom: tensor-parallel, data-parallel and pipeline neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.core.layout import Mesh
from plait.train.gradients import Gradients
from plait.train.wire import NullWire, Wire, open_wire, sum_over

TIED = "embedding.weight"


@dataclass(frozen=True)
class Groups:
    """One rank's place in a pipeline of meshes, and its wires.

    place: which mesh. dp_rank, tp_rank: where in it. tp, dp, world: sums over its tensor-parallel group, its data-parallel group, all
    ranks. tied: the places of the first and the last stage, which sum the gradient of tied embeddings.
    """

    meshes: tuple[Mesh, ...]
    place: int
    dp_rank: int
    tp_rank: int
    tp: Wire
    dp: Wire
    world: Wire
    tied: Wire

    @property
    def mesh(self) -> Mesh:
        """This rank's own."""
        return self.meshes[self.place]

    def complete(self, gradients: Gradients, *, sequence_parallel: bool) -> None:
        """Sum what several ranks have seen parts of; afterwards every copy of a number has its whole gradient."""
        gradients.finish(self.tp, sequence_parallel=sequence_parallel)
        sum_over(self.dp, gradients.flat)
        copies = [piece for piece in gradients.model.pieces if piece.name == TIED]
        if copies and (len(copies) > 1 or self.tied.size > 1):
            views = [piece.view(gradients.named[piece.parameter]) for piece in copies]
            total = views[0].new_zeros(copies[0].shape)
            # Meshes may cut the vocabulary differently: every range at its place in the whole, each once.
            if self.dp_rank == 0:
                for piece, view in zip(copies, views, strict=True):
                    piece.cut(total).add_(view)
            sum_over(self.tied, total)
            for piece, view in zip(copies, views, strict=True):
                view.copy_(piece.cut(total))

    def sum_loss(self, loss: Tensor) -> float:
        """The job's loss from each rank's, 0 without a head; the same on every rank."""
        return sum_over(self.world, loss.double() * (self.tp_rank == 0)).item()

    def totals(self, gradients: Gradients, loss: Tensor, wish: bool) -> tuple[float, float, bool]:
        """(loss, squared gradient norm, whether any rank wishes to stop) of the whole job. loss: this rank's, 0 without a head."""
        square = gradients.norm_square() / self.mesh.dp
        mine = torch.stack((loss.double() * (self.tp_rank == 0), square, torch.full_like(square, float(wish))))
        total, norm_square, wishes = sum_over(self.world, mine).tolist()
        return total, norm_square, wishes > 0


def one_place(tp: Wire) -> Groups:
    """A model that is not cut into stages, over one tensor-parallel group."""
    return Groups((Mesh(0, tp=tp.size),), 0, 0, tp.rank, tp, NullWire(), tp, NullWire())


def open_groups(meshes: Sequence[Mesh], rank: int, backend: str, *, last: int = -1, tied: bool = False) -> Groups:
    """This rank's groups. Called by all ranks at the same point.

    last: the place of the last stage. tied: whether two stages hold the embedding.
    """
    place = next(i for i, mesh in enumerate(meshes) if rank in mesh.ranks)
    own = meshes[place]

    def along(axis: str) -> Wire:
        found: dict[bool, Wire] = {}
        for mesh in meshes:
            for group in sorted({mesh.group_of(member, axis) for member in mesh.ranks}):  # type: ignore[arg-type]
                found[rank in group] = open_wire(backend, group)
        return found[True]

    ends = sorted({*meshes[0].ranks, *meshes[last].ranks}) if tied else [rank]
    dp_rank, tp_rank = own.coordinates(rank)
    tp, dp, world = along("tp"), along("dp"), open_wire(backend, range(meshes[-1].ranks.stop))
    return Groups(tuple(meshes), place, dp_rank, tp_rank, tp, dp, world, open_wire(backend, ends))

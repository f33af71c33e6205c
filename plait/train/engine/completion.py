"""Completing a step: gradients that several ranks have seen parts of, the loss and the norm of the whole
job."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.train.comm.wire import sum_over
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups
from plait.train.engine.shards import Shards

TIED = "embedding.weight"


def complete(gradients: Gradients, groups: Groups, shards: Shards | None, *, sequence_parallel: bool) -> None:
    """Sum what several ranks have seen parts of; afterwards every optimizer has the whole gradient of what it
    updates."""
    if shards:
        shards.complete()
    gradients.finish(groups.tp, sequence_parallel=sequence_parallel)
    ties = groups.tied.size > 1 or any(held.piece.copy for held, _ in gradients.held)
    copies = [(held, view) for held, view in gradients.held if held.piece.name == TIED] if ties else []
    if copies or groups.tied.size > 1:
        total = gradients.flat.new_zeros((gradients.model.spec.vocab, gradients.model.spec.hidden))
        # Places may cut the vocabulary differently: every range at its place in the whole, each once.
        if groups.replica < groups.sharding.optim:
            for held, view in copies:
                total[held.box.slices] += view
        sum_over(groups.tied, total)
        for held, view in copies:
            view.copy_(total[held.box.slices])


def sum_loss(loss: Tensor, groups: Groups) -> float:
    """The job's loss from each rank's, 0 without a head; the same on every rank."""
    return sum_over(groups.world, loss.double() * (groups.tp_rank == 0)).item()


def totals(gradients: Gradients, groups: Groups, loss: Tensor, wish: bool) -> tuple[float, float, bool]:
    """(loss, squared gradient norm, whether any rank wishes to stop) of the whole job. loss: this rank's, 0
    without a head."""
    square = gradients.norm_square() * groups.sharding.optim / groups.mesh.replicas
    mine = torch.stack((loss.double() * (groups.tp_rank == 0), square, torch.full_like(square, float(wish))))
    total, norm_square, wishes = sum_over(groups.world, mine).tolist()
    return total, norm_square, wishes > 0

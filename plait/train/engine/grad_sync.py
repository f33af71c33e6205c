"""Completing a step: gradients that several ranks have seen parts of, the loss and the norm of the whole
job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.train.comm.wire import sum_over
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups
from plait.train.engine.shards import Shards
from plait.train.model.units import ShardBox

TIED = "embedding.weight"


def complete(gradients: Gradients, groups: Groups, shards: Shards | None, *, sequence_parallel: bool) -> None:
    """Sum what several ranks have seen parts of; afterwards every optimizer has the whole gradient of what it
    updates."""
    if shards:
        shards.complete()
    gradients.finish(groups.tp, sequence_parallel=sequence_parallel)
    tied = [(held, view) for held, view in gradients.held if held.piece.name == TIED]
    if groups.tied.size > 1 or any(held.piece.copy for held, _ in tied):
        _sum_tied(gradients, groups, tied)


def _sum_tied(gradients: Gradients, groups: Groups, tied: Sequence[tuple[ShardBox, Tensor]]) -> None:
    """What the first and the last stage have each summed of the embedding's gradient, added up. tied: what
    this rank has of it."""
    tie, hidden = groups.tie, gradients.model.spec.hidden
    total = gradients.flat.new_zeros(tie.numbers)

    def part(held: ShardBox) -> Tensor:
        first = held.box.start[0] * hidden + held.box.start[1] - tie.start
        return total[first : first + held.box.elements].view(held.box.shape)

    for held, view in tied if tie.counts else ():
        part(held).add_(view)
    sum_over(groups.tied, total)
    for held, view in tied:
        view.copy_(part(held))


class Wishes(NamedTuple):
    """What a rank may ask of all after a step, or a part of an evaluation: to stop."""

    stop: bool = False


NONE = Wishes()


def sum_loss(loss: Tensor, groups: Groups, wishes: Wishes = NONE) -> tuple[float, Wishes]:
    """The job's loss from each rank's, 0 without a head, and what any rank wishes; the same on every rank."""
    wished = (torch.full_like(loss, float(wish), dtype=torch.float64) for wish in wishes)
    total, *counts = sum_over(groups.world, torch.stack((_counted(loss, groups), *wished))).tolist()
    return total, Wishes(*(count > 0 for count in counts))


def _counted(loss: Tensor, groups: Groups) -> Tensor:
    """What this rank adds to the job's loss: ranks of a tensor-parallel group have the same."""
    return loss.double() * (groups.tp_rank == 0)


def totals(gradients: Gradients, groups: Groups, loss: Tensor, wishes: Wishes) -> tuple[float, float, Wishes]:
    """(loss, squared gradient norm, what any rank wishes) of the whole job. loss: this rank's, 0 without a
    head."""
    square = gradients.norm_square() * groups.sharding.optim / groups.mesh.replicas
    wished = (torch.full_like(square, float(wish)) for wish in wishes)
    mine = torch.stack((_counted(loss, groups), square, *wished))
    total, norm_square, *counts = sum_over(groups.world, mine).tolist()
    return total, norm_square, Wishes(*(count > 0 for count in counts))
